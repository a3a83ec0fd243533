"""Status: how a stream is doing, from the ledger and from Kafka. Changes nothing.

Next: cli/status.py shows it; operations/stream_status.py is what pages show without asking Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.engine.files import StateStore
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Bounds, Partition
from seriatim.engine.retention import RetainedLog, is_drained
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import (
    Account,
    FailedRange,
    Halt,
    Ledger,
    circuit_advice,
    describe_failed_range,
)
from seriatim.operations.plan import retired_topics
from seriatim.operations.retention import PartitionClock, PartitionClocks, partition_clocks
from seriatim.operations.stream_status import stream_verdict
from seriatim.ports import LedgerStore, Log
from seriatim.stream import Stream


def read_status(
    stream: Stream,
    log: Log,
    store: LedgerStore,
    state: StateStore,
    now_seconds: float | None = None,
) -> dict[str, Any]:
    """The state of a stream as plain values. The keys are fixed, because people script against them.

    Without `now_seconds` nothing is said about time left, and no topic counts as drained.
    """
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds = log.bounds(stream.topics)
    clocks = {}
    if now_seconds is not None:
        clocks = partition_clocks(ledger, log, bounds, now_seconds)
    return status_values(stream, ledger, bounds, state, clocks, now_seconds or 0.0)


def status_values(
    stream: Stream,
    ledger: Ledger,
    bounds: Mapping[Partition, Bounds],
    state: StateStore,
    clocks: PartitionClocks,
    now_seconds: float,
) -> dict[str, Any]:
    """The same as `read_status`, from values that were read already."""
    retired = retired_topics(ledger)
    drained = drained_topics(stream, clocks, now_seconds)
    partitions = []
    for partition in sorted({*ledger.known_partitions(), *bounds}):
        account = ledger.account(partition)
        partition_bounds = bounds.get(partition)
        state_of_topic = topic_state(
            account,
            partition_bounds,
            retired=partition.topic in retired,
            drained=partition.topic in drained,
        )
        values = _partition_values(
            partition, account, partition_bounds, clocks.get(partition), state_of_topic
        )
        partitions.append(values)
    failed_ranges = [_failed_range_values(failed_range) for failed_range in ledger.failed_ranges]
    return {
        "stream": stream.name,
        "tier": stream.tier,
        "sequence": ledger.sequence,
        "circuit": ledger.circuit,
        "verdict": stream_verdict(ledger),
        "partitions": partitions,
        "buffers": window_buffers(stream, ledger, state),
        "snapshot_distance": _snapshot_distance(stream, ledger),
        "checked": ledger.checked,
        "failed": failed_ranges,
        "closes": circuit_advice(ledger) if ledger.failed_ranges else None,
        "quarantined": _quarantined_sessions(ledger, state),
    }


def _failed_range_values(failed_range: FailedRange) -> dict[str, Any]:
    return {
        "partition": failed_range.partition,
        "from": failed_range.start,
        "until": failed_range.until,
        "judged": failed_range.judged_until,
        "says": describe_failed_range(failed_range),
    }


def window_buffers(stream: Stream, ledger: Ledger, state: StateStore) -> list[dict[str, Any]]:
    """In tier window: the sessions with messages that wait for earlier ones."""
    if stream.tier != "window":
        return []
    buffers = []
    for partition in ledger.known_partitions():
        account = ledger.partitions[str(partition)]
        for name, session in state.all_sessions(account.state):
            if session.waiting_messages:
                buffers.append(_buffer_values(partition, name, session))
    return buffers


def _buffer_values(partition: Partition, name: str, session: Session) -> dict[str, Any]:
    messages = session.waiting_messages
    expected_sequence = None
    if session.sequence is not None:
        expected_sequence = session.sequence + 1
    return {
        "session": name,
        "topic": partition.topic,
        "partition": partition.number,
        "messages": len(messages),
        "offset": min(message.offset for message in messages),
        "since": min(message.timestamp for message in messages),
        "expects": expected_sequence,
    }


def _snapshot_distance(stream: Stream, ledger: Ledger) -> dict[str, Any]:
    """The loss bound: the most output that one lost message can have spoiled so far."""
    accounts = ledger.partitions.values()
    distance_messages = max((account.distance_messages for account in accounts), default=0)
    distance_ms = max((account.distance_ms for account in accounts), default=0)
    return {
        "messages": distance_messages,
        "seconds": distance_ms / 1000,
        "agreed_minutes": stream.alerts.snapshot_distance_max_minutes or None,
    }


def drained_topics(stream: Stream, clocks: PartitionClocks, now_seconds: float) -> set[str]:
    """Topics that are fully folded and got no message for `topic_drained_hours`."""
    logs_by_topic: dict[str, list[RetainedLog]] = {}
    for partition, clock in clocks.items():
        logs_by_topic.setdefault(partition.topic, []).append(clock.retained)
    drained = set()
    for topic, retained_logs in logs_by_topic.items():
        if is_drained(retained_logs, now_seconds, stream.topic_drained_hours):
            drained.add(topic)
    return drained


def _partition_values(
    partition: Partition,
    account: Account | None,
    bounds: Bounds | None,
    clock: PartitionClock | None,
    state_of_topic: str,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "topic": partition.topic,
        "topic_id": None,
        "partition": partition.number,
        "frontier": None,
        "log_start": None,
        "log_end": None,
        "lag": None,
        "time_left_seconds": None,
        "catches_up": None,
        "topic_state": state_of_topic,
        "epoch": 0,
        "headless": 0,
        "counts": {},
        "held": None,
        "halted": None,
    }
    if bounds is not None:
        frontier = bounds.log_start if account is None else account.frontier
        values["topic_id"] = bounds.topic_id
        values["log_start"] = bounds.log_start
        values["log_end"] = bounds.log_end
        values["lag"] = max(0, bounds.log_end - frontier)
    if clock is not None:
        values["time_left_seconds"] = clock.time_left_seconds
        values["catches_up"] = clock.will_catch_up
    if account is not None:
        values["topic_id"] = account.topic_id
        values["frontier"] = account.frontier
        values["epoch"] = account.epoch
        values["headless"] = account.headless
        values["counts"] = dict(account.counts)
        values["held"] = account.hold
        values["halted"] = _halt_values(account.halt)
    return values


def _halt_values(halt: Halt | None) -> dict[str, Any] | None:
    if halt is None:
        return None
    return {"finding": halt.finding, "offset": halt.offset, "cause": halt.cause}


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


def _quarantined_sessions(ledger: Ledger, state: StateStore) -> list[dict[str, Any]]:
    quarantined = []
    for partition in ledger.known_partitions():
        account = ledger.partitions[str(partition)]
        if not account.quarantined:
            continue
        for name, session in sorted(state.quarantined_sessions(account.state).items()):
            values = {
                "session": name,
                "topic": partition.topic,
                "partition": partition.number,
                "offset": session.finding_offset,
                "finding": session.finding,
            }
            quarantined.append(values)
    return quarantined


def session_states(
    stream: Stream,
    runner: Runner,
    ledger: Ledger,
    state: StateStore,
    name: str,
    topic: str | None = None,
) -> list[dict[str, Any]]:
    """The state of a session in every topic that has it. If several partitions of a topic have it,
    the one with its newest message counts. A session that does not exist is refused.
    """
    newest_by_topic = _newest_session_by_topic(ledger, state, name, topic)
    if not newest_by_topic:
        in_topic = f" in topic {topic}" if topic else ""
        raise ConfigError(
            f"{stream.name}: there is no session {name!r}{in_topic} at entry {ledger.sequence}",
            next=f"check the name; `seriatim status {stream.name}` shows the topics",
        )
    return [
        _session_values(partition, name, session, runner)
        for partition, session in newest_by_topic.values()
    ]


def _newest_session_by_topic(
    ledger: Ledger, state: StateStore, name: str, topic: str | None
) -> dict[str, tuple[Partition, Session]]:
    newest_by_topic: dict[str, tuple[Partition, Session]] = {}
    for partition in ledger.known_partitions():
        if topic not in (None, partition.topic):
            continue
        account = ledger.partitions[str(partition)]
        session = state.load(account.state, [name]).get(name)
        if session is None:
            continue
        newest = newest_by_topic.get(partition.topic)
        if newest is None or session.timestamp >= newest[1].timestamp:
            newest_by_topic[partition.topic] = (partition, session)
    return newest_by_topic


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
