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


def create_sequenced_stream(tier: Tier, **more: Any) -> MemoryStream:
    """Topic in-a with one partition and one session, its snapshot has sequence 1 and rows a, b."""
    memory_stream = create_stream(tier=tier, sequence="seq", **more)
    memory_stream.kafka.create("in-a", 1)
    send_message(memory_stream, 1, rows=["a", "b"])
    return memory_stream


def send_message(
    memory_stream: MemoryStream,
    seq: int,
    v: int = 0,
    *,
    id: str = "a",
    session: str = "s",
    **more: Any,
) -> None:
    """One message: a snapshot if rows are given, else an update."""
    part = more.pop("partition", A0)
    rows = more.pop("rows", None)
    body = {"type": "update", "id": id, "v": v, **more}
    if rows is not None:
        body = {"type": "snapshot", "rows": [{"id": row, "v": 0} for row in rows]}
    memory_stream.kafka.produce(
        part.topic, session, json.dumps({**body, "seq": seq}).encode(), partition=part.number
    )


def finding_counts(memory_stream: MemoryStream, part: Partition = A0) -> dict[str, int]:
    """Findings and holes, as the ledger counts them."""
    return memory_stream.accounts()[part].counts


def rows_of_session(
    memory_stream: MemoryStream, session: str = "s", part: Partition = A0
) -> dict[str, int]:
    """A session's rows."""
    saved_session = memory_stream.sessions(part)[session]
    return {
        row[0]: row[1]
        for row in memory_stream.machine()
        .load(saved_session.state_bytes or b"", saved_session.state_version)
        .values()
    }


def marks(memory_stream: MemoryStream) -> list[GapMark]:
    """All marks, in order."""
    entries = [commit.entry for commit in memory_stream.ledger.commits if commit.entry is not None]
    return [mark for entry in entries for change in entry.changes for mark in change.marks]


def errors_of(outcome: RunOutcome) -> list[tuple[str, int]]:
    """Findings that fail a run: kind and offset."""
    return [(f.finding, f.offset) for f in outcome.findings if f.level == "error"]


def quarantine_reason(
    memory_stream: MemoryStream, session: str = "s", part: Partition = A0
) -> str | None:
    """Why a session is in quarantine."""
    return memory_stream.sessions(part)[session].finding


def meets_recreated(tier: Tier) -> None:
    """The topic is deleted and made again between two runs: everybody halts."""
    memory_stream = create_sequenced_stream(tier)
    memory_stream.run()
    memory_stream.kafka.delete("in-a")
    memory_stream.kafka.create("in-a", 1)
    send_message(memory_stream, 1, rows=["z"])
    assert errors_of(memory_stream.run()) == [("re-created", 1)]
    assert memory_stream.accounts()[A0].halt is not None


def meets_truncated(tier: Tier) -> None:
    """The log ends below the frontier: everybody halts."""
    memory_stream = create_sequenced_stream(tier)
    send_message(memory_stream, 2, 5)
    memory_stream.run()
    memory_stream.kafka.truncate(A0, 1)
    assert errors_of(memory_stream.run()) == [("truncated", 2)]
    assert memory_stream.accounts()[A0].halt is not None


def meets_gap(tier: Tier) -> None:
    """A message vanishes from the log: the partition halts before it, or goes on and the hole is
    counted.
    """
    memory_stream = create_sequenced_stream(tier)
    for seq in (2, 3, 4):
        send_message(memory_stream, seq, seq)
    memory_stream.reader.lost_offsets.add((A0, 2))
    outcome = memory_stream.run()
    if TIER_ACTIONS["gap"][tier] == "halt":
        assert errors_of(outcome) == [("gap", 2)]
        assert memory_stream.accounts()[A0].frontier == 2
    else:
        assert not errors_of(outcome)
        assert (
            memory_stream.accounts()[A0].frontier,
            finding_counts(memory_stream)["hole: unexplained"],
        ) == (4, 1)
        assert (
            GapMark(finding="gap", offset=2, until=3, cause=marks(memory_stream)[0].cause)
            == marks(memory_stream)[0]
        )


def meets_expired(tier: Tier) -> None:
    """Kafka dropped messages before they were read: halts, or goes on behind them and counts them."""
    memory_stream = create_sequenced_stream(tier)
    memory_stream.run()
    for seq in (2, 3, 4):
        send_message(memory_stream, seq, seq)
    memory_stream.kafka.delete_records(A0, 3)
    outcome = memory_stream.run()
    if TIER_ACTIONS["expired"][tier] == "halt":
        assert errors_of(outcome) == [("expired", 1)]
        assert memory_stream.accounts()[A0].frontier == 1
    else:
        assert not errors_of(outcome)
        assert (
            memory_stream.accounts()[A0].frontier,
            finding_counts(memory_stream)["hole: expired"],
        ) == (4, 2)


def meets_sequence_gap(tier: Tier) -> None:
    """Sequence 2 never comes."""
    memory_stream = create_sequenced_stream(tier, window_messages=2)
    for seq in (3, 4):
        send_message(memory_stream, seq, seq)
    outcome = memory_stream.run()
    doing = TIER_ACTIONS["sequence gap"][tier]
    if doing == "halt":
        assert errors_of(outcome) == [("sequence gap", 1)]
        assert (quarantine_reason(memory_stream), rows_of_session(memory_stream)) == (
            "sequence gap",
            {"a": 0, "b": 0},
        )
    elif doing == "count":
        assert (errors_of(outcome), finding_counts(memory_stream)) == ([], {"sequence gap": 1})
        assert rows_of_session(memory_stream) == {"a": 4, "b": 0}
        assert [(mark.session, mark.offset, mark.closed_by) for mark in marks(memory_stream)] == [
            ("s", 1, "")
        ]
    else:
        assert (
            errors_of(outcome),
            finding_counts(memory_stream),
            rows_of_session(memory_stream),
        ) == ([], {}, {"a": 0, "b": 0})  # they wait
        assert [held.sequence for held in memory_stream.sessions(A0)["s"].waiting_messages] == [
            3,
            4,
        ]
        send_message(memory_stream, 5, 5)
        outcome = memory_stream.run()
        assert (
            errors_of(outcome),
            finding_counts(memory_stream),
            rows_of_session(memory_stream),
        ) == (
            [],
            {"sequence gap": 1},
            {"a": 5, "b": 0},
        )


