"""A Delta table of ours at a key of a store: how it is opened, committed to and read back. Records,
further tables, gaps, quarantine and current are all kept in this way.

Every commit of ours carries a mark, which says what the commit means to us; at least the number of a
ledger entry. A commit is made on the same loaded table object that was read and checked before, never
reloaded in between, and without retries: delta-rs would otherwise rebase the commit of a process that
was thought dead, and accept it.

    table = MarkedTable(store, "records", schema, partition_by=("topic",), settings=SETTINGS)
    loaded = table.load()                                  # None: there is no such table
    mark = table.last_mark(loaded, CommitMark)             # what our newest commit says
    table.commit(loaded, {"sequence": 7}, adds, removes)   # CommitConflictError if not confirmed

Next: ledger/delta_store.py has the ledger; current_table.py and derived_tables.py have the tables
that follow it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import PlatformError, ensure
from seriatim.ledger.model import EntryMark
from seriatim.ports import AppliedVersion, CommitConflictError
from seriatim.storage.parquet import first_line
from seriatim.storage.store import Store

COMMIT_METADATA_KEY = "seriatim"
"""The key of our mark in the metadata of a commit, and our app id in its transactions."""
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException, msgspec.MsgspecError)
"""What reading or writing a Delta table raises."""
Mark = TypeVar("Mark")
RECORD_TABLE_SETTINGS = {
    "delta.logRetentionDuration": "interval 3650 days",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingStatsColumns": "offset",
}
"""Settings of tables with records. The log is kept longer than any audit looks back. Statistics have
`offset` alone: delta-rs drops rows under a filter where the statistics of a file lack a column that
it expects.
"""


class TableFile(Struct, frozen=True, kw_only=True):
    """A data file of a table, with what the table's log says about it."""

    key: str
    """The key in the store, which begins with the key of the table."""
    size_bytes: int
    rows: int | None = None
    lowest: Mapping[str, Any] = {}
    """The lowest values of columns. Readers skip files by them."""
    highest: Mapping[str, Any] = {}
    null_counts: Mapping[str, int] = {}
    partition_values: Mapping[str, Any] = {}
    """The values of columns by which the table may be partitioned."""

    def statistics(self) -> str:
        """The statistics as Delta's log has them."""
        statistics: dict[str, Any] = {"numRecords": self.rows}
        if self.lowest:
            statistics["minValues"] = self.lowest
            statistics["maxValues"] = self.highest
        if self.null_counts:
            statistics["nullCount"] = self.null_counts
        # One of ten thousand in a commit: the standard library takes ten times as long.
        return msgspec.json.encode(statistics).decode()


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


class TableCommit(Struct, frozen=True, kw_only=True):
    """One commit of a table, as its log has it."""

    version: int
    mark: dict[str, Any] | None = None
    """What the commit says to us; None if somebody else made it."""
    operation: str = "an operation"
    author: str = "somebody else"
    changes_data: bool = False
    """Whether a commit of somebody else added or removed rows. Rewriting files alone (OPTIMIZE) does
    not.
    """


class ColumnDifference(Struct, frozen=True):
    """The first column in which a table is not as expected. An empty type: the column is not there."""

    name: str
    type_in_table: str
    expected_type: str


class _LoggedFile(Struct, rename="camel"):
    data_change: bool = False


class _LoggedAction(Struct, rename="camel"):
    """The parts of a line of Delta's log that matter here."""

    commit_info: dict[str, Any] | None = None
    add: _LoggedFile | None = None
    remove: _LoggedFile | None = None


_ACTION_DECODER = msgspec.json.Decoder(_LoggedAction)


