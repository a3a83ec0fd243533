"""Suites as data: what a file says, and slips that would make a check pass."""

from __future__ import annotations

import pytest

from seriatim.errors import ConfigError
from seriatim.operations.prove.suite import parse_suite


@pytest.mark.parametrize("content", [b"{}", b'{"expectation": []}', b'{"name": "records"}'])
def test_a_file_that_expects_nothing_by_a_slip_is_refused(content: bytes) -> None:
    """It would take the place of the stock suite, and everything would be good."""
    with pytest.raises(ConfigError, match="expectations"):
        parse_suite(content, "expectations/records.json")


def test_a_column_that_is_no_text_still_has_a_name() -> None:
    """The error about it is made of its name."""
    (one,) = parse_suite(b'{"expectations": [{"type": "expect_x", "kwargs": {"column": 5}}]}', "w")
    assert one.name == "x 5"
