"""Followers: the tables that follow the ledger, and the one loop that brings them up to an entry.

The commit on `records/` has decided everything; followers show it. Each commit on a follower names
the entry that it reaches, and is made on exactly the version that was read before: nothing is put in
twice, and after a crash the next run catches up. A table that another ledger wrote is built again
from nothing, as is one that was lost.

`gaps`, `quarantine` and the tables of further kinds of records are here. They are made of ledger
entries and their files alone.

Next: operations/publish.py has the follower `current`; ledger/gaps.py turns entries into gaps;
storage/derived_tables.py has the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import table_directory, table_of_path
from seriatim.errors import PlatformError, SeriatimError
from seriatim.ledger.commit import TRIES_MAX
from seriatim.ledger.entries import RepairEntry
from seriatim.ledger.gaps import (
    Gap,
    GapsFold,
    QuarantineFile,
    ended_quarantines,
    may_change_gaps,
    quarantine_files,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.ports import (
    AppliedVersion,
    CommitConflictError,
    DerivedStore,
    LedgerStore,
    OutputStore,
)

Version = TypeVar("Version", bound=AppliedVersion)
PartitionFileList = list[tuple[Partition, File]]


class Follower(Generic[Version]):
    """A table that follows the ledger. `catch_up` calls its methods in the order in which they stand
    here, and all of them again after a conflict.
    """

    description: str
    """What messages call it: "the table current"."""
    advice = "check that the output path can be written and has room: the next run catches up"
    """What a person can do if it cannot be written."""
    needs_entries = True
    """Whether the entries after its version have to be read. Known after `begin`."""
    applied: Version
    """The version on which is put what was collected."""
    entry: EntryMark
    """The entry that it is brought to."""

    def applied_version(self) -> Version:
        """The entry that the table shows, as its last commit says."""
        raise NotImplementedError

    def begin(self, applied: Version, target: Ledger) -> None:
        """Begin to collect what is put on top of this version. Sequence -1: the whole table is built.

        It is called also for a table that is up to date, if another one of its group is not.
        """
        self.applied = applied
        self.entry = target.mark

    def add_entry(self, manifest: Manifest) -> None:
        """Collect what matters of the next entry after the version."""
        raise NotImplementedError

    def put(self) -> None:
        """Commit what was collected on exactly that version, or raise `CommitConflictError`."""
        raise NotImplementedError


def catch_up(
    store: LedgerStore,
    followers: Sequence[Follower[Version]],
    target: Ledger,
    *,
    rebuild: bool = False,
    note: Callable[[], None] | None = None,
) -> bool:
    """Bring a group of followers to an entry; with `rebuild`, build them again from nothing. Returns
    whether one of them was behind.

    1. Read how far each table is. None is behind: nothing is done.
    2. Read the entries that one of them lacks, each once for the whole group.
    3. Put what each collected, in order. Then `note` that all are up to date.

    After a conflict everything is read again: another run does the same at this moment, or the disk
    is full.
    """
    for _ in range(TRIES_MAX):
        # 1. How far the tables are.
        versions: list[Version] = []
        for follower in followers:
            applied = follower.applied_version()
            if rebuild:
                # Only the number: the token stays, so that the commit replaces what is there now.
                applied = replace(applied, sequence=-1)
            else:
                applied = trusted_version(store, applied, target)
            versions.append(applied)
        if all(applied.sequence >= target.sequence for applied in versions):
            return False
        # 2. The entries.
        behind: list[tuple[Follower[Version], int]] = []
        for follower, applied in zip(followers, versions, strict=True):
            follower.begin(applied, target)
            if applied.sequence < target.sequence:
                behind.append((follower, applied.sequence))
        _add_entries(store, behind, target)
        # 3. The commits.
        try:
            for follower, _ in behind:
                refused = follower
                follower.put()
            if note is not None:
                note()
        except CommitConflictError as error:
            conflict = error
            continue
        return True
    raise PlatformError(
        f"{target.stream}: {refused.description} could not be written, {TRIES_MAX} times",
        cause=str(conflict)[:400],
        next=refused.advice,
    )


def trusted_version(store: LedgerStore, applied: Version, target: Ledger) -> Version:
    """How far a table is. One that shows an entry of another ledger starts over, with sequence -1.

    Ledgers are told apart by the hash of the entry's manifest, which also covers all entries before.
    """
    if applied.sequence >= 0:
        if applied.sha256 == target.sha256:
            return applied
        if store.has_manifest(applied.sha256, applied.sequence - 1):
            return applied
    return replace(applied, sequence=-1)


def _add_entries(
    store: LedgerStore,
    behind: Sequence[tuple[Follower[Version], int]],
    target: Ledger,
) -> None:
    """Give each follower the entries after its version, up to the target."""
    reading = [(follower, sequence) for follower, sequence in behind if follower.needs_entries]
    if not reading:
        return
    oldest_sequence = min(sequence for _, sequence in reading)
    for manifest in entries_between(store, oldest_sequence, target):
        for follower, applied_sequence in reading:
            if manifest.ledger.sequence > applied_sequence:
                follower.add_entry(manifest)


def entries_between(store: LedgerStore, after: int, target: Ledger) -> Iterator[Manifest]:
    """The entries after a sequence, up to the target. They come one at a time, because each manifest
    holds a whole ledger.
    """
    manifests = store.entries(target.stream, after)
    return takewhile(lambda manifest: manifest.ledger.sequence <= target.sequence, manifests)


class GapsFollower(Follower[AppliedVersion]):
    """The table `gaps`. It is created even if there are no gaps, because people query it."""

    description = "the tables gaps and quarantine"

    def __init__(self, derived: DerivedStore) -> None:
        self.derived = derived

    def applied_version(self) -> AppliedVersion:
        """The entry that the table shows."""
        return self.derived.applied_version("gaps")

    def begin(self, applied: AppliedVersion, target: Ledger) -> None:
        """Begin with the gaps that the table has. They are read when the first entry may change them:
        while no gap is open, most entries do not.
        """
        super().begin(applied, target)
        self.previous_gaps: list[Gap] = []
        self._fold: GapsFold | None = None
        self._has_open_gaps = True
        if applied.sequence >= 0:
            self._has_open_gaps = self.derived.noted_open_gaps(applied) != 0

    @property
    def fold(self) -> GapsFold:
        """The gaps with what the entries so far changed."""
        if self._fold is None:
            if self.applied.sequence >= 0:
                self.previous_gaps = self.derived.gaps(self.applied)
            self._fold = GapsFold(self.previous_gaps)
        return self._fold

    def add_entry(self, manifest: Manifest) -> None:
        """Open and close gaps as the entry says."""
        if self._fold is None and not self._has_open_gaps and not may_change_gaps(manifest):
            return
        self.fold.add_entry(manifest)

    @property
    def is_unchanged(self) -> bool:
        """Whether it is known, without reading the table, that no entry changed a gap."""
        return self._fold is None and not self._has_open_gaps

    def open_gap_count(self) -> int:
        """How many ranges of the output are not to be trusted."""
        if self.is_unchanged:
            return 0
        return sum(gap.closed is None for gap in self.fold.gaps)

    def put(self) -> None:
        """Replace the gaps, if there is a change."""
        is_new = self.applied.sequence < 0
        if is_new or (not self.is_unchanged and self.fold.gaps != self.previous_gaps):
            self.derived.put_gaps(self.applied, self.entry, self.fold.gaps)
        crash_point("derived-half")


class QuarantineFollower(Follower[AppliedVersion]):
    """The table `quarantine`: messages that were set aside, and how their sessions were released. It
    comes after `gaps`, which know the releases.
    """

    description = "the tables gaps and quarantine"

    def __init__(self, derived: DerivedStore, gaps: GapsFollower) -> None:
        self.derived = derived
        self.gaps = gaps

    def applied_version(self) -> AppliedVersion:
        """The entry that the table shows."""
        return self.derived.applied_version("quarantine")

    def begin(self, applied: AppliedVersion, target: Ledger) -> None:
        """Begin with no files."""
        super().begin(applied, target)
        self.new_files: list[QuarantineFile] = []
        self.has_files_of_repair = False

    def add_entry(self, manifest: Manifest) -> None:
        """Collect the files of messages that the entry quarantined."""
        files = quarantine_files(manifest.entry)
        self.new_files += files
        if files and isinstance(manifest.entry, RepairEntry):
            self.has_files_of_repair = True

    def put(self) -> None:
        """Add the messages, and say which were released, if there are any."""
        # Messages of a slice can only be released by later entries. A repair reads the past again:
        # the snapshot that released a session may have been committed long before it.
        after_sequence = self.applied.sequence
        if self.has_files_of_repair:
            after_sequence = -1
        ended = []
        if not self.gaps.is_unchanged or after_sequence != self.gaps.applied.sequence:
            ended = ended_quarantines(self.gaps.fold.gaps, after_sequence)
        is_new = self.applied.sequence < 0
        if is_new or self.new_files or ended:
            self.derived.put_quarantine(self.applied, self.entry, self.new_files, ended)


class FileChanges(Struct):
    """The files that an entry adds to a further table, and the paths that it removes from it."""

    entry: EntryMark
    added: PartitionFileList
    removed: list[str]


class FurtherTableFollower(Follower[AppliedVersion]):
    """The table of one further kind of records: the files that the entries name."""

    def __init__(self, outputs: OutputStore, table: str) -> None:
        self.outputs = outputs
        self.table = table
        self.description = f"the table {table_directory(table)}"

    def applied_version(self) -> AppliedVersion:
        """The entry that the table shows."""
        return self.outputs.applied_version(self.table)

    def begin(self, applied: AppliedVersion, target: Ledger) -> None:
        """Begin with no changes."""
        super().begin(applied, target)
        self.changes: list[FileChanges] = []
        self.files_by_path: dict[str, tuple[Partition, File]] = {}

    def add_entry(self, manifest: Manifest) -> None:
        """Collect the files that the entry adds and removes."""
        changes = _file_changes_of(manifest, self.table)
        if self.applied.sequence >= 0:
            if changes.added or changes.removed:
                self.changes.append(changes)
            return
        for path in changes.removed:
            self.files_by_path.pop(path, None)
        for partition, file in changes.added:
            self.files_by_path[file.path] = (partition, file)

    def put(self) -> None:
        """One commit for each entry that has files for the table, and one for the target. A table
        that is built from nothing gets all its files in one commit.
        """
        if self.applied.sequence < 0:
            files = list(self.files_by_path.values())
            self.outputs.put_files(self.table, self.applied, self.entry, files, [])
            return
        steps = list(self.changes)
        if not steps or steps[-1].entry != self.entry:
            steps.append(FileChanges(self.entry, [], []))
        applied = self.applied
        for step in steps:
            if applied.sequence >= step.entry.sequence:
                raise CommitConflictError(f"{self.description} was brought further by another run")
            self.outputs.put_files(self.table, applied, step.entry, step.added, step.removed)
            crash_point("output-half")
            applied = self.outputs.applied_version(self.table)


def _file_changes_of(manifest: Manifest, table: str) -> FileChanges:
    entry = manifest.entry
    added: PartitionFileList = []
    for change in entry.changes:
        added += [(change.partition, file) for file in change.other_records.get(table, ())]
    removed = [path for path in entry.removed_paths if table_of_path(path) == table]
    return FileChanges(manifest.ledger.mark, added, removed)


def catch_up_after_run(store: LedgerStore, derived: DerivedStore, head: Ledger) -> str:
    """Catch up after a run. Returns the error as a text for people, or "".

    What is committed is safe without these tables, so an error here does not fail the run.
    """
    try:
        catch_up_derived(store, derived, head)
    except SeriatimError as error:
        return error.render()
    return ""


def catch_up_derived(
    store: LedgerStore,
    derived: DerivedStore,
    head: Ledger,
    *,
    rebuild: bool = False,
) -> None:
    """Bring `gaps`, `quarantine` and the further tables up to the ledger; with `rebuild`, build them
    again from nothing. In `gaps` and `quarantine` nothing is committed where nothing changes.
    """

    def note_up_to_date() -> None:
        derived.note_up_to_date(head.mark, gaps.open_gap_count())
        crash_point("derived")

    gaps = GapsFollower(derived)
    group: list[Follower[AppliedVersion]] = [gaps, QuarantineFollower(derived, gaps)]
    catch_up(store, group, head, rebuild=rebuild, note=note_up_to_date)
    if derived.output_store is not None:
        catch_up_outputs(store, derived.output_store, head, rebuild=rebuild)


def catch_up_outputs(
    store: LedgerStore,
    outputs: OutputStore,
    head: Ledger,
    *,
    rebuild: bool = False,
) -> None:
    """Bring the further tables up to the ledger; with `rebuild`, build them again from nothing."""
    group = [FurtherTableFollower(outputs, table) for table in outputs.tables]
    catch_up(store, group, head, rebuild=rebuild)


def read_gaps(store: LedgerStore, derived: DerivedStore, head: Ledger) -> list[Gap]:
    """The gaps as of the ledger, however far behind the table is."""
    return _gaps_as_of(store, derived, head).fold.gaps


def count_open_gaps(store: LedgerStore, derived: DerivedStore, head: Ledger) -> int:
    """How many gaps are open as of the ledger."""
    return _gaps_as_of(store, derived, head).open_gap_count()


def _gaps_as_of(store: LedgerStore, derived: DerivedStore, head: Ledger) -> GapsFollower:
    gaps = GapsFollower(derived)
    applied = trusted_version(store, gaps.applied_version(), head)
    gaps.begin(applied, head)
    if applied.sequence < head.sequence:
        _add_entries(store, [(gaps, applied.sequence)], head)
    return gaps
