"""The bulk fold gives what the plain fold gives, on every input: records, state bytes, findings,
marks, counts.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.engine.findings import OnPoison
from seriatim.engine.fold import Limits
from seriatim.engine.session import Session
from seriatim.engine.table import TableMachine
from seriatim.fast import table as machine
from tests.calls import count_calls, count_calls_by_function
from tests.fast.plain_and_compiled import (
    COLUMNS,
    OddProducer,
    Twin,
    assert_twins_agree,
    create_twins,
    to_record_batch,
)

KEYS = [["id"], ["n", "id"], ["id", "ok"]]


def _world(seed: int, oddness: float, *, eager: bool, **choices: Any) -> Twin:
    chance = random.Random(seed)
    sequenced = chance.random() < 0.7
    tier = choices["tier"]
    table = {
        "key": choices.pop("key", None) or chance.choice(KEYS),
        "columns": COLUMNS,
        "before": chance.random() < 0.7,
        "sequence": "seq" if sequenced else None,
        "lenient": tier in {"none", "order"},
    }
    images = choices.pop("images", 0.0)
    session_count = choices.pop("session_count", 4)
    producer = OddProducer(chance, oddness, sequenced, images, session_count)
    tasks = [
        [
            [producer.send() for _ in range(chance.randrange(1, 60))]
            for _ in range(chance.randrange(1, 4))
        ]
        for _ in range(chance.randrange(1, 4))
    ]
    return assert_twins_agree(create_twins(table, eager=eager, **choices), tasks)


@settings(max_examples=250)
@given(
    seed=st.integers(0, 2**32),
    oddness=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    images=st.sampled_from([0.0, 0.05, 0.8]),
    tier=st.sampled_from(["none", "once", "order", "strict"]),
    on_poison=st.sampled_from(["quarantine", "skip", "halt"]),
)
def test_both_folds_give_the_same(
    seed: int, oddness: float, images: float, tier: str, on_poison: OnPoison
) -> None:
    """Whatever producers send, however it is cut into stretches and tasks, nobody can tell which
    fold it was.
    """
    _world(seed, oddness, images=images, eager=True, tier=tier, on_poison=on_poison)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    oddness=st.sampled_from([0.0, 0.1, 0.9]),
    images=st.sampled_from([0.0, 0.1]),
)
def test_going_back_to_the_plain_way_changes_nothing(
    seed: int, oddness: float, images: float
) -> None:
    """Stretches that are too unusual are folded the plain way, and the rows follow."""
    _world(seed, oddness, images=images, eager=False, tier="strict", on_poison="quarantine")


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    oddness=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    tier=st.sampled_from(["none", "once", "order", "strict"]),
    on_poison=st.sampled_from(["quarantine", "skip", "halt"]),
    session_count=st.sampled_from([20, 100, 1_000]),
    headless_since=st.sampled_from([-1, 40]),
    distance_ms=st.sampled_from([0, 500]),
    eager=st.booleans(),
)
def test_many_short_sessions_are_the_same(
    seed: int,
    oddness: float,
    tier: str,
    on_poison: OnPoison,
    session_count: int,
    headless_since: int,
    distance_ms: int,
    eager: bool,
) -> None:
    """Sessions of few messages: begun by a snapshot in compiled code, stored, loaded many at once, in
    doubt after a loss, and measured.
    """
    _world(
        seed,
        oddness,
        eager=eager,
        tier=tier,
        on_poison=on_poison,
        session_count=session_count,
        headless_since=headless_since,
        limits=Limits(distance_ms=distance_ms),
    )


def test_a_session_for_each_row_is_folded_in_bulk() -> None:
    """As change capture has it: each key is a session, which begins by a snapshot of one row. Neither
    its beginning nor its messages are folded one by one, and stored sessions are loaded at once.
    """
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    snapshot = '{"type":"snapshot","seq":1,"rows":[{"id":"%d","n":1,"x":1.5}]}'
    update = '{"type":"update","seq":%d,"id":"%d","n":7}'
    begun = [(b"k%d" % key, (snapshot % key).encode(), 1) for key in range(1_000)]
    updated = [(b"k%d" % key, (update % (2, key)).encode(), 2) for key in range(1_000)]
    later = [(b"k%d" % key, (update % (3, key)).encode(), 3) for key in range(0, 1_000, 2)]
    compiled = assert_twins_agree(
        create_twins(table, eager=False, tier="strict", on_poison="halt"),
        [[begun, updated], [later]],
    )
    assert compiled.compiled_record_count == 2_500


def test_a_snapshot_that_is_not_usual_is_folded_as_before() -> None:
    """A row twice, a row without its key, rows that are no list: nothing of it stays in the arena."""
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    rows = [
        '[{"id":"a"},{"id":"b"},{"id":"a"}]',
        '[{"n":1}]',
        "{}",
        "[]",
        "null",
        '[{"id":"a","id":"b"}]',
        '[{"id":"\\u0061","n":1}]',
        '[ {"id" : "a" , "x":0.30000000000000004, "type":"no", "more":[{"id":1}]} , {"id":"b"} ]',
        "[{}]",
        '[{"id":"a"},]',
        "[1]",
        '[{"id":null}]',
        '[{"id":"a","n":1.5}]',
    ]
    begun = []
    for number, text in enumerate(rows):
        key = b"k%d" % number
        begun.append((key, b'{"type":"snapshot","seq":1,"rows":%s}' % text.encode(), 1))
        begun.append((key, b'{"type":"update","seq":2,"id":"a","n":5}', 1))
    begun.append((b"k", b'{"type":"snapshot","seq":1}', 1))
    for tier in ("none", "strict"):
        twins = create_twins(table, tier=tier, on_poison="quarantine")
        assert assert_twins_agree(twins, [[begun], [begun[1::2]]]).compiled_record_count > 0


def test_before_images_and_new_keys_go_through_the_compiled_rows() -> None:
    """The comparison means something: rows in the arena get new keys, and false images are found
    between records of compiled code.
    """
    compiled = _world(
        11, 0.1, images=0.3, eager=True, tier="strict", on_poison="quarantine", key=["id"]
    )
    rows = compiled.outcome()["rows"]
    assert compiled.compiled_record_count > 0.3 * len(rows) > 10
    moved = [row for row in rows if row["op"] == "insert" and row["id"].startswith("moved-")]
    assert moved
    causes = [finding.cause for report in compiled.reports for finding in _findings_of(report)]
    assert any(cause.startswith("before-image differs") for cause in causes)


def _findings_of(report: list[Any]) -> list[Any]:
    """The findings of the report of a task; the report of a batch has none."""
    is_of_task = len(report) > 2
    findings: list[Any] = report[0] if is_of_task else []
    return findings


def test_usual_messages_are_folded_in_bulk() -> None:
    """The comparison means something: with nothing odd nearly all records are made in bulk."""
    made = _world(7, 0.0, eager=True, tier="none", on_poison="skip")
    records = sum(batch.num_rows for batch in made.sheet.batches)
    assert made.compiled_record_count > 0.4 * records > 20


@pytest.mark.full
@pytest.mark.parametrize("block", range(30))
def test_both_folds_give_the_same_on_many_seeds(block: int) -> None:
    """The same on many more worlds."""
    for seed in range(100 * block, 100 * block + 100):
        chance = random.Random(seed)
        tier = chance.choice(["none", "once", "order", "strict"])
        on_poison = chance.choice(["quarantine", "skip", "halt"])
        _world(
            seed,
            chance.choice([0.0, 0.02, 0.1, 0.5]),
            eager=chance.random() < 0.7,
            tier=tier,
            on_poison=on_poison,
            images=chance.choice([0.0, 0.05, 0.8]),
        )


def test_text_that_nobody_needs_any_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose text changes for ever does not fill the memory, and stays right."""
    monkeypatch.setattr(machine, "HEAP_REPACK_BYTES", 2000)
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    begin = b'{"type":"snapshot","seq":1,"rows":[{"id":"a"},{"id":"b"}]}'
    line = '{"type":"update","seq":%d,"id":"%s","t":"%s"}'
    rest = [(line % (i, "ab"[i % 2], f"{i:050d}")).encode() for i in range(2, 1002)]
    sent = [(b"s", value, 1) for value in (begin, *rest)]
    batches = [sent[i : i + 50] for i in range(0, len(sent), 50)]
    twins = create_twins(table, tier="strict", on_poison="quarantine")
    runner: Any = twins[1].fold.runner
    assert assert_twins_agree(twins, [batches]).compiled_record_count == 1002
    assert len(runner.arena.heap) < 30_000


