"""Status: how a stream is now, as one value. `status`, `watch`, `top`, the page and the status file are
made of it. Changes nothing.

`read_status` asks Kafka and the ledger. Every process that runs or watches a stream also writes what
it saw to `status.json` below the output path. Pages read that file and do not ask Kafka. The ledger
may have moved since: what it knows (frontier, halts, circuit) is taken from it by
`stream_status_now`. What only Kafka knows (log start and end, time left) is as of that look, and
time left counts down from there.

Next: operations/watch.py adds what needs a person; storage/status_file.py has the file; web/ and
cli/top.py show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import StateStore
from seriatim.engine.findings import (
    FINDING_TITLES,
    Concern,
    Finding,
    count_of,
    format_moment,
    printable_session,
)
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Bounds, BoundsByPartition, Partition
from seriatim.engine.retention import RetainedLog, is_drained
from seriatim.engine.session import Session, SessionsByName
from seriatim.errors import ConfigError, SeriatimError
from seriatim.ledger.commit import read_head
from seriatim.ledger.entries import HoldEntry
from seriatim.ledger.manifests import LedgerHead, Manifest
from seriatim.ledger.model import Account, Ledger, circuit_advice, describe_failed_range
from seriatim.operations.locate_session import locate_session, split_off_newest
from seriatim.operations.missing_messages import (
    NEVER_CAME,
    MissingMessage,
    MissingMessageSearch,
    missing_message_advice,
)
from seriatim.operations.plan import retired_topics
from seriatim.operations.repair.damage import RepairRequest
from seriatim.operations.repair_text import held_by_repair
from seriatim.operations.retention import PartitionClock, PartitionClocks, partition_clocks
from seriatim.ports import Clock, LedgerStore, Log
from seriatim.stream import Stream

WAITING_FOR_TOPICS = "waiting for topics"
"""The verdict on a stream that was never run, and of which Kafka has no topic."""
Tone = Literal["", "good", "warn", "bad"]
KAFKA_CONCERNS = ("time left", "late", "buffer", "blind")
"""Kinds of concerns that need Kafka. They are shown as of the look."""
SWAPPED = "messages were swapped"
HOLD_SEARCH_ENTRIES = 200
"""The entry that placed a hold is searched among so many, from the newest on."""
GROUPS_SHOWN_MAX = 4
"""Groups of sessions in quarantine that a concern describes, at most."""
TONE_ORDER = {"bad": 0, "warn": 1, "": 2, "good": 3}
"""The most urgent first."""


class HaltStatus(Struct, frozen=True):
    """Why a partition is halted."""

    finding: str
    offset: int
    cause: str = ""


class PartitionStatus(Struct, frozen=True, kw_only=True, rename={"hold": "held", "halt": "halted"}):
    """The status of one partition."""

    topic: str
    topic_id: str | None = None
    partition: int
    frontier: int | None = None
    log_start: int | None = None
    log_end: int | None = None
    lag: int | None = None
    """Messages after the frontier; None if Kafka does not have the topic."""
    unread: int | None = None
    """Messages that a run would have to read. It differs from `lag` if the topic was created again:
    then all of its messages are unread.
    """
    time_left_seconds: int | None = None
    limit_seconds: float | None = None
    """A person is warned if less time than this is left."""
    catches_up: bool | None = None
    topic_state: str = "live"
    epoch: int = 0
    headless: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    hold: str | None = None
    halt: HaltStatus | None = None

    @property
    def partition_name(self) -> str:
        """The partition as people write it, like `orders/3`."""
        return f"{self.topic}/{self.partition}"

    @property
    def tone(self) -> Tone:
        """How the partition is, as a colour."""
        if self.topic_state == "retired":
            return ""
        if self.halt or self.topic_state in ("absent", "re-created"):
            return "bad"
        # A repair that runs needs nobody. One that lasts is mailed.
        return time_tone(self) or ("warn" if self.hold else "good")


class QuarantinedSession(Struct, frozen=True, kw_only=True):
    """A session in quarantine."""

    session: str
    topic: str
    partition: int
    offset: int | None = None
    finding: str | None = None
    missing: MissingMessage | None = None
    """Of a sequence gap: what Kafka has of the missing message, if it was looked for."""

    @property
    def partition_name(self) -> str:
        """The partition as people write it, like `orders/3`."""
        return f"{self.topic}/{self.partition}"

    @property
    def cause(self) -> str:
        """What its finding comes from, as far as it is known. Sessions with the same finding and the
        same cause need the same decision.
        """
        if self.missing is None:
            return ""
        if self.missing.is_swapped:
            return SWAPPED
        if self.missing.snapshot_offset is not None:
            return "its snapshot waits"
        return NEVER_CAME if self.missing.never_came else "a message is missing"


class HoldStatus(Struct, frozen=True, kw_only=True):
    """A repair that holds partitions."""

    id: str
    since_seconds: float
    command: str
    """What a person typed for it."""


class WindowBuffer(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"since_ms": "since", "expected_sequence": "expects"},
):
    """In tier window: the messages of one session that wait for earlier ones."""

    session: str
    topic: str
    partition: int
    messages: int
    offset: int
    """The first of them."""
    since_ms: int
    expected_sequence: int | None


class LossBound(Struct, frozen=True, kw_only=True):
    """The loss bound: the most output that one lost message can have spoiled so far."""

    messages: int = 0
    seconds: float = 0.0
    agreed_minutes: float | None = None


class FailedRangeStatus(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"start": "from", "judged_until": "judged", "text": "says"},
):
    """Output that a check judged bad."""

    partition: str
    start: int
    until: int
    judged_until: int
    text: str


class StreamStatus(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "last_run_seconds": "ran_seconds",
        "failed_ranges": "failed",
        "circuit_advice": "closes",
    },
):
    """How a stream is."""

    stream: str
    tier: str = ""
    sequence: int = -1
    """The newest ledger entry."""
    circuit: str = "closed"
    verdict: str = "new"
    checked: int = 0
    at_seconds: float | None = None
    """When Kafka was asked; None: it was not."""
    last_run_seconds: float | None = None
    """When the newest run ended."""
    rate: float | None = None
    """Messages that a run folds in a second, by recent entries."""
    partitions: list[PartitionStatus] = field(default_factory=list)
    buffers: list[WindowBuffer] = field(default_factory=list)
    snapshot_distance: LossBound = LossBound()
    failed_ranges: list[FailedRangeStatus] = field(default_factory=list)
    circuit_advice: str | None = None
    """What closes the circuit; None if it is closed."""
    quarantined: list[QuarantinedSession] = field(default_factory=list)
    quarantined_count: int = 0
    sessions_max: int | None = None
    """The sessions that the state files hold, or more: a session may be in several files. None if
    that is not known.
    """
    holds: list[HoldStatus] = field(default_factory=list)
    """The repairs that hold partitions."""
    published: int | None = None
    """The entry that the table `current` has reached; None if that is not known."""
    snapshot_requests: str = ""
    """The topic on which runs ask producers for snapshots; empty: they do not ask."""
    gaps_open: int | None = None
    """Ranges of the output that must not be trusted; None if that is not known."""
    concerns: list[Concern] = field(default_factory=list)
    """What needs a person."""
    trouble: str = ""
    """Why nothing can be said about the stream; empty if something can."""

    @property
    def lag(self) -> int | None:
        """Messages that wait in all partitions; None if no partition is known."""
        if not self.partitions:
            return None
        return sum(partition.lag or 0 for partition in self.partitions)

    @property
    def unread(self) -> int:
        """Messages that a run would have to read."""
        return sum(partition.unread or 0 for partition in self.partitions)

    @property
    def time_left_by_partition(self) -> dict[str, int]:
        """The time left of the partitions whose messages Kafka will delete."""
        return {
            partition.partition_name: partition.time_left_seconds
            for partition in self.partitions
            if partition.time_left_seconds is not None
        }

    @property
    def nearest(self) -> PartitionStatus | None:
        """The partition with the least time left."""
        limited = [
            (partition.time_left_seconds, partition.topic, partition.partition, partition)
            for partition in self.partitions
            if partition.time_left_seconds is not None
        ]
        if not limited:
            return None
        return min(limited, key=lambda item: item[:3])[3]

    @property
    def catches_up(self) -> bool | None:
        """Whether a run that starts now reads all partitions in time; None if that is not known."""
        answers = {partition.catches_up for partition in self.partitions if partition.unread}
        if False in answers:
            return False
        return None if None in answers else True

    @property
    def verdict_text(self) -> str:
        """The verdict as people read it. A stream that folds well may need a look all the same: a topic
        is absent, time runs out, or a repair holds a partition.
        """
        if self.verdict == "good" and self.tone != "good":
            return "needs a person" if self.tone == "bad" else "to look at"
        return render_verdict(self.verdict)

    @property
    def tone(self) -> Tone:
        """How the stream is, as a colour."""
        if self.trouble or self.verdict == "hurt" or self.circuit == "open":
            return "bad"
        if any(partition.tone == "bad" for partition in self.partitions):
            return "bad"
        if self.concerns or self.verdict in ("new", "unknown", WAITING_FOR_TOPICS):
            return "warn"
        if any(partition.hold for partition in self.partitions):
            return "warn"
        return "good"


def to_json_values(
    status: StreamStatus, keys: Collection[str], hidden_partition_keys: Collection[str]
) -> dict[str, Any]:
    """Some facts of a status as plain values. Each command and file has its own keys, which are
    fixed, because people script against them.
    """
    values = msgspec.to_builtins(status)
    for partition_values in values["partitions"]:
        for key in hidden_partition_keys:
            del partition_values[key]
    return {key: values[key] for key in keys}


class StreamReading(Struct, frozen=True, kw_only=True):
    """What the ledger and Kafka answered at one moment."""

    at_seconds: float
    ledger: Ledger
    bounds: BoundsByPartition
    clocks: PartitionClocks
    holds: list[HoldStatus] = []


def read_stream(
    stream: Stream, log: Log, store: LedgerStore, clock: Clock, head: LedgerHead | None = None
) -> StreamReading:
    """Ask the ledger and Kafka once. `head` is the ledger, if it was just read."""
    if head is None:
        head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds = log.bounds(stream.topics)
    at_seconds = clock.now_seconds()
    clocks = partition_clocks(ledger, log, bounds, at_seconds)
    return StreamReading(
        at_seconds=at_seconds,
        ledger=ledger,
        bounds=bounds,
        clocks=clocks,
        holds=_read_holds(store, ledger),
    )


def _read_holds(store: LedgerStore, ledger: Ledger) -> list[HoldStatus]:
    """The repairs that hold partitions."""
    oldest = max(0, ledger.sequence - HOLD_SEARCH_ENTRIES)
    sequences = range(ledger.sequence, oldest - 1, -1)
    return find_holds(ledger, (store.manifest_at(ledger.stream, number) for number in sequences))


def find_holds(ledger: Ledger, manifests: Iterable[Manifest]) -> list[HoldStatus]:
    """The repairs that hold partitions, by the entries that placed the holds, newest first. Only as
    many manifests are taken as are needed; they come newest first.
    """
    wanted_ids = {account.hold for account in ledger.partitions.values() if account.hold}
    holds: list[HoldStatus] = []
    if not wanted_ids:
        return holds
    for manifest in manifests:
        entry = manifest.entry
        if isinstance(entry, HoldEntry) and entry.hold in wanted_ids:
            wanted_ids.remove(entry.hold)
            request = RepairRequest.from_json(entry.request)
            hold = HoldStatus(
                id=entry.hold,
                since_seconds=entry.at_seconds,
                command=request.to_command(ledger.stream),
            )
            holds.append(hold)
        if not wanted_ids:
            break
    return holds


def read_status(
    stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> StreamStatus:
    """The status of a stream, from the ledger and Kafka. What needs a person is not judged."""
    return build_status(stream, state, read_stream(stream, log, store, clock))


def build_status(
    stream: Stream,
    state: StateStore,
    reading: StreamReading,
    search: MissingMessageSearch | None = None,
    previous: StreamStatus | None = None,
) -> StreamStatus:
    """The status of a stream, from what was read. With `search`, the messages that sessions wait
    for are looked for in Kafka; `previous` is an earlier status, from which the search goes on.
    """
    ledger = reading.ledger
    sessions = _quarantined_sessions(reading, state, search, previous)
    state_files = [file for account in ledger.partitions.values() for file in account.state]
    status = StreamStatus(
        stream=stream.name,
        tier=stream.tier,
        at_seconds=reading.at_seconds,
        partitions=_partitions(stream, reading),
        buffers=_window_buffers(stream, ledger, state),
        snapshot_distance=_snapshot_distance(stream, ledger),
        quarantined=sessions,
        quarantined_count=len(sessions),
        sessions_max=sum(file.rows for file in state_files),
        holds=reading.holds,
        snapshot_requests=stream.snapshot_requests,
    )
    status = _with_ledger_facts(status, ledger)
    if ledger.sequence < 0 and not status.partitions:
        return replace(status, verdict=WAITING_FOR_TOPICS)
    return status


def _partitions(stream: Stream, reading: StreamReading) -> list[PartitionStatus]:
    """All partitions that Kafka or the ledger has."""
    ledger = reading.ledger
    retired = retired_topics(ledger)
    drained = _drained_topics(stream, reading)
    partitions = []
    for partition in sorted({*ledger.known_partitions(), *reading.bounds}):
        account = ledger.account(partition)
        bounds = reading.bounds.get(partition)
        status = PartitionStatus(
            topic=partition.topic,
            partition=partition.number,
            topic_state=topic_state(
                account,
                bounds,
                retired=partition.topic in retired,
                drained=partition.topic in drained,
            ),
        )
        if bounds is not None:
            frontier = bounds.log_start if account is None else account.frontier
            status = replace(
                status,
                topic_id=bounds.topic_id,
                log_start=bounds.log_start,
                log_end=bounds.log_end,
                lag=max(0, bounds.log_end - frontier),
            )
        if account is not None:
            status = _with_account(status, account)
        clock = reading.clocks.get(partition)
        if clock is not None:
            status = _with_clock(status, clock, stream.alerts.time_left_warning_hours)
        partitions.append(status)
    return partitions


def _with_account(partition: PartitionStatus, account: Account) -> PartitionStatus:
    """The partition with what the ledger knows of it."""
    halt = None
    if account.halt is not None:
        halt = HaltStatus(account.halt.finding, account.halt.offset, account.halt.cause)
    return replace(
        partition,
        topic_id=account.topic_id,
        frontier=account.frontier,
        epoch=account.epoch,
        headless=account.headless,
        counts=dict(account.counts),
        hold=account.hold,
        halt=halt,
    )


def _with_clock(
    partition: PartitionStatus, clock: PartitionClock, warning_hours: float
) -> PartitionStatus:
    """The partition with the time that Kafka leaves it."""
    limit_seconds = None
    if clock.times_left:
        limit_seconds = clock.times_left[0].warning_seconds(warning_hours)
    return replace(
        partition,
        unread=clock.retained.lag,
        time_left_seconds=clock.time_left_seconds,
        limit_seconds=limit_seconds,
        catches_up=clock.will_catch_up,
    )


def _drained_topics(stream: Stream, reading: StreamReading) -> set[str]:
    """Topics that are fully folded and got no message for `topic_drained_hours`."""
    logs_by_topic: dict[str, list[RetainedLog]] = {}
    for partition, clock in reading.clocks.items():
        logs_by_topic.setdefault(partition.topic, []).append(clock.retained)
    return {
        topic
        for topic, logs in logs_by_topic.items()
        if is_drained(logs, reading.at_seconds, stream.topic_drained_hours)
    }


def topic_state(
    account: Account | None, bounds: Bounds | None, *, retired: bool = False, drained: bool = False
) -> str:
    """The state of a topic: live, drained, retired, absent or re-created.

    A topic that is gone with messages that were never read is absent. One that is gone with
    everything read is retired, as is one that a person retired.
    """
    if retired or (account is not None and account.retired):
        return "retired"
    if bounds is None:
        if account is None or account.halt is not None or account.frontier < account.log_end:
            return "absent"
        return "retired"
    if account is not None and account.topic_id != bounds.topic_id:
        return "re-created"
    return "drained" if drained else "live"


def _window_buffers(stream: Stream, ledger: Ledger, state: StateStore) -> list[WindowBuffer]:
    if stream.tier != "window":
        return []
    buffers = []
    for partition in ledger.known_partitions():
        account = ledger.partitions[str(partition)]
        for name, session in state.all_sessions(account.state, with_rows=False):
            messages = session.waiting_messages
            if not messages:
                continue
            expected_sequence = None
            if session.sequence is not None:
                expected_sequence = session.sequence + 1
            buffer = WindowBuffer(
                session=name,
                topic=partition.topic,
                partition=partition.number,
                messages=len(messages),
                offset=min(message.offset for message in messages),
                since_ms=min(message.timestamp for message in messages),
                expected_sequence=expected_sequence,
            )
            buffers.append(buffer)
    return buffers


def _snapshot_distance(stream: Stream, ledger: Ledger) -> LossBound:
    accounts = ledger.partitions.values()
    distance_ms = max((account.distance_ms for account in accounts), default=0)
    return LossBound(
        messages=max((account.distance_messages for account in accounts), default=0),
        seconds=distance_ms / 1000,
        agreed_minutes=stream.alerts.snapshot_distance_max_minutes or None,
    )


def _quarantined_sessions(
    reading: StreamReading,
    state: StateStore,
    search: MissingMessageSearch | None,
    previous: StreamStatus | None,
) -> list[QuarantinedSession]:
    quarantined = []
    ledger = reading.ledger
    for partition in ledger.known_partitions():
        account = ledger.partitions[str(partition)]
        if account.retired or not account.quarantined:
            # Nobody waits for the sessions of a topic that is over.
            continue
        sessions = state.quarantined_sessions(account.state)
        missing = _known_missing(partition, sessions, previous)
        bounds = reading.bounds.get(partition)
        is_same_topic = bounds is not None and bounds.topic_id == account.topic_id
        if search is not None and bounds is not None and is_same_topic:
            # A machine that cannot be loaded must not hide how the stream is.
            with suppress(SeriatimError):
                missing = search.search(partition, sessions, bounds, missing)
        for name, session in sorted(sessions.items()):
            quarantined_session = QuarantinedSession(
                session=name,
                topic=partition.topic,
                partition=partition.number,
                offset=session.finding_offset,
                finding=session.finding,
                missing=missing.get(name),
            )
            quarantined.append(quarantined_session)
    return quarantined


def _known_missing(
    partition: Partition, sessions: SessionsByName, previous: StreamStatus | None
) -> dict[str, MissingMessage]:
    """What an earlier look found out about the messages that these sessions wait for."""
    earlier_results: dict[str, MissingMessage] = {}
    for earlier in previous.quarantined if previous else []:
        session = sessions.get(earlier.session)
        is_here = earlier.topic == partition.topic and earlier.partition == partition.number
        if session is None or earlier.missing is None or not is_here:
            continue
        # The session may have been well in the meantime, and waits for another message now.
        if earlier.offset == session.finding_offset:
            earlier_results[earlier.session] = earlier.missing
    return earlier_results


def _with_ledger_facts(status: StreamStatus, ledger: Ledger) -> StreamStatus:
    """The status with what the ledger knows of the whole stream."""
    failed_ranges = []
    for failed_range in ledger.failed_ranges:
        failed_range_status = FailedRangeStatus(
            partition=failed_range.partition,
            start=failed_range.start,
            until=failed_range.until,
            judged_until=failed_range.judged_until,
            text=describe_failed_range(failed_range),
        )
        failed_ranges.append(failed_range_status)
    last_run_seconds = max(status.last_run_seconds or 0.0, ledger.pace.at_seconds)
    return replace(
        status,
        sequence=ledger.sequence,
        circuit=ledger.circuit,
        verdict=stream_verdict(ledger),
        checked=ledger.checked,
        last_run_seconds=last_run_seconds or None,
        rate=ledger.pace.rate,
        failed_ranges=failed_ranges,
        circuit_advice=circuit_advice(ledger) if failed_ranges else None,
    )


def stream_verdict(ledger: Ledger) -> str:
    """One word for the whole stream: good, hurt (something waits for a person), or new (it was
    never run).
    """
    if ledger.sequence < 0:
        return "new"
    if ledger.foreign_sequence >= 0 or ledger.failed_ranges:
        return "hurt"
    for account in ledger.partitions.values():
        if not account.retired and (account.halt or account.quarantined):
            return "hurt"
    return "good"


def render_verdict(verdict: str) -> str:
    """A verdict on a stream as people read it. In JSON it is one word."""
    return "needs a person" if verdict == "hurt" else verdict


def stream_status_now(
    stream: str,
    tier: str,
    saved: StreamStatus | None,
    ledger: Ledger | None,
    now_seconds: float,
    holds: Sequence[HoldStatus] = (),
) -> StreamStatus:
    """A stream as of now, without asking Kafka. `ledger` is given where it is newer than the status
    file, or where there is no status file. `holds` are its repairs, where they were looked for.
    """
    status = StreamStatus(stream=stream) if saved is None else saved
    concerns = [concern for concern in status.concerns if concern.kind != "halted"]
    if ledger is not None:
        status = _with_ledger_facts(status, ledger)
        status = replace(
            status,
            partitions=_partitions_with_ledger(status.partitions, ledger),
            quarantined_count=quarantined_count(ledger),
            holds=list(holds) or status.holds,
        )
        concerns = [concern for concern in concerns if concern.kind in KAFKA_CONCERNS]
        concerns += hold_concerns(status)
        concerns += circuit_concerns(status)
        concerns += quarantine_concerns(status)
    elapsed_seconds = 0.0
    if status.at_seconds is not None:
        elapsed_seconds = max(0.0, now_seconds - status.at_seconds)
    return replace(
        status,
        stream=stream,
        tier=tier,
        partitions=[_with_time_elapsed(part, elapsed_seconds) for part in status.partitions],
        # A halt comes with the command that its finding advises.
        concerns=[*halt_concerns(stream, status.partitions), *concerns],
    )


def _partitions_with_ledger(saved: list[PartitionStatus], ledger: Ledger) -> list[PartitionStatus]:
    """The partitions of the file and of the ledger, with what the ledger knows by now."""
    partition_by_name = {partition.partition_name: partition for partition in saved}
    partitions = []
    for name in sorted({*partition_by_name, *ledger.partitions}, key=_partition_sort_key):
        partition = partition_by_name.get(name)
        if partition is None:
            topic, number = _partition_sort_key(name)
            partition = PartitionStatus(topic=topic, partition=number)
        account = ledger.partitions.get(name)
        if account is not None:
            log_end = max(partition.log_end or 0, account.log_end, account.frontier)
            lag = log_end - account.frontier
            partition = replace(
                _with_account(partition, account),
                log_end=log_end,
                lag=lag,
                time_left_seconds=partition.time_left_seconds if lag else None,
                topic_state="retired" if account.retired else partition.topic_state,
            )
        partitions.append(partition)
    return partitions


def _partition_sort_key(partition_name: str) -> tuple[str, int]:
    topic, _, number = partition_name.rpartition("/")
    return topic, int(number)


def _with_time_elapsed(partition: PartitionStatus, elapsed_seconds: float) -> PartitionStatus:
    if partition.time_left_seconds is None:
        return partition
    time_left_seconds = round(partition.time_left_seconds - elapsed_seconds)
    return replace(partition, time_left_seconds=max(0, time_left_seconds))


def quarantined_count(ledger: Ledger) -> int:
    """How many sessions are in quarantine."""
    return sum(account.quarantined for account in ledger.partitions.values() if not account.retired)


def halt_concerns(stream: str, partitions: list[PartitionStatus]) -> list[Concern]:
    """Partitions that wait, each with the command that its finding advises."""
    concerns = []
    for partition in partitions:
        halt = partition.halt
        if halt is None or partition.topic_state == "retired":
            continue
        finding = _finding_of_halt(partition, halt)
        text = f"at offset {halt.offset}: {halt.finding}"
        if halt.cause:
            text += f", {halt.cause}"
        concern = Concern(
            kind="halted", location=partition.partition_name, text=text, next=finding.advice(stream)
        )
        concerns.append(concern)
    return concerns


def _finding_of_halt(partition: PartitionStatus, halt: HaltStatus) -> Finding:
    return Finding(
        finding=halt.finding,
        topic=partition.topic,
        partition=partition.partition,
        offset=halt.offset,
    )


def repair_values_of_concern(
    concern: Concern, partitions: Sequence[PartitionStatus]
) -> dict[str, str | bool]:
    """What the form of the repair DAG takes beside the stream; empty if a repair does not help."""
    if concern.kind == "swapped":
        return {"partition": concern.location}
    if concern.kind != "halted":
        return {}
    for partition in partitions:
        halt = partition.halt
        if halt is None or partition.partition_name != concern.location:
            continue
        # A status file of a newer version may have a kind that this version does not know.
        if halt.finding in FINDING_TITLES:
            finding = _finding_of_halt(partition, halt)
            return finding.repair_values if finding.can_be_repaired else {}
    return {}


def hold_concerns(status: StreamStatus) -> list[Concern]:
    """Partitions that somebody holds for a repair."""
    concerns = []
    for partition in status.partitions:
        if partition.hold:
            resume = f"seriatim repair {status.stream} --resume {partition.hold}"
            give_up = f"seriatim repair {status.stream} --abandon {partition.hold}"
            concern = Concern(
                kind="held",
                location=partition.partition_name,
                text=describe_hold(status, partition.hold),
                next=f"if the repair died, go on with it: {resume}\nor give it up: {give_up}",
            )
            concerns.append(concern)
    return concerns


def describe_hold(status: StreamStatus, hold_id: str) -> str:
    """Which repair holds a partition, and since when."""
    for hold in status.holds:
        if hold.id == hold_id:
            since = format_moment(hold.since_seconds)
            return f"{held_by_repair(hold.id)} since {since}: {hold.command}"
    return held_by_repair(hold_id)


def circuit_concerns(status: StreamStatus) -> list[Concern]:
    """An open circuit, with what closes it."""
    if status.circuit != "open":
        return []
    failures = "; ".join(failed_range.text for failed_range in status.failed_ranges[:3])
    text = f"the circuit is open, publishing waits: a check failed: {failures}"
    return [Concern(kind="circuit", text=text, next=status.circuit_advice or "")]


class QuarantineGroup(Struct, frozen=True, kw_only=True):
    """Sessions in quarantine with the same finding and cause: a person decides about them at once."""

    finding: str
    cause: str
    sessions: list[QuarantinedSession]

    @property
    def title(self) -> str:
        """The finding, with its cause if that is known."""
        return f"{self.finding} ({self.cause})" if self.cause else self.finding

    @property
    def partition_names(self) -> list[str]:
        """The partitions that have such sessions."""
        return sorted({session.partition_name for session in self.sessions})

    @property
    def can_be_refolded(self) -> bool:
        """Whether folding the sessions again may help."""
        if self.cause:
            return self.cause == SWAPPED
        finding = self.example_finding
        return finding is not None and finding.can_be_repaired

    @property
    def example_finding(self) -> Finding | None:
        """The finding of the first session. None if its kind is unknown: the status file is of a newer
        version, or somebody else wrote it.
        """
        if self.finding not in FINDING_TITLES:
            return None
        example = self.sessions[0]
        return Finding(
            finding=self.finding,
            topic=example.topic,
            partition=example.partition,
            session=example.session,
        )

    def advice(self, status: StreamStatus) -> str:
        """What to type. A command that folds again is about all of them. One that decides about a
        single session names the first.
        """
        example = self.sessions[0]
        if example.missing is not None and len(self.sessions) > 1 and example.missing.is_swapped:
            partitions = self.partition_names
            option = f" --partition {partitions[0]}" if len(partitions) == 1 else ""
            return (
                f"seriatim repair {status.stream}{option} --apply\nputs their messages into order"
            )
        if example.missing is not None:
            return missing_message_advice(
                status.stream,
                status.snapshot_requests,
                example.partition_name,
                example.session,
                example.missing,
            )
        finding = self.example_finding
        if finding is None:
            return f"seriatim repair {status.stream}"
        return finding.advice(status.stream, all_partitions=len(self.partition_names) > 1)


def group_quarantined(sessions: Iterable[QuarantinedSession]) -> list[QuarantineGroup]:
    """Sessions in quarantine by finding and cause, the largest group first."""
    sessions_by_cause: dict[tuple[str, str], list[QuarantinedSession]] = {}
    for session in sessions:
        key = session.finding or "", session.cause
        sessions_by_cause.setdefault(key, []).append(session)
    groups = [
        QuarantineGroup(finding=finding, cause=cause, sessions=members)
        for (finding, cause), members in sessions_by_cause.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.sessions), group.title))


def describe_quarantined_count(status: StreamStatus) -> str:
    """How many sessions are in quarantine, and of how many."""
    count = status.quarantined_count
    sessions = count_of(count, "session")
    if status.sessions_max and status.sessions_max >= count:
        sessions = f"{count} of at most {count_of(status.sessions_max, 'session')}"
    return sessions


def quarantine_concerns(status: StreamStatus) -> list[Concern]:
    """Sessions in quarantine, in groups, each with what to type; and once more those whose swapped
    messages have all arrived, because that is news.
    """
    if not status.quarantined_count:
        return []
    groups = group_quarantined(status.quarantined)
    text = f"{describe_quarantined_count(status)} in quarantine until the next snapshot"
    if not groups:
        return [Concern(kind="quarantine", text=text, next=f"seriatim repair {status.stream}")]
    example = groups[0].sessions[0]
    counts: list[str] = []
    advices: list[str] = []
    for group in groups[:GROUPS_SHOWN_MAX]:
        advice = group.advice(status)
        counts.append(f"{len(group.sessions)} {group.title}")
        # With one group the title stands in the text already.
        advices.append(advice if len(groups) == 1 else f"{group.title}: {advice}")
    example_session = printable_session(example.session)
    text += (
        f": {', '.join(counts)}; first {example_session} in {example.partition_name}"
        f" at offset {example.offset}"
    )
    concerns = [Concern(kind="quarantine", text=text, next="\n".join(advices))]
    return concerns + _swapped_concerns(status, groups)


def _swapped_concerns(status: StreamStatus, groups: list[QuarantineGroup]) -> list[Concern]:
    concerns = []
    for group in groups:
        if group.cause != SWAPPED:
            continue
        for partition_name in group.partition_names:
            sessions = [
                session for session in group.sessions if session.partition_name == partition_name
            ]
            example = sessions[0]
            text = f"session {printable_session(example.session)}: "
            if example.missing is not None:
                text += f"{example.missing.describe()}, and all of them are there now"
            if len(sessions) > 1:
                text += f"; so it is with {len(sessions) - 1} more"
            members = QuarantineGroup(finding=group.finding, cause=group.cause, sessions=sessions)
            concern = Concern(
                kind="swapped",
                location=partition_name,
                text=text,
                next=members.advice(status),
            )
            concerns.append(concern)
    return concerns


def time_tone(partition: PartitionStatus) -> Tone:
    """The colour of time left: red up to the stream's limit, yellow up to twice as much."""
    if partition.time_left_seconds is None or partition.limit_seconds is None:
        return ""
    if partition.time_left_seconds <= partition.limit_seconds:
        return "bad"
    return "warn" if partition.time_left_seconds <= 2 * partition.limit_seconds else ""


