"""The ledger in Delta: entries are commits on the records table, made by compare-and-set. The
manifests and the witness are files beside it (ledger/manifests.py).

A commit is made on the same loaded table object that was checked, never reloaded in between
(storage/delta_table.py).

Next: ledger/commit.py decides what a refused commit means.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.findings import Finding
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.entries import CompactEntry, Entry
from seriatim.ledger.manifests import (
    MANIFEST_FOLDER,
    MANIFEST_FORMAT,
    Manifest,
    ManifestFiles,
    ManifestReference,
    UnreadableManifestError,
    UnreadableWitnessError,
    Witness,
)
from seriatim.ledger.model import Ledger
from seriatim.ports import CommitConflictError, LedgerHead
from seriatim.storage.delta_table import STORAGE_ERRORS, MarkedTable, TableCommit, first_line
from seriatim.storage.further_tables import RECORD_TABLE_SETTINGS, record_table_file
from seriatim.storage.store import Store

log = logging.getLogger(__name__)


class CommitMark(Struct, frozen=True, kw_only=True):
    """What a Delta commit says about its ledger entry, in its metadata."""

    sequence: int
    manifest: str
    sha256: str
    version: int = -1
    """The version of the Delta table that this commit made."""

    def manifest_reference(self) -> ManifestReference:
        """The manifest of the entry."""
        return ManifestReference(self.sequence, self.manifest, self.sha256)


class DeltaLedger:
    """The ledger of one stream, below the stream's output path. Without a schema it can only be
    read.
    """

    def __init__(
        self,
        store: Store,
        schema: pa.Schema | None = None,
        partition_by: tuple[str, ...] = (),
    ) -> None:
        self.store = store
        self.table = MarkedTable(
            store,
            "records",
            schema,
            partition_by=partition_by,
            settings=RECORD_TABLE_SETTINGS,
        )
        self._manifests = ManifestFiles(store)
        self._synced_sequence = -1
        """The last entry that this process committed and synced to the disk."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and findings for what others committed after it. None: no ledger yet."""
        table = self._load_table(stream)
        if table is None:
            return None
        mark, foreign_findings = self._last_entry(stream, table)
        with _reading_manifest(stream):
            manifest = self._manifests.read_ledger(mark.manifest_reference())
        _refuse_other_manifest(stream, mark, manifest.entry.sequence, manifest.ledger)
        self._refuse_other_schema(stream, table)
        return LedgerHead(manifest.ledger, table, foreign_findings, manifest.format)

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An entry and the whole ledger after it."""
        return self._read_manifest(stream, self._find_mark(stream, sequence))

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        table = self._load_table(stream)
        marks: list[CommitMark] = []
        if table is not None:
            for mark in self._entry_marks(stream, table):
                if mark.sequence <= after:
                    break
                marks.append(mark)
        return (self._read_manifest(stream, mark) for mark in reversed(marks))

    def delta_version(self, stream: str, sequence: int) -> int:
        """The Delta version that entry `sequence` made."""
        return self._find_mark(stream, sequence).version

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store a manifest under its own hash."""
        return self._manifests.write(manifest)

    def compare_and_set(
        self,
        head: LedgerHead | None,
        entry: Entry,
        manifest: ManifestReference,
    ) -> None:
        """Make one Delta commit on exactly the table object of `head`, and sync it to the disk.
        Raises `CommitConflictError` if either is not confirmed.
        """
        mark = {
            "sequence": entry.sequence,
            "previous": entry.previous,
            "manifest": manifest.path,
            "sha256": manifest.sha256,
        }
        adds = []
        for change in entry.changes:
            for file in change.records:
                if self.store.size(file.path) != file.size_bytes:
                    raise CommitConflictError(
                        f"{file.path} is not there: another run has swept it, or the disk lost it"
                    )
                adds.append(record_table_file(change.partition, file))
        self.table.commit(
            None if head is None else head.token,
            mark,
            adds,
            [path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE],
            data_change=not isinstance(entry, CompactEntry),
        )
        self._synced_sequence = entry.sequence
        if head is not None and head.format < MANIFEST_FORMAT:
            log.warning(
                "%s: this output is now written in format %d; versions before 0.2.0 refuse it",
                head.ledger.stream,
                MANIFEST_FORMAT,
                extra={"fields": {"format": MANIFEST_FORMAT}},
            )

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""
        stream = self._folder_name()
        table = self._load_table(stream)
        if table is None:
            return False
        for mark in self._entry_marks(stream, table):
            if mark.sequence <= after:
                return False
            if mark.sha256 == sha256:
                return True
        return False

    def differing_files(self) -> list[str]:
        """The file that `verify` reported as different from its entry, if any."""
        try:
            report = json.loads(self.store.read("differs.json"))
            return [str(report["file"])]
        except (OSError, ValueError, KeyError, TypeError):
            # A report that cannot be read is no loss: verify finds the difference again.
            return []

    def reported_sequence(self) -> int:
        """The last entry whose findings were reported to a person; -1 if none.

        If the file is lost, findings are reported again. They are never left out.
        """
        try:
            reported = json.loads(self.store.read("told.json"))
            return int(reported["sequence"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1

    def put_reported_sequence(self, sequence: int) -> None:
        """Note that the findings of every entry up to this one were reported."""
        self.store.replace("told.json", json.dumps({"sequence": sequence}).encode())

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The paths of the record files in the table as of `head`."""
        adds = pa.table(head.token.get_add_actions())
        return {f"records/{path}" for path in adds.column("path").to_pylist()}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files in the table as of `head`, with what the Delta log says about each."""
        return self._files(head.token)

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files in the table after an earlier entry."""
        loaded = self._load_table(stream, self.delta_version(stream, sequence))
        return self._files(loaded) if loaded is not None else []

    def _files(self, loaded: DeltaTable) -> list[File]:
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

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete unfinished files, and manifests of entries up to `head` that were never committed.
        Returns the deleted paths.
        """
        # Only the notes beside the folders: what is in them may still be written by other runs.
        swept = self.store.delete_unfinished("", nested=False)
        swept += self.store.delete_unfinished(MANIFEST_FOLDER)
        # An entry has exactly one manifest. Only where there are several of one number is it worth
        # reading the whole log to learn which of them was committed.
        candidates: set[str] = set()
        for sequence, references in self._manifests.references_by_sequence().items():
            if sequence <= head.ledger.sequence and len(references) > 1:
                candidates.update(reference.path for reference in references)
        if not candidates:
            return swept
        marks = self._entry_marks(head.ledger.stream, head.token)
        # The base of a manifest is a committed one, so bases stay with the others.
        committed = {mark.manifest for mark in marks}
        return swept + self.store.delete(candidates - committed)

    def witness(self) -> tuple[int, str] | None:
        """The last entry that head.json knows, as its sequence and hash. None: no such file."""
        try:
            witness = self._manifests.witness()
        except UnreadableWitnessError:
            raise IntegrityError(
                f"{self._folder_name()}: head.json cannot be read",
                cause="it was changed by somebody else: it is always replaced as a whole",
                next=f"restore {self.store.url}/head.json from a backup,\n"
                "or move it away after looking at the ledger",
            ) from None
        return None if witness is None else (witness.sequence, witness.sha256)

    def put_witness(self, sequence: int, sha256: str) -> None:
        """Write the last entry to head.json, after its commit is on the disk."""
        if sequence != self._synced_sequence:
            # Another process made that commit, or ours was not confirmed. It may still be in the
            # page cache alone, and a witness must never be ahead of its log after a power cut.
            self.store.sync_delta_log("records")
        self._manifests.put_witness(Witness(sequence, sha256))

    def archive_witness(self, reason: str) -> str:
        """Move head.json to a file that also has the reason, and return that file's path."""
        return self._manifests.archive_witness(reason)

    def _folder_name(self) -> str:
        """The last part of the output path, for messages where the stream's name is not known."""
        return self.store.url.rpartition("/")[2]

    def _load_table(self, stream: str, version: int | None = None) -> DeltaTable | None:
        try:
            return self.table.load(version)
        except STORAGE_ERRORS as error:
            raise _unreadable_error(stream, first_line(error)) from error

    def _last_entry(self, stream: str, table: DeltaTable) -> tuple[CommitMark, list[Finding]]:
        """The newest commit of Seriatim, and findings for later commits of others that changed
        data.
        """
        foreign_findings: list[Finding] = []
        for commit in self._commits(stream, table):
            if commit.mark is not None:
                return _parse_mark(stream, commit), foreign_findings
            if commit.changes_data:
                foreign_findings.append(_foreign_finding(commit))
        raise ConfigError(
            f"{stream}: {self.table.url} is a Delta table that Seriatim did not make",
            next="give the stream an output path of its own",
        )

    def _commits(self, stream: str, table: DeltaTable) -> Iterator[TableCommit]:
        """All commits of a table, newest first."""
        try:
            yield from self.table.commits(table)
        except STORAGE_ERRORS as error:
            raise _unreadable_error(stream, first_line(error)) from error

    def _entry_marks(self, stream: str, table: DeltaTable) -> Iterator[CommitMark]:
        """The marks of all entries, newest first. Commits of others are left out."""
        for commit in self._commits(stream, table):
            if commit.mark is not None:
                yield _parse_mark(stream, commit)

    def _find_mark(self, stream: str, sequence: int) -> CommitMark:
        table = self._load_table(stream)
        if table is not None and sequence >= 0:
            for mark in self._entry_marks(stream, table):
                if mark.sequence == sequence:
                    return mark
                if mark.sequence < sequence:
                    break
        raise ConfigError(
            f"{stream}: there is no ledger entry {sequence}",
            next=f"`seriatim status {stream}` shows the last",
        )

    def _read_manifest(self, stream: str, mark: CommitMark) -> Manifest:
        """The manifest that a commit names. Its hash, its entry and its stream must be as named."""
        with _reading_manifest(stream):
            manifest = self._manifests.read(mark.manifest_reference())
        _refuse_other_manifest(stream, mark, manifest.entry.sequence, manifest.ledger)
        return manifest

    def _refuse_other_schema(self, stream: str, table: DeltaTable) -> None:
        if self.table.schema is None:
            return
        partition_columns = table.metadata().partition_columns
        if partition_columns != self.table.partition_by:
            raise ConfigError(
                f"{stream}: the records are partitioned by {partition_columns}, "
                f"the stream file says {self.table.partition_by}",
                next="set output.partition_by back, or give the stream a new output path",
            )
        difference = self.table.column_difference(table)
        if difference is not None:
            type_in_table = difference.type_in_table or "not there"
            expected_type = difference.expected_type or "not there"
            raise ConfigError(
                f"{stream}: column {difference.name!r} is {type_in_table} in the records table,"
                f" {expected_type} by the stream file and its machine",
                next="set the columns back, or give the stream a new output path",
            )


@contextmanager
def _reading_manifest(stream: str) -> Iterator[None]:
    """Report a manifest that cannot be read as a ledger that cannot be read."""
    try:
        yield
    except UnreadableManifestError as error:
        path = error.reference.path
        reason = f"manifest {path}: {error.reason}"
        if error.actual_sha256:
            sequence = error.reference.sequence
            reason = f"manifest {path} is not what entry {sequence} names: {error.reason}"
        raise _unreadable_error(stream, reason) from error


def _refuse_other_manifest(stream: str, mark: CommitMark, sequence: int, ledger: Ledger) -> None:
    if sequence != mark.sequence:
        raise _unreadable_error(
            stream, f"manifest {mark.manifest} is of entry {sequence}, not {mark.sequence}"
        )
    if ledger.stream != stream:
        raise ConfigError(
            f"{stream}: its output path holds stream {ledger.stream!r}",
            next="give each stream its own path",
        )


def _parse_mark(stream: str, commit: TableCommit) -> CommitMark:
    try:
        mark = msgspec.convert(commit.mark, CommitMark)
    except MsgspecError as error:
        raise _unreadable_error(
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


def _unreadable_error(stream: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{stream}: the ledger cannot be read",
        cause=reason[:400],
        next="restore records/_delta_log and manifests/ from a backup; nothing starts again from 0"
        " by itself",
    )
