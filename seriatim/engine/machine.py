"""Machines: what a user writes, and what the fold needs of any machine.

A user subclasses `Machine[State, Message, Record]` with msgspec Structs. The fold works with a
`Runner`: `UserMachine` wraps a user's class, `TableMachine` (engine/table.py) comes with Seriatim.

Next: engine/table.py, then engine/fold.py.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import astuple

from seriatim.engine.decoding import Decoder, JsonDecoder, plain_values
from seriatim.engine.messages import KeysOrValues, Poison, SequenceNumbers, describe_message_fields
from seriatim.engine.records import (
    SCALAR_TYPES,
    RowKeySpec,
    fits_column_type,
    is_int64,
    is_list_type,
    make_other_record_types,
    table_of_record,
)
from seriatim.engine.row_parts import RowChanges, StoredRows
from seriatim.engine.session import FoldOutput, Row, SessionsByName
from seriatim.errors import ConfigError, raise_broken_promise

S = TypeVar("S")
M = TypeVar("M")
R = TypeVar("R")


class Machine(Generic[S, M, R]):
    """A state machine over the messages of one session.

    Subclass it: `class Book(Machine[State, Message, Record])`. A machine that does not override
    `is_snapshot` has no snapshots: a session begins with its first message, and a damaged session
    waits for a repair.
    """

    state_version: ClassVar[int] = 1

    def start(self, session: str) -> S:
        """The state of a session before its first message."""
        raise NotImplementedError

    def apply(self, state: S, message: M) -> Iterable[R]:
        """The records of one message. It may change `state` in place."""
        raise NotImplementedError

    def is_snapshot(self, message: M) -> bool:  # noqa: ARG002  # by default no message is one
        """Whether a session may begin, or begin again, with this message."""
        return False

    def end(self, state: S) -> Iterable[R]:  # noqa: ARG002  # most machines have nothing to take back
        """The records that take a session's output back when it ends, because it expired or its
        topic was created anew.
        """
        return ()

    def upgrade(self, old: bytes, version: int) -> S:
        """The state in today's form, from the bytes that an older `state_version` saved."""
        raise NotImplementedError


class Runner(Protocol):
    """What the fold needs of a machine."""

    name: str
    state_version: int
    columns: dict[str, str]
    """The record's own columns: name to type name (string, int64, …)."""
    other_columns: dict[str, dict[str, str]]
    """The columns of further tables, by table: a machine may give records of several kinds."""
    row_key_spec: RowKeySpec | None
    """How its records become rows of the table `current`. None: they have no key."""
    shape: str
    """What saved state depends on beyond its version. A machine of another shape would misread it."""
    has_session_per_partition: bool
    """Whether all messages of a partition are one session, whatever their keys are."""
    has_snapshots: bool
    snapshot_type: type | None
    """The class of snapshot messages, if the class alone decides. None: `is_snapshot` decides."""
    can_upgrade: bool
    may_half_change: bool
    """Whether a failed `apply` may leave the state half changed."""
    decoder: Decoder
    """The format of the messages."""
    contradictions: int
    """How many messages were applied although the state contradicts them. Some tiers only count
    them.
    """

    def older_columns(self, shape: str) -> dict[str, str] | None:
        """The record columns of a machine of this shape, if this one is the same with more columns;
        None if it is not.
        """
        ...

    def decode(self, values: KeysOrValues) -> list[Any]: ...
    def is_snapshot(self, message: Any) -> bool: ...
    def sequences(self, messages: Sequence[Any]) -> SequenceNumbers: ...
    def session(self, message: Any) -> str: ...
    def start(self, session: str) -> Any: ...
    def apply(self, state: Any, message: Any) -> Sequence[Row]: ...
    def begin_anew(self, state: Any) -> None:
        """The session was in quarantine or in doubt, and its next message ends that. The state may
        be wrong, so nothing about it can contradict that message.
        """
        ...

    def end(self, state: Any) -> Sequence[Row]: ...
    def fold_usual(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        sequences: SequenceNumbers,
        messages: Sequence[Any],
        output: FoldOutput,
    ) -> Iterable[int]: ...
    def check_records(self, records: Sequence[Row]) -> None: ...
    def dump(self, state: Any) -> bytes: ...
    def load(self, state_bytes: bytes, version: int) -> Any: ...
    def row_changes(self, state: Any) -> RowChanges | None:
        """What is to be stored of a state that is stored row by row; None: it is stored as one value."""

    def load_stored_rows(self, stored_rows: StoredRows) -> Any:
        """The state of a session that is stored row by row. Its rows are read when they are needed."""

    def read_stored_rows(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        messages: Sequence[Any],
    ) -> None:
        """Read the stored rows that messages name."""

    def to_plain(self, state: Any) -> Any: ...


