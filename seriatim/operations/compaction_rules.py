"""Compaction rules: which small files become one, what a compaction is about to replace, and which
replaced files may be deleted. All functions are pure.

Record files of one partition and one life of its topic follow each other by offset. Small
neighbours become one file near the target size. A larger file between two small ones stays as it is
and separates them, because files must never overlap. A group is only taken if it is worth copying,
so that a file is copied a few times in its life, and not by every compaction.

Next: operations/compact.py does the work; operations/sweep.py uses intents and `OutdatedFiles`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import ensure
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Ledger

RECORD_FILES_MERGE_MIN = 16
"""A group of so many files is worth copying, whatever their sizes."""
STATE_FILES_MERGE_MIN = 8
"""So many state files are worth merging whatever their sizes."""
COMPACTED_NAME = re.compile(r"compact-(.+)-\d+(?:\.parquet)?")
"""The name of a file that a compaction wrote; the group is its attempt. It never matches the file
of a slice, whose name begins with its epoch.
"""


def compacted_file_stem(attempt: str, number: int) -> str:
    """The name, without its suffix, of a file that a compaction writes."""
    return f"compact-{attempt}-{number}"


class TopicRecordFile(Struct, frozen=True):
    """A committed record file, and the id of the topic that its records come from."""

    file: File
    topic_id: str


class Intent(Struct, frozen=True, kw_only=True):
    """What a compaction is about to replace. It is written before the compaction's first file, and
    kept as long as the files that it replaced.

    An intent without inputs stands for one that could not be read. It protects every file that may
    belong to it.
    """

    partition: Partition
    attempt: str
    epoch: int = -1
    """-1 for an intent that is no compaction, but a note of the sweep about replaced files."""
    sequence: int = -1
    """The newest entry when the intent was written. All inputs existed at that entry, and an entry
    that names its outputs can only come later.
    """
    records: tuple[str, ...] = ()
    state: tuple[str, ...] = ()

    @property
    def inputs(self) -> set[str]:
        """The paths of all files that it would replace."""
        return {*self.records, *self.state}

    def is_open(self, account: Account, active_paths: set[str], last_sequence: int) -> bool:
        """Whether its commit may still come: up to entry `last_sequence`, none of its inputs has
        been replaced by another run.
        """
        if not self.inputs:
            return True
        if self.sequence > last_sequence:
            # The intent is newer than the ledger that the caller read, so nothing is known.
            return True
        if account.epoch != self.epoch:
            return False
        # State files are merged from the oldest on: others may only have been added at the end.
        oldest_state = tuple(file.path for file in account.state[: len(self.state)])
        return oldest_state == self.state and active_paths.issuperset(self.records)


def is_small(file: File, bytes_target: int) -> bool:
    """Whether a record file is at most half as large as the target, and may be joined with others."""
    return 2 * file.size_bytes <= bytes_target


def group_small_files(
    small_files: Iterable[TopicRecordFile], large_files: Iterable[File], bytes_target: int
) -> dict[str, list[tuple[File, ...]]]:
    """Groups of neighbouring files of one partition, by topic id and in order. Each group is to
    become one file.
    """
    files_by_topic_id: dict[str, list[File]] = {}
    for topic_file in small_files:
        files_by_topic_id.setdefault(topic_file.topic_id, []).append(topic_file.file)
    large_file_starts = sorted(file.first_offset for file in large_files)
    chosen_groups = {}
    for topic_id, files in files_by_topic_id.items():
        groups = _neighbour_groups(files, large_file_starts, bytes_target)
        chosen = [group for group in groups if is_worth_compacting(group, bytes_target)]
        if chosen:
            chosen_groups[topic_id] = chosen
    return chosen_groups


def _neighbour_groups(
    files: list[File], large_file_starts: Sequence[int], bytes_target: int
) -> list[tuple[File, ...]]:
    """All files, in groups of neighbours that together are not larger than the target."""
    groups: list[list[File]] = []
    group_bytes = 0
    previous: File | None = None
    for file in sorted(files, key=lambda file: file.first_offset):
        begins_group = True
        if previous is not None:
            ensure(
                previous.last_offset < file.first_offset,
                "record files of one life do not overlap",
                one=previous.path,
                other=file.path,
            )
            is_too_large = group_bytes + file.size_bytes > bytes_target
            is_separated = _has_large_file_between(previous, file, large_file_starts)
            begins_group = is_too_large or is_separated
        if begins_group:
            groups.append([])
            group_bytes = 0
        groups[-1].append(file)
        group_bytes += file.size_bytes
        previous = file
    return [tuple(group) for group in groups]


def _has_large_file_between(earlier: File, later: File, large_file_starts: Sequence[int]) -> bool:
    """Whether a larger file lies between two small ones."""
    index = bisect_right(large_file_starts, earlier.last_offset)
    return index < len(large_file_starts) and large_file_starts[index] < later.first_offset


def is_worth_compacting(group: Sequence[File], bytes_target: int) -> bool:
    """Whether a group is worth copying: it has many files, or no file that is more than twice as
    large as the others together, or nearly fills a file of the target size.
    """
    if len(group) < 2:
        return False
    if len(group) >= RECORD_FILES_MERGE_MIN:
        return True
    total_bytes = sum(file.size_bytes for file in group)
    largest_bytes = max(file.size_bytes for file in group)
    return 3 * largest_bytes <= 2 * total_bytes or 4 * total_bytes >= 3 * bytes_target


def is_worth_merging_state(state_files: Sequence[File]) -> bool:
    """Whether state files should become one: there are many of them, or the later ones have at least
    half as many rows as the first.
    """
    if len(state_files) < 2:
        return False
    if len(state_files) >= STATE_FILES_MERGE_MIN:
        return True
    later_rows = sum(file.rows for file in state_files[1:])
    return 2 * later_rows >= state_files[0].rows


class OutdatedFiles:
    """Collects the files that entries replaced long enough ago. The entries after a given ledger are
    added one by one, the oldest first.

    The time of the entry that replaced a file decides. A clock that went back keeps more files,
    never fewer.
    """

    def __init__(self, ledger: Ledger, until_seconds: float) -> None:
        self.until_seconds = until_seconds
        self.paths: set[str] = set()
        self.sequence = ledger.sequence
        """The oldest entry of which all files are kept."""
        self._is_recent = False
        self._state_paths_by_partition = {
            name: _state_paths(account) for name, account in ledger.partitions.items()
        }

    def add_entry(self, manifest: Manifest) -> None:
        """Add the next entry."""
        entry = manifest.entry
        if entry.at_seconds > self.until_seconds:
            self._is_recent = True
        replaced = set(entry.removed_paths)
        for name in {str(change.partition) for change in entry.changes}:
            state_paths = _state_paths(manifest.ledger.partitions[name])
            replaced |= self._state_paths_by_partition.get(name, set()) - state_paths
            # An entry may name a state file again that an earlier entry had dropped.
            self.paths -= state_paths
            self._state_paths_by_partition[name] = state_paths
        if not self._is_recent:
            # Files that a recent entry replaced stay: the entry before it is kept whole.
            self.paths |= replaced
            self.sequence = entry.sequence


def _state_paths(account: Account) -> set[str]:
    return {file.path for file in account.state}
