"""Accept: a person's decision that a topic made again begins a new life, or that a retired one goes on.

The sessions of the old life end: the accept entry itself carries records that take their rows back, at the
old frontier (an offset that the old life never used) and under the old topic id. So both lives are in the
records, told apart by topic id, and folding the records still gives the state. Killed anywhere, run again
is right: nothing counts before the one commit.

Next room: core/ledger.py says what an accept requires; steps/restored.py is for a ledger put back by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.core.code import refuse_code
from seriatim.core.crash import crash_point
from seriatim.core.errors import ConfigError, FencedError, broken
from seriatim.core.integrity import NEXT, Mark, shortened
from seriatim.core.ledger import LIFTED, Account, Change, Entry, File, Ledger
from seriatim.core.machine import Runner
from seriatim.core.offsets import Partition
from seriatim.core.session import Ended, Session
from seriatim.core.slice import Bounds, judge
from seriatim.core.stream import Stream
from seriatim.ports import Clock, Head, LedgerStore, Log, RecordStore, StateStore, UnfitRecords
from seriatim.steps.commit import TRIES_MAX, commit, read_head
from seriatim.steps.split import Outputs
from seriatim.steps.sweep import sweep_dead
from seriatim.steps.task import stem_prefix

RECORDS_PER_WRITE = 5_000
OFFSETS_NAMED_MAX = 20


class Means(Struct, frozen=True, kw_only=True):
    """What a decision is made with."""

    stream: Stream
    runner: Runner
    log: Log
    ledger: LedgerStore
    records: RecordStore
    state: StateStore
    clock: Clock
    new_attempt: Callable[[], str]


class Decided(Struct, kw_only=True):
    """What a decision does to one partition."""

    partition: Partition
    old_id: str
    """Empty: the partition was never seen before."""
    new_id: str
    frontier: int
    """Before."""
    starts: int
    """Where it goes on."""
    sessions: int = 0
    """That end."""
    records: int = 0
    """That take their rows back."""
    unread: int = 0
    """Messages of the old life that nobody read."""


class Decision(Struct, kw_only=True):
    """What was decided, or would be."""

    topic: str
    new_life: bool
    reason: str
    partitions: list[Decided] = field(default_factory=list)
    sequence: int = -1
    """The entry that says so; -1: none was made."""


def accept(means: Means, name: str, reason: str, *, dry_run: bool = False) -> Decision:
    """Accept a topic (or a retired partition, `topic/number`) as it is in Kafka now."""
    for left in reversed(range(TRIES_MAX)):
        head = known_head(means.ledger, means.stream.name)
        runner = means.runner
        refuse_code(head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape)
        changes, new_life = _changes(means, head.ledger, name)
        decision = Decision(topic=changes[0].partition.topic, new_life=new_life, reason=reason)
        if dry_run:
            _look(means, head.ledger, changes, decision)
            return decision
        try:
            return _commit(means, head, changes, decision)
        except FencedError:
            if not left:
                raise
        except OSError:  # whoever was faster has swept our files; if nobody was, it is the disk
            if known_head(means.ledger, means.stream.name).ledger.sequence == head.ledger.sequence:
                raise
    return broken("an accept ends by a commit or an error")


def known_head(store: LedgerStore, stream: str) -> Head:
    """The ledger. Without one there is nothing to decide."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run, so there is nothing to decide", next=f"seriatim run {stream}")
    return head


def chosen(ledger: Ledger, name: str) -> tuple[str, list[Partition]]:
    """The topic that a person names, as `topic` or `topic/number`, and the known partitions that are meant."""
    one = Partition.parse(name) if "/" in name else None
    topic = one.topic if one else name
    known = [partition for partition in ledger.known() if partition.topic == topic]
    return topic, [partition for partition in known if one in (None, partition)]


def refuse_unknown(ledger: Ledger, name: str) -> ConfigError:
    """Nothing of that name was ever read."""
    topics = sorted({partition.topic for partition in ledger.known()})
    return ConfigError(
        f"{ledger.stream}: {name!r} was never read, so there is nothing to decide",
        known=", ".join(topics[:20]) + (f" and {len(topics) - 20} more" if len(topics) > 20 else ""),
        next=f"name a topic, or a partition as TOPIC/NUMBER; `seriatim status {ledger.stream}` lists them",
    )


def refuse_held(ledger: Ledger, partitions: list[Partition]) -> None:
    """A repair works there: one thing at a time."""
    for partition in partitions:
        account = ledger.account(partition)
        if account is not None and account.hold is not None:
            raise ConfigError(
                f"{ledger.stream}: {partition} is held by repair {account.hold}",
                next=f"let the repair end, then decide; `seriatim status {ledger.stream}` shows holds",
            )


