"""JSON objects to columns, straight from Arrow's buffers.

A message is *usual* if every byte of it was understood: plain text without escapes in the columns
of the table, numbers that are exact, valid JSON in the fields that are skipped. Every other message
has the kind `UNSURE` and is decoded by msgspec. The rows of snapshots are parsed into columns of
their own, in which a row looks like a message that inserts it.

Next: rows.py, which folds the messages that were parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import MISSING, NULL, Array, compiled, compiled_inner
from seriatim.fast.scan import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COMMA,
    LETTER_N,
    LETTER_T,
    MINUS,
    NUMBER_BAD,
    NUMBER_FRACTION,
    NUMBER_INTEGER,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    is_equal_bytes,
    read_number,
    skip_blanks,
    skip_colon,
    skip_literal,
    skip_value,
    starts_number,
    text_end,
)

UNSURE, SNAPSHOT, INSERT, UPDATE, DELETE = -1, 0, 1, 2, 3
TYPE_FIELD, SEQUENCE_FIELD, ROWS_FIELD, BEFORE_FIELD, FIRST_COLUMN_FIELD = 0, 1, 2, 3, 4
"""Numbers of the fields in a layout: four of every stream, then the columns of the table."""
DIGITS_MAX = 18
"""Digits that an int64 holds for certain."""
EXACT_DIGITS_MAX, EXACT_POWER_MAX = 15, 22
"""Up to these, one multiplication or division of float64 rounds correctly."""
EXPONENT_MAX = 280
"""Beyond it a float may overflow or underflow: such a message is left to msgspec."""
POWERS_OF_TEN = 10.0 ** np.arange(EXACT_POWER_MAX + 1)
"""Powers of ten that a float64 holds exactly."""


class FieldLayout(NamedTuple):
    """The fields that a table machine reads from a message."""

    name_bytes: Array
    """The names of the fields as bytes, one after the other."""
    name_edges: Array
    """Where each name begins in `name_bytes`, and the end of the last one."""
    column_kinds: Array
    """The kinds of the table's columns, without the four fields before them."""
    is_required: Array
    """Columns that must be there and not null: the key."""
    has_sequence: bool


class ParsedMessages(NamedTuple):
    """Messages in columns. A text cell is a position in the batch's bytes, a float cell its 64
    bits.
    """

    kinds: Array
    sequences: Array
    cells: Array
    floats: Array
    """The same memory as `cells`."""
    sizes: Array
    long_floats: Array
    """Floats of more digits than are exact at once: (message, column, position, size)."""


class SnapshotRows(NamedTuple):
    """Where the rows of each message are, if it is a snapshot.

    They are no part of `ParsedMessages`: compiled functions hand that on by value for every field, and
    with these arrays parsing would take four times as long.
    """

    list_begins: Array
    """The position of the list of rows in the batch's bytes."""
    first_rows: Array
    row_counts: Array
    """The rows in the columns of rows; -1: there are none that were understood."""


@compiled_inner
def find_field(data: Array, begin: int, end: int, layout: FieldLayout, guess: int) -> int:
    """The number of the field with this name; -1 if the table has none.

    Fields mostly come in the same order, so `guess` is looked at first.
    """
    size = end - begin
    count = len(layout.name_edges) - 1
    for step in range(count):
        field = guess + step
        if field >= count:
            field -= count
        start = layout.name_edges[field]
        if layout.name_edges[field + 1] - start == size:
            j = 0
            while j < size and layout.name_bytes[start + j] == data[begin + j]:
                j += 1
            if j == size:
                return field
    return -1


@compiled_inner
def parse_message_kind(data: Array, position: int, size: int) -> int:
    """The kind of a message by the text of its type field."""
    if size == 8 and is_equal_bytes(data, position, b"snapshot"):
        return SNAPSHOT
    if size == 6 and is_equal_bytes(data, position, b"insert"):
        return INSERT
    if size == 6 and is_equal_bytes(data, position, b"update"):
        return UPDATE
    if size == 6 and is_equal_bytes(data, position, b"delete"):
        return DELETE
    return UNSURE


@compiled_inner
def parse_text_cell(
    data: Array, position: int, end: int, message: int, column: int, parsed: ParsedMessages
) -> int:
    """Put a text without escapes into its cell; the position after it, -1 if unsure."""
    if data[position] != QUOTE:
        return -1
    closing_quote = text_end(data, position + 1, end)
    if closing_quote < 0:
        return -1
    parsed.cells[column, message] = position + 1
    parsed.sizes[column, message] = closing_quote - position - 1
    return closing_quote + 1


