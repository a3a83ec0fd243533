"""Alike: two values as people mean them when they compare them. A price is 16.67 whether a decimal or a float says so.

Beside a date, a time, bytes, a number or a truth, text is read as one of these: `row.day >= '2026-02-01'`. A time
without a zone is in UTC, bytes are written in base64, as messages and traces have them. Text that is no date beside a
date is an error; text that is no number is not equal to any, and neither more nor less.

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

NUMBERS = (int, float, Decimal)
NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
TRUTHS = {"true": True, "false": False}
NAMES: dict[type, str] = {str: "text", bytes: "bytes", bool: "true or false", int: "a number", float: "a number"}


def alike(one: Any, other: Any) -> tuple[Any, Any]:
    """The two as values of one kind, where they can be."""
    kind = one.__class__
    if one is None or other is None or (kind is other.__class__ and kind is not datetime):
        return one, other
    one, other = _plain(one), _plain(other)
    if isinstance(one, str):
        return beside(other, one), other
    if isinstance(other, str):
        return one, beside(one, other)
    return _exact(one, other), _exact(other, one)


def beside(value: Any, text: str) -> Any:
    """Text as a value of the kind of another."""
    if isinstance(value, bool):
        return TRUTHS.get(text.lower(), text)
    if isinstance(value, NUMBERS):
        found = number(text)
        return text if found is None else float(found) if isinstance(value, float) else found
    if isinstance(value, date):
        return _time(text) if isinstance(value, datetime) else _date(text)
    return _bytes(text) if isinstance(value, bytes) else text


def key(mapping: Mapping[Any, Any], asked: Any) -> Any:
    """What is asked for as a key of the kind that a mapping has."""
    first = next(iter(mapping), None)
    return asked if first is None or asked is None else alike(first, asked)[1]


def number(text: str) -> Decimal | None:
    """A number that is written in a text; None: it is none."""
    return Decimal(text) if len(text) < 100 and NUMBER.fullmatch(text) else None


def named(value: Any) -> str:
    """What a value is, for people."""
    return NAMES.get(value.__class__, value.__class__.__name__)


def _exact(value: Any, beside: Any) -> Any:
    """A float beside a decimal, as it is written; beside a float, a decimal as a float."""
    if value.__class__ is float and beside.__class__ is Decimal and isfinite(value):
        return Decimal(repr(value))
    return float(value) if value.__class__ is Decimal and beside.__class__ is float and not isfinite(beside) else value


def _plain(value: Any) -> Any:
    """What stands behind an enumeration or an id; a time without a zone is in UTC."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, UUID) else value


def _time(text: str) -> datetime:
    try:
        found: datetime = _plain(datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(f"{text[:50]!r} is no time: write it like '2026-11-16T08:00:00Z'") from None
    return found


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is no date: write it like '2026-11-16'") from None


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is not base64, in which bytes are written") from None