def test_state_that_only_the_plain_machine_reads_is_folded_in_bulk_then() -> None:
    """State bytes that only the plain machine can read are read by it, with the same outcome. Then the
    rows are in the arena, and only the first message is folded by itself.
    """
    table = {"key": ["id"], "columns": {"id": "string", "x": "float64"}, "sequence": "seq"}
    twins = create_twins(table, tier="strict", on_poison="quarantine")
    for twin in twins:  # a whole number in a column of floats
        saved = msgspec.msgpack.encode([["a", 1]])
        twin.saved["s"] = Session(
            state_bytes=saved, state_version=1, sequence=1, first_offset=0, last_offset=0
        )
    sent = [
        (b"s", b'{"type":"update","seq":%d,"id":"a","x":%d.5}' % (i, i), 1) for i in range(2, 30)
    ]
    assert assert_twins_agree(twins, [[sent]]).compiled_record_count == len(sent) - 1


def test_in_bulk_is_not_message_by_message() -> None:
    """In bulk a stretch of 3,000 messages takes far fewer calls than messages; the plain way takes
    several for each.
    """
    table = {"key": ["id"], "columns": COLUMNS, "sequence": "seq"}
    begin = b'{"type":"snapshot","seq":1,"rows":[{"id":"a"},{"id":"b"}]}'
    line = '{"type":"update","seq":%d,"id":"%s","n":7,"x":1.5,"t":"some text","other":"%s"}'
    sent = [
        (b"s", begin, 1),
        *((b"s", (line % (i, "ab"[i % 2], "x" * 80)).encode(), 1) for i in range(2, 3_001)),
    ]
    messages = to_record_batch(sent, 0)
    for twin in create_twins(table, tier="strict", on_poison="halt"):
        twin.take(messages)  # compiled code is loaded by its first call
    plain, bulk = create_twins(table, tier="strict", on_poison="halt")
    plain_calls = count_calls(lambda: plain.take(messages))
    bulk_calls = count_calls_by_function(lambda: bulk.take(messages))
    assert (len(sent), bulk.compiled_record_count) == (3_000, 3_001)
    assert plain_calls > 3 * len(sent)
    assert bulk_calls.total() < len(sent) / 3, f"most often: {bulk_calls.most_common(5)}"


