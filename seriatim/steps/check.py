"""Check: gate 2. Every entry that was not judged yet is judged by suites, after the commit and beside the fold.

1. read the ledger: entries after the last judged one, and the files that are in the table now
2. per partition that they changed: gather evidence, judge its new records by the suite of records
3. judge the evidence by the suites of ledger and state
4. commit the verdict: good or bad per partition. What a repair replaced meanwhile is void, and judged anew

A check that breaks commits nothing: it is never a pass.

Next room: steps/gather.py reads; core/check.py decides; core/verdict.py says what a verdict does to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from seriatim import __version__
from seriatim.core.check import CheckBroken, Checker, Judgement, Scope, failures, findings, verdict
from seriatim.core.crash import crash_point
from seriatim.core.errors import ConfigError, FencedError, IntegrityError, broken, ensure
from seriatim.core.evidence import Evidence, Sight
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Entry, Ledger
from seriatim.core.suite import Suites
from seriatim.core.verdict import Failed, is_silent, shown
from seriatim.ports import Clock, Head, LedgerStore, RecordStore, StateStore, Unreadable
from seriatim.steps.commit import TRIES_MAX, commit, read_head
from seriatim.steps.gather import Gathering, Place, Table, places

Progress = Callable[[int, int], None]


class Means(Struct, frozen=True, kw_only=True):
    """What a check is made with."""

    stream: str
    suites: Suites
    ledger: LedgerStore
    state: Callable[[], StateStore]
    records: RecordStore
    sight: Sight
    checker: Checker
    table: Table | None
    """The stock machine; None: another one, whose records do not say how they fold."""
    clock: Clock
    new_attempt: Callable[[], str]
    peak_memory_bytes: Callable[[], int]
    progress: Progress = lambda _done, _total: None


class Checked(Struct, kw_only=True):
    """What was judged, and what came of it."""

    since: int
    to: int
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


def check(means: Means) -> Checked:
    """Judge every entry that was not judged yet."""
    for left in reversed(range(TRIES_MAX)):
        head = read_head(means.ledger, means.stream)
        if head is None:
            raise ConfigError(f"{means.stream}: it was never run", next=f"seriatim run {means.stream}")
        judging = Judging(means, head)
        if not judging.places:
            return judging.done
        try:
            return judging.run()
        except FencedError:
            if not left:
                raise
        except CheckBroken as trouble:
            raise trouble.error(means.stream) from None
        except Unreadable as trouble:
            if _moved(means, head):
                continue
            raise IntegrityError(
                f"{means.stream}: a record file cannot be read: {trouble}",
                next=f"`seriatim verify {means.stream}` says what differs; nothing was judged",
            ) from None
    return broken("a check ends by a verdict or an error")


def _moved(means: Means, head: Head) -> bool:
    """Whether the ledger went on: files that were in the table may be gone by right."""
    now = read_head(means.ledger, means.stream)
    return now is not None and now.ledger.sequence != head.ledger.sequence


class Judging:
    """One try."""

    def __init__(self, means: Means, head: Head) -> None:
        self.means, self.head = means, head
        ledger = head.ledger
        since, to = ledger.judged, ledger.sequence
        self.done = Checked(since=since, to=to, ledger=ledger, expectations=means.suites.count)
        entries = [manifest.entry for manifest in means.ledger.entries(means.stream, since)]
        entries = [entry for entry in entries if entry.sequence <= to and not is_silent(entry)]
        self.places: list[Place] = []
        if entries:
            before = means.ledger.at(means.stream, since)
            self.places = places(before, ledger, entries, means.ledger.active_files(head))
        self.judgements: list[Judgement] = []

    def run(self) -> Checked:
        """Steps 2 to 4."""
        began, done = self.means.clock.now_seconds(), self.done
        total = sum(file.rows for place in self.places for file in place.files)
        for place in self.places:
            self._judge(place)
            self.means.progress(done.records, max(total, done.records))
        crash_point("check-judged")
        for suite in (self.means.suites.ledger, self.means.suites.state):
            self.judgements += self.means.checker.evidence(suite, done.evidence)
        self._commit(self.means.clock.now_seconds() - began)
        return done

    def _judge(self, place: Place) -> None:
        """Step 2."""
        means = self.means
        gathering = Gathering(
            place,
            stream=means.stream,
            since=self.done.since,
            ledger=means.ledger,
            state=means.state(),
            records=means.records,
            sight=means.sight,
            table=means.table,
        )
        evidence = list(gathering.evidence())
        seen = {one.promise for one in evidence}
        ensure(seen == gathering.promises(), "every promise is looked at", place=str(place.partition))
        if place.rewritten:
            told = f"its records were not folded: {place.rewritten[0].path} was rewritten by somebody else (OPTIMIZE)"
            self.done.notes.append(f"{place.partition}: {told}")
        self.done.evidence += evidence
        self.done.records += gathering.files.rows
        files, suite = (*place.files, *place.rewritten), means.suites.records
        if files and suite.expectations:
            self.judgements += means.checker.records(suite, place.partition, files, place.since)

    def _commit(self, took_seconds: float) -> None:
        """Step 4."""
        done, to = self.done, self.done.to
        scopes = [_scope(place) for place in self.places]
        entry = Entry(
            kind="verdict",
            attempt=self.means.new_attempt(),
            product=__version__,
            verdict=verdict(scopes, self.judgements),
            since=done.since,
            judged=to,
            failed=failures(scopes, self.judgements, to),
            findings=tuple(findings(self.judgements, done.evidence, to)),
            reason=f"{done.records} records, {len(done.evidence)} promises, {done.expectations} expectations",
            peak_memory_bytes=self.means.peak_memory_bytes(),
            took_seconds=max(0.0, took_seconds),
        )
        after, made = commit(self.means.ledger, self.means.clock, self.head, entry)
        done.verdict, done.findings = dict(made.verdict), list(made.findings)
        done.sequence, done.ledger = made.sequence, after.ledger


def _scope(place: Place) -> Scope:
    was, now = place.was, place.now
    start = min(place.since.values(), default=was.frontier if was else 0)
    return Scope(place.partition, now.epoch, start, max(now.frontier, start), place.files)


class Accepted(Struct):
    """What a person accepted, or would, and the ledger after it (a dry run: as it is)."""

    accepted: list[Failed]
    ledger: Ledger


def accept_check(
    store: LedgerStore, clock: Clock, stream: str, attempt: str, sequence: int, reason: str, *, dry_run: bool = False
) -> Accepted:
    """A person's word that what failed, judged up to entry `sequence`, is right as it is."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run, so there is nothing to accept", next=f"seriatim run {stream}")
    refuse_nothing(head.ledger, sequence)
    accepted = [one for one in head.ledger.failed if one.judged <= sequence]
    if dry_run:
        return Accepted(accepted, head.ledger)
    entry = Entry(kind="accept", attempt=attempt, product=__version__, judged=sequence, reason=reason)
    return Accepted(accepted, commit(store, clock, head, entry)[0].ledger)


def refuse_nothing(ledger: Ledger, sequence: int) -> None:
    """There must be something to accept."""
    if any(one.judged <= sequence for one in ledger.failed):
        return
    if not ledger.failed:
        raise ConfigError(
            f"{ledger.stream}: nothing to accept: no check failed, the circuit is closed",
            next=f"`seriatim status {ledger.stream}` shows how it is",
        )
    least = min(one.judged for one in ledger.failed)
    raise ConfigError(
        f"{ledger.stream}: nothing that failed was judged up to entry {sequence}",
        failed="\n".join(shown(one) for one in ledger.failed[:10]),
        next=f'seriatim accept {ledger.stream} --sequence {least} --because "…"',
    )
