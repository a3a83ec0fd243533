"""Accept: a person's decision that a topic made again begins a new life, or that a retired one goes
on.

The sessions of the old life end: the accept entry itself carries records that take their rows back,
at the old frontier (an offset that the old life never used) and under the old topic id. So both
lives are in the records, told apart by topic id, and folding the records still gives the state.
Killed anywhere, run again is right: nothing counts before the one commit.

Next room: ledger/model.py says what an accept requires; operations/restore.py is for a ledger put
back by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import FINDING_ADVICE, GapMark, shorten
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.engine.record_writers import OutputWriters
from seriatim.engine.session import Session, SessionEndRecords
from seriatim.engine.task import stem_prefix
from seriatim.errors import ConfigError, FencedError, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, read_head
from seriatim.ledger.machine_version import refuse_incompatible_machine
from seriatim.ledger.model import FINDINGS_ENDED_BY_ACCEPT, Account, Change, Entry, File, Ledger
from seriatim.operations.slicing import Bounds, bounds_finding
from seriatim.operations.sweep import sweep_dead
from seriatim.ports import (
    Clock,
    LedgerHead,
    LedgerStore,
    Log,
    RecordStore,
    StateStore,
    UnfitRecordsError,
)
from seriatim.stream import Stream

RECORDS_PER_WRITE = 5_000
OFFSETS_NAMED_MAX = 20


class DecisionContext(Struct, frozen=True, kw_only=True):
    """What a decision is made with."""

    stream: Stream
    runner: Runner
    log: Log
    ledger: LedgerStore
    records: RecordStore
    state: StateStore
    clock: Clock
    new_attempt: Callable[[], str]


class PartitionDecision(Struct, kw_only=True):
    """What a decision does to one partition."""

    partition: Partition
    old_topic_id: str
    """Empty: the partition was never seen before."""
    new_topic_id: str
    frontier: int
    """Before."""
    resumes_at: int
    """Where it goes on."""
    ended_sessions: int = 0
    """That end."""
    end_records: int = 0
    """That take their rows back."""
    unread_messages: int = 0
    """Messages of the old life that nobody read."""


class TopicDecision(Struct, kw_only=True):
    """What was decided, or would be."""

    topic: str
    is_new_life: bool
    reason: str
    partitions: list[PartitionDecision] = field(default_factory=list)
    sequence: int = -1
    """The entry that says so; -1: none was made."""


def accept_topic(
    context: DecisionContext, name: str, reason: str, *, dry_run: bool = False
) -> TopicDecision:
    """Accept a topic (or a retired partition, `topic/number`) as it is in Kafka now."""
    for left in reversed(range(TRIES_MAX)):
        head = require_head(context.ledger, context.stream.name)
        runner = context.runner
        refuse_incompatible_machine(
            head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
        )
        changes, new_life = _plan_changes(context, head.ledger, name)
        decision = TopicDecision(
            topic=changes[0].partition.topic, is_new_life=new_life, reason=reason
        )
        if dry_run:
            _count_effects(context, head.ledger, changes, decision)
            return decision
        try:
            return _write_and_commit(context, head, changes, decision)
        except FencedError:
            if not left:
                raise
        except OSError:  # whoever was faster has swept our files; if nobody was, it is the disk
            if (
                require_head(context.ledger, context.stream.name).ledger.sequence
                == head.ledger.sequence
            ):
                raise
    return raise_broken_promise("an accept ends by a commit or an error")


def require_head(store: LedgerStore, stream: str) -> LedgerHead:
    """The ledger. Without one there is nothing to decide."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(
            f"{stream}: it was never run, so there is nothing to decide",
            next=f"seriatim run {stream}",
        )
    return head


def find_named_partitions(ledger: Ledger, name: str) -> tuple[str, list[Partition]]:
    """The topic that a person names, as `topic` or `topic/number`, and the known partitions that
    are meant.
    """
    one = Partition.parse(name) if "/" in name else None
    topic = one.topic if one else name
    known = [partition for partition in ledger.known_partitions() if partition.topic == topic]
    return topic, [partition for partition in known if one in (None, partition)]


def unknown_topic_error(ledger: Ledger, name: str) -> ConfigError:
    """Nothing of that name was ever read."""
    topics = sorted({partition.topic for partition in ledger.known_partitions()})
    return ConfigError(
        f"{ledger.stream}: {name!r} was never read, so there is nothing to decide",
        known=", ".join(topics[:20])
        + (f" and {len(topics) - 20} more" if len(topics) > 20 else ""),
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


def _plan_changes(context: DecisionContext, ledger: Ledger, name: str) -> tuple[list[Change], bool]:
    """What accepting does, files aside; and whether a new life begins."""
    topic, partitions = find_named_partitions(ledger, name)
    if not partitions:
        raise unknown_topic_error(ledger, name)
    bounds = {
        p: seen for p, seen in context.log.bounds(context.stream.topics).items() if p.topic == topic
    }
    if not bounds:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} is not in Kafka, or matched no more: there is no life to accept",
            next=f"check `topics` in the stream file and the broker; if it is over for good:\n"
            f'seriatim retire {ledger.stream} {topic} --because "…"',
        )
    new_id = next(iter(bounds.values())).topic_id
    refuse_held(ledger, partitions)
    if all(ledger.partitions[str(partition)].topic_id == new_id for partition in partitions):
        return _resume_changes(ledger, name, partitions, bounds), False
    if name != topic:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} was made again: its new life is that of all its partitions",
            next=f'seriatim accept {ledger.stream} {topic} --because "…"',
        )
    every = sorted({*partitions, *bounds})
    return [
        _new_life_change(each, ledger.account(each), bounds.get(each), new_id) for each in every
    ], True