class MarkedTable:
    """A Delta table whose commits of ours carry a mark. Without a schema it can only be read.

    `loaded` is always what `load` returned: the table as of one version.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        schema: pa.Schema | None = None,
        *,
        partition_by: Sequence[str] = (),
        settings: Mapping[str, str | None] | None = None,
        advice: str = "",
    ) -> None:
        self.store = store
        self.key = key
        self.schema = schema
        self.partition_by = list(partition_by)
        self.settings = settings
        """Settings that the table is created with."""
        self.advice = advice
        """What a person can do if the table cannot be read."""
        self.url = f"{store.url}/{key}"

    def load(self, version: int | None = None) -> DeltaTable | None:
        """The table as of its newest version, or an earlier one. None: there is no such table."""
        options = self.store.delta_options()
        try:
            if not DeltaTable.is_deltatable(self.url, options):
                return None
            return DeltaTable(self.url, version=version, storage_options=options)
        except (DeltaError, OSError) as error:
            explained = self.store.explain_error(error)
            if explained is None:
                raise
            raise explained from error

    def commits(self, loaded: DeltaTable) -> Iterator[TableCommit]:
        """The commits up to the loaded version, newest first, as far as the log goes back.

        They are read from the log itself. `DeltaTable.history` also gives commits that were made
        after the table was loaded, and numbers all of them wrongly then.
        """
        for version in range(loaded.version(), -1, -1):
            commit = self._read_commit(version)
            if commit is None:
                break
            yield commit
        else:
            return
        # A log may be cleaned up behind a checkpoint, and what is left there may have holes.
        for earlier_version in self._logged_versions_before(version):
            commit = self._read_commit(earlier_version)
            if commit is not None:
                yield commit

    def last_mark(self, loaded: DeltaTable, mark_type: type[Mark]) -> Mark | None:
        """The mark of our newest commit; None if no commit is ours."""
        for commit in self.commits(loaded):
            if commit.mark is not None:
                return msgspec.convert(commit.mark, mark_type)
        return None

    def applied_version(self) -> AppliedVersion:
        """The ledger entry that the table has reached, as our last commit says; -1 if there is no
        table, or no commit of ours.
        """
        mark: EntryMark | None = None
        with self.reading():
            loaded = self.load()
            if loaded is not None:
                mark = self.last_mark(loaded, EntryMark)
        if mark is None:
            return AppliedVersion(token=loaded)
        return AppliedVersion(mark.sequence, mark.sha256, loaded)

    def files(self, loaded: DeltaTable) -> dict[str, TableFile]:
        """The data files of the loaded version, by key."""
        files = {}
        for add in pa.table(loaded.get_add_actions()).to_pylist():
            key = f"{self.key}/{add['path']}"
            files[key] = TableFile(
                key=key,
                size_bytes=add["size_bytes"],
                rows=add.get("num_records"),
                lowest=add.get("min") or {},
                highest=add.get("max") or {},
                null_counts=add.get("null_count") or {},
                partition_values=add.get("partition") or {},
            )
        return files

    def column_difference(self, loaded: DeltaTable) -> ColumnDifference | None:
        """The first column that is not as the schema says; None if all are."""
        expected_types = _column_types(self._known_schema())
        schema_in_table = pa.schema(loaded.schema().to_arrow())
        types_in_table = _column_types(schema_in_table)
        for name in dict.fromkeys([*expected_types, *types_in_table]):
            type_in_table = types_in_table.get(name, "")
            expected_type = expected_types.get(name, "")
            if type_in_table != expected_type:
                return ColumnDifference(name, type_in_table, expected_type)
        return None

    def commit(
        self,
        loaded: DeltaTable | None,
        mark: Mapping[str, Any],
        adds: Iterable[TableFile] = (),
        removes: Iterable[str] = (),
        *,
        data_change: bool = True,
        replaces_all: bool = False,
    ) -> int:
        """Make one commit on exactly the loaded version, and make it durable. None creates the table.
        Returns the version that the commit made.

        `mark` has at least the `sequence` of a ledger entry. With `replaces_all` the table has the
        added files alone afterwards, and the columns of the schema. `CommitConflictError`: the commit
        is not confirmed. Somebody else committed, a removed file is not in the table, or the storage
        failed; the commit may have succeeded all the same.
        """
        # With a transaction of our app id, delta-rs refuses to rebase the commit on another one of
        # ours. Without it, and with retries, it would accept the append of a process thought dead.
        transaction = Transaction(COMMIT_METADATA_KEY, mark["sequence"])
        properties = CommitProperties(
            custom_metadata={COMMIT_METADATA_KEY: dict(mark)},
            max_commit_retries=0,
            app_transactions=[transaction],
        )
        with storage_errors_as_conflict():
            add_actions = [self._add_action(file, data_change) for file in adds]
            if loaded is None:
                version = 0
                self._create(add_actions, properties)
            else:
                # Nothing is retried inside delta-rs, so this is the version after the loaded one.
                version = loaded.version() + 1
                mode: Literal["append", "overwrite"] = "append"
                schema: Any = loaded.schema()
                if replaces_all:
                    mode = "overwrite"
                    schema = self._known_schema()
                remove_actions = self._remove_actions(loaded, removes, data_change)
                loaded.create_write_transaction(
                    [*add_actions, *remove_actions],
                    mode,
                    schema,
                    partition_by=self.partition_by or None,
                    commit_properties=properties,
                )
            # Until it is synced, a power cut may take back a commit that others were told of.
            self.store.sync_delta_log(self.key, version)
        return version

    def vacuum(self, keep_hours: int, *, full: bool = False) -> list[str]:
        """Delete files that left the table longer ago than this; with `full` also those that no
        commit ever named. Returns their paths within the table.

        Unfinished files go as well. A writer that is at work on one has to begin again.
        """
        loaded = self.load()
        if loaded is None:
            return []
        self.store.delete_unfinished(f"{self.key}/")
        return loaded.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=full)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise storage errors as the error that the table cannot be read, with what a person can do
        about it.
        """
        try:
            yield
        except STORAGE_ERRORS as error:
            raise PlatformError(
                f"the table {self.key} cannot be read",
                cause=first_line(error)[:400],
                next=self.advice,
            ) from error

    def _known_schema(self) -> pa.Schema:
        ensure(self.schema is not None, "the columns of the table are known", table=self.key)
        return self.schema

    def _create(self, add_actions: list[AddAction], properties: CommitProperties) -> None:
        create_table_with_add_actions(
            self.url,
            Schema.from_arrow(self._known_schema()),
            add_actions,
            mode="error",
            partition_by=self.partition_by or None,
            configuration=self.settings,
            storage_options=self.store.delta_options(),
            commit_properties=properties,
        )

    def _add_action(self, file: TableFile, data_change: bool) -> AddAction:
        return AddAction(
            path=file.key.removeprefix(f"{self.key}/"),
            size=file.size_bytes,
            partition_values=self._partition_values(file),
            modification_time=_now_ms(),
            data_change=data_change,
            stats=file.statistics(),
        )

    def _remove_actions(
        self,
        loaded: DeltaTable,
        removes: Iterable[str],
        data_change: bool,
    ) -> list[RemoveAction]:
        """The actions that remove these files. A file that is not in the table is a conflict:
        delta-rs itself would remove any path without a complaint.
        """
        removed_keys = sorted(set(removes))
        if not removed_keys:
            return []
        files = self.files(loaded)
        actions = []
        for key in removed_keys:
            file = files.get(key)
            if file is None:
                raise CommitConflictError(f"{key} is not in the table: another run has replaced it")
            action = RemoveAction(
                key.removeprefix(f"{self.key}/"),
                data_change,
                _now_ms(),
                file.size_bytes,
                self._partition_values(file),
            )
            actions.append(action)
        return actions

    def _partition_values(self, file: TableFile) -> dict[str, str]:
        return {name: str(file.partition_values[name]) for name in self.partition_by}

    def _read_commit(self, version: int) -> TableCommit | None:
        """One commit from the log; None if it is not there any more."""
        try:
            content = self.store.read(f"{self.key}/_delta_log/{version:020d}.json")
        except FileNotFoundError:
            return None
        info: dict[str, Any] = {}
        changes_data = False
        for line in content.splitlines():
            if not line.strip():
                continue
            action = _ACTION_DECODER.decode(line)
            if action.commit_info is not None:
                info = action.commit_info
                if COMMIT_METADATA_KEY in info:
                    # The rest are the files of a commit of ours, which may be very many.
                    break
            file = action.add or action.remove
            if file is not None and file.data_change:
                changes_data = True
        return TableCommit(
            version=version,
            mark=info.get(COMMIT_METADATA_KEY),
            operation=info.get("operation", "an operation"),
            author=info.get("engineInfo") or info.get("clientVersion") or "somebody else",
            changes_data=changes_data,
        )

    def _logged_versions_before(self, version: int) -> list[int]:
        """The versions before this one whose commits are in the log, newest first."""
        versions = []
        for key, _ in self.store.keys(f"{self.key}/_delta_log/"):
            stem, _, extension = key.rpartition("/")[2].partition(".")
            if extension == "json" and stem.isdecimal() and int(stem) < version:
                versions.append(int(stem))
        return sorted(versions, reverse=True)


def _column_types(schema: pa.Schema) -> dict[str, str]:
    """The types of columns by name, without what Delta does not keep: offset sizes, views, names of
    list items.
    """
    types = {}
    for column in schema:
        name = str(column.type).replace("large_", "").replace("_view", "")
        types[column.name] = name.replace("element", "item")
    return types


def _now_ms() -> int:
    return int(time.time() * 1000)


@contextmanager
def storage_errors_as_conflict() -> Iterator[None]:
    """Raise storage errors as `CommitConflictError`: the caller decides whether to try again."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise CommitConflictError(first_line(error)) from error
