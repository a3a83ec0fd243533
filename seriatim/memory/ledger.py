"""The commits of the ledger in memory, and a clock.

Next: ledger/commit.py has the rule by which entries get here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.findings import Finding
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError, IntegrityError, ensure
from seriatim.ledger.entries import Entry
from seriatim.ledger.manifests import (
    Manifest,
    ManifestFiles,
    ManifestReference,
    UnreadableManifestError,
)
from seriatim.ledger.model import Change, Ledger
from seriatim.memory.store import MemoryStore
from seriatim.ports import CommitConflictError, LedgerHead


class MemoryCommit(Struct, frozen=True):
    """One version of the records table: an entry of ours, or a commit of somebody else."""

    entry: Entry | None = None
    manifest: ManifestReference = ManifestReference(-1, "", "")
    """The manifest of the entry."""
    foreign: str = ""
    """What somebody else did to the data; empty if the commit changed none."""


class MemoryLedger:
    """The commits of the records table, manifests and witness. Implements `LedgerStore`."""

    def __init__(self, read: Callable[[File], object] | None = None) -> None:
        self.read = read
        """Raises IntegrityError for a file that is missing: no commit may name one."""
        self.commits: list[MemoryCommit] = []
        self.store = MemoryStore()
        """The manifests."""
        self.stored_witness: tuple[int, str] | None = None
        self.stored_reported_sequence = -1
        self.stored_differing_files: list[str] = []
        self.archived_witnesses: dict[str, str] = {}
        """The witnesses that were moved away, and the reason of each."""
        self.lost_answers = 0
        """How many of the next commits succeed, but are answered with an error."""
        self.refusals = 0
        """How many of the next commits fail, although nobody else committed."""
        self.on_call: Callable[[str], None] = _ignore_call
        """Called with a name before each call. Tests let other runs in between here."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and findings for what others committed after it. None: no ledger yet."""
        self.on_call("head")
        foreign_findings: list[Finding] = []
        for commit in reversed(self.commits):
            if commit.entry is not None:
                manifest = self._manifest(commit, stream)
                return LedgerHead(
                    manifest.ledger,
                    token=len(self.commits),
                    foreign_findings=foreign_findings,
                    format=manifest.format,
                )
            if commit.foreign:
                foreign_findings.insert(0, Finding(finding="foreign", cause=commit.foreign))
        return None

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger after it."""
        entry_commits = self._entry_commits()
        if not 0 <= sequence < len(entry_commits):
            raise ConfigError(f"{stream}: there is no ledger entry {sequence}")
        return self._manifest(entry_commits[sequence], stream)

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        later = self._entry_commits()[after + 1 :]
        return (self._manifest(commit, stream) for commit in later)

    def _entry_commits(self) -> list[MemoryCommit]:
        return [commit for commit in self.commits if commit.entry is not None]

    def _manifest(self, commit: MemoryCommit, stream: str) -> Manifest:
        # A new reader has read nothing yet, so it sees what a test has damaged.
        reader = ManifestFiles(self.store)
        try:
            manifest = reader.read(commit.manifest)
        except UnreadableManifestError as error:
            raise IntegrityError(
                f"{error.reference.path} is corrupt or missing", next="restore it from a backup"
            ) from error
        if manifest.ledger.stream != stream:
            raise ConfigError(f"{stream}: its output path holds stream {manifest.ledger.stream!r}")
        return manifest

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The paths of the record files in the table as of `head`."""
        return {file.path for file in self._files_as_of(head.ledger.sequence)}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files in the table as of `head`, without digests, as Delta has them."""
        files = self._files_as_of(head.ledger.sequence)
        return [replace(file, digest="") for file in files]

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete manifests of entries up to `head` that were never committed. Returns their paths."""
        committed = {commit.manifest.path for commit in self.commits}
        swept = []
        for sequence, references in ManifestFiles(self.store).references_by_sequence().items():
            for reference in references:
                if sequence <= head.ledger.sequence and reference.path not in committed:
                    swept.append(reference.path)
        return self.store.delete(swept)

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store a manifest under its own hash."""
        self.on_call("put_manifest")
        return ManifestFiles(self.store).write(manifest)

    def compare_and_set(
        self,
        head: LedgerHead | None,
        entry: Entry,
        manifest: ManifestReference,
    ) -> None:
        """Commit on top of exactly `head`, or raise `CommitConflictError`."""
        self.on_call("compare_and_set")
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        expected_commits = 0 if head is None else head.token
        if expected_commits != len(self.commits):
            raise CommitConflictError("somebody else committed meanwhile")
        self._check_files(entry)
        self.commits.append(MemoryCommit(entry, manifest))
        self.on_call("committed")
        # The commit is done, but its caller does not learn it: as when a connection breaks.
        if self.lost_answers:
            self.lost_answers -= 1
            raise CommitConflictError("the answer got lost")

    def _check_files(self, entry: Entry) -> None:
        active = {file.path for file in self.files_now()}
        removed = {path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE}
        not_active = sorted(removed - active)
        if not_active:
            raise CommitConflictError(f"{not_active[0]} is not in the table")
        for change in entry.changes:
            for file in (*change.records, *_other_record_files(change)):
                ensure(file.path not in active, "a file is named once", path=file.path)
                self._refuse_missing_file(file)

    def _refuse_missing_file(self, file: File) -> None:
        if self.read is None:
            return
        try:
            self.read(file)
        except IntegrityError as missing:
            raise CommitConflictError(missing.message) from missing

    def files_now(self) -> list[File]:
        """The record files that are in the table now, oldest first."""
        return self._files_as_of(len(self.commits))

    def files_at(self, _: str, sequence: int) -> list[File]:
        """The record files in the table after an earlier entry."""
        return self._files_as_of(sequence)

    def _files_as_of(self, sequence: int) -> list[File]:
        files: dict[str, File] = {}
        for commit in self.commits:
            entry = commit.entry
            if entry is None:
                continue
            if entry.sequence > sequence:
                break
            for path in entry.removed_paths:
                files.pop(path, None)
            for change in entry.changes:
                for file in change.records:
                    files[file.path] = file
        return list(files.values())

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than `after` names this manifest."""
        self.on_call("has")
        return any(
            commit.manifest.sha256 == sha256
            for commit in self.commits
            if commit.entry is not None and commit.entry.sequence > after
        )

    def differing_files(self) -> list[str]:
        """What differs.json says."""
        return self.stored_differing_files

    def reported_sequence(self) -> int:
        """What told.json says."""
        return self.stored_reported_sequence

    def put_reported_sequence(self, sequence: int) -> None:
        """Write told.json."""
        self.stored_reported_sequence = sequence

    def witness(self) -> tuple[int, str] | None:
        """What head.json says."""
        self.on_call("witness")
        return self.stored_witness

    def put_witness(self, sequence: int, sha256: str) -> None:
        """Write head.json."""
        self.on_call("put_witness")
        self.stored_witness = (sequence, sha256)

    def archive_witness(self, reason: str) -> str:
        """Move head.json away with the reason, and return the new path."""
        self.on_call("archive_witness")
        sequence, sha256 = self.stored_witness or (-1, "")
        path = f"head-{sequence}-{sha256[:12]}.json"
        self.archived_witnesses[path] = reason
        self.stored_witness = None
        return path

    def foreign_commit(self, data_change: str = "") -> None:
        """Let somebody else commit to the table. `data_change` says how the data changed, if it
        did.
        """
        self.commits.append(MemoryCommit(foreign=data_change))


def _other_record_files(change: Change) -> list[File]:
    return [file for files in change.other_records.values() for file in files]


class MemoryClock:
    """Time that passes only by sleeping."""

    def __init__(self, now_seconds: float = 0.0) -> None:
        self.now = now_seconds

    def now_seconds(self) -> float:
        """Seconds since 1970."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def _ignore_call(_: str) -> None:
    """The default: nothing is done."""
