"""Record writers: write each record of a task to the file of its table.

Only machines with several kinds of records have more than one table.

Next: engine/record_kinds.py says which record goes to which table. engine/task.py writes through
this module, and so does operations/accept.py, which ends sessions.
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
    """The record files of one partition and slice: one of `records`, and one per other table."""

    def __init__(
        self,
        store: RecordStore,
        partition: Partition,
        topic_id: str,
        stem: str,
        other_tables: Iterable[str],
    ) -> None:
        self.writers: dict[str, RecordWriter] = {}
        self.writers[MAIN_TABLE] = store.record_writer(partition, topic_id, stem)
        for table in other_tables:
            self.writers[table] = store.record_writer(partition, topic_id, stem, table)

    def write(self, batch: MessageBatch, output: FoldOutput, counts: Counts) -> None:
        """Write the records of a batch. The fold has counted them all as records of `records`, so
        those of other tables are moved to their own counts.
        """
        if len(self.writers) == 1:
            self.writers[MAIN_TABLE].write(batch, output)
            return
        rows_of_tables = rows_by_table(output.rows)
        for table, rows in rows_of_tables.items():
            if table != MAIN_TABLE:
                counts.records -= len(rows)
                counts.other_records[table] = counts.other_records.get(table, 0) + len(rows)

        def write_rows(table: str, rows: Sequence[int]) -> None:
            self.writers[table].write(batch, select_records(output, rows))

        self._write_each_table(rows_of_tables, write_rows)

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Write records that end sessions, all at one offset."""
        if len(self.writers) == 1:
            self.writers[MAIN_TABLE].write_end_records(offset, end_records)
            return

        def write_rows(table: str, rows: Sequence[int]) -> None:
            self.writers[table].write_end_records(offset, select_end_records(end_records, rows))

        self._write_each_table(rows_by_table(end_records.rows), write_rows)

    def _write_each_table(
        self, rows_by_table: dict[str, list[int]], write: Callable[[str, Sequence[int]], None]
    ) -> None:
        """Write the rows of each table. Rows that do not fit are raised all together, by their
        position among the rows of all tables.
        """
        unfit: list[int] = []
        for table, rows in rows_by_table.items():
            try:
                write(table, rows)
            except UnfitRecordsError as error:
                unfit += [rows[row] for row in error.rows]
        if unfit:
            raise UnfitRecordsError(sorted(unfit))

    def close(self) -> tuple[tuple[File, ...], dict[str, tuple[File, ...]]]:
        """Finish the files: that of `records`, and those of the other tables. A table without
        records has no file.
        """
        main_files: tuple[File, ...] = ()
        other_files: dict[str, tuple[File, ...]] = {}
        for table, writer in self.writers.items():
            file = writer.close()
            if file is None:
                continue
            if table == MAIN_TABLE:
                main_files = (file,)
            else:
                other_files[table] = (file,)
        return main_files, other_files
