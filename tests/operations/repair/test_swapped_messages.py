"""A sequence gap: messages that were swapped are put into order by a repair; for a message that never
came no refold is offered.
"""

from __future__ import annotations

import json
import random

import pytest

from seriatim.engine.findings import Tier
from seriatim.errors import IntegrityError
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.repair.damage import RefoldAction, RepairRequest, plan_repair
from seriatim.testing import MemoryStream
from tests.operations.check_helper import run_check
from tests.operations.lookback_helper import session_after
from tests.operations.memory_streams import A0, create_stream, send
from tests.operations.repair_helper import gaps_of, records_in_order, repair


def tell(
    made: MemoryStream, sequence: int, rows: list[str] | None = None, session: str = "s"
) -> None:
    """Send an update of row a to the value of its sequence, or a snapshot of these rows."""
    body: dict[str, object] = {"type": "update", "seq": sequence, "id": "a", "v": sequence}
    if rows is not None:
        body = {"type": "snapshot", "seq": sequence, "rows": [{"id": row, "v": 0} for row in rows]}
    made.kafka.produce("in-a", session, json.dumps(body).encode(), partition=0)


def stream_of(*sequences: int, tier: Tier = "strict") -> MemoryStream:
    """A session that begins with a snapshot of sequence 1 and goes on with these updates; beside it
    another session, to which nothing happens. All is folded.
    """
    made = create_stream(tier=tier, sequence="seq")
    made.kafka.create("in-a")
    tell(made, 1, rows=["a"])
    tell(made, 1, rows=["a"], session="other")
    made.run()
    for sequence in sequences:
        tell(made, sequence)
    tell(made, 2, session="other")
    made.run()
    return made


def values(made: MemoryStream) -> list[tuple[int, int, int]]:
    """Offset, source offset and value of each record of the session."""
    return [
        (row["offset"], row["source_offset"], row["v"])
        for row in records_in_order(made, A0)
        if row["session"] == "s"
    ]


@pytest.mark.parametrize("tier", ["strict", "once"])
@pytest.mark.parametrize("names_session", [True, False])
def test_a_repair_puts_swapped_messages_into_order(tier: Tier, names_session: bool) -> None:
    """The session is right again, each message counts once, and its gap is mended."""
    made = stream_of(2, 4, 3, 5, tier=tier)
    assert made.sessions(A0)["s"].finding == "sequence gap"
    request = {"partition": "in-a/0", "session": "s"} if names_session else {}
    result = repair(made, **request)
    assert not result.new_findings
    session = made.sessions(A0)["s"]
    assert (session.finding, session.sequence, session.waiting_messages) == (None, 5, [])
    # The early message is released by the late one, whose offset its record has.
    assert values(made) == [(0, 0, 0), (2, 2, 2), (4, 4, 3), (4, 3, 4), (5, 5, 5)]
    assert made.accounts()[A0].quarantined == 0
    assert [(gap.start, gap.closed_how) for gap in gaps_of(made)] == [(3, "repair")]
    tell(made, 6)
    assert made.run().findings == []


def test_other_sessions_keep_their_order() -> None:
    """Only the session in which messages were swapped is folded again."""
    made = stream_of(2, 4, 3)
    tell(made, 4, session="other")
    tell(made, 3, session="other")
    made.run()
    before = [row for row in records_in_order(made, A0) if row["session"] == "other"]
    repair(made, session="s")
    assert [row for row in records_in_order(made, A0) if row["session"] == "other"] == before
    assert made.sessions(A0)["other"].finding == "sequence gap"


def test_a_gap_behind_the_swap_is_found_again() -> None:
    """Only the swapped messages are put into order: the next gap is a finding of its own."""
    made = stream_of(2, 4, 3, 5, 8, 9)
    result = repair(made, session="s")
    assert [(finding.finding, finding.offset) for finding in result.new_findings] == [
        ("sequence gap", 6)
    ]
    assert made.sessions(A0)["s"].finding_offset == 6


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_order_is_kept_by_later_repairs(size: int) -> None:
    """Who folds the range again, in stages of any size, puts the messages into the same order."""
    made = stream_of(2, 5, 4, 3, 6)
    repair(made, size, session="s")
    tell(made, 7)
    made.run()
    expected = values(made)
    assert [value for *_, value in expected] == [0, 2, 3, 4, 5, 6, 7]
    result = repair(made, size, ranges={"in-a/0": (0, 6)})
    assert not result.new_findings
    assert not result.repeated_findings
    assert values(made) == expected
    assert made.sessions(A0)["s"].finding is None


def test_for_a_message_that_never_came_no_refold_is_offered() -> None:
    """The plan says how far was looked, and what helps instead."""
    made = stream_of(2, 4, 5)
    plan = plan_repair(made.open(), RepairRequest())
    assert not plan.actions
    (note,) = plan.notes
    for text in (
        "a message never came: sequence 3 is not in Kafka, up to the end of the log at offset 6",
        "ask its producer for a snapshot of the session",
        'seriatim quarantine release s s --topic in-a/0 --because "…"',
    ):
        assert text in note
    with pytest.raises(IntegrityError, match="a message never came"):
        plan_repair(made.open(), RepairRequest(session="s"))
    # A person may insist, and sees that the gap is still there.
    assert repair(made, session="s", start=3).repeated_findings


def test_a_producer_that_was_asked_is_waited_for() -> None:
    """Nobody asks it a second time."""
    made = create_stream(tier="strict", sequence="seq", snapshot_requests="requests")
    made.kafka.create("in-a")
    tell(made, 1, rows=["a"])
    tell(made, 3)
    made.run()
    (note,) = plan_repair(made.open(), RepairRequest()).notes
    assert "wait for its snapshot: runs ask the producer for it, on topic requests" in note