def _resume_changes(
    ledger: Ledger, name: str, partitions: list[Partition], bounds: dict[Partition, Bounds]
) -> list[Change]:
    """The topic that the ledger knows is there: what is retired, or halted by what is no longer so,
    goes on.
    """

    def waits(partition: Partition, account: Account) -> bool:
        seen = bounds.get(partition)
        mistaken = account.halt is not None and account.halt.finding in FINDINGS_ENDED_BY_ACCEPT
        return account.retired or (
            mistaken and seen is not None and bounds_finding(partition, account, seen) is None
        )

    accounts = {partition: ledger.partitions[str(partition)] for partition in partitions}
    changes = [
        Change(
            partition=partition,
            epoch=account.epoch,
            frontier=account.frontier,
            until=account.frontier,
            topic_id=account.topic_id,
            initial_frontier=account.initial_frontier,
            halt=account.halt,
            log_end=account.log_end,
        )
        for partition, account in accounts.items()
        if waits(partition, account)
    ]
    if not changes:
        raise _nothing_to_accept_error(ledger.stream, name, accounts)
    return changes


def _nothing_to_accept_error(
    stream: str, name: str, accounts: dict[Partition, Account]
) -> ConfigError:
    """Neither made again nor retired. What waits there waits for something else."""
    halts = {
        partition: account.halt
        for partition, account in accounts.items()
        if account.halt is not None
    }
    if not halts:
        return ConfigError(
            f"{stream}: nothing to accept: {name} is the topic that the ledger knows, and it is being read",
            next=f"`seriatim status {stream}` shows what waits",
        )
    partition, halt = next(iter(halts.items()))
    waits = "\n".join(
        f"{p} waits at offset {h.offset}: {h.finding}, {h.cause}"
        for p, h in list(halts.items())[:10]
    )
    return ConfigError(
        f"{stream}: {name} was not made again; accept is not for what it waits for",
        waits=waits,
        next=FINDING_ADVICE[halt.finding].format(
            stream=stream, place=partition, topic=partition.topic
        ),
    )


def _new_life_change(
    partition: Partition, account: Account | None, bounds: Bounds | None, new_topic_id: str
) -> Change:
    """A partition of a topic that was made again. One that the new life lacks waits at 0 until it
    comes.
    """
    start = bounds.log_start if bounds else 0
    begins = Change(
        partition=partition,
        epoch=0,
        frontier=start,
        until=start,
        topic_id=new_topic_id,
        initial_frontier=start,
    )
    marks = []
    if account is not None:
        begins = replace(
            begins, epoch=account.epoch, frontier=account.frontier, halt=account.halt, state=()
        )
        if account.log_end > account.frontier:
            life, cause = account.topic_id, "the topic was made again before these were read"
            marks.append(
                GapMark(
                    finding="re-created",
                    offset=account.frontier,
                    until=account.log_end,
                    cause=cause,
                    topic_id=life,
                )
            )
    if start > 0:
        cause = f"gone from topic id {new_topic_id} before it was accepted"
        marks.append(GapMark(finding="expired", offset=0, until=start, cause=cause))
    return replace(begins, marks=tuple(marks))


def _count_effects(
    context: DecisionContext, ledger: Ledger, changes: list[Change], decision: TopicDecision
) -> None:
    """What the decision would do, counted, with nothing written."""
    for change in changes:
        account = ledger.account(change.partition)
        one = _partition_decision(change, account)
        decision.partitions.append(one)
        if decision.is_new_life and account is not None:
            for name, session in context.state.all_sessions(account.state):
                one.ended_sessions += 1
                one.end_records += len(
                    _end_records_of(context.runner, change.partition, name, session)
                )


def _partition_decision(change: Change, account: Account | None) -> PartitionDecision:
    """A change, for a person."""
    ends = account is not None and account.topic_id != change.topic_id
    return PartitionDecision(
        partition=change.partition,
        old_topic_id=account.topic_id if account else "",
        new_topic_id=change.topic_id,
        frontier=account.frontier if account else 0,
        resumes_at=change.until,
        unread_messages=max(0, account.log_end - account.frontier)
        if account is not None and ends
        else 0,
    )


