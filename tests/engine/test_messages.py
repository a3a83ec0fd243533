"""Messages: their columns, and the sessions that keys name."""

from __future__ import annotations

import pytest

from seriatim.engine.messages import MessageBatch, session_name_of_key
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
