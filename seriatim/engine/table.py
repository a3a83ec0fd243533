"""The stock machine: a table sent as snapshot, then inserts, updates and deletes. No code needed.

State is the session's rows by key. Every message is checked before it changes anything: an insert
of a present row or an update of a missing one raises `PreconditionError` and leaves the rows as
they were.

Next room: fold.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Annotated, Any, Union, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.structs import asdict, astuple

from seriatim.engine.messages import Poison, decode_message, decode_messages
from seriatim.engine.session import FoldOutput, Session
from seriatim.storage.current_rows import RowKeySpec

Row = tuple[Any, ...]
PRECISION_MAX = 38
DECIMAL_TYPE = re.compile(r"decimal\((\d+),\s*(\d+)\)")
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
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
EXTENDED_TIME = (
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,18}))?)?(ZONE)?)?"
)
BASIC_TIME = r"(\d{4})(\d\d)(\d\d)[Tt](\d\d)(\d\d)(?:(\d\d)(?:[.,](\d{1,18}))?)?(ZONE)?"
ZONE = r"[Zz]|[+-]\d\d(?::?\d\d)?"
TIMES = [re.compile(form.replace("ZONE", ZONE), re.ASCII) for form in (EXTENDED_TIME, BASIC_TIME)]
"""Times as ISO 8601 writes them, in its extended and its basic form; PostgreSQL's are of the
former.
"""


class PreconditionError(Exception):  # named as the finding it becomes
    """A message that the session's rows contradict."""


def column_type(name: str) -> Any:
    """The Python type behind a column type of a stream file; None if there is none of that name."""
    if match := DECIMAL_TYPE.fullmatch(name):
        return (
            Decimal
            if 0 <= int(match[2]) <= int(match[1]) <= PRECISION_MAX and int(match[1])
            else None
        )
    return COLUMN_TYPES.get(name)


def rfc3339(text: str) -> str | None:
    """A time in the one form that msgspec reads; None: it is not written in any form that is taken."""
    match = TIMES[0].fullmatch(text) or TIMES[1].fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    if zone and zone not in "Zz":
        digits = zone[1:].replace(":", "").ljust(4, "0")
        zone = f"{zone[0]}{digits[:2]}:{digits[2:]}"
    time = f"{hour or '00'}:{minute or '00'}:{second or '00'}"
    return f"{year}-{month}-{day}T{time}{'.' if fraction else ''}{fraction or ''}{zone or ''}"


