"""Tries: works folded by their tasks, and folded again where a first try could not know enough.

Messages that are set aside are kept with their headers, which are read only then. A machine that raised may have
left a state half changed: those sessions are folded with care. A session that moved is known only when all
partitions are.

Next room: steps/task.py is one try; steps/fold.py and steps/refold.py make the works.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from seriatim.core.errors import ConfigError
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.ports import Reader, Source, Task, Wish
from seriatim.steps.changes import by_partition
from seriatim.steps.moved import Moved
from seriatim.steps.task import Result, Work

TRIES_MAX = 7
"""Three are needed at most for a machine that raises (from where it raised, from the first message, each message by
itself) and one for sessions that moved. The others are for machines that do not do the same each time."""
Works = dict[Partition, Work]
Results = dict[Partition, Result]


def fold_works(
    stream: str,
    works: Works,
    source: Source,
    reader: Reader,
    task: Callable[[Works], Task],
    moved: Callable[[Works, Results], Moved],
    *,
    small: bool = False,
) -> Results:
    """What the tasks gave, once none of them has to be done again."""
    total = sum(work.end - work.start for work in works.values()) or 1
    first = works = {p: replace(work, share=(work.end - work.start) / total) for p, work in works.items()}
    results = by_partition(source.map(task(works), small=small))
    for number in range(TRIES_MAX):
        again = {p: result.raised for p, result in results.items() if result.raised or result.lacks_headers}
        homes = {} if again else moved(works, results)
        again |= {partition: {} for partition in homes}
        if not again:
            return results
        redo = {
            partition: replace(
                work,
                careful=work.careful | again[partition],
                moved=work.moved | homes.get(partition, {}),
                attempt=f"{first[partition].attempt}r{number}",
                share=0.0,
            )
            for partition, work in works.items()
            if partition in again
        }
        works = works | redo
        ranges = {partition: OffsetRange(work.start, work.end) for partition, work in redo.items()}
        source = reader.exactly(ranges, Wish(headers=True))
        results |= by_partition(source.map(task(redo)))
    raise ConfigError(
        f"{stream}: the machine raises at other messages each time ({', '.join(map(str, again))})",
        next="make `apply` depend on nothing but its state and message; seriatim.testing runs it in milliseconds",
    )
