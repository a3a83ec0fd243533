"""Repairs of worlds in memory, for tests.

Next room: worlds.py makes the worlds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.repair import Request
from seriatim.steps.repair import Mending, Refolded, Repairing, plan
from seriatim.testing import MemoryStream


class MemoryReread:
    """Messages of the past, read again."""

    def __init__(self, made: MemoryStream) -> None:
        self.made = made

    def read(self, partition: Partition, whole: OffsetRange) -> Iterator[Any]:
        """Those of a range that are there."""
        yield from self.made.reader.stretches(partition, whole, headers=False)

    def compacts(self, _: str) -> bool:
        """No topic does."""
        return False


def mending(made: MemoryStream) -> Mending:
    """What a repair of a world is made with."""
    folding = made.folding()
    return Mending(stream=made.stream, runner=folding.runner, world=folding.world, reread=MemoryReread(made))


def repair(made: MemoryStream, messages_max: int = 1_000_000, **request: Any) -> Refolded:
    """Plan and apply, as one command does."""
    tools = mending(made)
    return Repairing(tools).apply(plan(tools, Request(**request)), messages_max)


def table(made: MemoryStream, partition: Partition) -> list[dict[str, Any]]:
    """A partition's records by offset and index, without what a refold may change."""
    return sorted(made.rows(partition), key=lambda row: (row["offset"], row["index"]))