class TableMachine:
    """Rows by key, changed by snapshot, insert, update and delete messages."""

    state_version = 1
    has_snapshots = True
    can_upgrade = False
    may_half_change = False

    def __init__(
        self,
        *,
        key: Sequence[str],
        columns: dict[str, str],
        before: bool = True,
        type_field: str = "type",
        rows_field: str = "rows",
        sequence: str | None = None,
        session: str | None = None,
        lenient: bool = False,
    ) -> None:
        self.name = "table"
        self.column_names = list(columns)
        self.key_positions = [self.column_names.index(name) for name in key]
        self.has_before_image = before
        self.lenient = lenient
        """Take messages that the rows contradict, as well as they can be taken, and count them."""
        self.contradictions = 0
        self.columns = {"op": "string", **columns} | (
            {f"before_{n}": t for n, t in columns.items()} if before else {}
        )
        self.row_key_spec: RowKeySpec | None = RowKeySpec(
            key=tuple(key), columns=tuple(columns), deleted_when={"op": "delete"}
        )
        self.other_columns: dict[str, dict[str, str]] = {}
        self._width = len(self.column_names)
        self._null_row: Row = (None,) * self._width
        self._column_checks = _column_checks(columns)
        self._timestamp_key_positions = [
            i for i in self.key_positions if columns[self.column_names[i]] == "timestamp"
        ]
        self._single_key_position = self.key_positions[0] if len(self.key_positions) == 1 else None
        kinds: list[Any] = _message_structs(key, columns, type_field, rows_field, sequence, session)
        self.snapshot_struct, self.insert_struct, self.update_struct, self.delete_struct = kinds
        self.snapshot_type: type | None = self.snapshot_struct
        self._has_sequence = sequence is not None
        listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
        named = f"session {session or 'by key'}, sequence {sequence or 'none'}"
        self.shape = f"columns {listed}; key {', '.join(key)}; {named}"
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[tuple(kinds)])  # noqa: UP007  # made of a list
        self._times_before = [i for i, kind in enumerate(columns.values()) if kind == "timestamp"]
        # The same messages with times as text: for those that are not written as RFC 3339, which is all msgspec reads.
        as_text = {
            name: "string" if kind == "timestamp" else kind for name, kind in columns.items()
        }
        text_kinds: list[Any] = _message_structs(
            key, as_text, type_field, rows_field, sequence, session
        )
        self._kind_of_text = dict(zip(text_kinds, kinds, strict=True))
        self._text_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            Union[tuple(text_kinds)]
        )
        (self._row_kind,) = get_args(msgspec.structs.fields(self.snapshot_struct)[0].type)
        row: Any = tuple.__class_getitem__(
            tuple(column_type(kind) | None for kind in columns.values())
        )
        self._state_decoder: msgspec.msgpack.Decoder[list[Row]] = msgspec.msgpack.Decoder(
            list.__class_getitem__(row)
        )

    def decode(self, values: Sequence[bytes | None]) -> list[Any]:
        """Typed messages, `Poison` where a value does not fit the table."""
        messages = decode_messages(self._decoder, values)
        if self._times_before:
            for i, message in enumerate(messages):
                if message.__class__ is Poison:
                    messages[i] = self._with_other_times(values[i], message)
        return (
            [self._poison_if_unfit(message) for message in messages]
            if self._column_checks
            else messages
        )

    def _with_other_times(self, value: bytes | None, poison: Poison) -> Any:
        """A message whose times are not written as RFC 3339, decoded all the same; the poison if
        that is not all.
        """
        texts = decode_message(self._text_decoder.decode, value)
        if texts.__class__ is Poison:
            return poison
        kind = self._kind_of_text[texts.__class__]
        try:
            if kind is not self.snapshot_struct:
                # Of a delete only the key counts: what else it has may be anything.
                positions = (
                    self._timestamp_key_positions
                    if kind is self.delete_struct
                    else self._times_before
                )
                return kind(**self._timed(texts, positions))
            fields = asdict(texts)
            fields["rows"] = [
                self._row_kind(**self._timed(row, self._times_before)) for row in texts.rows
            ]
            return kind(**fields)
        except (ValueError, msgspec.ValidationError):
            return poison

    def _timed(self, texts: Any, positions: Sequence[int]) -> dict[str, Any]:
        """The fields of a row, with times for texts."""
        fields = asdict(texts)
        for position in positions:
            text = fields[f"c{position}"]
            if isinstance(text, str):
                fields[f"c{position}"] = msgspec.convert(rfc3339(text) or text, datetime)
        return fields

    def _poison_if_unfit(self, message: Any) -> Any:
        if message.__class__ is Poison:
            return message
        rows = message.rows if message.__class__ is self.snapshot_struct else (message,)
        checks = self._column_checks
        if message.__class__ is self.delete_struct:  # only its key counts
            checks = [
                (position, check) for position, check in checks if position in self.key_positions
            ]
        for row in rows:
            for position, check in checks:
                value = getattr(row, f"c{position}", None)
                if value is not None and value is not UNSET and (trouble := check(value)):
                    return Poison(f"wrong schema: {self.column_names[position]} {trouble}")
            for position in self._timestamp_key_positions:
                setattr(row, f"c{position}", _utc(getattr(row, f"c{position}")))
        return message

    def is_snapshot(self, message: Any) -> bool:
        """Whether a session may begin, or begin again, here."""
        return message.__class__ is self.snapshot_struct

    def sequences(self, messages: Sequence[Any]) -> Sequence[int | None]:
        """The producer's own counter of each message, if the stream names one."""
        return (
            [message.sequence for message in messages]
            if self._has_sequence
            else [None] * len(messages)
        )

    def session(self, message: Any) -> str:
        """The session as a field of the message."""
        return str(message.session)

    def start(self, session: str) -> dict[Any, Row]:  # noqa: ARG002  # every table begins empty
        """No rows yet."""
        return {}

    def apply(self, rows: dict[Any, Row], message: Any) -> Sequence[Row]:
        """Change the rows; one record per row touched: (op, columns…, columns before…)."""
        kind = message.__class__
        if kind is self.update_struct:
            given = astuple(message)
            old = rows.get(
                key := given[self._single_key_position]
                if self._single_key_position is not None
                else self._row_key(given)
            )
            if old is None:
                return self._update_missing(rows, given)
            if UNSET in given:
                new = tuple(
                    [
                        was if value is UNSET else value
                        for value, was in zip(given, old, strict=False)
                    ]
                )
            else:
                new = given[: self._width]
            rows[key] = new
            return (("update", *new, *old) if self.has_before_image else ("update", *new),)
        if kind is self.insert_struct:
            return self._insert(rows, message)
        if kind is self.delete_struct:
            return self._delete(rows, message)
        return self._apply_snapshot(rows, message)

    def fold_usual(
        self,
        sessions: Mapping[str, Session],
        names: Sequence[str | None],
        sequences: Sequence[int | None],
        messages: Sequence[Any],
        output: FoldOutput,
    ) -> Iterable[int]:
        """Folds updates that are in sequence, whole and of a row that is there; gives the positions
        of the rest.

        It does what `apply` does without the calls, which cost as much as the work.
        """
        update, width, single, before = (
            self.update_struct,
            self._width,
            self._single_key_position,
            self.has_before_image,
        )
        add_position, add_row = output.positions.append, output.rows.append
        for i, (name, sequence, message) in enumerate(zip(names, sequences, messages, strict=True)):
            session = sessions.get(name)  # type: ignore[arg-type]
            if session is None or not session.is_active or message.__class__ is not update:
                yield i
                continue
            given, rows = astuple(message), session.state
            old = rows.get(key := given[single] if single is not None else self._row_key(given))
            if (
                old is None
                or UNSET in given
                or (sequence is not None and session.sequence != sequence - 1)
            ):
                yield i
                continue
            rows[key] = new = given[:width]
            session.sequence = sequence
            add_position(i)
            add_row(("update", *new, *old) if before else ("update", *new))

    def _row_key(self, row: Row) -> Any:
        return (
            row[self._single_key_position]
            if self._single_key_position is not None
            else tuple([row[i] for i in self.key_positions])
        )

    def _update_missing(self, rows: dict[Any, Row], values: Row) -> Sequence[Row]:
        self._refuse_or_count("update of a missing row", values)
        new = tuple([None if value is UNSET else value for value in values[: self._width]])
        rows[self._row_key(new)] = new
        return (self._record("insert", new, None),)

    def _insert(self, rows: dict[Any, Row], message: Any) -> Sequence[Row]:
        new = astuple(message)[: self._width]
        key = self._row_key(new)
        old = rows.get(key)
        if old is not None:
            self._refuse_or_count("insert of a row that is there already", new)
        rows[key] = new
        return (self._record("insert" if old is None else "update", new, old),)

    def _delete(self, rows: dict[Any, Row], message: Any) -> Sequence[Row]:
        given = astuple(message)[: self._width]
        old = rows.pop(self._row_key(given), None)
        if old is None:
            self._refuse_or_count("delete of a missing row", given)
            return ()
        return (self._record("delete", self._key_columns_only(old), old),)

    def _apply_snapshot(self, rows: dict[Any, Row], message: Any) -> Sequence[Row]:
        """A snapshot says all: rows it does not name have vanished, and are told as deletes."""
        table: dict[Any, Row] = {}
        for row in map(astuple, message.rows):
            if table.setdefault(self._row_key(row), row) is not row:
                self._refuse_or_count("a snapshot that names a row twice", row)
                table[self._row_key(row)] = row
        records = [self._record("snapshot", row, rows.get(key)) for key, row in table.items()]
        for key, old in rows.items():
            if key not in table:
                records.append(self._record("delete", self._key_columns_only(old), old))
        rows.clear()
        rows.update(table)
        return records

    def end(self, rows: dict[Any, Row]) -> Sequence[Row]:
        """A delete for every row."""
        return [self._record("delete", self._key_columns_only(old), old) for old in rows.values()]

    def _record(self, op: str, new: Row, old: Row | None) -> Row:
        if not self.has_before_image:
            return (op, *new)
        return (op, *new, *(self._null_row if old is None else old))

    def _key_columns_only(self, row: Row) -> Row:
        return tuple([value if i in self.key_positions else None for i, value in enumerate(row)])

    def _refuse_or_count(self, contradiction: str, row: Row) -> None:
        if not self.lenient:
            key = ", ".join(f"{self.column_names[i]}={row[i]!r}"[:80] for i in self.key_positions)
            raise PreconditionError(f"{contradiction}: {key}")
        self.contradictions += 1

    def check_records(self, records: Sequence[Row]) -> None:
        """Decoding has checked every value already; once more where a record could not be written."""
        for record in records:
            for position, check in self._column_checks:
                if (value := record[1 + position]) is not None and (trouble := check(value)):
                    raise ValueError(f"{self.column_names[position]} {trouble}")

    def dump(self, rows: dict[Any, Row]) -> bytes:
        """Rows as bytes, in the order in which they came."""
        return msgspec.msgpack.encode(list(rows.values()))

    def load(self, state_bytes: bytes, version: int) -> dict[Any, Row]:  # noqa: ARG002  # there was only one
        """Rows from bytes."""
        rows = self._state_decoder.decode(state_bytes)
        if self._timestamp_key_positions:  # earlier versions kept them as the producer wrote them
            rows = [
                tuple(
                    [
                        _utc(v) if i in self._timestamp_key_positions else v
                        for i, v in enumerate(row)
                    ]
                )
                for row in rows
            ]
        return {self._row_key(row): row for row in rows}

    def to_plain(self, rows: dict[Any, Row]) -> Any:
        """Rows as plain values for people and JSON."""
        return {"rows": [self.row_to_plain(row) for row in rows.values()]}

    def row_to_plain(self, row: Row) -> Any:
        """One row, in the one form that all ways to look at it have."""
        return msgspec.to_builtins(
            normalize_values(self.columns, dict(zip(self.column_names, row, strict=True)))
        )


