"""Alike: a comparison means what whoever typed it meant, whatever types the values have."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from math import inf, nan
from typing import Any
from uuid import UUID

import pytest

from seriatim.errors import ConfigError
from seriatim.operations.inspect.condition import parse_condition


class Side(Enum):
    """A type of a user's."""

    BUY = "buy"


ID = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
ROW: dict[str, Any] = {
    "cost": Decimal("16.67"),
    "tenth": Decimal("0.10"),
    "wide": Decimal("12345678901234567890123456789012345.678"),
    "ratio": 0.1,
    "count": 5,
    "open": True,
    "day": date(2026, 2, 1),
    "at": datetime(2026, 2, 1, 10, tzinfo=timezone(timedelta(hours=2))),
    "naive": datetime(2026, 2, 1, 8),  # noqa: DTZ001  # as a machine of a user's may have it
    "raw": b"\x00\x01",
    "side": Side.BUY,
    "id": UUID(ID),
    "sent": "16.67",
    "name": "b",
    "by_cost": {Decimal("16.67"): 1},
    "by_day": {date(2026, 2, 1): 2},
    "nothing": None,
}


@pytest.mark.parametrize(
    "text",
    [
        "row.cost == 16.67 and row.cost != 16.66 and row.cost < 16.68 and 16.66 < row.cost <= 16.67",
        "row.tenth == 0.1 and row.ratio == row.tenth and row.cost in (16.67, 3) and row.tenth not in (0.2, 3)",
        "row.cost > 16 and row.cost * 2 == 33.34 and row.cost + 0.5 < 17.2 and 0.5 + row.cost == 17.17",
        "sum([row.cost, 0.33]) == 17 and -row.cost == -16.67 and row.tenth ** 2 == 0.01",
        "row.wide + row.wide == row.wide * 2 and row.wide + 0.001 != row.wide",
        "row.day == '2026-02-01' and row.day >= '2026-01-31' and row.day < '2026-02-02'",
        "row.day in ('2026-02-01', '2026-02-02') and '2026-02-01' == row.day and row.day != '2026-02-02'",
        "row.at == '2026-02-01T08:00:00Z' and row.at == '2026-02-01T10:00:00+02:00' and row.at > '2026-02-01'",
        "row.at == '2026-02-01T08:00:00' and row.naive == row.at and row.naive == '2026-02-01T08:00:00Z'",
        "row.raw == 'AAE=' and row.raw != 'AAI=' and row.raw < 'AAI='",
        "row.open == 'true' and row.open == True and row.open != 'False'",
        "row.side == 'buy' and row.side in ('buy', 'sell')",
        f"row.id == '{ID}'",
        "row.sent > 16 and row.sent == 16.67 and row.sent - 1 > 15 and row.sent < row.wide and row.sent == row.cost",
        "row.count == '5' and row.count < '6.5' and row.ratio == '0.1'",
        "row.name != 5 and not row.name == 5 and row.name > 'a'",
        "row.by_cost[16.67] == 1 and 16.67 in row.by_cost",
        "row.by_day['2026-02-01'] == 2 and '2026-02-02' not in row.by_day",
        "not row.nothing < 5 and row.nothing != '2026-02-01' and row.day != row.nothing",
    ],
)
def test_what_is_meant(text: str) -> None:
    """Decimals beside floats, text beside dates, times, bytes, truths and numbers; a time without a
    zone is in UTC.
    """
    assert parse_condition(text, ("row",)).evaluate({"row": ROW}) is True


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_no_decimal_is(value: float) -> None:
    """Floats that are no number, or without end, compare with a decimal as with any float."""
    names = {"row": {"price": Decimal("1.5"), "limit": value}}
    assert parse_condition("row.price < row.limit", ("row",)).is_true(names) is (value == inf)
    assert parse_condition("row.price == row.limit", ("row",)).is_true(names) is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("row.day == '1.2.2026'", "'1.2.2026' is no date: write it like '2026-11-16'"),
        ("row.day >= 'soon'", "'soon' is no date"),
        ("row.at < 'yesterday'", "'yesterday' is no time: write it like '2026-11-16T08:00:00Z'"),
        ("row.raw == '?'", "is not base64"),
        ("row.day < row.at", "row.day is date and row.at is datetime: neither is more or less"),
        ("row.day < 5", "row.day is date and 5 is a number"),
        ("row.name < 5", "row.name is text and 5 is a number"),
    ],
)
def test_what_can_mean_nothing(text: str, told: str) -> None:
    """A slip is said, with how to write it: to be silent would be to say that no row is like that."""
    with pytest.raises(ConfigError) as refused:
        parse_condition(text, ("row",)).evaluate({"row": ROW})
    assert told in refused.value.message


def test_all_is_as_it_was_in_utc() -> None:
    """What is given is not changed by looking at it."""
    assert ROW["at"].astimezone(UTC).hour == 8
    assert ROW["naive"].tzinfo is None
