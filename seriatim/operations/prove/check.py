"""Check: gate 2. Every entry that was not judged yet is judged by suites, after the commit and
beside the fold.

1. read the ledger: entries after the last judged one, and the files that are in the table now
2. per partition that they changed: gather evidence, judge its new records by the suite of records
3. judge the evidence by the suites of ledger and state
4. commit the verdict: good or bad per partition. What a repair replaced meanwhile is void, and judged anew

A check that breaks commits nothing: it is never a pass.

Next room: operations/prove/gather_evidence.py reads; operations/prove/verdict_rules.py decides;
ledger/verdicts.py says what a verdict does to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding
from seriatim.errors import ConfigError, FencedError, IntegrityError, ensure, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, read_head
from seriatim.ledger.model import Entry, Ledger
from seriatim.ledger.verdicts import FailedRange, describe_failed_range, has_nothing_to_judge
from seriatim.operations.prove.evidence import Evidence, RecordScanner
from seriatim.operations.prove.gather_evidence import (
    CheckTableSpec,
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
from seriatim.ports import (
    Clock,
    LedgerHead,
    LedgerStore,
    RecordStore,
    StateStore,
    UnreadableFileError,
)

ProgressCallback = Callable[[int, int], None]


class CheckContext(Struct, frozen=True, kw_only=True):
    """What a check is made with."""

    stream: str
    suites: Suites
    ledger: LedgerStore
    open_state: Callable[[], StateStore]
    records: RecordStore
    record_scanner: RecordScanner
    checker: Checker
    table_spec: CheckTableSpec | None
    """The stock machine; None: another one, whose records do not say how they fold."""
    clock: Clock
    new_attempt: Callable[[], str]
    peak_memory_bytes: Callable[[], int]
    progress: ProgressCallback = lambda _done, _total: None


class CheckResult(Struct, kw_only=True):
    """What was judged, and what came of it."""

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
    """The verdict's entry; -1: there was nothing to judge."""
    ledger: Ledger
    """After it."""


def check_stream(context: CheckContext) -> CheckResult:
    """Judge every entry that was not judged yet."""
    for left in reversed(range(TRIES_MAX)):
        head = read_head(context.ledger, context.stream)
        if head is None:
            raise ConfigError(
                f"{context.stream}: it was never run", next=f"seriatim run {context.stream}"
            )
        judging = CheckAttempt(context, head)
        if not judging.evidence_ranges:
            return judging.result
        try:
            return judging.run()
        except FencedError:
            if not left:
                raise
        except BrokenCheckError as trouble:
            raise trouble.to_config_error(context.stream) from None
        except UnreadableFileError as trouble:
            if _has_ledger_moved(context, head):
                continue
            raise IntegrityError(
                f"{context.stream}: a record file cannot be read: {trouble}",
                next=f"`seriatim verify {context.stream}` says what differs; nothing was judged",
            ) from None
    return raise_broken_promise("a check ends by a verdict or an error")


def _has_ledger_moved(context: CheckContext, head: LedgerHead) -> bool:
    """Whether the ledger went on: files that were in the table may be gone by right."""
    now = read_head(context.ledger, context.stream)
    return now is not None and now.ledger.sequence != head.ledger.sequence


