"""Gather the evidence of a check, partition by partition.

What is new is read again; nothing is taken from a run. New are the records from the frontier of the
last judged entry on, or from where a repair rewound to, in the files that are in the table now.
They are folded over the state of that time: that of the last judged entry, or, where a repair went
further back, that of the newest entry before. Files are read a part at a time, and sessions in as
many rounds as it takes to hold few rows in memory.

Next: operations/prove/evidence.py has the promises; operations/prove/check.py makes a verdict of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from seriatim.engine.files import File, StateStore
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.ledger.entries import Entry, RepairEntry
from seriatim.ledger.model import Account, Change, Ledger
from seriatim.operations.prove.evidence import (
    Evidence,
    EvidenceRequest,
    RecordFilesCheck,
    RecordScanner,
    RowFold,
    dense_evidence,
    in_bucket,
    row_evidence,
)
from seriatim.operations.prove.folded_rows import RowsByKey, StateRowReader
from seriatim.ports import LedgerStore, RecordStore

ROWS_AT_ONCE = 500_000
"""The most records of a partition whose rows are held in memory together. If there are more, the
sessions are folded in rounds.
"""
NAMES_AT_ONCE = 4_096
EntryChanges = Sequence[tuple[Entry, Change]]


class FoldBase(Struct, frozen=True):
    """Where folding begins for a topic id: state files, and the first offset that is not in them."""

    topic_id: str
    frontier: int = 0
    state: tuple[File, ...] = ()


class EvidenceRange(Struct, frozen=True, kw_only=True):
    """One partition under check."""

    partition: Partition
    previous_account: Account | None
    """As of the last judged entry."""
    account: Account
    changes: EntryChanges
    record_files: tuple[File, ...]
    """All record files of the partition."""
    first_new_offsets: dict[str, int]
    """By topic id: the first offset that is new."""
    rewritten_files: tuple[File, ...] = ()
    """Files that another program made of ours (OPTIMIZE), and that may have new records of this
    partition.
    """
    has_only_own_files: bool = True
    """Whether all records of the partition are in files of its own."""

    @property
    def new_files(self) -> tuple[File, ...]:
        """The record files that have new records, by offset."""
        return self.files_since(self.first_new_offsets)

    def files_since(self, first_offsets: Mapping[str, int]) -> tuple[File, ...]:
        """The record files with records from these offsets on, by offset."""
        lowest = min(first_offsets.values(), default=0)
        files = [file for file in self.record_files if file.last_offset >= lowest]
        files.sort(key=lambda file: file.first_offset)
        return tuple(files)


def evidence_ranges(
    before: Ledger, after: Ledger, entries: Iterable[Entry], active_files: Iterable[File]
) -> list[EvidenceRange]:
    """The partitions that the entries changed, and what is new in each."""
    changes_by_partition: dict[str, list[tuple[Entry, Change]]] = {}
    for entry in entries:
        for change in entry.changes:
            if change.certificate or change.records or change.state is not None:
                changes_by_partition.setdefault(str(change.partition), []).append((entry, change))
    files_by_partition: dict[str, list[File]] = {}
    foreign_files: list[File] = []
    for file in active_files:
        # Our paths are TABLE/TOPIC/NUMBER/NAME. Other programs choose folders of their own.
        partition_name = "/".join(file.path.split("/")[1:-1])
        if partition_name in after.partitions:
            files_by_partition.setdefault(partition_name, []).append(file)
        else:
            foreign_files.append(file)
    ranges: list[EvidenceRange] = []
    for partition_name, changes in sorted(changes_by_partition.items()):
        own_files = files_by_partition.get(partition_name, [])
        ranges.append(
            _evidence_range(partition_name, before, after, changes, own_files, foreign_files)
        )
    return ranges


def _evidence_range(
    partition_name: str,
    before: Ledger,
    after: Ledger,
    changes: EntryChanges,
    own_files: Sequence[File],
    foreign_files: Sequence[File],
) -> EvidenceRange:
    previous_account = before.partitions.get(partition_name)
    first_new_offsets = _find_first_new_offsets(previous_account, changes)
    lowest = min(first_new_offsets.values(), default=0)
    return EvidenceRange(
        partition=Partition.parse(partition_name),
        previous_account=previous_account,
        account=after.partitions[partition_name],
        changes=changes,
        record_files=tuple(own_files),
        first_new_offsets=first_new_offsets,
        rewritten_files=tuple(file for file in foreign_files if file.last_offset >= lowest),
        has_only_own_files=not foreign_files,
    )


def _find_first_new_offsets(
    previous_account: Account | None, changes: EntryChanges
) -> dict[str, int]:
    """By topic id: the frontier before, or where a repair rewound to."""
    offsets: dict[str, int] = {}
    if previous_account is not None:
        offsets[previous_account.topic_id] = previous_account.frontier
    for entry, change in changes:
        topic_id = change.topic_id
        replaces_output = change.replaced_from >= 0 or change.records
        if isinstance(entry, RepairEntry) and replaces_output:
            offsets[topic_id] = min(offsets.get(topic_id, 0), max(change.replaced_from, 0))
        offsets.setdefault(topic_id, 0)
    return offsets


class EvidenceGatherer:
    """Gathers the evidence of one partition."""

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
        row_reader: StateRowReader | None,
    ) -> None:
        self.evidence_range = evidence_range
        self.stream = stream
        self.judged_sequence = judged_sequence
        self.ledger = ledger
        self.state = state
        self.records = records
        self.record_scanner = record_scanner
        self.row_reader = row_reader
        if evidence_range.rewritten_files:
            # Records of other partitions are in the same file: they cannot be folded in order.
            self.row_reader = None
        self.files = RecordFilesCheck(evidence_range.partition)

    def evidence(self) -> Iterator[Evidence]:
        """One row per promise."""
        evidence_range = self.evidence_range
        yield dense_evidence(
            evidence_range.partition,
            evidence_range.previous_account,
            evidence_range.changes,
            evidence_range.account,
        )
        row_folds: list[RowFold] = []
        if self.row_reader is not None:
            row_folds = self._fold_in_rounds(self.row_reader, self._find_base())
        else:
            request = EvidenceRequest(
                partition=evidence_range.partition,
                first_new_offsets=evidence_range.first_new_offsets,
            )
            self._scan_files(request, None)
        total_records = evidence_range.account.records
        if evidence_range.has_only_own_files:
            total_records = sum(file.rows for file in evidence_range.record_files)
        yield from self.files.evidence(total_records, evidence_range.account)
        if self.row_reader is not None:
            new_paths = tuple(file.path for file in evidence_range.new_files)
            yield from row_evidence(evidence_range.partition, row_folds, new_paths)

    def promises(self) -> set[str]:
        """The promises that there must be evidence of.

        Rows can be folded only if the machine and the files say how.
        """
        promises = {"dense", "counted", "unique"}
        if self.row_reader is not None:
            promises.add("folded")
            if self.row_reader.row_key_spec.has_before_images:
                promises.add("linked")
        return promises

    def _fold_in_rounds(self, row_reader: StateRowReader, base: FoldBase) -> list[RowFold]:
        """Fold the new records over the base, one bucket of sessions after the other."""
        first_offsets = dict(self.evidence_range.first_new_offsets)
        if base.topic_id:
            first_offsets[base.topic_id] = base.frontier
        new_row_count = sum(file.rows for file in self.evidence_range.new_files)
        # Every round reads all files again, but holds only the sessions of one bucket in memory.
        round_count = 1 + new_row_count // ROWS_AT_ONCE

        def load_rows(topic_id: str, names: list[str]) -> dict[str, RowsByKey]:
            return self._rows_before(base, row_reader, topic_id, names)

        row_folds: list[RowFold] = []
        for number in range(round_count):
            request = EvidenceRequest(
                partition=self.evidence_range.partition,
                first_new_offsets=first_offsets,
                row_key_spec=row_reader.row_key_spec,
                bucket=(number, round_count),
            )
            row_fold = RowFold(row_reader.row_key_spec, load_rows)
            self._scan_files(request, row_fold)
            self._compare_with_state(row_fold, base, row_reader, request)
            row_folds.append(row_fold)
        return row_folds

    def _scan_files(self, request: EvidenceRequest, row_fold: RowFold | None) -> None:
        """Read the files once, for the promises about files and, with `row_fold`, about rows."""
        files_check = self.files
        if request.bucket[0] > 0:
            # The files are read again in every round, and they are to be counted only once.
            files_check = RecordFilesCheck(self.evidence_range.partition)
        for file in self.evidence_range.files_since(request.first_new_offsets):
            scanned_parts = self.record_scanner.scan(file, request)
            for evidence_part in files_check.check_parts(file, scanned_parts):
                if row_fold is not None:
                    row_fold.fold_part(evidence_part, file.path)

    def _rows_before(
        self, base: FoldBase, row_reader: StateRowReader, topic_id: str, names: list[str]
    ) -> dict[str, RowsByKey]:
        """The rows of sessions in the base. For another topic id there are none."""
        if topic_id != base.topic_id:
            return {}
        sessions = self.state.load(base.state, names)
        return {name: _rows_of_session(row_reader, session) for name, session in sessions.items()}

    def _compare_with_state(
        self,
        row_fold: RowFold,
        base: FoldBase,
        row_reader: StateRowReader,
        request: EvidenceRequest,
    ) -> None:
        """Compare the sessions of a bucket with their state.

        1. Sessions that the state files since the base have.
        2. Sessions that records touched.
        3. Sessions of a topic that was deleted: they have no state any more.
        """
        account = self.evidence_range.account
        # 1. Sessions of new state files.
        base_paths = {file.path for file in base.state}
        new_state_files = [file for file in account.state if file.path not in base_paths]
        names_in_state = (
            name
            for name, _ in self.state.all_sessions(new_state_files)
            if in_bucket(name, request.bucket)
        )
        for names in _chunks(names_in_state, NAMES_AT_ONCE):
            # Several state files may have the same session.
            distinct_names = list(dict.fromkeys(names))
            self._compare_sessions(row_fold, row_reader, account, distinct_names)
        # 2. Sessions of records. The comparison takes sessions out of the tables, so these are
        # those that are left.
        touched_names = [name for topic_id, name in row_fold.tables if topic_id == account.topic_id]
        for names in _chunks(touched_names, NAMES_AT_ONCE):
            self._compare_sessions(row_fold, row_reader, account, names)
        # 3. Sessions of other topic ids.
        for topic_id, name in list(row_fold.tables):
            row_fold.compare_with_state(topic_id, name, {})

    def _compare_sessions(
        self, row_fold: RowFold, row_reader: StateRowReader, account: Account, names: list[str]
    ) -> None:
        sessions = self.state.load(account.state, names)
        row_fold.load_sessions({(account.topic_id, name) for name in names})
        for name in names:
            state_rows: RowsByKey = {}
            if name in sessions:
                state_rows = _rows_of_session(row_reader, sessions[name])
            row_fold.compare_with_state(account.topic_id, name, state_rows)

    def _find_base(self) -> FoldBase:
        """The state to begin with.

        It is that of the last judged entry. If a repair rewound further, or if state files are
        gone, it is that of an earlier entry; if there is none, folding begins without state.
        """
        previous_account = self.evidence_range.previous_account
        if previous_account is None:
            return FoldBase("")
        topic_id = previous_account.topic_id
        partition_name = str(self.evidence_range.partition)
        existing_paths = set(self.records.paths(self.evidence_range.partition))
        lowest = self.evidence_range.first_new_offsets[topic_id]
        sequence = self.judged_sequence
        account: Account | None = previous_account
        while sequence > 0 and account is not None and account.topic_id == topic_id:
            is_complete = all(file.path in existing_paths for file in account.state)
            if account.frontier <= lowest and is_complete:
                return FoldBase(topic_id, account.frontier, account.state)
            # State from before a repair may be state that the repair took back.
            entry = self.ledger.manifest_at(self.stream, sequence).entry
            lowest = min([lowest, *_rewound_offsets(entry, partition_name)])
            sequence -= 1
            account = self.ledger.ledger_at(self.stream, sequence).partitions.get(partition_name)
        return FoldBase(topic_id)


def _rewound_offsets(entry: Entry, partition_name: str) -> list[int]:
    """Where a repair began to replace output of a partition; empty for other entries."""
    if not isinstance(entry, RepairEntry):
        return []
    return [
        change.replaced_from
        for change in entry.changes
        if str(change.partition) == partition_name and change.replaced_from >= 0
    ]


def _chunks(names: Iterable[str], size: int) -> Iterator[list[str]]:
    """Names in lists of at most this size, in order."""
    remaining = iter(names)
    chunk = list(islice(remaining, size))
    while chunk:
        yield chunk
        chunk = list(islice(remaining, size))


def _rows_of_session(row_reader: StateRowReader, session: Session) -> RowsByKey:
    if session.state_bytes is None:
        return {}
    return row_reader.load(session.state_bytes, session.state_version)
