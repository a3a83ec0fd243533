"""An arbitrary machine for the benchmark: the table's work, written by hand as a user would."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from seriatim import Machine


class Row(Struct, gc=False):
    """A row of the table."""

    id: str
    price: float
    size: int


class Snapshot(Struct, tag_field="type", tag="snapshot"):
    """The whole table."""

    seq: int
    rows: list[Row]


class Insert(Struct, tag_field="type", tag="insert", gc=False):
    """A new row."""

    seq: int
    id: str
    price: float
    size: int


class Update(Struct, tag_field="type", tag="update", gc=False):
    """A row as it is now."""

    seq: int
    id: str
    price: float
    size: int


class Delete(Struct, tag_field="type", tag="delete", gc=False):
    """A row that is gone."""

    seq: int
    id: str


class Change(Struct, gc=False):
    """Record: a row before and after."""

    op: str
    id: str
    price: float | None = None
    size: int | None = None
    old_price: float | None = None
    old_size: int | None = None


class Rows(Machine[dict[str, Row], Snapshot | Insert | Update | Delete, Change]):
    """Rows by id."""

    def start(self, session: str) -> dict[str, Row]:  # noqa: ARG002  # every table begins empty
        """No rows."""
        return {}

    def is_snapshot(self, message: Snapshot | Insert | Update | Delete) -> bool:
        """The whole table may begin a session."""
        return message.__class__ is Snapshot

    def apply(
        self, rows: dict[str, Row], message: Snapshot | Insert | Update | Delete
    ) -> Iterable[Change]:
        """One record per row changed."""
        if isinstance(message, Update):
            old = rows[message.id]
            rows[message.id] = Row(message.id, message.price, message.size)
            yield Change("update", message.id, message.price, message.size, old.price, old.size)
        elif isinstance(message, Insert):
            rows[message.id] = Row(message.id, message.price, message.size)
            yield Change("insert", message.id, message.price, message.size)
        elif isinstance(message, Delete):
            old = rows.pop(message.id)
            yield Change("delete", message.id, None, None, old.price, old.size)
        else:
            rows.clear()
            for row in message.rows:
                rows[row.id] = row
                yield Change("snapshot", row.id, row.price, row.size)
