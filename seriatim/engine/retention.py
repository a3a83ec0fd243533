"""Retention: how long until Kafka drops the oldest message that is not committed yet. The figure only
warns; no step of the fold depends on it.

Two limits are estimated, each as if Kafka dropped single messages. By `retention.ms` a message goes
when its own timestamp is that old. By `retention.bytes` it goes when that many bytes were appended
after it, at the rate of the messages so far. Kafka drops whole segments, and looks only every few
minutes, so **the figure is a lower bound**: a message lives on as long as younger ones share its
segment (`segment.ms`, `segment.bytes`). -1 means never. A topic that is only compacted drops nothing
by retention.

A person is warned when the time left is below a threshold. The threshold is
`alerts.time_left_warning_hours`. If that is less than 25 % of the retention, 25 % is used; if more
than 50 %, 50 % is used. So a warning never comes too late to act, and a short retention does not
warn all the time.

Next: operations/status.py asks Kafka and calls this; operations/watch.py warns a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Literal

from msgspec import Struct

from seriatim.errors import ensure

HOUR_SECONDS = 3600.0
SHORT_RETENTION_HOURS = 72
"""A weekend and a day. With less, messages may be gone before anybody is back at work."""
WARNING_SHARE_MIN = 0.25
WARNING_SHARE_MAX = 0.50
"""The warning time as a share of the retention is kept between these."""
RATE_SPAN_MS = 60_000
"""A rate is measured over at least this span of message timestamps, if the log has it. A few
messages tell little.
"""
MESSAGE_OVERHEAD_BYTES = 70
"""What a message takes in the log at most, beyond its key and value."""
RetentionLimit = Literal["retention.ms", "retention.bytes"]


class RetentionRules(Struct, frozen=True, kw_only=True):
    """A topic's retention as Kafka has it, broker defaults included. -1: no limit."""

    retention_ms: int = -1
    retention_bytes: int = -1
    """Per partition, as Kafka counts it."""
    has_delete_policy: bool = True
    """Whether `cleanup.policy` names delete. Compaction alone drops nothing by retention."""
    is_known: bool = True
    """Whether we are allowed to read the topic's settings. If not, no time left can be told."""

    @property
    def has_time_limit(self) -> bool:
        """Whether age drops messages."""
        return self.has_delete_policy and self.retention_ms >= 0

    @property
    def has_size_limit(self) -> bool:
        """Whether size drops messages."""
        return self.has_delete_policy and self.retention_bytes >= 0


class RetainedLog(Struct, frozen=True, kw_only=True):
    """What Kafka holds of one partition, seen from a frontier. Times are milliseconds since 1970."""

    rules: RetentionRules
    frontier: int
    log_start: int
    log_end: int
    oldest_ms: int | None = None
    """The timestamp at the log start; None: there is no message, or it has no timestamp."""
    frontier_ms: int | None = None
    """The timestamp of the first message at or after the frontier."""
    newest_ms: int | None = None
    """The highest timestamp in the log."""
    log_bytes: int | None = None
    """The size of the log; None: the broker does not tell it."""

    def __post_init__(self) -> None:
        ensure(
            self.log_start <= self.log_end,
            "a log ends after its start",
            start=self.log_start,
            end=self.log_end,
        )

    @property
    def lag(self) -> int:
        """How many offsets the log holds that are not committed."""
        return max(0, self.log_end - max(self.frontier, self.log_start))


class TimeLeft(Struct, frozen=True, order=True):
    """The time until Kafka drops the oldest message that is not committed, by one limit."""

    seconds: float
    retention_seconds: float
    """How long this limit keeps a message in all, at the present rate."""
    limit: RetentionLimit

    def is_below_warning(self, warning_hours: float) -> bool:
        """Whether a person is warned. The module docstring has the rule."""
        return self.seconds <= self.warning_seconds(warning_hours)

    def warning_seconds(self, warning_hours: float) -> float:
        """The time left at which a person is warned."""
        shortest = WARNING_SHARE_MIN * self.retention_seconds
        longest = WARNING_SHARE_MAX * self.retention_seconds
        return min(max(warning_hours * HOUR_SECONDS, shortest), longest)


def times_left(
    retained: RetainedLog, now_seconds: float, message_bytes: float | None = None
) -> list[TimeLeft]:
    """The time left by each limit, the shortest first. Empty: nothing waits, or nothing is dropped.

    `message_bytes` is the average size of the messages folded so far. It is used where the broker
    does not tell the size of the log.
    """
    if not retained.lag:
        return []
    if retained.frontier < retained.log_start:
        # Messages were dropped already. Which limit dropped them is not known.
        if retained.rules.has_time_limit:
            return [TimeLeft(0.0, retained.rules.retention_ms / 1000, "retention.ms")]
        return [TimeLeft(0.0, 0.0, "retention.bytes")]
    limits = [_time_left_by_age(retained, now_seconds), _time_left_by_size(retained, message_bytes)]
    return sorted(limit for limit in limits if limit is not None)


def _time_left_by_age(retained: RetainedLog, now_seconds: float) -> TimeLeft | None:
    if not retained.rules.has_time_limit or retained.frontier_ms is None:
        return None
    retention_seconds = retained.rules.retention_ms / 1000
    seconds = retained.frontier_ms / 1000 + retention_seconds - now_seconds
    return TimeLeft(max(0.0, seconds), retention_seconds, "retention.ms")


