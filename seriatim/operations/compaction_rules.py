"""Compaction: which small files become one, what a compaction is about to replace, and what may go
for good. Pure.

Record files of one partition and one life of its topic follow each other by offset. Small
neighbours become one file near the wanted size; a larger one between them stays, and parts them:
files never overlap. A group is taken if it is worth its copying, so that a file is copied a few
times in its life, not each time.

Next room: operations/compact.py does it; operations/sweep.py judges by intents and by
`OutdatedFiles`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from msgspec import Struct

from seriatim.engine.offsets import Partition
from seriatim.errors import ensure
from seriatim.ledger.model import Account, File, Ledger, Manifest

RECORD_FILES_MERGE_MIN = 16
"""So many neighbours are worth copying whatever their sizes."""
STATE_FILES_MERGE_MIN = 8
"""So many state files are worth merging whatever their sizes."""
COMPACTED_NAME = re.compile(r"compact-(.+)-\d+(?:\.parquet)?")
"""Names of what a compaction writes, with its attempt: no slice's, whose names begin with its
epoch.
"""


def compacted_file_stem(attempt: str, number: int) -> str:
    """The name of a compaction's n-th file."""
    return f"compact-{attempt}-{number}"


class TopicRecordFile(Struct, frozen=True):
    """A committed record file, and the life of the topic that its records are of."""

    file: File
    topic_id: str


class Intent(Struct, frozen=True, kw_only=True):
    """What a compaction is about to replace, written before its first file. Kept as long as
    replaced files are.

    Without inputs it could not be read, and so protects what it may stand for.
    """

    partition: Partition
    attempt: str
    epoch: int = -1
    """-1: of no compaction, but a note of files that were found to be replaced."""
    sequence: int = -1
    """The last entry when it was made: what it replaces was there by then, and whatever names its
    files comes later.
    """
    records: tuple[str, ...] = ()
    state: tuple[str, ...] = ()

    @property
    def inputs(self) -> set[str]:
        """All that it would replace."""
        return {*self.records, *self.state}

    def is_open(self, account: Account, active_paths: set[str], last_sequence: int) -> bool:
        """Whether its commit may still come: nothing of what it would replace has been replaced, up
        to entry `last`.

        One that was made later than that may replace what is not known yet.
        """
        if not self.inputs or self.sequence > last_sequence:
            return True
        oldest = tuple(file.path for file in account.state[: len(self.state)])
        return (
            account.epoch == self.epoch
            and active_paths.issuperset(self.records)
            and oldest == self.state
        )


def is_small(file: File, bytes_target: int) -> bool:
    """Whether a record file may be joined with others."""
    return 2 * file.size_bytes <= bytes_target


def group_small_files(
    small_files: Iterable[TopicRecordFile], large_files: Iterable[File], bytes_target: int
) -> dict[str, list[tuple[File, ...]]]:
    """Neighbours of one partition that become one file each, by the life of their topic, in order."""
    lives: dict[str, list[File]] = {}
    for placed in small_files:
        lives.setdefault(placed.topic_id, []).append(placed.file)
    between = sorted(file.first_offset for file in large_files)
    found = {life: _neighbour_groups(files, between, bytes_target) for life, files in lives.items()}
    worth = {
        life: [group for group in runs if is_worth_compacting(group, bytes_target)]
        for life, runs in found.items()
    }
    return {life: chosen for life, chosen in worth.items() if chosen}


def _neighbour_groups(
    files: list[File], large_file_starts: Sequence[int], bytes_target: int
) -> list[tuple[File, ...]]:
    """Neighbours, as many as one file of the wanted size takes."""
    runs: list[list[File]] = []
    last, total = None, 0
    for file in sorted(files, key=lambda one: one.first_offset):
        if last is not None:
            ensure(
                last.last_offset < file.first_offset,
                "record files of one life do not overlap",
                one=last.path,
                other=file.path,
            )
        if (
            last is None
            or total + file.size_bytes > bytes_target
            or _has_large_file_between(last, file, large_file_starts)
        ):
            runs.append([])
            total = 0
        runs[-1].append(file)
        last, total = file, total + file.size_bytes
    return [tuple(run) for run in runs]


def _has_large_file_between(left: File, right: File, large_file_starts: Sequence[int]) -> bool:
    """Whether a larger file lies between two."""
    place = bisect_right(large_file_starts, left.last_offset)
    return place < len(large_file_starts) and large_file_starts[place] < right.first_offset


def is_worth_compacting(group: Sequence[File], bytes_target: int) -> bool:
    """Many files, or none of them larger than twice the rest, or enough for a whole file."""
    total, largest = sum(file.size_bytes for file in group), max(file.size_bytes for file in group)
    return len(group) > 1 and (
        len(group) >= RECORD_FILES_MERGE_MIN
        or 3 * largest <= 2 * total
        or 4 * total >= 3 * bytes_target
    )


def is_worth_merging_state(state_files: Sequence[File]) -> bool:
    """Whether state files become one: many of them, or deltas that are not small beside their base."""
    deltas = sum(file.rows for file in state_files[1:])
    return len(state_files) >= STATE_FILES_MERGE_MIN or (
        len(state_files) > 1 and 2 * deltas >= state_files[0].rows
    )


class OutdatedFiles:
    """What entries replaced long enough ago: a walk over them, oldest first, from a ledger on.

    The time of the replacing entry decides. A clock that went back keeps more, never less.
    """

    def __init__(self, ledger: Ledger, until_seconds: float) -> None:
        self.until_seconds = until_seconds
        self.paths: set[str] = set()
        self.sequence = ledger.sequence
        """The oldest entry all of whose files are kept."""
        self._is_recent = False
        self._state_paths_by_partition = {
            place: _state_paths(account) for place, account in ledger.partitions.items()
        }

    def add_entry(self, manifest: Manifest) -> None:
        """One more entry."""
        entry = manifest.entry
        self._is_recent = self._is_recent or entry.at_seconds > self.until_seconds
        replaced = set(entry.removed_paths)
        for place in {str(change.partition) for change in entry.changes}:
            now = _state_paths(manifest.ledger.partitions[place])
            replaced |= self._state_paths_by_partition.get(place, set()) - now
            self.paths -= now
            self._state_paths_by_partition[place] = now
        if not self._is_recent:  # what later ones replaced is named by an entry that is kept
            self.paths |= replaced
            self.sequence = entry.sequence


def _state_paths(account: Account) -> set[str]:
    return {file.path for file in account.state}
