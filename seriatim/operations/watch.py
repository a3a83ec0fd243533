"""Watch: what needs a person in a stream now, and which command that person types. Changes nothing.

It looks at lag, time left, halts, holds, quarantine, window buffers that nothing drains, and late
runs. A run is late if messages wait for longer than `alerts.late_run_minutes` while no entry was
committed. An idle stream is not late.

Next: cli/watch.py repeats it; operations/retention.py computes the time left.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from seriatim.engine.files import StateStore
from seriatim.engine.findings import Concern, Finding, format_duration
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import PartitionClocks, partition_clocks, time_left_warnings
from seriatim.operations.status import status_values
from seriatim.ports import Clock, LedgerStore, Log
from seriatim.stream import Stream


class WatchResult(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"nearest_partition": "nearest", "will_catch_up": "catches_up"},
):
    """What one look at a stream found."""

    stream: str
    at_seconds: float
    verdict: str
    partitions: int
    lag: int
    time_left_seconds: int | None
    """The least of all partitions; None if nothing waits that Kafka would delete."""
    nearest_partition: str | None
    """The partition with the least time left."""
    will_catch_up: bool | None
    quarantined: int
    time_left_by_partition: dict[str, int] = {}
    concerns: list[Concern] = field(default_factory=list)


class WatchInput(Struct, frozen=True, kw_only=True):
    """Everything that one look reads from Kafka and the ledger."""

    ledger: Ledger
    clocks: PartitionClocks
    at_seconds: float
    status_values: dict[str, Any]
    """What operations/status.py shows of the stream."""


def read_watch_input(
    stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> WatchInput:
    """Ask Kafka and the ledger once."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    bounds = log.bounds(stream.topics)
    now_seconds = clock.now_seconds()
    clocks = partition_clocks(ledger, log, bounds, now_seconds)
    values = status_values(stream, ledger, bounds, state, clocks, now_seconds)
    return WatchInput(ledger=ledger, clocks=clocks, at_seconds=now_seconds, status_values=values)


