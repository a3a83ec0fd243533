"""The tier table (`TIER_ACTIONS`), cell by cell: what each tier does about each finding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.engine.findings import TIER_ACTIONS, TIERS, GapMark, Tier
from seriatim.engine.machine import UserMachine
from seriatim.engine.offsets import Partition
from seriatim.operations.run import RunOutcome
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, A1, create_stream
from tests.operations.raising_machine import Adder

CELLS = [
    pytest.param(kind, tier, id=f"{kind} under {tier}: {doing}")
    for kind, row in TIER_ACTIONS.items()
    for tier, doing in row.items()
]


def made(tier: Tier, **more: Any) -> MemoryStream:
    """Topic in-a with one partition and one session, its snapshot has sequence 1 and rows a, b."""
    one = create_stream(tier=tier, sequence="seq", **more)
    one.kafka.create("in-a", 1)
    tell(one, 1, rows=["a", "b"])
    return one


def tell(
    one: MemoryStream, seq: int, v: int = 0, *, id: str = "a", session: str = "s", **more: Any
) -> None:
    """One message: a snapshot if rows are given, else an update."""
    part = more.pop("partition", A0)
    rows = more.pop("rows", None)
    body = {"type": "update", "id": id, "v": v, **more}
    if rows is not None:
        body = {"type": "snapshot", "rows": [{"id": row, "v": 0} for row in rows]}
    one.kafka.produce(
        part.topic, session, json.dumps({**body, "seq": seq}).encode(), partition=part.number
    )


def counted(one: MemoryStream, part: Partition = A0) -> dict[str, int]:
    """Findings and holes, as the ledger counts them."""
    return one.accounts()[part].counts


def state(one: MemoryStream, session: str = "s", part: Partition = A0) -> dict[str, int]:
    """A session's rows."""
    found = one.sessions(part)[session]
    return {
        row[0]: row[1]
        for row in one.machine().load(found.state_bytes or b"", found.state_version).values()
    }


def marks(one: MemoryStream) -> list[GapMark]:
    """All marks, in order."""
    entries = [commit.entry for commit in one.ledger.commits if commit.entry is not None]
    return [mark for entry in entries for change in entry.changes for mark in change.marks]


def found(outcome: RunOutcome) -> list[tuple[str, int]]:
    """Findings that fail a run: kind and offset."""
    return [(f.finding, f.offset) for f in outcome.findings if f.level == "error"]


def quarantined(one: MemoryStream, session: str = "s", part: Partition = A0) -> str | None:
    """Why a session is in quarantine."""
    return one.sessions(part)[session].finding


def meets_recreated(tier: Tier) -> None:
    """The topic is deleted and made again between two runs: everybody halts."""
    one = made(tier)
    one.run()
    one.kafka.delete("in-a")
    one.kafka.create("in-a", 1)
    tell(one, 1, rows=["z"])
    assert found(one.run()) == [("re-created", 1)]
    assert one.accounts()[A0].halt is not None


def meets_truncated(tier: Tier) -> None:
    """The log ends below the frontier: everybody halts."""
    one = made(tier)
    tell(one, 2, 5)
    one.run()
    one.kafka.truncate(A0, 1)
    assert found(one.run()) == [("truncated", 2)]
    assert one.accounts()[A0].halt is not None


def meets_gap(tier: Tier) -> None:
    """A message vanishes from the log: the partition halts before it, or goes on and the hole is
    counted.
    """
    one = made(tier)
    for seq in (2, 3, 4):
        tell(one, seq, seq)
    one.reader.lost_offsets.add((A0, 2))
    outcome = one.run()
    if TIER_ACTIONS["gap"][tier] == "halt":
        assert found(outcome) == [("gap", 2)]
        assert one.accounts()[A0].frontier == 2
    else:
        assert not found(outcome)
        assert (one.accounts()[A0].frontier, counted(one)["hole: unexplained"]) == (4, 1)
        assert GapMark(finding="gap", offset=2, until=3, cause=marks(one)[0].cause) == marks(one)[0]


def meets_expired(tier: Tier) -> None:
    """Kafka dropped messages before they were read: halts, or goes on behind them and counts them."""
    one = made(tier)
    one.run()
    for seq in (2, 3, 4):
        tell(one, seq, seq)
    one.kafka.delete_records(A0, 3)
    outcome = one.run()
    if TIER_ACTIONS["expired"][tier] == "halt":
        assert found(outcome) == [("expired", 1)]
        assert one.accounts()[A0].frontier == 1
    else:
        assert not found(outcome)
        assert (one.accounts()[A0].frontier, counted(one)["hole: expired"]) == (4, 2)


def meets_sequence_gap(tier: Tier) -> None:
    """Sequence 2 never comes."""
    one = made(tier, window_messages=2)
    for seq in (3, 4):
        tell(one, seq, seq)
    outcome = one.run()
    doing = TIER_ACTIONS["sequence gap"][tier]
    if doing == "halt":
        assert found(outcome) == [("sequence gap", 1)]
        assert (quarantined(one), state(one)) == ("sequence gap", {"a": 0, "b": 0})
    elif doing == "count":
        assert (found(outcome), counted(one)) == ([], {"sequence gap": 1})
        assert state(one) == {"a": 4, "b": 0}
        assert [(mark.session, mark.offset, mark.closed_by) for mark in marks(one)] == [
            ("s", 1, "")
        ]
    else:
        assert (found(outcome), counted(one), state(one)) == ([], {}, {"a": 0, "b": 0})  # they wait
        assert [held.sequence for held in one.sessions(A0)["s"].waiting_messages] == [3, 4]
        tell(one, 5, 5)
        outcome = one.run()
        assert (found(outcome), counted(one), state(one)) == (
            [],
            {"sequence gap": 1},
            {"a": 5, "b": 0},
        )


