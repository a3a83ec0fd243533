"""Rows of a large session of the table machine, stored row by row, so that a slice reads and writes only
the rows that its messages name.

A session that is stored so has a head: all of `StoredSession` but its state, and a `RowsSummary`. Its
rows lie in row parts, one in each state file that has the session. A part has the rows that a slice
changed, and the hashes of the keys that it removed. The newest part that has a hash is right about
it. A complete part ends the search: whatever is older is void.

A row is found by the hash of its key. Two keys may have the same hash. So whoever needs a hash gets all
of its rows, and whoever changes one of these rows writes all of them.

Next: table.py folds such sessions; storage/row_blocks.py keeps the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from decimal import Context, Decimal
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from seriatim.errors import ensure

ROWS_TOGETHER_MAX = 4_096
"""A session with more rows is stored row by row."""
NEW_ROW = -1
"""The number of a row that has none yet."""
HASH_START, HASH_PRIME = 14_695_981_039_346_656_037, 1_099_511_628_211
"""The constants of the hash function FNV-1a. fast/rows.py has them, too."""
HASH_MASK = (1 << 64) - 1
DIGEST_BYTES = 16
DIGEST_MASK = (1 << 8 * DIGEST_BYTES) - 1
DECIMAL_CONTEXT = Context(prec=38)
"""As many digits as a column may have."""

_encode = msgspec.msgpack.Encoder().encode


class RowsSummary(Struct, frozen=True, array_like=True):
    """What the head of a session knows of its rows."""

    count: int
    digest: bytes
    """The digest of all rows. It does not depend on their order, and is known without reading them."""
    next_number: int
    """The number that the next new row gets. Rows are in the order of their numbers."""


class StoredRow(NamedTuple):
    """A row, packed as the table machine packs it."""

    key_hash: int
    number: int
    packed: bytes


class RowChanges(Struct, frozen=True):
    """What is to be stored of the rows of a session."""

    rows: Sequence[StoredRow]
    """In the order of their numbers."""
    removed_hashes: Collection[int]
    """Hashes that have no row any more."""
    is_complete: bool
    """Whether these are all rows of the session. Then whatever was stored before is void."""
    summary: RowsSummary
    """Of all rows of the session, with these changes."""

    @property
    def size(self) -> int:
        """How many rows and removals have to be written."""
        return len(self.rows) + len(self.removed_hashes)


class RowSource(Protocol):
    """The stored rows of one session."""

    def find(self, key_hashes: Collection[int]) -> list[StoredRow]:
        """All rows with these hashes."""

    def read_all(self) -> Iterable[StoredRow]:
        """All rows, in the order of their numbers."""

    @property
    def is_complete(self) -> bool:
        """Whether these are all rows. They are not if files are left out."""

    @property
    def stored_count(self) -> int:
        """How many rows and removals the parts have, also those that a newer part has again."""


class StoredRows:
    """The stored rows of one session while it is folded. It remembers which of them were read."""

    def __init__(self, summary: RowsSummary, source: RowSource) -> None:
        self.summary = summary
        self.source = source
        self._read_hashes: set[int] = set()
        self._rows_by_hash: dict[int, list[StoredRow]] = {}
        """The rows that were read, as they are stored."""
        self._not_taken: list[StoredRow] = []

    def read(self, key_hashes: Iterable[int]) -> None:
        """Read the rows with these hashes, as far as they were not read yet."""
        new_hashes = set(key_hashes) - self._read_hashes
        if not new_hashes:
            return
        self._read_hashes |= new_hashes
        self._remember(self.source.find(new_hashes))

    def read_remaining(self) -> None:
        """Read all rows that were not read yet."""
        remaining_rows = []
        for row in self.source.read_all():
            if row.key_hash not in self._read_hashes:
                remaining_rows.append(row)
        self._remember(remaining_rows)
        self._read_hashes.update(self._rows_by_hash)

    def _remember(self, rows: Sequence[StoredRow]) -> None:
        for row in rows:
            self._rows_by_hash.setdefault(row.key_hash, []).append(row)
        self._not_taken += rows

    def take_rows(self) -> list[StoredRow]:
        """The rows that were read since this was last asked."""
        rows = self._not_taken
        self._not_taken = []
        return rows

    def changes(self, rows: Iterable[StoredRow]) -> RowChanges:
        """What changed. `rows` are the rows that were read, as they are now, and the new ones, in their
        order, with `NEW_ROW` as number.
        """
        numbered_rows, next_number = _number_new_rows(rows, self.summary.next_number)
        rows_by_hash: dict[int, list[StoredRow]] = {}
        for row in numbered_rows:
            rows_by_hash.setdefault(row.key_hash, []).append(row)
        changed_hashes = set()
        for key_hash, rows_before in self._rows_by_hash.items():
            rows_now = rows_by_hash.get(key_hash, [])
            # Most lists have one row, so that they are rarely sorted.
            if rows_now == rows_before:
                continue
            if sorted(rows_now) != sorted(rows_before):
                changed_hashes.add(key_hash)
        changed_hashes.update(rows_by_hash.keys() - self._rows_by_hash.keys())
        old_rows: list[StoredRow] = []
        for key_hash in changed_hashes:
            old_rows += self._rows_by_hash.get(key_hash, ())
        new_rows = [row for row in numbered_rows if row.key_hash in changed_hashes]
        new_rows.sort(key=_number_of)
        summary = RowsSummary(
            count=self.summary.count + len(new_rows) - len(old_rows),
            digest=_add_digests(self.summary.digest, new_rows, old_rows),
            next_number=next_number,
        )
        return RowChanges(
            rows=new_rows,
            removed_hashes=changed_hashes - rows_by_hash.keys(),
            is_complete=False,
            summary=summary,
        )


def complete_rows(rows: Iterable[StoredRow]) -> RowChanges:
    """All rows of a session, to be stored instead of whatever was stored before."""
    numbered_rows, next_number = _number_new_rows(rows, 0)
    return RowChanges(
        rows=numbered_rows,
        removed_hashes=(),
        is_complete=True,
        summary=summarize_rows(numbered_rows, next_number),
    )


def summarize_rows(rows: Sequence[StoredRow], next_number: int) -> RowsSummary:
    """What is known of these rows, if they are all rows of a session."""
    digest = _add_digests(bytes(DIGEST_BYTES), rows, ())
    return RowsSummary(len(rows), digest, next_number)


def summarize_state_bytes(state_bytes: bytes) -> tuple[int, bytes]:
    """Count and digest of the rows of a session that is stored as one value."""
    packed_rows = msgspec.msgpack.decode(state_bytes, type=list[msgspec.Raw])
    total = sum(_row_digest(bytes(packed)) for packed in packed_rows)
    return len(packed_rows), _digest_bytes(total)


def _number_new_rows(rows: Iterable[StoredRow], next_number: int) -> tuple[list[StoredRow], int]:
    """The rows, each with a number; and the number that the next new row gets."""
    numbered_rows = []
    for row in rows:
        if row.number == NEW_ROW:
            numbered_rows.append(StoredRow(row.key_hash, next_number, row.packed))
            next_number += 1
        else:
            numbered_rows.append(row)
    return numbered_rows, next_number


def _number_of(row: StoredRow) -> int:
    return row.number


def _row_digest(packed: bytes) -> int:
    # A row contains its key, so this is a digest of both.
    return int.from_bytes(blake2b(packed, digest_size=DIGEST_BYTES).digest())


def _add_digests(
    digest: bytes, added_rows: Iterable[StoredRow], removed_rows: Iterable[StoredRow]
) -> bytes:
    """The digest of a session's rows, with some more and without some others. It is a sum, so the order
    of rows does not matter.
    """
    total = int.from_bytes(digest)
    total += sum(_row_digest(row.packed) for row in added_rows)
    total -= sum(_row_digest(row.packed) for row in removed_rows)
    return _digest_bytes(total)


def _digest_bytes(total: int) -> bytes:
    return (total & DIGEST_MASK).to_bytes(DIGEST_BYTES)


def hash_key(key_values: Iterable[Any]) -> int:
    """The hash by which a row is stored. Keys that Python takes as equal have the same hash."""
    packed = _encode([_normalize_key_value(value) for value in key_values])
    key_hash = HASH_START
    for byte in packed:
        key_hash = ((key_hash ^ byte) * HASH_PRIME) & HASH_MASK
    return key_hash


def _normalize_key_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value
    if isinstance(value, Decimal):
        return str(value.normalize(DECIMAL_CONTEXT)) if value else "0"
    if isinstance(value, float):
        return value + 0.0  # 0.0 and -0.0 are equal keys
    return value


def join_rows(packed_rows: Sequence[bytes]) -> bytes:
    """Packed rows as the state bytes of a session: a list of msgpack."""
    count = len(packed_rows)
    ensure(count < 1 << 32, "a list of msgpack has fewer rows", rows=count)
    if count < 16:
        header = bytes([0x90 | count])
    elif count < 1 << 16:
        header = b"\xdc" + count.to_bytes(2)
    else:
        header = b"\xdd" + count.to_bytes(4)
    return header + b"".join(packed_rows)