def _changes(means: Means, ledger: Ledger, name: str) -> tuple[list[Change], bool]:
    """What accepting does, files aside; and whether a new life begins."""
    topic, partitions = chosen(ledger, name)
    if not partitions:
        raise refuse_unknown(ledger, name)
    bounds = {p: seen for p, seen in means.log.bounds(means.stream.topics).items() if p.topic == topic}
    if not bounds:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} is not in Kafka, or matched no more: there is no life to accept",
            next=f"check `topics` in the stream file and the broker; if it is over for good:\n"
            f'seriatim retire {ledger.stream} {topic} --because "…"',
        )
    new_id = next(iter(bounds.values())).topic_id
    refuse_held(ledger, partitions)
    if all(ledger.partitions[str(partition)].topic_id == new_id for partition in partitions):
        return _as_it_is(ledger, name, partitions, bounds), False
    if name != topic:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} was made again: its new life is that of all its partitions",
            next=f'seriatim accept {ledger.stream} {topic} --because "…"',
        )
    every = sorted({*partitions, *bounds})
    return [_new_life(each, ledger.account(each), bounds.get(each), new_id) for each in every], True


def _as_it_is(ledger: Ledger, name: str, partitions: list[Partition], bounds: dict[Partition, Bounds]) -> list[Change]:
    """The topic that the ledger knows is there: what is retired, or halted by what is no longer so, goes on."""

    def waits(partition: Partition, account: Account) -> bool:
        seen = bounds.get(partition)
        mistaken = account.halt is not None and account.halt.finding in LIFTED
        return account.retired or (mistaken and seen is not None and judge(partition, account, seen) is None)

    accounts = {partition: ledger.partitions[str(partition)] for partition in partitions}
    changes = [
        Change(
            partition=partition,
            epoch=account.epoch,
            frontier=account.frontier,
            until=account.frontier,
            topic_id=account.topic_id,
            born=account.born,
            halt=account.halt,
            log_end=account.log_end,
        )
        for partition, account in accounts.items()
        if waits(partition, account)
    ]
    if not changes:
        raise _nothing(ledger.stream, name, accounts)
    return changes


def _nothing(stream: str, name: str, accounts: dict[Partition, Account]) -> ConfigError:
    """Neither made again nor retired. What waits there waits for something else."""
    halts = {partition: account.halt for partition, account in accounts.items() if account.halt is not None}
    if not halts:
        return ConfigError(
            f"{stream}: nothing to accept: {name} is the topic that the ledger knows, and it is being read",
            next=f"`seriatim status {stream}` shows what waits",
        )
    partition, halt = next(iter(halts.items()))
    waits = "\n".join(f"{p} waits at offset {h.offset}: {h.finding}, {h.cause}" for p, h in list(halts.items())[:10])
    return ConfigError(
        f"{stream}: {name} was not made again; accept is not for what it waits for",
        waits=waits,
        next=NEXT[halt.finding].format(stream=stream, place=partition, topic=partition.topic),
    )


def _new_life(partition: Partition, account: Account | None, seen: Bounds | None, new_id: str) -> Change:
    """A partition of a topic that was made again. One that the new life lacks waits at 0 until it comes."""
    start = seen.log_start if seen else 0
    begins = Change(partition=partition, epoch=0, frontier=start, until=start, topic_id=new_id, born=start)
    marks = []
    if account is not None:
        begins = replace(begins, epoch=account.epoch, frontier=account.frontier, halt=account.halt, state=())
        if account.log_end > account.frontier:
            life, cause = account.topic_id, "the topic was made again before these were read"
            marks.append(
                Mark(finding="re-created", offset=account.frontier, until=account.log_end, cause=cause, topic_id=life)
            )
    if start > 0:
        cause = f"gone from topic id {new_id} before it was accepted"
        marks.append(Mark(finding="expired", offset=0, until=start, cause=cause))
    return replace(begins, marks=tuple(marks))


def _look(means: Means, ledger: Ledger, changes: list[Change], decision: Decision) -> None:
    """What the decision would do, counted, with nothing written."""
    for change in changes:
        account = ledger.account(change.partition)
        one = _decided(change, account)
        decision.partitions.append(one)
        if decision.new_life and account is not None:
            for name, session in means.state.each(account.state):
                one.sessions += 1
                one.records += len(_taken_back(means.runner, change.partition, name, session))


def _decided(change: Change, account: Account | None) -> Decided:
    """A change, for a person."""
    ends = account is not None and account.topic_id != change.topic_id
    return Decided(
        partition=change.partition,
        old_id=account.topic_id if account else "",
        new_id=change.topic_id,
        frontier=account.frontier if account else 0,
        starts=change.until,
        unread=max(0, account.log_end - account.frontier) if account is not None and ends else 0,
    )