def urgent_first(statuses: Iterable[StreamStatus]) -> list[StreamStatus]:
    """The statuses in order: what needs a person first, then the least time left, then the name."""
    return sorted(statuses, key=_urgency)


def _urgency(status: StreamStatus) -> tuple[int, float, str]:
    time_left_seconds = min(status.time_left_by_partition.values(), default=float("inf"))
    return TONE_ORDER[status.tone], time_left_seconds, status.stream


class SavedSession(Struct, frozen=True, kw_only=True):
    """A session as it was saved in the partition of a topic where its newest message came."""

    partition: Partition
    values: dict[str, Any]
    other_sessions: dict[Partition, Session]
    """The session in other partitions of the topic, where it may be in quarantine."""


def session_states(
    runner: Runner,
    ledger: Ledger,
    state: StateStore,
    name: str,
    topic: str | None = None,
) -> list[SavedSession]:
    """The state of a session in every topic that has it. If several partitions of a topic have it,
    the one with its newest message counts. A session that does not exist is refused.
    """
    sessions_by_topic: dict[str, dict[Partition, Session]] = {}
    for partition in locate_session(state, ledger, name, topic):
        session = state.load(ledger.partitions[str(partition)].state, [name])[name]
        sessions_by_topic.setdefault(partition.topic, {})[partition] = session
    return [
        _newest_saved_session(name, sessions, runner) for sessions in sessions_by_topic.values()
    ]


