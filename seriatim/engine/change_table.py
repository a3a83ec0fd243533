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

Next: engine/table.py, which this machine extends; engine/fold.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, defstruct
from msgspec.structs import astuple

from seriatim.engine.messages import Poison
from seriatim.engine.session import FoldOutput, Row, Session
from seriatim.engine.table import (
    Columns,
    HeadlessError,
    MessageFields,
    PreconditionError,
    TableMachine,
    row_fields,
    saved_rows_type,
)

TRUNCATE_NEEDS_PARTITION = (
    "a TRUNCATE empties the whole table, but each session is one row: take session = "
    '"partition" and a topic of one partition, or leave skipped.operations of the connector at t'
)


class ChangedRows(dict[Any, Row]):
    """The rows of a session by key, and the row that the last message deleted.

    A connector sends the change of a key as a delete of the old row and a create of the new one. The
    create may lack values that did not change: they are those of the deleted row.
    """

    __slots__ = ("deleted_row", "deleted_source", "is_proven")

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
        self.is_proven = True
        """Whether the rows can contradict the next message. Those of a session that was set aside
        cannot.
        """

    def copy(self) -> ChangedRows:
        """A copy that later messages do not change."""
        copied = ChangedRows(self, self.deleted_row, self.deleted_source)
        copied.is_proven = self.is_proven
        return copied


class RowChange(Struct, kw_only=True, gc=False):
    """A message. Each table has a subclass of it, with its own types of images."""

    op: Literal["c", "u", "d", "r", "t", "m"]
    before: Any = None
    after: Any = None
    unavailable: list[str] = []
    """Columns of `after` whose values the connector did not get, because they did not change."""
    source: Raw = Raw(b"null")
    """Where in the source's log the change is, as the decoder gives it."""


