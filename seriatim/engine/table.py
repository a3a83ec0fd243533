"""The table machine: a table that is sent as a snapshot, then inserts, updates and deletes.

It comes with Seriatim, so a user needs no code of their own. The state is the rows of the session
by key. Every message is checked before it changes anything: an insert of a row that is present, an
update of a missing row, or a before-image that is not the row raises `PreconditionError` and leaves
the rows as they were.

Fields of messages have the names that the stream file gives to the columns. Columns of records have
the same names, unless they are taken (`output_column_names`).

Next: engine/fold.py; engine/change_table.py takes changes of single rows, as a connector captures
them; fast/table.py is the same machine with compiled code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.structs import asdict, astuple

from seriatim.engine.decoding import Decoder, JsonDecoder
from seriatim.engine.messages import (
    INT64_MAX,
    INT64_MIN,
    KeysOrValues,
    Poison,
    SequenceNumbers,
    describe_message_fields,
)
from seriatim.engine.records import RECORD_COLUMN_NAMES, RowKeySpec, same_rows
from seriatim.engine.row_parts import (
    NEW_ROW,
    ROWS_TOGETHER_MAX,
    RowChanges,
    StoredRow,
    StoredRows,
    complete_rows,
    hash_key,
)
from seriatim.engine.session import FoldOutput, Row, Session, SessionsByName

Columns = dict[str, str]
"""Column names and the names of their types."""
TableState = dict[Any, Row]
"""The rows of a session by key."""
ValueCheck = Callable[[Any], str]
"""Returns what is wrong with a value; empty if nothing is."""
PRECISION_MAX = 38
DECIMAL_TYPE = re.compile(r"decimal\((\d+),\s*(\d+)\)")
Int64 = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
COLUMN_TYPES: dict[str, Any] = {
    "string": str,
    "int64": Int64,
    "float64": float,
    "bool": bool,
    "timestamp": datetime,
    "date": date,
    "binary": bytes,
}
MESSAGE_KINDS = ("snapshot", "insert", "update", "delete")
UNWRITABLE_CHARACTERS = re.compile(r"[\s,;{}()=\x00-\x1f]")
"""Characters that the name of a column of a Delta table cannot have."""
EXTENDED_TIME = (
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,18}))?)?(ZONE)?)?"
)
BASIC_TIME = r"(\d{4})(\d\d)(\d\d)[Tt](\d\d)(\d\d)(?:(\d\d)(?:[.,](\d{1,18}))?)?(ZONE)?"
ZONE = r"[Zz]|[+-]\d\d(?::?\d\d)?"
TIMES = [re.compile(form.replace("ZONE", ZONE), re.ASCII) for form in (EXTENDED_TIME, BASIC_TIME)]
"""Times in the extended and the basic form of ISO 8601. PostgreSQL writes the extended form."""


class PreconditionError(Exception):
    """The session's rows contradict a message. It is reported as a finding of the same name."""


class HeadlessError(Exception):
    """A message needs a value that its session has never known. It has no effect, it is counted as
    headless, and the output of the session is marked: a row is missing from here on.
    """


class RepeatError(Exception):
    """A message comes again, and its session has had it. It has no effect, and it is counted."""


def column_type(name: str) -> Any:
    """The Python type of a column type of a stream file; None if there is none of that name."""
    size = decimal_size(name)
    if size is None:
        return COLUMN_TYPES.get(name)
    precision, scale = size
    is_valid = 1 <= precision <= PRECISION_MAX and scale <= precision
    return Decimal if is_valid else None


def decimal_size(type_name: str) -> tuple[int, int] | None:
    """Precision and scale of a decimal type; None if the type is no decimal."""
    match = DECIMAL_TYPE.fullmatch(type_name)
    if match is None:
        return None
    precision = int(match[1])
    scale = int(match[2])
    return precision, scale


def rfc3339(text: str) -> str | None:
    """A time in the only form that msgspec reads; None if the text is in no form that is accepted."""
    match = TIMES[0].fullmatch(text) or TIMES[1].fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    hour = hour or "00"
    minute = minute or "00"
    second = second or "00"
    time = f"{year}-{month}-{day}T{hour}:{minute}:{second}"
    if fraction:
        time += f".{fraction}"
    if zone is None:
        return time
    if zone not in "Zz":
        sign = zone[0]
        digits = zone[1:].replace(":", "").ljust(4, "0")
        zone = f"{sign}{digits[:2]}:{digits[2:]}"
    return time + zone


