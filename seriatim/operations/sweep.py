"""Sweep: what crashed and fenced runs left behind, judged by the ledger alone; and what was
replaced long ago.

The ledger is read first, then files are listed. A slice's file is dead once the frontier of its
partition is past the start in its name, or the epoch moved; at the frontier it may belong to a run
that goes on now. A compaction's is dead once something in its intent was replaced. Of dead files
only those go that no entry ever named: earlier records, state and quarantine stay for whoever looks
back. Old manifests are read only where something is not clear, and what they tell is noted as an
intent of its own, so that it is asked once.

What an entry replaced goes `keep_versions_days` after it: the one place where a clock decides, and
never about what the last entry names.

Next room: operations/run.py sweeps other attempts at a slice right after its commit;
operations/compact.py sweeps the rest.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cache

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.model import Account, File, Ledger
from seriatim.operations.compaction_rules import COMPACTED_NAME as COMPACT_NAME
from seriatim.operations.compaction_rules import Intent, OutdatedFiles
from seriatim.ports import LedgerHead, LedgerStore, RecordStore

SLICE_FILE_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)(?:\.parquet)?")
"""Epoch, start and attempt, in the name of a file; one with a name like `0-00-a` is not ours."""
EpochOffset = tuple[int, int]
"""Epoch and offset: a partition's places only rise."""
PathsByAttempt = dict[str, set[str]]
"""Paths by attempt."""


def sweep_dead(ledger: LedgerStore, records: RecordStore, head: LedgerHead) -> list[str]:
    """Delete orphans up to `head`; their paths."""
    swept, sweeping = ledger.sweep(head), _OrphanSweep(ledger, records, head)
    for place, account in head.ledger.partitions.items():
        swept += sweeping.sweep_partition(Partition.parse(place), account)
    return swept


class _OrphanSweep:
    """One look at all partitions, as of one head."""

    def __init__(self, ledger: LedgerStore, records: RecordStore, head: LedgerHead) -> None:
        self.ledger, self.records = ledger, records
        self.stream, self.last_sequence = head.ledger.stream, head.ledger.sequence
        self.active_paths = ledger.active_paths(head)
        self.manifest = cache(lambda sequence: ledger.manifest_at(self.stream, sequence))

    def sweep_partition(self, partition: Partition, account: Account) -> list[str]:
        """Delete a partition's orphans; note what is replaced; forget intents that nothing needs
        any more.
        """
        paths = self.records.paths(
            partition
        )  # before the intents: a compaction's files come after its intent
        intents = self.records.intents(partition)
        settled = self.active_paths | {file.path for file in account.state}
        settled |= {path for intent in intents for path in intent.inputs}
        swept, found = list[str](), set[str]()
        for start, attempts in _files_before_frontier(paths, account):
            if _is_suspect(attempts, settled):
                unclear = set().union(*attempts.values()) - settled
                swept += self._delete_unnamed(
                    unclear, self._paths_named_at(partition, start), found
                )
        unclear, since = self._unconfirmed_compaction_files(paths, account, intents, settled)
        if unclear:
            swept += self._delete_unnamed(
                unclear, self._paths_named_by_compactions(unclear, since), found
            )
        if noted := tuple(sorted(path for path in found if not path.startswith("kept/"))):
            note = Intent(
                partition=partition,
                attempt=f"found-{self.last_sequence}",
                sequence=self.last_sequence,
                records=noted,
            )
            self.records.put_intent(note)
        self._drop_settled_intents(set(paths) - set(swept), account, intents)
        return swept

    def _delete_unnamed(
        self, unclear: set[str], named_paths: set[str] | None, replaced_paths: set[str]
    ) -> list[str]:
        """Delete what no entry named. Where an old manifest is lost that cannot be known, so all of
        it stays.
        """
        if named_paths is None:
            return []
        replaced_paths |= unclear & named_paths
        return self.records.delete(unclear - named_paths)

    def _paths_named_at(self, partition: Partition, start: EpochOffset) -> set[str] | None:
        """Files named by the entries of when the partition was at `start`, and by the one that
        moved it on.
        """

        def place(sequence: int) -> EpochOffset:
            account = self.manifest(sequence).ledger.account(partition)
            return (-1, -1) if account is None else (account.epoch, account.frontier)

        entries = range(self.last_sequence + 1)
        try:
            first, moved = (
                bisect_left(entries, start, key=place),
                bisect_right(entries, start, key=place),
            )
            changes = [
                change
                for number in entries[first : moved + 1]
                for change in self.manifest(number).entry.changes
            ]
        except IntegrityError:
            return None
        mine = [change for change in changes if change.partition == partition]
        return {file.path for change in mine for file in change.files()}

    def _unconfirmed_compaction_files(
        self, paths: list[str], account: Account, intents: list[Intent], settled: set[str]
    ) -> tuple[set[str], int]:
        """A compaction's files that nobody vouches for, and the entry after which they may have
        been named.
        """
        attempts = {
            path: match[1]
            for path in paths
            if (match := COMPACT_NAME.fullmatch(path.rpartition("/")[2]))
        }
        by_attempt = {intent.attempt: intent for intent in intents}
        alive = {
            attempt
            for attempt, one in by_attempt.items()
            if one.is_open(account, self.active_paths, self.last_sequence)
        }
        unclear = {
            path
            for path, attempt in attempts.items()
            if path not in settled and attempt not in alive
        }
        known = [by_attempt.get(attempts[path]) for path in unclear]
        return unclear, min((intent.sequence if intent else -1 for intent in known), default=-1)

    def _paths_named_by_compactions(self, unclear: set[str], since: int) -> set[str] | None:
        """Those of them that a compaction's entry names."""
        named = set[str]()
        try:
            for manifest in self.ledger.entries(self.stream, since):
                if manifest.entry.kind == "compact":
                    changes = manifest.entry.changes
                    named |= {file.path for one in changes for file in one.files()}
        except IntegrityError:
            return None
        return named & unclear

    def _drop_settled_intents(
        self, existing_paths: set[str], account: Account, intents: list[Intent]
    ) -> None:
        """Drop intents that are settled either way, and of whose inputs none lies around as
        replaced.
        """
        replaced = existing_paths - self.active_paths - {file.path for file in account.state}
        for intent in intents:
            if (
                not intent.is_open(account, self.active_paths, self.last_sequence)
                and not intent.inputs & replaced
            ):
                self.records.drop_intent(intent)