def normalize_values(columns: Mapping[str, str], values: dict[str, Any]) -> dict[str, Any]:
    """Values as a table has them, however their producer wrote them: times in UTC, decimals with
    all their digits.
    """
    return {name: _normalize_value(columns.get(name, ""), value) for name, value in values.items()}


def _utc(time: datetime) -> datetime:
    """A time with its zone, UTC if it has none: without one it equals no other of the same instant."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _normalize_value(type_name: str, value: Any) -> Any:
    if isinstance(value, datetime) and type_name == "timestamp":
        return _utc(value).astimezone(UTC)
    if isinstance(value, Decimal) and (match := DECIMAL_TYPE.fullmatch(type_name)):
        precision, scale = int(match[1]), int(match[2])
        if not _decimal_check(precision, scale)(value):
            return value.quantize(Decimal(1).scaleb(-scale), context=Context(prec=PRECISION_MAX))
    return value


def _message_structs(
    key: Sequence[str],
    columns: dict[str, str],
    type_field: str,
    rows_field: str,
    sequence: str | None,
    session: str | None,
) -> list[type]:
    """The four message Structs. Columns come first as c0, c1, …, so that a row is a slice of the
    tuple.
    """
    own = [("sequence", Int64, sequence), ("session", str | Int64, session)]
    given = {field: name for field, _, name in own if name}
    extra = [(field, kind) for field, kind, name in own if name]
    rename = {f"c{i}": name for i, name in enumerate(columns)} | given

    def kind_of(tag: str, fields: list[Any], **more: str) -> type:
        return defstruct(
            tag.title(),
            fields,
            tag_field=type_field,
            tag=tag,
            rename=rename | more,
            gc=False,
            kw_only=True,
        )

    full, partial, bare = (_row_fields(key, columns, default) for default in (None, UNSET, ...))
    row = defstruct("Row", full, rename=rename, gc=False, kw_only=True)
    rows: list[Any] = [("rows", list.__class_getitem__(row))]
    return [
        kind_of("snapshot", rows + extra, rows=rows_field),
        kind_of("insert", full + extra),
        kind_of("update", partial + extra),
        kind_of("delete", bare + extra),
    ]


def _row_fields(key: Sequence[str], columns: dict[str, str], default: Any) -> list[Any]:
    """Struct fields of a row: key columns are required; the rest default to null, to unset, or are
    ignored.
    """
    fields: list[Any] = []
    for i, (name, type_name) in enumerate(columns.items()):
        kind = column_type(type_name)
        if name in key:
            fields.append((f"c{i}", kind))
        elif default is UNSET:
            fields.append((f"c{i}", kind | None | UnsetType, UNSET))
        else:
            fields.append((f"c{i}", Any if default is ... else kind | None, None))
    return fields


def _column_checks(columns: dict[str, str]) -> list[tuple[int, Callable[[Any], str]]]:
    """Checks beyond the type: what JSON can say and the column cannot hold."""
    checks: list[tuple[int, Callable[[Any], str]]] = []
    for i, type_name in enumerate(columns.values()):
        if match := DECIMAL_TYPE.fullmatch(type_name):
            checks.append((i, _decimal_check(int(match[1]), int(match[2]))))
        elif type_name == "timestamp":
            checks.append((i, _timestamp_check))
    return checks


def describe_misfit(type_name: str, value: Any) -> str:
    """Why a value does not fit a column of a type; empty: it does."""
    if match := DECIMAL_TYPE.fullmatch(type_name):
        return _decimal_check(int(match[1]), int(match[2]))(value)
    return _timestamp_check(value) if type_name == "timestamp" else ""


def _decimal_check(precision: int, scale: int) -> Callable[[Any], str]:
    def check(value: Decimal) -> str:
        if not value.is_finite():
            return f"is {value}"
        _, digits, exponent = value.as_tuple()
        exponent = int(exponent)
        whole = len(digits) + exponent
        fits = (-exponent <= scale and whole <= precision - scale) if value else exponent <= 0
        return "" if fits else f"does not fit decimal({precision},{scale}): {value}"

    return check


def _timestamp_check(value: datetime) -> str:
    try:
        value.astimezone(UTC) if value.tzinfo else value
    except (OverflowError, ValueError):
        return f"is out of range: {value}"
    return ""
