"""Sweep: delete files that crashed and fenced runs left behind, and files replaced long ago.

Orphans are judged by the ledger alone. The ledger is read first, then files are listed.

- The file of a slice is dead once the frontier of its partition is past the start in its name, or
  the epoch is higher. At the frontier it may belong to a run that is still at work.
- The file of a compaction is dead once one of the inputs in its intent was replaced.

Of dead files only those are deleted that no entry ever named: earlier records, state and quarantine
files stay for those who look back. Old manifests are only read where it is not clear who named a
file. The answer is noted as an intent, so that the same question is not asked again.

What an entry replaced is deleted `keep_versions_days` later. This is the only place where a clock
decides, and it never decides about files that the newest entry names.

Next: operations/run.py sweeps other attempts at a slice right after its commit;
operations/compact.py calls the rest.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from functools import cache

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import file_paths
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.entries import CompactEntry
from seriatim.ledger.manifests import SWEPT_NOTE, LedgerHead
from seriatim.ledger.model import Account, Ledger
from seriatim.ledger.replaced_files import COMPACTED_NAME, Intent, OutdatedFiles
from seriatim.ports import LedgerStore, RecordStore

SLICE_FILE_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)(?:\.\d+)?(?:\.parquet)?")
"""Epoch, start and attempt in the name of a slice's file. A name like `0-00-a` is not ours. An attempt
may have several files, which are numbered.
"""
EpochOffset = tuple[int, int]
"""A position of a partition in its history. From entry to entry it only rises."""
PathsByAttempt = dict[str, set[str]]


def sweep_dead(ledger: LedgerStore, records: RecordStore, head: LedgerHead) -> list[str]:
    """Delete orphans, judged as of `head`. Returns their paths."""
    swept = ledger.sweep(head)
    orphan_sweep = _OrphanSweep(ledger, records, head)
    for name, account in head.ledger.partitions.items():
        swept += orphan_sweep.sweep_partition(Partition.parse(name), account)
    return swept


def sweep_attempts(
    records: RecordStore, partition: Partition, stem_prefix: str, keep: Collection[str] = ()
) -> list[str]:
    """Delete those files of a partition whose names begin so, finished or not, except the paths in
    `keep`. Returns their paths.
    """
    attempts = []
    for path in records.paths(partition):
        if _file_name(path).startswith(stem_prefix) and path not in keep:
            attempts.append(path)
    return records.delete(attempts)


class _OrphanSweep:
    """Sweeps orphans of all partitions, as of one head of the ledger."""

    def __init__(self, ledger: LedgerStore, records: RecordStore, head: LedgerHead) -> None:
        self.ledger = ledger
        self.records = records
        self.stream = head.ledger.stream
        self.last_sequence = head.ledger.sequence
        self.active_paths = ledger.active_paths(head)
        self.manifest = cache(lambda sequence: ledger.manifest_at(self.stream, sequence))

    def sweep_partition(self, partition: Partition, account: Account) -> list[str]:
        """Delete the orphans of a partition. Returns their paths.

        1. List files, then intents, and collect the paths that are settled: they are in use, or an
           intent says that they are known as replaced.
        2. Judge the files of slices that are behind the frontier.
        3. Judge the files of compactions.
        4. Note the files that were named once, and drop intents that are of no use any more.
        """
        # 1. The order matters: a compaction writes its intent before its files, so that every
        # file in the listing has its intent in the later one.
        paths = self.records.paths(partition)
        intents = self.records.intents(partition)
        settled = self.active_paths.union(file_paths(account.state))
        for intent in intents:
            settled |= intent.inputs
        swept: list[str] = []
        replaced: set[str] = set()
        # 2.
        for start, attempts in _files_before_frontier(paths, account):
            if _is_suspect(attempts, settled):
                unclear = _all_paths(attempts) - settled
                named = self._paths_named_at(partition, start)
                swept += self._delete_unnamed(unclear, named, replaced)
        # 3.
        unclear, since = self._unconfirmed_compaction_files(paths, account, intents, settled)
        if unclear:
            named = self._paths_named_by_compactions(unclear, since)
            swept += self._delete_unnamed(unclear, named, replaced)
        # 4.
        self._note_replaced(partition, replaced)
        self._drop_settled_intents(set(paths) - set(swept), account, intents)
        return swept

    def _delete_unnamed(
        self, unclear: set[str], named_paths: set[str] | None, replaced_paths: set[str]
    ) -> list[str]:
        """Delete the files that no entry named, and add the others to `replaced_paths`. Nothing is
        deleted if an old manifest is lost (None), because then it cannot be known.
        """
        if named_paths is None:
            return []
        replaced_paths |= unclear & named_paths
        return self.records.delete(unclear - named_paths)

    def _note_replaced(self, partition: Partition, replaced_paths: set[str]) -> None:
        """Remember files that an entry named once, so that no manifest is read for them again."""
        noted = [path for path in sorted(replaced_paths) if not path.startswith("kept/")]
        if noted:
            note = Intent(
                partition=partition,
                attempt=f"found-{self.last_sequence}",
                sequence=self.last_sequence,
                records=tuple(noted),
            )
            self.records.put_intent(note)

    def _paths_named_at(self, partition: Partition, start: EpochOffset) -> set[str] | None:
        """The files of the partition that are named by entries while it was at `start`, or by the
        entry that moved it on. None if a manifest of that time is lost.
        """

        def position(sequence: int) -> EpochOffset:
            account = self.manifest(sequence).ledger.account(partition)
            if account is None:
                return (-1, -1)
            return (account.epoch, account.frontier)

        # Positions only rise from entry to entry, so that a binary search finds the entries and
        # reads few manifests.
        sequences = range(self.last_sequence + 1)
        named: set[str] = set()
        try:
            arrival = bisect_left(sequences, start, key=position)
            departure = bisect_right(sequences, start, key=position)
            for sequence in sequences[arrival : departure + 1]:
                for change in self.manifest(sequence).entry.changes:
                    if change.partition == partition:
                        named.update(file_paths(change.files()))
        except IntegrityError:
            return None
        return named

    def _unconfirmed_compaction_files(
        self, paths: list[str], account: Account, intents: list[Intent], settled: set[str]
    ) -> tuple[set[str], int]:
        """The files of compactions that are neither settled nor may still be committed, and the
        entry after which they may have been named.
        """
        intent_by_attempt = {intent.attempt: intent for intent in intents}
        unclear = set()
        sequences = []
        for path in paths:
            match = COMPACTED_NAME.fullmatch(_file_name(path))
            if match is None or path in settled:
                continue
            intent = intent_by_attempt.get(match[1])
            if intent is None:
                unclear.add(path)
                sequences.append(-1)
            elif not intent.is_open(account, self.active_paths, self.last_sequence):
                unclear.add(path)
                sequences.append(intent.sequence)
        return unclear, min(sequences, default=-1)

    def _paths_named_by_compactions(self, unclear: set[str], since: int) -> set[str] | None:
        """The unclear files that the entry of a compaction names. None if a manifest is lost."""
        named: set[str] = set()
        try:
            for manifest in self.ledger.entries(self.stream, since):
                if not isinstance(manifest.entry, CompactEntry):
                    continue
                for change in manifest.entry.changes:
                    named.update(file_paths(change.files()))
        except IntegrityError:
            return None
        return named & unclear

    def _drop_settled_intents(
        self, existing_paths: set[str], account: Account, intents: list[Intent]
    ) -> None:
        """Drop intents whose commit came or cannot come any more, once all inputs that were
        replaced are deleted.
        """
        replaced = existing_paths.difference(self.active_paths, file_paths(account.state))
        for intent in intents:
            if intent.is_open(account, self.active_paths, self.last_sequence):
                continue
            if not intent.inputs & replaced:
                self.records.drop_intent(intent)


def _files_before_frontier(
    paths: list[str], account: Account
) -> Iterator[tuple[EpochOffset, PathsByAttempt]]:
    """The files of slices that start behind the frontier of the partition, by their start."""
    attempts_by_start: dict[EpochOffset, PathsByAttempt] = {}
    for path in paths:
        match = SLICE_FILE_NAME.fullmatch(_file_name(path))
        if match is not None:
            start = (int(match[1]), int(match[2]))
            attempts = attempts_by_start.setdefault(start, {})
            attempts.setdefault(match[3], set()).add(path)
    frontier = (account.epoch, account.frontier)
    for start, attempts in attempts_by_start.items():
        if start < frontier:
            yield start, attempts


def _is_suspect(attempts: PathsByAttempt, settled: set[str]) -> bool:
    """Whether old manifests have to be read: there are files of several attempts at one start, or
    record files that are not in the table.
    """
    unclear = _all_paths(attempts) - settled
    if unclear and len(attempts) > 1:
        return True
    return any(path.startswith("records/") for path in unclear)


def _all_paths(attempts: PathsByAttempt) -> set[str]:
    return set().union(*attempts.values())


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def sweep_replaced(
    ledger: LedgerStore, records: RecordStore, head: LedgerHead, until_seconds: float
) -> list[str]:
    """Delete the files that entries up to a moment replaced. Returns their paths. Later entries keep
    all of their files.
    """
    outdated = find_outdated(ledger, head, until_seconds)
    paths = sorted(outdated.paths)
    # In two halves, so that a test can crash in between.
    middle = len(paths) // 2
    swept = records.delete(paths[:middle])
    crash_point("sweep-half")
    swept += records.delete(paths[middle:])
    if outdated.sequence >= 0:
        oldest_complete = ledger.ledger_at(head.ledger.stream, outdated.sequence)
        ledger.put_note(SWEPT_NOTE, oldest_complete.mark)
    return swept


def find_outdated(ledger: LedgerStore, head: LedgerHead, until_seconds: float) -> OutdatedFiles:
    """The files that entries up to a moment replaced, without those that an earlier sweep has
    deleted and those that are in use.
    """
    stream = head.ledger.stream
    start = _oldest_complete_ledger(ledger, head.ledger) or Ledger(stream=stream)
    outdated = OutdatedFiles(start, until_seconds)
    for manifest in ledger.entries(stream, start.sequence):
        if manifest.entry.sequence > head.ledger.sequence:
            break
        outdated.add_entry(manifest)
    outdated.paths -= ledger.active_paths(head)
    outdated.paths -= _state_paths(head.ledger)
    return outdated


def _oldest_complete_ledger(ledger: LedgerStore, head: Ledger) -> Ledger | None:
    """The ledger as of the oldest entry of which all files are kept; None if nothing of this ledger
    was swept.
    """
    swept = ledger.note(SWEPT_NOTE)
    if not 0 <= swept.sequence <= head.sequence:
        return None
    oldest_complete = ledger.ledger_at(head.stream, swept.sequence)
    if oldest_complete.mark != swept:
        # The note was left by another ledger, before this one was restored or started anew.
        return None
    return oldest_complete


def refuse_swept(ledger: LedgerStore, head: Ledger, sequence: int, directory: str) -> None:
    """Refuse to look back to an entry if some of its files below `directory`, which is `records` or
    `state`, were deleted meanwhile.
    """
    oldest_complete = _oldest_complete_ledger(ledger, head)
    if oldest_complete is None or sequence >= oldest_complete.sequence:
        return
    if directory == "records":
        needed = set(file_paths(ledger.files_at(head.stream, sequence)))
        existing = set(file_paths(ledger.files_at(head.stream, oldest_complete.sequence)))
    else:
        needed = _state_paths(ledger.ledger_at(head.stream, sequence))
        existing = _state_paths(oldest_complete)
    swept = needed - existing
    if swept:
        raise ConfigError(
            f"{head.stream}: entry {sequence} cannot be looked at any more: {len(swept)} of its files were "
            "replaced, and have been swept since, as output.keep_versions_days says",
            next=f"the oldest entry that is kept whole is {oldest_complete.sequence}",
        )


def _state_paths(ledger: Ledger) -> set[str]:
    paths: set[str] = set()
    for account in ledger.partitions.values():
        paths.update(file_paths(account.state))
    return paths