def _files_before_frontier(
    paths: list[str], account: Account
) -> Iterator[tuple[EpochOffset, PathsByAttempt]]:
    """Files whose place is behind the partition's, by place."""
    found: dict[EpochOffset, PathsByAttempt] = {}
    for path in paths:
        if match := SLICE_FILE_NAME.fullmatch(path.rpartition("/")[2]):
            start = int(match[1]), int(match[2])
            found.setdefault(start, {}).setdefault(match[3], set()).add(path)
    for start, attempts in found.items():
        if start < (account.epoch, account.frontier):
            yield start, attempts


def _is_suspect(attempts: PathsByAttempt, settled: set[str]) -> bool:
    """Two attempts at one place, or records that are not in the table: only then old manifests are
    read.
    """
    unclear = set().union(*attempts.values()) - settled
    several = len(attempts) > 1 and bool(unclear)
    return several or any(path.startswith("records/") for path in unclear)


def sweep_replaced(
    ledger: LedgerStore, records: RecordStore, head: LedgerHead, until_seconds: float
) -> list[str]:
    """Delete what entries up to a moment replaced; their paths. Entries since then keep all of
    theirs.
    """
    outdated = find_outdated(ledger, records, head, until_seconds)
    paths = sorted(outdated.paths)
    middle = len(paths) // 2
    swept = records.delete(paths[:middle])
    crash_point("sweep-half")
    swept += records.delete(paths[middle:])
    if outdated.sequence >= 0:
        records.put_oldest_complete_entry(
            outdated.sequence, ledger.ledger_at(head.ledger.stream, outdated.sequence).sha256
        )
    return swept


def find_outdated(
    ledger: LedgerStore, records: RecordStore, head: LedgerHead, until_seconds: float
) -> OutdatedFiles:
    """What entries up to a moment replaced, but for what was swept before and what is named now."""
    stream = head.ledger.stream
    before = _oldest_complete_ledger(ledger, records, head.ledger) or Ledger(stream=stream)
    outdated = OutdatedFiles(before, until_seconds)
    for manifest in ledger.entries(stream, before.sequence):
        if manifest.entry.sequence > head.ledger.sequence:
            break
        outdated.add_entry(manifest)
    outdated.paths -= ledger.active_paths(head)
    outdated.paths -= {
        file.path for account in head.ledger.partitions.values() for file in account.state
    }
    return outdated


def _oldest_complete_ledger(
    ledger: LedgerStore, records: RecordStore, head: Ledger
) -> Ledger | None:
    """The ledger as of the oldest entry whose files are all there; None: nothing was swept of this
    ledger.
    """
    sequence, sha256 = records.oldest_complete_entry()
    if not 0 <= sequence <= head.sequence:
        return None
    kept = ledger.ledger_at(head.stream, sequence)
    return kept if kept.sha256 == sha256 else None


def refuse_swept(
    ledger: LedgerStore, records: RecordStore, head: Ledger, sequence: int, directory: str
) -> None:
    """Refuse to look back to an entry some of whose files, of `records` or `state`, are gone by
    now.
    """
    kept = _oldest_complete_ledger(ledger, records, head)
    if kept is None or sequence >= kept.sequence:
        return
    if directory == "records":
        then, now = (
            _paths(ledger.files_at(head.stream, number)) for number in (sequence, kept.sequence)
        )
    else:
        then, now = (
            _state_paths(ledger.ledger_at(head.stream, number))
            for number in (sequence, kept.sequence)
        )
    if then - now:
        raise ConfigError(
            f"{head.stream}: entry {sequence} cannot be looked at any more: {len(then - now)} of its files were "
            "replaced, and have been swept since, as output.keep_versions_days says",
            next=f"the oldest entry that is kept whole is {kept.sequence}",
        )


def _paths(files: Iterable[File]) -> set[str]:
    return {file.path for file in files}


def _state_paths(ledger: Ledger) -> set[str]:
    return {file.path for account in ledger.partitions.values() for file in account.state}
