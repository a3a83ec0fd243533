"""Seriatim: ordered, stateful streams from Kafka into Delta tables, with proof.

Start reading at docs/ARCHITECTURE.md. `seriatim.engine` folds messages; `seriatim.operations` has one
module per command.
"""

from seriatim.engine.machine import Machine

__version__ = "0.1.0"
__all__ = ["Machine"]
