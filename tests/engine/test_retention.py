"""The retention clock: two limits, a lower bound, and a warning that is never too late."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.findings import format_duration
from seriatim.engine.retention import (
    MESSAGE_OVERHEAD_BYTES,
    RetainedLog,
    RetentionRules,
    TimeLeft,
    catch_up_seconds,
    production_rate,
    short_limits,
    times_left,
    will_catch_up,
)
from seriatim.ledger.model import Pace

HOUR_MS = 3_600_000
NOW = 1_800_000_000.0
NOW_MS = round(NOW * 1000)


def held(**fields: Any) -> RetainedLog:
    """Ten hours of one message a second, of which the last five are not committed; 100 bytes each."""
    given: dict[str, Any] = {
        "rules": RetentionRules(retention_ms=24 * HOUR_MS),
        "frontier": 18_000,
        "log_start": 0,
        "log_end": 36_000,
        "oldest_ms": NOW_MS - 10 * HOUR_MS,
        "frontier_ms": NOW_MS - 5 * HOUR_MS,
        "newest_ms": NOW_MS - 1000,
        "log_bytes": 3_600_000,
    }
    return RetainedLog(**{**given, **fields})


def hours(left: list[TimeLeft]) -> list[float]:
    """Rounded to a tenth."""
    return [round(one.seconds / 3600, 1) for one in left]


def test_by_time_it_is_the_age_of_the_message_at_the_frontier() -> None:
    """Five hours old, kept for a day: nineteen are left."""
    (left,) = times_left(held(), NOW)
    assert (left.seconds, left.retention_seconds, left.limit) == (
        19 * 3600,
        24 * 3600,
        "retention.ms",
    )


def test_by_bytes_it_is_the_room_at_the_rate_of_appending() -> None:
    """The last five hours hold half of the log; room for twice as much lasts five hours more."""
    (left,) = times_left(held(rules=RetentionRules(retention_bytes=3_600_000)), NOW)
    assert (round(left.seconds / 3600, 2), left.limit) == (5.0, "retention.bytes")
    assert round(left.retention_seconds / 3600, 2) == 10.0


def test_the_nearest_limit_comes_first() -> None:
    """Both limits hold; what drops the message first is the figure."""
    left = times_left(
        held(rules=RetentionRules(retention_ms=24 * HOUR_MS, retention_bytes=3_600_000)), NOW
    )
    assert hours(left) == [5.0, 19.0]


@pytest.mark.parametrize(
    "rules",
    [
        RetentionRules(),
        RetentionRules(retention_ms=HOUR_MS, retention_bytes=1, has_delete_policy=False),
        RetentionRules(is_known=False),
    ],
)
def test_what_is_never_dropped_has_no_time(rules: RetentionRules) -> None:
    """Without limits, in a topic that is only compacted, or with settings that may not be read:
    nothing is said.
    """
    assert times_left(held(rules=rules), NOW) == []


def test_nothing_waits_nothing_is_lost() -> None:
    """A partition that is caught up, or whose frontier is beyond the log, has no time to run out."""
    assert times_left(held(frontier=36_000, frontier_ms=None), NOW) == []
    assert times_left(held(frontier=40_000, frontier_ms=None), NOW) == []


@pytest.mark.parametrize(
    "rules", [RetentionRules(retention_ms=HOUR_MS), RetentionRules(retention_bytes=100)]
)
def test_what_is_lost_already_has_no_time_left(rules: RetentionRules) -> None:
    """The log start has passed the frontier, or the next look of the broker will pass it: 0, never
    less.
    """
    assert hours(times_left(held(rules=rules), NOW)) == [0]
    assert hours(times_left(held(rules=rules, frontier=5, log_start=10), NOW)) == [0]


def test_sizes_that_the_broker_does_not_tell_come_from_what_was_folded() -> None:
    """Keys and values as folded, and what the log adds to a message at most: the figure is the
    shorter one.
    """
    rules = RetentionRules(retention_bytes=3_600_000)
    (told,) = times_left(held(rules=rules), NOW)
    (guessed,) = times_left(
        held(rules=rules, log_bytes=None), NOW, message_bytes=100 - MESSAGE_OVERHEAD_BYTES
    )
    assert guessed.seconds == pytest.approx(told.seconds)
    assert times_left(held(rules=rules, log_bytes=None), NOW) == []


def test_a_rate_is_taken_over_a_minute_or_the_whole_log() -> None:
    """Two messages a millisecond apart at the frontier do not make a thousand a second."""
    few = held(frontier=35_998, frontier_ms=NOW_MS - 1001)
    assert production_rate(few) == pytest.approx(1.0, rel=0.01)
    assert production_rate(
        held(frontier=18_000, frontier_ms=NOW_MS - 2 * HOUR_MS)
    ) == pytest.approx(2.5, rel=0.01)
    assert production_rate(held(oldest_ms=None, frontier_ms=None, newest_ms=None)) is None


@given(
    whole=st.floats(1, 1e9),
    share=st.floats(0, 1),
    warning_hours=st.integers(1, 10_000),
)
def test_the_warning_comes_between_half_and_a_quarter(
    whole: float, share: float, warning_hours: int
) -> None:
    """Whatever the agreed hours: with more than half left nobody is told, with less than a quarter
    everybody is.
    """
    left = TimeLeft(whole * share, whole, "retention.ms")
    if share > 0.5:
        assert not left.is_below_warning(warning_hours)
    if share <= 0.25:
        assert left.is_below_warning(warning_hours)


def test_the_agreed_hours_hold_where_they_lie_between() -> None:
    """A day out of three: told at a day, not before."""
    day, whole = 24 * 3600.0, 72 * 3600.0
    assert TimeLeft(day, whole, "retention.ms").is_below_warning(24)
    assert not TimeLeft(day + 1, whole, "retention.ms").is_below_warning(24)


@given(
    rate=st.floats(0.1, 1000),
    size=st.integers(1, 10_000),
    age=st.floats(0.01, 0.99),
    retention_hours=st.floats(1, 1000),
)
def test_at_a_constant_rate_both_limits_agree_with_the_truth(
    rate: float, size: int, age: float, retention_hours: float
) -> None:
    """A log of a constant rate, read up to any age: either limit is off by no more than a message's
    time.
    """
    whole = retention_hours * 3600
    messages = max(2, round(rate * whole))
    frontier = min(messages - 1, round(messages * (1 - age)))
    when = [
        NOW_MS - round((messages - offset) / rate * 1000) for offset in (0, frontier, messages - 1)
    ]
    log = RetainedLog(
        rules=RetentionRules(
            retention_ms=round(whole * 1000), retention_bytes=round(size * rate * whole)
        ),
        frontier=frontier,
        log_start=0,
        log_end=messages,
        oldest_ms=when[0],
        frontier_ms=when[1],
        newest_ms=when[2],
        log_bytes=size * messages,
    )
    truth = whole - (messages - frontier) / rate
    for left in times_left(log, NOW):
        assert left.seconds == pytest.approx(max(truth, 0), abs=3 / rate + 0.005 * whole)


def test_a_run_catches_up_if_it_is_faster_than_the_producers() -> None:
    """Five hours of one message a second at three a second: done in half of it, and what comes
    meanwhile.
    """
    log = held()
    needed = catch_up_seconds(3.0, [log])
    assert needed == pytest.approx(2.5 * 3600, rel=0.01)
    assert will_catch_up(log, times_left(log, NOW), needed) is True
    assert catch_up_seconds(1.0, [log]) == inf
    assert will_catch_up(log, times_left(log, NOW), inf) is False


def test_to_catch_up_too_late_is_not_to_catch_up() -> None:
    """An hour is left for the oldest, six for the newest: seven hours of work lose messages, six do
    not.
    """
    log = held(rules=RetentionRules(retention_ms=6 * HOUR_MS))
    left = times_left(log, NOW)
    assert will_catch_up(log, left, 5.9 * 3600) is True
    assert will_catch_up(log, left, 7 * 3600.0) is False


def test_without_a_measured_rate_nothing_is_said() -> None:
    """None is not no."""
    log = held()
    assert catch_up_seconds(None, [log]) is None
    assert will_catch_up(log, times_left(log, NOW), None) is None
    assert will_catch_up(held(frontier=36_000), [], None) is True
    assert catch_up_seconds(None, [held(frontier=36_000)]) == 0


def test_without_a_limit_being_faster_is_enough() -> None:
    """Nothing is ever dropped: only a rate that is too low for ever is told."""
    assert will_catch_up(held(), [], 1e9) is True
    assert will_catch_up(held(), [], inf) is False


def test_pace_forgets_the_past() -> None:
    """The last entry counts as much as all before it together; entries that folded nothing only
    move the time.
    """
    pace = Pace()
    assert pace.rate is None
    for at in range(20):
        pace = pace.after_entry(at, 100, 1.0)
    assert pace.rate == pytest.approx(100)
    pace = pace.after_entry(21, 1000, 1.0)
    assert pace.rate == pytest.approx((100 + 1000) / 2, rel=0.01)
    assert pace.after_entry(22, 0, 5.0) == Pace(
        at_seconds=22, messages=pace.messages, seconds=pace.seconds
    )


def test_short_limits_are_those_under_72_hours() -> None:
    """By time as set, by bytes at the rate of now; what never drops anything is not short."""
    assert short_limits([held(rules=RetentionRules(retention_ms=71 * HOUR_MS))]) == {
        "retention.ms": 71
    }
    assert short_limits([held(rules=RetentionRules(retention_ms=72 * HOUR_MS))]) == {}
    assert (
        short_limits([held(rules=RetentionRules(retention_ms=HOUR_MS, has_delete_policy=False))])
        == {}
    )
    both = short_limits(
        [held(rules=RetentionRules(retention_ms=HOUR_MS, retention_bytes=3_600_000))] * 2
    )
    assert {limit: round(found, 1) for limit, found in both.items()} == {
        "retention.ms": 1,
        "retention.bytes": 10,
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (65, "1 min 5 s"), (220_800, "61 h 20 min")]
)
def test_durations_are_read_by_people(seconds: float, text: str) -> None:
    """Two units, the smaller ones left out."""
    assert format_duration(seconds) == text