class CheckAttempt:
    """One try."""

    def __init__(self, context: CheckContext, head: LedgerHead) -> None:
        self.context, self.head = context, head
        ledger = head.ledger
        since, to = ledger.judged_until, ledger.sequence
        self.result = CheckResult(
            judged_after=since, judged_until=to, ledger=ledger, expectations=context.suites.count
        )
        entries = [manifest.entry for manifest in context.ledger.entries(context.stream, since)]
        entries = [
            entry for entry in entries if entry.sequence <= to and not has_nothing_to_judge(entry)
        ]
        self.evidence_ranges: list[EvidenceRange] = []
        if entries:
            before = context.ledger.ledger_at(context.stream, since)
            self.evidence_ranges = evidence_ranges(
                before, ledger, entries, context.ledger.active_files(head)
            )
        self.judgements: list[Judgement] = []

    def run(self) -> CheckResult:
        """Steps 2 to 4."""
        began, done = self.context.clock.now_seconds(), self.result
        total = sum(file.rows for place in self.evidence_ranges for file in place.new_files)
        for place in self.evidence_ranges:
            self._judge_range(place)
            self.context.progress(done.records, max(total, done.records))
        crash_point("check-judged")
        for suite in (self.context.suites.ledger, self.context.suites.state):
            self.judgements += self.context.checker.check_evidence(suite, done.evidence)
        self._commit(self.context.clock.now_seconds() - began)
        return done

    def _judge_range(self, evidence_range: EvidenceRange) -> None:
        """Step 2."""
        means = self.context
        gathering = EvidenceGatherer(
            evidence_range,
            stream=means.stream,
            judged_sequence=self.result.judged_after,
            ledger=means.ledger,
            state=means.open_state(),
            records=means.records,
            record_scanner=means.record_scanner,
            table_spec=means.table_spec,
        )
        evidence = list(gathering.evidence())
        seen = {one.promise for one in evidence}
        ensure(
            seen == gathering.promises(),
            "every promise is looked at",
            place=str(evidence_range.partition),
        )
        if evidence_range.rewritten_files:
            told = f"its records were not folded: {evidence_range.rewritten_files[0].path} was rewritten by somebody else (OPTIMIZE)"
            self.result.notes.append(f"{evidence_range.partition}: {told}")
        self.result.evidence += evidence
        self.result.records += gathering.files.new_rows
        files, suite = (
            (*evidence_range.new_files, *evidence_range.rewritten_files),
            means.suites.records,
        )
        if files and suite.expectations:
            self.judgements += means.checker.check_records(
                suite, evidence_range.partition, files, evidence_range.first_new_offsets
            )

    def _commit(self, took_seconds: float) -> None:
        """Step 4."""
        done, to = self.result, self.result.judged_until
        scopes = [_check_scope(place) for place in self.evidence_ranges]
        entry = Entry(
            kind="verdict",
            attempt=self.context.new_attempt(),
            product_version=__version__,
            verdict=verdict_by_partition(scopes, self.judgements),
            judged_after=done.judged_after,
            judged_until=to,
            failed_ranges=failed_ranges(scopes, self.judgements, to),
            findings=tuple(check_findings(self.judgements, done.evidence, to)),
            reason=f"{done.records} records, {len(done.evidence)} promises, {done.expectations} expectations",
            peak_memory_bytes=self.context.peak_memory_bytes(),
            took_seconds=max(0.0, took_seconds),
        )
        after, made = commit(self.context.ledger, self.context.clock, self.head, entry)
        done.verdict, done.findings = dict(made.verdict), list(made.findings)
        done.sequence, done.ledger = made.sequence, after.ledger


def _check_scope(evidence_range: EvidenceRange) -> CheckScope:
    was, now = evidence_range.previous_account, evidence_range.account
    start = min(evidence_range.first_new_offsets.values(), default=was.frontier if was else 0)
    return CheckScope(
        evidence_range.partition,
        now.epoch,
        start,
        max(now.frontier, start),
        evidence_range.new_files,
    )


class AcceptedFailures(Struct):
    """What a person accepted, or would, and the ledger after it (a dry run: as it is)."""

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
    """A person's word that what failed, judged up to entry `sequence`, is right as it is."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(
            f"{stream}: it was never run, so there is nothing to accept",
            next=f"seriatim run {stream}",
        )
    refuse_if_nothing_failed(head.ledger, sequence)
    accepted = [one for one in head.ledger.failed_ranges if one.judged_until <= sequence]
    if dry_run:
        return AcceptedFailures(accepted, head.ledger)
    entry = Entry(
        kind="accept",
        attempt=attempt,
        product_version=__version__,
        judged_until=sequence,
        reason=reason,
    )
    return AcceptedFailures(accepted, commit(store, clock, head, entry)[0].ledger)


def refuse_if_nothing_failed(ledger: Ledger, sequence: int) -> None:
    """There must be something to accept."""
    if any(one.judged_until <= sequence for one in ledger.failed_ranges):
        return
    if not ledger.failed_ranges:
        raise ConfigError(
            f"{ledger.stream}: nothing to accept: no check failed, the circuit is closed",
            next=f"`seriatim status {ledger.stream}` shows how it is",
        )
    least = min(one.judged_until for one in ledger.failed_ranges)
    raise ConfigError(
        f"{ledger.stream}: nothing that failed was judged up to entry {sequence}",
        failed="\n".join(describe_failed_range(one) for one in ledger.failed_ranges[:10]),
        next=f'seriatim accept {ledger.stream} --sequence {least} --because "…"',
    )