def meets_repeat(tier: Tier) -> None:
    """Sequence 2 comes twice."""
    memory_stream = create_sequenced_stream(tier)
    for seq, v in ((2, 2), (2, 99), (3, 3)):
        send_message(memory_stream, seq, v)
    outcome = memory_stream.run()
    values = [row["v"] for row in memory_stream.rows() if row["op"] == "update"]
    doing = TIER_ACTIONS["repeat"][tier]
    if doing == "halt":
        assert errors_of(outcome) == [("repeat", 2)]
        assert quarantine_reason(memory_stream) == "repeat"
    else:
        assert (errors_of(outcome), finding_counts(memory_stream)) == ([], {"repeat": 1})
        assert values == ([2, 3] if doing == "drop" else [2, 99, 3])


def meets_disorder(tier: Tier) -> None:
    """A message from before the session's snapshot comes after it; and one that was passed over
    comes late.
    """
    memory_stream = create_sequenced_stream(tier, window_messages=2)
    send_message(memory_stream, 10, rows=["a"])
    send_message(memory_stream, 9, 9)
    outcome = memory_stream.run()
    values = [row["v"] for row in memory_stream.rows() if row["op"] == "update"]
    doing = TIER_ACTIONS["disorder"][tier]
    if doing == "halt":
        assert errors_of(outcome) == [("disorder", 2)]
        assert quarantine_reason(memory_stream) == "disorder"
    elif doing == "heal":
        assert (errors_of(outcome), finding_counts(memory_stream), values) == (
            [],
            {},
            [],
        )  # 10 waits for 2 to 9
    else:
        assert not errors_of(outcome)
        assert finding_counts(memory_stream)["disorder"] == 1
        assert values == ([9] if doing == "count" else [])


def meets_moved_session(tier: Tier) -> None:
    """The session goes on in another partition, without a snapshot."""
    memory_stream = create_sequenced_stream(tier)
    send_message(memory_stream, 2, 2)
    memory_stream.run()
    memory_stream.kafka.add_partitions("in-a", 2)
    send_message(memory_stream, 3, 3, partition=A1)
    send_message(memory_stream, 4, 4, partition=A1)
    for seq in range(1, 4):
        send_message(
            memory_stream,
            seq,
            rows=["x"] if seq == 1 else None,
            id="x",
            session="begins here",
            partition=A1,
        )
    outcome = memory_stream.run()
    if TIER_ACTIONS["moved session"][tier] == "halt":
        assert errors_of(outcome) == [("moved session", 0)]
        assert outcome.findings[0].session == "s"
        assert "lives in in-a/0" in outcome.findings[0].cause
        assert quarantine_reason(memory_stream, "s", A1) == "moved session"
    else:
        assert not errors_of(outcome)
        assert finding_counts(memory_stream, A1) == {"moved session": 2}
    assert rows_of_session(memory_stream, "begins here", A1) == {"x": 0}


def meets_precondition(tier: Tier) -> None:
    """An update of a row that is not there."""
    memory_stream = create_sequenced_stream(tier)
    send_message(memory_stream, 2, 2, id="nobody")
    send_message(memory_stream, 3, 3)
    outcome = memory_stream.run()
    if TIER_ACTIONS["precondition"][tier] == "halt":
        assert errors_of(outcome) == [("precondition", 1)]
        assert (quarantine_reason(memory_stream), rows_of_session(memory_stream)) == (
            "precondition",
            {"a": 0, "b": 0},
        )
    else:
        assert (errors_of(outcome), finding_counts(memory_stream)) == ([], {"precondition": 1})
        assert rows_of_session(memory_stream) == {"a": 3, "b": 0, "nobody": 2}
        assert [(mark.session, mark.finding, mark.offset) for mark in marks(memory_stream)] == [
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
    memory_stream = MemoryStream(stream, lambda: UserMachine("angry:Adder", Adder, "seq"))
    memory_stream.kafka.create("in-a", 1)
    for seq, add in ((1, 1), (2, -1), (3, 1)):
        memory_stream.kafka.produce(
            "in-a", "s", json.dumps({"seq": seq, "add": add}).encode(), partition=0
        )
    outcome = memory_stream.run()
    assert errors_of(outcome) == [("raised", 1)]
    assert quarantine_reason(memory_stream) == "raised"
    assert [row["total"] for row in memory_stream.rows()] == [1]


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
    memory_stream = create_sequenced_stream(tier, on_poison=on_poison)
    memory_stream.kafka.produce("in-a", "s", b"{", partition=0)
    send_message(memory_stream, 2, 2)
    outcome = memory_stream.run()
    assert [(f.finding, f.offset) for f in outcome.findings] == [("poison", 1)]
    if on_poison == "quarantine":
        assert quarantine_reason(memory_stream) == "poison"
    elif on_poison == "halt":
        assert memory_stream.accounts()[A0].frontier == 1
    else:
        assert rows_of_session(memory_stream) == {"a": 2, "b": 0}
