"""Retention: how long until Kafka drops the oldest message that is not committed yet. It warns, it
never decides.

Two limits, each taken as if Kafka dropped single messages: by `retention.ms` a message goes when
its own timestamp is that old; by `retention.bytes` when so many bytes were appended after it, at
the rate at which messages came so far. Kafka drops whole segments, and looks every few minutes
only, so **the figure is a lower bound**: a message lives on for as long as younger ones share its
segment (`segment.ms`, `segment.bytes`). -1 is never; a topic that is only compacted drops nothing
by retention.

The warning comes when time left is below `alerts.time_left_warning_hours`, but at no less than 25%
of the retention and at no more than 50% of it: never too late to act, and a short retention does
not warn for ever.

Next room: operations/status.py asks Kafka and calls this; operations/watch.py tells a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from seriatim.errors import ensure

HOUR_SECONDS = 3600.0
SHORT_RETENTION_HOURS = 72
"""A weekend and a day: with less, nobody may be back before messages are gone."""
WARNING_SHARE_MIN, WARNING_SHARE_MAX = 0.25, 0.50
RATE_SPAN_MS = 60_000
"""A rate is taken over at least so much message time, if the log has it: a few messages tell
little.
"""
MESSAGE_OVERHEAD_BYTES = 70
"""Of a message in the log, at most: added where only the bytes of keys and values are known."""
RetentionLimit = Literal["retention.ms", "retention.bytes"]


class RetentionRules(Struct, frozen=True, kw_only=True):
    """A topic's retention as Kafka has it, broker defaults included. -1: no limit."""

    retention_ms: int = -1
    retention_bytes: int = -1
    """Per partition, as Kafka counts it."""
    has_delete_policy: bool = True
    """Whether `cleanup.policy` names delete. Compaction alone drops nothing by retention."""
    is_known: bool = True
    """Whether we may read the topic's settings; if not, the clock is blind."""

    @property
    def has_time_limit(self) -> bool:
        """Whether age drops messages."""
        return self.has_delete_policy and self.retention_ms >= 0

    @property
    def has_size_limit(self) -> bool:
        """Whether size drops messages."""
        return self.has_delete_policy and self.retention_bytes >= 0


class RetainedLog(Struct, frozen=True, kw_only=True):
    """What Kafka holds of one partition, as seen from a frontier. Times in milliseconds since 1970."""

    rules: RetentionRules
    frontier: int
    log_start: int
    log_end: int
    oldest_ms: int | None = None
    """The timestamp at the log start; None: no message, or it has none."""
    frontier_ms: int | None = None
    """The timestamp of the first message at or after the frontier."""
    newest_ms: int | None = None
    """The highest timestamp in the log."""
    log_bytes: int | None = None
    """The size of the log, if the broker tells."""

    def __post_init__(self) -> None:
        ensure(
            self.log_start <= self.log_end,
            "a log ends after its start",
            start=self.log_start,
            end=self.log_end,
        )

    @property
    def lag(self) -> int:
        """Offsets that are there and not committed."""
        return max(0, self.log_end - max(self.frontier, self.log_start))


class TimeLeft(Struct, frozen=True, order=True):
    """Until Kafka drops the oldest message not committed yet, and out of how long."""

    seconds: float
    retention_seconds: float
    """How long this limit keeps a message, at the present rate."""
    limit: RetentionLimit

    def is_below_warning(self, warning_hours: float) -> bool:
        """Whether a person is told: see the rule above."""
        return self.seconds <= self.warning_seconds(warning_hours)

    def warning_seconds(self, warning_hours: float) -> float:
        """How much time is left when a person is told."""
        least, most = (
            WARNING_SHARE_MIN * self.retention_seconds,
            WARNING_SHARE_MAX * self.retention_seconds,
        )
        return min(max(warning_hours * HOUR_SECONDS, least), most)


