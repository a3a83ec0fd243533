"""The tables of a machine's further kinds of records, as Delta tables `records-NAME/` below the
output path.

Each commit names the entry of the ledger that it reaches, carries its sequence as transaction, and
is made on exactly the table that was looked at.

Next room: operations/further_tables.py decides what is put; parquet.py wrote the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import table_directory
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.model import File, Ledger
from seriatim.ports import AppliedVersion, CommitConflictError, PartitionFiles
from seriatim.storage.files import sync_log

COMMIT_METADATA_KEY = "seriatim"
TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""As that of `records`: the log outlives any audit."""
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException)


class DeltaOutputs:
    """The further tables of one stream. Implements `OutputStore`."""

    def __init__(
        self, root: Path, schemas: Mapping[str, pa.Schema], partition_by: Sequence[str] = ()
    ) -> None:
        self.root, self.schemas, self.partition_by = root, dict(schemas), list(partition_by)
        self.tables: Sequence[str] = list(schemas)

    def applied_version(self, table: str) -> AppliedVersion:
        """How far a table is, as its last commit of ours says."""
        path = self.root / table_directory(table)
        try:
            if not DeltaTable.is_deltatable(str(path)):
                return AppliedVersion()
            found = DeltaTable(path)
            mark = next(
                (
                    commit[COMMIT_METADATA_KEY]
                    for commit in _commit_history(found)
                    if COMMIT_METADATA_KEY in commit
                ),
                None,
            )
        except STORAGE_ERRORS as error:
            raise PlatformError(
                f"the table {table_directory(table)} cannot be read",
                cause=_first_line(error)[:400],
                next=f"move {path / '_delta_log'} out of the way: the next run makes it again from the ledger",
            ) from error
        self._refuse_other_columns(table, found)
        return (
            AppliedVersion(token=found)
            if mark is None
            else AppliedVersion(int(mark["sequence"]), str(mark["sha256"]), found)
        )

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """One commit on exactly the table that was looked at; as a whole where it has reached
        nothing.
        """
        try:
            self._commit(table, expected, ledger, added, removed)
        except STORAGE_ERRORS as error:
            raise CommitConflictError(_first_line(error)) from error

    def _commit(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        properties = CommitProperties(
            custom_metadata={
                COMMIT_METADATA_KEY: {"sequence": ledger.sequence, "sha256": ledger.sha256}
            },
            max_commit_retries=0,
            app_transactions=[Transaction(COMMIT_METADATA_KEY, ledger.sequence)],
        )
        adds = [self._add_action(table, partition, file) for partition, file in added]
        partition_by = self.partition_by or None
        if expected.token is None:
            (self.root / table_directory(table)).mkdir(parents=True, exist_ok=True)
            create_table_with_add_actions(
                str(self.root / table_directory(table)),
                Schema.from_arrow(self.schemas[table]),
                adds,
                mode="error",
                partition_by=partition_by,
                configuration=TABLE_SETTINGS,
                commit_properties=properties,
            )
            sync_log(self.root / table_directory(table), 0)
            return
        version = expected.token.version() + 1
        active = {
            row["path"]: row for row in pa.table(expected.token.get_add_actions()).to_pylist()
        }
        there = (
            set(active)
            if expected.sequence < 0
            else {path.removeprefix(f"{table_directory(table)}/") for path in removed}
        )
        if gone := sorted(there - set(active)):
            raise CommitConflictError(f"{gone[0]} is not in the table")
        removes = [self._remove_action(active[path]) for path in sorted(there)]
        expected.token.create_write_transaction(
            [*adds, *removes],
            "append",
            expected.token.schema(),
            partition_by=partition_by,
            commit_properties=properties,
        )
        sync_log(self.root / table_directory(table), version)

    def _add_action(self, table: str, partition: Partition, file: File) -> AddAction:
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

    def _remove_action(self, row: Mapping[str, Any]) -> RemoveAction:
        values = {name: str(row["partition"][name]) for name in self.partition_by}
        return RemoveAction(row["path"], True, int(time.time() * 1000), row["size_bytes"], values)

    def _refuse_other_columns(self, table: str, delta_table: DeltaTable) -> None:
        """A table keeps its columns, as `records` does."""
        there = {
            column.name: _normalized_type(column.type)
            for column in pa.schema(delta_table.schema().to_arrow())
        }
        wanted = {column.name: _normalized_type(column.type) for column in self.schemas[table]}
        for name in dict.fromkeys([*wanted, *there]):
            if wanted.get(name) != there.get(name):
                raise ConfigError(
                    f"column {name!r} is {there.get(name, 'not there')} in the table {table_directory(table)}, "
                    f"{wanted.get(name, 'not there')} by the machine",
                    next="set the columns back, or give the stream a new output path",
                )


def _commit_history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    first = table.history(8)
    yield from first
    if len(first) == 8:
        yield from table.history()[8:]


def _normalized_type(kind: pa.DataType) -> str:
    return str(kind).replace("large_", "").replace("_view", "").replace("element", "item")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
