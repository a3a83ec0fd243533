"""Check: every entry that was not judged yet is judged by the rules of verify and by suites, after the
commit and beside the fold.

1. Read the ledger: the entries after the last judged one, and the files that are in the table now.
2. For each partition that they changed: apply the rules to its new records and state, and check the
   new records by the suite of records.
3. Check what the rules say by the suites of ledger and state.
4. Commit the verdict: good or bad per partition. What a repair replaced meanwhile is void, and is
   judged anew.

Records are folded over the state as of the last judged entry or, where a repair went further back,
that of the newest entry before. A check that breaks commits nothing: it is never a good verdict.

Next: operations/prove/partition_rules.py has the rules; operations/prove/suite.py has the suites;
ledger/entries.py says what a verdict does to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, Files, group_by_partition
from seriatim.engine.findings import Finding
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, FencedError, IntegrityError, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, never_run_error, read_head, require_head
from seriatim.ledger.entries import AcceptEntry, Entry, RepairEntry, VerdictEntry
from seriatim.ledger.manifests import LedgerHead, Manifest
from seriatim.ledger.model import Account, Change, FailedRange, Ledger, describe_failed_range
from seriatim.operations.prove.partition_rules import (
    CommittedFile,
    Evidence,
    EvidenceTally,
    FoldBase,
    PartitionClaims,
    PartitionProof,
    PartitionProver,
    StateRowReader,
    check_step,
    state_row_reader,
)
from seriatim.operations.prove.suite import (
    BrokenCheckError,
    Checker,
    Expectation,
    Judgement,
    Suite,
    Suites,
)
from seriatim.ports import (
    Clock,
    LedgerStore,
    OpenStream,
    ProgressCallback,
    RecordScanner,
    UnreadableFileError,
)
from seriatim.workers import ChooseWorkers, map_or_raise, this_process

ROWS_AT_ONCE = 500_000
"""The most records of a partition whose rows are held in memory together. If there are more, the
sessions are folded in rounds.
"""


class CheckResult(Struct, kw_only=True):
    """What was judged, and the verdict."""

    judged_after: int
    judged_until: int
    verdict: dict[str, str] = field(default_factory=dict)
    records: int = 0
    expectations: int = 0
    evidence: list[Evidence] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""
    sequence: int = -1
    """The entry of the verdict; -1: there was nothing to judge."""
    ledger: Ledger
    """The ledger after the verdict."""


def _ignore_progress(_records: int, _total: int) -> None:
    """The progress callback of a check that nobody watches."""


class JudgedPartition(Struct, frozen=True, kw_only=True):
    """One partition that entries changed since the last judged one, and what is new in it."""

    partition: Partition
    account: Account
    previous_account: Account | None
    """As of the last judged entry."""
    record_files: Files
    """All record files of the partition."""
    first_new_offsets: dict[str, int]
    """By topic id: the first offset that is new."""
    rewritten_files: Files = ()
    """Files that another program made of ours (OPTIMIZE), and that may have new records of this
    partition.
    """
    has_only_own_files: bool = True
    """Whether all records of the partition are in files of its own."""

    @property
    def new_files(self) -> Files:
        """The record files that have new records, by offset."""
        return self.files_since(self.first_new_offsets)

    def files_since(self, first_offsets: Mapping[str, int]) -> Files:
        """The record files with records from these offsets on, by offset."""
        lowest = min(first_offsets.values(), default=0)
        files = [file for file in self.record_files if file.last_offset >= lowest]
        files.sort(key=lambda file: file.first_offset)
        return tuple(files)

    @property
    def start(self) -> int:
        """The first offset that is judged."""
        previous_frontier = 0
        if self.previous_account is not None:
            previous_frontier = self.previous_account.frontier
        return min(self.first_new_offsets.values(), default=previous_frontier)


def check_stream(
    open_stream: OpenStream,
    suites: Suites,
    checker: Checker,
    record_scanner: RecordScanner,
    progress: ProgressCallback = _ignore_progress,
    *,
    choose_workers: ChooseWorkers = this_process,
    load_runner: Callable[[], Runner] | None = None,
) -> CheckResult:
    """Judge every entry that was not judged yet.

    Other runs commit meanwhile, so a check may have to be tried again. `load_runner` loads the
    machine where works are done in other processes.
    """
    name = open_stream.stream.name
    row_reader = _exact_row_reader(open_stream.runner, load_runner)
    prover = PartitionProver(record_scanner, open_stream.open_state(), row_reader)
    partition_check = PartitionCheck(prover, checker, suites.records)
    for attempts_left in reversed(range(TRIES_MAX)):
        head = require_head(open_stream.ledger, name)
        attempt = CheckAttempt(open_stream, head, suites, partition_check, progress, choose_workers)
        if not attempt.partitions:
            return attempt.result
        try:
            return attempt.run()
        except FencedError:
            if not attempts_left:
                raise
        except BrokenCheckError as broken_check:
            raise broken_check.to_config_error(name) from None
        except UnreadableFileError as unreadable:
            if _has_ledger_moved(open_stream, head):
                # A repair or a sweep took the file away while we read.
                if attempts_left:
                    continue
                raise FencedError(
                    f"{name}: other runs committed during each of {TRIES_MAX} tries",
                    cause=str(unreadable),
                    next=f"nothing was judged; try again: seriatim check {name}",
                ) from None
            raise IntegrityError(
                f"{name}: a record file cannot be read: {unreadable.path}",
                cause=unreadable.reason,
                next=f"`seriatim verify {name}` says what differs; nothing was judged",
            ) from None
    return raise_broken_promise("a check ends by a verdict or an error")


def _exact_row_reader(
    runner: Runner, load_runner: Callable[[], Runner] | None
) -> StateRowReader | None:
    """Reads the rows of states; None for machines whose rows are not known exactly."""
    row_reader = state_row_reader(runner, load_runner)
    if row_reader is None or not row_reader.is_exact:
        return None
    return row_reader


def _has_ledger_moved(open_stream: OpenStream, head: LedgerHead) -> bool:
    """Whether the ledger went on: then files that were in the table may be gone legitimately."""
    present_head = read_head(open_stream.ledger, open_stream.stream.name)
    return present_head is not None and present_head.ledger.sequence != head.ledger.sequence


class UnjudgedEntry(Struct, frozen=True, kw_only=True):
    """An entry that was not judged yet, with what is needed of its manifest."""

    entry: Entry
    changes: dict[str, Change]
    """By partition."""
    accounts: dict[str, Account | None]
    """The accounts that differ from those of the entry before, by partition. None: it is gone. The
    ledgers themselves would take memory for all partitions, again for each entry.
    """


def unjudged_entries(manifests: Iterable[Manifest]) -> Iterator[UnjudgedEntry]:
    """The entries of these manifests, which follow each other."""
    accounts_before: dict[str, Account] = {}
    for manifest in manifests:
        accounts_after = manifest.ledger.partitions
        accounts: dict[str, Account | None] = {}
        for name in accounts_before:
            if name not in accounts_after:
                accounts[name] = None
        for name, account in accounts_after.items():
            if accounts_before.get(name) != account:
                accounts[name] = account
        entry = manifest.entry
        changes = {str(change.partition): change for change in entry.changes}
        yield UnjudgedEntry(entry=entry, changes=changes, accounts=accounts)
        accounts_before = accounts_after


class PartitionToCheck(Struct, frozen=True, kw_only=True):
    """A piece of work: one partition that entries changed."""

    claims: PartitionClaims
    new_files: Files = ()
    """Files with new records of the partition."""
    first_new_offsets: dict[str, int] = field(default_factory=dict)
    """By topic id: the first offset that is new."""

    def __str__(self) -> str:
        return str(self.claims)


class CheckedPartition(Struct, frozen=True, kw_only=True):
    """The answer to a `PartitionToCheck`."""

    proof: PartitionProof = field(default_factory=PartitionProof)
    judgements: list[Judgement] = field(default_factory=list)
    """What is not as the suite of records expects."""
    broken_expectation: Expectation | None = None
    """An expectation that could not be checked. Then there is no verdict."""
    broken_reason: str = ""

    def raise_errors(self) -> None:
        """Raise what stops the check of the whole stream."""
        if self.proof.unreadable_path:
            raise UnreadableFileError(self.proof.unreadable_path, self.proof.read_error)
        if self.broken_expectation is not None:
            raise BrokenCheckError(self.broken_expectation, self.broken_reason)


class PartitionCheck(Struct, frozen=True):
    """Checks one partition: its files against the ledger, and its new records against the suite of
    records. It can be sent to other processes.
    """

    prover: PartitionProver
    checker: Checker
    suite: Suite

    def __call__(self, work: PartitionToCheck) -> CheckedPartition:
        """Evidence and judgements. Errors that the caller decides about are values."""
        proof = self.prover(work.claims)
        if proof.unreadable_path or not work.new_files or not self.suite.expectations:
            return CheckedPartition(proof=proof)
        try:
            judgements = self.checker.check_records(
                self.suite, work.claims.partition, work.new_files, work.first_new_offsets
            )
        except UnreadableFileError as error:
            unreadable = PartitionProof(unreadable_path=error.path, read_error=error.reason)
            return CheckedPartition(proof=unreadable)
        except BrokenCheckError as error:
            return CheckedPartition(
                broken_expectation=error.expectation, broken_reason=error.reason
            )
        return CheckedPartition(proof=proof, judgements=judgements)


class CheckAttempt:
    """One attempt at a check, as of one entry of the ledger."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        suites: Suites,
        partition_check: PartitionCheck,
        progress: ProgressCallback = _ignore_progress,
        choose_workers: ChooseWorkers = this_process,
    ) -> None:
        """Step 1: what is to be judged."""
        self.open_stream = open_stream
        self.suites = suites
        self.partition_check = partition_check
        self.progress = progress
        self.choose_workers = choose_workers
        self.head = head
        self.judgements: list[Judgement] = []
        ledger = head.ledger
        self.result = CheckResult(
            judged_after=ledger.judged_until,
            judged_until=ledger.sequence,
            ledger=ledger,
            expectations=suites.count,
        )
        store = open_stream.ledger
        manifests = store.entries(ledger.stream, ledger.judged_until)
        own_manifests = (
            manifest for manifest in manifests if manifest.entry.sequence <= ledger.sequence
        )
        self.unjudged_entries = list(unjudged_entries(own_manifests))
        self.judged_ledger = Ledger(stream=ledger.stream)
        self.partitions: list[JudgedPartition] = []
        entries = [unjudged.entry for unjudged in self.unjudged_entries]
        if not all(entry.has_nothing_to_judge for entry in entries):
            self.judged_ledger = store.ledger_at(ledger.stream, ledger.judged_until)
            active_files = store.active_files(head)
            self.partitions = judged_partitions(self.judged_ledger, ledger, entries, active_files)

    def run(self) -> CheckResult:
        """Steps 2 to 4."""
        started_seconds = self.open_stream.clock.now_seconds()
        result = self.result
        # 2. The partitions.
        total_rows = 0
        for judged in self.partitions:
            total_rows += sum(file.rows for file in judged.new_files)
        self.progress(0, total_rows)
        works = map(self.work_of, self.partitions)
        answers = map_or_raise(self.choose_workers(total_rows), self.partition_check, works)
        for judged, checked in zip(self.partitions, answers, strict=True):
            self._take_answer(judged, checked)
            self.progress(result.records, max(total_rows, result.records))
        crash_point("check-judged")
        # 3. The evidence.
        for suite in (self.suites.ledger, self.suites.state):
            self.judgements += self.partition_check.checker.check_evidence(suite, result.evidence)
        # 4. The verdict.
        self._commit(self.open_stream.clock.now_seconds() - started_seconds)
        return result

    def work_of(self, judged: JudgedPartition) -> PartitionToCheck:
        """The piece of work for one partition."""
        return PartitionToCheck(
            claims=self.claims(judged),
            new_files=(*judged.new_files, *judged.rewritten_files),
            first_new_offsets=judged.first_new_offsets,
        )

    def claims(self, judged: JudgedPartition) -> PartitionClaims:
        """What the ledger says of a partition, for whoever reads its files."""
        base = FoldBase()
        row_reader = self._row_reader(judged)
        if row_reader is not None:
            base = self._find_base(judged)
        first_offsets = dict(judged.first_new_offsets)
        if base.topic_id:
            first_offsets[base.topic_id] = base.frontier
        rows_in_table = None
        if judged.has_only_own_files:
            rows_in_table = sum(file.rows for file in judged.record_files)
        return PartitionClaims(
            partition=judged.partition,
            account=judged.account,
            record_files=self._committed_files(judged, judged.files_since(first_offsets)),
            state_files=self._committed_files(judged, base.newer_files(judged.account)),
            base=base,
            first_offsets=first_offsets,
            rows_in_table=rows_in_table,
            folds_rows=row_reader is not None,
            # Every round reads all files again, but holds only the sessions of one bucket.
            round_count=1 + sum(file.rows for file in judged.new_files) // ROWS_AT_ONCE,
        )

    def _row_reader(self, judged: JudgedPartition) -> StateRowReader | None:
        """None if the records cannot be folded in order: those of other partitions are in the same
        files.
        """
        return None if judged.rewritten_files else self.partition_check.prover.row_reader

    def _committed_files(
        self, judged: JudgedPartition, files: Iterable[File]
    ) -> tuple[CommittedFile, ...]:
        """These files, each with the entry that named it first since the last judged one. Later entries
        name state files again that they did not write.
        """
        committed_files = {
            file.path: CommittedFile.of_unread_entry(
                file, self.result.judged_after, judged.partition
            )
            for file in files
        }
        for unjudged in self.unjudged_entries:
            entry = unjudged.entry
            change = unjudged.changes.get(str(judged.partition))
            if change is None:
                continue
            for file in change.files():
                known_file = committed_files.get(file.path)
                if known_file is not None and known_file.entry_type is None:
                    committed_file = CommittedFile(file, entry.sequence, change, type(entry))
                    committed_files[file.path] = committed_file
        return tuple(committed_files.values())

    def _take_answer(self, judged: JudgedPartition, checked: CheckedPartition) -> None:
        """Step 2: take the evidence and the judgements of a partition."""
        checked.raise_errors()
        if judged.rewritten_files:
            rewritten_path = judged.rewritten_files[0].path
            self.result.notes.append(
                f"{judged.partition}: its records were not folded: {rewritten_path}"
                " was rewritten by somebody else (OPTIMIZE)"
            )
        self.result.evidence += [self.dense_evidence(judged), *checked.proof.evidence]
        self.result.records += checked.proof.records
        self.judgements += checked.judgements

    def dense_evidence(self, judged: JudgedPartition) -> Evidence:
        """Each account of the partition follows from the one before it, up to the present one."""
        name = str(judged.partition)
        tally = EvidenceTally(judged.partition, "dense")
        account = judged.previous_account
        account_in_ledger: Account | None = None
        for unjudged in self.unjudged_entries:
            account_in_ledger = unjudged.accounts.get(name, account_in_ledger)
            account_after = account_in_ledger
            if unjudged is self.unjudged_entries[-1]:
                account_after = judged.account
            if account is None and account_after is None:
                continue  # The partition came later.
            entry = unjudged.entry
            for check in check_step(entry, unjudged.changes.get(name), account, account_after):
                tally.add(check.to_difference(name, entry.sequence), offset=check.offset)
            account = account_after
        return tally.evidence

    def _find_base(self, judged: JudgedPartition) -> FoldBase:
        """The state to begin with.

        It is that of the last judged entry. If a repair rewound further, or if state files are
        gone, it is that of an earlier entry; if there is none, folding begins without state.
        """
        previous_account = judged.previous_account
        if previous_account is None:
            return FoldBase()
        stream = self.result.ledger.stream
        store = self.open_stream.ledger
        topic_id = previous_account.topic_id
        partition_name = str(judged.partition)
        records = self.open_stream.records
        lowest = judged.first_new_offsets[topic_id]
        sequence = self.result.judged_after
        account: Account | None = previous_account
        while sequence > 0 and account is not None and account.topic_id == topic_id:
            is_early_enough = account.frontier <= lowest
            if is_early_enough and records.has_files(file.path for file in account.state):
                return FoldBase(topic_id, account.frontier, account.state)
            # State from before a repair may be state that the repair took back.
            entry = store.manifest_at(stream, sequence).entry
            lowest = min([lowest, *_rewound_offsets(entry, partition_name)])
            sequence -= 1
            account = store.ledger_at(stream, sequence).partitions.get(partition_name)
        return FoldBase(topic_id)

    def _commit(self, took_seconds: float) -> None:
        """Step 4: commit the verdict."""
        result = self.result
        findings = check_findings(self.judgements, result.evidence, result.judged_until)
        entry = VerdictEntry(
            attempt=self.open_stream.new_attempt(),
            product_version=__version__,
            verdict=verdict_by_partition(self.partitions, self.judgements),
            judged_after=result.judged_after,
            judged_until=result.judged_until,
            failed_ranges=failed_ranges(self.partitions, self.judgements, result.judged_until),
            findings=tuple(findings),
            reason=f"{result.records} records, {len(result.evidence)} promises,"
            f" {result.expectations} expectations",
            peak_memory_bytes=self.open_stream.peak_memory_bytes(),
            took_seconds=max(0.0, took_seconds),
        )
        head, committed_entry = commit(
            self.open_stream.ledger, self.open_stream.clock, self.head, entry
        )
        # The committed entry may say less than ours: a repair may have replaced what we judged.
        result.verdict = dict(committed_entry.verdict)
        result.findings = list(committed_entry.findings)
        result.sequence = committed_entry.sequence
        result.ledger = head.ledger


