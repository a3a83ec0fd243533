"""The ledger's commits in memory, and a clock.

Next room: steps/commit.py is the rule by which entries get here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256 as sha256_of

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core import ledger as ledgers
from seriatim.core.errors import ConfigError, IntegrityError, ensure
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Change, Entry, File, Ledger, Manifest
from seriatim.core.outputs import MAIN, table_in
from seriatim.ports import Conflict, Head


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
        self.seen: tuple[int, str] | None = None
        self.told_sequence = -1
        self.differing: list[str] = []
        self.aside: dict[str, str] = {}
        """Witnesses moved away, and why."""
        self.answers_lost = 0
        """So many commits happen, but are answered with an error."""
        self.refusals = 0
        """So many commits fail, with nobody else there."""
        self.on_call: Callable[[str], None] = _silent
        """Told before each call, by name: a place for tests to let others in between."""

    def head(self, stream: str) -> Head | None:
        """The last entry; None if there is no ledger."""
        self.on_call("head")
        ours = [i for i, commit in enumerate(self.commits) if commit.entry is not None]
        if not ours:
            return None
        later = [commit.foreign for commit in self.commits[ours[-1] + 1 :] if commit.foreign]
        foreign = [Finding(finding="foreign", cause=what) for what in later]
        return Head(self._manifest(self.commits[ours[-1]], stream).ledger, token=len(self.commits), foreign=foreign)

    def at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        return self.manifest(stream, sequence).ledger

    def manifest(self, stream: str, sequence: int) -> Manifest:
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
            raise IntegrityError(f"{commit.manifest} is corrupt or missing", next="restore it from a backup")
        manifest = ledgers.decode(content)
        ledger = manifest.ledger
        if ledger.stream != stream:
            raise ConfigError(f"{stream}: its output path holds stream {ledger.stream!r}")
        return replace(manifest, ledger=replace(ledger, sha256=commit.sha256))

    def active_paths(self, head: Head) -> set[str]:
        """The record files of the table as of `head`."""
        return {file.path for file in self._active(head.ledger.sequence)}

    def active_files(self, head: Head) -> list[File]:
        """The same, whole."""
        return [replace(file, digest="") for file in self._active(head.ledger.sequence)]

    def sweep(self, head: Head) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be."""
        named = {commit.manifest for commit in self.commits}
        numbers = {path: int(path.removeprefix("manifests/").partition("-")[0]) for path in self.manifests}
        dead = [path for path in numbers if numbers[path] <= head.ledger.sequence and path not in named]
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

    def compare_and_set(self, head: Head | None, entry: Entry, manifest: str, sha256: str) -> None:
        """Commit on top of exactly `head`, or raise `Conflict`."""
        self.on_call("compare_and_set")
        if self.refusals:
            self.refusals -= 1
            raise Conflict("the store did not answer")
        if (0 if head is None else head.token) != len(self.commits):
            raise Conflict("somebody else committed meanwhile")
        self._check_files(entry)
        self.commits.append(MemoryCommit(entry, manifest, sha256))
        self.on_call("committed")
        if self.answers_lost:
            self.answers_lost -= 1
            raise Conflict("the answer got lost")

    def _check_files(self, entry: Entry) -> None:
        active = {file.path for file in self.active()}
        if gone := sorted({path for path in entry.removed if table_in(path) == MAIN} - active):
            raise Conflict(f"{gone[0]} is not in the table")
        for file in [file for change in entry.changes for file in (*change.records, *_beside(change))]:
            ensure(file.path not in active, "a file is named once", path=file.path)
            try:
                if self.read is not None:
                    self.read(file)
            except IntegrityError as missing:
                raise Conflict(missing.message) from missing

    def active(self) -> list[File]:
        """The record files of the table now, oldest first."""
        return self._active(len(self.commits))

    def files_at(self, _: str, sequence: int) -> list[File]:
        """Those of an earlier entry."""
        return self._active(sequence)

    def _active(self, last: int) -> list[File]:
        found: dict[str, File] = {}
        for entry in filter(None, (commit.entry for commit in self.commits)):
            if entry.sequence > last:
                break
            found = {path: file for path, file in found.items() if path not in entry.removed}
            found |= {file.path: file for change in entry.changes for file in change.records}
        return list(found.values())

    def has(self, sha256: str, after: int) -> bool:
        """Whether an entry later than `after` names this manifest."""
        self.on_call("has")
        later = [c for c in self.commits if c.entry is not None and c.entry.sequence > after]
        return any(commit.sha256 == sha256 for commit in later)

    def differs(self) -> list[str]:
        """What differs.json says."""
        return self.differing

    def told(self) -> int:
        """What told.json says."""
        return self.told_sequence

    def put_told(self, sequence: int) -> None:
        """Write told.json."""
        self.told_sequence = sequence

    def witness(self) -> tuple[int, str] | None:
        """What head.json says."""
        self.on_call("witness")
        return self.seen

    def put_witness(self, sequence: int, sha256: str) -> None:
        """Write head.json."""
        self.on_call("put_witness")
        self.seen = (sequence, sha256)

    def set_witness_aside(self, reason: str) -> str:
        """Move head.json away, with the reason."""
        self.on_call("set_witness_aside")
        sequence, sha256 = self.seen or (-1, "")
        path = f"head-{sequence}-{sha256[:12]}.json"
        self.aside[path], self.seen = reason, None
        return path

    def foreign_commit(self, what: str = "") -> None:
        """Somebody else writes to the table; `what` says how the data changed, if it did."""
        self.commits.append(MemoryCommit(foreign=what))


def _beside(change: Change) -> list[File]:
    return [file for files in change.others.values() for file in files]


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


def _silent(_: str) -> None:
    """Nobody listens."""