@compiled_inner
def parse_float_cell(
    data: Array,
    position: int,
    message: int,
    column: int,
    parsed_number: tuple[int, int, int, int, int],
    parsed: ParsedMessages,
    long_float_count: int,
) -> int:
    """Put a float into its cell; the number of long floats so far, -1 if unsure.

    A float that is not exact here is noted as a long one: Arrow reads it later.
    """
    number_end, kind, mantissa, digit_count, power = parsed_number
    if digit_count > DIGITS_MAX or power > EXPONENT_MAX or power < -EXPONENT_MAX:
        return -1
    parsed.sizes[column, message] = 0
    is_exact_power = -EXACT_POWER_MAX <= power <= EXACT_POWER_MAX
    if digit_count > EXACT_DIGITS_MAX or not is_exact_power:
        if long_float_count >= len(parsed.long_floats):
            return -1
        parsed.long_floats[long_float_count, 0] = message
        parsed.long_floats[long_float_count, 1] = column
        parsed.long_floats[long_float_count, 2] = position
        parsed.long_floats[long_float_count, 3] = number_end - position
        return long_float_count + 1
    value = np.float64(mantissa)
    if power >= 0:
        value = value * POWERS_OF_TEN[power]
    else:
        value = value / POWERS_OF_TEN[-power]
    # -0 is an integer to msgspec, so it becomes 0.0; -0.0 is a float and keeps its sign.
    if data[position] == MINUS and (kind == NUMBER_FRACTION or mantissa != 0):
        value = -value
    parsed.floats[column, message] = value
    return long_float_count


@compiled_inner
def parse_column_cell(
    data: Array,
    position: int,
    end: int,
    message: int,
    column: int,
    kind: int,
    parsed: ParsedMessages,
    long_float_count: int,
) -> tuple[int, int]:
    """Put a value into its cell: (position after it, or -1 if unsure; long floats so far)."""
    # A field that comes twice is unsure.
    if position >= end or parsed.sizes[column, message] != MISSING:
        return -1, long_float_count
    byte = data[position]
    if byte == LETTER_N:
        parsed.sizes[column, message] = NULL
        return skip_literal(data, position, end), long_float_count
    if kind == TEXT:
        return parse_text_cell(data, position, end, message, column, parsed), long_float_count
    if kind == BOOL:
        parsed.cells[column, message] = 1 if byte == LETTER_T else 0
        parsed.sizes[column, message] = 0
        return skip_literal(data, position, end), long_float_count
    if not starts_number(byte):
        return -1, long_float_count
    parsed_number = read_number(data, position, end)
    number_end, number_kind, mantissa, digit_count, _ = parsed_number
    if number_kind == NUMBER_BAD:
        return -1, long_float_count
    if kind == FLOAT:
        long_float_count = parse_float_cell(
            data, position, message, column, parsed_number, parsed, long_float_count
        )
        if long_float_count < 0:
            return -1, 0
        return number_end, long_float_count
    if number_kind != NUMBER_INTEGER or digit_count > DIGITS_MAX:
        return -1, long_float_count
    parsed.cells[column, message] = -mantissa if byte == MINUS else mantissa
    parsed.sizes[column, message] = 0
    return number_end, long_float_count


@compiled_inner
def parse_own_field(
    data: Array,
    position: int,
    end: int,
    message: int,
    field: int,
    seen_fields: int,
    parsed: ParsedMessages,
) -> int:
    """Parse the type, sequence, rows or before field; the position after it, -1 if unsure.

    `seen_fields` has one bit per field that was there already: one that comes twice is unsure.
    """
    if position >= end or (seen_fields >> field) & 1 == 1:
        return -1
    byte = data[position]
    if field == TYPE_FIELD:
        if byte != QUOTE:
            return -1
        closing_quote = text_end(data, position + 1, end)
        if closing_quote < 0:
            return -1
        kind = parse_message_kind(data, position + 1, closing_quote - position - 1)
        parsed.kinds[message] = kind
        if kind == UNSURE:
            return -1
        return closing_quote + 1
    if field == ROWS_FIELD:
        return skip_value(data, position, end)
    if field == BEFORE_FIELD:
        # A before-image is compared by the plain machine. Null says nothing.
        if byte != LETTER_N:
            return -1
        return skip_literal(data, position, end)
    if not starts_number(byte):
        return -1
    number_end, number_kind, mantissa, digit_count, _ = read_number(data, position, end)
    if number_kind != NUMBER_INTEGER or digit_count > DIGITS_MAX:
        return -1
    parsed.sequences[message] = -mantissa if byte == MINUS else mantissa
    return number_end