def _rewound_offsets(entry: Entry, partition_name: str) -> list[int]:
    """Where a repair began to replace output of a partition; empty for other entries."""
    if not isinstance(entry, RepairEntry):
        return []
    return [
        change.replaced_from
        for change in entry.changes
        if str(change.partition) == partition_name and change.replaced_from >= 0
    ]


def judged_partitions(
    before: Ledger, after: Ledger, entries: Iterable[Entry], active_files: Iterable[File]
) -> list[JudgedPartition]:
    """The partitions that the entries changed, and what is new in each."""
    changes_by_partition: dict[str, list[tuple[Entry, Change]]] = {}
    for entry in entries:
        for change in entry.changes:
            if change.certificate or change.records or change.state is not None:
                changes_by_partition.setdefault(str(change.partition), []).append((entry, change))
    files_by_partition, foreign_files = group_by_partition(active_files, after.partitions)
    partitions: list[JudgedPartition] = []
    for partition_name, changes in sorted(changes_by_partition.items()):
        previous_account = before.partitions.get(partition_name)
        first_new_offsets = _find_first_new_offsets(previous_account, changes)
        lowest = min(first_new_offsets.values(), default=0)
        judged = JudgedPartition(
            partition=Partition.parse(partition_name),
            account=after.partitions[partition_name],
            previous_account=previous_account,
            record_files=tuple(files_by_partition.get(partition_name, ())),
            first_new_offsets=first_new_offsets,
            rewritten_files=tuple(file for file in foreign_files if file.last_offset >= lowest),
            has_only_own_files=not foreign_files,
        )
        partitions.append(judged)
    return partitions


