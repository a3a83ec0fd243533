"""Gather: the evidence of a check, partition by partition. What is new is read again; nothing is taken from a run.

New are the records at or after the frontier of the last judged entry, or at or after where a repair rewound to, of the
files that are in the table now. They are folded over the state as of then: the last judged entry's, or, where a repair
went further back, that of the newest entry before it. Files are read a part at a time, sessions in as many rounds as it
takes to hold few rows in memory.

Next room: core/evidence.py has the promises; steps/check.py makes a verdict of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from seriatim.core.evidence import Evidence, Files, Sight, Tables, Walk, Wanted, dense, in_bucket, walked
from seriatim.core.ledger import Account, Change, Entry, File, Ledger
from seriatim.core.offsets import Partition
from seriatim.core.session import Session
from seriatim.core.verify import Row
from seriatim.ports import LedgerStore, RecordStore, StateStore

ROWS_AT_ONCE = 500_000
"""Records of a partition whose rows are held in memory together, at most; more are walked through in rounds."""
NAMES_AT_ONCE = 4_096
Changes = Sequence[tuple[Entry, Change]]


class Table(Struct, frozen=True):
    """The stock machine, as far as its records and state say it."""

    key: tuple[str, ...]
    columns: tuple[str, ...]
    before: bool
    load: Callable[[bytes, int], Mapping[Any, Row]]


class Base(Struct, frozen=True):
    """Where folding begins, for the life of a topic: its state files, and the first offset that is not in them."""

    topic_id: str
    frontier: int = 0
    state: tuple[File, ...] = ()


class Place(Struct, frozen=True, kw_only=True):
    """One partition under check."""

    partition: Partition
    was: Account | None
    now: Account
    changes: Changes
    active: tuple[File, ...]
    """All its record files."""
    since: dict[str, int]
    """By topic id: the first offset that is new."""
    rewritten: tuple[File, ...] = ()
    """Files that somebody else made of ours (OPTIMIZE), and that may have new records of it."""
    whole: bool = True
    """Whether all its records are in files of its own."""

    @property
    def files(self) -> tuple[File, ...]:
        """Its record files that have new records, by offset."""
        return self.files_since(self.since)

    def files_since(self, since: Mapping[str, int]) -> tuple[File, ...]:
        """Its record files with records at or after these offsets, by offset."""
        lowest = min(since.values(), default=0)
        return tuple(sorted((file for file in self.active if file.last >= lowest), key=lambda file: file.first))


def places(before: Ledger, after: Ledger, entries: Iterable[Entry], active: Iterable[File]) -> list[Place]:
    """The partitions that the entries changed, and what is new in each."""
    changes: dict[str, list[tuple[Entry, Change]]] = {}
    for entry in entries:
        for change in entry.changes:
            if change.certificate or change.records or change.state is not None:
                changes.setdefault(str(change.partition), []).append((entry, change))
    files: dict[str, list[File]] = {}
    for file in active:
        place = "/".join(file.path.split("/")[1:-1])
        files.setdefault(place if place in after.partitions else "", []).append(file)
    return [
        _place(place, before, after, many, files.get(place, []), files.get("", []))
        for place, many in sorted(changes.items())
    ]


def _place(
    place: str, before: Ledger, after: Ledger, changes: Changes, active: Sequence[File], strange: Sequence[File]
) -> Place:
    was, since = before.partitions.get(place), _since(before.partitions.get(place), changes)
    return Place(
        partition=Partition.parse(place),
        was=was,
        now=after.partitions[place],
        changes=changes,
        active=tuple(active),
        since=since,
        rewritten=tuple(file for file in strange if file.last >= min(since.values(), default=0)),
        whole=not strange,
    )


def _since(was: Account | None, changes: Changes) -> dict[str, int]:
    since = {was.topic_id: was.frontier} if was else {}
    for entry, change in changes:
        if entry.kind == "repair" and (change.rewound >= 0 or change.records):
            since[change.topic_id] = min(since.get(change.topic_id, 0), max(change.rewound, 0))
        since.setdefault(change.topic_id, 0)
    return since


class Gathering:
    """Evidence of one partition."""

    def __init__(
        self,
        place: Place,
        *,
        stream: str,
        since: int,
        ledger: LedgerStore,
        state: StateStore,
        records: RecordStore,
        sight: Sight,
        table: Table | None,
    ) -> None:
        self.place, self.stream, self.since = place, stream, since
        self.ledger, self.state, self.records, self.sight, self.table = ledger, state, records, sight, table
        self.files = Files(place.partition)

    def evidence(self) -> Iterator[Evidence]:
        """One row per promise."""
        place, table = self.place, None if self.place.rewritten else self.table
        yield dense(place.partition, place.was, place.changes, place.now)
        if table is None:
            self._pass(Wanted(partition=place.partition, since=place.since), None)
        walks = [] if table is None else list(self._walks(table, self._base()))
        total = sum(file.rows for file in place.active) if place.whole else place.now.records
        yield from self.files.evidence(total, place.now)
        if table is not None:
            yield from walked(place.partition, walks, tuple(file.path for file in place.files))

    def promises(self) -> set[str]:
        """What there must be evidence of: rows can be folded where the machine and the files say how."""
        table = None if self.place.rewritten else self.table
        folded = {"folded"} if table else set()
        return {"dense", "counted", "unique"} | folded | ({"linked"} if table and table.before else set())

    def _walks(self, table: Table, base: Base) -> Iterator[Walk]:
        since = {**self.place.since, base.topic_id: base.frontier} if base.topic_id else self.place.since
        rounds = 1 + sum(file.rows for file in self.place.files) // ROWS_AT_ONCE
        for number in range(rounds):
            wanted = Wanted(
                partition=self.place.partition,
                since=since,
                key=table.key,
                columns=table.columns,
                before=table.before,
                bucket=(number, rounds),
            )
            walk = Walk(table.columns, lambda life, names: self._rows(base, table, life, names), before=table.before)
            self._pass(wanted, walk)
            self._hold_against_state(walk, base, table, wanted)
            yield walk

    def _pass(self, wanted: Wanted, walk: Walk | None) -> None:
        look = self.files if wanted.bucket[0] == 0 else Files(self.place.partition)
        for file in self.place.files_since(wanted.since):
            for part in look.take(file, self.sight.parts(file, wanted)):
                if walk is not None:
                    walk.take(part, file.path)

    def _rows(self, base: Base, table: Table, life: str, names: list[str]) -> dict[str, Tables]:
        """Sessions as they were before."""
        if life != base.topic_id:
            return {}
        return {name: _table(table, one) for name, one in self.state.load(base.state, names).items()}

    def _hold_against_state(self, walk: Walk, base: Base, table: Table, wanted: Wanted) -> None:
        """Sessions that state files since then have, and those that records touched. An ended life has none left."""
        now, known = self.place.now, {file.path for file in base.state}
        new = [file for file in now.state if file.path not in known]
        names = (name for name, _ in self.state.each(new) if in_bucket(name, wanted.bucket))
        for many in _chunks(names, NAMES_AT_ONCE):
            self._compare(walk, table, now, list(dict.fromkeys(many)))
        for many in _chunks([name for life, name in list(walk.tables) if life == now.topic_id], NAMES_AT_ONCE):
            self._compare(walk, table, now, list(many))
        for life, name in list(walk.tables):
            walk.compare(life, name, {})

    def _compare(self, walk: Walk, table: Table, now: Account, names: list[str]) -> None:
        kept = self.state.load(now.state, names)
        walk.meet({(now.topic_id, name) for name in names})
        for name in names:
            walk.compare(now.topic_id, name, _table(table, kept[name]) if name in kept else {})

    def _base(self) -> Base:
        """The state to begin with: as of the last judged entry, or further back where a repair went below it."""
        was = self.place.was
        if was is None:
            return Base("")
        low, sequence, account = self.place.since[was.topic_id], self.since, was
        there, place = set(self.records.paths(self.place.partition)), str(self.place.partition)
        while sequence > 0 and account.topic_id == was.topic_id:
            if account.frontier <= low and all(file.path in there for file in account.state):
                return Base(account.topic_id, account.frontier, account.state)
            entry = self.ledger.manifest(self.stream, sequence).entry
            rewound = [change.rewound for change in entry.changes if str(change.partition) == place]
            low = min([low, *(offset for offset in rewound if entry.kind == "repair" and offset >= 0)])
            sequence -= 1
            account = self.ledger.at(self.stream, sequence).partitions.get(place) or Account(
                topic_id="", frontier=0, born=0
            )
        return Base(was.topic_id)


def _chunks(names: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(names)
    while many := list(islice(rest, size)):
        yield many


def _table(table: Table, session: Session) -> Tables:
    return {} if session.saved is None else table.load(session.saved, session.version)
