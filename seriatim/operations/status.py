"""Status: how a stream is doing, from the ledger and from Kafka. Changes nothing.

Next room: cli/status.py shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.kafka.retention import RetainedLog, is_drained
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Account, Ledger
from seriatim.ledger.verdicts import circuit_advice
from seriatim.ledger.verdicts import describe_failed_range as says
from seriatim.operations.retention import PartitionClock, PartitionClocks, partition_clocks
from seriatim.operations.slicing import Bounds, retired_topics
from seriatim.operations.stream_status import stream_verdict
from seriatim.ports import LedgerStore, Log, StateStore
from seriatim.stream import Stream


def read_status(
    stream: Stream,
    log: Log,
    store: LedgerStore,
    state: StateStore,
    now_seconds: float | None = None,
) -> dict[str, Any]:
    """All there is to know at a glance. The shape is fixed: people script against it.

    Without a clock nothing is said of time left, and no topic is drained.
    """
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds = log.bounds(stream.topics)
    clocked = {} if now_seconds is None else partition_clocks(ledger, log, bounds, now_seconds)
    return status_values(stream, ledger, bounds, state, clocked, now_seconds or 0.0)


def status_values(
    stream: Stream,
    ledger: Ledger,
    bounds: Mapping[Partition, Bounds],
    state: StateStore,
    clocks: PartitionClocks,
    now_seconds: float,
) -> dict[str, Any]:
    """The same, of what was read already."""
    places = sorted({*ledger.known_partitions(), *bounds})
    over, drained = retired_topics(ledger), drained_topics(stream, clocks, now_seconds)
    lives = {
        place: topic_state(
            ledger.account(place),
            bounds.get(place),
            retired=place.topic in over,
            drained=place.topic in drained,
        )
        for place in places
    }
    return {
        "stream": stream.name,
        "tier": stream.tier,
        "sequence": ledger.sequence,
        "circuit": ledger.circuit,
        "verdict": stream_verdict(ledger),
        "partitions": [
            _partition_values(
                place, ledger.account(place), bounds.get(place), clocks.get(place), lives[place]
            )
            for place in places
        ],
        "buffers": window_buffers(stream, ledger, state),
        "snapshot_distance": _snapshot_distance(stream, ledger),
        "checked": ledger.checked,
        "failed": [
            {
                "partition": one.partition,
                "from": one.start,
                "until": one.until,
                "judged": one.judged_until,
                "says": says(one),
            }
            for one in ledger.failed_ranges
        ],
        "closes": circuit_advice(ledger) if ledger.failed_ranges else None,
        "quarantined": list(_quarantined_sessions(ledger, state)),
    }


def window_buffers(stream: Stream, ledger: Ledger, state: StateStore) -> list[dict[str, Any]]:
    """Tier window: sessions with messages that wait for those before them."""
    if stream.tier != "window":
        return []
    held = []
    for place in ledger.known_partitions():
        account = ledger.account(place)
        for name, session in state.all_sessions(account.state if account else ()):
            if session.waiting_messages:
                held.append(
                    {
                        "session": name,
                        "topic": place.topic,
                        "partition": place.number,
                        "messages": len(session.waiting_messages),
                        "offset": min(one.offset for one in session.waiting_messages),
                        "since": min(one.timestamp for one in session.waiting_messages),
                        "expects": None if session.sequence is None else session.sequence + 1,
                    }
                )
    return held


def _snapshot_distance(stream: Stream, ledger: Ledger) -> dict[str, Any]:
    """The loss bound: the most that one lost message can have spoiled, so far."""
    accounts = ledger.partitions.values()
    agreed = stream.alerts.snapshot_distance_max_minutes
    return {
        "messages": max((account.distance_messages for account in accounts), default=0),
        "seconds": max((account.distance_ms for account in accounts), default=0) / 1000,
        "agreed_minutes": agreed or None,
    }


def drained_topics(stream: Stream, clocks: PartitionClocks, now_seconds: float) -> set[str]:
    """Topics that are fully folded and silent for `topic_drained_hours`."""
    topics: dict[str, list[RetainedLog]] = {}
    for place, one in clocks.items():
        topics.setdefault(place.topic, []).append(one.retained)
    return {
        topic
        for topic, held in topics.items()
        if is_drained(held, now_seconds, stream.topic_drained_hours)
    }


def _partition_values(
    partition: Partition,
    account: Account | None,
    bounds: Bounds | None,
    clock: PartitionClock | None,
    state_of_topic: str,
) -> dict[str, Any]:
    frontier = account.frontier if account else None
    halt = account.halt if account else None
    return {
        "topic": partition.topic,
        "topic_id": account.topic_id if account else bounds.topic_id if bounds else None,
        "partition": partition.number,
        "frontier": frontier,
        "log_start": bounds.log_start if bounds else None,
        "log_end": bounds.log_end if bounds else None,
        "lag": max(0, bounds.log_end - (bounds.log_start if frontier is None else frontier))
        if bounds
        else None,
        "time_left_seconds": clock.time_left_seconds if clock else None,
        "catches_up": clock.will_catch_up if clock else None,
        "topic_state": state_of_topic,
        "epoch": account.epoch if account else 0,
        "headless": account.headless if account else 0,
        "counts": dict(account.counts) if account else {},
        "held": account.hold if account else None,
        "halted": None
        if halt is None
        else {"finding": halt.finding, "offset": halt.offset, "cause": halt.cause},
    }


def topic_state(
    account: Account | None, bounds: Bounds | None, *, retired: bool = False, drained: bool = False
) -> str:
    """A topic's life: live, drained, retired, absent (gone with messages that were never read) or
    re-created.

    Gone with everything read is retired, as is what a person retired.
    """
    if retired or (account is not None and account.retired):
        return "retired"
    if bounds is None:
        unread = account is None or account.halt is not None or account.frontier < account.log_end
        return "absent" if unread else "retired"
    if account is not None and account.topic_id != bounds.topic_id:
        return "re-created"
    return "drained" if drained else "live"


def _quarantined_sessions(ledger: Ledger, state: StateStore) -> list[dict[str, Any]]:
    found = []
    for place in ledger.known_partitions():
        account = ledger.account(place)
        if account is not None and account.quarantined:
            for name, session in sorted(state.quarantined_sessions(account.state).items()):
                found.append(
                    {
                        "session": name,
                        "topic": place.topic,
                        "partition": place.number,
                        "offset": session.finding_offset,
                        "finding": session.finding,
                    }
                )
    return found


def session_states(
    stream: Stream,
    runner: Runner,
    ledger: Ledger,
    state: StateStore,
    name: str,
    topic: str | None = None,
) -> list[dict[str, Any]]:
    """A session's state wherever it lives: one answer per topic, where it was last touched."""
    found: list[tuple[Partition, Mapping[str, Session]]] = []
    for place in ledger.known_partitions():
        account = ledger.account(place)
        if account is not None and (topic is None or place.topic == topic):
            sessions = state.load(account.state, [name])
            if name in sessions:
                found.append((place, sessions))
    if not found:
        where = f" in topic {topic}" if topic else ""
        raise ConfigError(
            f"{stream.name}: there is no session {name!r}{where} at entry {ledger.sequence}",
            next=f"check the name; `seriatim status {stream.name}` shows the topics",
        )
    newest: dict[str, tuple[Partition, Session]] = {}
    for place, holding in found:
        session = holding[name]
        if place.topic not in newest or session.timestamp >= newest[place.topic][1].timestamp:
            newest[place.topic] = (place, session)
    return [_session_values(place, name, session, runner) for place, session in newest.values()]


def _session_values(
    partition: Partition, name: str, session: Session, runner: Runner
) -> dict[str, Any]:
    try:
        decoded = (
            None
            if session.state_bytes is None
            else runner.to_plain(runner.load(session.state_bytes, session.state_version))
        )
    except Exception as error:  # the user's own `upgrade`
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
        "state": decoded,
        "status": "live" if session.finding is None else "quarantined",
        "sequence": session.sequence,
        "finding": session.finding,
    }