@compiled_inner
def has_needed_fields(seen_fields: int, layout: FieldLayout) -> bool:
    """Whether a message has its type, and its sequence if the stream has one."""
    if (seen_fields >> TYPE_FIELD) & 1 == 0:
        return False
    return not layout.has_sequence or (seen_fields >> SEQUENCE_FIELD) & 1 == 1


@compiled_inner
def parse_message(
    data: Array,
    position: int,
    end: int,
    message: int,
    layout: FieldLayout,
    parsed: ParsedMessages,
    long_float_count: int,
) -> tuple[bool, int]:
    """Parse one object: (whether all of it was understood, long floats so far)."""
    field_count = len(layout.name_edges) - 1
    position = skip_blanks(data, position, end)
    if position >= end or data[position] != OPEN_OBJECT:
        return False, long_float_count
    seen_fields = 0
    guess = 0
    has_more_fields = True
    while has_more_fields:
        # 1. The field's name and its colon. This stays in the loop: as a function of its own it is
        # not inlined, and parsing takes a fifth longer.
        position = skip_blanks(data, position + 1, end)
        if position >= end or data[position] != QUOTE:
            return False, long_float_count
        name_begin = position + 1
        name_end = text_end(data, name_begin, end)
        if name_end < 0:
            return False, long_float_count
        position = skip_colon(data, name_end + 1, end)
        if position < 0:
            return False, long_float_count
        # 2. The value, into its column if it has one.
        field = find_field(data, name_begin, name_end, layout, guess)
        if field >= 0:
            guess = field + 1
            if guess == field_count:
                guess = 0
        if field >= FIRST_COLUMN_FIELD:
            column = field - FIRST_COLUMN_FIELD
            position, long_float_count = parse_column_cell(
                data,
                position,
                end,
                message,
                column,
                layout.column_kinds[column],
                parsed,
                long_float_count,
            )
        elif field >= 0:
            position = parse_own_field(data, position, end, message, field, seen_fields, parsed)
            seen_fields |= 1 << field
        else:
            position = skip_value(data, position, end)
        if position < 0:
            return False, long_float_count
        # 3. A comma leads to the next field.
        position = skip_blanks(data, position, end)
        if position >= end or (data[position] != COMMA and data[position] != CLOSE_OBJECT):
            return False, long_float_count
        has_more_fields = data[position] == COMMA
    if not has_needed_fields(seen_fields, layout):
        return False, long_float_count
    # Nothing but white space may follow the object.
    return skip_blanks(data, position + 1, end) == end, long_float_count


@compiled_inner
def has_required_columns(message: int, layout: FieldLayout, parsed: ParsedMessages) -> bool:
    """Whether every column of the key is there and not null."""
    for column in range(len(layout.column_kinds)):
        if layout.is_required[column] and parsed.sizes[column, message] < 0:
            return False
    return True


@compiled
def parse_messages(data: Array, edges: Array, layout: FieldLayout, parsed: ParsedMessages) -> int:
    """Parse the messages between the edges; the number of long floats.

    `parsed.sizes` must be MISSING everywhere.
    """
    long_float_count = 0
    for message in range(len(edges) - 1):
        parsed.kinds[message] = UNSURE
        count_before = long_float_count
        understood, long_float_count = parse_message(
            data, edges[message], edges[message + 1], message, layout, parsed, long_float_count
        )
        if understood and parsed.kinds[message] != SNAPSHOT:
            understood = has_required_columns(message, layout, parsed)
        if not understood:
            parsed.kinds[message] = UNSURE
            # Its long floats are forgotten: msgspec decodes the whole message.
            long_float_count = count_before
    return long_float_count


@compiled_inner
def count_list_items(data: Array, position: int, end: int) -> int:
    """The number of values in a list that is valid JSON; -1 if it is no list."""
    if data[position] != OPEN_LIST:
        return -1
    position = skip_blanks(data, position + 1, end)
    if position >= end:
        return -1
    if data[position] == CLOSE_LIST:
        return 0
    count = 0
    has_more_values = True
    while has_more_values:
        position = skip_value(data, position, end)
        if position < 0:
            return -1
        count += 1
        position = skip_blanks(data, position, end)
        if position >= end:
            return -1
        has_more_values = data[position] == COMMA
        if has_more_values:
            position = skip_blanks(data, position + 1, end)
    return count


