"""The ledger's commits in memory, and a clock.

Next room: ledger/commit.py is the rule by which entries get here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256 as sha256_of

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path
from seriatim.errors import ConfigError, IntegrityError, ensure
from seriatim.ledger import model as ledgers
from seriatim.ledger.model import Change, Entry, File, Ledger, Manifest
from seriatim.ports import CommitConflictError, LedgerHead


class MemoryCommit(Struct, frozen=True):
    """One version of the records table: an entry of ours, or a foreign commit."""

    entry: Entry | None = None
    manifest: str = ""
    sha256: str = ""
    foreign: str = ""
    """What somebody else did to the data; empty for a foreign commit that changed none."""


class MemoryLedger:
    """The records table's commits, manifests and witness. Implements `LedgerStore`."""

    def __init__(self, read: Callable[[File], object] | None = None) -> None:
        self.read = read
        """Raises IntegrityError for a file that is not there: no commit may name one."""
        self.commits: list[MemoryCommit] = []
        self.manifests: dict[str, bytes] = {}
        self.stored_witness: tuple[int, str] | None = None
        self.stored_reported_sequence = -1
        self.stored_differing_files: list[str] = []
        self.archived_witnesses: dict[str, str] = {}
        """Witnesses moved away, and why."""
        self.lost_answers = 0
        """So many commits happen, but are answered with an error."""
        self.refusals = 0
        """So many commits fail, with nobody else there."""
        self.on_call: Callable[[str], None] = _ignore_call
        """Told before each call, by name: a place for tests to let others in between."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry; None if there is no ledger."""
        self.on_call("head")
        ours = [i for i, commit in enumerate(self.commits) if commit.entry is not None]
        if not ours:
            return None
        later = [commit.foreign for commit in self.commits[ours[-1] + 1 :] if commit.foreign]
        foreign = [Finding(finding="foreign", cause=what) for what in later]
        return LedgerHead(
            self._manifest(self.commits[ours[-1]], stream).ledger,
            token=len(self.commits),
            foreign_findings=foreign,
        )

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest_at(stream, sequence).ledger

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger as of it."""
        ours = [commit for commit in self.commits if commit.entry is not None]
        if not 0 <= sequence < len(ours):
            raise ConfigError(f"{stream}: there is no ledger entry {sequence}")
        return self._manifest(ours[sequence], stream)

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than `after`, oldest first."""
        ours = [commit for commit in self.commits if commit.entry is not None]
        return (self._manifest(commit, stream) for commit in ours[after + 1 :])

    def _manifest(self, commit: MemoryCommit, stream: str) -> Manifest:
        content = self.manifests.get(commit.manifest, b"")
        if sha256_of(content).hexdigest() != commit.sha256:
            raise IntegrityError(
                f"{commit.manifest} is corrupt or missing", next="restore it from a backup"
            )
        manifest = ledgers.decode_manifest(content)
        ledger = manifest.ledger
        if ledger.stream != stream:
            raise ConfigError(f"{stream}: its output path holds stream {ledger.stream!r}")
        return replace(manifest, ledger=replace(ledger, sha256=commit.sha256))

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The record files of the table as of `head`."""
        return {file.path for file in self._files_as_of(head.ledger.sequence)}

    def active_files(self, head: LedgerHead) -> list[File]:
        """The same, whole."""
        return [replace(file, digest="") for file in self._files_as_of(head.ledger.sequence)]

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be."""
        named = {commit.manifest for commit in self.commits}
        numbers = {
            path: int(path.removeprefix("manifests/").partition("-")[0]) for path in self.manifests
        }
        dead = [
            path for path in numbers if numbers[path] <= head.ledger.sequence and path not in named
        ]
        for path in dead:
            del self.manifests[path]
        return sorted(dead)

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest under a name that says its content."""
        self.on_call("put_manifest")
        sha256 = sha256_of(content).hexdigest()
        path = f"manifests/{sequence}-{sha256}.json"
        self.manifests[path] = content
        return path, sha256

    def compare_and_set(
        self, head: LedgerHead | None, entry: Entry, manifest: str, sha256: str
    ) -> None:
        """Commit on top of exactly `head`, or raise `CommitConflictError`."""
        self.on_call("compare_and_set")
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if (0 if head is None else head.token) != len(self.commits):
            raise CommitConflictError("somebody else committed meanwhile")
        self._check_files(entry)
        self.commits.append(MemoryCommit(entry, manifest, sha256))
        self.on_call("committed")
        if self.lost_answers:
            self.lost_answers -= 1
            raise CommitConflictError("the answer got lost")

    def _check_files(self, entry: Entry) -> None:
        active = {file.path for file in self.files_now()}
        if gone := sorted(
            {path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE} - active
        ):
            raise CommitConflictError(f"{gone[0]} is not in the table")
        for file in [
            file
            for change in entry.changes
            for file in (*change.records, *_other_record_files(change))
        ]:
            ensure(file.path not in active, "a file is named once", path=file.path)
            try:
                if self.read is not None:
                    self.read(file)
            except IntegrityError as missing:
                raise CommitConflictError(missing.message) from missing

    def files_now(self) -> list[File]:
        """The record files of the table now, oldest first."""
        return self._files_as_of(len(self.commits))

    def files_at(self, _: str, sequence: int) -> list[File]:
        """Those of an earlier entry."""
        return self._files_as_of(sequence)

    def _files_as_of(self, last: int) -> list[File]:
        found: dict[str, File] = {}
        for entry in filter(None, (commit.entry for commit in self.commits)):
            if entry.sequence > last:
                break
            found = {path: file for path, file in found.items() if path not in entry.removed_paths}
            found |= {file.path: file for change in entry.changes for file in change.records}
        return list(found.values())

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than `after` names this manifest."""
        self.on_call("has")
        later = [c for c in self.commits if c.entry is not None and c.entry.sequence > after]
        return any(commit.sha256 == sha256 for commit in later)

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
        """Move head.json away, with the reason."""
        self.on_call("set_witness_aside")
        sequence, sha256 = self.stored_witness or (-1, "")
        path = f"head-{sequence}-{sha256[:12]}.json"
        self.archived_witnesses[path], self.stored_witness = reason, None
        return path

    def foreign_commit(self, what: str = "") -> None:
        """Somebody else writes to the table; `what` says how the data changed, if it did."""
        self.commits.append(MemoryCommit(foreign=what))


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
    """Nobody listens."""