def _newest_saved_session(
    name: str, sessions: Mapping[Partition, Session], runner: Runner
) -> SavedSession:
    """Of the partitions of a topic that have a session, the one where its newest message came."""
    partition, other_sessions = split_off_newest(sessions)
    return SavedSession(
        partition=partition,
        values=_session_values(partition, name, sessions[partition], runner),
        other_sessions=other_sessions,
    )


def _session_values(
    partition: Partition, name: str, session: Session, runner: Runner
) -> dict[str, Any]:
    plain_state = None
    try:
        if session.state_bytes is not None:
            machine_state = runner.load(session.state_bytes, session.state_version)
            plain_state = runner.to_plain(machine_state)
    except Exception as error:
        # `upgrade` is the user's code, which may raise anything.
        raise ConfigError(
            f"{partition}: the machine {runner.name} cannot read session {name!r}: {type(error).__name__}: {error}",
            next=f"fix the machine's `upgrade`: the session was saved by version {session.state_version}",
        ) from error
    return {
        "session": name,
        "topic": partition.topic,
        "partition": partition.number,
        "offset": session.last_offset,
        "state_version": session.state_version,
        "state": plain_state,
        "status": "live" if session.finding is None else "quarantined",
        "sequence": session.sequence,
        "finding": session.finding,
    }