def test_what_is_not_folded_yet_is_folded_first() -> None:
    """The missing message, or a snapshot, waits behind the frontier."""
    made = stream_of(2, 4)
    tell(made, 3)
    (note,) = plan_repair(made.open(), RepairRequest()).notes
    assert "sequence 3 came later, at offset 5" in note
    assert "seriatim run s\n" in note
    made.run()
    assert plan_repair(made.open(), RepairRequest()).actions
    made = stream_of(2, 4)
    tell(made, 9, rows=["a"])
    (note,) = plan_repair(made.open(), RepairRequest()).notes
    assert "a snapshot of the session waits at offset 5" in note


def test_other_damage_of_the_partition_is_repaired_all_the_same() -> None:
    """A lost message of one session keeps no other session from its repair."""
    made = stream_of(2, 4)
    send(made, A0, b"no JSON", session="other")
    made.run()
    plan = plan_repair(made.open(), RepairRequest())
    (action,) = plan.actions
    assert action.rewind.request.sessions == ("other",)  # type: ignore[union-attr]
    assert len(plan.notes) == 1


def test_the_search_has_limits_and_goes_on_where_it_ended() -> None:
    """What was not looked at is said, and a later search begins there."""
    made = stream_of(2, 4)
    for _ in range(50):
        tell(made, 99, session="noise")
    opened = made.open()
    session = made.sessions(A0)["s"]
    (bounds,) = made.kafka.bounds("in-.*").values()

    def search(messages_max: int) -> MissingMessageSearch:
        return MissingMessageSearch(opened, messages_max=messages_max)

    (missing,) = search(1).search(A0, {"s": session}, bounds).values()
    assert not missing.is_end_reached
    assert "not looked for further than offset" in missing.describe()
    (missing,) = search(1000).search(A0, {"s": session}, bounds, {"s": missing}).values()
    assert missing.is_end_reached
    assert missing.searched_until == bounds.log_end
    tell(made, 3)
    (bounds,) = made.kafka.bounds("in-.*").values()
    (missing,) = search(1000).search(A0, {"s": session}, bounds, {"s": missing}).values()
    assert missing.is_swapped
    assert missing.arrived_offset == bounds.log_end - 1


@pytest.mark.parametrize("sequences", [(2, 4, 4, 3), (2, 4, 2, 3)])
def test_a_repeat_is_more_than_a_swap(sequences: tuple[int, ...]) -> None:
    """Nothing is put into order where something else is wrong as well."""
    made = stream_of(*sequences)
    plan = plan_repair(made.open(), RepairRequest())
    assert not plan.actions
    assert "not looked for further than offset" in plan.notes[0]


def test_what_was_put_into_order_passes_its_check() -> None:
    """Records and state agree, and no promise of strict is broken by records in another order than
    their offsets.
    """
    made = stream_of(2, 5, 4, 3, 6)
    repair(made, session="s")
    tell(made, 7)
    made.run()
    result = run_check(made)
    assert set(result.verdict.values()) == {"good"}


def test_looking_back_puts_them_into_the_same_order() -> None:
    """The trace of the session shows what the output has, not the quarantine of before."""
    made = stream_of(2, 4, 3, 5)
    repair(made, session="s")
    committed = made.sessions(A0)["s"]
    replayed = session_after(made, 5)
    assert (replayed.finding, replayed.sequence) == (None, 5)
    assert replayed.state_bytes == committed.state_bytes
    assert not session_after(made, 4).waiting_messages


@pytest.mark.parametrize("seed", range(30))
def test_any_swap_is_healed_as_if_it_had_not_been(seed: int) -> None:
    """Messages are shuffled within a few places; sessions whose messages all came end with the rows
    of an undisturbed session, and no record is lost or doubled.
    """
    chance = random.Random(seed)
    sequences = list(range(2, 14))
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(sequences) - 3)
        part = sequences[start : start + 4]
        chance.shuffle(part)
        sequences[start : start + 4] = part
    made = stream_of(*sequences)
    for _ in range(len(sequences)):
        if made.sessions(A0)["s"].finding is None:
            break
        # Each swap behind a healed one is a gap of its own.
        repair(made, chance.randint(1, 20), session="s")
    session = made.sessions(A0)["s"]
    assert (session.finding, session.sequence) == (None, 13)
    assert [value for *_, value in values(made)] == [0, *range(2, 14)]
    assert all(gap.mended is not None for gap in gaps_of(made))
    assert set(run_check(made).verdict.values()) == {"good"}


def test_a_plan_says_what_sessions_are_in_quarantine_for_and_when_it_helps() -> None:
    """A message that was swapped is put into order. One that cannot be read will not be readable now,
    unless the machine or the stream file was changed.
    """

    def reason(made: MemoryStream) -> str:
        (action,) = plan_repair(made.open(), RepairRequest()).actions
        assert isinstance(action, RefoldAction)
        return action.rewind.request.reason

    made = stream_of(3, 2)
    swapped = "swapped messages of 1 are put into order"
    assert reason(made) == f"1 session in quarantine: s (sequence gap at offset 2); {swapped}"
    made.kafka.produce("in-a", "other", b"?", partition=0)
    made.run()
    assert reason(made) == (
        "2 sessions in quarantine: other (poison at offset 5), s (sequence gap at offset 2);"
        f" {swapped}; it helps the others only if the machine or the stream file was changed since"
    )
