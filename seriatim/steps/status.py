"""Status: how a stream is doing, from the ledger and from Kafka. Changes nothing.

Next room: cli/look.py shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.core.errors import ConfigError
from seriatim.core.ledger import Account, Ledger
from seriatim.core.machine import Runner
from seriatim.core.offsets import Partition
from seriatim.core.session import Session
from seriatim.core.slice import Bounds
from seriatim.core.stream import Stream
from seriatim.ports import LedgerStore, Log, StateStore
from seriatim.steps.commit import read_head


def status(stream: Stream, log: Log, store: LedgerStore, state: StateStore) -> dict[str, Any]:
    """All there is to know at a glance. The shape is fixed: people script against it."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds = log.bounds(stream.topics)
    places = sorted({*ledger.known(), *bounds})
    return {
        "stream": stream.name,
        "tier": stream.tier,
        "sequence": ledger.sequence,
        "circuit": ledger.circuit,
        "verdict": _verdict(ledger),
        "partitions": [_partition(place, ledger.account(place), bounds.get(place)) for place in places],
        "buffers": [],
        "snapshot_distance": None,
        "checked": ledger.checked,
        "quarantined": list(_quarantined(ledger, state)),
    }


def _verdict(ledger: Ledger) -> str:
    """One word for the whole stream: good, hurt (something waits), or new (never run)."""
    if ledger.sequence < 0:
        return "new"
    hurt = any(account.halt or account.quarantined for account in ledger.partitions.values())
    return "hurt" if hurt else "good"


def _partition(place: Partition, account: Account | None, seen: Bounds | None) -> dict[str, Any]:
    frontier = account.frontier if account else None
    halt = account.halt if account else None
    return {
        "topic": place.topic,
        "topic_id": account.topic_id if account else seen.topic_id if seen else None,
        "partition": place.number,
        "frontier": frontier,
        "log_start": seen.log_start if seen else None,
        "log_end": seen.log_end if seen else None,
        "lag": max(0, seen.log_end - (seen.log_start if frontier is None else frontier)) if seen else None,
        "time_left_seconds": None,
        "topic_state": _topic_state(account, seen),
        "epoch": account.epoch if account else 0,
        "headless": account.headless if account else 0,
        "held": account.hold if account else None,
        "halted": None if halt is None else {"finding": halt.finding, "offset": halt.offset, "cause": halt.cause},
    }


def _topic_state(account: Account | None, seen: Bounds | None) -> str:
    if seen is None or (account is not None and account.retired):
        return "retired"
    if account is not None and account.topic_id != seen.topic_id:
        return "re-created"
    return "live"


def _quarantined(ledger: Ledger, state: StateStore) -> list[dict[str, Any]]:
    found = []
    for place in ledger.known():
        account = ledger.account(place)
        if account is not None and account.quarantined:
            for name, session in sorted(state.quarantined(account.state).items()):
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


def session_state(
    stream: Stream, runner: Runner, ledger: Ledger, state: StateStore, name: str, topic: str | None = None
) -> list[dict[str, Any]]:
    """A session's state wherever it lives: one answer per topic, where it was last touched."""
    found: list[tuple[Partition, Mapping[str, Session]]] = []
    for place in ledger.known():
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
    return [_told(place, name, session, runner) for place, session in newest.values()]


def _told(place: Partition, name: str, session: Session, runner: Runner) -> dict[str, Any]:
    decoded = None if session.saved is None else runner.show(runner.load(session.saved, session.version))
    return {
        "session": name,
        "topic": place.topic,
        "partition": place.number,
        "offset": session.last_offset,
        "state_version": session.version,
        "state": decoded,
        "status": "live" if session.finding is None else "quarantined",
        "sequence": session.sequence,
        "finding": session.finding,
    }
