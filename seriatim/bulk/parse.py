"""JSON objects to columns, straight from Arrow's buffers. What it is not sure about it leaves to msgspec.

A message is *usual* if every byte of it was understood: plain text without escapes in the columns we want,
numbers that are exact, valid JSON in the fields that we skip. Everything else has kind `UNSURE`.

Next room: rows.py folds what was parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seriatim.bulk.compiled import MISSING, NULL, Array, compiled, inside
from seriatim.bulk.kinds import BOOL, FLOAT, TEXT
from seriatim.bulk.scan import (
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MINUS,
    NUMBER_BAD,
    NUMBER_FRACTION,
    NUMBER_WHOLE,
    OPEN_OBJECT,
    QUOTE,
    blank,
    number,
    skip,
    text_end,
    word,
)

UNSURE, SNAPSHOT, INSERT, UPDATE, DELETE = -1, 0, 1, 2, 3
TYPE, SEQUENCE, ROWS, COLUMNS = 0, 1, 2, 3
"""Places of the wanted fields: three of our own, then the columns."""
DIGITS_MAX, EXACT_DIGITS_MAX, EXPONENT_MAX = 18, 15, 280
TENS = 10.0 ** np.arange(23)
"""Powers of ten that a float64 holds exactly."""


class Wanted(NamedTuple):
    """The fields that a table machine wants of a message."""

    names: Array
    """Their names as bytes, one after the other."""
    edges: Array
    kinds: Array
    """Of the columns alone."""
    required: Array
    """Columns that must be there and not null: the key."""
    sequenced: bool


class Parsed(NamedTuple):
    """Messages in columns. A text cell is a place in the batch's bytes; a float cell its 64 bits."""

    kinds: Array
    sequences: Array
    cells: Array
    floats: Array
    """The same memory as `cells`."""
    sizes: Array
    hard: Array
    """Floats of more digits than are exact at once: (message, column, place, size)."""


@inside
def field_of(d: Array, begin: int, end: int, wanted: Wanted, guess: int) -> int:
    """Which wanted field has this name; -1: none. Fields mostly come in the same order, so one is guessed first."""
    size, count = end - begin, len(wanted.edges) - 1
    for step in range(count):
        field = guess + step
        if field >= count:
            field -= count
        start = wanted.edges[field]
        if wanted.edges[field + 1] - start == size:
            j = 0
            while j < size and wanted.names[start + j] == d[begin + j]:
                j += 1
            if j == size:
                return field
    return -1


@inside
def kind_of(d: Array, i: int, size: int) -> int:
    """The kind of a message by its type's name."""
    if size == 8 and same(d, i, b"snapshot"):
        return SNAPSHOT
    if size == 6 and same(d, i, b"insert"):
        return INSERT
    if size == 6 and same(d, i, b"update"):
        return UPDATE
    if size == 6 and same(d, i, b"delete"):
        return DELETE
    return UNSURE


@inside
def same(d: Array, i: int, name: bytes) -> bool:
    """Whether these bytes are here."""
    for j in range(len(name)):
        if d[i + j] != name[j]:
            return False
    return True


@inside
def float_cell(d: Array, i: int, r: int, c: int, found: tuple[int, int, int, int, int], out: Parsed, hard: int) -> int:
    """Put a float into its cell; how many hard ones there are now, -1 if unsure."""
    end, kind, mantissa, count, power = found
    if count > DIGITS_MAX or power > EXPONENT_MAX or power < -EXPONENT_MAX:
        return -1
    out.sizes[c, r] = 0
    if count > EXACT_DIGITS_MAX or power > 22 or power < -22:
        if hard >= len(out.hard):
            return -1
        out.hard[hard, 0], out.hard[hard, 1], out.hard[hard, 2], out.hard[hard, 3] = r, c, i, end - i
        return hard + 1
    value = np.float64(mantissa)
    value = value * TENS[power] if power >= 0 else value / TENS[-power]
    negative = d[i] == MINUS and (kind == NUMBER_FRACTION or mantissa != 0)  # -0 is a whole number, so it is 0.0
    out.floats[c, r] = -value if negative else value
    return hard