@compiled_inner
def find_rows(data: Array, position: int, end: int, layout: FieldLayout) -> int:
    """Where the list of rows begins in a message that was understood; -1 if it has none."""
    position = skip_blanks(data, position, end)
    has_more_fields = True
    while has_more_fields:
        name_begin = skip_blanks(data, position + 1, end) + 1
        name_end = text_end(data, name_begin, end)
        if name_end < 0:
            return -1
        position = skip_colon(data, name_end + 1, end)
        if position < 0:
            return -1
        if find_field(data, name_begin, name_end, layout, ROWS_FIELD) == ROWS_FIELD:
            return position
        position = skip_value(data, position, end)
        if position < 0:
            return -1
        position = skip_blanks(data, position, end)
        if position >= end:
            return -1
        has_more_fields = data[position] == COMMA
    return -1


@compiled
def count_snapshot_rows(
    data: Array,
    edges: Array,
    layout: FieldLayout,
    kinds: Array,
    snapshots: SnapshotRows,
) -> int:
    """Give the rows of each snapshot their place in the columns of rows; the number of all rows."""
    total = 0
    for message in range(len(kinds)):
        count = -1
        if kinds[message] == SNAPSHOT:
            end = edges[message + 1]
            list_begin = find_rows(data, edges[message], end, layout)
            snapshots.list_begins[message] = list_begin
            if list_begin >= 0:
                count = count_list_items(data, list_begin, end)
        snapshots.first_rows[message] = total
        snapshots.row_counts[message] = count
        if count > 0:
            total += count
    return total


@compiled_inner
def parse_row(
    data: Array,
    position: int,
    end: int,
    row: int,
    layout: FieldLayout,
    rows: ParsedMessages,
    long_float_count: int,
) -> tuple[int, int]:
    """Parse one row of a snapshot: (position after it, or -1 if unsure; long floats so far)."""
    field_count = len(layout.name_edges) - 1
    if position >= end or data[position] != OPEN_OBJECT:
        return -1, long_float_count
    guess = FIRST_COLUMN_FIELD
    has_more_fields = True
    while has_more_fields:
        # 1. The field's name and its colon.
        position = skip_blanks(data, position + 1, end)
        if position >= end or data[position] != QUOTE:
            return -1, long_float_count
        name_begin = position + 1
        name_end = text_end(data, name_begin, end)
        if name_end < 0:
            return -1, long_float_count
        position = skip_colon(data, name_end + 1, end)
        if position < 0:
            return -1, long_float_count
        # 2. The value. Only columns count within a row.
        field = find_field(data, name_begin, name_end, layout, guess)
        if field >= FIRST_COLUMN_FIELD:
            guess = field + 1
            if guess == field_count:
                guess = FIRST_COLUMN_FIELD
            column = field - FIRST_COLUMN_FIELD
            position, long_float_count = parse_column_cell(
                data,
                position,
                end,
                row,
                column,
                layout.column_kinds[column],
                rows,
                long_float_count,
            )
        else:
            position = skip_value(data, position, end)
        if position < 0:
            return -1, long_float_count
        # 3. A comma leads to the next field.
        position = skip_blanks(data, position, end)
        if position >= end or (data[position] != COMMA and data[position] != CLOSE_OBJECT):
            return -1, long_float_count
        has_more_fields = data[position] == COMMA
    if not has_required_columns(row, layout, rows):
        return -1, long_float_count
    return position + 1, long_float_count


@compiled
def parse_snapshot_rows(
    data: Array,
    edges: Array,
    layout: FieldLayout,
    snapshots: SnapshotRows,
    rows: ParsedMessages,
) -> int:
    """Parse the rows of all snapshots; the number of long floats. A snapshot with a row that was not
    understood has no rows afterwards, so that it is decoded by msgspec.

    `rows.sizes` must be MISSING everywhere.
    """
    long_float_count = 0
    for message in range(len(edges) - 1):
        row_count = snapshots.row_counts[message]
        if row_count <= 0:
            continue
        count_before = long_float_count
        end = edges[message + 1]
        # Behind the bracket that opens the list.
        position = snapshots.list_begins[message] + 1
        for i in range(row_count):
            position = skip_blanks(data, position, end)
            row = snapshots.first_rows[message] + i
            position, long_float_count = parse_row(
                data, position, end, row, layout, rows, long_float_count
            )
            if position < 0:
                break
            # Behind the comma, or behind the bracket that closes the list.
            position = skip_blanks(data, position, end) + 1
        if position < 0:
            snapshots.row_counts[message] = -1
            long_float_count = count_before
    return long_float_count
