"""Retry: fold works in tasks, and fold them again where the first try could not know enough.

A work is folded again for one of three reasons:

- Messages were quarantined. They are stored with their headers, which are only read on request.
  (A hot partition that helpers fold asks for the same, when anything but the usual happens.)
- The machine raised. It may have left a state half changed, so that its sessions are folded again
  in a way that can be undone.
- A session moved here from another partition. That is only known once all partitions are folded.

Next: engine/task.py is one try; operations/run.py and operations/repair/refold.py make the works.
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
"""A machine that raises needs three tries at most (from where it raised, from the first message,
each message by itself), and sessions that moved need one. The others are for machines that do not
behave the same each time.
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
    """Fold the works, and fold some of them again until no result asks for another try.

    1. Fold all works.
    2. Find the works that have to be folded again. If there are none, return the results.
    3. Fold those again, with headers and with what was learned, and go on with step 2.

    A machine whose results never become stable is refused.
    """
    # 1. Fold all works.
    works = _with_shares(works)
    first_attempts = {partition: work.attempt for partition, work in works.items()}
    contents = source.map(make_task(works), has_small_messages=has_small_messages)
    results = results_by_partition(contents)
    for try_number in range(FOLD_TRIES_MAX):
        # 2. Find the works that have to be folded again. Sessions that moved are only looked for
        # when all other results are final, because a result to be replaced could mislead.
        raised_sessions = {}
        for partition, result in results.items():
            if result.raised_sessions or result.lacks_headers:
                raised_sessions[partition] = result.raised_sessions
        moved_sessions = {} if raised_sessions else find_moved(works, results)
        unstable_partitions = {**raised_sessions, **moved_sessions}
        if not unstable_partitions:
            return results
        # 3. Fold those again.
        retried_works = {}
        for partition in unstable_partitions:
            work = works[partition]
            retried_works[partition] = replace(
                work,
                undoable=work.undoable | raised_sessions.get(partition, {}),
                moved_sessions=work.moved_sessions | moved_sessions.get(partition, {}),
                attempt=f"{first_attempts[partition]}r{try_number}",
                share=0.0,
            )
        works = works | retried_works
        results |= _fold_with_headers(retried_works, reader, make_task)
    names = ", ".join(str(partition) for partition in unstable_partitions)
    raise ConfigError(
        f"{stream}: the machine raises at other messages each time ({names})",
        next="make `apply` depend on nothing but its state and message; seriatim.testing runs it in milliseconds",
    )


def _fold_with_headers(
    works: WorkByPartition, reader: Reader, make_task: Callable[[WorkByPartition], Task]
) -> ResultByPartition:
    ranges = {partition: OffsetRange(work.start, work.end) for partition, work in works.items()}
    source = reader.read_ranges(ranges, ReadOptions(with_headers=True))
    return results_by_partition(source.map(make_task(works)))


def _with_shares(works: WorkByPartition) -> WorkByPartition:
    """The works, each with its share of all messages of the slice."""
    total = sum(work.end - work.start for work in works.values()) or 1
    shared_works = {}
    for partition, work in works.items():
        shared_works[partition] = replace(work, share=(work.end - work.start) / total)
    return shared_works