def meets_repeat(tier: Tier) -> None:
    """Sequence 2 comes twice."""
    one = made(tier)
    for seq, v in ((2, 2), (2, 99), (3, 3)):
        tell(one, seq, v)
    outcome = one.run()
    values = [row["v"] for row in one.rows() if row["op"] == "update"]
    doing = TIER_ACTIONS["repeat"][tier]
    if doing == "halt":
        assert found(outcome) == [("repeat", 2)]
        assert quarantined(one) == "repeat"
    else:
        assert (found(outcome), counted(one)) == ([], {"repeat": 1})
        assert values == ([2, 3] if doing == "drop" else [2, 99, 3])


def meets_disorder(tier: Tier) -> None:
    """A message from before the session's snapshot comes after it; and one that was passed over
    comes late.
    """
    one = made(tier, window_messages=2)
    tell(one, 10, rows=["a"])
    tell(one, 9, 9)
    outcome = one.run()
    values = [row["v"] for row in one.rows() if row["op"] == "update"]
    doing = TIER_ACTIONS["disorder"][tier]
    if doing == "halt":
        assert found(outcome) == [("disorder", 2)]
        assert quarantined(one) == "disorder"
    elif doing == "heal":
        assert (found(outcome), counted(one), values) == ([], {}, [])  # 10 waits for 2 to 9
    else:
        assert not found(outcome)
        assert counted(one)["disorder"] == 1
        assert values == ([9] if doing == "count" else [])


def meets_moved_session(tier: Tier) -> None:
    """The session goes on in another partition, without a snapshot."""
    one = made(tier)
    tell(one, 2, 2)
    one.run()
    one.kafka.add_partitions("in-a", 2)
    tell(one, 3, 3, partition=A1)
    tell(one, 4, 4, partition=A1)
    for seq in range(1, 4):
        tell(
            one, seq, rows=["x"] if seq == 1 else None, id="x", session="begins here", partition=A1
        )
    outcome = one.run()
    if TIER_ACTIONS["moved session"][tier] == "halt":
        assert found(outcome) == [("moved session", 0)]
        assert outcome.findings[0].session == "s"
        assert "lives in in-a/0" in outcome.findings[0].cause
        assert quarantined(one, "s", A1) == "moved session"
    else:
        assert not found(outcome)
        assert counted(one, A1) == {"moved session": 2}
    assert state(one, "begins here", A1) == {"x": 0}


def meets_precondition(tier: Tier) -> None:
    """An update of a row that is not there."""
    one = made(tier)
    tell(one, 2, 2, id="nobody")
    tell(one, 3, 3)
    outcome = one.run()
    if TIER_ACTIONS["precondition"][tier] == "halt":
        assert found(outcome) == [("precondition", 1)]
        assert (quarantined(one), state(one)) == ("precondition", {"a": 0, "b": 0})
    else:
        assert (found(outcome), counted(one)) == ([], {"precondition": 1})
        assert state(one) == {"a": 3, "b": 0, "nobody": 2}
        assert [(mark.session, mark.finding, mark.offset) for mark in marks(one)] == [
            ("s", "precondition", 1)
        ]


def meets_raised(tier: Tier) -> None:
    """The machine's own exception is never just counted."""
    stream = Stream(
        name="s",
        topics="in-.*",
        machine="angry:Adder",
        tier=tier,
        sequence="seq",
        output=OutputSettings(path="memory"),
    )
    one = MemoryStream(stream, lambda: UserMachine("angry:Adder", Adder, "seq"))
    one.kafka.create("in-a", 1)
    for seq, add in ((1, 1), (2, -1), (3, 1)):
        one.kafka.produce("in-a", "s", json.dumps({"seq": seq, "add": add}).encode(), partition=0)
    outcome = one.run()
    assert found(outcome) == [("raised", 1)]
    assert quarantined(one) == "raised"
    assert [row["total"] for row in one.rows()] == [1]


MEETS = {
    "re-created": meets_recreated,
    "truncated": meets_truncated,
    "gap": meets_gap,
    "expired": meets_expired,
    "sequence gap": meets_sequence_gap,
    "repeat": meets_repeat,
    "disorder": meets_disorder,
    "moved session": meets_moved_session,
    "precondition": meets_precondition,
    "raised": meets_raised,
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tier"), CELLS)
def test_the_tier_table(kind: str, tier: Tier) -> None:
    """One cell."""
    MEETS[kind](tier)


def test_every_finding_of_the_table_is_met() -> None:
    """No row is forgotten."""
    assert MEETS.keys() == TIER_ACTIONS.keys()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("on_poison", ["quarantine", "halt", "skip"])
def test_poison(tier: Tier, on_poison: str) -> None:
    """The stream's own rule, under every tier that may have it."""
    if (tier, on_poison) == ("strict", "skip"):
        pytest.skip("a stream file that says so is refused")
    one = made(tier, on_poison=on_poison)
    one.kafka.produce("in-a", "s", b"{", partition=0)
    tell(one, 2, 2)
    outcome = one.run()
    assert [(f.finding, f.offset) for f in outcome.findings] == [("poison", 1)]
    if on_poison == "quarantine":
        assert quarantined(one) == "poison"
    elif on_poison == "halt":
        assert one.accounts()[A0].frontier == 1
    else:
        assert state(one) == {"a": 2, "b": 0}
