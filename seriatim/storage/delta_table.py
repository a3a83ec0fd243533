"""A Delta table of ours at a key of a store: how it is opened, committed to and read back. Records,
further tables, gaps, quarantine and current are all kept in this way.

Every commit of ours carries a mark, which says what the commit means to us; at least the number of a
ledger entry. A commit is made on exactly the version that was read and checked before, and without
retries: delta-rs would otherwise rebase the commit of a process that was thought dead, and accept it.

A commit that only adds files, on top of a commit of ours, is written here as Delta's protocol has it:
one object with the number of the next version, by `Store.create`. delta-rs makes all others, and
loads tables. In a bucket that takes more than ten requests, so there a table is loaded when its files
are asked for, and not before.

    table = MarkedTable(store, "records", schema, partition_by=("topic",), settings=SETTINGS)
    loaded = table.load()                                  # the newest version; None: no such table
    mark = table.last_mark(loaded, CommitMark)             # what our newest commit says
    table.commit(loaded, {"sequence": 7}, adds, removes)   # CommitConflictError if not confirmed

Next: ledger/delta_store.py has the ledger; current_table.py and derived_tables.py have the tables
that follow it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim import __version__
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import PlatformError, SeriatimError, ensure
from seriatim.ledger.model import EntryMark
from seriatim.ports import AppliedVersion, CommitConflictError
from seriatim.storage.parquet import first_line
from seriatim.storage.store import COMMIT_FILE_NAME, AlreadyThereError, Store

log = logging.getLogger(__name__)

COMMIT_METADATA_KEY = "seriatim"
"""The key of our mark in the metadata of a commit, and our app id in its transactions."""
COLUMNS_METADATA_KEY = "seriatimColumns"
"""The key of the digest of the table's columns. It only saves work, so it is not a part of the mark,
of which `verify` proves every bit.
"""
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException, msgspec.MsgspecError)
"""What reading or writing a Delta table raises."""
Mark = TypeVar("Mark")
COMMITS_REMEMBERED_MAX = 256
CHECKPOINT_LOOK_EVERY = 10
"""After so many commits we look whether a checkpoint is due."""
CHECKPOINT_COMMITS_MAX = 100
CHECKPOINT_BYTES_MIN = 1 << 20
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


class TableVersion:
    """A table as of one of its versions."""

    def __init__(self, table: MarkedTable, number: int, delta: DeltaTable | None = None) -> None:
        self._table = table
        self._number = number
        self._delta = delta

    def version(self) -> int:
        """The number of the version."""
        return self._number

    @property
    def delta(self) -> DeltaTable:
        """The table as delta-rs loads it. A version never changes, so that it may be loaded later."""
        if self._delta is None:
            self._delta = self._table.load_with_library(self._number)
        return self._delta


class TableCommit(Struct, frozen=True, kw_only=True):
    """One commit of a table, as its log has it."""

    version: int
    mark: dict[str, Any] | None = None
    """What the commit says to us; None if somebody else made it."""
    columns: str = ""
    """A digest of the table's columns; empty: the commit does not say them."""
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

    known_version = -1
    """A version that is there, as far as is known. A listing of the log begins at it."""

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
        self._log = f"{key}/_delta_log/"
        self._commits_read: dict[int, TableCommit] = {}
        """Of a store in which each read is a request: the last commits that were read or made."""

    def load(self, version: int | None = None) -> TableVersion | None:
        """The table as of its newest version, or an earlier one. None: there is no such table."""
        if self.store.is_remote:
            number = self._newest_version() if version is None else version
            if number is not None:
                return TableVersion(self, number)
        with self._explained():
            if not DeltaTable.is_deltatable(self.url, self.store.delta_options()):
                return None
        delta = self.load_with_library(version)
        return TableVersion(self, delta.version(), delta)

    def load_with_library(self, version: int | None = None) -> DeltaTable:
        """The table as delta-rs loads it, with all its files."""
        with self._explained():
            options = self.store.delta_options()
            return DeltaTable(self.url, version=version, storage_options=options)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of delta-rs that are about the store as the store explains them."""
        try:
            yield
        except (DeltaError, OSError) as error:
            explained = self.store.explain_error(error)
            if explained is None:
                raise
            raise explained from error

    def _newest_version(self) -> int | None:
        """The newest version whose commit is in the log, by one listing from a version on that is
        known to be there. None: there is no commit.
        """
        if self.known_version < 0:
            self.known_version = self._last_checkpoint().version
        versions = self._logged_versions(after=self.known_version)
        if not versions and self.known_version > 0:
            # The log is not the one that it was: somebody has restored an older one.
            versions = self._logged_versions()
        if not versions:
            return None
        self.known_version = versions[-1]
        return versions[-1]

    def commits(self, loaded: TableVersion) -> Iterator[TableCommit]:
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
        for earlier_version in reversed(self._logged_versions()):
            if earlier_version >= version:
                continue
            commit = self._read_commit(earlier_version)
            if commit is not None:
                yield commit

    def commit_of_sequence(
        self, loaded: TableVersion, sequence: int, sequence_of: Callable[[TableCommit], int]
    ) -> TableCommit | None:
        """The commit of ours whose mark has this sequence, up to the loaded version; None if it is
        not found by the numbers alone. The log is not read through. `sequence_of` reads a mark, and
        raises an error if it is damaged.

        Each commit of ours has the next sequence, and a version of its own. So from a commit with a
        later sequence it is at least as many versions back as the sequence is lower, and exactly
        there if nobody else has committed between.
        """
        version = loaded.version()
        while version >= 0:
            commit = self._read_commit(version)
            if commit is None:
                return None
            if commit.mark is None:
                version -= 1
                continue
            sequence_here = sequence_of(commit)
            if sequence_here == sequence:
                return commit
            if sequence_here < sequence:
                return None
            version -= sequence_here - sequence
        return None

    def last_mark(self, loaded: TableVersion, mark_type: type[Mark]) -> Mark | None:
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

    def files(self, loaded: TableVersion) -> dict[str, TableFile]:
        """The data files of the loaded version, by key."""
        files = {}
        for add in pa.table(loaded.delta.get_add_actions()).to_pylist():
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

    def columns_digest(self) -> str:
        """A digest of the columns that the table must have, by which commits can say that it has them.
        Empty without a schema.
        """
        if self.schema is None:
            return ""
        columns = [list(_column_types(self.schema).items()), self.partition_by]
        return hashlib.sha256(msgspec.json.encode(columns)).hexdigest()[:16]

    def noted_columns(self, loaded: TableVersion) -> str:
        """The digest of the columns that the commit of the loaded version names. Empty: it names none, or
        it is of somebody else, who may have changed them.
        """
        commit = self._read_commit(loaded.version())
        return "" if commit is None else commit.columns

    def must_compare_columns(self, loaded: TableVersion) -> bool:
        """Whether the columns have to be compared one by one. In a bucket the digest in the commit saves
        loading the whole table.
        """
        return not self.store.is_remote or self.noted_columns(loaded) != self.columns_digest()

    def column_difference(
        self, loaded: TableVersion, schema: pa.Schema | None = None
    ) -> ColumnDifference | None:
        """The first column that is not as the schema says; None if all are. `schema` is another one
        than the table's own.
        """
        expected_types = _column_types(self._known_schema() if schema is None else schema)
        schema_in_table = pa.schema(loaded.delta.schema().to_arrow())
        types_in_table = _column_types(schema_in_table)
        for name in dict.fromkeys([*expected_types, *types_in_table]):
            type_in_table = types_in_table.get(name, "")
            expected_type = expected_types.get(name, "")
            if type_in_table != expected_type:
                return ColumnDifference(name, type_in_table, expected_type)
        return None

    def lacks_only_columns(self, loaded: TableVersion) -> bool:
        """Whether the loaded version is as the schema says, but for columns that it lacks."""
        expected_types = _column_types(self._known_schema())
        types_in_table = _column_types(pa.schema(loaded.delta.schema().to_arrow()))
        return types_in_table.items() < expected_types.items()

    def add_columns(self, loaded: TableVersion, mark: Mapping[str, Any]) -> int:
        """Make one commit on exactly the loaded version that adds the columns of the schema which the
        table lacks, and make it durable. In rows of before they are null. Returns the version that the
        commit made.

        `CommitConflictError`: the commit is not confirmed, as in `commit`.
        """
        with storage_errors_as_conflict():
            # Loaded anew: delta-rs moves the object that commits to the new version.
            delta = self.load_with_library(loaded.version())
            names_in_table = set(_column_types(pa.schema(delta.schema().to_arrow())))
            added_fields = []
            for field in Schema.from_arrow(self._known_schema()).fields:
                if field.name not in names_in_table:
                    added_fields.append(field)
            metadata = {
                COMMIT_METADATA_KEY: dict(mark),
                COLUMNS_METADATA_KEY: self.columns_digest(),
            }
            delta.alter.add_columns(added_fields, commit_properties=_commit_properties(metadata))
            version = loaded.version() + 1
            self.store.sync_delta_log(self.key, version)
        self.known_version = version
        return version

    def commit(
        self,
        loaded: TableVersion | None,
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
        removed_keys = sorted(set(removes))
        with storage_errors_as_conflict():
            columns = self.columns_digest()
            if loaded is not None and not columns:
                columns = self.noted_columns(loaded)
            metadata: dict[str, Any] = {COMMIT_METADATA_KEY: dict(mark)}
            if columns:
                metadata[COLUMNS_METADATA_KEY] = columns
            if loaded is None:
                version = 0
                add_actions = [self._add_action(file, data_change) for file in adds]
                self._create(add_actions, _commit_properties(metadata))
            else:
                version = loaded.version() + 1
                only_adds = not removed_keys and not replaces_all
                if only_adds and self._is_ours(loaded.version()):
                    self._append(version, metadata, adds, data_change)
                else:
                    self._commit_with_library(
                        loaded, metadata, adds, removed_keys, data_change, replaces_all
                    )
            # Until it is synced, a power cut may take back a commit that others were told of.
            self.store.sync_delta_log(self.key, version)
        self.known_version = version
        if version and version % CHECKPOINT_LOOK_EVERY == 0:
            self._write_checkpoint_if_due(version)
        return version

    def _is_ours(self, version: int) -> bool:
        """Whether the commit of a version is ours. On one of somebody else delta-rs has to look at
        the table: it may have other columns now, or need what we do not know.
        """
        commit = self._read_commit(version)
        return commit is not None and commit.mark is not None

    def _append(
        self,
        version: int,
        metadata: Mapping[str, Any],
        adds: Iterable[TableFile],
        data_change: bool,
    ) -> None:
        """Write the commit of a version that only adds files. Whoever creates the object of that
        version first has made the commit.
        """
        now_ms = _now_ms()
        info = {
            "timestamp": now_ms,
            "operation": "WRITE",
            "operationParameters": {"mode": "Append", "partitionBy": json.dumps(self.partition_by)},
            "engineInfo": f"seriatim:{__version__}",
            **metadata,
        }
        actions: list[dict[str, Any]] = [{"commitInfo": info}]
        for file in adds:
            add = {
                # A path in Delta's log is a URL.
                "path": quote(file.key.removeprefix(f"{self.key}/")),
                "partitionValues": self._partition_values(file),
                "size": file.size_bytes,
                "modificationTime": now_ms,
                "dataChange": data_change,
                "stats": file.statistics(),
            }
            actions.append({"add": add})
        transaction = {
            "appId": COMMIT_METADATA_KEY,
            "version": metadata[COMMIT_METADATA_KEY]["sequence"],
            "lastUpdated": now_ms,
        }
        actions.append({"txn": transaction})
        content = b"\n".join(msgspec.json.encode(action) for action in actions)
        try:
            self.store.create(self._commit_key(version), content)
        except AlreadyThereError:
            raise CommitConflictError(f"somebody else has made version {version}") from None
        except PlatformError as error:
            # The commit may have succeeded all the same: whoever commits looks at the table again.
            raise CommitConflictError(str(error)) from error
        columns = metadata.get(COLUMNS_METADATA_KEY, "")
        mark = metadata[COMMIT_METADATA_KEY]
        self._remember(TableCommit(version=version, mark=mark, columns=columns))

    def _commit_with_library(
        self,
        loaded: TableVersion,
        metadata: Mapping[str, Any],
        adds: Iterable[TableFile],
        removed_keys: list[str],
        data_change: bool,
        replaces_all: bool,
    ) -> None:
        mode: Literal["append", "overwrite"] = "append"
        schema: Any = loaded.delta.schema()
        if replaces_all:
            mode = "overwrite"
            schema = self._known_schema()
        add_actions = [self._add_action(file, data_change) for file in adds]
        remove_actions = self._remove_actions(loaded, removed_keys, data_change)
        # Nothing is retried inside delta-rs, so this makes the version after the loaded one.
        loaded.delta.create_write_transaction(
            [*add_actions, *remove_actions],
            mode,
            schema,
            partition_by=self.partition_by or None,
            commit_properties=_commit_properties(metadata),
        )

    def _write_checkpoint_if_due(self, version: int) -> None:
        """Write a checkpoint if readers have much to read after the last one: as many bytes of
        commits as that has itself, or a hundred commits. So checkpoints cost about as much as the log.
        """
        try:
            last = self._last_checkpoint()
            sizes = self._commit_sizes(after=last.version)
            is_due = len(sizes) >= CHECKPOINT_COMMITS_MAX
            if is_due or sum(sizes) > max(last.size_bytes, CHECKPOINT_BYTES_MIN):
                self.load_with_library(version).create_checkpoint()
                self.store.sync_delta_log(self.key, version)
        except (*STORAGE_ERRORS, SeriatimError) as error:
            # The commit is made. Without a checkpoint readers are slower, nothing else.
            log.warning("%s: no checkpoint was written: %s", self.url, first_line(error))

    def vacuum(self, keep_hours: int, *, full: bool = False) -> list[str]:
        """Delete files that left the table longer ago than this; with `full` also those that no
        commit ever named. Returns their paths within the table.

        Unfinished files go as well. A writer that is at work on one has to begin again.
        """
        loaded = self.load()
        if loaded is None:
            return []
        self.store.delete_unfinished(f"{self.key}/")
        return loaded.delta.vacuum(
            keep_hours, dry_run=False, enforce_retention_duration=False, full=full
        )

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
        loaded: TableVersion,
        removed_keys: list[str],
        data_change: bool,
    ) -> list[RemoveAction]:
        """The actions that remove these files. A file that is not in the table is a conflict:
        delta-rs itself would remove any path without a complaint.
        """
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
        if version in self._commits_read:
            return self._commits_read[version]
        try:
            content = self.store.read(self._commit_key(version))
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
        commit = TableCommit(
            version=version,
            mark=info.get(COMMIT_METADATA_KEY),
            columns=str(info.get(COLUMNS_METADATA_KEY, "")),
            operation=info.get("operation", "an operation"),
            author=info.get("engineInfo") or info.get("clientVersion") or "somebody else",
            changes_data=changes_data,
        )
        self._remember(commit)
        return commit

    def _remember(self, commit: TableCommit) -> None:
        """Keep a commit, so that it is not read again. Commits never change."""
        if self.store.is_remote:
            while len(self._commits_read) >= COMMITS_REMEMBERED_MAX:
                del self._commits_read[next(iter(self._commits_read))]
            self._commits_read[commit.version] = commit

    def _commit_key(self, version: int) -> str:
        return f"{self._log}{version:020d}.json"

    def _last_checkpoint(self) -> _Checkpoint:
        """The last checkpoint, as Delta's own note names it. Version -1: there is none."""
        try:
            content = self.store.read(f"{self._log}_last_checkpoint")
            return msgspec.json.decode(content, type=_Checkpoint)
        except (FileNotFoundError, msgspec.MsgspecError):
            return _Checkpoint()

    def _commit_sizes(self, after: int) -> list[int]:
        """The sizes of the commits after a version, in bytes."""
        sizes = []
        for key, size in self.store.keys(self._log, after=self._commit_key(max(after, 0))):
            if COMMIT_FILE_NAME.fullmatch(key.removeprefix(self._log)):
                sizes.append(size)
        return sizes

    def _logged_versions(self, after: int = -1) -> list[int]:
        """The versions from this one on whose commits are in the log, oldest first."""
        versions = []
        for key, _ in self.store.keys(self._log, after=f"{self._log}{max(after, 0):020d}"):
            name = key.removeprefix(self._log)
            if COMMIT_FILE_NAME.fullmatch(name):
                versions.append(int(name.removesuffix(".json")))
        return versions


class _Checkpoint(Struct, rename={"size_bytes": "sizeInBytes"}):
    """What `_last_checkpoint` says."""

    version: int = -1
    size_bytes: int = 0


def _commit_properties(metadata: Mapping[str, Any]) -> CommitProperties:
    # With a transaction of our app id, delta-rs refuses to rebase the commit on another one of
    # ours. Without it, and with retries, it would accept the append of a process thought dead.
    transaction = Transaction(COMMIT_METADATA_KEY, metadata[COMMIT_METADATA_KEY]["sequence"])
    return CommitProperties(
        custom_metadata=dict(metadata),
        max_commit_retries=0,
        app_transactions=[transaction],
    )


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