def _write_and_commit(
    context: DecisionContext, head: LedgerHead, changes: list[Change], decision: TopicDecision
) -> TopicDecision:
    """Write the records that end the old life, then commit. Files of earlier attempts are dead
    then.
    """
    attempt = context.new_attempt()
    try:
        made = [
            _write_end_records(context, head.ledger, change, attempt, decision)
            for change in changes
        ]
        entry = decision_entry("accept", attempt, made, decision.reason)
        after, done = commit(context.ledger, context.clock, head, entry)
    except (FencedError, ConfigError):
        for change in changes:
            stem = f"{stem_prefix(change.epoch, change.frontier)}{attempt}"
            context.records.sweep(change.partition, stem, set())
        raise
    sweep_dead(context.ledger, context.records, after)
    crash_point("swept")
    decision.sequence = done.sequence
    return decision


def _write_end_records(
    context: DecisionContext, ledger: Ledger, change: Change, attempt: str, decision: TopicDecision
) -> Change:
    """A change, with the records that take back what its sessions gave."""
    account = ledger.account(change.partition)
    one = _partition_decision(change, account)
    decision.partitions.append(one)
    if not decision.is_new_life or account is None:
        return change
    ending = _EndRecordWriter(
        context,
        change.partition,
        account,
        f"{stem_prefix(account.epoch, account.frontier)}{attempt}",
    )
    marks = list(change.marks)
    for name, session in context.state.all_sessions(account.state):
        ending.add(name, session)
        if session.waiting_messages:
            marks.append(_mark_waiting_messages_lost(name, session, account.topic_id))
    records, others = ending.close()
    crash_point("record-file-written")
    one.ended_sessions, one.end_records = ending.sessions, ending.records
    return replace(change, records=records, other_records=others, marks=tuple(marks))


def _mark_waiting_messages_lost(name: str, session: Session, topic_id: str) -> GapMark:
    """Messages that wait in a window when their topic's life ends: no later one will release them."""
    offsets = sorted(held.offset for held in session.waiting_messages)
    listed = ", ".join(map(str, offsets[:OFFSETS_NAMED_MAX])) + (
        ", …" if len(offsets) > OFFSETS_NAMED_MAX else ""
    )
    cause = f"{len(offsets)} messages waited in the window when the topic's life ended: offsets {listed}"
    begin, until = offsets[0], offsets[-1] + 1
    return GapMark(
        finding="sequence gap",
        offset=begin,
        until=until,
        session=name,
        cause=cause,
        topic_id=topic_id,
    )


def decision_entry(
    kind: Literal["accept", "retire"], attempt: str, changes: Sequence[Change], reason: str
) -> Entry:
    """A person's decision as an entry."""
    return Entry(
        kind=kind,
        attempt=attempt,
        product_version=__version__,
        changes=tuple(changes),
        reason=reason,
    )


class _EndRecordWriter:
    """The records that end the sessions of a partition: all at its frontier, counted through."""

    def __init__(
        self, context: DecisionContext, partition: Partition, account: Account, stem: str
    ) -> None:
        self.runner, self.partition, self.offset = context.runner, partition, account.frontier
        self.writer = OutputWriters(
            context.records, partition, account.topic_id, stem, context.runner.other_columns
        )
        self.sessions = self.records = 0
        self._pending = SessionEndRecords()

    def add(self, name: str, session: Session) -> None:
        """End one session."""
        self.sessions += 1
        rows = _end_records_of(self.runner, self.partition, name, session)
        for begin in range(0, len(rows), RECORDS_PER_WRITE):
            part = rows[begin : begin + RECORDS_PER_WRITE]
            self._pending.add(name, session, self.records, part)
            self.records += len(part)
            if len(self._pending.rows) >= RECORDS_PER_WRITE:
                self._write_pending()

    def _write_pending(self) -> None:
        try:
            self.writer.write_end_records(self.offset, self._pending)
        except UnfitRecordsError as unfit:
            raise _cannot_end_error(
                self.runner,
                self.partition,
                self._pending.sessions[unfit.rows[0]],
                "its records do not fit",
            ) from None
        self._pending = SessionEndRecords()

    def close(self) -> tuple[tuple[File, ...], dict[str, tuple[File, ...]]]:
        """Finish the files; none where there was nothing to take back."""
        if self._pending.rows:
            self._write_pending()
        return self.writer.close()


def _end_records_of(
    runner: Runner, partition: Partition, name: str, session: Session
) -> Sequence[tuple[Any, ...]]:
    """The records that take back a session's output. One without a state gave none."""
    if session.state_bytes is None:
        return ()
    try:
        return runner.end(runner.load(session.state_bytes, session.state_version))
    except Exception as error:  # the user's own `end` or `upgrade`
        raise _cannot_end_error(
            runner, partition, name, f"{type(error).__name__}: {error}"
        ) from error


def _cannot_end_error(runner: Runner, partition: Partition, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{partition}: the machine {runner.name} cannot end session {shorten(name, 100)!r}: {shorten(reason)}",
        next="fix the machine's `end` (or `upgrade`), then accept again; nothing was changed",
    )