def _find_first_new_offsets(
    previous_account: Account | None, changes: Iterable[tuple[Entry, Change]]
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


# The verdict.


def verdict_by_partition(
    partitions: Iterable[JudgedPartition], judgements: Iterable[Judgement]
) -> dict[str, str]:
    """Good or bad, for each partition that was judged."""
    bad_partitions = {judgement.partition for judgement in judgements if judgement.is_critical}
    verdict: dict[str, str] = {}
    for judged in partitions:
        verdict[str(judged.partition)] = "bad" if judged.partition in bad_partitions else "good"
    return verdict


def failed_ranges(
    partitions: Iterable[JudgedPartition], judgements: Sequence[Judgement], judged_until: int
) -> tuple[FailedRange, ...]:
    """What is bad, as one range for each bad partition."""
    ranges: list[FailedRange] = []
    for judged in partitions:
        critical_judgements = [
            judgement
            for judgement in judgements
            if judgement.partition == judged.partition and judgement.is_critical
        ]
        if critical_judgements:
            files = _blamed_files(judged, critical_judgements)
            ranges.append(_failed_range(judged, files, judged_until))
    return tuple(ranges)


def _blamed_files(judged: JudgedPartition, judgements: Sequence[Judgement]) -> Sequence[File]:
    """The files with bad rows; all files that were judged, if that is not known of one judgement."""
    if not all(judgement.files for judgement in judgements):
        return judged.new_files
    blamed_paths: set[str] = set()
    for judgement in judgements:
        blamed_paths.update(judgement.files)
    return [file for file in judged.new_files if file.path in blamed_paths]


def _failed_range(judged: JudgedPartition, files: Sequence[File], judged_until: int) -> FailedRange:
    start = judged.start
    until = max(judged.account.frontier, judged.start)
    if files:
        # A file may begin before what is new in it.
        start = max(judged.start, min(file.first_offset for file in files))
        until = max(file.last_offset + 1 for file in files)
    return FailedRange(
        partition=str(judged.partition),
        epoch=judged.account.epoch,
        start=start,
        until=until,
        files=tuple(file.path for file in files),
        judged_until=judged_until,
    )


def check_findings(
    judgements: Iterable[Judgement], evidence: Iterable[Evidence], judged_until: int
) -> list[Finding]:
    """What is reported to people: critical as errors, warnings as such, info not at all."""
    evidence_by_promise = {(row.partition, row.promise): row for row in evidence}
    findings: list[Finding] = []
    for judgement in judgements:
        if judgement.expectation.severity == "info":
            continue
        promise = str(judgement.expectation.meta.get("promise", ""))
        promise_evidence = evidence_by_promise.get((judgement.partition, promise))
        findings.append(_finding_of_judgement(judgement, promise_evidence, judged_until))
    return findings


def _finding_of_judgement(
    judgement: Judgement, evidence: Evidence | None, judged_until: int
) -> Finding:
    """A judgement as a finding. Evidence knows better than the suite what is wrong, and where."""
    expectation = judgement.expectation
    broken_count = judgement.broken_count
    offset = judgement.example_offset
    expected = expectation.text
    observed = judgement.found
    if evidence is not None:
        broken_count = evidence.broken_count
        offset = evidence.offset
        expected = evidence.expected or expectation.text
        observed = evidence.found
    rows = "not so"
    if judgement.row_count:
        rows = f"{broken_count} of {judgement.row_count} records"
    return Finding.at(
        judgement.partition,
        "check",
        offset,
        expected=expected,
        found=f"{rows}: {observed}" if observed else rows,
        cause=f"{expectation.name} ({expectation.suite})",
        level="error" if judgement.is_critical else "warning",
        sequence=judged_until,
    )


# A person accepts what failed.


class AcceptedFailures(Struct):
    """The failed ranges that a person accepts, and the ledger after it (in a dry run, as it is)."""

    failures: list[FailedRange]
    ledger: Ledger


def accept_failed_check(
    store: LedgerStore,
    clock: Clock,
    stream: str,
    attempt: str,
    sequence: int,
    reason: str,
    *,
    dry_run: bool = False,
) -> AcceptedFailures:
    """Accept, by the decision of a person, what failed in checks up to entry `sequence`.

    If nothing failed up to there, it is refused.
    """
    head = read_head(store, stream)
    if head is None:
        raise never_run_error(stream, "there is nothing to accept")
    refuse_if_nothing_failed(head.ledger, sequence)
    accepted = [failed for failed in head.ledger.failed_ranges if failed.judged_until <= sequence]
    if dry_run:
        return AcceptedFailures(accepted, head.ledger)
    entry = AcceptEntry(
        attempt=attempt,
        product_version=__version__,
        judged_until=sequence,
        reason=reason,
    )
    new_head, _ = commit(store, clock, head, entry)
    return AcceptedFailures(accepted, new_head.ledger)


def refuse_if_nothing_failed(ledger: Ledger, sequence: int) -> None:
    """Refuse to accept up to an entry if nothing failed up to there."""
    if not ledger.failed_ranges:
        raise ConfigError(
            f"{ledger.stream}: nothing to accept: no check failed, the circuit is closed",
            next=f"`seriatim status {ledger.stream}` shows how it is",
        )
    lowest_sequence = min(failed.judged_until for failed in ledger.failed_ranges)
    if lowest_sequence <= sequence:
        return
    descriptions = [describe_failed_range(failed) for failed in ledger.failed_ranges[:10]]
    raise ConfigError(
        f"{ledger.stream}: nothing that failed was judged up to entry {sequence}",
        failed="\n".join(descriptions),
        next=f'seriatim accept {ledger.stream} --sequence {lowest_sequence} --because "…"',
    )
