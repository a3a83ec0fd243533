"""The tables of a machine's further kinds of records, as Delta tables `records-NAME/` below the
output path.

Each commit names the entry of the ledger that it reaches, carries its sequence as transaction, and
is made on exactly the table that was read before.

Next: operations/further_tables.py decides what is put; record_files.py writes the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import table_directory
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.model import File, Ledger
from seriatim.ports import AppliedVersion, CommitConflictError, PartitionFiles
from seriatim.storage.delta import (
    STORAGE_ERRORS,
    add_actions_by_path,
    column_types,
    commit_properties,
    first_line,
    last_mark,
    storage_errors_as_conflict,
    table_column_types,
)
from seriatim.storage.files import sync_log

TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""The same as of the table `records`: the log is kept longer than any audit looks back."""


class DeltaOutputs:
    """The further tables of one stream. Implements `OutputStore`."""

    def __init__(
        self,
        root: Path,
        schemas: Mapping[str, pa.Schema],
        partition_by: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.schemas = dict(schemas)
        self.partition_by = list(partition_by)
        self.tables: Sequence[str] = list(schemas)

    def applied_version(self, table: str) -> AppliedVersion:
        """The entry that a table has reached, as its last commit of ours says."""
        path = self.root / table_directory(table)
        try:
            if not DeltaTable.is_deltatable(str(path)):
                return AppliedVersion()
            delta_table = DeltaTable(path)
            mark = last_mark(delta_table)
        except STORAGE_ERRORS as error:
            raise PlatformError(
                f"the table {table_directory(table)} cannot be read",
                cause=first_line(error)[:400],
                next=f"move {path / '_delta_log'} out of the way: "
                "the next run makes it again from the ledger",
            ) from error
        self._refuse_other_columns(table, delta_table)
        if mark is None:
            return AppliedVersion(token=delta_table)
        return AppliedVersion(int(mark["sequence"]), str(mark["sha256"]), delta_table)

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files in one commit on exactly the table that was read before.

        A table that has reached no entry is built as a whole: it then has the added files alone.
        """
        mark = {"sequence": ledger.sequence, "sha256": ledger.sha256}
        properties = commit_properties(mark, ledger.sequence)
        with storage_errors_as_conflict():
            if expected.token is None:
                self._create_table(table, added, properties)
            else:
                self._commit(table, expected, added, removed, properties)

    def _create_table(
        self,
        table: str,
        added: PartitionFiles,
        properties: CommitProperties,
    ) -> None:
        path = self.root / table_directory(table)
        path.mkdir(parents=True, exist_ok=True)
        create_table_with_add_actions(
            str(path),
            Schema.from_arrow(self.schemas[table]),
            [self._add_action(table, partition, file) for partition, file in added],
            mode="error",
            partition_by=self.partition_by or None,
            configuration=TABLE_SETTINGS,
            commit_properties=properties,
        )
        sync_log(path, 0)

    def _commit(
        self,
        table: str,
        expected: AppliedVersion,
        added: PartitionFiles,
        removed: Sequence[str],
        properties: CommitProperties,
    ) -> None:
        delta_table = expected.token
        active = add_actions_by_path(delta_table)
        adds = [self._add_action(table, partition, file) for partition, file in added]
        if expected.sequence < 0:
            # The table is built as a whole. Files that are in it already stay as they are: record
            # files are never written twice under one name, and Delta refuses a commit that removes
            # a path and adds it again.
            removed_paths = set(active) - {add.path for add in adds}
            adds = [add for add in adds if add.path not in active]
        else:
            prefix = f"{table_directory(table)}/"
            removed_paths = {path.removeprefix(prefix) for path in removed}
        not_active = sorted(removed_paths - set(active))
        if not_active:
            raise CommitConflictError(f"{not_active[0]} is not in the table")
        removes = [self._remove_action(active[path]) for path in sorted(removed_paths)]
        version = delta_table.version() + 1
        delta_table.create_write_transaction(
            [*adds, *removes],
            "append",
            delta_table.schema(),
            partition_by=self.partition_by or None,
            commit_properties=properties,
        )
        sync_log(self.root / table_directory(table), version)

    def _add_action(
        self,
        table: str,
        partition: Partition,
        file: File,
    ) -> AddAction:
        values = {"topic": partition.topic, "partition": str(partition.number)}
        stats = {
            "numRecords": file.rows,
            "minValues": {"offset": file.first_offset},
            "maxValues": {"offset": file.last_offset},
        }
        return AddAction(
            path=file.path.removeprefix(f"{table_directory(table)}/"),
            size=file.size_bytes,
            partition_values={name: values[name] for name in self.partition_by},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps(stats),
        )

    def _remove_action(self, add: Mapping[str, Any]) -> RemoveAction:
        return RemoveAction(
            path=add["path"],
            data_change=True,
            deletion_timestamp=int(time.time() * 1000),
            size=add["size_bytes"],
            partition_values={name: str(add["partition"][name]) for name in self.partition_by},
        )

    def _refuse_other_columns(self, table: str, delta_table: DeltaTable) -> None:
        """Refuse a machine whose columns are not those of the table."""
        types_in_table = table_column_types(delta_table)
        types_by_machine = column_types(self.schemas[table])
        for name in dict.fromkeys([*types_by_machine, *types_in_table]):
            if types_by_machine.get(name) == types_in_table.get(name):
                continue
            raise ConfigError(
                f"column {name!r} is {types_in_table.get(name, 'not there')} in the table"
                f" {table_directory(table)},"
                f" {types_by_machine.get(name, 'not there')} by the machine",
                next="set the columns back, or give the stream a new output path",
            )
