"""The fakes: every port in memory, held to the same contract tests as the real adapters.

They are part of the product: `seriatim.testing` ships them, so that users' tests need no broker, no
Spark and no disk. They can be set to misbehave as the real ones do: lost answers, lost messages,
topics deleted under a reader, foreign commits, files half written.

Next: ports.py says what each must do; tests/sim drives the real steps over these.
"""

from seriatim.memory.check import MemoryChecker, MemorySight
from seriatim.memory.files import MemoryDigests, MemoryFiles
from seriatim.memory.kafka import (
    MemoryBatches,
    MemoryKafka,
    MemoryMessage,
    MemoryPastReader,
    MemoryReader,
    MemorySchemas,
)
from seriatim.memory.ledger import MemoryClock, MemoryLedger
from seriatim.memory.outgoing import MemoryRequests
from seriatim.memory.stream import MemoryStream, OpenMemoryStream
from seriatim.memory.tables import MemoryCurrent, MemoryDerived

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
    "MemoryPastReader",
    "MemoryReader",
    "MemoryRequests",
    "MemorySchemas",
    "MemorySight",
    "MemoryStream",
    "OpenMemoryStream",
]
