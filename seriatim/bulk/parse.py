"""JSON objects to columns, straight from Arrow's buffers. What it is not sure about it leaves to msgspec.

A message is *usual* if every byte of it was understood: plain text without escapes in the columns we want,
numbers that are exact, valid JSON in the fields that we skip. Everything else has kind `UNSURE`.

Next room: rows.py folds what was parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seriatim.bulk.compiled import MISSING, NULL, Array, compiled, eight, inside, int64, uint64
from seriatim.bulk.kinds import BOOL, FLOAT, TEXT

UNSURE, SNAPSHOT, INSERT, UPDATE, DELETE = -1, 0, 1, 2, 3
TYPE, SEQUENCE, ROWS, COLUMNS = 0, 1, 2, 3
"""Places of the wanted fields: three of our own, then the columns."""
DIGITS_MAX, EXACT_DIGITS_MAX, EXPONENT_MAX, DEPTH_MAX = 18, 15, 280, 60
TENS = 10.0 ** np.arange(23)
"""Powers of ten that a float64 holds exactly."""
QUOTE, BACKSLASH, COMMA, COLON, MINUS, DOT = 34, 92, 44, 58, 45, 46
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93
ZERO, ONES, BLANKS = uint64(0), uint64(0x0101010101010101), uint64(0x2020202020202020)
QUOTES, BACKSLASHES = uint64(0x2222222222222222), uint64(0x5C5C5C5C5C5C5C5C)
HIGH_BITS = uint64(0x8080808080808080)
"""Eight bytes at once."""
NUMBER_BAD, NUMBER_WHOLE, NUMBER_FRACTION = 0, 1, 2


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
def blank(d: Array, i: int, e: int) -> int:
    """The next place that is no white space."""
    while i < e and (d[i] == 32 or d[i] == 10 or d[i] == 13 or d[i] == 9):
        i += 1
    return i


@inside
def plain_run(d: Array, i: int, e: int) -> int:
    """A place up to which a text has neither quote nor escape nor control, looked at eight bytes at once.

    Taking 1 from a byte borrows into its highest bit only if it was 0, and 32 only if it was less.
    """
    while i + 8 <= e:
        x = eight(d, i)
        quote, escape = x ^ QUOTES, x ^ BACKSLASHES
        found = ((quote - ONES) & ~quote) | ((escape - ONES) & ~escape) | ((x - BLANKS) & ~x)
        if found & HIGH_BITS != ZERO:
            return i
        i += 8
    return i


@inside
def text_end(d: Array, i: int, e: int) -> int:
    """The closing quote of a text without escapes; -1 if it has any, or is none."""
    i = plain_run(d, i, e)
    while i < e:
        c = d[i]
        if c == QUOTE:
            return i
        if c == BACKSLASH or c < 32:
            return -1
        i += 1
    return -1


@inside
def skip_text(d: Array, i: int, e: int) -> int:
    """The closing quote of any valid text; -1 if unsure."""
    i = plain_run(d, i, e)
    while i < e:
        c = d[i]
        if c == QUOTE:
            return i
        if c < 32:
            return -1
        if c == BACKSLASH:
            i += 1
            if i >= e:
                return -1
            c = d[i]
            # " \ / b f n r t; an escaped code point is left to msgspec
            if not (c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116):
                return -1
        i += 1
    return -1


@inside
def digits(d: Array, i: int, e: int, number: int, count: int) -> tuple[int, int, int]:
    """(place after a run of digits, the number that they make, how many count). Too many make no number."""
    while i < e and d[i] >= 48 and d[i] <= 57:
        number = number * 10 + int64(d[i] - 48)
        count += 1 if count > 0 or d[i] != 48 else 0
        i += 1
    return i, number, count


@inside
def number(d: Array, i: int, e: int) -> tuple[int, int, int, int, int]:
    """A JSON number: (place after it, kind, digits as one number, how many, power of ten)."""
    if i < e and d[i] == MINUS:
        i += 1
    begin = i
    power, kind = 0, NUMBER_WHOLE
    i, mantissa, count = digits(d, i, e, int64(0), 0)
    if i == begin or (i > begin + 1 and d[begin] == 48):
        return i, NUMBER_BAD, mantissa, count, power
    end = i
    if i < e and d[i] == DOT:
        kind = NUMBER_FRACTION
        i, mantissa, count = digits(d, i + 1, e, mantissa, count)
        if i == end + 1:
            return i, NUMBER_BAD, mantissa, count, power
        power = -(i - end - 1)
    if i < e and (d[i] == 101 or d[i] == 69):
        kind = NUMBER_FRACTION
        i += 1
        sign = 1
        if i < e and (d[i] == 43 or d[i] == MINUS):
            sign = -1 if d[i] == MINUS else 1
            i += 1
        begin = i
        i, shift, places = digits(d, i, e, int64(0), 0)
        if i == begin:
            return i, NUMBER_BAD, mantissa, count, power
        power += sign * (shift if places <= 6 else 999_999)
    return i, kind, mantissa, count, power


@inside
def word(d: Array, i: int, e: int) -> int:
    """The place after true, false or null; -1 if there is none."""
    if i + 4 <= e and d[i] == 116 and d[i + 1] == 114 and d[i + 2] == 117 and d[i + 3] == 101:
        return i + 4
    if i + 4 <= e and d[i] == 110 and d[i + 1] == 117 and d[i + 2] == 108 and d[i + 3] == 108:
        return i + 4
    if i + 5 <= e and d[i] == 102 and d[i + 1] == 97 and d[i + 2] == 108 and d[i + 3] == 115 and d[i + 4] == 101:
        return i + 5
    return -1


@inside
def skip_scalar(d: Array, i: int, e: int) -> int:
    """The place after a text, number, true, false or null; -1 if unsure."""
    if i >= e:
        return -1
    if d[i] == QUOTE:
        i = skip_text(d, i + 1, e)
        return -1 if i < 0 else i + 1
    if d[i] == MINUS or (d[i] >= 48 and d[i] <= 57):
        i, kind, _, _, _ = number(d, i, e)
        return -1 if kind == NUMBER_BAD else i
    return word(d, i, e)


@inside
def skip_name(d: Array, i: int, e: int) -> int:
    """The place of the value behind a name and its colon; -1 if unsure."""
    i = blank(d, i, e)
    if i >= e or d[i] != QUOTE:
        return -1
    i = skip_text(d, i + 1, e)
    if i < 0:
        return -1
    i = blank(d, i + 1, e)
    return blank(d, i + 1, e) if i < e and d[i] == COLON else -1


@inside
def skip(d: Array, i: int, e: int) -> int:
    """The place after one whole value of any kind, proved to be valid JSON; -1 if unsure."""
    depth, lists = 0, uint64(0)  # one bit per level: whether it is a list
    while True:
        if i >= e:
            return -1
        if d[i] == OPEN_OBJECT or d[i] == OPEN_LIST:
            if depth >= DEPTH_MAX:
                return -1
            in_list = d[i] == OPEN_LIST
            i = blank(d, i + 1, e)
            if i >= e:
                return -1
            if d[i] != (CLOSE_LIST if in_list else CLOSE_OBJECT):
                lists = (lists << uint64(1)) | (uint64(1) if in_list else uint64(0))
                depth += 1
                if not in_list:
                    i = skip_name(d, i, e)
                    if i < 0:
                        return -1
                continue
            i += 1
        else:
            i = skip_scalar(d, i, e)
            if i < 0:
                return -1
        while depth > 0:  # what may follow a value inside
            i = blank(d, i, e)
            if i >= e:
                return -1
            in_list = (lists & uint64(1)) == uint64(1)
            if d[i] == COMMA:
                i = blank(d, i + 1, e) if in_list else skip_name(d, i + 1, e)
                if i < 0:
                    return -1
                break
            if d[i] != (CLOSE_LIST if in_list else CLOSE_OBJECT):
                return -1
            lists >>= uint64(1)
            depth -= 1
            i += 1
        if depth == 0:
            return i


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
