"""Findings in the fold: what each does to its session, its partition, and to nobody else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.findings import FINDINGS_REPORTED_MAX, OnPoison
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.testing import CRASH, Folded, fold_table
from tests.engine.test_fold import Folder, P, encode_message, machine


def table(messages: list[Any], **more: Any) -> Folded:
    """Fold messages of rows (id, v)."""
    return fold_table(messages, key=["id"], columns={"id": "string", "v": "int64"}, **more)


def snapshot(*keys: str, **more: Any) -> dict[str, Any]:
    """A snapshot of rows."""
    return {"type": "snapshot", "rows": [{"id": key, "v": 0} for key in keys], **more}


def update(key: str, v: int, **more: Any) -> dict[str, Any]:
    """An update of a row."""
    return {"type": "update", "id": key, "v": v, **more}


def kinds(done: Folded) -> list[tuple[str, int, str | None]]:
    """Findings in short."""
    return [(f.finding, f.offset, f.session) for f in done.findings]


def test_headless_messages_are_counted_and_are_no_finding() -> None:
    """Before a session's first snapshot its updates have no effect."""
    done = table(
        [update("a", 1), update("a", 2), CRASH, update("a", 3), snapshot("a"), update("a", 4)]
    )
    assert (done.headless, done.findings) == (3, [])
    assert [record["v"] for record in done.records] == [0, 4]


def test_a_quarantined_session_keeps_its_last_good_state() -> None:
    """Only the hurt message and what follows has no effect, until the next snapshot."""
    hurt = [snapshot("a", "b"), update("a", 1), update("z", 9), update("a", 2)]
    done = table(hurt)
    assert kinds(done) == [("precondition", 2, "session")]
    assert done.state == {"rows": [{"id": "a", "v": 1}, {"id": "b", "v": 0}]}
    again = table([*hurt, CRASH, snapshot("b", "c"), update("b", 5)])
    assert [(r["op"], r["id"]) for r in again.records[3:]] == [
        ("snapshot", "b"),
        ("snapshot", "c"),
        ("delete", "a"),
        ("update", "b"),
    ]
    assert again.state == {"rows": [{"id": "b", "v": 5}, {"id": "c", "v": 0}]}


def test_a_hurt_session_hurts_no_other() -> None:
    """Its neighbours in the partition go on."""
    good = [("t", snapshot("a")), ("t", update("a", 1))]
    alone = table(good)
    done = table([("s", snapshot()), good[0], ("s", update("z", 1)), good[1]])
    assert [r["v"] for r in done.records] == [r["v"] for r in alone.records]
    assert done.states["t"] == alone.states["t"]


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([1, 2, 3], []),
        ([7, 8, 9], []),
        ([1, 2, 4], [("sequence gap", 2)]),
        ([1, 2, 2], [("repeat", 2)]),
        ([5, 6, 5], [("repeat", 2)]),
        ([5, 6, 4], [("disorder", 2)]),
        ([1, 3, 4], [("sequence gap", 1)]),
    ],
)
def test_the_sequence_under_strict(numbers: list[int], found: list[tuple[str, int]]) -> None:
    """From the snapshot's number on, each message is the next; anything else sets the session
    aside.
    """
    first, *rest = numbers
    done = table([snapshot("a", seq=first), *(update("a", n, seq=n) for n in rest)], sequence="seq")
    assert [(f.finding, f.offset) for f in done.findings] == found
    cut = table(
        [snapshot("a", seq=first), CRASH, *(update("a", n, seq=n) for n in rest)], sequence="seq"
    )
    assert cut.rows == done.rows
    assert cut.findings == done.findings


def test_a_finding_by_sequence_says_expected_and_found() -> None:
    """The two numbers a person compares."""
    (finding,) = table([snapshot(seq=4), update("a", 1, seq=7)], sequence="seq").findings
    assert (finding.expected, finding.found) == ("sequence 5", "sequence 7")


def test_a_snapshot_begins_the_sequence_anew() -> None:
    """A jump or a reset at a snapshot halts nothing; a jump is told once, as a warning."""
    done = table(
        [
            snapshot("a", seq=1),
            snapshot("a", seq=90),
            update("a", 1, seq=91),
            snapshot("a", seq=3),
            update("a", 2, seq=4),
        ],
        sequence="seq",
    )
    assert [(f.finding, f.offset, f.level) for f in done.findings] == [
        ("sequence gap", 1, "warning")
    ]
    assert "closed: 88 messages" in done.findings[0].cause
    assert [r["sequence"] for r in done.rows] == [1, 90, 91, 3, 4]


