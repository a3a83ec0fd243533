"""The fold's laws: slicing never changes output, and records folded again give the state."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.findings import OnPoison, Tier
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts, Session
from seriatim.engine.table import TableMachine

P = Partition("a", 0)
COLUMNS = {"id": "string", "v": "int64"}
Message = tuple[bytes | None, bytes | None]


def machine(**more: Any) -> TableMachine:
    """Rows (id, v)."""
    return TableMachine(key=["id"], columns=COLUMNS, before=False, **more)


class Folder:
    """Folds messages in slices; between them the sessions go through bytes."""

    def __init__(
        self, runner: Any, tier: Tier = "strict", on_poison: OnPoison = "quarantine"
    ) -> None:
        self.runner, self.tier, self.on_poison = runner, tier, on_poison
        self.saved: dict[str, Session] = {}
        self.records: list[tuple[Any, ...]] = []
        self.kept: list[tuple[int, str, str]] = []
        self.findings: list[Any] = []
        self.totals = Counts()
        self.at = 0
        self.halted = False

    def slice(self, messages: list[Message], cuts: list[int] | None = None) -> None:
        """One slice, its messages in stretches cut as said."""
        fold = Fold(P, self.runner, self.tier, self.on_poison, self._load)
        start = self.at
        edges = sorted({0, len(messages), *(cuts or [])})
        for a, b in itertools.pairwise(edges):
            if not self.halted:
                self._stretch(fold, start + a, messages[a:b])
        for name, session in fold.touched_sessions().items():
            self.saved[name] = replace(session, state=None, is_active=False, is_touched=False)
        self._count(fold.counts)
        self.findings += fold.tally.findings

    def _load(self, names: list[str]) -> dict[str, Session]:
        return {name: replace(self.saved[name]) for name in names if name in self.saved}

    def _stretch(self, fold: Fold, start: int, messages: list[Message]) -> None:
        keys, values = [key for key, _ in messages], [value for _, value in messages]
        folded = fold.fold_batch(
            MessageBatch(start, [start + i for i in range(len(messages))], keys, values)
        )
        whole = zip(
            folded.positions,
            folded.indexes,
            folded.sessions,
            folded.sequences,
            folded.rows,
            strict=True,
        )
        self.records += [
            (start + p, i, session, sequence, *row) for p, i, session, sequence, row in whole
        ]
        self.kept += [
            (start + kept.position, kept.session, kept.finding)
            for kept in folded.quarantined_messages
        ]
        self.at = start + folded.consumed_messages
        self.halted = fold.halt is not None

    def _count(self, counts: Counts) -> None:
        for name in ("messages", "records", "headless", "snapshots", "quarantined", "released"):
            setattr(self.totals, name, getattr(self.totals, name) + getattr(counts, name))
        for kind, number in counts.findings.items():
            self.totals.findings[kind] = self.totals.findings.get(kind, 0) + number

    def outcome(self) -> tuple[Any, ...]:
        """All that must not depend on slicing."""
        return (
            self.records,
            self.saved,
            self.kept,
            self.findings,
            self.totals,
            self.at,
            self.halted,
        )


def encode_message(
    kind: str, session: str, key: str, v: int, seq: int | None, rows: list[str]
) -> Message:
    """A message as bytes; some of them are poison, some have no key."""
    if kind == "poison":
        return session.encode(), b'{"type":"insert"'
    if kind == "nobody":
        return None, b'{"type":"snapshot","rows":[]}'
    body: dict[str, Any] = {"type": kind} if seq is None else {"type": kind, "seq": seq}
    if kind == "snapshot":
        body["rows"] = [{"id": one, "v": v} for one in rows]
    else:
        body |= {"id": key, "v": v}
    return session.encode(), json.dumps(body).encode()


@st.composite
def lists_of_messages(draw: Any) -> tuple[bool, list[Message]]:
    """Messages of two sessions; mostly good ones would hide what the odd ones do, so all are drawn
    alike.
    """
    sequenced = draw(st.booleans())
    kinds = [
        "snapshot",
        "snapshot",
        "insert",
        "update",
        "update",
        "delete",
        "poison",
        *(["nobody"] * draw(st.booleans())),
    ]
    made, numbers = [], {"s": 0, "t": 0}
    for _ in range(draw(st.integers(0, 25))):
        session = draw(st.sampled_from("st"))
        numbers[session] += draw(st.sampled_from([1, 1, 1, 1, 2, 0, -1]))
        made.append(
            encode_message(
                draw(st.sampled_from(kinds)),
                session,
                draw(st.sampled_from("abc")),
                draw(st.integers(0, 9)),
                numbers[session] if sequenced else None,
                draw(st.lists(st.sampled_from("abc"), max_size=3)),
            )
        )
    return sequenced, made


tiers: Any = st.sampled_from(["strict", "none"])
poisons: Any = st.sampled_from(["quarantine", "halt", "skip"])
edges_drawn = st.lists(st.integers(0, 25), max_size=5)


@given(lists_of_messages(), tiers, poisons, edges_drawn, edges_drawn)
def test_folding_in_any_slicing_gives_the_same(
    drawn: tuple[bool, list[Message]],
    tier: Tier,
    on_poison: OnPoison,
    slices: list[int],
    cuts: list[int],
) -> None:
    """Records, sessions, findings and counts: wherever slices end and stretches are cut."""
    sequenced, messages = drawn
    sequence = "seq" if sequenced else None
    lenient = tier == "none"
    once = Folder(machine(sequence=sequence, lenient=lenient), tier, on_poison)
    once.slice(messages)
    many = Folder(machine(sequence=sequence, lenient=lenient), tier, on_poison)
    edges = sorted({0, len(messages), *(edge for edge in slices if edge < len(messages))})
    for a, b in itertools.pairwise(edges):
        if not many.halted:
            many.slice(messages[a:b], [cut - a for cut in cuts if a < cut < b])
    assert many.outcome() == once.outcome()


@given(lists_of_messages(), tiers, poisons)
def test_records_folded_again_give_the_state(
    drawn: tuple[bool, list[Message]], tier: Tier, on_poison: OnPoison
) -> None:
    """For every session, in quarantine or not."""
    sequenced, messages = drawn
    made = machine(sequence="seq" if sequenced else None, lenient=tier == "none")
    folder = Folder(made, tier, on_poison)
    folder.slice(messages)
    rows: dict[str, dict[str, Any]] = {}
    for _, _, session, _, op, key, v in folder.records:
        table = rows.setdefault(session, {})
        if op == "delete":
            del table[key]
        else:
            table[key] = (key, v)
    for name, session in folder.saved.items():
        state = (
            made.load(session.state_bytes, session.state_version)
            if session.state_bytes is not None
            else {}
        )
        assert rows.get(name, {}) == state


def test_places_of_records_are_unique_and_rise() -> None:
    """(offset, index) counts the records of one message from 0."""
    folder = Folder(machine())
    folder.slice(
        [
            encode_message("snapshot", "s", "", 1, None, ["a", "b"]),
            encode_message("update", "s", "a", 2, None, []),
        ]
    )
    folder.slice([encode_message("snapshot", "s", "", 1, None, ["c"])])
    assert [record[:2] for record in folder.records] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_only_touched_sessions_are_saved() -> None:
    """A slice writes what it changed, however many sessions there are."""
    folder = Folder(machine())
    folder.slice([encode_message("snapshot", name, "", 1, None, ["a"]) for name in "stuvw"])
    folder.saved = dict(folder.saved)
    fold = Fold(P, machine(), "strict", "quarantine", folder._load)
    fold.fold_batch(
        MessageBatch(5, [9], [b"t"], [encode_message("update", "t", "a", 5, None, [])[1]])
    )
    assert list(fold.touched_sessions()) == ["t"]
    assert (
        fold.touched_sessions()["t"].last_offset,
        fold.touched_sessions()["t"].first_offset,
    ) == (5, 1)


def test_sessions_not_met_are_not_loaded() -> None:
    """State is loaded when a session is met, once."""
    asked: list[list[str]] = []

    def load(names: list[str]) -> dict[str, Session]:
        asked.append(names)
        return {}

    fold = Fold(P, machine(), "strict", "quarantine", load)
    values = [encode_message("snapshot", "s", "", 1, None, [])[1]] * 2
    fold.fold_batch(MessageBatch(0, [0, 0], [b"s", b"t"], values))
    fold.fold_batch(MessageBatch(2, [0, 0], [b"t", b"u"], values))
    assert asked == [["s", "t"], ["u"]]
