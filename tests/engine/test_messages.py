"""Messages: their columns, and the sessions that keys name."""

from __future__ import annotations

import pytest

from seriatim.engine.messages import TIMESTAMP_RANGE_MS, MessageBatch, session_name_of_key
from seriatim.errors import BrokenPromiseError


def test_a_session_is_named_by_a_readable_key() -> None:
    """A key that is missing or not UTF-8 names nobody; an empty one is a name."""
    assert [session_name_of_key(key) for key in (b"a", b"", "é".encode(), None, b"\xff")] == [
        "a",
        "",
        "é",
        None,
        None,
    ]


def test_the_beginning_of_a_stretch_keeps_its_columns_together() -> None:
    """Cutting a stretch cuts all its columns, headers too."""
    stretch = MessageBatch(7, [1, 2], [b"k", None], [b"v", b"w"], [[("h", b"x")], []])
    cut = stretch.first_messages(1)
    assert (cut.start, cut.timestamps, cut.keys, cut.values, cut.headers) == (
        7,
        [1],
        [b"k"],
        [b"v"],
        [[("h", b"x")]],
    )


def test_columns_of_different_length_are_no_stretch() -> None:
    """A value without its key would shift every later one."""
    with pytest.raises(BrokenPromiseError, match="different length"):
        MessageBatch(0, [1], [b"k", b"l"], [b"v"])


def test_the_range_of_times_is_that_of_all_messages() -> None:
    """The earliest and the latest, in whatever order they come; none without messages."""
    assert MessageBatch(7, [5, -3, 9], [None] * 3, [None] * 3).time_range() == (-3, 9)
    assert MessageBatch(7, [], [], []).time_range() is None


def test_only_times_outside_of_the_calendar_are_invalid() -> None:
    """The first and the last moment of the calendar are valid."""
    first_ms, last_ms = TIMESTAMP_RANGE_MS
    times = [first_ms, first_ms - 1, 0, last_ms + 1, last_ms]
    batch = MessageBatch(7, times, [None] * 5, [None] * 5)
    assert batch.invalid_timestamp_positions() == [1, 3]
    assert (
        MessageBatch(7, [first_ms, last_ms], [None] * 2, [None] * 2).invalid_timestamp_positions()
        == []
    )
