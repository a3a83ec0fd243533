"""Gather: the evidence of a check, partition by partition. What is new is read again; nothing is
taken from a run.

New are the records at or after the frontier of the last judged entry, or at or after where a repair
rewound to, of the files that are in the table now. They are folded over the state as of then: the
last judged entry's, or, where a repair went further back, that of the newest entry before it. Files
are read a part at a time, sessions in as many rounds as it takes to hold few rows in memory.

Next room: operations/prove/evidence.py has the promises; operations/prove/check.py makes a verdict
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.ledger.model import Account, Change, Entry, File, Ledger
from seriatim.operations.prove.evidence import (
    Evidence,
    EvidenceRequest,
    RecordFilesCheck,
    RecordScanner,
    RowFold,
    RowsByKey,
    dense_evidence,
    in_bucket,
    row_evidence,
)
from seriatim.operations.prove.rules import Row
from seriatim.ports import LedgerStore, RecordStore, StateStore

ROWS_AT_ONCE = 500_000
"""Records of a partition whose rows are held in memory together, at most; more are walked through
in rounds.
"""
NAMES_AT_ONCE = 4_096
EntryChanges = Sequence[tuple[Entry, Change]]


class CheckTableSpec(Struct, frozen=True):
    """The stock machine, as far as its records and state say it."""

    key_columns: tuple[str, ...]
    columns: tuple[str, ...]
    has_before_images: bool
    load: Callable[[bytes, int], Mapping[Any, Row]]


class FoldBase(Struct, frozen=True):
    """Where folding begins, for the life of a topic: its state files, and the first offset that is
    not in them.
    """

    topic_id: str
    frontier: int = 0
    state: tuple[File, ...] = ()


class EvidenceRange(Struct, frozen=True, kw_only=True):
    """One partition under check."""

    partition: Partition
    previous_account: Account | None
    account: Account
    changes: EntryChanges
    record_files: tuple[File, ...]
    """All its record files."""
    first_new_offsets: dict[str, int]
    """By topic id: the first offset that is new."""
    rewritten_files: tuple[File, ...] = ()
    """Files that somebody else made of ours (OPTIMIZE), and that may have new records of it."""
    has_only_own_files: bool = True
    """Whether all its records are in files of its own."""

    @property
    def new_files(self) -> tuple[File, ...]:
        """Its record files that have new records, by offset."""
        return self.files_since(self.first_new_offsets)

    def files_since(self, first_offsets: Mapping[str, int]) -> tuple[File, ...]:
        """Its record files with records at or after these offsets, by offset."""
        lowest = min(first_offsets.values(), default=0)
        return tuple(
            sorted(
                (file for file in self.record_files if file.last_offset >= lowest),
                key=lambda file: file.first_offset,
            )
        )


def evidence_ranges(
    before: Ledger, after: Ledger, entries: Iterable[Entry], active_files: Iterable[File]
) -> list[EvidenceRange]:
    """The partitions that the entries changed, and what is new in each."""
    changes: dict[str, list[tuple[Entry, Change]]] = {}
    for entry in entries:
        for change in entry.changes:
            if change.certificate or change.records or change.state is not None:
                changes.setdefault(str(change.partition), []).append((entry, change))
    files: dict[str, list[File]] = {}
    for file in active_files:
        place = "/".join(file.path.split("/")[1:-1])
        files.setdefault(place if place in after.partitions else "", []).append(file)
    return [
        _evidence_range(place, before, after, many, files.get(place, []), files.get("", []))
        for place, many in sorted(changes.items())
    ]


def _evidence_range(
    partition_name: str,
    before: Ledger,
    after: Ledger,
    changes: EntryChanges,
    own_files: Sequence[File],
    foreign_files: Sequence[File],
) -> EvidenceRange:
    was, since = (
        before.partitions.get(partition_name),
        _find_first_new_offsets(before.partitions.get(partition_name), changes),
    )
    return EvidenceRange(
        partition=Partition.parse(partition_name),
        previous_account=was,
        account=after.partitions[partition_name],
        changes=changes,
        record_files=tuple(own_files),
        first_new_offsets=since,
        rewritten_files=tuple(
            file for file in foreign_files if file.last_offset >= min(since.values(), default=0)
        ),
        has_only_own_files=not foreign_files,
    )


def _find_first_new_offsets(
    previous_account: Account | None, changes: EntryChanges
) -> dict[str, int]:
    since = {previous_account.topic_id: previous_account.frontier} if previous_account else {}
    for entry, change in changes:
        if entry.kind == "repair" and (change.replaced_from >= 0 or change.records):
            since[change.topic_id] = min(
                since.get(change.topic_id, 0), max(change.replaced_from, 0)
            )
        since.setdefault(change.topic_id, 0)
    return since


class EvidenceGatherer:
    """Evidence of one partition."""

    def __init__(
        self,
        evidence_range: EvidenceRange,
        *,
        stream: str,
        judged_sequence: int,
        ledger: LedgerStore,
        state: StateStore,
        records: RecordStore,
        record_scanner: RecordScanner,
        table_spec: CheckTableSpec | None,
    ) -> None:
        self.evidence_range, self.stream, self.judged_sequence = (
            evidence_range,
            stream,
            judged_sequence,
        )
        self.ledger, self.state, self.records, self.record_scanner, self.table_spec = (
            ledger,
            state,
            records,
            record_scanner,
            table_spec,
        )
        self.files = RecordFilesCheck(evidence_range.partition)

    def evidence(self) -> Iterator[Evidence]:
        """One row per promise."""
        place, table = (
            self.evidence_range,
            None if self.evidence_range.rewritten_files else self.table_spec,
        )
        yield dense_evidence(place.partition, place.previous_account, place.changes, place.account)
        if table is None:
            self._scan_files(
                EvidenceRequest(
                    partition=place.partition, first_new_offsets=place.first_new_offsets
                ),
                None,
            )
        walks = [] if table is None else list(self._walk_in_rounds(table, self._find_base()))
        total = (
            sum(file.rows for file in place.record_files)
            if place.has_only_own_files
            else place.account.records
        )
        yield from self.files.evidence(total, place.account)
        if table is not None:
            yield from row_evidence(
                place.partition, walks, tuple(file.path for file in place.new_files)
            )

    def promises(self) -> set[str]:
        """What there must be evidence of: rows can be folded where the machine and the files say
        how.
        """
        table = None if self.evidence_range.rewritten_files else self.table_spec
        folded = {"folded"} if table else set()
        return (
            {"dense", "counted", "unique"}
            | folded
            | ({"linked"} if table and table.has_before_images else set())
        )

    def _walk_in_rounds(self, table_spec: CheckTableSpec, base: FoldBase) -> Iterator[RowFold]:
        since = (
            {**self.evidence_range.first_new_offsets, base.topic_id: base.frontier}
            if base.topic_id
            else self.evidence_range.first_new_offsets
        )
        rounds = 1 + sum(file.rows for file in self.evidence_range.new_files) // ROWS_AT_ONCE
        for number in range(rounds):
            wanted = EvidenceRequest(
                partition=self.evidence_range.partition,
                first_new_offsets=since,
                key_columns=table_spec.key_columns,
                columns=table_spec.columns,
                has_before_images=table_spec.has_before_images,
                bucket=(number, rounds),
            )
            walk = RowFold(
                table_spec.columns,
                lambda life, names: self._rows_before(base, table_spec, life, names),
                has_before_images=table_spec.has_before_images,
            )
            self._scan_files(wanted, walk)
            self._compare_with_state(walk, base, table_spec, wanted)
            yield walk

    def _scan_files(self, request: EvidenceRequest, walk: RowFold | None) -> None:
        look = (
            self.files
            if request.bucket[0] == 0
            else RecordFilesCheck(self.evidence_range.partition)
        )
        for file in self.evidence_range.files_since(request.first_new_offsets):
            for part in look.check_parts(file, self.record_scanner.scan(file, request)):
                if walk is not None:
                    walk.fold_part(part, file.path)

    def _rows_before(
        self, base: FoldBase, table_spec: CheckTableSpec, topic_id: str, names: list[str]
    ) -> dict[str, RowsByKey]:
        """Sessions as they were before."""
        if topic_id != base.topic_id:
            return {}
        return {
            name: _rows_of_session(table_spec, one)
            for name, one in self.state.load(base.state, names).items()
        }

    def _compare_with_state(
        self, walk: RowFold, base: FoldBase, table_spec: CheckTableSpec, request: EvidenceRequest
    ) -> None:
        """Sessions that state files since then have, and those that records touched. An ended life
        has none left.
        """
        now, known = self.evidence_range.account, {file.path for file in base.state}
        new = [file for file in now.state if file.path not in known]
        names = (
            name for name, _ in self.state.all_sessions(new) if in_bucket(name, request.bucket)
        )
        for many in _chunks(names, NAMES_AT_ONCE):
            self._compare_sessions(walk, table_spec, now, list(dict.fromkeys(many)))
        for many in _chunks(
            [name for life, name in list(walk.tables) if life == now.topic_id], NAMES_AT_ONCE
        ):
            self._compare_sessions(walk, table_spec, now, list(many))
        for life, name in list(walk.tables):
            walk.compare_with_state(life, name, {})

    def _compare_sessions(
        self, walk: RowFold, table_spec: CheckTableSpec, account: Account, names: list[str]
    ) -> None:
        kept = self.state.load(account.state, names)
        walk.load_sessions({(account.topic_id, name) for name in names})
        for name in names:
            walk.compare_with_state(
                account.topic_id,
                name,
                _rows_of_session(table_spec, kept[name]) if name in kept else {},
            )

    def _find_base(self) -> FoldBase:
        """The state to begin with: as of the last judged entry, or further back where a repair went
        below it.
        """
        was = self.evidence_range.previous_account
        if was is None:
            return FoldBase("")
        low, sequence, account = (
            self.evidence_range.first_new_offsets[was.topic_id],
            self.judged_sequence,
            was,
        )
        there, place = (
            set(self.records.paths(self.evidence_range.partition)),
            str(self.evidence_range.partition),
        )
        while sequence > 0 and account.topic_id == was.topic_id:
            if account.frontier <= low and all(file.path in there for file in account.state):
                return FoldBase(account.topic_id, account.frontier, account.state)
            entry = self.ledger.manifest_at(self.stream, sequence).entry
            rewound = [
                change.replaced_from for change in entry.changes if str(change.partition) == place
            ]
            low = min(
                [low, *(offset for offset in rewound if entry.kind == "repair" and offset >= 0)]
            )
            sequence -= 1
            account = self.ledger.ledger_at(self.stream, sequence).partitions.get(place) or Account(
                topic_id="", frontier=0, initial_frontier=0
            )
        return FoldBase(was.topic_id)


def _chunks(names: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(names)
    while many := list(islice(rest, size)):
        yield many


def _rows_of_session(table_spec: CheckTableSpec, session: Session) -> RowsByKey:
    return (
        {}
        if session.state_bytes is None
        else table_spec.load(session.state_bytes, session.state_version)
    )
