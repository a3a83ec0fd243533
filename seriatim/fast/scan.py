"""JSON, token by token: where texts, numbers and whole values end.

Every function takes the bytes, a position and the end of the message, and gives a position back, or
-1 where it is not sure that the JSON is valid: such a message is left to msgspec.

Next: parse.py, which turns messages into columns with these functions.
"""

from __future__ import annotations

from seriatim.fast.compiled import Array, compiled_inner, int64, load_eight_bytes, uint64

DEPTH_MAX = 60
"""Nested lists and objects that `skip_value` follows: one bit of 64 for each."""
QUOTE, BACKSLASH, COMMA, COLON, MINUS, DOT = 34, 92, 44, 58, 45, 46
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93
SPACE, LINE_FEED, CARRIAGE_RETURN, TAB = 32, 10, 13, 9
DIGIT_0, DIGIT_9, PLUS, EXPONENT, EXPONENT_UPPER = 48, 57, 43, 101, 69
LETTER_T, LETTER_F, LETTER_N = 116, 102, 110
SIMPLE_ESCAPES = b'"\\/bfnrt'
EXPONENT_DIGITS_MAX, EXPONENT_TOO_LARGE = 6, 999_999
"""An exponent of more digits is taken as too large; the parser refuses it then."""
ZERO, ONES, BLANKS = uint64(0), uint64(0x0101010101010101), uint64(0x2020202020202020)
QUOTES, BACKSLASHES = uint64(0x2222222222222222), uint64(0x5C5C5C5C5C5C5C5C)
HIGH_BITS = uint64(0x8080808080808080)
"""The same byte eight times, to look at eight bytes at once."""
NUMBER_BAD, NUMBER_INTEGER, NUMBER_FRACTION = 0, 1, 2


@compiled_inner
def is_digit(byte: int) -> bool:
    """Whether a byte is one of 0 to 9."""
    return byte >= DIGIT_0 and byte <= DIGIT_9


@compiled_inner
def starts_number(byte: int) -> bool:
    """Whether a JSON number may begin with this byte."""
    return byte == MINUS or is_digit(byte)


@compiled_inner
def is_blank(byte: int) -> bool:
    """Whether a byte is white space between tokens."""
    return byte == SPACE or byte == LINE_FEED or byte == CARRIAGE_RETURN or byte == TAB


@compiled_inner
def is_equal_bytes(data: Array, position: int, expected: bytes) -> bool:
    """Whether the bytes at a position are these. The caller knows that there are enough."""
    for j in range(len(expected)):
        if data[position + j] != expected[j]:
            return False
    return True


@compiled_inner
def skip_blanks(data: Array, position: int, end: int) -> int:
    """The next position that is not white space."""
    while position < end and is_blank(data[position]):
        position += 1
    return position


@compiled_inner
def skip_plain_text(data: Array, position: int, end: int) -> int:
    """A position up to which a text has no quote, escape or control character.

    It looks at eight bytes at once and stops at the first eight that have any of them.
    """
    while position + 8 <= end:
        x = load_eight_bytes(data, position)
        quote_bits = x ^ QUOTES
        escape_bits = x ^ BACKSLASHES
        # Subtracting 1 from a byte borrows into its highest bit only if the byte was 0, and
        # subtracting 32 only if it was less than 32: a control character.
        special = (quote_bits - ONES) & ~quote_bits
        special |= (escape_bits - ONES) & ~escape_bits
        special |= (x - BLANKS) & ~x
        if special & HIGH_BITS != ZERO:
            return position
        position += 8
    return position


@compiled_inner
def text_end(data: Array, position: int, end: int) -> int:
    """The closing quote of a text without escapes; -1 if it has one, or is not a valid text."""
    position = skip_plain_text(data, position, end)
    while position < end:
        byte = data[position]
        if byte == QUOTE:
            return position
        if byte == BACKSLASH or byte < SPACE:
            return -1
        position += 1
    return -1


@compiled_inner
def is_simple_escape(byte: int) -> bool:
    """Whether this byte after a backslash is a valid escape of one character.

    An escaped code point (a u and four digits) is not: it is left to msgspec.
    """
    for j in range(len(SIMPLE_ESCAPES)):
        if byte == SIMPLE_ESCAPES[j]:
            return True
    return False


@compiled_inner
def skip_text(data: Array, position: int, end: int) -> int:
    """The closing quote of a text, with or without escapes; -1 if unsure."""
    position = skip_plain_text(data, position, end)
    while position < end:
        byte = data[position]
        if byte == QUOTE:
            return position
        if byte < SPACE:
            return -1
        if byte == BACKSLASH:
            position += 1
            if position >= end:
                return -1
            if not is_simple_escape(data[position]):
                return -1
        position += 1
    return -1


@compiled_inner
def read_digits(
    data: Array, position: int, end: int, mantissa: int, digit_count: int
) -> tuple[int, int, int]:
    """Append a run of digits to a number: (position after them, the number, its digits).

    Leading zeros do not count as digits. The number overflows beyond 18 digits: callers look at the
    count first.
    """
    while position < end and is_digit(data[position]):
        digit = int64(data[position] - DIGIT_0)
        mantissa = mantissa * 10 + digit
        if digit_count > 0 or digit != 0:
            digit_count += 1
        position += 1
    return position, mantissa, digit_count


