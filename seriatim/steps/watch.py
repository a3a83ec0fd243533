"""Watch: what of a stream needs a person now, and what that person types. Changes nothing.

Lag, time left, halts, holds, quarantine, buffers nobody drains, and runs that do not come: a stream whose
messages wait for longer than `alerts.late_run_minutes` while no entry was made. An idle stream is not late.

Next room: cli/watch.py shows it again and again; retention.py is the clock.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from seriatim.core.alert import Concern
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Ledger
from seriatim.core.retention import duration
from seriatim.core.stream import Stream
from seriatim.ports import Clock, LedgerStore, Log, StateStore
from seriatim.steps.commit import read_head
from seriatim.steps.retention import Clocks, clocks, warnings
from seriatim.steps.status import shown


class Look(Struct, frozen=True, kw_only=True):
    """One look at one stream."""

    stream: str
    at_seconds: float
    verdict: str
    partitions: int
    lag: int
    time_left_seconds: int | None
    """The least of all partitions; None: nothing waits that Kafka would drop."""
    nearest: str | None
    """Whose that is."""
    catches_up: bool | None
    quarantined: int
    time_left_by_partition: dict[str, int] = {}
    concerns: list[Concern] = field(default_factory=list)


class Gathered(Struct, frozen=True, kw_only=True):
    """All that one look takes from Kafka and the ledger."""

    ledger: Ledger
    clocked: Clocks
    at_seconds: float
    found: dict[str, Any]
    """As status has it."""


def gather(stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock) -> Gathered:
    """Ask Kafka and the ledger, once."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds, now = log.bounds(stream.topics), clock.now_seconds()
    clocked = clocks(ledger, log, bounds, now)
    found = shown(stream, ledger, bounds, state, clocked, now)
    return Gathered(ledger=ledger, clocked=clocked, at_seconds=now, found=found)


def look(stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock) -> Look:
    """Look once."""
    return judge(stream, gather(stream, log, store, state, clock))


def judge(stream: Stream, seen: Gathered) -> Look:
    """What a look means for people."""
    ledger, clocked, now, found = seen.ledger, seen.clocked, seen.at_seconds, seen.found
    left = {place: one.seconds for place, one in clocked.items() if one.seconds is not None}
    nearest = min(left, key=lambda place: (left[place], place), default=None)
    lags = {place: one.held.lag for place, one in clocked.items()}
    behind = [one.catches_up for place, one in clocked.items() if lags[place]]
    return Look(
        stream=stream.name,
        at_seconds=now,
        verdict=found["verdict"],
        partitions=len(found["partitions"]),
        lag=sum(lags.values()),
        time_left_seconds=left[nearest] if nearest else None,
        nearest=str(nearest) if nearest else None,
        catches_up=False if False in behind else None if None in behind else True,
        quarantined=len(found["quarantined"]),
        time_left_by_partition={str(place): seconds for place, seconds in left.items()},
        concerns=[
            *(_running_out(finding, stream.name) for finding in warnings(stream, ledger, clocked)),
            *_waiting(found),
            *_silent(stream, found["buffers"], now),
            *_late(stream, ledger, clocked, now),
            *_blind(clocked),
        ],
    )


def _running_out(finding: Finding, stream: str) -> Concern:
    text = f"{finding.found}. {finding.cause}"
    return Concern(concern="time left", place=finding.place, text=text, next=finding.next(stream))


def _waiting(found: dict[str, Any]) -> list[Concern]:
    """What waits for a person, as status has it."""
    name = found["stream"]
    shows = f"seriatim status {name}"
    concerns = []
    for part in found["partitions"]:
        place, halt = f"{part['topic']}/{part['partition']}", part["halted"]
        if halt is not None and part["topic_state"] != "retired":
            text = f"halted at offset {halt['offset']}: {halt['finding']}, {halt['cause']}"
            concerns.append(Concern(concern="halted", place=place, text=text, next=shows))
        if part["held"]:
            concerns.append(Concern(concern="held", place=place, text=f"held by {part['held']}", next=shows))
    if found["quarantined"]:
        first = found["quarantined"][0]
        text = f"{len(found['quarantined'])} in quarantine, first {first['session']} ({first['finding']})"
        concerns.append(Concern(concern="quarantine", text=text, next=f"{shows} lists them"))
    if found["circuit"] == "open":
        failed = "; ".join(one["says"] for one in found["failed"][:3])
        text = f"the circuit is open, publishing waits: a check failed: {failed}"
        concerns.append(Concern(concern="circuit", text=text, next=found["closes"]))
    return concerns


def _silent(stream: Stream, buffers: list[dict[str, Any]], now_seconds: float) -> list[Concern]:
    """Window buffers that nothing drains: only the session's own messages do, and none came for too long."""
    patience = stream.window_seconds + stream.alerts.late_run_minutes * 60
    silent = sorted((one for one in buffers if now_seconds - one["since"] / 1000 > patience), key=lambda b: b["since"])
    if not silent:
        return []
    first = silent[0]
    waited = duration(now_seconds - first["since"] / 1000)
    text = f"messages of {len(silent)} sessions wait for earlier ones, longest {first['session']}: {waited}"
    ask = f"ask its producer for sequence {first['expects']}, or any newer message: only those release what waits"
    return [Concern(concern="buffer", place=f"{first['topic']}/{first['partition']}", text=text, next=ask)]


def _late(stream: Stream, ledger: Ledger, clocked: Clocks, now_seconds: float) -> list[Concern]:
    """Messages wait that a run could fold, and none did for too long. One line for the whole stream."""
    accounts = {place: ledger.account(place) for place in clocked}
    readable = [p for p, account in accounts.items() if not (account and (account.halt or account.hold))]
    behind = [clocked[place].held for place in readable if clocked[place].held.lag]
    since = [max(ledger.pace.at_seconds, (held.frontier_ms or 0) / 1000) for held in behind]
    late = now_seconds - min(since, default=now_seconds)
    if late < stream.alerts.late_run_minutes * 60 or not any(since):
        return []
    last = f"since entry {ledger.sequence}" if ledger.sequence >= 0 else "and it was never run"
    text = f"{sum(held.lag for held in behind)} messages wait, no run for {duration(late)} {last}"
    return [Concern(concern="late", text=text, next=f"seriatim run {stream.name}, and ask why its schedule did not")]


def _blind(clocked: Clocks) -> list[Concern]:
    """Topics whose settings we may not read: their time left is not known."""
    topics = sorted({place.topic for place, one in clocked.items() if not one.held.rules.known})
    text = "its retention cannot be read, so its time left is not known"
    return [
        Concern(concern="blind", place=topic, text=text, next="give this client the right DescribeConfigs on the topic")
        for topic in topics
    ]
