"""Watch: what of a stream needs a person now, and what that person types. Changes nothing.

Lag, time left, halts, holds, quarantine, buffers nobody drains, and runs that do not come: a stream
whose messages wait for longer than `alerts.late_run_minutes` while no entry was made. An idle
stream is not late.

Next room: cli/watch.py shows it again and again; retention.py is the clock.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from seriatim.alerts.incidents import Concern
from seriatim.engine.findings import Finding
from seriatim.kafka.retention import format_duration
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import PartitionClocks, partition_clocks, time_left_warnings
from seriatim.operations.status import status_values
from seriatim.ports import Clock, LedgerStore, Log, StateStore
from seriatim.stream import Stream


class WatchResult(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"nearest_partition": "nearest", "will_catch_up": "catches_up"},
):
    """One look at one stream."""

    stream: str
    at_seconds: float
    verdict: str
    partitions: int
    lag: int
    time_left_seconds: int | None
    """The least of all partitions; None: nothing waits that Kafka would drop."""
    nearest_partition: str | None
    """Whose that is."""
    will_catch_up: bool | None
    quarantined: int
    time_left_by_partition: dict[str, int] = {}
    concerns: list[Concern] = field(default_factory=list)


class WatchInput(Struct, frozen=True, kw_only=True):
    """All that one look takes from Kafka and the ledger."""

    ledger: Ledger
    clocks: PartitionClocks
    at_seconds: float
    status_values: dict[str, Any]
    """As status has it."""


def read_watch_input(
    stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> WatchInput:
    """Ask Kafka and the ledger, once."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds, now = log.bounds(stream.topics), clock.now_seconds()
    clocked = partition_clocks(ledger, log, bounds, now)
    found = status_values(stream, ledger, bounds, state, clocked, now)
    return WatchInput(ledger=ledger, clocks=clocked, at_seconds=now, status_values=found)


def watch_stream(
    stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> WatchResult:
    """Look once."""
    return assess_watch_input(stream, read_watch_input(stream, log, store, state, clock))


def assess_watch_input(stream: Stream, watch_input: WatchInput) -> WatchResult:
    """What a look means for people."""
    ledger, clocked, now, found = (
        watch_input.ledger,
        watch_input.clocks,
        watch_input.at_seconds,
        watch_input.status_values,
    )
    left = {
        place: one.time_left_seconds
        for place, one in clocked.items()
        if one.time_left_seconds is not None
    }
    nearest = min(left, key=lambda place: (left[place], place), default=None)
    lags = {place: one.retained.lag for place, one in clocked.items()}
    behind = [one.will_catch_up for place, one in clocked.items() if lags[place]]
    return WatchResult(
        stream=stream.name,
        at_seconds=now,
        verdict=found["verdict"],
        partitions=len(found["partitions"]),
        lag=sum(lags.values()),
        time_left_seconds=left[nearest] if nearest else None,
        nearest_partition=str(nearest) if nearest else None,
        will_catch_up=False if False in behind else None if None in behind else True,
        quarantined=len(found["quarantined"]),
        time_left_by_partition={str(place): seconds for place, seconds in left.items()},
        concerns=[
            *(
                _time_left_concern(finding, stream.name)
                for finding in time_left_warnings(stream, ledger, clocked)
            ),
            *_status_concerns(found),
            *_buffer_concerns(stream, found["buffers"], now),
            *_late_run_concerns(stream, ledger, clocked, now),
            *_unknown_retention_concerns(clocked),
        ],
    )


def _time_left_concern(finding: Finding, stream: str) -> Concern:
    text = f"{finding.found}. {finding.cause}"
    return Concern(
        kind="time left", location=finding.partition_name, text=text, next=finding.advice(stream)
    )


def _status_concerns(values: dict[str, Any]) -> list[Concern]:
    """What waits for a person, as status has it."""
    name = values["stream"]
    shows = f"seriatim status {name}"
    concerns = []
    for part in values["partitions"]:
        place, halt = f"{part['topic']}/{part['partition']}", part["halted"]
        if halt is not None and part["topic_state"] != "retired":
            text = f"halted at offset {halt['offset']}: {halt['finding']}, {halt['cause']}"
            concerns.append(Concern(kind="halted", location=place, text=text, next=shows))
        if part["held"]:
            concerns.append(
                Concern(kind="held", location=place, text=f"held by {part['held']}", next=shows)
            )
    if values["quarantined"]:
        first = values["quarantined"][0]
        text = f"{len(values['quarantined'])} in quarantine, first {first['session']} ({first['finding']})"
        concerns.append(Concern(kind="quarantine", text=text, next=f"{shows} lists them"))
    if values["circuit"] == "open":
        failed = "; ".join(one["says"] for one in values["failed"][:3])
        text = f"the circuit is open, publishing waits: a check failed: {failed}"
        concerns.append(Concern(kind="circuit", text=text, next=values["closes"]))
    return concerns


def _buffer_concerns(
    stream: Stream, buffers: list[dict[str, Any]], now_seconds: float
) -> list[Concern]:
    """Window buffers that nothing drains: only the session's own messages do, and none came for too
    long.
    """
    patience = stream.window_seconds + stream.alerts.late_run_minutes * 60
    silent = sorted(
        (one for one in buffers if now_seconds - one["since"] / 1000 > patience),
        key=lambda b: b["since"],
    )
    if not silent:
        return []
    first = silent[0]
    waited = format_duration(now_seconds - first["since"] / 1000)
    text = f"messages of {len(silent)} sessions wait for earlier ones, longest {first['session']}: {waited}"
    ask = f"ask its producer for sequence {first['expects']}, or any newer message: only those release what waits"
    return [
        Concern(
            kind="buffer", location=f"{first['topic']}/{first['partition']}", text=text, next=ask
        )
    ]


def _late_run_concerns(
    stream: Stream, ledger: Ledger, clocks: PartitionClocks, now_seconds: float
) -> list[Concern]:
    """Messages wait that a run could fold, and none did for too long. One line for the whole
    stream.
    """
    accounts = {place: ledger.account(place) for place in clocks}
    readable = [
        p for p, account in accounts.items() if not (account and (account.halt or account.hold))
    ]
    behind = [clocks[place].retained for place in readable if clocks[place].retained.lag]
    since = [max(ledger.pace.at_seconds, (held.frontier_ms or 0) / 1000) for held in behind]
    late = now_seconds - min(since, default=now_seconds)
    if late < stream.alerts.late_run_minutes * 60 or not any(since):
        return []
    last = f"since entry {ledger.sequence}" if ledger.sequence >= 0 else "and it was never run"
    text = f"{sum(held.lag for held in behind)} messages wait, no run for {format_duration(late)} {last}"
    return [
        Concern(
            kind="late",
            text=text,
            next=f"seriatim run {stream.name}, and ask why its schedule did not",
        )
    ]


def _unknown_retention_concerns(clocks: PartitionClocks) -> list[Concern]:
    """Topics whose settings we may not read: their time left is not known."""
    topics = sorted(
        {place.topic for place, one in clocks.items() if not one.retained.rules.is_known}
    )
    text = "its retention cannot be read, so its time left is not known"
    return [
        Concern(
            kind="blind",
            location=topic,
            text=text,
            next="give this client the right DescribeConfigs on the topic",
        )
        for topic in topics
    ]
