"""Watch: what needs a person in a stream now, and which command that person types. Changes nothing.

It looks at lag, time left, halts, holds, quarantine, window buffers that nothing drains, and late
runs. A run is late if messages wait for longer than `alerts.late_run_minutes` while no entry was
committed. An idle stream is not late.

Next: cli/watch.py repeats it; operations/retention.py computes the time left.
"""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.engine.files import StateStore
from seriatim.engine.findings import Concern, count_of, format_duration
from seriatim.errors import SeriatimError
from seriatim.ledger.manifests import LedgerHead
from seriatim.operations.followers import count_open_gaps
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.retention import PartitionClocks, time_left_warnings
from seriatim.operations.status import (
    StreamReading,
    StreamStatus,
    build_status,
    circuit_concerns,
    halt_concerns,
    hold_concerns,
    quarantine_concerns,
    read_stream,
)
from seriatim.ports import Clock, DerivedStore, LedgerStore, Log
from seriatim.stream import Stream


def watch_stream(
    stream: Stream,
    log: Log,
    store: LedgerStore,
    state: StateStore,
    clock: Clock,
    derived: DerivedStore | None = None,
    head: LedgerHead | None = None,
    search: MissingMessageSearch | None = None,
    previous: StreamStatus | None = None,
) -> StreamStatus:
    """Look at a stream once: its status, with everything that needs a person. Open gaps are counted
    if the tables that have them are given. `head` is the ledger, if it was just read. With `search`,
    messages that sessions wait for are looked for in Kafka, from where the look `previous` ended.
    """
    reading = read_stream(stream, log, store, clock, head)
    status = build_status(stream, state, reading, search, previous)
    gaps_open = None
    if derived is not None:
        gaps_open = _count_open_gaps(store, derived, reading)
    return replace(status, gaps_open=gaps_open, concerns=_all_concerns(stream, reading, status))


def _count_open_gaps(
    store: LedgerStore, derived: DerivedStore, reading: StreamReading
) -> int | None:
    """How many ranges of the output are not to be trusted; None: the table cannot be read."""
    if reading.ledger.sequence < 0:
        return 0
    try:
        return count_open_gaps(store, derived, reading.ledger)
    except (OSError, SeriatimError):
        # A run or `seriatim rebuild` repairs the table. The rest of the status is still right.
        return None


def _all_concerns(stream: Stream, reading: StreamReading, status: StreamStatus) -> list[Concern]:
    return [
        *_time_left_concerns(stream, reading),
        *halt_concerns(status.stream, status.partitions),
        *hold_concerns(status),
        *quarantine_concerns(status),
        *circuit_concerns(status),
        *_buffer_concerns(stream, status, reading.at_seconds),
        *_late_run_concerns(stream, reading),
        *_unknown_retention_concerns(reading.clocks),
    ]


def _time_left_concerns(stream: Stream, reading: StreamReading) -> list[Concern]:
    return [
        Concern(
            kind="time left",
            location=finding.partition_name,
            text=f"{finding.found}. {finding.cause}",
            next=finding.advice(stream.name),
        )
        for finding in time_left_warnings(stream, reading.ledger, reading.clocks)
    ]


def _buffer_concerns(stream: Stream, status: StreamStatus, now_seconds: float) -> list[Concern]:
    """Window buffers that nothing drains. Only messages of the session itself drain its buffer, and
    none came for too long. At most one concern for the stream.
    """
    patience_seconds = stream.window_seconds + stream.alerts.late_run_minutes * 60
    silent = [
        buffer
        for buffer in status.buffers
        if now_seconds - buffer.since_ms / 1000 > patience_seconds
    ]
    if not silent:
        return []
    oldest = min(silent, key=lambda buffer: buffer.since_ms)
    waited = format_duration(now_seconds - oldest.since_ms / 1000)
    awaited_message = f"sequence {oldest.expected_sequence}, or any newer message of this session"
    sessions = count_of(len(silent), "session")
    concern = Concern(
        kind="buffer",
        location=f"{oldest.topic}/{oldest.partition}",
        text=f"messages of {sessions} wait for earlier ones, longest {oldest.session}: {waited}",
        next=f"ask its producer for {awaited_message}: only those release what waits",
    )
    return [concern]


def _late_run_concerns(stream: Stream, reading: StreamReading) -> list[Concern]:
    """Messages wait that a run could fold, and no run did for too long. At most one concern for the
    stream.
    """
    ledger = reading.ledger
    waiting_messages = 0
    waiting_since = []
    for partition, clock in reading.clocks.items():
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
    late_seconds = reading.at_seconds - min(waiting_since)
    if late_seconds < stream.alerts.late_run_minutes * 60:
        return []
    since = "and it was never run"
    if ledger.sequence >= 0:
        since = f"since entry {ledger.sequence}"
    messages = count_of(waiting_messages, "message")
    concern = Concern(
        kind="late",
        text=f"{messages} not folded yet, no run for {format_duration(late_seconds)} {since}",
        next=f"seriatim run {stream.name}, and ask why its schedule did not",
    )
    return [concern]


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
