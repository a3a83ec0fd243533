"""Retention: the clock of each partition, from Kafka and the ledger. It warns, it never decides.

A warning is a fact of the moment, not of the data: it is told by every run and every look while it
holds, and no entry carries it.

Next room: kafka/retention.py has the arithmetic; status.py and watch.py show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.kafka.retention import (
    HOUR_SECONDS,
    SHORT_RETENTION_HOURS,
    RetainedLog,
    RetentionLimit,
    TimeLeft,
    catch_up_seconds,
    format_duration,
    longer_retention_setting,
    short_limits,
    times_left,
    will_catch_up,
)
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.slicing import Bounds, retired_topics
from seriatim.ports import Log
from seriatim.stream import Stream


class PartitionClock(Struct, frozen=True, kw_only=True):
    """A partition under the clock."""

    retained: RetainedLog
    times_left: list[TimeLeft]
    """The nearest limit first; empty: nothing waits, or nothing is dropped."""
    needed_seconds: float | None
    """What a run of now takes to fold all that waits in the stream; infinite: for ever; None: not
    known.
    """
    will_catch_up: bool | None
    """Whether a run of now would lose nothing of it; None: not known. One that waits for a person
    does not.
    """

    @property
    def time_left_seconds(self) -> int | None:
        """Time left, if there is a limit to it."""
        return round(self.times_left[0].seconds) if self.times_left else None


PartitionClocks = dict[Partition, PartitionClock]


def partition_clocks(
    ledger: Ledger, log: Log, bounds: Mapping[Partition, Bounds], now_seconds: float
) -> PartitionClocks:
    """The clock of every partition that Kafka has and nobody retired."""
    known, over = {p: ledger.account(p) for p in bounds}, retired_topics(ledger)
    running = {p: seen for p, seen in bounds.items() if not _is_retired(p, known[p], over)}
    found = log.read_retention(
        running, {p: _oldest_unread_offset(known[p], seen) for p, seen in running.items()}
    )
    held = {p: _cap_newest_time(one, round(now_seconds * 1000)) for p, one in found.items()}
    needed = catch_up_seconds(
        ledger.pace.rate, [one for p, one in held.items() if not _waits_for_person(known[p])]
    )
    return {
        p: _partition_clock(one, known[p], now_seconds, needed) for p, one in sorted(held.items())
    }


def _cap_newest_time(retained: RetainedLog, now_ms: int) -> RetainedLog:
    """A producer whose clock is far ahead must not make the rate look low."""
    return (
        retained
        if retained.newest_ms is None
        else replace(retained, newest_ms=min(retained.newest_ms, now_ms))
    )


def _is_retired(partition: Partition, account: Account | None, retired: set[str]) -> bool:
    return partition.topic in retired or (account is not None and account.retired)


def _oldest_unread_offset(account: Account | None, bounds: Bounds) -> int:
    """The oldest message that waits and is still there. A topic made again is unread from its first
    message on.
    """
    known = account is not None and account.topic_id == bounds.topic_id
    return max(account.frontier, bounds.log_start) if account and known else bounds.log_start


def _waits_for_person(account: Account | None) -> bool:
    return account is not None and (account.halt is not None or account.hold is not None)


def _partition_clock(
    retained: RetainedLog, account: Account | None, now_seconds: float, needed_seconds: float | None
) -> PartitionClock:
    left = times_left(
        retained,
        now_seconds,
        account.message_bytes / account.messages if account and account.messages else None,
    )
    in_time = (
        False
        if _waits_for_person(account) and retained.lag
        else will_catch_up(retained, left, needed_seconds)
    )
    return PartitionClock(
        retained=retained, times_left=left, needed_seconds=needed_seconds, will_catch_up=in_time
    )


def time_left_warnings(stream: Stream, ledger: Ledger, clocks: PartitionClocks) -> list[Finding]:
    """Topics that run out of time, by their nearest partition. Of level warning: a run does not
    fail by it.

    Partitions that wait for a person have a finding of their own: another deed is needed there.
    """
    near: dict[tuple[str, bool], list[tuple[TimeLeft, Partition]]] = {}
    for place, one in clocks.items():
        short = [
            left
            for left in one.times_left
            if left.is_below_warning(stream.alerts.time_left_warning_hours)
        ]
        if short:
            near.setdefault((place.topic, _waits_for_person(ledger.account(place))), []).append(
                (short[0], place)
            )
    nearest = [(*min(places), len(places) - 1) for places in near.values()]
    return [
        _time_left_finding(place, ledger.account(place), clocks[place], left, others)
        for left, place, others in nearest
    ]


def _time_left_finding(
    partition: Partition,
    account: Account | None,
    clock: PartitionClock,
    time_left: TimeLeft,
    other_partitions: int,
) -> Finding:
    also = (
        f" here, and {other_partitions} more of the topic's partitions are near"
        if other_partitions
        else ""
    )
    kept = f"{time_left.limit} keeps messages for {format_duration(time_left.retention_seconds)}; {clock.retained.lag} wait{also}"
    return Finding(
        finding="time left",
        topic=partition.topic,
        partition=partition.number,
        offset=clock.retained.frontier,
        expected=longer_retention_setting(time_left),
        found=f"{format_duration(time_left.seconds)} until Kafka drops offset {clock.retained.frontier}",
        cause=f"{kept}. {_describe_chance(account, clock)}",
        level="warning",
        time_left_seconds=round(time_left.seconds),
    )


def _describe_chance(account: Account | None, clock: PartitionClock) -> str:
    """Whether a run would help."""
    if account is not None and account.hold is not None:
        return f"Held by {account.hold}: no run reads it"
    if account is not None and account.halt is not None:
        return f"Halted at {account.halt.offset} ({account.halt.finding}): no run reads it until a person decides"
    if clock.needed_seconds is None:
        return "How fast a run is was not measured yet"
    if clock.needed_seconds == inf:
        return "More comes than a run folds: at its present rate it never catches up"
    when = format_duration(clock.needed_seconds)
    return f"A run of now catches up in {when}" + (
        "" if clock.will_catch_up else ", which is too late for some of it"
    )


def with_time_left(findings: list[Finding], clocks: PartitionClocks) -> list[Finding]:
    """Findings with the time left of their partition: how long there is to act."""
    left = {str(place): one.time_left_seconds for place, one in clocks.items()}
    return [
        replace(f, time_left_seconds=left.get(f.partition_name)) if f.partition >= 0 else f
        for f in findings
    ]


class ShortRetention(Struct, frozen=True, kw_only=True):
    """A topic that keeps messages for less than 72 hours."""

    topic: str
    hours: dict[RetentionLimit, float]
    text: str
    next: str


def short_retentions(clocks: PartitionClocks) -> list[ShortRetention]:
    """Topics that keep messages for less than 72 hours, and the command that makes it more."""
    topics: dict[str, list[RetainedLog]] = {}
    for place, one in clocks.items():
        topics.setdefault(place.topic, []).append(one.retained)
    found = {topic: short_limits(held) for topic, held in topics.items()}
    return [_short_retention(topic, limits) for topic, limits in found.items() if limits]


def _short_retention(topic: str, limits: dict[RetentionLimit, float]) -> ShortRetention:
    said = " and ".join(
        f"{limit} keeps messages for {format_duration(hours * HOUR_SECONDS)}"
        for limit, hours in limits.items()
    )
    wider = ",".join(
        "retention.ms=604800000" if limit == "retention.ms" else f"{limit}=-1" for limit in limits
    )
    command = "kafka-configs.sh --bootstrap-server SERVER --alter --entity-type topics"
    return ShortRetention(
        topic=topic,
        hours=limits,
        text=f"{topic}: {said}; with less than {SHORT_RETENTION_HOURS} h a weekend may lose data",
        next=f"{command} --entity-name {topic} --add-config {wider}",
    )
