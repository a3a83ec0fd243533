"""Machines: what a user writes, and what the fold needs of any machine.

A user subclasses `Machine[State, Message, Record]` with msgspec Structs. The fold sees a `Runner`:
`UserMachine` wraps a user's class, `TableMachine` (table.py) is the stock one.

Next room: table.py, then fold.py.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin

import msgspec
from msgspec.structs import astuple

from seriatim.engine.messages import Poison, decode_messages, plain_values
from seriatim.engine.record_kinds import make_other_record_types, table_of_record
from seriatim.engine.session import FoldOutput, Session
from seriatim.errors import ConfigError
from seriatim.storage.current_rows import RowKeySpec

S = TypeVar("S")
M = TypeVar("M")
R = TypeVar("R")


class Machine(Generic[S, M, R]):
    """A state machine over one session's messages. Subclass it: `class Book(Machine[State, Message,
    Record])`.

    A machine that does not override `is_snapshot` has no snapshots: a session begins with its first
    message, and a hurt session waits for a repair.
    """

    state_version: ClassVar[int] = 1

    def start(self, session: str) -> S:
        """The state of a session before its first message."""
        raise NotImplementedError

    def apply(self, state: S, message: M) -> Iterable[R]:
        """The records one message gives. May change `state` in place."""
        raise NotImplementedError

    def is_snapshot(self, message: M) -> bool:  # noqa: ARG002  # a default that no message changes
        """Whether a session may begin, or begin again, with this message."""
        return False

    def end(self, state: S) -> Iterable[R]:  # noqa: ARG002  # most machines have nothing to take back
        """The records that take a session's output back, when it ends: it expired, or its topic was
        made again.
        """
        return ()

    def upgrade(self, old: bytes, version: int) -> S:
        """State as saved by an older `state_version`, as today's."""
        raise NotImplementedError


class Runner(Protocol):
    """What the fold needs of a machine."""

    name: str
    state_version: int
    columns: dict[str, str]
    """The record's own columns: name to type name (string, int64, …)."""
    other_columns: dict[str, dict[str, str]]
    """The same of further tables, by table: a machine may give records of several kinds."""
    row_key_spec: RowKeySpec | None
    """How its records are rows of the table `current`; None: they name no key."""
    shape: str
    """What saved state depends on, beyond its version: another shape would misread it."""
    has_snapshots: bool
    snapshot_type: type | None
    """The class of snapshots, where the class alone tells; else `is_snapshot` is asked."""
    can_upgrade: bool
    may_half_change: bool
    """Whether a failed `apply` may leave the state half changed."""
    contradictions: int
    """Messages taken although the state contradicts them (tiers that only count that)."""

    def decode(self, values: Sequence[bytes | None]) -> list[Any]: ...
    def is_snapshot(self, message: Any) -> bool: ...
    def sequences(self, messages: Sequence[Any]) -> Sequence[int | None]: ...
    def session(self, message: Any) -> str: ...
    def start(self, session: str) -> Any: ...
    def apply(self, state: Any, message: Any) -> Sequence[tuple[Any, ...]]: ...
    def end(self, state: Any) -> Sequence[tuple[Any, ...]]: ...
    def fold_usual(
        self,
        sessions: Mapping[str, Session],
        names: Sequence[str | None],
        sequences: Sequence[int | None],
        messages: Sequence[Any],
        output: FoldOutput,
    ) -> Iterable[int]: ...
    def check_records(self, records: Sequence[tuple[Any, ...]]) -> None: ...
    def dump(self, state: Any) -> bytes: ...
    def load(self, state_bytes: bytes, version: int) -> Any: ...
    def to_plain(self, state: Any) -> Any: ...


class UserMachine:
    """A user's machine, ready to be folded."""

    may_half_change = True
    contradictions = 0
    snapshot_type: type | None = None

    def __init__(
        self,
        name: str,
        machine_class: type[Machine[Any, Any, Any]],
        sequence: str | None = None,
        session: str | None = None,
    ) -> None:
        self.name = name
        self.machine = machine_class()
        self.state_version = machine_class.state_version
        if type(self.state_version) is not int or self.state_version < 1:
            raise ConfigError(
                f"machine {name}: state_version is {self.state_version!r}", next="count from 1"
            )
        self.has_snapshots = machine_class.is_snapshot is not Machine.is_snapshot
        self.can_upgrade = machine_class.upgrade is not Machine.upgrade
        self.has_end = machine_class.end is not Machine.end
        state, message, record = type_arguments(name, machine_class)
        kinds = get_args(record) if get_origin(record) in (typing.Union, UnionType) else (record,)
        self.record_type, self.columns = kinds[0], record_columns(name, kinds[0])
        self.other_record_types = make_other_record_types(name, kinds)
        self.other_columns = {
            made.table: record_columns(name, kind) for kind, made in self.other_record_types.items()
        }
        self.row_key_spec = row_key_spec_of(name, self.record_type, self.columns)
        self._decoder = msgspec.json.Decoder(message)
        self._state_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(state)
        self._sequence_field, self._session_field = sequence, session
        self._get_sequence = attrgetter(sequence or "sequence")
        self._machine_apply = self.machine.apply
        self._fast_record_type = (
            None if any(map(is_list_type, self.columns.values())) else self.record_type
        )
        """The kind whose records can be taken as they are."""
        self.shape = f"session {session or 'by key'}, sequence {sequence or 'none'}"
        self.is_snapshot = self.machine.is_snapshot
        self.start = self.machine.start
        for field in filter(None, (sequence, session)):
            _refuse_missing_field(name, message, field)

    def decode(self, values: Sequence[bytes | None]) -> list[Any]:
        """Typed messages, `Poison` where a value is none or its sequence or session is unusable."""
        messages = decode_messages(self._decoder, values)
        if self._session_field is None and (
            self._sequence_field is None or self._has_valid_sequences(messages)
        ):
            return messages
        return [self._poison_if_unusable(message) for message in messages]

    def _has_valid_sequences(self, messages: Sequence[Any]) -> bool:
        """Whether all sequences are usable, seen as a column, which costs a quarter of looking at
        each message.
        """
        try:
            counters = list(map(self._get_sequence, messages))
        except AttributeError:  # some message is poison
            return False
        return (
            set(map(type, counters)) == {int}
            and _is_int64(min(counters))
            and _is_int64(max(counters))
        )

    def _poison_if_unusable(self, message: Any) -> Any:
        if message.__class__ is Poison:
            return message
        if self._sequence_field and not _is_int64(
            found := getattr(message, self._sequence_field, None)
        ):
            return Poison(
                f"wrong schema: {self._sequence_field} must be a whole number, found {found!r}"
            )
        if self._session_field and not isinstance(
            found := getattr(message, self._session_field, None), str | int
        ):
            return Poison(f"wrong schema: {self._session_field} must be text, found {found!r}")
        return message

    def sequences(self, messages: Sequence[Any]) -> Sequence[int | None]:
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

    def apply(self, state: Any, message: Any) -> Sequence[tuple[Any, ...]]:
        """One message's records as tuples in the order of `columns`, each as it was when the
        machine gave it.
        """
        usual, given = self._fast_record_type, self._machine_apply(state, message)
        return [
            astuple(one) if one.__class__ is usual else self._to_row("apply", one) for one in given
        ]

    def end(self, state: Any) -> Sequence[tuple[Any, ...]]:
        """The records that take a session's output back."""
        return [self._to_row("end", record) for record in self.machine.end(state)]

    def _to_row(self, method: str, record: Any) -> tuple[Any, ...]:
        """A record as a tuple of its own: lists are copied, for the machine may go on changing
        them.
        """
        kind = record.__class__
        if kind is not self.record_type and kind not in self.other_record_types:
            named = " or ".join(
                one.__name__ for one in (self.record_type, *self.other_record_types)
            )
            raise TypeError(f"{method} must yield {named}, it gave {type(record).__name__}")
        return self.other_record_types.get(kind, tuple)(map(_copy_lists, astuple(record)))

    def fold_usual(
        self,
        sessions: Mapping[str, Session],  # noqa: ARG002  # the fold takes every message through `apply`
        names: Sequence[str | None],  # noqa: ARG002
        sequences: Sequence[int | None],  # noqa: ARG002
        messages: Sequence[Any],
        output: FoldOutput,  # noqa: ARG002
    ) -> Iterable[int]:
        """Positions of messages that the fold must look at: all of them."""
        return range(len(messages))

    def check_records(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Refuse records whose values do not fit their columns."""
        for record in records:
            columns = self.other_columns.get(table_of_record(record), self.columns)
            for value, (column, kind) in zip(record, columns.items(), strict=True):
                if not fits_column_type(value, kind):
                    raise TypeError(
                        f"record field {column} takes {kind}, it got {type(value).__name__} {str(value)[:60]!r}"
                    )

    def dump(self, state: Any) -> bytes:
        """State as bytes, read back at once: what cannot be read again must not be saved."""
        saved = msgspec.msgpack.encode(state)
        self._state_decoder.decode(saved)
        return saved

    def load(self, state_bytes: bytes, version: int) -> Any:
        """State from bytes, upgraded if an older version wrote them."""
        return (
            self._state_decoder.decode(state_bytes)
            if version == self.state_version
            else self.machine.upgrade(state_bytes, version)
        )

    def to_plain(self, state: Any) -> Any:
        """State as plain values for people and JSON."""
        return plain_values(state, msgspec.msgpack.decode)


def type_arguments(name: str, machine_class: type) -> tuple[Any, Any, Any]:
    """State, message and record types of a user's class."""
    for base in getattr(machine_class, "__orig_bases__", ()):
        if get_origin(base) is Machine and len(get_args(base)) == 3:
            return typing.cast("tuple[Any, Any, Any]", get_args(base))
    raise ConfigError(
        f"machine {name}: the class does not say its types",
        next=f"write it as class {machine_class.__name__}(Machine[State, Message, Record])",
    )


SCALAR_TYPES: dict[Any, str] = {
    str: "string",
    int: "int64",
    float: "float64",
    bool: "bool",
    bytes: "binary",
    datetime: "timestamp",
    date: "date",
}


FLOAT64_WHOLE_MAX = 2**53
"""Beyond it a float64 cannot hold every whole number."""


def record_columns(name: str, record: Any) -> dict[str, str]:
    """Columns of a record Struct: names to type names."""
    if not (isinstance(record, type) and issubclass(record, msgspec.Struct)):
        raise ConfigError(
            f"machine {name}: records must be a msgspec Struct, not {record}",
            next="use class X(Struct)",
        )
    fields = msgspec.structs.fields(record)
    columns = {field.encode_name: _column_type(name, field.name, field.type) for field in fields}
    folded = [column.casefold() for column in columns]
    if twice := [column for column in columns if folded.count(column.casefold()) > 1]:
        raise ConfigError(
            f"machine {name}: fields {' and '.join(map(repr, twice))} of {record.__name__} would be one column",
            next="rename one: columns differ by more than case",
        )
    return columns


def row_key_spec_of(name: str, record: Any, columns: Mapping[str, str]) -> RowKeySpec | None:
    """How records are rows: by what the Struct says in `row_key` and `row_gone`. None: it names no
    key.
    """
    key, gone = tuple(getattr(record, "row_key", ())), dict(getattr(record, "row_gone", {}))
    columns_of = {field.name: field.encode_name for field in msgspec.structs.fields(record)}
    kinds = {field: columns[column] for field, column in columns_of.items()}
    if trouble := _row_key_error(key, gone, kinds):
        raise ConfigError(
            f"machine {name}: {record.__name__}.{trouble}",
            next=f"its fields are {', '.join(kinds)}",
        )
    if not key:
        return None
    return RowKeySpec(
        key=tuple(columns_of[one] for one in key),
        columns=tuple(columns),
        deleted_when={columns_of[one]: value for one, value in gone.items()},
    )


def _row_key_error(
    key: tuple[str, ...], deleted_when: Mapping[str, Any], kinds: Mapping[str, str]
) -> str:
    """What is wrong with the fields that a Struct names."""
    if deleted_when and not key:
        return "row_gone has no row_key beside it"
    for said, names in (("row_key", key), ("row_gone", deleted_when)):
        if strange := [one for one in names if one not in kinds]:
            return f"{said} names {strange[0]!r}, which is no field of it"
    if lists := [one for one in key if is_list_type(kinds[one])]:
        return f"row_key names {lists[0]!r}, a list: it must hold one value"
    unfit = [one for one, value in deleted_when.items() if not fits_column_type(value, kinds[one])]
    return (
        f"row_gone: {unfit[0]} is {kinds[unfit[0]]}, never {deleted_when[unfit[0]]!r}"
        if unfit
        else ""
    )


def fits_column_type(value: Any, type_name: str) -> bool:
    """Whether a value may stand in a column of this type. Never laxer than what writes the column."""
    if value is None:
        return True
    if is_list_type(type_name):
        return isinstance(value, list) and all(
            fits_column_type(part, type_name[5:-1]) for part in value
        )
    if type_name == "int64":
        return _is_int64(value)
    if type_name == "float64":
        return isinstance(value, float) or (_is_int64(value) and abs(value) <= FLOAT64_WHOLE_MAX)
    wanted = next(python for python, name in SCALAR_TYPES.items() if name == type_name)
    right = isinstance(value, wanted) and not (type_name == "date" and isinstance(value, datetime))
    return right and _is_writable(value, type_name)


def is_list_type(type_name: str) -> bool:
    """Whether a column of this type holds lists."""
    return type_name.startswith("list<")


def _copy_lists(value: Any) -> Any:
    """A value that nobody else can change."""
    return [_copy_lists(part) for part in value] if isinstance(value, list) else value


def _is_writable(value: Any, type_name: str) -> bool:
    try:
        _ = (
            value.encode()
            if type_name == "string"
            else type_name != "timestamp" or value.utctimetuple()
        )
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


def _column_type(name: str, field: str, kind: Any) -> str:
    if get_origin(kind) is typing.Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (typing.Union, UnionType):
        rest = [part for part in get_args(kind) if part is not NoneType]
        if len(rest) == 1:
            return _column_type(name, field, rest[0])
    if get_origin(kind) is list:
        return f"list<{_column_type(name, field, get_args(kind)[0])}>"
    if get_origin(kind) is typing.Literal and all(
        isinstance(choice, str) for choice in get_args(kind)
    ):
        return "string"
    if kind not in SCALAR_TYPES:
        allowed = ", ".join(scalar.__name__ for scalar in SCALAR_TYPES)
        raise ConfigError(
            f"machine {name}: record field {field!r} has type {kind}",
            allowed=f"{allowed}, list of these, or None with one of them",
            next="change the field's type",
        )
    return SCALAR_TYPES[kind]


def _refuse_missing_field(name: str, message: Any, field: str) -> None:
    kinds = get_args(message) if get_origin(message) in (typing.Union, UnionType) else (message,)
    for kind in kinds:
        if field not in getattr(kind, "__struct_fields__", ()):
            raise ConfigError(
                f"machine {name}: the stream needs field {field!r} of each message, {kind.__name__} has none",
                next=f"add it to {kind.__name__}, or change `sequence` or `session` in the stream file",
            )


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