@compiled_inner
def read_exponent(data: Array, position: int, end: int) -> tuple[int, int]:
    """The exponent behind an e: (position after it, or -1 if it has no digits; the power)."""
    is_negative = False
    if position < end:
        sign = data[position]
        if sign == PLUS or sign == MINUS:
            is_negative = sign == MINUS
            position += 1
    begin = position
    position, power, digit_count = read_digits(data, position, end, int64(0), 0)
    if position == begin:
        return -1, power
    if digit_count > EXPONENT_DIGITS_MAX:
        power = int64(EXPONENT_TOO_LARGE)
    if is_negative:
        power = -power
    return position, power


@compiled_inner
def read_number(data: Array, position: int, end: int) -> tuple[int, int, int, int, int]:
    """A JSON number without its sign: (position after it, kind, mantissa, digits, power of ten)."""
    # 1. The sign, and the digits before the point. A number may not begin with a needless zero.
    if position < end and data[position] == MINUS:
        position += 1
    begin = position
    power = int64(0)
    kind = NUMBER_INTEGER
    position, mantissa, digit_count = read_digits(data, position, end, int64(0), 0)
    if position == begin:
        return position, NUMBER_BAD, mantissa, digit_count, power
    if position > begin + 1 and data[begin] == DIGIT_0:
        return position, NUMBER_BAD, mantissa, digit_count, power
    # 2. The digits behind the point.
    if position < end and data[position] == DOT:
        kind = NUMBER_FRACTION
        begin = position + 1
        position, mantissa, digit_count = read_digits(data, begin, end, mantissa, digit_count)
        if position == begin:
            return position, NUMBER_BAD, mantissa, digit_count, power
        power = int64(begin - position)
    # 3. The exponent.
    if position < end and (data[position] == EXPONENT or data[position] == EXPONENT_UPPER):
        kind = NUMBER_FRACTION
        position, exponent = read_exponent(data, position + 1, end)
        if position < 0:
            return position, NUMBER_BAD, mantissa, digit_count, power
        power += exponent
    return position, kind, mantissa, digit_count, power


@compiled_inner
def skip_literal(data: Array, position: int, end: int) -> int:
    """The position after true, false or null; -1 if it is none of them."""
    if position + 4 > end:
        return -1
    byte = data[position]
    if byte == LETTER_T and is_equal_bytes(data, position, b"true"):
        return position + 4
    if byte == LETTER_N and is_equal_bytes(data, position, b"null"):
        return position + 4
    if position + 5 > end:
        return -1
    if byte == LETTER_F and is_equal_bytes(data, position, b"false"):
        return position + 5
    return -1


@compiled_inner
def skip_scalar(data: Array, position: int, end: int) -> int:
    """The position after a text, number, true, false or null; -1 if unsure."""
    if position >= end:
        return -1
    byte = data[position]
    if byte == QUOTE:
        closing_quote = skip_text(data, position + 1, end)
        if closing_quote < 0:
            return -1
        return closing_quote + 1
    if starts_number(byte):
        position, kind, _, _, _ = read_number(data, position, end)
        if kind == NUMBER_BAD:
            return -1
        return position
    return skip_literal(data, position, end)


@compiled_inner
def skip_colon(data: Array, position: int, end: int) -> int:
    """The position of the value behind a colon, with white space around it; -1 if there is none."""
    position = skip_blanks(data, position, end)
    if position >= end or data[position] != COLON:
        return -1
    return skip_blanks(data, position + 1, end)


@compiled_inner
def skip_name(data: Array, position: int, end: int) -> int:
    """The position of the value behind a field's name and its colon; -1 if unsure."""
    position = skip_blanks(data, position, end)
    if position >= end or data[position] != QUOTE:
        return -1
    closing_quote = skip_text(data, position + 1, end)
    if closing_quote < 0:
        return -1
    return skip_colon(data, closing_quote + 1, end)


@compiled_inner
def closing_bracket(is_list: bool) -> int:
    """The byte that closes a list or an object."""
    if is_list:
        return CLOSE_LIST
    return CLOSE_OBJECT


@compiled_inner
def skip_value(data: Array, position: int, end: int) -> int:
    """The position after one whole value of any kind, proved to be valid JSON; -1 if unsure.

    1. Enter lists and objects until there is a scalar or an empty list or object; go past it.
    2. Leave every list and object that ends here; a comma leads to the next value inside.
    """
    depth = 0
    # One bit per open level, the innermost lowest: 1 for a list, 0 for an object. A stack of bits
    # needs no memory, which compiled code here cannot allocate.
    lists = uint64(0)
    while True:
        # 1. Enter, or go past a scalar.
        if position >= end:
            return -1
        if data[position] == OPEN_OBJECT or data[position] == OPEN_LIST:
            if depth >= DEPTH_MAX:
                return -1
            is_list = data[position] == OPEN_LIST
            position = skip_blanks(data, position + 1, end)
            if position >= end:
                return -1
            if data[position] != closing_bracket(is_list):
                depth += 1
                lists = lists << uint64(1)
                if is_list:
                    lists = lists | uint64(1)
                else:
                    position = skip_name(data, position, end)
                    if position < 0:
                        return -1
                continue
            position += 1
        else:
            position = skip_scalar(data, position, end)
            if position < 0:
                return -1
        # 2. Leave what ends here.
        while depth > 0:
            position = skip_blanks(data, position, end)
            if position >= end:
                return -1
            is_list = (lists & uint64(1)) == uint64(1)
            if data[position] == COMMA:
                if is_list:
                    position = skip_blanks(data, position + 1, end)
                else:
                    position = skip_name(data, position + 1, end)
                if position < 0:
                    return -1
                break
            if data[position] != closing_bracket(is_list):
                return -1
            lists >>= uint64(1)
            depth -= 1
            position += 1
        if depth == 0:
            return position
