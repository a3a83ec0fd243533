"""The tables of a machine's further kinds of records, as Delta tables `records-NAME/` below the
output path.

Each commit names the entry of the ledger that it reaches, carries its sequence as transaction, and
is made on exactly the table that was read before.

Next: operations/followers.py decides what is put; record_files.py writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from deltalake import DeltaTable
from msgspec.structs import asdict

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import table_directory
from seriatim.errors import ConfigError
from seriatim.ports import AppliedVersion, EntryMark, PartitionFiles
from seriatim.storage.delta_table import (
    STORAGE_ERRORS,
    MarkedTable,
    TableFile,
    storage_errors_as_conflict,
)
from seriatim.storage.store import Store

RECORD_TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""Settings of tables with records. The log is kept longer than any audit looks back. Statistics have
`offset` alone: delta-rs drops rows under a filter where the statistics of a file lack a column that
it expects.
"""


class DeltaOutputs:
    """The further tables of one stream. Implements `OutputStore`."""

    def __init__(
        self,
        store: Store,
        schemas: Mapping[str, pa.Schema],
        partition_by: Sequence[str] = (),
    ) -> None:
        self.tables: Sequence[str] = list(schemas)
        self._delta_tables: dict[str, MarkedTable] = {}
        for table, schema in schemas.items():
            self._delta_tables[table] = MarkedTable(
                store,
                table_directory(table),
                schema,
                partition_by=partition_by,
                settings=RECORD_TABLE_SETTINGS,
            )

    def applied_version(self, table: str) -> AppliedVersion:
        """The entry that a table has reached, as its last commit of ours says."""
        delta_table = self._delta_tables[table]
        try:
            loaded = delta_table.load()
            if loaded is None:
                return AppliedVersion()
            mark = delta_table.last_mark(loaded, EntryMark)
        except STORAGE_ERRORS as error:
            raise delta_table.unreadable_error(
                error,
                f"move {delta_table.url}/_delta_log out of the way: "
                "the next run makes it again from the ledger",
            ) from error
        _refuse_other_columns(delta_table, loaded)
        if mark is None:
            return AppliedVersion(token=loaded)
        return AppliedVersion(mark.sequence, mark.sha256, loaded)

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        entry: EntryMark,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files in one commit on exactly the table that was read before.

        A table that has reached no entry is built as a whole: it then has the added files alone.
        """
        delta_table = self._delta_tables[table]
        adds = [record_table_file(partition, file) for partition, file in added]
        removes = set(removed)
        if expected.sequence < 0 and expected.token is not None:
            # Files that are in the table already stay as they are: record files are never written
            # twice under one name, and Delta refuses a commit that removes a path and adds it again.
            with storage_errors_as_conflict():
                active = delta_table.files(expected.token)
            removes = set(active) - {add.key for add in adds}
            adds = [add for add in adds if add.key not in active]
        delta_table.commit(expected.token, asdict(entry), adds, removes)


def record_table_file(partition: Partition, file: File) -> TableFile:
    """A record file of a partition, as a table of records has it."""
    return TableFile(
        key=file.path,
        size_bytes=file.size_bytes,
        rows=file.rows,
        lowest={"offset": file.first_offset},
        highest={"offset": file.last_offset},
        partition_values={"topic": partition.topic, "partition": partition.number},
    )


def _refuse_other_columns(delta_table: MarkedTable, loaded: DeltaTable) -> None:
    """Refuse a machine whose columns are not those of the table."""
    difference = delta_table.column_difference(loaded)
    if difference is not None:
        raise ConfigError(
            f"column {difference.name!r} is {difference.type_in_table or 'not there'} in the table"
            f" {delta_table.key}, {difference.expected_type or 'not there'} by the machine",
            next="set the columns back, or give the stream a new output path",
        )