def test_without_a_tier_sequence_and_contradictions_are_counted() -> None:
    """Every message is applied as well as it can be, and nothing is set aside."""
    numbers = [
        (1, "snapshot"),
        (3, "update"),
        (3, "update"),
        (2, "update"),
        (4, "delete"),
        (5, "delete"),
        (0, "insert"),
    ]
    folder = Folder(machine(sequence="seq", lenient=True), "none")
    folder.slice([encode_message(kind, "s", "a", seq, seq, ["a"]) for seq, kind in numbers])
    assert folder.totals.findings == {
        "sequence gap": 1,
        "repeat": 1,
        "disorder": 2,
        "precondition": 1,
    }
    assert not (folder.findings)
    assert not (folder.kept)
    assert [record[4] for record in folder.records] == [
        "snapshot",
        "update",
        "update",
        "update",
        "delete",
        "insert",
    ]
    assert folder.saved["s"].sequence == 5


POISONS: dict[str, tuple[bytes | None, bytes | None]] = {
    "not JSON": (b"s", b"hello"),
    "half a message": (b"s", b'{"type":"update","id":"a"'),
    "two messages": (b"s", b'{"type":"delete","id":"a"}{"type":"delete","id":"a"}'),
    "wrong schema": (b"s", b'{"type":"update","v":1}'),
    "wrong type": (b"s", b'{"type":"update","id":"a","v":"many"}'),
    "unknown kind": (b"s", b'{"type":"upsert","id":"a"}'),
    "null value": (b"s", None),
    "0 bytes": (b"s", b""),
    "10 MB": (b"s", b'{"type":"update","id":"' + b"x" * 10_000_000),
    "deep nesting": (b"s", b'{"type":"update","id":"a","x":' + b"[" * 200_000),
    "NaN": (b"s", b'{"type":"update","id":"a","v":NaN}'),
    "bad UTF-8": (b"s", b'{"type":"update","id":"a","x":"\xc3("}'),
}
NOBODYS: dict[str, tuple[bytes | None, bytes | None]] = {
    "null key": (None, b'{"type":"update","id":"a","v":1}'),
    "bad UTF-8 in the key": (b"\xff", b'{"type":"update","id":"a","v":1}'),
}
AROUND = [
    encode_message("snapshot", "s", "", 1, None, ["a"]),
    encode_message("snapshot", "t", "", 1, None, ["a"]),
]
AFTER = [
    encode_message("update", "s", "a", 2, None, []),
    encode_message("update", "t", "a", 2, None, []),
]


def around(poison: tuple[bytes | None, bytes | None], on_poison: OnPoison) -> Folder:
    """Two sessions; poison for one of them in the middle, at offset 2."""
    folder = Folder(machine(), "strict", on_poison)
    folder.slice([*AROUND, poison, *AFTER])
    return folder


@pytest.mark.parametrize("kind", POISONS)
def test_poison_sets_its_session_aside(kind: str) -> None:
    """Named by its offset; kept with what follows; everybody else goes on."""
    folder = around(POISONS[kind], "quarantine")
    (finding,) = folder.findings
    assert (finding.finding, finding.offset, finding.session, finding.level) == (
        "poison",
        2,
        "s",
        "error",
    )
    assert len(finding.render("x").splitlines()) < 12
    assert [record[:3] for record in folder.records] == [(0, 0, "s"), (1, 0, "t"), (4, 0, "t")]
    assert folder.kept == [(2, "s", "poison"), (3, "s", "poison")]
    assert (folder.saved["s"].finding, folder.saved["s"].finding_offset) == ("poison", 2)
    folder.slice([encode_message("snapshot", "s", "", 5, None, ["b"])])
    assert [record[4:6] for record in folder.records[3:]] == [("snapshot", "b"), ("delete", "a")]
    assert folder.saved["s"].finding is None
    assert (folder.totals.quarantined, folder.totals.released) == (1, 1)


@pytest.mark.parametrize("kind", {**POISONS, **NOBODYS})
def test_poison_may_halt_its_partition(kind: str) -> None:
    """The good prefix stays, nothing after it is folded, and the finding hurts the partition."""
    folder = around({**POISONS, **NOBODYS}[kind], "halt")
    assert (folder.halted, folder.at) == (True, 2)
    (finding,) = folder.findings
    assert (finding.finding, finding.offset, finding.scope) == ("poison", 2, "partition")
    assert [record[0] for record in folder.records] == [0, 1]
    assert folder.totals.messages == 2


@pytest.mark.parametrize("kind", {**POISONS, **NOBODYS})
def test_poison_may_be_skipped(kind: str) -> None:
    """Passed over with a warning; its session goes on."""
    folder = around({**POISONS, **NOBODYS}[kind], "skip")
    assert [(f.finding, f.offset, f.level) for f in folder.findings] == [("poison", 2, "warning")]
    assert [record[0] for record in folder.records] == [0, 1, 3, 4]
    assert not folder.kept


@pytest.mark.parametrize("kind", NOBODYS)
def test_poison_of_nobody_halts_its_partition(kind: str) -> None:
    """Whose session it is cannot be known, so nobody's may go on."""
    folder = around(NOBODYS[kind], "quarantine")
    assert (folder.halted, folder.at) == (True, 2)
    assert "no readable key" in folder.findings[0].cause


