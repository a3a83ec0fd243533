"""JSON, token by token: where texts, numbers and whole values end. Sure, or -1.

Next room: parse.py makes columns of it.
"""

from __future__ import annotations

from seriatim.fast.compiled import Array, compiled_inner, int64, load_eight_bytes, uint64

DEPTH_MAX = 60
QUOTE, BACKSLASH, COMMA, COLON, MINUS, DOT = 34, 92, 44, 58, 45, 46
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93
ZERO, ONES, BLANKS = uint64(0), uint64(0x0101010101010101), uint64(0x2020202020202020)
QUOTES, BACKSLASHES = uint64(0x2222222222222222), uint64(0x5C5C5C5C5C5C5C5C)
HIGH_BITS = uint64(0x8080808080808080)
"""Eight bytes at once."""
NUMBER_BAD, NUMBER_INTEGER, NUMBER_FRACTION = 0, 1, 2


@compiled_inner
def skip_blanks(d: Array, i: int, e: int) -> int:
    """The next place that is no white space."""
    while i < e and (d[i] == 32 or d[i] == 10 or d[i] == 13 or d[i] == 9):
        i += 1
    return i


@compiled_inner
def skip_plain_text(d: Array, i: int, e: int) -> int:
    """A place up to which a text has neither quote nor escape nor control, looked at eight bytes at
    once.

    Taking 1 from a byte borrows into its highest bit only if it was 0, and 32 only if it was less.
    """
    while i + 8 <= e:
        x = load_eight_bytes(d, i)
        quote, escape = x ^ QUOTES, x ^ BACKSLASHES
        found = ((quote - ONES) & ~quote) | ((escape - ONES) & ~escape) | ((x - BLANKS) & ~x)
        if found & HIGH_BITS != ZERO:
            return i
        i += 8
    return i


@compiled_inner
def text_end(d: Array, i: int, e: int) -> int:
    """The closing quote of a text without escapes; -1 if it has any, or is none."""
    i = skip_plain_text(d, i, e)
    while i < e:
        c = d[i]
        if c == QUOTE:
            return i
        if c == BACKSLASH or c < 32:
            return -1
        i += 1
    return -1


@compiled_inner
def skip_text(d: Array, i: int, e: int) -> int:
    """The closing quote of any valid text; -1 if unsure."""
    i = skip_plain_text(d, i, e)
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
            if not (
                c == 34
                or c == 92
                or c == 47
                or c == 98
                or c == 102
                or c == 110
                or c == 114
                or c == 116
            ):
                return -1
        i += 1
    return -1


@compiled_inner
def read_digits(d: Array, i: int, e: int, mantissa: int, count: int) -> tuple[int, int, int]:
    """(place after a run of digits, the number that they make, how many count). Too many make no
    number.
    """
    while i < e and d[i] >= 48 and d[i] <= 57:
        mantissa = mantissa * 10 + int64(d[i] - 48)
        count += 1 if count > 0 or d[i] != 48 else 0
        i += 1
    return i, mantissa, count


@compiled_inner
def read_number(d: Array, i: int, e: int) -> tuple[int, int, int, int, int]:
    """A JSON number: (place after it, kind, digits as one number, how many, power of ten)."""
    if i < e and d[i] == MINUS:
        i += 1
    begin = i
    power, kind = 0, NUMBER_INTEGER
    i, mantissa, count = read_digits(d, i, e, int64(0), 0)
    if i == begin or (i > begin + 1 and d[begin] == 48):
        return i, NUMBER_BAD, mantissa, count, power
    end = i
    if i < e and d[i] == DOT:
        kind = NUMBER_FRACTION
        i, mantissa, count = read_digits(d, i + 1, e, mantissa, count)
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
        i, shift, places = read_digits(d, i, e, int64(0), 0)
        if i == begin:
            return i, NUMBER_BAD, mantissa, count, power
        power += sign * (shift if places <= 6 else 999_999)
    return i, kind, mantissa, count, power


@compiled_inner
def skip_literal(d: Array, i: int, e: int) -> int:
    """The place after true, false or null; -1 if there is none."""
    if i + 4 <= e and d[i] == 116 and d[i + 1] == 114 and d[i + 2] == 117 and d[i + 3] == 101:
        return i + 4
    if i + 4 <= e and d[i] == 110 and d[i + 1] == 117 and d[i + 2] == 108 and d[i + 3] == 108:
        return i + 4
    if (
        i + 5 <= e
        and d[i] == 102
        and d[i + 1] == 97
        and d[i + 2] == 108
        and d[i + 3] == 115
        and d[i + 4] == 101
    ):
        return i + 5
    return -1


@compiled_inner
def skip_scalar(d: Array, i: int, e: int) -> int:
    """The place after a text, number, true, false or null; -1 if unsure."""
    if i >= e:
        return -1
    if d[i] == QUOTE:
        i = skip_text(d, i + 1, e)
        return -1 if i < 0 else i + 1
    if d[i] == MINUS or (d[i] >= 48 and d[i] <= 57):
        i, kind, _, _, _ = read_number(d, i, e)
        return -1 if kind == NUMBER_BAD else i
    return skip_literal(d, i, e)


@compiled_inner
def skip_name(d: Array, i: int, e: int) -> int:
    """The place of the value behind a name and its colon; -1 if unsure."""
    i = skip_blanks(d, i, e)
    if i >= e or d[i] != QUOTE:
        return -1
    i = skip_text(d, i + 1, e)
    if i < 0:
        return -1
    i = skip_blanks(d, i + 1, e)
    return skip_blanks(d, i + 1, e) if i < e and d[i] == COLON else -1


@compiled_inner
def skip_value(d: Array, i: int, e: int) -> int:
    """The place after one whole value of any kind, proved to be valid JSON; -1 if unsure."""
    depth, lists = 0, uint64(0)  # one bit per level: whether it is a list
    while True:
        if i >= e:
            return -1
        if d[i] == OPEN_OBJECT or d[i] == OPEN_LIST:
            if depth >= DEPTH_MAX:
                return -1
            in_list = d[i] == OPEN_LIST
            i = skip_blanks(d, i + 1, e)
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
            i = skip_blanks(d, i, e)
            if i >= e:
                return -1
            in_list = (lists & uint64(1)) == uint64(1)
            if d[i] == COMMA:
                i = skip_blanks(d, i + 1, e) if in_list else skip_name(d, i + 1, e)
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
