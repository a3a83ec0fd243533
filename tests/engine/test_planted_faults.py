"""Single faults in the messages of a stock table without `sequence`: what strict finds with
before-images, and what it finds without them. docs/STREAMS.md has the figures.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from seriatim.engine.findings import Finding
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.stream import parse_stream

COLUMNS = {"id": "string", "state": "string", "place": "string", "amount": "int64"}
STATES = ("new", "picked", "packed", "sent")
PLACES = ("north", "south", "east", "west", "harbour")
MESSAGE_COUNT = 300
SESSIONS = [f"warehouse-{number}" for number in range(4)]
ROWS_MIN = 6
FAULTS = 90
KINDS = ("drop", "swap", "repeat")
FOUND = {
    # What the messages say of the row before: how many of 30 drops, 30 swaps and 30 repeats are
    # found.
    "nothing": (3, 10, 5),
    "changed columns": (18, 18, 30),
    "whole row": (26, 30, 30),
}
Row = dict[str, Any]
Tables = dict[str, dict[str, Row]]
"""The rows of each session, by id."""


class Change(NamedTuple):
    """What a producer did, before it is written as a message."""

    session: str
    kind: str
    old: Row
    """The row before an update or a delete."""
    changed: Row
    """The columns that an update changes, or the whole row of an insert."""
    rows: list[Row]
    """All rows, of a snapshot."""


class Warehouses:
    """A producer of the orders of some warehouses, one session for each. Orders go through few
    states, at few places, in small amounts: so values repeat, as they do in real tables.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tables: Tables = {session: {} for session in SESSIONS}
        self.order_count = 0

    def changes(self) -> list[Change]:
        """What happens: first a snapshot of each session, then mostly updates."""
        for session in SESSIONS:
            for _ in range(ROWS_MIN):
                self._insert(session)
        changes = [self._snapshot(session) for session in SESSIONS]
        while len(changes) < MESSAGE_COUNT:
            changes.append(self._change(self.chance.choice(SESSIONS)))
        return changes

    def _change(self, session: str) -> Change:
        table = self.tables[session]
        drawn = self.chance.random()
        if drawn < 0.02:
            return self._snapshot(session)
        if drawn < 0.1 or len(table) < ROWS_MIN:
            return Change(session, "insert", {}, self._insert(session), [])
        old = self.chance.choice(list(table.values()))
        del table[old["id"]]
        if drawn < 0.17:
            return Change(session, "delete", old, {}, [])
        changed = self._changed_columns(old)
        new = old | changed
        table[new["id"]] = new
        return Change(session, "update", old, changed, [])

    def _changed_columns(self, old: Row) -> Row:
        drawn = self.chance.random()
        if drawn < 0.04:
            return {"id": self._next_id()}
        if drawn < 0.5:
            following = STATES.index(old["state"]) + 1
            return {"state": STATES[following % len(STATES)]}
        place = self.chance.choice([place for place in PLACES if place != old["place"]])
        if drawn < 0.8:
            return {"place": place}
        return {"place": place, "amount": self.chance.randrange(1, 5)}

    def _snapshot(self, session: str) -> Change:
        return Change(session, "snapshot", {}, {}, list(self.tables[session].values()))

    def _insert(self, session: str) -> Row:
        row = {
            "id": self._next_id(),
            "state": "new",
            "place": self.chance.choice(PLACES),
            "amount": self.chance.randrange(1, 5),
        }
        self.tables[session][row["id"]] = row
        return row

    def _next_id(self) -> str:
        self.order_count += 1
        return f"order-{self.order_count}"


def write_message(change: Change, images: str) -> dict[str, Any]:
    """A change as a message whose before-image has these columns."""
    if change.kind == "snapshot":
        return {"type": "snapshot", "rows": change.rows}
    if change.kind == "insert":
        return {"type": "insert", **change.changed}
    message = {"type": change.kind, "id": change.old["id"], **change.changed}
    image_columns = {"whole row": set(COLUMNS), "changed columns": set(change.changed)}
    before = image_columns.get(images, set())
    if "id" in change.changed:
        before = before | {"id"}  # nothing else says which row gets the new key
    message["before"] = {name: change.old[name] for name in sorted(before)}
    return message


