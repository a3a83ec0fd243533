"""Split: the records of a task, each to the file of its table. Only machines with several kinds of
records need it.

Next room: engine/record_kinds.py says which record goes where; engine/task.py writes,
operations/accept.py ends sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import (
    MAIN_TABLE,
    rows_by_table,
    select_end_records,
    select_records,
)
from seriatim.engine.session import Counts, FoldOutput, SessionEndRecords
from seriatim.ledger.model import File
from seriatim.ports import RecordStore, RecordWriter, UnfitRecordsError


class OutputWriters:
    """The record files of one partition and slice: that of `records`, and those of the other
    tables.
    """

    def __init__(
        self,
        store: RecordStore,
        partition: Partition,
        topic_id: str,
        stem: str,
        other_tables: Iterable[str],
    ) -> None:
        self.writers: dict[str, RecordWriter] = {
            MAIN_TABLE: store.record_writer(partition, topic_id, stem)
        }
        self.writers |= {
            table: store.record_writer(partition, topic_id, stem, table) for table in other_tables
        }

    def write(self, batch: MessageBatch, output: FoldOutput, counts: Counts) -> None:
        """Add the records of a stretch. The others were counted as records, and are counted for
        themselves.
        """
        if len(self.writers) == 1:
            return self.writers[MAIN_TABLE].write(batch, output)
        found = rows_by_table(output.rows)
        for table, rows in found.items():
            if table != MAIN_TABLE:
                counts.records -= len(rows)
                counts.other_records[table] = counts.other_records.get(table, 0) + len(rows)
        self._write_each_table(
            found,
            lambda table, rows: self.writers[table].write(batch, select_records(output, rows)),
        )
        return None

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Add records that end sessions, all at one offset."""
        if len(self.writers) == 1:
            return self.writers[MAIN_TABLE].write_end_records(offset, end_records)
        self._write_each_table(
            rows_by_table(end_records.rows),
            lambda table, rows: self.writers[table].write_end_records(
                offset, select_end_records(end_records, rows)
            ),
        )
        return None

    def _write_each_table(
        self, rows_by_table: dict[str, list[int]], write: Callable[[str, Sequence[int]], None]
    ) -> None:
        """Each table's rows; those that do not fit are named by their place among all."""
        unfit: list[int] = []
        for table, rows in rows_by_table.items():
            try:
                write(table, rows)
            except UnfitRecordsError as these:
                unfit += [rows[row] for row in these.rows]
        if unfit:
            raise UnfitRecordsError(sorted(unfit))

    def close(self) -> tuple[tuple[File, ...], dict[str, tuple[File, ...]]]:
        """Finish the files: that of `records`, and the others by table; none where nothing was
        written.
        """
        closed = {table: writer.close() for table, writer in self.writers.items()}
        main = closed.pop(MAIN_TABLE)
        return () if main is None else (main,), {
            table: (file,) for table, file in closed.items() if file is not None
        }