def _time_left_by_size(retained: RetainedLog, message_bytes: float | None) -> TimeLeft | None:
    size = message_size_bytes(retained, message_bytes)
    if not retained.rules.has_size_limit or not size:
        return None
    free_bytes = retained.rules.retention_bytes - size * retained.lag
    rate = production_rate(retained)
    if not rate:
        # Nothing new comes, so nothing is dropped, unless the log is over its limit already.
        return TimeLeft(0.0, 0.0, "retention.bytes") if free_bytes <= 0 else None
    bytes_per_second = size * rate
    seconds = max(0.0, free_bytes / bytes_per_second)
    retention_seconds = retained.rules.retention_bytes / bytes_per_second
    return TimeLeft(seconds, retention_seconds, "retention.bytes")


def message_size_bytes(retained: RetainedLog, message_bytes: float | None) -> float | None:
    """The average size of a message in the log; None: not known.

    It is exact where the broker tells the size of the log. Else it is an upper bound made of the
    messages folded so far: compressed messages take far less.
    """
    if retained.log_bytes is None:
        return None if message_bytes is None else message_bytes + MESSAGE_OVERHEAD_BYTES
    message_count = retained.log_end - retained.log_start
    if message_count <= 0:
        return None
    return retained.log_bytes / message_count


def production_rate(retained: RetainedLog) -> float | None:
    """How many messages arrive per second: since the frontier if that is long enough, else over the
    whole log; None: not known.
    """
    if retained.newest_ms is None:
        return None
    first_offset = retained.frontier
    span_ms = retained.newest_ms - (retained.frontier_ms or retained.newest_ms)
    if span_ms < RATE_SPAN_MS and retained.oldest_ms is not None:
        first_offset = retained.log_start
        span_ms = retained.newest_ms - retained.oldest_ms
    if span_ms <= 0:
        return None
    return (retained.log_end - 1 - first_offset) * 1000 / span_ms


def catch_up_seconds(
    messages_per_second: float | None, retained_logs: Iterable[RetainedLog]
) -> float | None:
    """How long a run takes to fold everything that waits, and everything that arrives meanwhile.

    `messages_per_second` is how fast a run folds. Infinite: it never catches up; None: not known.
    """
    waiting_logs = list(retained_logs)
    lag = sum(log.lag for log in waiting_logs)
    if not lag:
        return 0.0
    if messages_per_second is None:
        return None
    arriving_per_second = sum(production_rate(log) or 0.0 for log in waiting_logs)
    net_per_second = messages_per_second - arriving_per_second
    return lag / net_per_second if net_per_second > 0 else inf


def will_catch_up(
    retained: RetainedLog, limits: list[TimeLeft], needed_seconds: float | None
) -> bool | None:
    """Whether everything is folded before Kafka drops it, if a run starts now and keeps its rate;
    None: not known.
    """
    if not retained.lag:
        return True
    if needed_seconds is None:
        return None
    if not limits:
        return needed_seconds < inf
    # The newest waiting message is dropped later than the oldest, by the time between the two.
    newest_ms = retained.newest_ms or 0
    oldest_waiting_ms = retained.frontier_ms or newest_ms
    span_seconds = max(0, newest_ms - oldest_waiting_ms) / 1000
    nearest = limits[0]
    return nearest.seconds > 0 and needed_seconds <= nearest.seconds + span_seconds


def short_limits(retained_logs: Iterable[RetainedLog]) -> dict[RetentionLimit, float]:
    """The limits that keep a topic's messages for less than 72 hours, and for how many hours. Empty:
    there is none.
    """
    hours_by_limit: dict[RetentionLimit, float] = {}
    for log in retained_logs:
        if log.rules.has_time_limit:
            hours_by_limit["retention.ms"] = log.rules.retention_ms / 1000 / HOUR_SECONDS
        size = message_size_bytes(log, None)
        rate = production_rate(log)
        if log.rules.has_size_limit and size and rate:
            hours = log.rules.retention_bytes / (size * rate) / HOUR_SECONDS
            shortest_hours = hours_by_limit.get("retention.bytes", hours)
            hours_by_limit["retention.bytes"] = min(hours, shortest_hours)
    return {
        limit: hours for limit, hours in hours_by_limit.items() if hours < SHORT_RETENTION_HOURS
    }


def is_drained(retained_logs: Iterable[RetainedLog], now_seconds: float, hours: float) -> bool:
    """Whether a topic is completely folded and got no message for this many hours. A topic that
    never had a message is not drained.
    """
    logs = list(retained_logs)
    if any(log.lag for log in logs) or not any(log.log_end for log in logs):
        return False
    newest_times_ms = [log.newest_ms for log in logs if log.newest_ms is not None]
    if newest_times_ms:
        return now_seconds - max(newest_times_ms) / 1000 >= hours * HOUR_SECONDS
    # Kafka has dropped all messages, so the last one is at least as old as the retention.
    return all(
        log.rules.has_time_limit and log.rules.retention_ms / 1000 >= hours * HOUR_SECONDS
        for log in logs
    )


def longer_retention_setting(time_left: TimeLeft) -> str:
    """A topic setting that gives more time: twice the retention, and three days at least."""
    if time_left.limit == "retention.bytes":
        return "retention.bytes=-1"
    seconds = max(2 * time_left.retention_seconds, SHORT_RETENTION_HOURS * HOUR_SECONDS)
    return f"retention.ms={round(seconds) * 1000}"
