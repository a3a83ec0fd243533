"""The table machine for captured changes: each message is the change of one row of a source table,
with images of the row before and after it.

A decoder of the connector's format gives the messages (formats/debezium.py). The operations are those
of Debezium: c(reate), u(pdate), d(elete), r(ead by a snapshot of the connector), t(runcate) and
m(essage), which concerns no row.

What a message proves about the rows depends on the connector and on its topic, so the stream file says
it. By default nothing is taken as proof: c, u and r put their row into the table, d takes it out.

- `has_full_before_images`: `before` is the whole row. It is compared with the row that is here.
- `has_whole_history`: the topic has every change since the connector's snapshot. So a change of a row
  that is not here, and a create of one that is, contradict the rows.

A connector that was restarted sends changes again. A change of a row that is not after the row's last
one in the source's log is such a repeat: it has no effect, or it is refused (`refuses_repeats`).
Positions are compared per row only: across rows they may go back, because a connector sends
transactions in the order of their commits.

Next: engine/table.py, which this machine extends; engine/fold.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, defstruct
from msgspec.structs import astuple

from seriatim.engine.messages import KeysOrValues, Poison, SequenceNumbers
from seriatim.engine.session import FoldOutput, Row, SessionsByName
from seriatim.engine.table import (
    Columns,
    HeadlessError,
    MessageFields,
    PreconditionError,
    RepeatError,
    TableMachine,
    TableState,
    fill_added_columns,
    row_fields,
    saved_rows_type,
)

TRUNCATE_NEEDS_PARTITION = (
    "a TRUNCATE empties the whole table, but each session is one row: take session = "
    '"partition" and a topic of one partition, or leave skipped.operations of the connector at t'
)


DELETED_POSITIONS_MAX = 1000
"""Of how many deleted rows a session remembers the position. Beyond it a change of such a row that is
sent again brings the row back, until its delete is sent again.
"""

NO_SOURCE = (b"null", msgspec.msgpack.encode(None))
"""The `source` of a message that has none, and of one in which it is null."""

Position = tuple[int, int]
"""Where a change is in the source's log, and the time of its commit in microseconds."""


class ChangedRows(TableState):
    """The rows of a session by key, their positions in the source's log, and the row that was deleted
    last.

    A connector sends the change of a key as a delete of the old row and a create of the new one. The
    create may lack values that did not change: they are those of the deleted row.
    """

    __slots__ = (
        "deleted_positions",
        "deleted_row",
        "deleted_source",
        "is_proven",
        "known_columns",
        "positions",
    )

    def __init__(
        self,
        rows: Mapping[Any, Row] | None = None,
        deleted_row: Row | None = None,
        deleted_source: bytes = b"",
    ) -> None:
        super().__init__(rows or {})
        self.deleted_row = deleted_row
        self.deleted_source = deleted_source
        """The `source` of the message that deleted it. The create of the same change has the same."""
        self.positions: dict[Any, Position] = {}
        """The last change of each row, if the connector says where it is."""
        self.deleted_positions: dict[Any, Position] = {}
        """The deletes of rows that are gone, the newest last."""
        self.known_columns: dict[Any, int] = {}
        """How many columns are known of a row that was saved before others were added behind them. The
        others are null here, but not in the source for certain, until a message has the row.
        """
        self.is_proven = True
        """Whether the rows can contradict the next message. Those of a session that was set aside
        cannot.
        """

    def copy(self) -> ChangedRows:
        """A copy that later messages do not change."""
        copied = ChangedRows(self, self.deleted_row, self.deleted_source)
        copied.positions = dict(self.positions)
        copied.deleted_positions = dict(self.deleted_positions)
        copied.known_columns = dict(self.known_columns)
        copied.is_proven = self.is_proven
        return copied

    def last_position(self, key: Any) -> Position | None:
        """Where the last change of a row is, also of one that is gone; None if it is not known."""
        return self.positions.get(key) or self.deleted_positions.get(key)

    def put(self, key: Any, row: Row, change: Any) -> None:
        """Set a row. A read by a snapshot has no place of its own in the log."""
        self[key] = row
        self.known_columns.pop(key, None)
        if change.op == "r":
            return
        self.deleted_positions.pop(key, None)
        if change.position is None:
            self.positions.pop(key, None)
        else:
            self.positions[key] = change.position

    def remove(self, key: Any, position: Position | None) -> None:
        """Remove a row, if it is there, by a change at this position."""
        self.pop(key, None)
        self.known_columns.pop(key, None)
        self.positions.pop(key, None)
        self.deleted_positions.pop(key, None)
        if position is None:
            return
        self.deleted_positions[key] = position
        if len(self.deleted_positions) > DELETED_POSITIONS_MAX:
            oldest = next(iter(self.deleted_positions))
            del self.deleted_positions[oldest]