class UserMachine:
    """Makes a user's machine a `Runner`."""

    may_half_change = True
    contradictions = 0
    snapshot_type: type | None = None

    def __init__(
        self,
        name: str,
        machine_class: type[Machine[Any, Any, Any]],
        sequence: str | None = None,
        session: str | None = None,
        decoder: Decoder | None = None,
        *,
        has_session_per_partition: bool = False,
    ) -> None:
        self.name = name
        self.has_session_per_partition = has_session_per_partition
        self.decoder = JsonDecoder() if decoder is None else decoder
        self.machine = machine_class()
        self.state_version = machine_class.state_version
        if type(self.state_version) is not int or self.state_version < 1:
            raise ConfigError(
                f"machine {name}: state_version is {self.state_version!r}", next="count from 1"
            )
        self.has_snapshots = machine_class.is_snapshot is not Machine.is_snapshot
        self.can_upgrade = machine_class.upgrade is not Machine.upgrade
        self.has_end = machine_class.end is not Machine.end
        self.shape = describe_message_fields(
            session, sequence, has_session_per_partition=has_session_per_partition
        )

        state_type, message_type, record_type = type_arguments(name, machine_class)
        self._set_record_types(name, _members_of_union(record_type))
        self._decode_values = self.decoder.for_type(message_type)
        self._state_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(state_type)

        self._sequence_field = sequence
        self._session_field = session
        for field in (sequence, session):
            if field:
                _refuse_missing_field(name, message_type, field)
        # Bound once: the loop over messages calls these for every message.
        self.is_snapshot = self.machine.is_snapshot
        self.start = self.machine.start
        self._get_sequence = attrgetter(sequence or "sequence")
        self._machine_apply = self.machine.apply

    def _set_record_types(self, name: str, record_types: Sequence[Any]) -> None:
        """Set what depends on the kinds of records. The first kind goes to the table `records`."""
        self.record_type = record_types[0]
        self.columns = record_columns(name, self.record_type)
        self.other_record_types = make_other_record_types(name, record_types)
        self.other_columns: dict[str, dict[str, str]] = {}
        for record_type, tuple_type in self.other_record_types.items():
            self.other_columns[tuple_type.table] = record_columns(name, record_type)
        self.row_key_spec = row_key_spec_of(name, self.record_type, self.columns)
        has_lists = any(is_list_type(type_name) for type_name in self.columns.values())
        self._fast_record_type = None if has_lists else self.record_type
        """The kind whose records become tuples without a copy of their lists, as they have none."""

    def older_columns(self, shape: str) -> dict[str, str] | None:  # noqa: ARG002
        """None: the columns of a user's machine never change."""
        return None

    def decode(self, values: KeysOrValues) -> list[Any]:
        """Typed messages, with a `Poison` where a value cannot be decoded or its sequence or session
        cannot be used.
        """
        messages = self._decode_values(values)
        has_checks = self._session_field is not None or self._sequence_field is not None
        if not has_checks:
            return messages
        if self._session_field is None and self._has_valid_sequences(messages):
            return messages
        return [self._poison_if_unusable(message) for message in messages]

    def _has_valid_sequences(self, messages: Sequence[Any]) -> bool:
        """Whether all sequences can be used. Checking them as one list costs a quarter of checking
        each message.
        """
        try:
            sequences = list(map(self._get_sequence, messages))
        except AttributeError:  # some message is poison
            return False
        if set(map(type, sequences)) != {int}:
            return False
        return is_int64(min(sequences)) and is_int64(max(sequences))

    def _poison_if_unusable(self, message: Any) -> Any:
        """The message, or a `Poison` if its sequence or session cannot be used."""
        if message.__class__ is Poison:
            return message
        if self._sequence_field:
            sequence = getattr(message, self._sequence_field, None)
            if not is_int64(sequence):
                return Poison(
                    f"wrong schema: {self._sequence_field} must be a whole number,"
                    f" found {sequence!r}"
                )
        if self._session_field:
            session = getattr(message, self._session_field, None)
            if not isinstance(session, str | int):
                return Poison(
                    f"wrong schema: {self._session_field} must be text, found {session!r}"
                )
        return message

    def sequences(self, messages: Sequence[Any]) -> SequenceNumbers:
        """The producer's own counter of each message, if the stream names one."""
        if self._sequence_field is None:
            return [None] * len(messages)
        try:
            return list(map(self._get_sequence, messages))
        except AttributeError:  # some message is poison
            return [getattr(message, self._sequence_field, None) for message in messages]

    def session(self, message: Any) -> str:
        """The session as a field of the message."""
        return str(getattr(message, self._session_field or ""))

    def apply(self, state: Any, message: Any) -> Sequence[Row]:
        """The records of one message as tuples in the order of `columns`. Each has the values that
        the record had when the machine gave it.
        """
        fast_type = self._fast_record_type
        # One loop, because the machine may be a generator that goes on changing its records.
        return [
            astuple(record) if record.__class__ is fast_type else self._to_row("apply", record)
            for record in self._machine_apply(state, message)
        ]

    def begin_anew(self, state: Any) -> None:
        """Nothing: only the user's machine knows what a snapshot does to its state."""

    def end(self, state: Any) -> Sequence[Row]:
        """The records that take a session's output back."""
        return [self._to_row("end", record) for record in self.machine.end(state)]

    def _to_row(self, method: str, record: Any) -> Row:
        """A record as a tuple. Lists are copied, because the machine may go on changing them."""
        record_type = record.__class__
        tuple_type: type[Row] | None = self.other_record_types.get(record_type)
        if tuple_type is None:
            if record_type is not self.record_type:
                types = (self.record_type, *self.other_record_types)
                allowed = " or ".join(allowed_type.__name__ for allowed_type in types)
                raise TypeError(f"{method} must yield {allowed}, it gave {type(record).__name__}")
            tuple_type = tuple
        return tuple_type(map(_copy_lists, astuple(record)))

    def fold_usual(
        self,
        sessions: SessionsByName,  # noqa: ARG002  # every message goes through `apply`
        names: Sequence[str | None],  # noqa: ARG002
        sequences: SequenceNumbers,  # noqa: ARG002
        messages: Sequence[Any],
        output: FoldOutput,  # noqa: ARG002
    ) -> Iterable[int]:
        """The positions of messages that the fold must take through `apply`: all of them."""
        return range(len(messages))

    def check_records(self, records: Sequence[Row]) -> None:
        """Refuse records whose values do not fit their columns."""
        for record in records:
            columns = self.other_columns.get(table_of_record(record), self.columns)
            for value, (column, type_name) in zip(record, columns.items(), strict=True):
                if not fits_column_type(value, type_name):
                    raise TypeError(
                        f"record field {column} takes {type_name},"
                        f" it got {type(value).__name__} {str(value)[:60]!r}"
                    )

    def dump(self, state: Any) -> bytes:
        """State as bytes. They are decoded at once: bytes that cannot be decoded must not be saved."""
        state_bytes = msgspec.msgpack.encode(state)
        # msgspec checks types when it decodes, not when it encodes.
        self._state_decoder.decode(state_bytes)
        return state_bytes

    def load(self, state_bytes: bytes, version: int) -> Any:
        """State from bytes, upgraded if an older version wrote them."""
        if version == self.state_version:
            return self._state_decoder.decode(state_bytes)
        return self.machine.upgrade(state_bytes, version)

    def row_changes(self, state: Any) -> None:
        """None: a user's state is one value, whatever is in it."""

    def load_stored_rows(self, stored_rows: StoredRows) -> Any:  # noqa: ARG002  # there are none
        """Refused: only sessions of the table machine are stored row by row."""
        raise_broken_promise("a user's state is stored as one value", machine=self.name)

    def read_stored_rows(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        messages: Sequence[Any],
    ) -> None:
        """Nothing: no session is stored row by row."""

    def to_plain(self, state: Any) -> Any:
        """State as plain values for people and JSON."""
        return plain_values(state, msgspec.msgpack.decode)


