"""Check: every entry that was not judged yet is judged by suites, after the commit and beside the
fold.

1. Read the ledger: the entries after the last judged one, and the files that are in the table now.
2. For each partition that they changed: gather evidence, and check new records by the suite of
   records.
3. Check the evidence by the suites of ledger and state.
4. Commit the verdict: good or bad per partition. What a repair replaced meanwhile is void, and is
   judged anew.

A check that breaks commits nothing: it is never a good verdict.

Next: operations/prove/gather_evidence.py reads; operations/prove/verdict_rules.py decides;
ledger/entries.py says what a verdict does to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding
from seriatim.errors import ConfigError, FencedError, IntegrityError, ensure, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, read_head
from seriatim.ledger.entries import AcceptEntry, Entry, VerdictEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import FailedRange, Ledger, describe_failed_range
from seriatim.operations.prove.evidence import Evidence, RecordScanner
from seriatim.operations.prove.folded_rows import exact_row_reader
from seriatim.operations.prove.gather_evidence import (
    EvidenceGatherer,
    EvidenceRange,
    evidence_ranges,
)
from seriatim.operations.prove.suite import Suites
from seriatim.operations.prove.verdict_rules import (
    BrokenCheckError,
    Checker,
    CheckScope,
    Judgement,
    check_findings,
    failed_ranges,
    verdict_by_partition,
)
from seriatim.ports import Clock, LedgerStore, OpenStream, UnreadableFileError

ProgressCallback = Callable[[int, int], None]


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


def check_stream(
    open_stream: OpenStream,
    suites: Suites,
    checker: Checker,
    record_scanner: RecordScanner,
    progress: ProgressCallback = _ignore_progress,
) -> CheckResult:
    """Judge every entry that was not judged yet.

    Other runs commit meanwhile, so a check may have to be tried again.
    """
    name = open_stream.stream.name
    for attempts_left in reversed(range(TRIES_MAX)):
        head = read_head(open_stream.ledger, name)
        if head is None:
            raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
        attempt = CheckAttempt(open_stream, head, suites, checker, record_scanner, progress)
        if not attempt.evidence_ranges:
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
                f"{name}: a record file cannot be read: {unreadable}",
                next=f"`seriatim verify {name}` says what differs; nothing was judged",
            ) from None
    return raise_broken_promise("a check ends by a verdict or an error")


def _has_ledger_moved(open_stream: OpenStream, head: LedgerHead) -> bool:
    """Whether the ledger went on: then files that were in the table may be gone legitimately."""
    present_head = read_head(open_stream.ledger, open_stream.stream.name)
    return present_head is not None and present_head.ledger.sequence != head.ledger.sequence


class CheckAttempt:
    """One attempt at a check, as of one entry of the ledger."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        suites: Suites,
        checker: Checker,
        record_scanner: RecordScanner,
        progress: ProgressCallback = _ignore_progress,
    ) -> None:
        """Step 1: what is to be judged."""
        self.open_stream = open_stream
        self.suites = suites
        self.checker = checker
        self.record_scanner = record_scanner
        self.progress = progress
        self.head = head
        self.judgements: list[Judgement] = []
        ledger = head.ledger
        self.result = CheckResult(
            judged_after=ledger.judged_until,
            judged_until=ledger.sequence,
            ledger=ledger,
            expectations=suites.count,
        )
        entries: list[Entry] = []
        store = open_stream.ledger
        for manifest in store.entries(ledger.stream, ledger.judged_until):
            entry = manifest.entry
            if entry.sequence <= ledger.sequence and not entry.has_nothing_to_judge:
                entries.append(entry)
        self.evidence_ranges: list[EvidenceRange] = []
        if entries:
            judged_ledger = store.ledger_at(ledger.stream, ledger.judged_until)
            active_files = store.active_files(head)
            self.evidence_ranges = evidence_ranges(judged_ledger, ledger, entries, active_files)

    def run(self) -> CheckResult:
        """Steps 2 to 4."""
        started_seconds = self.open_stream.clock.now_seconds()
        result = self.result
        # 2. The partitions.
        total_rows = 0
        for evidence_range in self.evidence_ranges:
            total_rows += sum(file.rows for file in evidence_range.new_files)
        for evidence_range in self.evidence_ranges:
            self._judge_range(evidence_range)
            self.progress(result.records, max(total_rows, result.records))
        crash_point("check-judged")
        # 3. The evidence.
        for suite in (self.suites.ledger, self.suites.state):
            self.judgements += self.checker.check_evidence(suite, result.evidence)
        # 4. The verdict.
        self._commit(self.open_stream.clock.now_seconds() - started_seconds)
        return result

    def _judge_range(self, evidence_range: EvidenceRange) -> None:
        """Step 2: gather the evidence of a partition, and check its new records."""
        open_stream = self.open_stream
        gatherer = EvidenceGatherer(
            evidence_range,
            stream=open_stream.stream.name,
            judged_sequence=self.result.judged_after,
            ledger=open_stream.ledger,
            state=open_stream.open_state(),
            records=open_stream.records,
            record_scanner=self.record_scanner,
            row_reader=exact_row_reader(open_stream.runner),
        )
        evidence = list(gatherer.evidence())
        ensure(
            {row.promise for row in evidence} == gatherer.promises(),
            "every promise is looked at",
            place=str(evidence_range.partition),
        )
        if evidence_range.rewritten_files:
            rewritten_path = evidence_range.rewritten_files[0].path
            self.result.notes.append(
                f"{evidence_range.partition}: its records were not folded: {rewritten_path}"
                " was rewritten by somebody else (OPTIMIZE)"
            )
        self.result.evidence += evidence
        self.result.records += gatherer.files.new_rows
        files = (*evidence_range.new_files, *evidence_range.rewritten_files)
        suite = self.suites.records
        if files and suite.expectations:
            self.judgements += self.checker.check_records(
                suite, evidence_range.partition, files, evidence_range.first_new_offsets
            )

    def _commit(self, took_seconds: float) -> None:
        """Step 4: commit the verdict."""
        result = self.result
        scopes = [_check_scope(evidence_range) for evidence_range in self.evidence_ranges]
        findings = check_findings(self.judgements, result.evidence, result.judged_until)
        entry = VerdictEntry(
            attempt=self.open_stream.new_attempt(),
            product_version=__version__,
            verdict=verdict_by_partition(scopes, self.judgements),
            judged_after=result.judged_after,
            judged_until=result.judged_until,
            failed_ranges=failed_ranges(scopes, self.judgements, result.judged_until),
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


def _check_scope(evidence_range: EvidenceRange) -> CheckScope:
    """The offsets of a partition that are judged."""
    account = evidence_range.account
    previous_account = evidence_range.previous_account
    previous_frontier = previous_account.frontier if previous_account is not None else 0
    start = min(evidence_range.first_new_offsets.values(), default=previous_frontier)
    return CheckScope(
        evidence_range.partition,
        account.epoch,
        start,
        max(account.frontier, start),
        evidence_range.new_files,
    )


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
        raise ConfigError(
            f"{stream}: it was never run, so there is nothing to accept",
            next=f"seriatim run {stream}",
        )
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