def _commit(means: Means, head: Head, changes: list[Change], decision: Decision) -> Decision:
    """Write the records that end the old life, then commit. Files of earlier attempts are dead then."""
    attempt = means.new_attempt()
    try:
        made = [_written(means, head.ledger, change, attempt, decision) for change in changes]
        entry = decision_entry("accept", attempt, made, decision.reason)
        after, done = commit(means.ledger, means.clock, head, entry)
    except (FencedError, ConfigError):
        for change in changes:
            stem = f"{stem_prefix(change.epoch, change.frontier)}{attempt}"
            means.records.sweep(change.partition, stem, set())
        raise
    sweep_dead(means.ledger, means.records, after)
    crash_point("swept")
    decision.sequence = done.sequence
    return decision


def _written(means: Means, ledger: Ledger, change: Change, attempt: str, decision: Decision) -> Change:
    """A change, with the records that take back what its sessions gave."""
    account = ledger.account(change.partition)
    one = _decided(change, account)
    decision.partitions.append(one)
    if not decision.new_life or account is None:
        return change
    ending = _Ending(means, change.partition, account, f"{stem_prefix(account.epoch, account.frontier)}{attempt}")
    marks = list(change.marks)
    for name, session in means.state.each(account.state):
        ending.add(name, session)
        if session.waiting:
            marks.append(_never_came_to_count(name, session, account.topic_id))
    records, others = ending.close()
    crash_point("record-file-written")
    one.sessions, one.records = ending.sessions, ending.records
    return replace(change, records=records, others=others, marks=tuple(marks))


def _never_came_to_count(name: str, session: Session, topic_id: str) -> Mark:
    """Messages that wait in a window when their topic's life ends: no later one will release them."""
    offsets = sorted(held.offset for held in session.waiting)
    listed = ", ".join(map(str, offsets[:OFFSETS_NAMED_MAX])) + (", …" if len(offsets) > OFFSETS_NAMED_MAX else "")
    cause = f"{len(offsets)} messages waited in the window when the topic's life ended: offsets {listed}"
    begin, until = offsets[0], offsets[-1] + 1
    return Mark(finding="sequence gap", offset=begin, until=until, session=name, cause=cause, topic_id=topic_id)


def decision_entry(kind: Literal["accept", "retire"], attempt: str, changes: Sequence[Change], reason: str) -> Entry:
    """A person's decision as an entry."""
    return Entry(kind=kind, attempt=attempt, product=__version__, changes=tuple(changes), reason=reason)


class _Ending:
    """The records that end the sessions of a partition: all at its frontier, counted through."""

    def __init__(self, means: Means, partition: Partition, account: Account, stem: str) -> None:
        self.runner, self.partition, self.offset = means.runner, partition, account.frontier
        self.writer = Outputs(means.records, partition, account.topic_id, stem, means.runner.others)
        self.sessions = self.records = 0
        self._waiting = Ended()

    def add(self, name: str, session: Session) -> None:
        """End one session."""
        self.sessions += 1
        rows = _taken_back(self.runner, self.partition, name, session)
        for begin in range(0, len(rows), RECORDS_PER_WRITE):
            part = rows[begin : begin + RECORDS_PER_WRITE]
            self._waiting.add(name, session, self.records, part)
            self.records += len(part)
            if len(self._waiting.rows) >= RECORDS_PER_WRITE:
                self._write()

    def _write(self) -> None:
        try:
            self.writer.end(self.offset, self._waiting)
        except UnfitRecords as unfit:
            raise _cannot_end(
                self.runner, self.partition, self._waiting.sessions[unfit.rows[0]], "its records do not fit"
            ) from None
        self._waiting = Ended()

    def close(self) -> tuple[tuple[File, ...], dict[str, tuple[File, ...]]]:
        """Finish the files; none where there was nothing to take back."""
        if self._waiting.rows:
            self._write()
        return self.writer.close()


def _taken_back(runner: Runner, partition: Partition, name: str, session: Session) -> Sequence[tuple[Any, ...]]:
    """The records that take back a session's output. One without a state gave none."""
    if session.saved is None:
        return ()
    try:
        return runner.end(runner.load(session.saved, session.version))
    except Exception as error:  # the user's own `end` or `upgrade`
        raise _cannot_end(runner, partition, name, f"{type(error).__name__}: {error}") from error


def _cannot_end(runner: Runner, partition: Partition, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{partition}: the machine {runner.name} cannot end session {shortened(name, 100)!r}: {shortened(why)}",
        next="fix the machine's `end` (or `upgrade`), then accept again; nothing was changed",
    )
