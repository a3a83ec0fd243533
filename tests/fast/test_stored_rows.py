"""Sessions that are stored row by row give what sessions give that are one value: records, rows, findings,
counts. In the plain fold and in the compiled one, however slices are cut and files are merged.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.files import Files, save_state
from seriatim.engine.findings import OnPoison, Tier
from seriatim.engine.fold import Fold
from seriatim.engine.session import Session
from seriatim.engine.table import StoredTable, TableMachine
from seriatim.fast.table import ArenaSlot, CompiledTable
from seriatim.memory.store import MemoryStore
from seriatim.storage.state_files import StateFiles
from tests.fast.plain_and_compiled import (
    COLUMNS,
    PARTITION,
    EagerFold,
    OddProducer,
    Sent,
    Twin,
    assert_twins_agree,
    to_record_batch,
)

KEYS = [["id"], ["n", "id"], ["id", "ok"]]
ROWS_TOGETHER_MAX = 2
"""Larger sessions are stored row by row here."""


class PlainTable(TableMachine):
    """The plain machine that stores small sessions row by row."""

    rows_together_max = ROWS_TOGETHER_MAX


class CompiledSmallTable(CompiledTable):
    """The compiled machine that stores small sessions row by row."""

    rows_together_max = ROWS_TOGETHER_MAX


class FilesTwin(Twin):
    """A fold whose sessions are in state files."""

    chance = random.Random(0)
    merged_share = 0.3
    """How often state files are merged after a task."""

    def begin(self) -> None:
        """A new task, with the files of the last one."""
        self.heads_saved = getattr(self, "heads_saved", 0)
        self.store = getattr(self, "store", MemoryStore())
        self.files: Files = getattr(self, "files", ())
        self.tasks = getattr(self, "tasks", 0) + 1
        self.state = StateFiles(self.store, "s")
        super().begin()

    def _load(self, names: list[str]) -> dict[str, Session]:
        return self.state.open_sessions(self.files, names)

    def end(self) -> None:
        """End the task: save, and merge files now and then, as compact does."""
        super().end()
        touched = self.fold.touched_sessions()
        self.heads_saved += sum(session.is_head for session in touched.values())
        if touched:
            self.files = save_state(self.state, PARTITION, f"0-{self.tasks}-a", touched, self.files)
        if len(self.files) > 1 and self.chance.random() < self.merged_share:
            count = self.chance.randrange(2, len(self.files) + 1)
            stem = f"compact-{self.tasks}-0"
            merged = self.state.save(PARTITION, stem, {}, self.files[:count])
            self.files = (*merged, *self.files[count:])
        self.saved = {
            name: replace(session, rows_summary=None)
            for name, session in self.state.all_sessions(self.files)
        }

    def outcome(self) -> dict[str, Any]:
        """What all twins must have in common."""
        outcome = super().outcome()
        return {**outcome, "saved": sorted(outcome["saved"].items())}


class SortedTwin(Twin):
    """The plain fold of sessions that are one value, sorted by name as files have them."""

    def outcome(self) -> dict[str, Any]:
        """What all twins must have in common."""
        outcome = super().outcome()
        return {**outcome, "saved": sorted(outcome["saved"].items())}


def _tasks(producer: OddProducer, chance: random.Random) -> list[list[list[Sent]]]:
    return [
        [
            [producer.send() for _ in range(chance.randrange(1, 40))]
            for _ in range(chance.randrange(1, 4))
        ]
        for _ in range(chance.randrange(2, 9))
    ]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    oddness=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    images=st.sampled_from([0.0, 0.05, 0.8]),
    tier=st.sampled_from(["none", "once", "order", "strict"]),
    on_poison=st.sampled_from(["quarantine", "skip"]),
    session_count=st.sampled_from([4, 4, 40, 400]),
)
def test_rows_stored_one_by_one_change_nothing(
    seed: int,
    oddness: float,
    images: float,
    tier: Tier,
    on_poison: OnPoison,
    session_count: int,
) -> None:
    """Plain and compiled, both with row parts, give what the plain fold without them gives."""
    chance = random.Random(seed)
    sequenced = chance.random() < 0.7
    table = {
        "key": chance.choice(KEYS),
        "columns": COLUMNS,
        "before": chance.random() < 0.7,
        "sequence": "seq" if sequenced else None,
        "lenient": tier in {"none", "order"},
    }
    fold = {"tier": tier, "on_poison": on_poison}
    producer = OddProducer(chance, oddness, sequenced, images, session_count)
    tasks = _tasks(producer, chance)
    for kind, machine in ((Fold, PlainTable), (EagerFold, CompiledSmallTable)):
        whole = SortedTwin(Fold, TableMachine, table, **fold)
        stored = FilesTwin(kind, machine, table, **fold)
        stored.chance = random.Random(seed)
        assert_twins_agree((whole, stored), tasks)


@pytest.mark.parametrize(
    ("kind", "machine"),
    [(Fold, PlainTable), (EagerFold, CompiledSmallTable)],
    ids=["plain", "compiled"],
)
def test_rows_stored_before_columns_were_added_are_as_before(
    kind: type[Fold], machine: type[TableMachine]
) -> None:
    """A row that was stored with fewer columns has null in the others, also if it is read beside rows
    that have them all.
    """
    few: dict[str, Any] = {"key": ["id"], "columns": {"id": "string", "n": "int64"}}
    wide = {"key": ["id"], "columns": {"id": "string", "n": "int64", "t": "string"}}
    whole = SortedTwin(Fold, TableMachine, few, tier="none", on_poison="halt")
    stored = FilesTwin(kind, machine, few, tier="none", on_poison="halt")
    rows = ",".join(f'{{"id":"r{number}","n":{number}}}' for number in range(100))
    snapshot = b'{"type":"snapshot","rows":[%s]}' % rows.encode()
    assert_twins_agree((whole, stored), [[[(b"s", snapshot, 1)]]])
    for twin in (whole, stored):
        twin.table = wide
        twin.sheet.batches.clear()  # records of before have fewer columns
        twin.begin()
    first_task, second_task = _task_of_three_columns(1), _task_of_three_columns(3)
    # At the end a snapshot saves every row with all columns.
    second_task.append([(b"s", snapshot, 4)])
    assert_twins_agree((whole, stored), [first_task, second_task])
    assert stored.heads_saved == 3


def _task_of_three_columns(first: int) -> list[list[Sent]]:
    """Updates of rows from this one on, a delete, and updates of the same rows and of others."""
    updates = [
        (b"s", b'{"type":"update","id":"r%d","t":"t%d"}' % (row, first), 2)
        for row in range(first, first + 4)
    ]
    delete = (b"s", b'{"type":"delete","id":"r%d"}' % (first + 20), 3)
    return [updates, [delete], _updates(first, [50, 51, first])]


def test_short_sessions_beside_a_large_one_are_folded_in_bulk() -> None:
    """Only the large session is stored row by row. Of it one message is folded by itself in each task;
    all others are folded by compiled code.
    """
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    snapshot = '{"type":"snapshot","seq":1,"rows":[%s]}'
    rows = ",".join(f'{{"id":"r{number}","n":{number}}}' for number in range(500))
    begun = [(b"k%d" % key, (snapshot % '{"id":"r0"}').encode(), 1) for key in range(300)]
    begun.append((b"s", (snapshot % rows).encode(), 1))
    tasks = [[begun]]
    for sequence in (2, 3):
        update = b'{"type":"update","seq":%d,"id":"r0","n":7}' % sequence
        short = [(b"k%d" % key, update, sequence) for key in range(300)]
        large = _updates(10 * sequence - 18, [5, 50, 500 - sequence, 5, 0, 1, 2, 3, 4, 5])
        tasks.append([short[:100] + large[:5], large[5:] + short[100:]])
    whole = SortedTwin(Fold, TableMachine, table, tier="strict", on_poison="halt")
    stored = FilesTwin(EagerFold, CompiledSmallTable, table, tier="strict", on_poison="halt")
    assert_twins_agree((whole, stored), tasks)
    assert stored.heads_saved == 3
    assert stored.compiled_record_count == 300 + 500 + 2 * (300 + 10 - 1)


def _updates(first: int, ids: list[int]) -> list[Sent]:
    return [
        (b"s", b'{"type":"update","seq":%d,"id":"r%d","n":%d}' % (first + i, row, i), 1)
        for i, row in enumerate(ids)
    ]


@pytest.mark.parametrize(
    ("kind", "machine", "state_class"),
    [(Fold, PlainTable, StoredTable), (EagerFold, CompiledSmallTable, ArenaSlot)],
    ids=["plain", "compiled"],
)
def test_only_named_rows_are_read_and_written(
    kind: type[Fold], machine: type[TableMachine], state_class: type
) -> None:
    """A slice that touches three rows of many has these in memory, and writes these."""
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    twin = FilesTwin(kind, machine, table, tier="strict", on_poison="halt")
    twin.merged_share = 0.0
    rows = ",".join(f'{{"id":"r{number}","n":{number}}}' for number in range(1_000))
    snapshot = b'{"type":"snapshot","seq":1,"rows":[%s]}' % rows.encode()
    twin_take(twin, [(b"s", snapshot, 1)], 0)
    twin.end()
    (base,) = twin.files
    assert base.rows == 1_001
    twin.begin()
    twin_take(twin, _updates(2, [7, 700, 7, 70]), 1)
    session = twin.fold.sessions["s"]
    assert session.state.__class__ is state_class
    changes = twin.fold.runner.row_changes(session.state)
    assert changes is not None
    assert sorted(row.number for row in changes.rows) == [7, 70, 700]
    assert (changes.is_complete, changes.removed_hashes) == (False, set())
    assert changes.summary.count == 1_000
    twin.end()
    assert twin.files[0] == base
    assert [file.rows for file in twin.files[1:]] == [4]
    assert twin.files[1].size_bytes < base.size_bytes / 2


def twin_take(twin: Twin, messages: list[Sent], start: int) -> None:
    """Let a twin fold these messages."""
    twin.take(to_record_batch(messages, start))