def test_rows_that_contradict_most_messages_are_plain() -> None:
    """What looked usual and was not costs more in bulk: such a session goes on the plain way, with
    the same outcome.
    """
    table = {"key": ["id"], "columns": {"id": "string", "n": "int64"}, "lenient": True}
    begin = [(b"s", b'{"type":"snapshot","rows":[{"id":"a"}]}', 1)]
    odd = [(b"s", b'{"type":"insert","id":"a","n":%d}' % i, 1) for i in range(40)]
    good = [(b"s", b'{"type":"update","id":"a","n":%d}' % i, 1) for i in range(40)]
    twins = create_twins(table, eager=False, tier="none", on_poison="skip")
    assert (
        assert_twins_agree(twins, [[[*begin, *good], odd, good], [good]]).compiled_record_count
        == 1 + 40 + 40
    )


@pytest.mark.parametrize("rows", [3, 15, 16, 300, 66_000])
@pytest.mark.parametrize("size", [1, 31, 32, 255, 256, 70_000])
def test_tables_and_texts_of_any_size_come_back_from_bytes(
    rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are saved in one, two, three or five bytes: each is read in bulk, and gives what was
    saved.
    """
    # All of these tables are one value here, also the largest.
    monkeypatch.setattr(TableMachine, "rows_together_max", rows)
    if rows * size > 5_000_000:
        pytest.skip("gigabytes prove no more")
    text = "x" * size
    table = {
        "key": ["id"],
        "columns": {"id": "string", "n": "int64", "t": "string"},
        "sequence": "seq",
    }
    whole = {
        "type": "snapshot",
        "seq": 1,
        "rows": [{"id": str(i), "n": i, "t": text} for i in range(rows)],
    }
    later = [
        (
            b"s",
            b'{"type":"update","seq":%d,"id":"%d","n":%d}' % (i, i % rows, 1_000_003 ** (i % 3)),
            1,
        )
        for i in range(2, 60)
    ]
    twins = create_twins(table, tier="strict", on_poison="halt")
    began = [(b"s", msgspec.json.encode(whole), 1)]
    assert (
        assert_twins_agree(twins, [[began], [later], [began]]).compiled_record_count
        >= len(later) - 1
    )


@pytest.mark.parametrize("rows", [1, 20])
def test_columns_that_are_added_between_two_tasks_are_the_same_for_both(rows: int) -> None:
    """Rows of before are saved with fewer values: the compiled machine takes them into its arena all the
    same, with null where there is none.
    """
    few = {"key": ["id"], "columns": {"id": "string", "n": "int64"}, "sequence": "seq"}
    wide = {**few, "columns": {"id": "string", "n": "int64", "t": "string", "x": "float64"}}
    snapshot = {
        "type": "snapshot",
        "seq": 1,
        "rows": [{"id": str(i), "n": i} for i in range(rows)],
    }
    began = [(b"s", msgspec.json.encode(snapshot), 1)]
    twins = create_twins(few, tier="strict", on_poison="halt")
    assert_twins_agree(twins, [[began]])
    later = []
    for sequence in range(2, 40):
        text = "" if sequence % 3 else f',"t":"t{sequence}","x":{sequence}.5'
        value = f'{{"type":"update","seq":{sequence},"id":"{sequence % rows}","n":7{text}}}'
        later.append((b"s", value.encode(), 1))
    for twin in twins:
        twin.table = wide
        twin.sheet.batches.clear()  # records of before have fewer columns
        twin.begin()
    # Only the first message is folded by itself, which loads the rows.
    compiled = assert_twins_agree(twins, [[later[:4], later[4:]]])
    assert compiled.compiled_record_count == rows + len(later) - 1
    assert not compiled.reports[-1][0]  # no findings
