"""A person's decisions about topics and about the ledger: accept, retire, restore.

**Accept**: a topic that was created again begins a new life, or a retired topic goes on. The
sessions of the old life end. The accept entry itself carries the records that take their rows
back, at the old frontier (an offset that the old life never used) and under the old topic id. So
both lives are in the records, told apart by their topic id, and folding the records still gives the
state. After a crash anywhere the command can be run again: nothing counts before its one commit.

**Retire**: a topic, or one partition of it, is over. Its state is kept and shown apart. Discovery
neither reads nor judges it any more, whatever Kafka has under that name, until an accept.

**Restore**: a restored, older ledger is meant, so that its witness follows it. Every command refuses
a witness that is ahead of its ledger: to go on would fold messages twice, or lose them. If there is
a ledger, the decision becomes an entry of it. If there is none, the witness is moved aside with the
reason in it, and the next run begins at entry 0.

Next: ledger/entries.py says what each requires; operations/plan.py leaves retired partitions out;
ledger/commit.py refuses a ledger that is behind its witness.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import Files, FilesByTable, UnfitRecordsError
from seriatim.engine.findings import FINDING_ADVICE, GapMark, list_some, shorten
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Bounds, Partition
from seriatim.engine.session import Row, Session, SessionEndRecords
from seriatim.engine.task import OutputWriters, stem_prefix
from seriatim.errors import ConfigError, FencedError, IntegrityError, raise_broken_promise
from seriatim.ledger.commit import TRIES_MAX, commit, read_head, require_head
from seriatim.ledger.entries import FINDINGS_ENDED_BY_ACCEPT, AcceptEntry, RetireEntry
from seriatim.ledger.manifests import REPORTED_NOTE, LedgerHead
from seriatim.ledger.model import (
    Account,
    Change,
    EntryMark,
    Ledger,
    refuse_incompatible_machine,
    unmoved_change,
)
from seriatim.operations.plan import bounds_finding
from seriatim.operations.repair_text import held_by_repair
from seriatim.operations.sweep import sweep_attempts, sweep_dead
from seriatim.ports import Clock, LedgerStore, Log, OpenStream

RECORDS_PER_WRITE = 5_000
OFFSETS_NAMED_MAX = 20
TOPICS_NAMED_MAX = 20
HALTS_NAMED_MAX = 10


class PartitionDecision(Struct, kw_only=True):
    """What a decision does to one partition."""

    partition: Partition
    old_topic_id: str
    """Empty if the ledger did not know the partition."""
    new_topic_id: str
    frontier: int
    """The frontier before the decision."""
    resumes_at: int
    """The offset at which reading goes on."""
    ended_sessions: int = 0
    """How many sessions end."""
    end_records: int = 0
    """How many records take the rows of these sessions back."""
    unread_messages: int = 0
    """Messages of the old life that were never read."""


class TopicDecision(Struct, kw_only=True):
    """What was decided; after a dry run, what would be decided."""

    topic: str
    is_new_life: bool
    reason: str
    partitions: list[PartitionDecision] = field(default_factory=list)
    sequence: int = -1
    """The entry of the decision; -1 if nothing was committed."""


def accept_topic(
    open_stream: OpenStream, name: str, reason: str, *, dry_run: bool = False
) -> TopicDecision:
    """Accept a topic (or a retired partition, `topic/number`) as it is in Kafka now.

    1. Read the ledger, and refuse a machine that would misread its state.
    2. Plan the change of every partition.
    3. Write the records that end the old life, and commit. If another process was faster, start
       again at step 1.
    """
    for tries_left in reversed(range(TRIES_MAX)):
        # 1. Read the ledger.
        head = require_head(open_stream.ledger, open_stream.stream.name)
        runner = open_stream.runner
        refuse_incompatible_machine(head.ledger, runner)
        # 2. Plan the changes.
        changes, is_new_life = _plan_changes(open_stream, head.ledger, name)
        decision = TopicDecision(
            topic=changes[0].partition.topic, is_new_life=is_new_life, reason=reason
        )
        if dry_run:
            for change in changes:
                _end_sessions(open_stream, head.ledger, change, decision)
            return decision
        # 3. Write and commit.
        try:
            return _write_and_commit(open_stream, head, changes, decision)
        except FencedError:
            if not tries_left:
                raise
        except OSError:
            # A process that was faster has swept our files. If the ledger did not move, nobody
            # was faster, and the error is the disk's.
            new_head = require_head(open_stream.ledger, open_stream.stream.name)
            if new_head.ledger.sequence == head.ledger.sequence:
                raise
    return raise_broken_promise("an accept ends by a commit or an error")


def find_named_partitions(ledger: Ledger, name: str) -> tuple[str, list[Partition]]:
    """The topic that a person names as `topic` or `topic/number`, and the partitions of the ledger
    that the name covers.
    """
    if "/" in name:
        named = Partition.parse(name)
        matching = [partition for partition in ledger.known_partitions() if partition == named]
        return named.topic, matching
    matching = [partition for partition in ledger.known_partitions() if partition.topic == name]
    return name, matching


def unknown_topic_error(ledger: Ledger, name: str) -> ConfigError:
    """The error for a name of which nothing was ever read. It lists the topics that were."""
    topics = sorted({partition.topic for partition in ledger.known_partitions()})
    return ConfigError(
        f"{ledger.stream}: {name!r} was never read, so there is nothing to decide",
        known=list_some(topics, TOPICS_NAMED_MAX),
        next=f"name a topic, or a partition as TOPIC/NUMBER; `seriatim status {ledger.stream}` lists them",
    )


def refuse_held(ledger: Ledger, partitions: list[Partition]) -> None:
    """Refuse partitions that a repair holds: the decision has to wait until the repair ends."""
    for partition in partitions:
        account = ledger.account(partition)
        if account is not None and account.hold is not None:
            raise ConfigError(
                f"{ledger.stream}: {partition} is {held_by_repair(account.hold)}",
                next=f"let the repair end, then decide; `seriatim status {ledger.stream}` shows holds",
            )


def _plan_changes(open_stream: OpenStream, ledger: Ledger, name: str) -> tuple[list[Change], bool]:
    """The changes of an accept, still without files; and whether a new life begins."""
    topic, partitions = find_named_partitions(ledger, name)
    if not partitions:
        raise unknown_topic_error(ledger, name)
    stream_bounds = open_stream.log.bounds(open_stream.stream.topics)
    topic_bounds = {
        partition: bounds for partition, bounds in stream_bounds.items() if partition.topic == topic
    }
    if not topic_bounds:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} is not in Kafka, or matched no more: there is no life to accept",
            next=f"check `topics` in the stream file and the broker; if it is over for good:\n"
            f'seriatim retire {ledger.stream} {topic} --because "…"',
        )
    # All partitions of a topic have the same id.
    new_topic_id = next(iter(topic_bounds.values())).topic_id
    refuse_held(ledger, partitions)
    known_topic_ids = {ledger.partitions[str(partition)].topic_id for partition in partitions}
    if known_topic_ids == {new_topic_id}:
        return _resume_changes(ledger, name, partitions, topic_bounds), False
    if name != topic:
        raise ConfigError(
            f"{ledger.stream}: topic {topic} was made again: its new life is that of all its partitions",
            next=f'seriatim accept {ledger.stream} {topic} --because "…"',
        )
    return _new_life_changes(ledger, partitions, topic_bounds, new_topic_id), True


def _new_life_changes(
    ledger: Ledger,
    partitions: list[Partition],
    topic_bounds: dict[Partition, Bounds],
    new_topic_id: str,
) -> list[Change]:
    """The changes for all partitions of a topic that was created again, the added ones included."""
    changes = []
    for partition in sorted({*partitions, *topic_bounds}):
        account = ledger.account(partition)
        change = _new_life_change(partition, account, topic_bounds.get(partition), new_topic_id)
        changes.append(change)
    return changes


def _resume_changes(
    ledger: Ledger, name: str, partitions: list[Partition], bounds: dict[Partition, Bounds]
) -> list[Change]:
    """Kafka has the topic that the ledger knows. Partitions go on that are retired, or halted for
    a cause that no longer exists. If there are none, the accept is refused.
    """
    accounts = {partition: ledger.partitions[str(partition)] for partition in partitions}
    changes = []
    for partition, account in accounts.items():
        if not _can_resume(partition, account, bounds.get(partition)):
            continue
        unmoved = unmoved_change(partition, account)
        changes.append(replace(unmoved, halt=account.halt, log_end=account.log_end))
    if not changes:
        raise _nothing_to_accept_error(ledger.stream, name, accounts)
    return changes


def _can_resume(partition: Partition, account: Account, bounds: Bounds | None) -> bool:
    """Whether an accept makes this partition of a known topic go on."""
    if account.retired:
        return True
    if account.halt is None or account.halt.finding not in FINDINGS_ENDED_BY_ACCEPT:
        return False
    # The halt was a mistake (a wrong cluster, say) if Kafka has what the ledger expects.
    return bounds is not None and bounds_finding(partition, account, bounds) is None


def _nothing_to_accept_error(
    stream: str, name: str, accounts: dict[Partition, Account]
) -> ConfigError:
    """The error for a topic that was neither created again nor retired. If partitions of it wait,
    they wait for another decision, and the error names it.
    """
    halts = []
    for partition, account in accounts.items():
        if account.halt is not None:
            halts.append((partition, account.halt))
    if not halts:
        return ConfigError(
            f"{stream}: nothing to accept: {name} is the topic that the ledger knows, and it is being read",
            next=f"`seriatim status {stream}` shows what waits",
        )
    lines = []
    for partition, halt in halts[:HALTS_NAMED_MAX]:
        lines.append(f"{partition} waits at offset {halt.offset}: {halt.finding}, {halt.cause}")
    first_partition, first_halt = halts[0]
    advice = FINDING_ADVICE[first_halt.finding]
    return ConfigError(
        f"{stream}: {name} was not made again; accept is not for what it waits for",
        waits="\n".join(lines),
        next=advice.format(stream=stream, place=first_partition, topic=first_partition.topic),
    )


def _new_life_change(
    partition: Partition, account: Account | None, bounds: Bounds | None, new_topic_id: str
) -> Change:
    """The change for a partition of a topic that was created again. A partition that the new topic
    does not have waits at offset 0 until it does.
    """
    start = bounds.log_start if bounds else 0
    change = Change(
        partition=partition,
        epoch=0,
        frontier=start,
        until=start,
        topic_id=new_topic_id,
        initial_frontier=start,
    )
    marks = []
    if account is not None:
        change = replace(
            change, epoch=account.epoch, frontier=account.frontier, halt=account.halt, state=()
        )
        if account.log_end > account.frontier:
            unread_mark = GapMark(
                finding="re-created",
                offset=account.frontier,
                until=account.log_end,
                cause="the topic was made again before these were read",
                topic_id=account.topic_id,
            )
            marks.append(unread_mark)
    if start > 0:
        cause = f"gone from topic id {new_topic_id} before it was accepted"
        marks.append(GapMark(finding="expired", offset=0, until=start, cause=cause))
    return replace(change, marks=tuple(marks))


def _partition_decision(change: Change, account: Account | None) -> PartitionDecision:
    """What a change means for its partition, still without the count of sessions and records."""
    decision = PartitionDecision(
        partition=change.partition,
        old_topic_id="",
        new_topic_id=change.topic_id,
        frontier=0,
        resumes_at=change.until,
    )
    if account is not None:
        decision.old_topic_id = account.topic_id
        decision.frontier = account.frontier
        if account.topic_id != change.topic_id:
            decision.unread_messages = max(0, account.log_end - account.frontier)
    return decision


def _write_and_commit(
    open_stream: OpenStream, head: LedgerHead, changes: list[Change], decision: TopicDecision
) -> TopicDecision:
    """Write the records that end the old life, then commit, then sweep the files of attempts that
    were not committed.
    """
    attempt = open_stream.new_attempt()
    try:
        complete_changes = [
            _end_sessions(open_stream, head.ledger, change, decision, attempt) for change in changes
        ]
        entry = AcceptEntry(
            attempt=attempt,
            product_version=__version__,
            changes=tuple(complete_changes),
            reason=decision.reason,
        )
        new_head, committed = commit(open_stream.ledger, open_stream.clock, head, entry)
    except (FencedError, ConfigError):
        for change in changes:
            stem = f"{stem_prefix(change.epoch, change.frontier)}{attempt}"
            sweep_attempts(open_stream.records, change.partition, stem)
        raise
    sweep_dead(open_stream.ledger, open_stream.records, new_head)
    crash_point("swept")
    decision.sequence = committed.sequence
    return decision


def _end_sessions(
    open_stream: OpenStream,
    ledger: Ledger,
    change: Change,
    decision: TopicDecision,
    attempt: str = "",
) -> Change:
    """The change, together with the records that take back the output of its sessions. Counts them
    in `decision`. Without an attempt they are only counted, and nothing is written.
    """
    account = ledger.account(change.partition)
    partition_decision = _partition_decision(change, account)
    decision.partitions.append(partition_decision)
    if not decision.is_new_life or account is None:
        return change
    end_records = _EndRecords(open_stream, change.partition, account, attempt)
    marks = list(change.marks)
    for name, session in open_stream.state.all_sessions(account.state):
        end_records.add(name, session)
        if session.waiting_messages:
            marks.append(_mark_waiting_messages_lost(name, session, account.topic_id))
    records, other_records = end_records.close()
    crash_point("record-file-written")
    partition_decision.ended_sessions = end_records.sessions
    partition_decision.end_records = end_records.records
    return replace(change, records=records, other_records=other_records, marks=tuple(marks))


def _mark_waiting_messages_lost(name: str, session: Session, topic_id: str) -> GapMark:
    """The gap of messages that wait in a window when the life of their topic ends. No later message
    will release them.
    """
    offsets = sorted(message.offset for message in session.waiting_messages)
    listed = list_some([str(offset) for offset in offsets], OFFSETS_NAMED_MAX)
    return GapMark(
        finding="sequence gap",
        offset=offsets[0],
        until=offsets[-1] + 1,
        session=name,
        cause=f"{len(offsets)} messages waited in the window when the topic's life ended: offsets {listed}",
        topic_id=topic_id,
    )


class _EndRecords:
    """The records that end the sessions of a partition. They all have its frontier as offset and are
    numbered from 0. Without an attempt they are counted and not written.
    """

    def __init__(
        self, open_stream: OpenStream, partition: Partition, account: Account, attempt: str
    ) -> None:
        self.runner = open_stream.runner
        self.partition = partition
        self.offset = account.frontier
        self.writer: OutputWriters | None = None
        if attempt:
            stem = f"{stem_prefix(account.epoch, account.frontier)}{attempt}"
            self.writer = OutputWriters(
                open_stream.records, partition, account.topic_id, stem, self.runner.other_columns
            )
        self.sessions = 0
        """How many sessions were ended."""
        self.records = 0
        """How many records that took."""
        self._pending = SessionEndRecords()

    def add(self, name: str, session: Session) -> None:
        """End one session."""
        self.sessions += 1
        rows = _end_records_of(self.runner, self.partition, name, session)
        for begin in range(0, len(rows), RECORDS_PER_WRITE):
            chunk = rows[begin : begin + RECORDS_PER_WRITE]
            self._pending.add(name, session, self.records, chunk)
            self.records += len(chunk)
            if len(self._pending.rows) >= RECORDS_PER_WRITE:
                self._write_pending()

    def _write_pending(self) -> None:
        pending = self._pending
        self._pending = SessionEndRecords()
        if self.writer is None or not pending.rows:
            return
        try:
            self.writer.write_end_records(self.offset, pending)
        except UnfitRecordsError as unfit:
            session = pending.sessions[unfit.rows[0]]
            reason = "its records do not fit"
            raise _cannot_end_error(self.runner, self.partition, session, reason) from None

    def close(self) -> tuple[Files, FilesByTable]:
        """Finish the files and return them. There are none if there was nothing to take back."""
        self._write_pending()
        if self.writer is None:
            return (), {}
        return self.writer.close()


def _end_records_of(
    runner: Runner, partition: Partition, name: str, session: Session
) -> Sequence[Row]:
    """The records that take back the output of a session. A session without a state has none."""
    if session.state_bytes is None:
        return ()
    try:
        return runner.end(runner.load(session.state_bytes, session.state_version))
    except Exception as error:
        # `end` and `upgrade` are the user's code, which may raise anything.
        reason = f"{type(error).__name__}: {error}"
        raise _cannot_end_error(runner, partition, name, reason) from error


def _cannot_end_error(runner: Runner, partition: Partition, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{partition}: the machine {runner.name} cannot end session {shorten(name, 100)!r}: {shorten(reason)}",
        next="fix the machine's `end` (or `upgrade`), then accept again; nothing was changed",
    )


class RetiredPartition(Struct, kw_only=True):
    """What is known about a partition that was retired."""

    partition: Partition
    topic_id: str
    frontier: int
    unread_messages: int
    """Messages that will not be read any more, as far as is known."""
    halt_finding: str = ""
    """The finding that had halted it; empty if it was not halted."""


class RetireDecision(Struct, kw_only=True):
    """What was decided; after a dry run, what would be decided."""

    topic: str
    reason: str
    partitions: list[RetiredPartition] = field(default_factory=list)
    sequence: int = -1
    """The entry of the decision; -1 if nothing was committed."""


def retire_topic(
    store: LedgerStore,
    log: Log,
    clock: Clock,
    stream: str,
    topics: str,
    name: str,
    attempt: str,
    reason: str,
    *,
    dry_run: bool = False,
) -> RetireDecision:
    """Retire a topic, or one partition of it (`topic/number`). A FencedError is raised if a run
    moved its frontier meanwhile.
    """
    head = require_head(store, stream)
    ledger = head.ledger
    topic, live_accounts = _find_live_accounts(ledger, name)
    refuse_held(ledger, list(live_accounts))
    bounds = log.bounds(topics)
    decision = RetireDecision(topic=topic, reason=reason)
    changes = []
    for partition, account in live_accounts.items():
        decision.partitions.append(_retired_partition(partition, account, bounds.get(partition)))
        changes.append(unmoved_change(partition, account))
    if not dry_run:
        entry = RetireEntry(
            attempt=attempt,
            product_version=__version__,
            changes=tuple(changes),
            reason=reason,
        )
        _, committed = commit(store, clock, head, entry)
        decision.sequence = committed.sequence
    return decision


def _find_live_accounts(ledger: Ledger, name: str) -> tuple[str, dict[Partition, Account]]:
    """The topic that a person names, and its accounts that are not retired yet. Refused if nothing of
    that name was ever read, or if all of it is retired.
    """
    topic, partitions = find_named_partitions(ledger, name)
    if not partitions:
        raise unknown_topic_error(ledger, name)
    live_accounts = {}
    for partition in partitions:
        account = ledger.partitions[str(partition)]
        if not account.retired:
            live_accounts[partition] = account
    if not live_accounts:
        raise ConfigError(
            f"{ledger.stream}: {name} is retired already",
            next=f'seriatim accept {ledger.stream} {name} --because "…" takes it back',
        )
    return topic, live_accounts


def _retired_partition(
    partition: Partition, account: Account, bounds: Bounds | None
) -> RetiredPartition:
    log_end = account.log_end
    if bounds is not None and bounds.topic_id == account.topic_id:
        log_end = bounds.log_end
    return RetiredPartition(
        partition=partition,
        topic_id=account.topic_id,
        frontier=account.frontier,
        unread_messages=max(0, log_end - account.frontier),
        halt_finding=account.halt.finding if account.halt else "",
    )


class RestoreDecision(Struct, kw_only=True):
    """What was decided; after a dry run, what would be decided."""

    witness_sequence: int
    """The newest entry that the witness, head.json, knows."""
    ledger_sequence: int
    """The newest entry of the ledger; -1 if there is no ledger."""
    contradiction: str
    """Why the ledger is refused, as a text for people."""
    reason: str
    sequence: int = -1
    """The entry of the decision; -1 if no entry was committed."""
    archived_witness_path: str = ""
    """Where the witness was moved to; empty if it was not moved."""


def accept_restored_ledger(
    store: LedgerStore,
    clock: Clock,
    stream: str,
    attempt: str,
    reason: str,
    *,
    dry_run: bool = False,
) -> RestoreDecision:
    """Make the witness follow the ledger as it is. Refused if the two do not contradict each other."""
    contradiction = _find_contradiction(store, stream)
    witness = store.witness()
    head = store.head(stream)
    if not contradiction and head is not None and head.ledger.foreign_sequence >= 0:
        sequence = head.ledger.foreign_sequence
        contradiction = f"others wrote to the records table, told by entry {sequence}"
    if not contradiction or witness is None:
        raise ConfigError(
            f"{stream}: nothing to accept: the ledger is not behind its witness",
            next=f"`seriatim status {stream}` shows how it is",
        )
    decision = RestoreDecision(
        witness_sequence=witness.sequence,
        ledger_sequence=head.ledger.sequence if head else -1,
        contradiction=contradiction,
        reason=reason,
    )
    if dry_run:
        return decision
    # New entries will get numbers that were reported before the restore. They have to be reported
    # again, so the mark goes back as well.
    reported_sequence = store.note(REPORTED_NOTE).sequence
    reported = EntryMark(min(reported_sequence, decision.ledger_sequence))
    store.put_note(REPORTED_NOTE, reported)
    if head is None:
        decision.archived_witness_path = store.archive_witness(reason)
        return decision
    entry = AcceptEntry(
        attempt=attempt,
        product_version=__version__,
        reason=reason,
    )
    _, committed = commit(store, clock, head, entry)
    decision.sequence = committed.sequence
    return decision


def _find_contradiction(store: LedgerStore, stream: str) -> str:
    """Why the ledger is refused, as a text for people; empty if it is not refused."""
    try:
        read_head(store, stream)
    except IntegrityError as error:
        return error.message
    return ""