def plant(changes: list[Change], kind: str, chance: random.Random) -> tuple[list[Change], int]:
    """The changes with one fault in their first half, and the place where it begins."""
    changes = list(changes)
    while True:
        place = chance.randrange(len(changes) // 2)
        change = changes[place]
        following = _next_of_same_row(changes, place)
        if change.kind == "snapshot":
            continue  # two snapshots are as good as one, and without the first there is no session
        if kind == "drop":
            del changes[place]
            return changes, place
        if kind == "repeat":
            changes.insert(place + 1, change)
            return changes, place
        if following is not None:
            changes[place], changes[following] = changes[following], change
            return changes, place


def _next_of_same_row(changes: list[Change], place: int) -> int | None:
    """The next change of the row, if there is one before the next snapshot of its session."""
    session, row_id = changes[place].session, row_id_after(changes[place])
    for following in range(place + 1, len(changes)):
        change = changes[following]
        if change.session == session and change.kind == "snapshot":
            return None
        if change.session == session and change.old.get("id") == row_id:
            return following
    return None


def row_id_after(change: Change) -> Any:
    """The id of the row that a change leaves."""
    return change.changed.get("id", change.old.get("id"))


def new_fold() -> Fold:
    """The fold of a strict stream without `sequence`."""
    toml_values = {
        "topics": "orders",
        "machine": "table",
        "table": {"key": ["id"], "columns": COLUMNS},
        "output": {"path": "memory"},
    }
    stream = parse_stream("orders", toml_values, "orders.toml")
    partition = Partition("orders", 0)
    return Fold(partition, stream.table_machine(), stream.tier, stream.on_poison, lambda _: {})


def fold_changes(changes: list[Change], images: str) -> list[Finding]:
    """The findings of a fold over the messages."""
    fold = new_fold()
    keys = [change.session.encode() for change in changes]
    values = [msgspec.json.encode(write_message(change, images)) for change in changes]
    fold.fold_batch(MessageBatch(0, [0] * len(changes), keys, values))
    return fold.tally.findings


def first_contradiction(changes: list[Change], images: str) -> int | None:
    """The first message that contradicts the rows, found without the machine: a plain walk over the
    messages. None: no message does.
    """
    tables: Tables = {session: {} for session in SESSIONS}
    for offset, change in enumerate(changes):
        table = tables[change.session]
        if change.kind == "snapshot":
            table.clear()
            table.update({row["id"]: row for row in change.rows})
            continue
        message = write_message(change, images)
        before = message.get("before", {})
        old_id = before.get("id", message["id"])
        row = table.get(old_id)
        if change.kind == "insert":
            if row is not None:
                return offset
            table[old_id] = change.changed
            continue
        if row is None or not before.items() <= row.items():
            return offset
        if message["id"] != old_id and message["id"] in table:
            return offset
        del table[old_id]
        if change.kind == "update":
            table[message["id"]] = row | change.changed
    return None


@cache
def clean_changes(seed: int) -> list[Change]:
    """The changes of one run, without a fault."""
    return Warehouses(seed).changes()


@pytest.mark.parametrize("images", FOUND)
def test_a_clean_run_has_no_finding(images: str) -> None:
    """On the messages of all 90 runs, before a fault is planted into them."""
    for seed in range(FAULTS):
        assert fold_changes(clean_changes(seed), images) == []


@pytest.mark.parametrize("images", FOUND)
def test_every_contradiction_is_found_at_its_exact_offset(images: str) -> None:
    """Of 30 dropped, 30 swapped and 30 repeated messages, every one after which a message contradicts
    the rows is found at the first that does.
    """
    found: Counter[str] = Counter()
    for seed in range(FAULTS):
        kind = KINDS[seed % len(KINDS)]
        changes, place = plant(clean_changes(seed), kind, random.Random(seed))
        expected_offset = first_contradiction(changes, images)
        findings = fold_changes(changes, images)
        assert {finding.finding for finding in findings} <= {"precondition"}
        offset = findings[0].offset if findings else None
        assert offset == expected_offset, (seed, kind, place)
        if offset is not None:
            assert offset >= place
            found[kind] += 1
        elif images == "whole row":
            # No other message says anything about the row before the next snapshot.
            assert kind == "drop"
            assert _next_of_same_row(clean_changes(seed), place) is None
    assert tuple(found[kind] for kind in KINDS) == FOUND[images]


def test_the_document_has_the_figures() -> None:
    """STREAMS.md says how many faults are found with each kind of before-image."""
    text = Path("docs/STREAMS.md").read_text()
    for images, counts in FOUND.items():
        dropped, swapped, repeated = counts
        line = f"| {images} | {dropped} | {swapped} | {repeated} | {sum(counts)} |"
        assert line in text