class Pace(Struct, frozen=True, kw_only=True):
    """How fast a stream was folded lately: each entry counts twice as much as the one before it."""

    at_seconds: float = 0.0
    """The clock at the last entry."""
    messages: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Messages folded per second of work; None: nothing was timed yet."""
        return self.messages / self.seconds if self.seconds > 0 else None

    def after_entry(self, at_seconds: float, messages: int, took_seconds: float) -> Pace:
        """The pace after one more entry. Only entries that folded something are timed."""
        if not messages or took_seconds <= 0:
            return replace(self, at_seconds=at_seconds)
        return Pace(
            at_seconds=at_seconds,
            messages=self.messages / 2 + messages,
            seconds=self.seconds / 2 + took_seconds,
        )


def times_left(
    retained: RetainedLog, now_seconds: float, message_bytes: float | None = None
) -> list[TimeLeft]:
    """What each limit leaves, the nearest first. Empty: nothing waits, or nothing is ever dropped.

    `message_bytes` is the size of a message as folded so far, used where the broker does not tell
    the log's.
    """
    if not retained.lag:
        return []
    if retained.frontier < retained.log_start:
        return [
            TimeLeft(
                0.0,
                _retention_seconds(retained),
                "retention.ms" if retained.rules.has_time_limit else "retention.bytes",
            )
        ]
    return sorted(
        [*_time_left_by_age(retained, now_seconds), *_time_left_by_size(retained, message_bytes)]
    )


def _retention_seconds(retained: RetainedLog) -> float:
    return retained.rules.retention_ms / 1000 if retained.rules.has_time_limit else 0.0


def _time_left_by_age(retained: RetainedLog, now_seconds: float) -> list[TimeLeft]:
    if not retained.rules.has_time_limit or retained.frontier_ms is None:
        return []
    whole = retained.rules.retention_ms / 1000
    return [
        TimeLeft(max(0.0, retained.frontier_ms / 1000 + whole - now_seconds), whole, "retention.ms")
    ]


def _time_left_by_size(retained: RetainedLog, message_bytes: float | None) -> list[TimeLeft]:
    size = message_size_bytes(retained, message_bytes)
    if not retained.rules.has_size_limit or size is None:
        return []
    room, rate = retained.rules.retention_bytes - size * retained.lag, production_rate(retained)
    if room <= 0:
        return [
            TimeLeft(
                0.0,
                retained.rules.retention_bytes / (size * rate) if rate else 0.0,
                "retention.bytes",
            )
        ]
    if not rate:
        return []
    return [
        TimeLeft(
            room / (size * rate), retained.rules.retention_bytes / (size * rate), "retention.bytes"
        )
    ]


def message_size_bytes(retained: RetainedLog, message_bytes: float | None) -> float | None:
    """The size of a message in the log: as stored, or at most, from what was folded (compression:
    far less).
    """
    if retained.log_bytes is not None:
        return (
            retained.log_bytes / (retained.log_end - retained.log_start)
            if retained.log_end > retained.log_start
            else None
        )
    return None if message_bytes is None else message_bytes + MESSAGE_OVERHEAD_BYTES


def production_rate(retained: RetainedLog) -> float | None:
    """Messages that come per second: since the frontier if that is long enough, else over the whole
    log.
    """
    if retained.newest_ms is None:
        return None
    since, span = (
        retained.frontier,
        retained.newest_ms - (retained.frontier_ms or retained.newest_ms),
    )
    if span < RATE_SPAN_MS and retained.oldest_ms is not None:
        since, span = retained.log_start, retained.newest_ms - retained.oldest_ms
    return (retained.log_end - 1 - since) * 1000 / span if span > 0 else None


def catch_up_seconds(
    messages_per_second: float | None, retained_logs: Iterable[RetainedLog]
) -> float | None:
    """How long a run takes to fold all that waits and what comes meanwhile; infinite: for ever;
    None: not known.

    `folded` is how many messages a second a run does.
    """
    waiting = list(retained_logs)
    lag = sum(one.lag for one in waiting)
    if messages_per_second is None or not lag:
        return None if lag else 0.0
    room = messages_per_second - sum(production_rate(one) or 0.0 for one in waiting)
    return lag / room if room > 0 else inf


def will_catch_up(
    retained: RetainedLog, limits: list[TimeLeft], needed_seconds: float | None
) -> bool | None:
    """Whether nothing is dropped before it is folded, if a run starts now and keeps its rate; None:
    not known.

    The newest message of now is dropped later than the oldest, by as long as the two lie apart.
    """
    if not retained.lag or needed_seconds is None:
        return None if retained.lag else True
    if not limits:
        return needed_seconds < inf
    newest = retained.newest_ms or 0
    apart = max(0, newest - (retained.frontier_ms or newest)) / 1000
    return limits[0].seconds > 0 and needed_seconds <= limits[0].seconds + apart


def short_limits(
    retained_logs: Iterable[RetainedLog], message_bytes: float | None = None
) -> dict[RetentionLimit, float]:
    """The limits that keep a topic's messages for less than 72 hours, and for how many hours.
    Empty: none.
    """
    found: dict[RetentionLimit, float] = {}
    for one in retained_logs:
        if one.rules.has_time_limit:
            found["retention.ms"] = one.rules.retention_ms / 1000 / HOUR_SECONDS
        size, rate = message_size_bytes(one, message_bytes), production_rate(one)
        if one.rules.has_size_limit and size and rate:
            hours = one.rules.retention_bytes / (size * rate) / HOUR_SECONDS
            found["retention.bytes"] = min(hours, found.get("retention.bytes", hours))
    return {limit: hours for limit, hours in found.items() if hours < SHORT_RETENTION_HOURS}


def is_drained(retained_logs: Iterable[RetainedLog], now_seconds: float, hours: float) -> bool:
    """Whether a topic is fully folded and had no new message for so long. One that never had any is
    not.

    Where Kafka has dropped all of it, the last message is at least as old as the retention.
    """
    partitions = list(retained_logs)
    if any(one.lag for one in partitions) or not any(one.log_end for one in partitions):
        return False
    newest = max((one.newest_ms for one in partitions if one.newest_ms is not None), default=None)
    if newest is not None:
        return now_seconds - newest / 1000 >= hours * HOUR_SECONDS
    return all(
        one.rules.has_time_limit and one.rules.retention_ms / 1000 >= hours * HOUR_SECONDS
        for one in partitions
    )


def longer_retention_setting(time_left: TimeLeft) -> str:
    """A setting that would give time: twice as much, and three days at least."""
    if time_left.limit == "retention.ms":
        return f"retention.ms={round(max(2 * time_left.retention_seconds, SHORT_RETENTION_HOURS * HOUR_SECONDS)) * 1000}"
    return "retention.bytes=-1"


def format_duration(seconds: float) -> str:
    """As people read it: 61 h 20 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
