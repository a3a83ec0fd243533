"""Alike: two values as people mean them when they compare them. A price is 16.67 whether a decimal
or a float says so.

Beside a date, a time, bytes, a number or a truth, text is read as one of these: `row.day >=
'2026-02-01'`. A time without a zone is in UTC, bytes are written in base64, as messages and traces
have them. Text that is no date beside a date is an error; text that is no number is not equal to
any, and neither more nor less.

Next room: expression.py compares by these; table.py says which types columns have.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any
from uuid import UUID

NUMBER_TYPES = (int, float, Decimal)
NUMBER_PATTERN = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
BOOLEANS = {"true": True, "false": False}
TYPE_NAMES: dict[type, str] = {
    str: "text",
    bytes: "bytes",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def to_comparable(left: Any, right: Any) -> tuple[Any, Any]:
    """The two as values of one kind, where they can be."""
    kind = left.__class__
    if left is None or right is None or (kind is right.__class__ and kind is not datetime):
        return left, right
    left, right = _unwrap(left), _unwrap(right)
    if isinstance(left, str):
        return parse_like(right, left), right
    if isinstance(right, str):
        return left, parse_like(left, right)
    return _match_precision(left, right), _match_precision(right, left)


def parse_like(example: Any, text: str) -> Any:
    """Text as a value of the kind of another."""
    if isinstance(example, bool):
        return BOOLEANS.get(text.lower(), text)
    if isinstance(example, NUMBER_TYPES):
        found = parse_number(text)
        return text if found is None else float(found) if isinstance(example, float) else found
    if isinstance(example, date):
        return _parse_time(text) if isinstance(example, datetime) else _parse_date(text)
    return _parse_base64(text) if isinstance(example, bytes) else text


def coerce_key(mapping: Mapping[Any, Any], wanted_key: Any) -> Any:
    """What is asked for as a key of the kind that a mapping has."""
    first = next(iter(mapping), None)
    return (
        wanted_key if first is None or wanted_key is None else to_comparable(first, wanted_key)[1]
    )


def parse_number(text: str) -> Decimal | None:
    """A number that is written in a text; None: it is none."""
    return Decimal(text) if len(text) < 100 and NUMBER_PATTERN.fullmatch(text) else None


def describe_type(value: Any) -> str:
    """What a value is, for people."""
    return TYPE_NAMES.get(value.__class__, value.__class__.__name__)


def _match_precision(value: Any, counterpart: Any) -> Any:
    """A float beside a decimal, as it is written; beside a float, a decimal as a float."""
    if value.__class__ is float and counterpart.__class__ is Decimal and isfinite(value):
        return Decimal(repr(value))
    return (
        float(value)
        if value.__class__ is Decimal
        and counterpart.__class__ is float
        and not isfinite(counterpart)
        else value
    )


def _unwrap(value: Any) -> Any:
    """What stands behind an enumeration or an id; a time without a zone is in UTC."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    return (
        value.value if isinstance(value, Enum) else str(value) if isinstance(value, UUID) else value
    )


def _parse_time(text: str) -> datetime:
    try:
        found: datetime = _unwrap(datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{text[:50]!r} is no time: write it like '2026-11-16T08:00:00Z'"
        ) from None
    return found


def _parse_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is no date: write it like '2026-11-16'") from None


def _parse_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is not base64, in which bytes are written") from None