def type_arguments(name: str, machine_class: type) -> tuple[Any, Any, Any]:
    """The state, message and record types of a user's class. A class that does not name them is
    refused.
    """
    for base in getattr(machine_class, "__orig_bases__", ()):
        if get_origin(base) is Machine and len(get_args(base)) == 3:
            return typing.cast("tuple[Any, Any, Any]", get_args(base))
    raise ConfigError(
        f"machine {name}: the class does not say its types",
        next=f"write it as class {machine_class.__name__}(Machine[State, Message, Record])",
    )


def record_columns(name: str, record: Any) -> dict[str, str]:
    """The columns of a record Struct: names and type names. A Struct that cannot become a table is
    refused.
    """
    if not (isinstance(record, type) and issubclass(record, msgspec.Struct)):
        raise ConfigError(
            f"machine {name}: records must be a msgspec Struct, not {record}",
            next="use class X(Struct)",
        )
    fields = msgspec.structs.fields(record)
    columns = {field.encode_name: _column_type(name, field.name, field.type) for field in fields}
    # Table formats take columns that differ only by case as one.
    names_without_case = [column.casefold() for column in columns]
    same_columns = [column for column in columns if names_without_case.count(column.casefold()) > 1]
    if same_columns:
        fields_text = " and ".join(map(repr, same_columns))
        raise ConfigError(
            f"machine {name}: fields {fields_text} of {record.__name__} would be one column",
            next="rename one: columns differ by more than case",
        )
    return columns