class RowChange(Struct, kw_only=True, gc=False):
    """A message. Each table has a subclass of it, with its own types of images."""

    op: Literal["c", "u", "d", "r", "t", "m"]
    before: Any = None
    after: Any = None
    unavailable: list[str] = []
    """Columns of `after` whose values the connector did not get, because they did not change."""
    source: Raw = Raw(b"null")
    """Where in the source's log the change is, as the decoder gives it."""
    position: Position | None = None
    """The same, if two changes of one row can be compared by it."""


class ChangeTable(TableMachine):
    """Rows by key, changed by the messages of a connector."""

    # Version 1 had no positions.
    state_version = 2
    can_upgrade = True

    def __init__(
        self,
        *,
        has_full_before_images: bool = False,
        has_whole_history: bool = False,
        refuses_repeats: bool = False,
        **settings: Any,
    ) -> None:
        self.has_full_before_images = has_full_before_images
        self.has_whole_history = has_whole_history
        self.refuses_repeats = refuses_repeats
        """Whether a change that comes again is a finding. Otherwise it is dropped and counted."""
        super().__init__(**settings)
        # A session by key has one row, so a message with the whole row begins it anew. In a session
        # of many rows no single message does.
        self.has_snapshots = not self.has_session_per_partition

    def _describe_shape(self, columns: Columns) -> str:
        shape = super()._describe_shape(columns)
        return f"{shape}; changes" if self.has_session_per_partition else shape

    def _set_message_types(
        self,
        key: Sequence[str],
        columns: Columns,
        fields: MessageFields,  # noqa: ARG002  # of messages that are not changes
    ) -> None:
        rename = {f"c{i}": name for i, name in enumerate(columns)}
        # Without full images only the key of a row before can be used.
        if self.has_full_before_images:
            before_fields = row_fields(key, columns, "unset")
        else:
            before_fields = row_fields(key, columns, "ignored")
        before_struct = defstruct("Before", before_fields, rename=rename, gc=False, kw_only=True)
        after_fields = row_fields(key, columns, "unset")
        after_struct = defstruct("After", after_fields, rename=rename, gc=False, kw_only=True)
        change_struct = defstruct(
            "Change",
            [("before", before_struct | None, None), ("after", after_struct | None, None)],
            bases=(RowChange,),
            kw_only=True,
        )
        self.snapshot_type = None
        self._decode_values = self.decoder.for_type(change_struct)
        rows_type = saved_rows_type(columns)
        keys_type = saved_rows_type({name: columns[name] for name in key})
        saved_fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
            ("rows", rows_type),
            ("deleted_rows", rows_type, []),
            ("deleted_source", bytes, b""),
            ("positions", list[Position | None], []),
            ("deleted_keys", keys_type, []),
            ("deleted_positions", list[Position], []),
        ]
        # Most of it is empty for a session that is one row.
        self._saved_changes: Any = defstruct("SavedChanges", saved_fields, omit_defaults=True)
        self._rows_decoder: Any = msgspec.msgpack.Decoder(rows_type | self._saved_changes)

    def decode(self, values: KeysOrValues) -> list[Any]:
        """Changes, with a `Poison` where a value does not fit the table."""
        changes = self._decode_values(values)
        return [self._poison_if_unfit(change) for change in changes]

    def _poison_if_unfit(self, message: Any) -> Any:
        if message.__class__ is Poison:
            return message
        if message.op == "m":
            return Poison("a message of logical decoding", has_no_effect=True)
        if message.unavailable:
            # The source may have more columns than the table.
            names = [name for name in message.unavailable if name in self.field_names]
            message.unavailable = names
        fault = self._missing_part(message) or self._misfit(message)
        return Poison(fault) if fault else message

    def _missing_part(self, change: Any) -> str:
        """Which part of a change is missing, so that it cannot be applied; empty if none is."""
        op = change.op
        if op == "t":
            return "" if self.has_session_per_partition else TRUNCATE_NEEDS_PARTITION
        if op == "d" and change.before is None:
            return "wrong schema: a delete without before, so its key is not known"
        if op != "d" and change.after is None:
            return f"wrong schema: op {op} without after"
        if op == "u" and self.has_full_before_images and change.before is None:
            return (
                "an update without before: the connector does not send full before-images,"
                " although the stream file says so"
            )
        return ""

    def _misfit(self, change: Any) -> str:
        """Which value of an image that is used does not fit its column; empty if all fit."""
        misfit = ""
        if change.op in "cru":
            misfit = self._row_misfit(change.after, only_key=False)
        if change.op in "ud" and change.before is not None:
            only_key = not self.has_full_before_images
            misfit = misfit or self._row_misfit(change.before, only_key=only_key)
        return f"wrong schema: {misfit}" if misfit else ""

    def keys_named_by(self, message: Any) -> list[Row]:
        """The keys of the rows that a change names, as tuples. One that changes the key of a row names
        two.
        """
        if message.op == "t":
            return []
        images = [message.before if message.op == "d" else message.after]
        if self._may_change_key(message):
            images.append(message.before)
        keys = [self._key_values(astuple(image)) for image in images]
        return list(dict.fromkeys(keys))

    def _may_change_key(self, change: Any) -> bool:
        """Whether the key of the row before is known for certain. Without full images the columns of
        `before` may have the defaults of their types.
        """
        return bool(change.op == "u" and self.has_full_before_images)

    def is_snapshot(self, message: Any) -> bool:
        """Whether a session by key may begin, or begin again, here: the message tells the whole row,
        or that there is none.
        """
        if self.has_session_per_partition:
            return False
        # A create that lacks a value must be a finding, and not headless: the table would silently
        # lack a row that the source has. `apply` refuses it.
        return not message.unavailable or message.op == "c"

    def start(self, session: str) -> ChangedRows:  # noqa: ARG002  # every table begins empty
        """The state of a new session: no rows."""
        return ChangedRows()

    def begin_anew(self, rows: TableState) -> None:
        """Take the next message as it is: the session was set aside, so its rows prove nothing."""
        rows.is_proven = False  # type: ignore[attr-defined]  # `start` and `load` give `ChangedRows`

    def apply(self, rows: Any, message: Any) -> Sequence[Row]:
        """Change the rows and return one record per changed row."""
        if message.op == "t":
            records = self._truncate(rows, message)
        elif message.op == "d":
            records = self._delete_changed(rows, message)
        else:
            records = self._write_row(rows, message)
        rows.is_proven = True
        return records

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

    def _refuse_repeat(self, rows: ChangedRows, change: Any, *keys: Any) -> None:
        """Refuse a change that is not after the last change of one of these rows. It comes again, or
        it comes too late.

        Both the position and the time of the commit must say so. If only the position goes back, the
        source began a new log, as a restored one does.
        """
        position = change.position
        if position is None or change.op == "r" or not rows.is_proven:
            return
        for key in keys:
            # The change of a Kafka key is a delete and a create at one position. Both may have the
            # same key of the table.
            if change.op == "c" and rows.deleted_positions.get(key) == position:
                continue
            previous = rows.last_position(key)
            if previous is not None and _is_not_after(position, previous):
                self._drop_or_refuse_repeat(position, previous)

    def _drop_or_refuse_repeat(self, position: Position, previous: Position) -> None:
        """Raise what takes a repeat out."""
        cause = f"position {position[0]} in the source's log, after {previous[0]} of the same row"
        if self.refuses_repeats:
            raise PreconditionError(cause)
        raise RepeatError(cause)

    def _truncate(self, rows: ChangedRows, change: Any) -> Sequence[Row]:
        """Remove all rows. One that changed after the truncate stays: the truncate comes again."""
        position = change.position
        removed_keys = []
        for key in rows:
            previous = rows.last_position(key)
            is_older = position is None or previous is None or not _is_not_after(position, previous)
            if is_older or not rows.is_proven:
                removed_keys.append(key)
            elif self.refuses_repeats:
                self._drop_or_refuse_repeat(position, previous)  # type: ignore[arg-type]  # not older
        records = [self._delete_record(rows[key]) for key in removed_keys]
        for key in removed_keys:
            rows.remove(key, position)
        return records

    def _write_row(self, rows: ChangedRows, change: Any) -> Sequence[Row]:
        """Put the row of a create, an update or a read into the table. Returns its record, and before
        it one that deletes the row under its old key, if the change gives it another.
        """
        values = astuple(change.after)
        key = self._row_key(values)
        named_row = values
        if self._may_change_key(change):
            named_row = astuple(change.before)
        old_key = self._row_key(named_row)
        self._refuse_repeat(rows, change, key, old_key)
        old = rows.get(old_key)
        known_columns = rows.known_columns.get(old_key, self._width)
        new = self._whole_row(rows, change, values, old, known_columns)
        overwritten = rows.get(key)
        if rows.is_proven:
            self._refuse_contradiction(change, named_row, old, known_columns)
            if old_key != key and overwritten is not None:
                self._refuse_or_count("change of a key to one that is there already", values)
        records = []
        if old_key != key:
            rows.remove(old_key, change.position)
        if old_key != key and old is not None:
            records.append(self._delete_record(old))
        rows.put(key, new, change)
        op = "insert" if overwritten is None else "update"
        if change.op == "r":
            op = "snapshot"
        records.append(self._record(op, new, overwritten))
        return records

    def _delete_changed(self, rows: ChangedRows, change: Any) -> Sequence[Row]:
        values = astuple(change.before)
        key = self._row_key(values)
        self._refuse_repeat(rows, change, key)
        old = rows.get(key)
        known_columns = rows.known_columns.get(key, self._width)
        if rows.is_proven:
            self._refuse_contradiction(change, values, old, known_columns)
        rows.remove(key, change.position)
        if old is None:
            return ()
        if self.has_session_per_partition:
            # The row under a new key takes no value from a row of which only a part is known.
            rows.deleted_row = old if known_columns == self._width else None
            rows.deleted_source = bytes(change.source)
        return (self._delete_record(old),)

    def _whole_row(
        self, rows: ChangedRows, change: Any, values: Row, old: Row | None, known_columns: int
    ) -> Row:
        """The row after a change. A column that the source does not have is null. A value that the
        connector did not get is that of the row before; if that is not known, the change is refused.
        """
        if UNSET not in values:
            return values
        unchanged = old
        if change.op == "c":
            source = bytes(change.source)
            is_new_key = source not in NO_SOURCE and source == rows.deleted_source
            if is_new_key:
                unchanged = rows.deleted_row
                known_columns = self._width
            elif change.position is not None:
                # It is no repeat, so a row that is still here is another one.
                unchanged = None
        new: list[Any] = []
        for i, value in enumerate(values):
            is_unavailable = value is UNSET and self.field_names[i] in change.unavailable
            if is_unavailable and (unchanged is None or i >= known_columns):
                self._refuse_unknown_value(change, values, self.field_names[i])
            if is_unavailable:
                new.append(unchanged[i])  # type: ignore[index]  # None was refused
            else:
                new.append(None if value is UNSET else value)
        return tuple(new)

    def _refuse_unknown_value(self, change: Any, values: Row, column: str) -> None:
        """Refuse a change whose row needs a value that nobody knows.

        A create lacks a value only if its row had another key. If that is another session, the row is
        there for certain, and nothing that was lost or not read is the reason.
        """
        cause = f"the value of {column} did not change, but it is not known: {self._describe_key(values)}"
        is_changed_key = change.op == "c" and not self.has_session_per_partition
        if is_changed_key:
            cause += "; the row under its old key is another session"
        if (self.has_whole_history or is_changed_key) and not self.lenient:
            raise PreconditionError(cause)
        raise HeadlessError(cause)

    def _refuse_contradiction(
        self, change: Any, values: Row, old: Row | None, known_columns: int
    ) -> None:
        """Refuse a change that contradicts the row that is here, as far as it is proof, and as far as
        the row is known.
        """
        op = change.op
        if op == "r":
            # A connector reads rows again whenever it takes a snapshot.
            return
        if op == "c":
            is_proof = self.has_whole_history or self.has_full_before_images
            if old is not None and is_proof:
                self._refuse_or_count("create of a row that is there already", values)
        elif old is None:
            if self.has_whole_history:
                kind = "update" if op == "u" else "delete"
                self._refuse_or_count(f"{kind} of a missing row", values)
        elif self.has_full_before_images:
            # A before-image lacks columns that the source did not have yet, and values that the
            # connector did not get.
            before = list(astuple(change.before))
            before[known_columns:] = [UNSET] * (self._width - known_columns)
            field = self._differing_field(tuple(before), old)
            if field:
                self._refuse_or_count(f"before-image differs from the row in {field}", values)

    def row_changes(self, rows: Any) -> None:
        """None: beside its rows, such a state has what is known of their changes, so it is one value."""

    def dump(self, rows: TableState) -> bytes:
        """Rows as bytes, as those of the table machine. What is known beside the rows is saved with
        them, if there is any.
        """
        if not isinstance(rows, ChangedRows):
            # They were read from records, which do not tell whether a null is older than its column.
            return msgspec.msgpack.encode([self._without_last_nulls(row) for row in rows.values()])
        saved_rows = list(rows.values())
        if rows.known_columns:
            # A row of which only the first columns are known is saved as these alone.
            widths = [rows.known_columns.get(key, self._width) for key in rows]
            saved_rows = [row[:width] for row, width in zip(saved_rows, widths, strict=True)]
        if rows.deleted_row is None and not rows.positions and not rows.deleted_positions:
            return msgspec.msgpack.encode(saved_rows)
        deleted_rows: list[Row] = []
        if rows.deleted_row is not None:
            deleted_rows.append(rows.deleted_row)
        positions: list[Position | None] = []
        if rows.positions:
            # One for each row, in the order of the rows; None: it is not known.
            positions = [rows.positions.get(key) for key in rows]
        deleted_keys = [self._key_as_tuple(key) for key in rows.deleted_positions]
        saved = self._saved_changes(
            rows=saved_rows,
            deleted_rows=deleted_rows,
            deleted_source=rows.deleted_source,
            positions=positions,
            deleted_keys=deleted_keys,
            deleted_positions=list(rows.deleted_positions.values()),
        )
        return msgspec.msgpack.encode(saved)

    def _without_last_nulls(self, row: Row) -> Row:
        """A row of which the null columns at the end are not known: they may have been added later."""
        width = len(row)
        while width and row[width - 1] is None:
            width -= 1
        return row[:width]

    def load(self, state_bytes: bytes, version: int) -> ChangedRows:  # noqa: ARG002  # it reads both
        """Rows from bytes. Columns that were added since they were saved are null, and not known."""
        widths: list[int] = []
        try:
            saved = self._rows_decoder.decode(state_bytes)
        except msgspec.ValidationError:
            widened = msgspec.msgpack.decode(state_bytes)
            widths = self._fill_added_columns(widened)
            saved = self._rows_decoder.decode(msgspec.msgpack.encode(widened))
        if not isinstance(saved, self._saved_changes):
            saved = self._saved_changes(rows=saved)
        rows = ChangedRows({self._row_key(row): row for row in saved.rows})
        for key, width in zip(rows, widths, strict=False):
            if width < self._width:
                rows.known_columns[key] = width
        for key, position in zip(rows, saved.positions, strict=False):
            if position is not None:
                rows.positions[key] = position
        for key, position in zip(saved.deleted_keys, saved.deleted_positions, strict=True):
            rows.deleted_positions[self._key_from_tuple(key)] = position
        if saved.deleted_rows:
            (rows.deleted_row,) = saved.deleted_rows
            rows.deleted_source = saved.deleted_source
        return rows

    def _fill_added_columns(self, saved: Any) -> list[int]:
        """Fill columns that were added since with null, in what was saved. Returns how many columns
        each row had.
        """
        saved_rows = saved["rows"] if isinstance(saved, dict) else saved
        widths = [len(row) for row in saved_rows]
        saved_rows[:] = fill_added_columns(saved_rows, self._width)
        if isinstance(saved, dict) and any(
            len(row) < self._width for row in saved.get("deleted_rows", [])
        ):
            # The row under a new key takes no value from a row of which only a part is known.
            saved["deleted_rows"] = []
        return widths

    def _key_as_tuple(self, key: Any) -> Row:
        return key if self._single_key_position is None else (key,)

    def _key_from_tuple(self, key: Row) -> Any:
        return key if self._single_key_position is None else key[0]


def _is_not_after(position: Position, previous: Position) -> bool:
    """Whether a change is at or before another one, by its place and by the time of its commit."""
    return position[0] <= previous[0] and position[1] <= previous[1]
