"""JSON objects to columns, straight from Arrow's buffers. What it is not sure about it leaves to
msgspec.

A message is *usual* if every byte of it was understood: plain text without escapes in the columns
we want, numbers that are exact, valid JSON in the fields that we skip. Everything else has kind
`UNSURE`.

Next room: rows.py folds what was parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import MISSING, NULL, Array, compiled, compiled_inner
from seriatim.fast.scan import (
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MINUS,
    NUMBER_BAD,
    NUMBER_FRACTION,
    NUMBER_INTEGER,
    OPEN_OBJECT,
    QUOTE,
    read_number,
    skip_blanks,
    skip_literal,
    skip_value,
    text_end,
)

UNSURE, SNAPSHOT, INSERT, UPDATE, DELETE = -1, 0, 1, 2, 3
TYPE_FIELD, SEQUENCE_FIELD, ROWS_FIELD, FIRST_COLUMN_FIELD = 0, 1, 2, 3
"""Places of the wanted fields: three of our own, then the columns."""
DIGITS_MAX, EXACT_DIGITS_MAX, EXPONENT_MAX = 18, 15, 280
POWERS_OF_TEN = 10.0 ** np.arange(23)
"""Powers of ten that a float64 holds exactly."""


class FieldLayout(NamedTuple):
    """The fields that a table machine wants of a message."""

    name_bytes: Array
    """Their names as bytes, one after the other."""
    name_edges: Array
    column_kinds: Array
    """Of the columns alone."""
    is_required: Array
    """Columns that must be there and not null: the key."""
    has_sequence: bool


class ParsedMessages(NamedTuple):
    """Messages in columns. A text cell is a place in the batch's bytes; a float cell its 64 bits."""

    kinds: Array
    sequences: Array
    cells: Array
    floats: Array
    """The same memory as `cells`."""
    sizes: Array
    long_floats: Array
    """Floats of more digits than are exact at once: (message, column, place, size)."""


@compiled_inner
def find_field(d: Array, begin: int, end: int, layout: FieldLayout, guess: int) -> int:
    """Which wanted field has this name; -1: none. Fields mostly come in the same order, so one is
    guessed first.
    """
    size, count = end - begin, len(layout.name_edges) - 1
    for step in range(count):
        field = guess + step
        if field >= count:
            field -= count
        start = layout.name_edges[field]
        if layout.name_edges[field + 1] - start == size:
            j = 0
            while j < size and layout.name_bytes[start + j] == d[begin + j]:
                j += 1
            if j == size:
                return field
    return -1


@compiled_inner
def parse_message_kind(d: Array, i: int, size: int) -> int:
    """The kind of a message by its type's name."""
    if size == 8 and is_equal_bytes(d, i, b"snapshot"):
        return SNAPSHOT
    if size == 6 and is_equal_bytes(d, i, b"insert"):
        return INSERT
    if size == 6 and is_equal_bytes(d, i, b"update"):
        return UPDATE
    if size == 6 and is_equal_bytes(d, i, b"delete"):
        return DELETE
    return UNSURE


@compiled_inner
def is_equal_bytes(d: Array, i: int, name: bytes) -> bool:
    """Whether these bytes are here."""
    for j in range(len(name)):
        if d[i + j] != name[j]:
            return False
    return True


@compiled_inner
def parse_float_cell(
    d: Array,
    i: int,
    r: int,
    c: int,
    parsed_number: tuple[int, int, int, int, int],
    parsed: ParsedMessages,
    long_float_count: int,
) -> int:
    """Put a float into its cell; how many hard ones there are now, -1 if unsure."""
    end, kind, mantissa, count, power = parsed_number
    if count > DIGITS_MAX or power > EXPONENT_MAX or power < -EXPONENT_MAX:
        return -1
    parsed.sizes[c, r] = 0
    if count > EXACT_DIGITS_MAX or power > 22 or power < -22:
        if long_float_count >= len(parsed.long_floats):
            return -1
        (
            parsed.long_floats[long_float_count, 0],
            parsed.long_floats[long_float_count, 1],
            parsed.long_floats[long_float_count, 2],
            parsed.long_floats[long_float_count, 3],
        ) = r, c, i, end - i
        return long_float_count + 1
    value = np.float64(mantissa)
    value = value * POWERS_OF_TEN[power] if power >= 0 else value / POWERS_OF_TEN[-power]
    negative = d[i] == MINUS and (
        kind == NUMBER_FRACTION or mantissa != 0
    )  # -0 is a whole number, so it is 0.0
    parsed.floats[c, r] = -value if negative else value
    return long_float_count


