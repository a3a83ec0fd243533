"""Split: the records of a task, each to the file of its table. Only machines with several kinds of records need it.

Next room: core/outputs.py says which record goes where; steps/task.py writes, steps/accept.py ends sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seriatim.core.ledger import File
from seriatim.core.message import Stretch
from seriatim.core.offsets import Partition
from seriatim.core.outputs import MAIN, some_ended, some_folded, split
from seriatim.core.session import Counts, Ended, Folded
from seriatim.ports import RecordStore, RecordWriter, UnfitRecords


class Outputs:
    """The record files of one partition and slice: that of `records`, and those of the other tables."""

    def __init__(
        self, store: RecordStore, partition: Partition, topic_id: str, stem: str, others: Iterable[str]
    ) -> None:
        self.writers: dict[str, RecordWriter] = {MAIN: store.records(partition, topic_id, stem)}
        self.writers |= {table: store.records(partition, topic_id, stem, table) for table in others}

    def write(self, stretch: Stretch, folded: Folded, counts: Counts) -> None:
        """Add the records of a stretch. The others were counted as records, and are counted for themselves."""
        if len(self.writers) == 1:
            return self.writers[MAIN].write(stretch, folded)
        found = split(folded.rows)
        for table, rows in found.items():
            if table != MAIN:
                counts.records -= len(rows)
                counts.others[table] = counts.others.get(table, 0) + len(rows)
        self._each(found, lambda table, rows: self.writers[table].write(stretch, some_folded(folded, rows)))
        return None

    def end(self, offset: int, ended: Ended) -> None:
        """Add records that end sessions, all at one offset."""
        if len(self.writers) == 1:
            return self.writers[MAIN].end(offset, ended)
        self._each(split(ended.rows), lambda table, rows: self.writers[table].end(offset, some_ended(ended, rows)))
        return None

    def _each(self, found: dict[str, list[int]], write: Callable[[str, Sequence[int]], None]) -> None:
        """Each table's rows; those that do not fit are named by their place among all."""
        unfit: list[int] = []
        for table, rows in found.items():
            try:
                write(table, rows)
            except UnfitRecords as these:
                unfit += [rows[row] for row in these.rows]
        if unfit:
            raise UnfitRecords(sorted(unfit))

    def close(self) -> tuple[tuple[File, ...], dict[str, tuple[File, ...]]]:
        """Finish the files: that of `records`, and the others by table; none where nothing was written."""
        closed = {table: writer.close() for table, writer in self.writers.items()}
        main = closed.pop(MAIN)
        return () if main is None else (main,), {table: (file,) for table, file in closed.items() if file is not None}