def watch_stream(
    stream: Stream, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> WatchResult:
    """Look at a stream once."""
    watch_input = read_watch_input(stream, log, store, state, clock)
    return assess_watch_input(stream, watch_input)


def assess_watch_input(stream: Stream, watch_input: WatchInput) -> WatchResult:
    """Judge what was read: figures for the overview, and everything that needs a person."""
    clocks = watch_input.clocks
    values = watch_input.status_values
    seconds_by_partition = {}
    for partition, clock in clocks.items():
        if clock.time_left_seconds is not None:
            seconds_by_partition[partition] = clock.time_left_seconds
    time_left_seconds = None
    nearest_partition = None
    if seconds_by_partition:
        time_left_seconds, nearest = min(
            (seconds, partition) for partition, seconds in seconds_by_partition.items()
        )
        nearest_partition = str(nearest)
    return WatchResult(
        stream=stream.name,
        at_seconds=watch_input.at_seconds,
        verdict=values["verdict"],
        partitions=len(values["partitions"]),
        lag=sum(clock.retained.lag for clock in clocks.values()),
        time_left_seconds=time_left_seconds,
        nearest_partition=nearest_partition,
        will_catch_up=_will_stream_catch_up(clocks),
        quarantined=len(values["quarantined"]),
        time_left_by_partition={
            str(partition): seconds for partition, seconds in seconds_by_partition.items()
        },
        concerns=_all_concerns(stream, watch_input),
    )


def _will_stream_catch_up(clocks: PartitionClocks) -> bool | None:
    """Whether a run that starts now reads all partitions in time; None if that is not known."""
    answers = {clock.will_catch_up for clock in clocks.values() if clock.retained.lag}
    if False in answers:
        return False
    if None in answers:
        return None
    return True


def _all_concerns(stream: Stream, watch_input: WatchInput) -> list[Concern]:
    ledger = watch_input.ledger
    clocks = watch_input.clocks
    values = watch_input.status_values
    now_seconds = watch_input.at_seconds
    warnings = time_left_warnings(stream, ledger, clocks)
    concerns = [_time_left_concern(finding, stream.name) for finding in warnings]
    concerns += _status_concerns(values)
    concerns += _buffer_concerns(stream, values["buffers"], now_seconds)
    concerns += _late_run_concerns(stream, ledger, clocks, now_seconds)
    concerns += _unknown_retention_concerns(clocks)
    return concerns


def _time_left_concern(finding: Finding, stream: str) -> Concern:
    text = f"{finding.found}. {finding.cause}"
    return Concern(
        kind="time left", location=finding.partition_name, text=text, next=finding.advice(stream)
    )


def _status_concerns(values: dict[str, Any]) -> list[Concern]:
    """Halts, holds, quarantine and an open circuit."""
    show_status = f"seriatim status {values['stream']}"
    concerns = []
    for partition in values["partitions"]:
        concerns += _partition_concerns(partition, show_status)
    sessions = values["quarantined"]
    if sessions:
        example = f"{sessions[0]['session']} ({sessions[0]['finding']})"
        text = f"{len(sessions)} in quarantine, first {example}"
        concerns.append(Concern(kind="quarantine", text=text, next=f"{show_status} lists them"))
    if values["circuit"] == "open":
        failures = "; ".join(failed_range["says"] for failed_range in values["failed"][:3])
        text = f"the circuit is open, publishing waits: a check failed: {failures}"
        concerns.append(Concern(kind="circuit", text=text, next=values["closes"]))
    return concerns


def _partition_concerns(partition: dict[str, Any], show_status: str) -> list[Concern]:
    """The halt and the hold of one partition."""
    location = f"{partition['topic']}/{partition['partition']}"
    halt = partition["halted"]
    hold = partition["held"]
    concerns = []
    if halt is not None and partition["topic_state"] != "retired":
        text = f"halted at offset {halt['offset']}: {halt['finding']}, {halt['cause']}"
        concerns.append(Concern(kind="halted", location=location, text=text, next=show_status))
    if hold:
        text = f"held by {hold}"
        concerns.append(Concern(kind="held", location=location, text=text, next=show_status))
    return concerns


def _buffer_concerns(
    stream: Stream, buffers: list[dict[str, Any]], now_seconds: float
) -> list[Concern]:
    """Window buffers that nothing drains. Only messages of the session itself drain its buffer, and
    none came for too long. At most one concern for the stream.
    """
    patience_seconds = stream.window_seconds + stream.alerts.late_run_minutes * 60
    silent = []
    for buffer in buffers:
        waiting_seconds = now_seconds - buffer["since"] / 1000
        if waiting_seconds > patience_seconds:
            silent.append(buffer)
    if not silent:
        return []
    oldest = min(silent, key=lambda buffer: buffer["since"])
    waited = format_duration(now_seconds - oldest["since"] / 1000)
    concern = Concern(
        kind="buffer",
        location=f"{oldest['topic']}/{oldest['partition']}",
        text=f"messages of {len(silent)} sessions wait for earlier ones, longest {oldest['session']}: {waited}",
        next=f"ask its producer for sequence {oldest['expects']}, or any newer message: only those release what waits",
    )
    return [concern]


def _late_run_concerns(
    stream: Stream, ledger: Ledger, clocks: PartitionClocks, now_seconds: float
) -> list[Concern]:
    """Messages wait that a run could fold, and no run did for too long. At most one concern for the
    stream.
    """
    waiting_messages = 0
    waiting_since = []
    for partition, clock in clocks.items():
        account = ledger.account(partition)
        retained = clock.retained
        if account is not None and (account.halt or account.hold):
            continue
        if retained.lag:
            waiting_messages += retained.lag
            # Nothing is late before the message came, nor within the patience after an entry.
            oldest_seconds = (retained.frontier_ms or 0) / 1000
            waiting_since.append(max(ledger.pace.at_seconds, oldest_seconds))
    if not any(waiting_since):
        # Nothing waits, or neither Kafka nor the ledger says since when.
        return []
    late_seconds = now_seconds - min(waiting_since)
    if late_seconds < stream.alerts.late_run_minutes * 60:
        return []
    return [_late_run_concern(stream.name, ledger.sequence, waiting_messages, late_seconds)]


def _late_run_concern(
    stream: str, sequence: int, waiting_messages: int, late_seconds: float
) -> Concern:
    since = "and it was never run"
    if sequence >= 0:
        since = f"since entry {sequence}"
    duration = format_duration(late_seconds)
    return Concern(
        kind="late",
        text=f"{waiting_messages} messages wait, no run for {duration} {since}",
        next=f"seriatim run {stream}, and ask why its schedule did not",
    )


def _unknown_retention_concerns(clocks: PartitionClocks) -> list[Concern]:
    """Topics whose settings this client may not read, so that their time left is not known."""
    topics = set()
    for partition, clock in clocks.items():
        if not clock.retained.rules.is_known:
            topics.add(partition.topic)
    concerns = []
    for topic in sorted(topics):
        concern = Concern(
            kind="blind",
            location=topic,
            text="its retention cannot be read, so its time left is not known",
            next="give this client the right DescribeConfigs on the topic",
        )
        concerns.append(concern)
    return concerns
