"""The commits of the ledger in memory, and a clock.

Next: ledger/commit.py has the rule by which entries get here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File, file_paths
from seriatim.engine.findings import Finding
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.errors import IntegrityError, ensure
from seriatim.ledger.entries import Entry
from seriatim.ledger.manifests import (
    WITNESS_KEY,
    CommitMark,
    LedgerHead,
    Manifest,
    ManifestFiles,
    ManifestReference,
    StoredLedger,
)
from seriatim.ledger.model import Change, EntryMark
from seriatim.memory.store import MemoryStore
from seriatim.ports import CommitConflictError


class MemoryCommit(Struct, frozen=True):
    """One version of the records table: an entry of ours, or a commit of somebody else."""

    entry: Entry | None = None
    manifest: ManifestReference = ManifestReference(-1, "", "")
    """The manifest of the entry."""
    foreign: str = ""
    """What somebody else did to the data; empty if the commit changed none."""


class MemoryLedger(StoredLedger):
    """The commits of the records table in a list. Implements `LedgerStore`."""

    def __init__(self, read: Callable[[File], object] | None = None) -> None:
        super().__init__(MemoryStore())
        self.read = read
        """Raises IntegrityError for a file that is missing: no commit may name one."""
        self.commits: list[MemoryCommit] = []
        self.lost_answers = 0
        """How many of the next commits succeed, but are answered with an error."""
        self.refusals = 0
        """How many of the next commits fail, although nobody else committed."""
        self.on_call: Callable[[str], None] = _ignore_call
        """Called with a name before each call. Tests let other runs in between here."""

    @property
    def manifests(self) -> ManifestFiles:
        """The manifests, read anew: what was read before must not hide what a test has damaged."""
        return ManifestFiles(self.store)

    @property
    def stored_witness(self) -> EntryMark | None:
        """What head.json says."""
        return self.manifests.witness()

    @stored_witness.setter
    def stored_witness(self, entry: EntryMark | None) -> None:
        if entry is None:
            self.store.delete([WITNESS_KEY])
        else:
            self.manifests.put_witness(entry)

    def load_table(self, stream: str) -> int | None:  # there is only one
        """How many commits there are; None if there are none."""
        return len(self.commits) or None

    def logged_commits(self, stream: str, table: int) -> Iterator[CommitMark | Finding]:
        """The marks of entries, and findings for commits of others that changed data."""
        for commit in reversed(self.commits[:table]):
            if commit.entry is not None:
                manifest = commit.manifest
                yield CommitMark(
                    sequence=manifest.sequence, manifest=manifest.path, sha256=manifest.sha256
                )
            elif commit.foreign:
                yield Finding(finding="foreign", cause=commit.foreign)

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry, and findings for what others committed after it. None: no ledger yet."""
        self.on_call("head")
        return super().head(stream)

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than `after` names this manifest."""
        self.on_call("has")
        return super().has_manifest(sha256, after)

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store a manifest under its own hash."""
        self.on_call("put_manifest")
        return super().put_manifest(manifest)

    def witness(self) -> EntryMark | None:
        """What head.json says."""
        self.on_call("witness")
        return super().witness()

    def put_witness(self, entry: EntryMark) -> None:
        """Write head.json."""
        self.on_call("put_witness")
        super().put_witness(entry)

    def archive_witness(self, reason: str) -> str:
        """Move head.json away with the reason, and return the new path."""
        self.on_call("archive_witness")
        return super().archive_witness(reason)

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The paths of the record files in the table as of `head`."""
        return set(file_paths(self._files_as_of(head.ledger.sequence)))

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files in the table as of `head`, without digests, as Delta has them."""
        files = self._files_as_of(head.ledger.sequence)
        return [replace(file, digest="") for file in files]

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
        active = set(file_paths(self.files_now()))
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