class StoredTable(dict[Any, Row]):
    """The rows of a session that is stored row by row: those that were read, and new ones. A row that
    was not read is read when it is asked for. Whoever needs all rows calls `read_remaining` before.
    """

    def __init__(
        self,
        machine: TableMachine,
        stored_rows: StoredRows,
        rows: Iterable[StoredRow],
    ) -> None:
        super().__init__()
        self.stored_rows: StoredRows | None = stored_rows
        """None: all rows were read, and this is a table like any other."""
        self._machine = machine
        self._numbers: dict[Any, int] = {}
        """The numbers of the rows that were stored. A row that is removed and comes back is new."""
        self._add_rows(rows)

    def get(self, key: Any, default: Any = None) -> Any:
        """The row with this key, which is read if it was not."""
        if key not in self:
            self._read_row(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the row with this key, which is read if it was not."""
        if key not in self:
            self._read_row(key)
        self._numbers.pop(key, None)
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        self._numbers.pop(key, None)
        super().__delitem__(key)

    def number_of(self, key: Any) -> int:
        """The number of a row; `NEW_ROW` if it has none yet."""
        return self._numbers.get(key, NEW_ROW)

    def take_read_rows(self) -> None:
        """Add the rows that were read meanwhile."""
        if self.stored_rows is not None:
            self._add_rows(self.stored_rows.take_rows())

    def read_remaining(self) -> None:
        """Read all rows, and put them in their order."""
        if self.stored_rows is None:
            return
        self.stored_rows.read_remaining()
        self.take_read_rows()
        numbers = self._numbers
        stored_keys = sorted(numbers, key=numbers.__getitem__)
        rows = {key: self[key] for key in stored_keys}
        # New rows come behind the stored ones, in the order in which they came.
        rows.update({key: row for key, row in self.items() if key not in numbers})
        self.clear()
        self.update(rows)
        self._numbers = {}
        self.stored_rows = None

    def _read_row(self, key: Any) -> None:
        if self.stored_rows is not None:
            self.stored_rows.read([self._machine.hash_row_key(key)])
            self.take_read_rows()

    def _add_rows(self, rows: Iterable[StoredRow]) -> None:
        for stored_row in rows:
            key, row = self._machine.unpack_row(stored_row.packed)
            self[key] = row
            if stored_row.number != NEW_ROW:
                self._numbers[key] = stored_row.number


def read_all_rows(rows: TableState) -> None:
    """Read the rows that were not read yet, if the session is stored row by row."""
    if isinstance(rows, StoredTable):
        rows.read_remaining()


def stored_rows_of(session: Session | None) -> StoredRows | None:
    """The rows of a session that is stored row by row, and whose rows were not all read; None if it is
    no such session.
    """
    if session is None:
        return None
    if session.stored_rows is not None or session.state is None:
        return session.stored_rows
    stored_rows: StoredRows | None = getattr(session.state, "stored_rows", None)
    return stored_rows


class TableMachine:
    """Rows by key, changed by snapshot, insert, update and delete messages."""

    state_version = 1
    has_snapshots = True
    can_upgrade = False
    may_half_change = False
    rows_together_max = ROWS_TOGETHER_MAX

    def __init__(
        self,
        *,
        key: Sequence[str],
        columns: Columns,
        before: bool = True,
        type_field: str = "type",
        rows_field: str = "rows",
        before_field: str | None = "before",
        sequence: str | None = None,
        session: str | None = None,
        lenient: bool = False,
        decoder: Decoder | None = None,
        has_session_per_partition: bool = False,
    ) -> None:
        self.name = "table"
        self.has_session_per_partition = has_session_per_partition
        self.decoder = JsonDecoder() if decoder is None else decoder
        self.has_before_image = before
        self.lenient = lenient
        """Whether messages that the rows contradict are applied as far as possible, and counted."""
        self.contradictions = 0
        self._set_columns(key, columns)
        self.other_columns: dict[str, Columns] = {}
        self._key = key
        self._message_fields = describe_message_fields(
            session, sequence, has_session_per_partition=has_session_per_partition
        )
        self.shape = self._describe_shape(columns)
        self._has_sequence = sequence is not None
        self._width = len(columns)
        self._null_row: Row = (None,) * self._width
        self._column_checks = _column_checks(columns)
        self._timestamp_positions = [
            i for i, type_name in enumerate(columns.values()) if type_name == "timestamp"
        ]
        self._timestamp_key_positions = [
            i for i in self.key_positions if i in self._timestamp_positions
        ]
        self._single_key_position = self.key_positions[0] if len(key) == 1 else None
        """The position of the key column, if there is only one. It is the usual case and faster."""
        self._state_decoder: msgspec.msgpack.Decoder[list[Row]] = msgspec.msgpack.Decoder(
            saved_rows_type(columns)
        )
        (row_type,) = saved_rows_type(columns).__args__
        self._row_decoder: msgspec.msgpack.Decoder[Row] = msgspec.msgpack.Decoder(row_type)
        packed_nulls = msgspec.msgpack.encode(self._null_row)
        self._packed_row_start = packed_nulls[: -self._width]
        """How packed rows with all columns begin: each null is one byte."""
        self._takes_before_images = before_field is not None
        fields = MessageFields(type_field, rows_field, before_field, sequence, session)
        self._set_message_types(key, columns, fields)

    def _describe_shape(self, columns: Columns) -> str:
        """What saved state of a table with these columns depends on, as text. It is stored, so it must
        not change.
        """
        column_list = ", ".join(f"{column} {type_name}" for column, type_name in columns.items())
        key_list = ", ".join(self._key)
        return f"columns {column_list}; key {key_list}; {self._message_fields}"

    def older_columns(self, shape: str) -> Columns | None:
        """The record columns of a table of this shape, if this table is the same with more columns
        behind the others; None if it is not. The key may not change, nor how records name a column.
        """
        for count in range(len(self._key), len(self.field_names)):
            older = dict(islice(self._stream_columns.items(), count))
            if self._describe_shape(older) != shape or not set(self._key) <= older.keys():
                continue
            output_names = output_column_names(older)
            if list(output_names.values()) != self.column_names[:count]:
                continue
            return self._record_columns(output_names, older)
        return None

    def _record_columns(self, output_names: Mapping[str, str], columns: Columns) -> Columns:
        output_columns = dict(zip(output_names.values(), columns.values(), strict=True))
        return _record_columns(output_columns, has_before_image=self.has_before_image)

    def _set_columns(self, key: Sequence[str], columns: Columns) -> None:
        """Set the columns as messages and as records name them, and how records become rows."""
        self._stream_columns = columns
        self.field_names = list(columns)
        """The columns as messages name them."""
        output_names = output_column_names(columns)
        self.column_names = list(output_names.values())
        """The columns as records name them."""
        self.key_positions = [self.field_names.index(name) for name in key]
        self.columns = self._record_columns(output_names, columns)
        self.row_key_spec: RowKeySpec | None = RowKeySpec(
            key=tuple(output_names[name] for name in key),
            columns=tuple(self.column_names),
            deleted_when={"op": "delete"},
            has_before_images=self.has_before_image,
        )

    def _set_message_types(
        self, key: Sequence[str], columns: Columns, fields: MessageFields
    ) -> None:
        """Set the message types, and the functions that decode to them.

        `text_structs` are the same messages with times as text. msgspec reads times as RFC 3339
        only; a message with times in another form is decoded with these, and then its times are
        converted.
        """
        structs = _message_structs(key, columns, fields)
        text_structs = _message_structs(key, _with_times_as_text(columns), fields)
        self.snapshot_struct = structs.snapshot
        self.insert_struct = structs.insert
        self.update_struct = structs.update
        self.delete_struct = structs.delete
        self.snapshot_type: type | None = structs.snapshot
        self._row_struct = structs.row
        self._before_struct = structs.before
        self._decode_values = self.decoder.for_type(structs.message_type)
        self._decode_values_with_text_times = self.decoder.for_type(text_structs.message_type)
        self._struct_of_text_struct: dict[Any, Any] = dict(zip(text_structs, structs, strict=True))

    def decode(self, values: KeysOrValues) -> list[Any]:
        """Typed messages, with a `Poison` where a value does not fit the table."""
        messages = self._decode_values(values)
        if self._timestamp_positions:
            self._decode_other_times(values, messages)
        if not self._column_checks:
            return messages
        return [self._poison_if_unfit(message) for message in messages]

    def _decode_other_times(self, values: KeysOrValues, messages: list[Any]) -> None:
        """Replace the poison of messages whose only fault is that their times are not written as
        RFC 3339.
        """
        positions = [i for i, message in enumerate(messages) if message.__class__ is Poison]
        if not positions:
            return
        text_messages = self._decode_values_with_text_times([values[i] for i in positions])
        for i, text_message in zip(positions, text_messages, strict=True):
            if text_message.__class__ is Poison:
                continue
            try:
                messages[i] = self._with_times(text_message)
            except (ValueError, msgspec.ValidationError):
                continue  # the first decoding has said what is wrong

    def _with_times(self, text_message: Any) -> Any:
        """The message of one whose times are texts. A text that is no time raises."""
        struct = self._struct_of_text_struct[text_message.__class__]
        if struct is self.snapshot_struct:
            fields = asdict(text_message)
            fields["rows"] = [self._convert_row(row) for row in text_message.rows]
            return struct(**fields)
        # Of a delete only the key counts: its other columns may contain anything.
        positions = self._timestamp_positions
        if struct is self.delete_struct:
            positions = self._timestamp_key_positions
        fields = self._convert_times(text_message, positions)
        text_before = fields.get("before")
        if text_before is not None:
            before_fields = self._convert_times(text_before, self._timestamp_positions)
            fields["before"] = self._before_struct(**before_fields)
        return struct(**fields)

    def _convert_row(self, text_row: Any) -> Any:
        """A row of a snapshot, with its texts converted to times."""
        fields = self._convert_times(text_row, self._timestamp_positions)
        return self._row_struct(**fields)

    def _convert_times(self, text_row: Any, positions: Sequence[int]) -> dict[str, Any]:
        """The fields of a row, with its texts at these positions converted to times."""
        fields = asdict(text_row)
        for position in positions:
            field = f"c{position}"
            text = fields[field]
            if isinstance(text, str):
                time = rfc3339(text) or text
                fields[field] = msgspec.convert(time, datetime)
        return fields

    def _poison_if_unfit(self, message: Any) -> Any:
        """The message, or a `Poison` if one of its values does not fit its column. Times in keys get
        a zone.
        """
        if message.__class__ is Poison:
            return message
        only_key = message.__class__ is self.delete_struct
        rows = message.rows if message.__class__ is self.snapshot_struct else (message,)
        misfit = ""
        for row in rows:
            misfit = misfit or self._row_misfit(row, only_key=only_key)
        before = self._before_image_of(message)
        if before is not None:
            misfit = misfit or self._row_misfit(before, only_key=False)
        return Poison(f"wrong schema: {misfit}") if misfit else message

    def _before_image_of(self, message: Any) -> Any:
        """The before-image that a message carries; None if it carries none."""
        return getattr(message, "before", None)

    def keys_named_by(self, message: Any) -> list[Row]:
        """The keys of the rows that a message names, as tuples. An update that changes the key of a
        row names two.
        """
        if message.__class__ is self.snapshot_struct:
            return [self._key_values(astuple(row)) for row in message.rows]
        values = astuple(message)
        keys = [self._key_values(values)]
        before = self._before_image_of(message)
        if before is not None and message.__class__ is self.update_struct:
            old_key = self._key_values(self._row_with_key_before(values, before))
            if old_key not in keys:
                keys.append(old_key)
        return keys

    def _key_values(self, row: Row) -> Row:
        return tuple([row[i] for i in self.key_positions])

    def _row_misfit(self, row: Any, *, only_key: bool) -> str:
        """Which value of a row does not fit its column, and why; empty if all fit. Times in the key
        get a zone. `only_key`: the other columns do not count and may contain anything.
        """
        for position, check in self._column_checks:
            if only_key and position not in self.key_positions:
                continue
            value = getattr(row, f"c{position}", None)
            if value is None or value is UNSET:
                continue
            misfit = check(value)
            if misfit:
                return f"{self.field_names[position]} {misfit}"
        for position in self._timestamp_key_positions:
            field = f"c{position}"
            time = getattr(row, field)
            if isinstance(time, datetime):  # a before-image need not name the key
                setattr(row, field, _with_zone(time))
        return ""

    def is_snapshot(self, message: Any) -> bool:
        """Whether a session may begin, or begin again, here."""
        return message.__class__ is self.snapshot_struct

    def sequences(self, messages: Sequence[Any]) -> SequenceNumbers:
        """The producer's own counter of each message, if the stream names one."""
        if not self._has_sequence:
            return [None] * len(messages)
        return [message.sequence for message in messages]

    def session(self, message: Any) -> str:
        """The session as a field of the message."""
        return str(message.session)

    def start(self, session: str) -> TableState:  # noqa: ARG002  # every table begins empty
        """The state of a new session: no rows."""
        return {}

    def apply(self, rows: TableState, message: Any) -> Sequence[Row]:
        """Change the rows and return one record per changed row: (op, columns…, columns before…)."""
        kind = message.__class__
        if kind is self.update_struct:
            # Updates are by far the most frequent, so they are handled without further calls.
            values = astuple(message)
            if self._takes_before_images and message.before is not None:
                old_key_row = self._row_with_key_before(values, message.before)
                self._refuse_wrong_before_image(rows, message.before, old_key_row)
                if self._row_key(old_key_row) != self._row_key(values):
                    return self._change_key(rows, values[: self._width], old_key_row)
            key_position = self._single_key_position
            key = values[key_position] if key_position is not None else self._row_key(values)
            old = rows.get(key)
            if old is None:
                return self._update_missing(rows, values)
            new = values[: self._width]
            if UNSET in new:
                # The producer left columns out: they stay as they were. Null is a value of its own.
                new = _fill_unset(new, old)
            rows[key] = new
            return (("update", *new, *old) if self.has_before_image else ("update", *new),)
        if kind is self.insert_struct:
            return self._insert(rows, message)
        if kind is self.delete_struct:
            return self._delete(rows, message)
        return self._apply_snapshot(rows, message)

    def fold_usual(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        sequences: SequenceNumbers,
        messages: Sequence[Any],
        output: FoldOutput,
    ) -> Iterable[int]:
        """Fold the usual messages: updates of all columns of a row that exists, in sequence. Yields
        the position of any other message when it is its turn.

        This does what `apply` does, without the calls: they would cost as much as the work.
        """
        update_struct = self.update_struct
        width = self._width
        key_position = self._single_key_position
        has_before_image = self.has_before_image
        takes_before_images = self._takes_before_images
        add_position = output.positions.append
        add_row = output.rows.append
        columns = zip(names, sequences, messages, strict=True)
        for i, (name, sequence, message) in enumerate(columns):
            session = sessions.get(name)  # type: ignore[arg-type]
            if session is None or not session.is_active or message.__class__ is not update_struct:
                yield i
                continue
            values = astuple(message)
            rows = session.state
            key = values[key_position] if key_position is not None else self._row_key(values)
            old = rows.get(key)
            # Anything unusual goes through `Fold`, which knows the rules. Nothing was changed yet.
            if (
                old is None
                or UNSET in values
                or (sequence is not None and session.sequence != sequence - 1)
                or (takes_before_images and message.before is not None)
            ):
                yield i
                continue
            new = values[:width]
            rows[key] = new
            session.sequence = sequence
            add_position(i)
            add_row(("update", *new, *old) if has_before_image else ("update", *new))

    def _row_key(self, row: Row) -> Any:
        if self._single_key_position is not None:
            return row[self._single_key_position]
        return tuple([row[i] for i in self.key_positions])

    def _update_missing(self, rows: TableState, values: Row) -> Sequence[Row]:
        self._refuse_or_count("update of a missing row", values)
        new = tuple([None if value is UNSET else value for value in values[: self._width]])
        rows[self._row_key(new)] = new
        return (self._record("insert", new, None),)

    def _row_with_key_before(self, values: Row, before: Any) -> Row:
        """The values of a message with the key that its row had before. A key column that the
        before-image leaves out did not change.
        """
        row = list(values[: self._width])
        before_values = astuple(before)
        for position in self.key_positions:
            if before_values[position] is not UNSET:
                row[position] = before_values[position]
        return tuple(row)

    def _refuse_wrong_before_image(self, rows: TableState, before: Any, old_key_row: Row) -> None:
        """Refuse a before-image that is not the row that is here. A missing row is no matter of this:
        every update and delete of one is refused.
        """
        old = rows.get(self._row_key(old_key_row))
        if old is None:
            return
        field = self._differing_field(astuple(before), old)
        if field:
            contradiction = f"before-image differs from the row in {field}"
            self._refuse_or_count(contradiction, old_key_row)

    def _differing_field(self, before: Row, old: Row) -> str:
        """The first column in which a before-image is not the row; empty if there is none."""
        for name, value, old_value in zip(self.field_names, before, old, strict=True):
            # Most values are equal at once. A before-image says nothing about a column that it leaves
            # out.
            if value == old_value or value is UNSET:
                continue
            if not _is_same_value(value, old_value):
                return name
        return ""

    def _change_key(self, rows: TableState, values: Row, old_key_row: Row) -> Sequence[Row]:
        """Give a row another key. Columns that the message leaves out stay as they were.

        One record deletes the row under its old key, and one inserts it under the new one: so every
        reader that folds records by key is right, without knowing that keys can change.
        """
        old = rows.get(self._row_key(old_key_row))
        if old is None:
            self._refuse_or_count("update of a missing row", old_key_row)
        new_key = self._row_key(values)
        overwritten = rows.get(new_key)
        if overwritten is not None:
            self._refuse_or_count("change of a key to one that is there already", values)
        kept_values = self._null_row if old is None else old
        new = _fill_unset(values, kept_values)
        records = []
        if old is not None:
            del rows[self._row_key(old)]
            records.append(self._delete_record(old))
        rows[new_key] = new
        op = "insert" if overwritten is None else "update"
        records.append(self._record(op, new, overwritten))
        return records

    def _insert(self, rows: TableState, message: Any) -> Sequence[Row]:
        new = astuple(message)[: self._width]
        key = self._row_key(new)
        old = rows.get(key)
        op = "insert"
        if old is not None:
            self._refuse_or_count("insert of a row that is there already", new)
            op = "update"
        rows[key] = new
        return (self._record(op, new, old),)

    def _delete(self, rows: TableState, message: Any) -> Sequence[Row]:
        values = astuple(message)[: self._width]
        if self._takes_before_images and message.before is not None:
            self._refuse_wrong_before_image(rows, message.before, values)
        # A missing row is popped without an effect, so that the refusal leaves the rows as they were.
        old = rows.pop(self._row_key(values), None)
        if old is None:
            self._refuse_or_count("delete of a missing row", values)
            return ()
        return (self._delete_record(old),)

    def _apply_snapshot(self, rows: TableState, message: Any) -> Sequence[Row]:
        """Replace all rows. Rows that the snapshot does not contain give a delete."""
        read_all_rows(rows)
        new_rows: TableState = {}
        for row_message in message.rows:
            row = astuple(row_message)
            key = self._row_key(row)
            if key in new_rows:
                self._refuse_or_count("a snapshot that names a row twice", row)
            new_rows[key] = row
        records = [self._record("snapshot", row, rows.get(key)) for key, row in new_rows.items()]
        for key, old in rows.items():
            if key not in new_rows:
                records.append(self._delete_record(old))
        # The very dict is changed, and not replaced: the session holds it. All checks are done by
        # now, so that a snapshot that is refused has changed nothing.
        rows.clear()
        rows.update(new_rows)
        return records

    def begin_anew(self, rows: TableState) -> None:
        """Nothing: a snapshot replaces all rows, whatever they are."""

    def end(self, rows: TableState) -> Sequence[Row]:
        """A delete for every row."""
        read_all_rows(rows)
        return [self._delete_record(old) for old in rows.values()]

    def _record(self, op: str, new: Row, old: Row | None) -> Row:
        if not self.has_before_image:
            return (op, *new)
        before_image = self._null_row if old is None else old
        return (op, *new, *before_image)

    def _delete_record(self, old: Row) -> Row:
        """The record of a row that is gone: of its columns only the key is set."""
        values: list[Any] = [None] * self._width
        for position in self.key_positions:
            values[position] = old[position]
        return self._record("delete", tuple(values), old)

    def _refuse_or_count(self, contradiction: str, row: Row) -> None:
        """Refuse a message that the rows contradict; a lenient machine only counts it."""
        if self.lenient:
            self.contradictions += 1
            return
        raise PreconditionError(f"{contradiction}: {self._describe_key(row)}")

    def _describe_key(self, row: Row) -> str:
        """The key columns of a row and their values, for people."""
        key_values = []
        for i in self.key_positions:
            key_value = f"{self.field_names[i]}={row[i]!r}"
            key_values.append(key_value[:80])
        return ", ".join(key_values)

    def check_records(self, records: Sequence[Row]) -> None:
        """Refuse records that could not be written. Decoding has checked every value already; this
        is called once more where the writing of records failed.
        """
        for record in records:
            for position, check in self._column_checks:
                value = record[1 + position]
                if value is None:
                    continue
                misfit = check(value)
                if misfit:
                    raise ValueError(f"{self.column_names[position]} {misfit}")

    def dump(self, rows: TableState) -> bytes:
        """Rows as bytes, in the order in which they came."""
        read_all_rows(rows)
        return msgspec.msgpack.encode(list(rows.values()))

    def load(self, state_bytes: bytes, version: int) -> TableState:  # noqa: ARG002  # there was only one
        """Rows from bytes. Columns that were added since they were saved are null."""
        try:
            rows = self._state_decoder.decode(state_bytes)
        except msgspec.ValidationError:
            saved_rows = msgspec.msgpack.decode(state_bytes)
            whole_rows = msgspec.msgpack.encode(fill_added_columns(saved_rows, self._width))
            rows = self._state_decoder.decode(whole_rows)
        if self._timestamp_key_positions:
            # Earlier versions saved times in keys as the producer wrote them, also without a zone.
            rows = [self._with_zones_in_key(row) for row in rows]
        return {self._row_key(row): row for row in rows}

    def _with_zones_in_key(self, row: Row) -> Row:
        values = list(row)
        for position in self._timestamp_key_positions:
            values[position] = _with_zone(values[position])
        return tuple(values)

    def row_changes(self, rows: Any) -> RowChanges | None:
        """What is to be stored of a large session; None if it is stored as one value."""
        stored_rows = getattr(rows, "stored_rows", None)
        if stored_rows is not None:
            return stored_rows.changes(self._pack_rows(rows))
        if len(rows) <= self.rows_together_max:
            return None
        return complete_rows(self._pack_rows(rows))

    def _pack_rows(self, rows: TableState) -> Iterable[StoredRow]:
        for key, row in rows.items():
            number = rows.number_of(key) if isinstance(rows, StoredTable) else NEW_ROW
            yield StoredRow(self.hash_row_key(key), number, msgspec.msgpack.encode(row))

    def unpack_row(self, packed: bytes) -> tuple[Any, Row]:
        """A packed row, and its key."""
        row = self._row_decoder.decode(self.fill_packed_row(packed))
        return self._row_key(row), row

    def fill_packed_row(self, packed: bytes) -> bytes:
        """The same packed row, with null in the columns that were added since it was stored."""
        if packed.startswith(self._packed_row_start):
            return packed
        (whole_row,) = fill_added_columns([msgspec.msgpack.decode(packed)], self._width)
        return msgspec.msgpack.encode(whole_row)

    def hash_row_key(self, key: Any) -> int:
        """The hash by which a row with this key is stored."""
        return hash_key(key if self._single_key_position is None else (key,))

    def load_stored_rows(self, stored_rows: StoredRows) -> Any:
        """The rows of a session that is stored row by row. They are read when they are needed."""
        return StoredTable(self, stored_rows, stored_rows.take_rows())

    def read_stored_rows(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        messages: Sequence[Any],
    ) -> None:
        """Read the stored rows that messages name. A snapshot names none: it needs all of them, if it
        is applied.
        """
        keys_by_session: dict[str, set[Row]] = {}
        for name, message in zip(names, messages, strict=True):
            if name is None or stored_rows_of(sessions.get(name)) is None:
                continue
            if message.__class__ is Poison or message.__class__ is self.snapshot_struct:
                continue
            keys_by_session.setdefault(name, set()).update(self.keys_named_by(message))
        for name, keys in keys_by_session.items():
            session = sessions[name]
            stored_rows = stored_rows_of(session)
            if stored_rows is not None:
                stored_rows.read(map(hash_key, keys))
            self.take_read_rows(session.state)

    def take_read_rows(self, rows: Any) -> None:
        """Add the rows that were read meanwhile to a session that is stored row by row."""
        if isinstance(rows, StoredTable):
            rows.take_read_rows()

    def hashes_named_by(self, message: Any) -> Iterable[int]:
        """The hashes of the keys that a message names, if it is no snapshot."""
        if message.__class__ is Poison or message.__class__ is self.snapshot_struct:
            return ()
        return map(hash_key, self.keys_named_by(message))

    def to_plain(self, rows: TableState) -> Any:
        """Rows as plain values for people and JSON."""
        read_all_rows(rows)
        return {"rows": [self.row_to_plain(row) for row in rows.values()]}

    def row_to_plain(self, row: Row) -> Any:
        """One row as plain values, in the same form for every command."""
        values = dict(zip(self.column_names, row, strict=True))
        return msgspec.to_builtins(normalize_values(self.columns, values))


def fill_added_columns(saved_rows: Any, width: int) -> list[Any]:
    """Saved rows, as msgpack has them, with null in the columns that were added behind the others since
    they were saved.
    """
    return [[*row, *[None] * (width - len(row))] for row in saved_rows]


def normalize_values(columns: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Values as they are in a table, in whatever form the producer wrote them: times in UTC,
    decimals with all digits of their scale.
    """
    normalized = {}
    for name, value in values.items():
        type_name = columns.get(name, "")
        normalized[name] = _normalize_value(type_name, value)
    return normalized


def _with_zone(time: datetime) -> datetime:
    """The time with its zone, UTC if it has none. Python never takes a time without a zone as equal
    to one with a zone.
    """
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _normalize_value(type_name: str, value: Any) -> Any:
    if isinstance(value, datetime) and type_name == "timestamp":
        return _with_zone(value).astimezone(UTC)
    if not isinstance(value, Decimal):
        return value
    size = decimal_size(type_name)
    if size is None or describe_misfit(type_name, value):
        return value
    _, scale = size
    last_digit = Decimal(1).scaleb(-scale)
    return value.quantize(last_digit, context=Context(prec=PRECISION_MAX))


def _fill_unset(values: Row, kept_values: Row) -> Row:
    """The values, with those of another row where they are not set."""
    # A list is faster here than a generator.
    return tuple(
        [
            kept_value if value is UNSET else value
            for value, kept_value in zip(values, kept_values, strict=True)
        ]
    )


def _is_same_value(value: Any, other_value: Any) -> bool:
    """Whether two values of one column are the same. A time without a zone is in UTC, and NaN is
    itself.
    """
    if same_rows((value,), (other_value,)):
        return True
    if not isinstance(value, float) or not isinstance(other_value, float):
        return False
    return math.isnan(value) and math.isnan(other_value)


def output_column_names(columns: Iterable[str]) -> dict[str, str]:
    """What the columns of a table are called in records and in `current`, in the same order.

    A column keeps its name, unless the name is taken by a column that every record has, by a
    before-image, or by another column (Spark and Delta do not look at case). Then `row_` is put
    before it, as often as is needed. Characters that Delta does not allow become `_`.
    """
    writable_names = {name: UNWRITABLE_CHARACTERS.sub("_", name) for name in columns}
    used_names = {*RECORD_COLUMN_NAMES, "op"}
    before_names = {f"before_{name}".casefold() for name in writable_names.values()}
    output_names = dict.fromkeys(writable_names, "")
    # Names that can stay come first: no other column may take them away.
    for name, writable_name in writable_names.items():
        is_free = name.casefold() not in used_names | before_names
        if name == writable_name and is_free:
            output_names[name] = name
            used_names.add(name.casefold())
    for name, writable_name in writable_names.items():
        if output_names[name]:
            continue
        output_name = writable_name
        while (
            output_name.casefold() in used_names | before_names
            or f"before_{output_name}".casefold() in used_names
        ):
            output_name = f"row_{output_name}"
        output_names[name] = output_name
        used_names.add(output_name.casefold())
        before_names.add(f"before_{output_name}".casefold())
    return output_names


def _record_columns(columns: Columns, *, has_before_image: bool) -> Columns:
    """Columns of a record: the operation, the row, and the row before, if that is wanted."""
    record_columns = {"op": "string", **columns}
    if has_before_image:
        for name, type_name in columns.items():
            record_columns[f"before_{name}"] = type_name
    return record_columns


def _with_times_as_text(columns: Columns) -> Columns:
    text_columns = {}
    for name, type_name in columns.items():
        text_columns[name] = "string" if type_name == "timestamp" else type_name
    return text_columns


def saved_rows_type(columns: Columns) -> Any:
    """The type of saved rows: a list of tuples, one value per column."""
    value_types = tuple(column_type(type_name) | None for type_name in columns.values())
    row_type: Any = tuple.__class_getitem__(value_types)
    return list.__class_getitem__(row_type)


class MessageFields(NamedTuple):
    """What the fields of a message are called that are no columns."""

    type: str
    rows: str
    before: str | None
    """The row before an update or a delete; None: no field is taken as that."""
    sequence: str | None
    session: str | None


class _MessageStructs(NamedTuple):
    """The Structs of the four messages, of a row within a snapshot, and of a before-image."""

    snapshot: Any
    insert: Any
    update: Any
    delete: Any
    row: Any
    before: Any

    @property
    def message_type(self) -> Any:
        """Any of the four messages."""
        return self.snapshot | self.insert | self.update | self.delete


class _SequenceAndSession(NamedTuple):
    """The Struct fields of a stream's sequence and session.

    Both may be columns. But in a snapshot the columns are within the rows, so that it always has
    fields of its own for both.
    """

    snapshot_fields: list[Any]
    change_fields: list[Any]
    """Those of insert, update and delete."""
    column_getters: dict[str, Any]
    """Properties that read them from their columns."""
    columns: list[str]
    """The columns that they are."""


def _sequence_and_session(columns: Columns, fields: MessageFields) -> _SequenceAndSession:
    own_fields = _SequenceAndSession([], [], {}, [])
    for field, name, field_type in (
        ("sequence", fields.sequence, Int64),
        ("session", fields.session, str | Int64),
    ):
        if not name:
            continue
        own_fields.snapshot_fields.append((field, field_type))
        if name in columns:
            position = list(columns).index(name)
            own_fields.column_getters[field] = property(attrgetter(f"c{position}"))
            own_fields.columns.append(name)
        else:
            own_fields.change_fields.append((field, field_type))
    return own_fields


def _message_structs(
    key: Sequence[str], columns: Columns, fields: MessageFields
) -> _MessageStructs:
    """The message Structs. The columns are the first fields, c0, c1, …, so that a row is a slice of
    the message's tuple.
    """
    own = _sequence_and_session(columns, fields)
    # Columns may have the names of fields of a snapshot: the Struct of one has no columns.
    rename = {f"c{i}": name for i, name in enumerate(columns)}
    for field, name in fields._asdict().items():
        rename[field] = name or ""

    def make_struct(name: str, struct_fields: list[Any], **options: Any) -> type:
        return defstruct(name, struct_fields, rename=rename, gc=False, kw_only=True, **options)

    def make_message(tag: str, struct_fields: list[Any], namespace: dict[str, Any]) -> type:
        return make_struct(
            tag.title(), struct_fields, tag_field=fields.type, tag=tag, namespace=namespace
        )

    row_struct = make_struct("Row", row_fields(key, columns, "null"))
    rows = [("rows", list.__class_getitem__(row_struct))]
    before_struct = make_struct("Before", _before_image_fields(key, columns))
    before = [("before", before_struct | None, None)] if fields.before else []
    required = [*key, *own.columns]
    inserted = row_fields(required, columns, "null") + own.change_fields
    updated = row_fields(required, columns, "unset") + own.change_fields + before
    deleted = row_fields(required, columns, "ignored") + own.change_fields + before
    return _MessageStructs(
        snapshot=make_message("snapshot", rows + own.snapshot_fields, {}),
        insert=make_message("insert", inserted, own.column_getters),
        update=make_message("update", updated, own.column_getters),
        delete=make_message("delete", deleted, own.column_getters),
        row=row_struct,
        before=before_struct,
    )


def _before_image_fields(key: Sequence[str], columns: Columns) -> list[Any]:
    """Struct fields of a before-image. Any column may be left out, and only the key cannot be null."""
    fields = row_fields((), columns, "unset")
    for i, (name, type_name) in enumerate(columns.items()):
        if name in key:
            fields[i] = (f"c{i}", column_type(type_name) | UnsetType, UNSET)
    return fields


def row_fields(
    required_columns: Collection[str],
    columns: Columns,
    if_missing: Literal["null", "unset", "ignored"],
) -> list[Any]:
    """Struct fields of a row. Required columns, such as the key, must be there and not null. A missing
    value of any other column is null or unset, or the column may contain anything and is ignored.
    """
    fields: list[Any] = []
    for i, (name, type_name) in enumerate(columns.items()):
        value_type = column_type(type_name)
        field = f"c{i}"
        if name in required_columns:
            fields.append((field, value_type))
        elif if_missing == "unset":
            fields.append((field, value_type | None | UnsetType, UNSET))
        elif if_missing == "null":
            fields.append((field, value_type | None, None))
        else:
            fields.append((field, Any, None))
    return fields


def _column_checks(columns: Columns) -> list[tuple[int, ValueCheck]]:
    """The checks of the columns that have one, with the positions of the columns."""
    checks: list[tuple[int, ValueCheck]] = []
    for i, type_name in enumerate(columns.values()):
        check = _column_check(type_name)
        if check is not None:
            checks.append((i, check))
    return checks


def describe_misfit(type_name: str, value: Any) -> str:
    """Why a value does not fit a column of this type; empty if it does."""
    check = _column_check(type_name)
    if check is None:
        return ""
    return check(value)


def _column_check(type_name: str) -> ValueCheck | None:
    """The check beyond the type, if a value of the type may be one that the column cannot hold."""
    size = decimal_size(type_name)
    if size is not None:
        return _decimal_check(*size)
    if type_name == "timestamp":
        return _timestamp_check
    return None


def _decimal_check(precision: int, scale: int) -> ValueCheck:
    def check(value: Decimal) -> str:
        if not value.is_finite():
            return f"is {value}"
        _, digits, exponent_or_name = value.as_tuple()
        exponent = int(exponent_or_name)
        whole_digits = len(digits) + exponent
        fits = -exponent <= scale and whole_digits <= precision - scale
        if not value:
            # A zero fits with any number of decimal places.
            fits = exponent <= 0
        if fits:
            return ""
        return f"does not fit decimal({precision},{scale}): {value}"

    return check


def _timestamp_check(value: datetime) -> str:
    """Why a time cannot be written in UTC; empty if it can."""
    try:
        if value.tzinfo:
            value.astimezone(UTC)
    except (OverflowError, ValueError):
        return f"is out of range: {value}"
    return ""
