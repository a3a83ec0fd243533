"""Fold: slices from Kafka, through the machine, into one commit each, until caught up.

One slice, step by step, and what a crash after each leaves:

1. read the ledger and the witness; refuse code that would misread the state,
   and an open circuit where the stream says so                                nothing
2. discover topics; compare ids, log start and log end with the ledger         nothing
3. start reading from the frontier                                             a scratch directory
4. per partition, in a task: order proven, decoded, folded, files written      orphans
5. every planned range covered exactly; topics looked at again                 orphans
6. write the manifest                                                          an orphan
7. commit, compare-and-set                                                     the slice is done
8. witness; orphans swept; the tables gaps and quarantine                      they catch up next time

Next room: steps/task.py is step 4; steps/commit.py is 6 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.core.code import refuse_code
from seriatim.core.crash import crash_point
from seriatim.core.errors import (
    BrokenPromiseError,
    FencedError,
    IntegrityError,
    PlatformError,
    broken,
    ensure,
)
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Account, Entry, Halt, Ledger
from seriatim.core.machine import Runner
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Plan, Ranges, cut, to_read, within_slice
from seriatim.core.stream import Stream
from seriatim.core.verdict import refuse_open
from seriatim.ports import (
    Clock,
    DerivedStore,
    Explain,
    Head,
    Joiner,
    LedgerStore,
    Log,
    Reader,
    RecordStore,
    Requests,
    Source,
    SourceFailed,
    StateStore,
    Task,
    UnreadableMessage,
    Wish,
)
from seriatim.steps.ask import keep_asking
from seriatim.steps.changes import birth, change_of, covers, found, nothing_came, stopped
from seriatim.steps.commit import TRIES_MAX, catch_up_witness, commit, read_head, start
from seriatim.steps.derive import keep_up
from seriatim.steps.moved import Moved, moved
from seriatim.steps.plan import discover
from seriatim.steps.sweep import sweep_dead
from seriatim.steps.task import Result, Work, stem_prefix
from seriatim.steps.tries import fold_works
from seriatim.steps.wish import Wishes

SMALL_BYTES = 2048
Until = Mapping[Partition, int]
Progress = Callable[[int, int], None]


class World(Struct, frozen=True, kw_only=True):
    """Everything outside that a fold touches."""

    log: Log
    reader: Reader
    explain: Explain
    ledger: LedgerStore
    records: RecordStore
    state: Callable[[], StateStore]
    """Made anew for each look: it keeps files open."""
    derived: DerivedStore
    joiner: Joiner
    clock: Clock
    task: Callable[[dict[Partition, Work]], Task]
    """A task for these works, to be run where the messages are."""
    new_attempt: Callable[[], str]
    requests: Requests | None = None
    """Where producers are asked for snapshots, if the stream wants that."""


class Outcome(Struct, kw_only=True):
    """What a run did."""

    messages: int = 0
    records: int = 0
    slices: int = 0
    headless: int = 0
    sequence: int = -1
    findings: list[Finding] = field(default_factory=list)
    """New in this run."""
    waiting: list[tuple[Partition, Halt]] = field(default_factory=list)
    """Halted since earlier, told then."""
    quarantined: int = 0
    """Sessions in quarantine at the end."""
    foreign: int = -1
    """The entry that told of data others wrote to the records table, if that is not settled."""
    matched: int = 0
    """Known partitions that are there."""
    gone: list[Partition] = field(default_factory=list)
    """Known partitions that Kafka no longer has, or that match no more."""
    peak_memory_bytes: int = 0
    behind: str = ""
    """Why the derived tables are behind the ledger, for a person; empty: they are not."""
    unasked: str = ""
    """Why producers were not asked for the snapshots that sessions need; empty: they were, or need not be."""


def _silent(_done: int, _total: int) -> None:
    """Nobody watches."""


class Folding:
    """One run over one stream."""

    def __init__(
        self, stream: Stream, runner: Runner, world: World, *, run: str = "", progress: Progress | None = None
    ) -> None:
        self.stream, self.runner, self.world, self.run_id = stream, runner, world, run
        self.progress = progress or _silent
        self.wishes = Wishes(world.log)
        self.outcome = Outcome()
        self.head = Head(Ledger(stream=stream.name))
        self.total = self.messages_max = 0
        self.begin_again = False
        """A partition halted or changed in mid-run: reading begins again without it."""

    def run(self, messages_max: int, until: Until | None = None) -> Outcome:
        """Fold until caught up with the log ends of now, or up to `until`."""
        self.messages_max = messages_max
        self._open()
        plan = self._discover()
        self._note_waiting(plan)
        while ranges := to_read(plan, until, self.stream.name):
            self.total = self.outcome.messages + sum(map(len, ranges.values()))
            try:
                self._read(ranges, messages_max, bounded=until is not None)
            except SourceFailed as failure:
                plan = self._look_again(failure)
                continue
            except FencedError:
                if self._is_repaired(ranges):
                    plan = self._discover()
                    continue
                self._fenced(ranges)
                break
            if not self.begin_again:
                break
            plan = self._discover()
        if self.outcome.slices:
            sweep_dead(self.world.ledger, self.world.records, self.head)
        self.outcome.behind = keep_up(self.world.ledger, self.world.derived, self.head.ledger)
        self.outcome.unasked = keep_asking(self.world.ledger, self.world.requests, self.head.ledger)
        self.outcome.sequence = self.head.ledger.sequence
        self.outcome.gone = plan.gone
        self.outcome.matched = len(self.head.ledger.partitions) - len(plan.gone)
        self.outcome.foreign = self.head.ledger.foreign
        self.outcome.quarantined = sum(account.quarantined for account in self.head.ledger.partitions.values())
        return self.outcome

    def _open(self) -> None:
        """Step 1. A stream without a ledger gets one: entry 0 names the partitions found."""
        stream, ledger = self.stream.name, self.world.ledger
        head = read_head(ledger, stream)
        crash_point("ledger-read")
        if head is None:
            plan = discover(self.stream, self.world.log, Ledger(stream=stream))
            births = tuple(birth(partition, account, plan) for partition, account in plan.born.items())
            head = start(ledger, self.world.clock, stream, self.world.new_attempt(), births)
            crash_point("table-created")
        runner = self.runner
        refuse_code(head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape)
        refuse_open(head.ledger, self.stream.on_check_failure)
        self.head = head
        catch_up_witness(ledger, head)

    def _discover(self) -> Plan:
        """Step 2. What discovery finds is an entry of its own, so that it is found and told once."""
        for _ in range(TRIES_MAX):
            plan = discover(self.stream, self.world.log, self.head.ledger)
            changes = tuple(found(plan, self.head.ledger))
            try:
                if changes or self.head.foreign:
                    self._commit(Entry(kind="slice", attempt=self.world.new_attempt(), changes=changes), plan.findings)
            except FencedError:
                self.head = self._head()
                continue
            crash_point("plan-made")
            return plan
        raise PlatformError(f"{self.stream.name}: other runs keep moving the ledger", next="run again")

    def _look_again(self, failure: SourceFailed) -> Plan:
        """Reading broke. What discovery can confirm halts its partition; otherwise it is platform trouble."""
        before, self.head = self.head.ledger.partitions, self._head()
        plan = self._discover()
        if plan.findings or plan.skipped or self.head.ledger.partitions != before:
            return plan
        try:
            if isinstance(failure, UnreadableMessage) and self._stop_before(plan):
                return self._discover()
        except SourceFailed as again:
            failure = again
        raise PlatformError(
            f"{self.stream.name}: reading from Kafka broke",
            cause=str(failure)[:600],
            next="check the broker and Spark, then run again: it goes on from the last commit",
        )

    def _stop_before(self, plan: Plan) -> bool:
        """Fold up to messages that cannot be read, then halt there, or pass over them. Whether there are any."""
        ranges = within_slice(plan.ranges, self.messages_max)
        stops = self.world.log.unreadable(ranges)
        for piece in cut({p: ranges[p].until(offset) for p, (offset, _) in stops.items()}, self.messages_max):
            if not self._slice(piece, self.world.reader.exactly(piece, self._wish(piece))):
                break
        changes, findings = stopped(stops, self.head.ledger, self.stream.on_poison)
        if changes:
            self._commit(Entry(kind="slice", attempt=self.world.new_attempt(), changes=changes), findings)
        return bool(stops)

    def _head(self) -> Head:
        return read_head(self.world.ledger, self.stream.name) or broken("the ledger vanished in mid-run")

    def _note_waiting(self, plan: Plan) -> None:
        for partition in plan.waiting:
            account = self.head.ledger.account(partition)
            if account is not None and account.halt is not None:
                self.outcome.waiting.append((partition, account.halt))

    def _read(self, ranges: Ranges, messages_max: int, *, bounded: bool) -> None:
        """Step 3: AvailableNow from the frontier; exact ranges, cut by us, where an end is given."""
        self.begin_again = False
        reader = self.world.reader
        if not bounded:
            starts = {partition: whole.start for partition, whole in ranges.items()}
            return reader.follow(starts, messages_max, self._slice, self._wish(ranges))
        for piece in cut(ranges, messages_max):
            if not self._slice(piece, reader.exactly(piece, self._wish(piece))):
                return None
        return None

    def _wish(self, ranges: Ranges) -> Wish:
        return self.wishes.of(self.head.ledger, ranges, look=True)

    def _slice(self, ranges: Ranges, source: Source) -> bool:
        """Steps 4 to 8 for one slice. Whether reading may go on."""
        ranges = {partition: whole for partition, whole in ranges.items() if len(whole)}
        if not ranges:
            return True
        try:
            self._fold_and_commit(ranges, source)
        except (PlatformError, BrokenPromiseError, IntegrityError) as error:
            if self._overtaken(ranges):  # whoever was first has swept our files: that is all it was
                raise FencedError(error.message) from error
            raise
        return not self.begin_again

    def _fold_and_commit(self, ranges: Ranges, source: Source) -> None:
        attempt, began = self.world.new_attempt(), self.world.clock.now_seconds()
        results = self._fold(ranges, source, attempt)
        crash_point("slice-folded")
        entry, findings = self._entry(ranges, results, attempt)
        if entry.changes:
            took = max(0.0, self.world.clock.now_seconds() - began)
            done = self._commit(replace(entry, took_seconds=took), findings)
            self._sweep(done)
            if self.runner.others:  # a long run's further tables follow it slice by slice
                keep_up(self.world.ledger, self.world.derived, self.head.ledger)
            self._count(done)
            self.begin_again |= len(done.changes) < len(entry.changes)  # a repair holds some of them by now

    def _is_repaired(self, ranges: Ranges) -> bool:
        """Whether a repair has come between: its partitions wait, or went on in a new epoch; the others go on."""
        before, self.head = [self._account(p) for p in ranges], self._head()
        now = [self._account(p) for p in ranges]
        return [(one.epoch, one.hold) for one in before] != [(one.epoch, one.hold) for one in now]

    def _overtaken(self, ranges: Ranges) -> bool:
        """Whether another run moved the frontier of a partition of this slice."""
        ledger = self._head().ledger
        accounts = {partition: ledger.account(partition) for partition in ranges}
        return any(account and account.frontier > ranges[p].start for p, account in accounts.items())

    def _fold(self, ranges: Ranges, source: Source, attempt: str) -> dict[Partition, Result]:
        """Step 4."""
        works = {partition: self._work(partition, whole, attempt) for partition, whole in ranges.items()}
        small = 0 < self.wishes.of(self.head.ledger, ranges).message_bytes <= SMALL_BYTES
        world = self.world
        return fold_works(self.stream.name, works, source, world.reader, world.task, self._moved, small=small)

    def _moved(self, works: dict[Partition, Work], results: dict[Partition, Result]) -> Moved:
        state, has_snapshots = self.world.state(), self.runner.has_snapshots
        return moved(self.head.ledger, works, results, state, has_snapshots=has_snapshots)

    def _work(self, partition: Partition, whole: OffsetRange, attempt: str) -> Work:
        account = self._account(partition)
        if account.frontier != whole.start:
            raise FencedError(
                f"{self.stream.name}: another run moved the frontier while this one was folding",
                found=f"{partition} is at offset {account.frontier}, not {whole.start}",
                next="run again to go on from where the other one is",
            )
        return Work(
            partition=partition,
            start=whole.start,
            end=whole.end,
            epoch=account.epoch,
            topic_id=account.topic_id,
            state=account.state,
            time=account.time,
            headless_since=account.headless_since,
            attempt=attempt,
        )

    def _account(self, partition: Partition) -> Account:
        return self.head.ledger.account(partition) or broken("a partition has an account before it is read")

    def _entry(self, ranges: Ranges, results: dict[Partition, Result], attempt: str) -> tuple[Entry, list[Finding]]:
        """Step 5: all ranges accounted for, topics looked at again. A changed topic is not committed."""
        bounds = self.world.log.bounds(self.stream.topics)
        changes, findings, peak = [], [], 0
        for partition, whole in sorted(ranges.items()):
            account, seen = self._account(partition), bounds.get(partition)
            if seen is None or seen.topic_id != account.topic_id:
                self.begin_again = True
                continue
            result = results.get(partition) or nothing_came(
                partition, account, whole, self.world.explain, self.stream.tier
            )
            ensure(covers(result, whole), "a task accounts for its range", partition=str(partition))
            changes.append(change_of(partition, account, result, seen.log_end))
            findings += result.findings
            peak = max(peak, result.peak_memory_bytes)
            self.begin_again |= result.halt is not None
        return Entry(kind="slice", attempt=attempt, changes=tuple(changes), peak_memory_bytes=peak), findings

    def _commit(self, entry: Entry, findings: list[Finding]) -> Entry:
        """Steps 6 to 8. Findings count as told with the entry that carries them. Returns it as committed."""
        entry = replace(
            entry,
            run=self.run_id,
            product=__version__,
            machine=self.runner.name,
            shape=self.runner.shape,
            state_version=self.runner.state_version,
            findings=tuple(findings),
        )
        self.head, done = commit(self.world.ledger, self.world.clock, self.head, entry)
        self.outcome.findings += done.findings
        return done

    def _sweep(self, entry: Entry) -> None:
        """Step 8: files of the same partition, epoch and start by other attempts are dead now."""
        for change in entry.changes:
            if change.until > change.frontier:
                named = {file.path for file in change.files()}
                self.world.records.sweep(change.partition, stem_prefix(change.epoch, change.frontier), named)
        crash_point("swept")

    def _count(self, entry: Entry) -> None:
        outcome = self.outcome
        for change in entry.changes:
            if change.certificate is not None:
                outcome.messages += change.certificate.counts.messages
                outcome.records += change.certificate.counts.records
                outcome.headless += change.certificate.counts.headless
        outcome.slices += 1
        outcome.peak_memory_bytes = max(outcome.peak_memory_bytes, entry.peak_memory_bytes)
        self.progress(outcome.messages, max(self.total, outcome.messages))

    def _fenced(self, ranges: Ranges) -> None:
        """Another run got there first. Fine, if it left nothing to do; else this run is refused."""
        self.head = self._head()
        for partition, wanted in ranges.items():
            account = self._account(partition)
            if account.halt is None and not account.retired and account.frontier < wanted.end:
                raise FencedError(
                    f"{self.stream.name}: another run moved the frontier while this one was folding",
                    found=f"{partition} is at offset {account.frontier}, {wanted.end - account.frontier} are left",
                    next="nothing of this slice was written; run again to go on from where the other one is",
                )