class ChangeTable(TableMachine):
    """Rows by key, changed by the messages of a connector."""

    def __init__(
        self,
        *,
        has_full_before_images: bool = False,
        has_whole_history: bool = False,
        **settings: Any,
    ) -> None:
        self.has_full_before_images = has_full_before_images
        self.has_whole_history = has_whole_history
        super().__init__(**settings)
        # A session by key has one row, so a message with the whole row begins it anew. In a session
        # of many rows no single message does.
        self.has_snapshots = not self.has_session_per_partition
        if self.has_session_per_partition:
            self.shape += "; changes"

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
        saved_fields = [("rows", rows_type), ("deleted_rows", rows_type), ("deleted_source", bytes)]
        self._saved_with_deleted: Any = defstruct("RowsWithDeleted", saved_fields)
        self._rows_decoder: Any = msgspec.msgpack.Decoder(rows_type | self._saved_with_deleted)

    def decode(self, values: Sequence[bytes | None]) -> list[Any]:
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
        if not message.unavailable:
            return True
        # Where the history is whole, a row that begins with an unknown value must be a finding, and
        # not headless: the table would silently lack a row. `apply` refuses it.
        return self.has_whole_history and message.op == "c"

    def start(self, session: str) -> ChangedRows:  # noqa: ARG002  # every table begins empty
        """The state of a new session: no rows."""
        return ChangedRows()

    def begin_anew(self, rows: dict[Any, Row]) -> None:
        """Take the next message as it is: the session was set aside, so its rows prove nothing."""
        rows.is_proven = False  # type: ignore[attr-defined]  # `start` and `load` give `ChangedRows`

    def apply(self, rows: Any, message: Any) -> Sequence[Row]:
        """Change the rows and return one record per changed row."""
        if message.op == "t":
            records = self.end(rows)
            rows.clear()
            rows.deleted_row = None
        elif message.op == "d":
            records = self._delete_changed(rows, message)
        else:
            records = self._write_row(rows, message)
        rows.is_proven = True
        return records

    def fold_usual(
        self,
        sessions: Mapping[str, Session],  # noqa: ARG002  # every message goes through `apply`
        names: Sequence[str | None],  # noqa: ARG002
        sequences: Sequence[int | None],  # noqa: ARG002
        messages: Sequence[Any],
        output: FoldOutput,  # noqa: ARG002
    ) -> Iterable[int]:
        """The positions of messages that the fold must take through `apply`: all of them."""
        return range(len(messages))

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
        old = rows.get(old_key)
        new = self._whole_row(rows, change, values, old)
        overwritten = rows.get(key)
        if rows.is_proven:
            self._refuse_contradiction(change, named_row, old)
            if old_key != key and overwritten is not None:
                self._refuse_or_count("change of a key to one that is there already", values)
        records = []
        if old_key != key and old is not None:
            del rows[old_key]
            records.append(self._delete_record(old))
        rows[key] = new
        rows.deleted_row = None
        op = "insert" if overwritten is None else "update"
        if change.op == "r":
            op = "snapshot"
        records.append(self._record(op, new, overwritten))
        return records

    def _delete_changed(self, rows: ChangedRows, change: Any) -> Sequence[Row]:
        values = astuple(change.before)
        key = self._row_key(values)
        old = rows.get(key)
        if rows.is_proven:
            self._refuse_contradiction(change, values, old)
        rows.deleted_row = None
        if old is None:
            return ()
        del rows[key]
        if self.has_session_per_partition:
            rows.deleted_row = old
            rows.deleted_source = bytes(change.source)
        return (self._delete_record(old),)

    def _whole_row(self, rows: ChangedRows, change: Any, values: Row, old: Row | None) -> Row:
        """The row after a change. A column that the source does not have is null. A value that the
        connector did not get is that of the row before; if that is not known, the change is refused.
        """
        if UNSET not in values:
            return values
        unchanged = old
        is_new_key = rows.deleted_row is not None and rows.deleted_source == bytes(change.source)
        if change.op == "c" and is_new_key:
            unchanged = rows.deleted_row
        new: list[Any] = []
        for i, value in enumerate(values):
            is_unavailable = value is UNSET and self.field_names[i] in change.unavailable
            if is_unavailable and unchanged is None:
                self._refuse_unknown_value(values, self.field_names[i])
            if is_unavailable:
                new.append(unchanged[i])  # type: ignore[index]  # None was refused
            else:
                new.append(None if value is UNSET else value)
        return tuple(new)

    def _refuse_unknown_value(self, values: Row, column: str) -> None:
        """Refuse a change whose row needs a value that nobody knows."""
        if self.has_whole_history and not self.lenient:
            raise PreconditionError(
                f"the value of {column} did not change, but it is not known:"
                f" {self._describe_key(values)}"
            )
        raise HeadlessError(column)

    def _refuse_contradiction(self, change: Any, values: Row, old: Row | None) -> None:
        """Refuse a change that contradicts the row that is here, as far as it is proof."""
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
            field = self._differing_field(astuple(change.before), old)
            if field:
                self._refuse_or_count(f"before-image differs from the row in {field}", values)

    def dump(self, rows: dict[Any, Row]) -> bytes:
        """Rows as bytes, as those of the table machine. Only while a deleted row is remembered, it is
        saved with them.
        """
        deleted_row = getattr(rows, "deleted_row", None)
        if deleted_row is None:
            return super().dump(rows)
        saved = self._saved_with_deleted(
            list(rows.values()),
            [deleted_row],
            rows.deleted_source,  # type: ignore[attr-defined]  # see above
        )
        return msgspec.msgpack.encode(saved)

    def load(self, state_bytes: bytes, version: int) -> ChangedRows:  # noqa: ARG002  # there was only one
        """Rows from bytes."""
        saved = self._rows_decoder.decode(state_bytes)
        deleted_row = None
        deleted_source = b""
        rows = saved
        if isinstance(saved, self._saved_with_deleted):
            rows = saved.rows
            (deleted_row,) = saved.deleted_rows
            deleted_source = saved.deleted_source
        rows_by_key = {self._row_key(row): row for row in rows}
        return ChangedRows(rows_by_key, deleted_row, deleted_source)
