"""Which texts a timestamp column takes, and as which instant."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from seriatim.engine.messages import Poison
from seriatim.engine.table import TableMachine
from seriatim.errors import ConfigError
from seriatim.operations.inspect.explain import parse_row_key
from seriatim.testing import fold_table

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EAST = timezone(timedelta(hours=2))
TAKEN = {
    "2024-05-01T12:00:00Z": NOON,
    "2024-05-01t12:00:00z": NOON,
    "2024-05-01T12:00:00": NOON,
    "2024-05-01 12:00:00": NOON,
    "2024-05-01 12:00": NOON,
    "2024-05-01T12:00Z": NOON,
    "2024-05-01 12:00:00+00": NOON,
    "2024-05-01 12:00:00-00": NOON,
    "2024-05-01 12:00:00.123456+02": datetime(2024, 5, 1, 12, 0, 0, 123456, EAST),
    "2024-05-01 12:00:00.5+05:30": datetime(2024, 5, 1, 6, 30, 0, 500000, UTC),
    "2024-05-01T12:00:00+0200": datetime(2024, 5, 1, 12, tzinfo=EAST),
    "2024-05-01T12:00:00,5Z": datetime(2024, 5, 1, 12, 0, 0, 500000, UTC),
    "2024-05-01 12:00:00.1234567+00": datetime(2024, 5, 1, 12, 0, 0, 123457, UTC),
    "20240501T120000Z": NOON,
    "20240501T120000": NOON,
    "20240501T1200+02": datetime(2024, 5, 1, 12, tzinfo=EAST),
    "20240501T120000.25+0200": datetime(2024, 5, 1, 12, 0, 0, 250000, EAST),
    "2024-05-01": datetime(2024, 5, 1, tzinfo=UTC),
}
REFUSED = [
    "infinity",
    "-infinity",
    "20240501",
    "2024-05",
    "2024-W18-3",
    "2024-122",
    "2024-05-01T12",
    "2024-05-01T24:00:00Z",
    "2024-05-01T12:00:60Z",
    "2024-13-01 12:00:00+00",
    "2024-02-30",
    "2024-05-01T120000Z",
    "20240501 120000Z",
    "2024-05-01 12:00:00 +00",
    "2024-05-01 12:00:00+05:53:28",
    "2024-05-01 12:00:00+24",
    "0044-03-15 12:00:00+00 BC",
    "2024-05-01 12:00:00+00\n",
    "٢٠٢٤-05-01",
    "",
    "noon",
]


def machine(**more: Any) -> TableMachine:
    """Rows with a time as a value and one as a part of the key."""
    columns = {"id": "string", "day": "timestamp", "at": "timestamp", "cost": "decimal(20,2)"}
    return TableMachine(key=["id", "day"], columns=columns, before=False, **more)


def decoded(message: dict[str, Any], **more: Any) -> Any:
    """One message as the machine takes it."""
    (found,) = machine(**more).decode([json.dumps(message).encode()])
    return found


@pytest.mark.parametrize("kind", ["insert", "update"])
@pytest.mark.parametrize("text", TAKEN)
def test_times_are_taken_as_producers_write_them(text: str, kind: str) -> None:
    """ISO 8601 in both forms, and PostgreSQL's own; without a zone they are in UTC."""
    message = decoded(
        {"type": kind, "id": "a", "day": text, "at": text, "cost": "0.10", "seq": 7}, sequence="seq"
    )
    assert message.__class__.__name__ == kind.title()
    assert message.c1 == TAKEN[text]
    found = message.c2 if message.c2.tzinfo else message.c2.replace(tzinfo=UTC)
    assert (found, str(message.c3), message.sequence) == (TAKEN[text], "0.10", 7)


@pytest.mark.parametrize("text", REFUSED)
def test_what_could_mean_something_else_is_poison(text: str) -> None:
    """It is refused as a value and as a key, and the cause names the column."""
    for column in ("at", "day"):
        body = {"type": "insert", "id": "a", "day": "2024-05-01", "at": "2024-05-01", column: text}
        message = decoded(body)
        assert message.__class__ is Poison
        assert "wrong schema" in message.cause


def test_one_instant_is_one_key_however_it_is_written() -> None:
    """A snapshot, an update and a delete name the same row in three forms; null and left out stay
    what they are.
    """
    row = {"id": "a", "day": "2024-05-01 02:00:00+02", "at": "20240501T120000Z", "cost": 1}
    table = {"id": "string", "day": "timestamp", "at": "timestamp", "cost": "int64"}
    messages: list[Any] = [
        {"type": "snapshot", "rows": [row, {"id": "b", "day": "2024-05-01", "at": None}]},
        {"type": "update", "id": "a", "day": "2024-05-01T00:00:00Z", "cost": 2},
        {"type": "update", "id": "a", "day": "2024-05-01", "cost": 3},
        {"type": "delete", "id": "b", "day": "20240501T0000Z", "at": "no time at all"},
    ]
    done = fold_table(messages, key=["id", "day"], columns=table)
    assert not done.findings
    assert [record["op"] for record in done.records] == [
        "snapshot",
        "snapshot",
        "update",
        "update",
        "delete",
    ]
    assert done.state == {
        "rows": [
            {"id": "a", "day": "2024-05-01T00:00:00Z", "at": "2024-05-01T12:00:00Z", "cost": 3}
        ]
    }


def test_a_row_is_asked_for_by_any_of_these_texts() -> None:
    """`explain --row` reads a time as a message's is read."""
    only = TableMachine(key=["day"], columns={"day": "timestamp"}, before=False)
    assert (
        parse_row_key(only, "2024-05-01 12:00:00+00")
        == parse_row_key(only, "20240501T120000Z")
        == {"day": NOON}
    )
    with pytest.raises(ConfigError, match="day is timestamp"):
        parse_row_key(only, "noon")