@compiled_inner
def parse_column_cell(
    d: Array,
    i: int,
    e: int,
    r: int,
    c: int,
    kind: int,
    parsed: ParsedMessages,
    long_float_count: int,
) -> tuple[int, int]:
    """Put a value into its cell: (place after it, or -1 if unsure; how many hard floats there are
    now).
    """
    if i >= e or parsed.sizes[c, r] != MISSING:  # a field that comes twice is unsure
        return -1, long_float_count
    if d[i] == 110:
        parsed.sizes[c, r] = NULL
        return skip_literal(d, i, e), long_float_count
    if kind == TEXT:
        end = text_end(d, i + 1, e) if d[i] == QUOTE else -1
        parsed.cells[c, r], parsed.sizes[c, r] = i + 1, end - i - 1
        return end + 1 if end >= 0 else -1, long_float_count
    if kind == BOOL:
        parsed.cells[c, r], parsed.sizes[c, r] = 1 if d[i] == 116 else 0, 0
        return skip_literal(d, i, e), long_float_count
    if d[i] != MINUS and not (d[i] >= 48 and d[i] <= 57):
        return -1, long_float_count
    found = read_number(d, i, e)
    if found[1] == NUMBER_BAD:
        return -1, long_float_count
    if kind == FLOAT:
        long_float_count = parse_float_cell(d, i, r, c, found, parsed, long_float_count)
        return (found[0], long_float_count) if long_float_count >= 0 else (-1, 0)
    if found[1] != NUMBER_INTEGER or found[3] > DIGITS_MAX:
        return -1, long_float_count
    parsed.cells[c, r], parsed.sizes[c, r] = -found[2] if d[i] == MINUS else found[2], 0
    return found[0], long_float_count


@compiled_inner
def parse_own_field(
    d: Array, i: int, e: int, r: int, field: int, seen_fields: int, parsed: ParsedMessages
) -> int:
    """Type, sequence or rows: the place after it, -1 if unsure."""
    if i >= e or (seen_fields >> field) & 1 == 1:
        return -1
    if field == TYPE_FIELD:
        end = text_end(d, i + 1, e) if d[i] == QUOTE else -1
        if end < 0:
            return -1
        parsed.kinds[r] = parse_message_kind(d, i + 1, end - i - 1)
        return end + 1 if parsed.kinds[r] != UNSURE else -1
    if field == ROWS_FIELD:
        return skip_value(d, i, e)
    if d[i] != MINUS and not (d[i] >= 48 and d[i] <= 57):
        return -1
    end, kind, mantissa, count, _ = read_number(d, i, e)
    if kind != NUMBER_INTEGER or count > DIGITS_MAX:
        return -1
    parsed.sequences[r] = -mantissa if d[i] == MINUS else mantissa
    return end


@compiled_inner
def parse_message(
    d: Array,
    i: int,
    e: int,
    r: int,
    layout: FieldLayout,
    parsed: ParsedMessages,
    long_float_count: int,
) -> tuple[bool, int]:
    """Parse one object: (whether all of it was understood, how many hard floats there are now)."""
    i = skip_blanks(d, i, e)
    if i >= e or d[i] != OPEN_OBJECT:
        return False, long_float_count
    seen, guess, more = 0, 0, True
    while more:
        i = skip_blanks(d, i + 1, e)
        if i >= e or d[i] != QUOTE:
            return False, long_float_count
        begin, end = i + 1, text_end(d, i + 1, e)
        if end < 0:
            return False, long_float_count
        i = skip_blanks(d, end + 1, e)
        if i >= e or d[i] != COLON:
            return False, long_float_count
        i = skip_blanks(d, i + 1, e)
        field = find_field(d, begin, end, layout, guess)
        if field >= 0:
            guess = field + 1 if field + 1 < len(layout.name_edges) - 1 else 0
        if field >= FIRST_COLUMN_FIELD:
            i, long_float_count = parse_column_cell(
                d,
                i,
                e,
                r,
                field - FIRST_COLUMN_FIELD,
                layout.column_kinds[field - FIRST_COLUMN_FIELD],
                parsed,
                long_float_count,
            )
        elif field >= 0:
            i = parse_own_field(d, i, e, r, field, seen, parsed)
            seen |= 1 << field
        else:
            i = skip_value(d, i, e)
        if i < 0:
            return False, long_float_count
        i = skip_blanks(d, i, e)
        if i >= e or (d[i] != COMMA and d[i] != CLOSE_OBJECT):
            return False, long_float_count
        more = d[i] == COMMA
    sequenced = not layout.has_sequence or (seen >> SEQUENCE_FIELD) & 1 == 1
    return skip_blanks(d, i + 1, e) == e and seen & 1 == 1 and sequenced, long_float_count


@compiled
def parse_messages(d: Array, edges: Array, layout: FieldLayout, parsed: ParsedMessages) -> int:
    """Parse messages between edges; how many hard floats there are. `sizes` must be MISSING
    everywhere.
    """
    hard = 0
    for r in range(len(edges) - 1):
        parsed.kinds[r] = UNSURE
        before = hard
        understood, hard = parse_message(d, edges[r], edges[r + 1], r, layout, parsed, hard)
        if understood and parsed.kinds[r] != SNAPSHOT:
            for c in range(len(layout.column_kinds)):
                if layout.is_required[c] and parsed.sizes[c, r] < 0:
                    understood = False
        if not understood:
            parsed.kinds[r] = UNSURE
            hard = before
    return hard