def row_key_spec_of(name: str, record: Any, columns: Mapping[str, str]) -> RowKeySpec | None:
    """How records become rows, by the class variables `row_key` and `row_gone` of the Struct. None
    if it names no key; wrong names or values are refused.
    """
    key_fields = tuple(getattr(record, "row_key", ()))
    gone_values = dict(getattr(record, "row_gone", {}))
    column_of_field = {field.name: field.encode_name for field in msgspec.structs.fields(record)}
    type_names = {field: columns[column] for field, column in column_of_field.items()}
    error = _row_key_error(key_fields, gone_values, type_names)
    if error:
        raise ConfigError(
            f"machine {name}: {record.__name__}.{error}",
            next=f"its fields are {', '.join(type_names)}",
        )
    if not key_fields:
        return None
    key = [column_of_field[field] for field in key_fields]
    deleted_when: dict[str, Any] = {}
    for field, value in gone_values.items():
        deleted_when[column_of_field[field]] = value
    return RowKeySpec(key=tuple(key), columns=tuple(columns), deleted_when=deleted_when)


def _row_key_error(
    key: tuple[str, ...], deleted_when: Mapping[str, Any], type_names: Mapping[str, str]
) -> str:
    """What is wrong with the fields that a Struct names; empty if nothing is."""
    if deleted_when and not key:
        return "row_gone has no row_key beside it"
    for variable, fields in (("row_key", key), ("row_gone", deleted_when)):
        for field in fields:
            if field not in type_names:
                return f"{variable} names {field!r}, which is no field of it"
    for field in key:
        if is_list_type(type_names[field]):
            return f"row_key names {field!r}, a list: it must hold one value"
    for field, value in deleted_when.items():
        if not fits_column_type(value, type_names[field]):
            return f"row_gone: {field} is {type_names[field]}, never {value!r}"
    return ""


def _copy_lists(value: Any) -> Any:
    """The value with all its lists copied, so that nobody else can change it."""
    if not isinstance(value, list):
        return value
    return [_copy_lists(item) for item in value]


def _column_type(name: str, field: str, field_type: Any) -> str:
    """The type name of a record's field. A type that no column can have is refused."""
    origin = get_origin(field_type)
    if origin is typing.Annotated:
        return _column_type(name, field, get_args(field_type)[0])
    if origin in (typing.Union, UnionType):
        other_types = [member for member in get_args(field_type) if member is not NoneType]
        if len(other_types) == 1:
            return _column_type(name, field, other_types[0])
    if origin is list:
        item_type = _column_type(name, field, get_args(field_type)[0])
        return f"list<{item_type}>"
    is_literal = origin is typing.Literal
    if is_literal and all(isinstance(choice, str) for choice in get_args(field_type)):
        return "string"
    if field_type not in SCALAR_TYPES:
        allowed = ", ".join(scalar.__name__ for scalar in SCALAR_TYPES)
        raise ConfigError(
            f"machine {name}: record field {field!r} has type {field_type}",
            allowed=f"{allowed}, list of these, or None with one of them",
            next="change the field's type",
        )
    return SCALAR_TYPES[field_type]


def _members_of_union(type_or_union: Any) -> Sequence[Any]:
    """The members of a union type; a type that is no union by itself."""
    if get_origin(type_or_union) in (typing.Union, UnionType):
        return get_args(type_or_union)
    return (type_or_union,)


def _refuse_missing_field(name: str, message_type: Any, field: str) -> None:
    """Refuse a message type that lacks the field which the stream names."""
    for struct in _members_of_union(message_type):
        if field not in getattr(struct, "__struct_fields__", ()):
            raise ConfigError(
                f"machine {name}: the stream needs field {field!r} of each message,"
                f" {struct.__name__} has none",
                next=(
                    f"add it to {struct.__name__},"
                    " or change `sequence` or `session` in the stream file"
                ),
            )
