"""A seeded source: transactions on one table, and the messages that a connector sends of them.

Every message is one that Debezium's connector for PostgreSQL would send (tests/formats/change_events.py
has their form). The source knows its table after each message, so a fold can be compared with it.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import Struct

from tests.formats.change_events import UNAVAILABLE, base64_decimal, encode, event

COLUMNS = {"id": "int64", "customer": "string", "amount": "decimal(10,2)", "big": "string"}
Table = dict[int, dict[str, Any]]


class SentMessage(Struct):
    """A message, and the table of the source after it."""

    key: str | None
    value: bytes | None
    table: Table
    kind: str
    """The operation of its event; `tombstone` if it has none."""


class SimulatedSource:
    """A table of few rows, so that keys come again, and the messages of its changes."""

    def __init__(
        self,
        seed: int,
        *,
        has_full_identity: bool,
        has_truncates: bool,
        has_large_key_changes: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.has_full_identity = has_full_identity
        self.has_truncates = has_truncates
        self.has_large_key_changes = has_large_key_changes
        """Whether the key of a row with a value that is stored apart may change."""
        self.table: Table = {}
        self.messages: list[SentMessage] = []
        self.lsn = 26420888

    def send_snapshot(self, rows: int) -> None:
        """The rows that were there when the connector began."""
        for row_id in range(1, rows + 1):
            row = self._new_row(row_id)
            self.table[row_id] = row
            self._send("r", row_id, after=row)

    def commit(self, changes: int) -> None:
        """Transactions with this many changes. Of a rolled back one nothing is sent."""
        for _ in range(changes):
            self.lsn += self.random.randrange(8, 500)
            draw = self.random.random()
            row_id = self.random.randrange(1, 13)
            if self.has_truncates and draw < 0.01:
                self.table.clear()
                self._send("t", None)
            elif row_id not in self.table:
                self._insert(row_id)
            elif draw < 0.2:
                self._delete(row_id)
            elif draw < 0.3:
                self._change_key(row_id)
            else:
                self._update(row_id)

    def _new_row(self, row_id: int) -> dict[str, Any]:
        return {
            "id": row_id,
            "customer": self._text(),
            "amount": base64_decimal(self.random.randrange(-(10**6), 10**8)),
            "big": self.random.choice([None, self._text() * 20]),
        }

    def _text(self) -> str:
        # No two texts are the same, so that every update changes its row.
        return f"été {self.random.getrandbits(60)}"

    def _insert(self, row_id: int) -> None:
        self.table[row_id] = self._new_row(row_id)
        self._send("c", row_id, after=self.table[row_id])

    def _update(self, row_id: int) -> None:
        before = self.table[row_id]
        after = {**before, "customer": self._text()}
        changes_big = self.random.random() < 0.3
        if changes_big:
            after["big"] = self._text() * 20
        self.table[row_id] = after
        self._send("u", row_id, after=self._image(after, is_new=changes_big), before=before)

    def _delete(self, row_id: int) -> None:
        before = self.table.pop(row_id)
        self._send("d", row_id, before=before)
        self._send_tombstone(row_id)

    def _change_key(self, row_id: int) -> None:
        before = self.table[row_id]
        free_ids = [number for number in range(1, 13) if number not in self.table]
        is_large = before["big"] is not None and not self.has_full_identity
        if not free_ids or (is_large and not self.has_large_key_changes):
            return
        del self.table[row_id]
        self._send("d", row_id, before=before)
        self._send_tombstone(row_id)
        new_id = self.random.choice(free_ids)
        self.table[new_id] = {**before, "id": new_id}
        self._send("c", new_id, after=self._image(self.table[new_id], is_new=False))

    def _image(self, row: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """A row as it is sent: a large value that did not change is missing."""
        if self.has_full_identity or is_new or row["big"] is None:
            return row
        return {**row, "big": UNAVAILABLE}

    def _send(
        self,
        op: str,
        row_id: int | None,
        after: dict[str, Any] | None = None,
        before: dict[str, Any] | None = None,
    ) -> None:
        if not self.has_full_identity and before is not None:
            # PostgreSQL fills what it does not know with defaults; an update has nothing at all.
            before = (
                None if op == "u" else {"id": row_id, "customer": "", "amount": None, "big": None}
            )
        payload = event(op, after, before, lsn=self.lsn)
        key = None if row_id is None else f'{{"id":{row_id}}}'
        self.messages.append(SentMessage(key, encode(payload), dict(self.table), op))

    def _send_tombstone(self, row_id: int) -> None:
        key = f'{{"id":{row_id}}}'
        self.messages.append(SentMessage(key, None, dict(self.table), "tombstone"))