def test_poison_before_a_sessions_first_snapshot() -> None:
    """The session waits from there, without any state, and begins by its snapshot."""
    done = table([b"?", update("a", 1), CRASH, update("a", 2), snapshot("a")])
    assert kinds(done) == [("poison", 0, "session")]
    assert done.headless == 0
    assert done.state == {"rows": [{"id": "a", "v": 0}]}


def test_findings_beyond_a_bound_are_only_counted() -> None:
    """A producer gone mad does not fill the ledger."""
    folder = Folder(machine())
    folder.slice([(f"s{n}".encode(), b"?") for n in range(FINDINGS_REPORTED_MAX + 50)])
    assert len(folder.findings) == FINDINGS_REPORTED_MAX
    assert folder.totals.findings == {"poison": FINDINGS_REPORTED_MAX + 50}
    assert len(folder.kept) == FINDINGS_REPORTED_MAX + 50


def test_a_halt_is_told_whatever_was_told_before() -> None:
    """The bound never hides why a partition stopped."""
    folder = Folder(machine())
    folder.slice([*((f"s{n}".encode(), b"?") for n in range(FINDINGS_REPORTED_MAX)), (None, b"?")])
    assert folder.findings[-1].scope == "partition"


def test_the_session_may_be_a_field() -> None:
    """Then the key says nothing, and unreadable messages belong to nobody."""
    fold = Fold(
        P, machine(session="who"), "strict", "quarantine", lambda _: {}, has_session_field=True
    )
    values = [
        b'{"type":"snapshot","who":"me","rows":[]}',
        b'{"type":"snapshot","who":7,"rows":[]}',
        b"?",
    ]
    folded = fold.fold_batch(MessageBatch(0, [0] * 3, [b"x", None, b"x"], values))
    assert list(fold.touched_sessions()) == ["me", "7"]
    assert (folded.consumed_messages, fold.halt is not None) == (2, True)


def test_skip_and_strict_exclude_each_other() -> None:
    """The kit refuses what a stream file would be refused for."""
    with pytest.raises(ConfigError, match="lose messages"):
        table([], on_poison="skip")


@pytest.mark.parametrize("tier", ["once", "order"])
def test_a_new_life_may_begin_as_the_old_one_did(tier: Any) -> None:
    """An empty table at sequence 1 is how many begin: what follows it is not taken for repeats."""
    rows = [snapshot(seq=1), *_inserts("ab"), snapshot(seq=1), *_inserts("cde")]
    done = table(rows, sequence="seq", tier=tier)
    assert [row["id"] for row in done.states["session"]["rows"]] == ["c", "d", "e"]


@pytest.mark.parametrize("tier", ["once", "order"])
def test_a_snapshot_sent_twice_is_a_repeat(tier: Any) -> None:
    """As long as nothing followed it."""
    done = table(
        [snapshot("a", seq=1), snapshot("a", seq=1), update("a", 5, seq=2)],
        sequence="seq",
        tier=tier,
    )
    assert [row["op"] for row in done.rows] == ["snapshot", "update"]


def test_a_snapshot_that_was_passed_over_and_comes_late() -> None:
    """Under order the older is dropped: the state is that of the newer messages."""
    rows = [
        snapshot("a", seq=1),
        update("a", 2, seq=2),
        update("a", 4, seq=4),
        snapshot("a", seq=3),
    ]
    done = table(rows, sequence="seq", tier="order")
    assert [row["v"] for row in done.states["session"]["rows"]] == [4]


def _inserts(keys: str) -> list[dict[str, Any]]:
    return [{"type": "insert", "id": key, "v": 1, "seq": seq} for seq, key in enumerate(keys, 2)]


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 3]])
def test_a_closed_gap_begins_behind_the_last_message_that_counted(cuts: list[int]) -> None:
    """Poison that was passed over is none: what is missing may have been before it. However it is
    sliced.
    """
    sent = [
        encode_message("snapshot", "s", "", 1, 1, ["a"]),
        encode_message("update", "s", "a", 2, 2, []),
        (b"s", b"?"),
        encode_message("snapshot", "s", "", 9, 9, ["a"]),
    ]
    marks: list[tuple[int, int]] = []
    saved: dict[str, Session] = {}
    for start, end in pairwise([0, *cuts, len(sent)]):
        fold = Fold(
            P,
            machine(sequence="seq"),
            "none",
            "skip",
            lambda names: {n: saved[n] for n in names if n in saved},
        )
        keys, values = zip(*sent[start:end], strict=True)
        fold.fold_batch(MessageBatch(start, [0] * (end - start), keys, values))
        for name, session in fold.touched_sessions().items():
            saved[name] = replace(session, state=None, is_active=False, is_touched=False)
        marks += [(mark.offset, mark.until) for mark in fold.tally.marks]
    assert marks == [(2, 3)]
