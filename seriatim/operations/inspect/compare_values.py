"""Comparable values: two values as people mean them when they compare them.

A price is 16.67 whether it is a decimal or a float. Beside a date, a time, bytes, a number or a
boolean, text is read as one of these, as in `row.day >= '2026-02-01'`. A time without a zone is in
UTC. Bytes are written in base64, as messages and traces have them. Text that is no date beside a
date is an error; text that is no number is not equal to any number, and neither more nor less.

Next: operations/inspect/condition.py compares by these; engine/table.py says which types columns
have.
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
# Bounded, since a number like 1e999999999 takes forever to calculate with.
NUMBER_PATTERN = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
BOOLEANS = {"true": True, "false": False}
TYPE_NAMES: dict[type, str] = {
    str: "text",
    bytes: "bytes",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def to_comparable(left_value: Any, right_value: Any) -> tuple[Any, Any]:
    """Both values as values of one type, where that is possible; otherwise as they are."""
    if left_value is None or right_value is None:
        return left_value, right_value
    left_class = left_value.__class__
    # Two datetimes still have to agree on a time zone.
    if left_class is right_value.__class__ and left_class is not datetime:
        return left_value, right_value
    left_plain = _unwrap(left_value)
    right_plain = _unwrap(right_value)
    if isinstance(left_plain, str):
        return parse_like(right_plain, left_plain), right_plain
    if isinstance(right_plain, str):
        return left_plain, parse_like(left_plain, right_plain)
    left_number = _match_precision(left_plain, right_plain)
    right_number = _match_precision(right_plain, left_plain)
    return left_number, right_number


def parse_like(example: Any, text: str) -> Any:
    """Text as a value of the type of `example`; the text itself if it is no such value.

    A ValueError says that text is no time, date or base64 where one is needed.
    """
    # A bool is an int, and a datetime is a date: the special type is asked for first.
    if isinstance(example, bool):
        return BOOLEANS.get(text.lower(), text)
    if isinstance(example, NUMBER_TYPES):
        return _parse_number_like(example, text)
    if isinstance(example, datetime):
        return _parse_time(text)
    if isinstance(example, date):
        return _parse_date(text)
    if isinstance(example, bytes):
        return _parse_base64(text)
    return text


def _parse_number_like(example: Any, text: str) -> Any:
    number = parse_number(text)
    if number is None:
        return text
    if isinstance(example, float):
        return float(number)
    return number


def coerce_key(mapping: Mapping[Any, Any], wanted_key: Any) -> Any:
    """A key that somebody asks for, as a value of the type that the mapping's keys have."""
    if wanted_key is None:
        return None
    for key in mapping:
        # All keys of a mapping are of one type: the first one tells.
        return to_comparable(key, wanted_key)[1]
    return wanted_key


def parse_number(text: str) -> Decimal | None:
    """The number that is written in a text; None: it is no number."""
    if len(text) < 100 and NUMBER_PATTERN.fullmatch(text):
        return Decimal(text)
    return None


def describe_type(value: Any) -> str:
    """The type of a value in words for people."""
    return TYPE_NAMES.get(value.__class__, value.__class__.__name__)


def _match_precision(value: Any, counterpart: Any) -> Any:
    """A float beside a decimal becomes the decimal that it is written as.

    A decimal beside an infinite float or NaN becomes a float, since no decimal compares with those.
    """
    value_class = value.__class__
    counterpart_class = counterpart.__class__
    if value_class is float and counterpart_class is Decimal and isfinite(value):
        return Decimal(repr(value))
    if value_class is Decimal and counterpart_class is float and not isfinite(counterpart):
        return float(value)
    return value


def _unwrap(value: Any) -> Any:
    """The value of an enumeration's member, the text of a UUID; a time without a zone is in UTC."""
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    return value


def _parse_time(text: str) -> datetime:
    try:
        time: datetime = _unwrap(datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{text[:50]!r} is no time: write it like '2026-11-16T08:00:00Z'"
        ) from None
    return time


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
