"""The ledger in Delta: entries are commits on the records table, made by compare-and-set. What lies
beside the table, and what follows from its commits, is in ledger/manifests.py.

A commit is made on exactly the version of the table that was checked (storage/delta_table.py).

Next: ledger/commit.py decides what a refused commit means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pyarrow as pa
from msgspec import MsgspecError
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.findings import Finding
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError
from seriatim.ledger.entries import ColumnsEntry, CompactEntry, Entry
from seriatim.ledger.manifests import (
    MANIFEST_FORMAT,
    CommitMark,
    LedgerHead,
    Manifest,
    ManifestReference,
    StoredLedger,
    unreadable_ledger_error,
)
from seriatim.ledger.model import EntryMark
from seriatim.ports import CommitConflictError
from seriatim.storage.delta_table import (
    RECORD_TABLE_SETTINGS,
    STORAGE_ERRORS,
    MarkedTable,
    TableCommit,
    TableFile,
    TableVersion,
    record_table_file,
)
from seriatim.storage.parquet import first_line
from seriatim.storage.store import Store

log = logging.getLogger(__name__)


class DeltaLedger(StoredLedger):
    """The ledger of one stream, below the stream's output path. Without a schema it can only be
    read.
    """

    def __init__(
        self,
        store: Store,
        schema: pa.Schema | None = None,
        partition_by: tuple[str, ...] = (),
        schema_of_shape: Callable[[str], pa.Schema | None] | None = None,
    ) -> None:
        super().__init__(store)
        self.schema_of_shape = schema_of_shape
        """The schema of a table of this shape, if it lacks columns that the stream file has by now."""
        self.table = MarkedTable(
            store,
            "records",
            schema,
            partition_by=partition_by,
            settings=RECORD_TABLE_SETTINGS,
        )
        self._synced_sequence = -1
        """The last entry that this process committed and synced to the disk."""
        self._streams_to_announce: dict[str, str] = {}
        """Streams whose last entry has an older format, by the hash of the manifest of their next entry.
        When that entry is committed, the log says that the format is newer.
        """

    def load_table(self, stream: str, version: int | None = None) -> TableVersion | None:
        """The table of records, as of its newest version or an earlier one."""
        with _reading_table(stream):
            return self.table.load(version)

    def logged_commits(self, stream: str, table: TableVersion) -> Iterator[CommitMark | Finding]:
        """The marks of our commits, and findings for those of others that changed data."""
        with _reading_table(stream):
            for commit in self.table.commits(table):
                if commit.mark is not None:
                    mark = _parse_mark(stream, commit)
                    if self.store.is_remote:
                        self.known_marks[mark.sequence] = mark
                    yield mark
                elif commit.changes_data:
                    yield _foreign_finding(commit)

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry. A table with other columns than the machine's is refused."""
        head = super().head(stream)
        if head is None or self.table.schema is None:
            return head
        schema = None
        if self.schema_of_shape is not None:
            schema = self.schema_of_shape(head.ledger.shape)
        if schema is not None or self.table.must_compare_columns(head.token):
            self._refuse_other_schema(stream, head.token, schema)
        return head

    def witness(self) -> EntryMark | None:
        """The last entry that head.json knows. None: no such file."""
        witness = super().witness()
        self.table.known_version = max(self.table.known_version, self.manifests.noted_version)
        return witness

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store a manifest under its own hash. Before the first one, the store is probed."""
        if manifest.entry.sequence == 0:
            self.store.refuse_if_unsafe()
        return super().put_manifest(manifest)

    def find_mark(self, stream: str, sequence: int) -> CommitMark:
        """The commit that made an entry. An entry that does not exist is refused. A long log is not
        read through, unless it has lost commits.
        """
        if sequence >= 0 and sequence not in self.known_marks:
            table = self.load_table(stream)
            commit = None
            if table is not None:
                with _reading_table(stream):
                    commit = self.table.commit_of_sequence(table, sequence)
            if commit is not None:
                mark = _parse_mark(stream, commit)
                if self.store.is_remote:
                    self.known_marks[sequence] = mark
                return mark
        return super().find_mark(stream, sequence)

    def delta_version(self, stream: str, sequence: int) -> int:
        """The Delta version that entry `sequence` made."""
        return self.find_mark(stream, sequence).version

    def compare_and_set(
        self,
        head: LedgerHead | None,
        entry: Entry,
        manifest: ManifestReference,
    ) -> None:
        """Make one Delta commit on exactly the table object of `head`, and sync it to the disk.
        Raises `CommitConflictError` if the commit or the sync is not confirmed.
        """
        mark = {
            "sequence": entry.sequence,
            "previous": entry.previous,
            "manifest": manifest.path,
            "sha256": manifest.sha256,
        }
        added_files: list[File] = []
        table_files: list[TableFile] = []
        for change in entry.changes:
            added_files += change.records
            for file in change.records:
                table_files.append(record_table_file(change.partition, file))
        self._refuse_missing_files(added_files)
        removed_keys = [path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE]
        if head is not None and head.format < MANIFEST_FORMAT:
            self._streams_to_announce[manifest.sha256] = head.ledger.stream
        if isinstance(entry, ColumnsEntry) and head is not None:
            version = self.table.add_columns(head.token, mark)
        else:
            version = self.table.commit(
                None if head is None else head.token,
                mark,
                table_files,
                removed_keys,
                data_change=not isinstance(entry, CompactEntry),
            )
        if self.store.is_remote:
            known = msgspec.convert(mark, CommitMark)
            self.known_marks[entry.sequence] = replace(known, version=version)
        self._synced_sequence = entry.sequence
        self._announce_format(manifest.sha256)

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""
        is_committed = super().has_manifest(sha256, after)
        if is_committed:
            # A commit of ours whose answer got lost is known only from here.
            self._announce_format(sha256)
        return is_committed

    def _announce_format(self, sha256: str) -> None:
        """Log that an output has a newer format, after the first entry of ours that has it."""
        stream = self._streams_to_announce.pop(sha256, None)
        if stream is not None:
            log.warning(
                "%s: this output is now written in format %d; versions before 0.2.0 refuse it",
                stream,
                MANIFEST_FORMAT,
                extra={"fields": {"format": MANIFEST_FORMAT}},
            )

    def _refuse_missing_files(self, files: list[File]) -> None:
        """Refuse files that are not there as they were written: a Delta commit may name anything."""
        sizes = self.store.sizes([file.path for file in files])
        for file, size in zip(files, sizes, strict=True):
            if size != file.size_bytes:
                raise CommitConflictError(
                    f"{file.path} is not there as it was written:"
                    " another run has swept it, or the disk lost or changed it"
                )

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The paths of the record files in the table as of `head`."""
        # Only the column of paths becomes Python values: there may be very many files.
        adds = pa.table(head.token.delta.get_add_actions())
        return {f"records/{path}" for path in adds.column("path").to_pylist()}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files in the table as of `head`, with what the Delta log says about each."""
        return self._files(head.token)

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files in the table after an earlier entry."""
        loaded = self.load_table(stream, self.delta_version(stream, sequence))
        return self._files(loaded) if loaded is not None else []

    def _files(self, loaded: TableVersion) -> list[File]:
        files = []
        for table_file in self.table.files(loaded).values():
            file = File(
                path=table_file.key,
                size_bytes=table_file.size_bytes,
                rows=table_file.rows or 0,
                digest="",
                first_offset=table_file.lowest["offset"],
                last_offset=table_file.highest["offset"],
            )
            files.append(file)
        return files

    def put_witness(self, entry: EntryMark) -> None:
        """Write the last entry to head.json, after its commit is on the disk."""
        if entry.sequence != self._synced_sequence:
            # Another process made that commit, or ours was not confirmed. It may still be in the
            # page cache alone, and a witness must never be ahead of its log after a power cut.
            self.store.sync_delta_log("records")
        known = self.known_marks.get(entry.sequence)
        self.manifests.put_witness(entry, -1 if known is None else known.version)

    def _refuse_other_schema(
        self, stream: str, table: TableVersion, schema: pa.Schema | None
    ) -> None:
        partition_columns = table.delta.metadata().partition_columns
        if partition_columns != self.table.partition_by:
            raise ConfigError(
                f"{stream}: the records are partitioned by {partition_columns}, "
                f"the stream file says {self.table.partition_by}",
                next="set output.partition_by back, or give the stream a new output path",
            )
        difference = self.table.column_difference(table, schema)
        if difference is not None:
            type_in_table = difference.type_in_table or "not there"
            expected_type = difference.expected_type or "not there"
            advice = (
                "set the columns of the stream file or its machine back to those of the table,"
                " or write a new output.path into the stream file. New columns of a table may only be"
                " added behind all others"
            )
            if not difference.expected_type:
                # Another run, with a newer stream file, may have added it since this one began.
                advice = (
                    "start again with the newest stream file, which may have this column;"
                    f" or add the column to the stream file. {advice}"
                )
            raise ConfigError(
                f"{stream}: column {difference.name!r} is {type_in_table} in the records table,"
                f" but {expected_type} in the stream file or its machine",
                next=advice,
            )


@contextmanager
def _reading_table(stream: str) -> Iterator[None]:
    """Report a table that cannot be read as a ledger that cannot be read."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise unreadable_ledger_error(stream, first_line(error)) from error


def _parse_mark(stream: str, commit: TableCommit) -> CommitMark:
    try:
        mark = msgspec.convert(commit.mark, CommitMark)
    except MsgspecError as error:
        raise unreadable_ledger_error(
            stream, f"the mark of Delta version {commit.version}: {error}"
        ) from error
    return replace(mark, version=commit.version)


def _foreign_finding(commit: TableCommit) -> Finding:
    return Finding(
        finding="foreign",
        found=f"Delta version {commit.version}, {commit.operation}",
        expected="no commits but Seriatim's on the records table",
        cause=f"made by {commit.author}",
    )
