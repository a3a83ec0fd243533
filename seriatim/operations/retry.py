"""Tries: works folded by their tasks, and folded again where a first try could not know enough.

Messages that are set aside are kept with their headers, which are read only then. A machine that
raised may have left a state half changed: those sessions are folded with care. A session that moved
is known only when all partitions are.

Next room: engine/task.py is one try; operations/run.py and operations/repair/refold.py make the
works.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.errors import ConfigError
from seriatim.operations.changes import results_by_partition
from seriatim.operations.moved_sessions import MovedSessions
from seriatim.ports import Reader, ReadOptions, Source, Task

FOLD_TRIES_MAX = 7
"""Three are needed at most for a machine that raises (from where it raised, from the first message,
each message by itself) and one for sessions that moved. The others are for machines that do not do
the same each time.
"""
WorkByPartition = dict[Partition, PartitionWork]
ResultByPartition = dict[Partition, TaskResult]


def fold_until_stable(
    stream: str,
    works: WorkByPartition,
    source: Source,
    reader: Reader,
    make_task: Callable[[WorkByPartition], Task],
    find_moved: Callable[[WorkByPartition, ResultByPartition], MovedSessions],
    *,
    has_small_messages: bool = False,
) -> ResultByPartition:
    """What the tasks gave, once none of them has to be done again."""
    total = sum(work.end - work.start for work in works.values()) or 1
    first = works = {
        p: replace(work, share=(work.end - work.start) / total) for p, work in works.items()
    }
    results = results_by_partition(
        source.map(make_task(works), has_small_messages=has_small_messages)
    )
    for number in range(FOLD_TRIES_MAX):
        again = {
            p: result.raised_sessions
            for p, result in results.items()
            if result.raised_sessions or result.lacks_headers
        }
        homes = {} if again else find_moved(works, results)
        again |= {partition: {} for partition in homes}
        if not again:
            return results
        redo = {
            partition: replace(
                work,
                undoable=work.undoable | again[partition],
                moved_sessions=work.moved_sessions | homes.get(partition, {}),
                attempt=f"{first[partition].attempt}r{number}",
                share=0.0,
            )
            for partition, work in works.items()
            if partition in again
        }
        works = works | redo
        ranges = {partition: OffsetRange(work.start, work.end) for partition, work in redo.items()}
        source = reader.read_ranges(ranges, ReadOptions(with_headers=True))
        results |= results_by_partition(source.map(make_task(redo)))
    raise ConfigError(
        f"{stream}: the machine raises at other messages each time ({', '.join(map(str, again))})",
        next="make `apply` depend on nothing but its state and message; seriatim.testing runs it in milliseconds",
    )