@inside
def column_cell(d: Array, i: int, e: int, r: int, c: int, kind: int, out: Parsed, hard: int) -> tuple[int, int]:
    """Put a value into its cell: (place after it, or -1 if unsure; how many hard floats there are now)."""
    if i >= e or out.sizes[c, r] != MISSING:  # a field that comes twice is unsure
        return -1, hard
    if d[i] == 110:
        out.sizes[c, r] = NULL
        return word(d, i, e), hard
    if kind == TEXT:
        end = text_end(d, i + 1, e) if d[i] == QUOTE else -1
        out.cells[c, r], out.sizes[c, r] = i + 1, end - i - 1
        return end + 1 if end >= 0 else -1, hard
    if kind == BOOL:
        out.cells[c, r], out.sizes[c, r] = 1 if d[i] == 116 else 0, 0
        return word(d, i, e), hard
    if d[i] != MINUS and not (d[i] >= 48 and d[i] <= 57):
        return -1, hard
    found = number(d, i, e)
    if found[1] == NUMBER_BAD:
        return -1, hard
    if kind == FLOAT:
        hard = float_cell(d, i, r, c, found, out, hard)
        return (found[0], hard) if hard >= 0 else (-1, 0)
    if found[1] != NUMBER_WHOLE or found[3] > DIGITS_MAX:
        return -1, hard
    out.cells[c, r], out.sizes[c, r] = -found[2] if d[i] == MINUS else found[2], 0
    return found[0], hard


@inside
def own_field(d: Array, i: int, e: int, r: int, field: int, seen: int, out: Parsed) -> int:
    """Type, sequence or rows: the place after it, -1 if unsure."""
    if i >= e or (seen >> field) & 1 == 1:
        return -1
    if field == TYPE:
        end = text_end(d, i + 1, e) if d[i] == QUOTE else -1
        if end < 0:
            return -1
        out.kinds[r] = kind_of(d, i + 1, end - i - 1)
        return end + 1 if out.kinds[r] != UNSURE else -1
    if field == ROWS:
        return skip(d, i, e)
    if d[i] != MINUS and not (d[i] >= 48 and d[i] <= 57):
        return -1
    end, kind, mantissa, count, _ = number(d, i, e)
    if kind != NUMBER_WHOLE or count > DIGITS_MAX:
        return -1
    out.sequences[r] = -mantissa if d[i] == MINUS else mantissa
    return end


@inside
def message(d: Array, i: int, e: int, r: int, wanted: Wanted, out: Parsed, hard: int) -> tuple[bool, int]:
    """Parse one object: (whether all of it was understood, how many hard floats there are now)."""
    i = blank(d, i, e)
    if i >= e or d[i] != OPEN_OBJECT:
        return False, hard
    seen, guess, more = 0, 0, True
    while more:
        i = blank(d, i + 1, e)
        if i >= e or d[i] != QUOTE:
            return False, hard
        begin, end = i + 1, text_end(d, i + 1, e)
        if end < 0:
            return False, hard
        i = blank(d, end + 1, e)
        if i >= e or d[i] != COLON:
            return False, hard
        i = blank(d, i + 1, e)
        field = field_of(d, begin, end, wanted, guess)
        if field >= 0:
            guess = field + 1 if field + 1 < len(wanted.edges) - 1 else 0
        if field >= COLUMNS:
            i, hard = column_cell(d, i, e, r, field - COLUMNS, wanted.kinds[field - COLUMNS], out, hard)
        elif field >= 0:
            i = own_field(d, i, e, r, field, seen, out)
            seen |= 1 << field
        else:
            i = skip(d, i, e)
        if i < 0:
            return False, hard
        i = blank(d, i, e)
        if i >= e or (d[i] != COMMA and d[i] != CLOSE_OBJECT):
            return False, hard
        more = d[i] == COMMA
    sequenced = not wanted.sequenced or (seen >> SEQUENCE) & 1 == 1
    return blank(d, i + 1, e) == e and seen & 1 == 1 and sequenced, hard


@compiled
def parse(d: Array, edges: Array, wanted: Wanted, out: Parsed) -> int:
    """Parse messages between edges; how many hard floats there are. `sizes` must be MISSING everywhere."""
    hard = 0
    for r in range(len(edges) - 1):
        out.kinds[r] = UNSURE
        before = hard
        understood, hard = message(d, edges[r], edges[r + 1], r, wanted, out, hard)
        if understood and out.kinds[r] != SNAPSHOT:
            for c in range(len(wanted.kinds)):
                if wanted.required[c] and out.sizes[c, r] < 0:
                    understood = False
        if not understood:
            out.kinds[r] = UNSURE
            hard = before
    return hard
