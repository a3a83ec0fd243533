"""Retention: how much time each partition has left until Kafka deletes unread messages.

It only warns and never decides. A warning is a fact of the moment, not of the data: every run and
every look reports it again while it holds, and no ledger entry carries it.

Next: engine/retention.py has the arithmetic; operations/status.py and operations/watch.py show it.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import Finding, format_duration
from seriatim.engine.offsets import Bounds, BoundsByPartition, Partition
from seriatim.engine.retention import (
    HOUR_SECONDS,
    SHORT_RETENTION_HOURS,
    RetainedLog,
    RetentionLimit,
    TimeLeft,
    catch_up_seconds,
    longer_retention_setting,
    short_limits,
    times_left,
    will_catch_up,
)
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.plan import retired_topics
from seriatim.ports import Clock, Log
from seriatim.stream import Stream

WEEK_MS = 604_800_000


class PartitionClock(Struct, frozen=True, kw_only=True):
    """How much time one partition has left, and whether a run would be in time."""

    retained: RetainedLog
    times_left: list[TimeLeft]
    """The nearest limit first. Empty if no message waits, or if Kafka never deletes any."""
    needed_seconds: float | None
    """How long a run that starts now takes to fold all messages that wait in the stream. Infinite if
    it never catches up; None if that is not known.
    """
    will_catch_up: bool | None
    """Whether a run that starts now reads everything in time; None if that is not known. False for a
    partition that waits for a person.
    """

    @property
    def time_left_seconds(self) -> int | None:
        """The time until the nearest limit; None if there is no limit."""
        if not self.times_left:
            return None
        return round(self.times_left[0].seconds)


PartitionClocks = dict[Partition, PartitionClock]


def partition_clocks(
    ledger: Ledger, log: Log, bounds: BoundsByPartition, now_seconds: float
) -> PartitionClocks:
    """The clock of every partition that Kafka has and that is not retired.

    1. Choose the partitions, and the oldest unread offset of each.
    2. Ask Kafka what it retains of them.
    3. Estimate how long a run takes, and compare that with the time left.
    """
    # 1. Choose the partitions.
    accounts = {partition: ledger.account(partition) for partition in bounds}
    ended_topics = retired_topics(ledger)
    live_bounds = {}
    oldest_unread = {}
    for partition, partition_bounds in bounds.items():
        account = accounts[partition]
        if not _is_retired(partition, account, ended_topics):
            live_bounds[partition] = partition_bounds
            oldest_unread[partition] = _oldest_unread_offset(account, partition_bounds)
    # 2. Ask Kafka.
    now_ms = round(now_seconds * 1000)
    retained_logs = {}
    for partition, retained in log.read_retention(live_bounds, oldest_unread).items():
        retained_logs[partition] = _cap_newest_time(retained, now_ms)
    # 3. Partitions that wait for a person are not read, so they cost a run no time.
    readable_logs = [
        retained
        for partition, retained in retained_logs.items()
        if not _waits_for_person(accounts[partition])
    ]
    needed_seconds = catch_up_seconds(ledger.pace.rate, readable_logs)
    clocks = {}
    for partition, retained in sorted(retained_logs.items()):
        account = accounts[partition]
        clocks[partition] = _partition_clock(retained, account, now_seconds, needed_seconds)
    return clocks


def _cap_newest_time(retained: RetainedLog, now_ms: int) -> RetainedLog:
    """Limit the time of the newest message to now: a producer whose clock is far ahead must not
    make the rate of messages look low.
    """
    if retained.newest_ms is None:
        return retained
    return replace(retained, newest_ms=min(retained.newest_ms, now_ms))


def _is_retired(partition: Partition, account: Account | None, ended_topics: set[str]) -> bool:
    return partition.topic in ended_topics or (account is not None and account.retired)


def _oldest_unread_offset(account: Account | None, bounds: Bounds) -> int:
    """The offset of the oldest message that waits and that Kafka still has. A topic that was created
    again is unread from its first message on.
    """
    if account is None or account.topic_id != bounds.topic_id:
        return bounds.log_start
    return max(account.frontier, bounds.log_start)


def _waits_for_person(account: Account | None) -> bool:
    return account is not None and (account.halt is not None or account.hold is not None)


def _partition_clock(
    retained: RetainedLog, account: Account | None, now_seconds: float, needed_seconds: float | None
) -> PartitionClock:
    average_message_bytes = None
    if account is not None and account.messages:
        average_message_bytes = account.message_bytes / account.messages
    limits = times_left(retained, now_seconds, average_message_bytes)
    is_in_time: bool | None = False
    if not retained.lag or not _waits_for_person(account):
        is_in_time = will_catch_up(retained, limits, needed_seconds)
    return PartitionClock(
        retained=retained,
        times_left=limits,
        needed_seconds=needed_seconds,
        will_catch_up=is_in_time,
    )


def time_left_warnings(stream: Stream, ledger: Ledger, clocks: PartitionClocks) -> list[Finding]:
    """One finding for each topic that runs out of time, about the partition with the least time
    left. Its level is warning, so that no run fails by it.

    Partitions that wait for a person get a finding of their own, because they need another action.
    """
    warning_hours = stream.alerts.time_left_warning_hours
    urgent: dict[tuple[str, bool], list[tuple[TimeLeft, Partition]]] = {}
    for partition, clock in clocks.items():
        short = [limit for limit in clock.times_left if limit.is_below_warning(warning_hours)]
        if short:
            waits_for_person = _waits_for_person(ledger.account(partition))
            candidates = urgent.setdefault((partition.topic, waits_for_person), [])
            candidates.append((short[0], partition))
    findings = []
    for candidates in urgent.values():
        time_left, partition = min(candidates)
        account = ledger.account(partition)
        other_partitions = len(candidates) - 1
        finding = _time_left_finding(
            partition, account, clocks[partition], time_left, other_partitions
        )
        findings.append(finding)
    return findings


def _time_left_finding(
    partition: Partition,
    account: Account | None,
    clock: PartitionClock,
    time_left: TimeLeft,
    other_partitions: int,
) -> Finding:
    retention = format_duration(time_left.retention_seconds)
    cause = f"{time_left.limit} keeps messages for {retention}; {clock.retained.lag} wait"
    if other_partitions:
        cause += f" here, and {other_partitions} more of the topic's partitions are near"
    return Finding.at(
        partition,
        "time left",
        clock.retained.frontier,
        expected=longer_retention_setting(time_left),
        found=f"{format_duration(time_left.seconds)} until Kafka drops offset {clock.retained.frontier}",
        cause=f"{cause}. {_describe_chance(account, clock)}",
        level="warning",
        time_left_seconds=round(time_left.seconds),
    )


def _describe_chance(account: Account | None, clock: PartitionClock) -> str:
    """Say whether a run would help, as a text for people."""
    if account is not None and account.hold is not None:
        return f"Held by {account.hold}: no run reads it"
    if account is not None and account.halt is not None:
        return f"Halted at {account.halt.offset} ({account.halt.finding}): no run reads it until a person decides"
    if clock.needed_seconds is None:
        return "How fast a run is was not measured yet"
    if clock.needed_seconds == inf:
        return "More comes than a run folds: at its present rate it never catches up"
    duration = format_duration(clock.needed_seconds)
    if clock.will_catch_up:
        return f"A run of now catches up in {duration}"
    return f"A run of now catches up in {duration}, which is too late for some of it"


def with_time_left(findings: list[Finding], clocks: PartitionClocks) -> list[Finding]:
    """The findings, each with the time left of its partition: how long a person has to act."""
    seconds_by_name = {}
    for partition, clock in clocks.items():
        seconds_by_name[str(partition)] = clock.time_left_seconds
    completed = []
    for finding in findings:
        if finding.partition >= 0:
            seconds = seconds_by_name.get(finding.partition_name)
            completed.append(replace(finding, time_left_seconds=seconds))
        else:
            completed.append(finding)
    return completed


class ShortRetention(Struct, frozen=True, kw_only=True):
    """A topic that keeps messages for less than 72 hours."""

    topic: str
    hours: dict[RetentionLimit, float]
    text: str
    next: str


def short_retentions(clocks: PartitionClocks) -> list[ShortRetention]:
    """Topics that keep messages for less than 72 hours, and the command that makes it more."""
    logs_by_topic: dict[str, list[RetainedLog]] = {}
    for partition, clock in clocks.items():
        logs_by_topic.setdefault(partition.topic, []).append(clock.retained)
    short = []
    for topic, retained_logs in logs_by_topic.items():
        limits = short_limits(retained_logs)
        if limits:
            short.append(_short_retention(topic, limits))
    return short


def _short_retention(topic: str, limits: dict[RetentionLimit, float]) -> ShortRetention:
    sentences = []
    new_settings = []
    for limit, hours in limits.items():
        sentences.append(f"{limit} keeps messages for {format_duration(hours * HOUR_SECONDS)}")
        if limit == "retention.ms":
            new_settings.append(f"{limit}={WEEK_MS}")
        else:
            new_settings.append(f"{limit}=-1")
    short = " and ".join(sentences)
    command = "kafka-configs.sh --bootstrap-server SERVER --alter --entity-type topics"
    return ShortRetention(
        topic=topic,
        hours=limits,
        text=f"{topic}: {short}; with less than {SHORT_RETENTION_HOURS} h a weekend may lose data",
        next=f"{command} --entity-name {topic} --add-config {','.join(new_settings)}",
    )


def short_retention(stream: Stream, log: Log, ledger: Ledger, clock: Clock) -> list[ShortRetention]:
    """Topics that keep messages for less than 72 hours."""
    bounds = log.bounds(stream.topics)
    return short_retentions(partition_clocks(ledger, log, bounds, clock.now_seconds()))
