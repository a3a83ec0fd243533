"""Seriatim: ordered, stateful streams from Kafka into Delta tables, with proof.

Start reading at docs/ARCHITECTURE.md; the heart is `seriatim.core`, the verbs are `seriatim.steps`.
"""

from seriatim.engine.machine import Machine

__version__ = "0.1.0"
__all__ = ["Machine"]
