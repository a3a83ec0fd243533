"""Seriatim: ordered, stateful streams from Kafka into Delta tables, with proof.

Start reading at docs/ARCHITECTURE.md. `seriatim.engine` folds messages; `seriatim.operations` has one
module per command.
"""

from seriatim.engine.decoding import PlainDecoder
from seriatim.engine.machine import Machine
from seriatim.engine.messages import Poison

__version__ = "0.2.0"
__all__ = ["Machine", "PlainDecoder", "Poison"]
