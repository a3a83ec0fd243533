"""Sweep: what crashed and fenced runs left behind, judged by the ledger alone, without a clock.

The ledger is read first, then files are listed. A file is dead once the frontier of its partition is past
the start in its name, or the epoch moved; at the frontier it may belong to a run that goes on now. Of dead
files only those go that no entry ever named: earlier state and quarantine stay for whoever looks back.

Next room: steps/fold.py sweeps other attempts at a slice right after its commit; this finds the rest.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import cache

from seriatim.core.errors import IntegrityError
from seriatim.core.ledger import Account, Manifest
from seriatim.core.offsets import Partition
from seriatim.ports import Head, LedgerStore, RecordStore

NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)(?:\.parquet)?")
"""Epoch, start and attempt, in the name of a file; one with a name like `0-00-a` is not ours."""
Place = tuple[int, int]
"""Epoch and offset: a partition's places only rise."""
Attempts = dict[str, set[str]]
"""Paths by attempt."""


def sweep_dead(ledger: LedgerStore, records: RecordStore, head: Head) -> list[str]:
    """Delete orphans up to `head`; their paths."""
    swept = ledger.sweep(head)
    active = ledger.active_paths(head)
    manifest = cache(lambda sequence: ledger.manifest(head.ledger.stream, sequence))
    for place, account in head.ledger.partitions.items():
        partition = Partition.parse(place)
        for start, attempts in _dead(records.paths(partition), account):
            if _is_suspect(attempts, active):
                orphans = set().union(*attempts.values()) - active
                swept += records.delete(orphans - _named(partition, start, head.ledger.sequence, manifest, orphans))
    return swept


def _dead(paths: list[str], account: Account) -> Iterator[tuple[Place, Attempts]]:
    """Files whose place is behind the partition's, by place."""
    found: dict[Place, Attempts] = {}
    for path in paths:
        if match := NAME.fullmatch(path.rpartition("/")[2]):
            start = int(match[1]), int(match[2])
            found.setdefault(start, {}).setdefault(match[3], set()).add(path)
    for start, attempts in found.items():
        if start < (account.epoch, account.frontier):
            yield start, attempts


def _is_suspect(attempts: Attempts, active: set[str]) -> bool:
    """Two attempts at one place, or records that are not in the table: only then old manifests are read."""
    paths = set().union(*attempts.values())
    return len(attempts) > 1 or any(path.startswith("records/") for path in paths - active)


def _named(
    partition: Partition, start: Place, last: int, manifest: Callable[[int], Manifest], doubtful: set[str]
) -> set[str]:
    """Files named by the entries of when the partition was at `start`, and by the one that moved it on."""

    def place(sequence: int) -> Place:
        account = manifest(sequence).ledger.account(partition)
        return (-1, -1) if account is None else (account.epoch, account.frontier)

    entries = range(last + 1)
    try:
        first, moved = bisect_left(entries, start, key=place), bisect_right(entries, start, key=place)
        changes = [change for sequence in entries[first : moved + 1] for change in manifest(sequence).entry.changes]
    except IntegrityError:  # an old manifest is lost: what it named cannot be known, so all of it stays
        return doubtful
    mine = [change for change in changes if change.partition == partition]
    return {file.path for change in mine for file in (*change.records, *change.kept, *(change.state or ()))}
