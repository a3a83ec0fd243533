"""Which files a compaction is about to replace, and which replaced files may be deleted. Pure.

A compaction writes an intent before its first file, so that a sweep knows whether its commit may
still come. What entries replaced is deleted some days later; `OutdatedFiles` finds it.

Next: operations/compact.py writes intents; operations/sweep.py deletes files.
"""

from __future__ import annotations

import re

from msgspec import Struct

from seriatim.engine.files import file_paths
from seriatim.engine.offsets import Partition
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Ledger

COMPACTED_NAME = re.compile(r"compact-(.+)-\d+(?:\.\d+)?(?:\.parquet)?")
"""The name of a file that a compaction wrote; the group is its attempt. It never matches the file
of a slice, whose name begins with its epoch.
"""


def compacted_file_stem(attempt: str, number: int) -> str:
    """The name, without its suffix, of a file that a compaction writes."""
    return f"compact-{attempt}-{number}"


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
        return account.has_oldest_state(self.state) and active_paths.issuperset(self.records)


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
        self._state_paths_by_partition: dict[str, set[str]] = {}
        for name, account in ledger.partitions.items():
            self._state_paths_by_partition[name] = set(file_paths(account.state))

    def add_entry(self, manifest: Manifest) -> None:
        """Add the next entry."""
        entry = manifest.entry
        if entry.at_seconds > self.until_seconds:
            self._is_recent = True
        replaced = set(entry.removed_paths)
        for name in {str(change.partition) for change in entry.changes}:
            state_paths = set(file_paths(manifest.ledger.partitions[name].state))
            replaced |= self._state_paths_by_partition.get(name, set()) - state_paths
            # An entry may name a state file again that an earlier entry had dropped.
            self.paths -= state_paths
            self._state_paths_by_partition[name] = state_paths
        if not self._is_recent:
            # Files that a recent entry replaced stay: the entry before it is kept whole.
            self.paths |= replaced
            self.sequence = entry.sequence
