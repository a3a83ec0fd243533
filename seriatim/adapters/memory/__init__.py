"""The fakes: every port in memory, held to the same contract tests as the real adapters.

They are part of the product: `seriatim.testing` ships them, so that users' tests need no broker, no
Spark and no disk. They can be told to misbehave as the real ones do: lost answers, lost messages,
topics deleted under a reader, foreign commits, files half written.

Next room: ports.py says what each must do; tests/sim drives the real steps over these.
"""

from seriatim.adapters.memory.ask import MemoryRequests  # noqa: TID251  # its own rooms
from seriatim.adapters.memory.check import MemoryChecker, MemorySight  # noqa: TID251  # its own rooms
from seriatim.adapters.memory.current import MemoryCurrent  # noqa: TID251  # its own rooms
from seriatim.adapters.memory.derived import MemoryDerived  # noqa: TID251  # its own rooms
from seriatim.adapters.memory.files import MemoryDigests, MemoryFiles  # noqa: TID251  # its own rooms
from seriatim.adapters.memory.kafka import MemoryBatches, MemoryKafka, MemoryMessage, MemoryReader  # noqa: TID251
from seriatim.adapters.memory.ledger import MemoryClock, MemoryLedger  # noqa: TID251

__all__ = [
    "MemoryBatches",
    "MemoryChecker",
    "MemoryClock",
    "MemoryCurrent",
    "MemoryDerived",
    "MemoryDigests",
    "MemoryFiles",
    "MemoryKafka",
    "MemoryLedger",
    "MemoryMessage",
    "MemoryReader",
    "MemoryRequests",
    "MemorySight",
]
