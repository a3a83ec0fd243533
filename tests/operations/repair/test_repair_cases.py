"""What a fresh reader found in repairs, each with the case that showed it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.crash_points import arm
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.operations.release import release_session
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import (
    Adder,
    BuggyAdder,
    create_adding_stream,
    deploy,
    expected_outcome,
    session_states,
)
from tests.operations.memory_streams import (
    A0,
    A1,
    create_filled_stream,
    create_stream,
    kinds,
    send,
)
from tests.operations.repair_helper import (
    assert_equals_clean_fold,
    create_sliced_stream,
    fold_without_trouble,
    gaps_of,
    records_in_order,
    remove_file,
    repair,
    send_random_messages,
)

POISON = b"{"


def quarantined(**fields: Any) -> MemoryStream:
    """Session q waits since its third message; session t is well."""
    made = create_stream(**fields)
    made.kafka.create("in-a")
    send(made, A0, ["a"], 1, POISON, 3, session="q")
    send(made, A0, ["a"], 5, session="t")
    made.run(3)
    return made


def test_a_forward_on_top_of_a_refold_keeps_what_was_made_again() -> None:
    """One partition, a session in quarantine and a gap: both are dealt with, and no record goes."""
    made = quarantined()
    send(made, A0, 6, 7, 8, session="t")
    made.reader.lost_offsets = {(A0, 7)}
    made.run()
    before = records_in_order(made, A0)
    tools = made.open()
    planned = plan_repair(tools, RepairRequest(forward=True))
    assert [type(part).__name__ for part in planned.actions] == ["RefoldAction", "ForwardAction"]
    RepairRun(tools).apply(planned, 100)
    assert records_in_order(made, A0) == before
    assert (made.accounts()[A0].frontier, made.accounts()[A0].halt) == (8, None)


def test_a_release_by_hand_holds_for_a_refold_too() -> None:
    """What a person said at an offset is said again there: nothing that was folded since is taken
    back.
    """
    made = quarantined()
    release_session(made.open(), "q", "it is fine")
    send(made, A0, 6, 7, session="q")
    made.run(3)
    before, sessions = records_in_order(made, A0), session_states(made)
    repair(made, 3, partition=str(A0), start=0)
    assert (records_in_order(made, A0), session_states(made)) == (before, sessions)
    assert made.accounts()[A0].quarantined == 0


def test_a_backfill_where_state_is_damaged_makes_all_state_again() -> None:
    """The state of now cannot be relied on, so it is not gone on from."""
    made = create_sliced_stream()
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, ranges={str(A0): (0, 4)})
    assert_equals_clean_fold(made)


def test_a_session_ends_its_refold_where_it_is_as_committed_and_nowhere_else() -> None:
    """Code that takes a snapshot otherwise: the records still make the state."""
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    for value, start in ((1, True), (2, False), (26, True), (1, False), (3, False)):
        made.kafka.produce("in-a", "s", json.dumps({"v": value, "start": start}).encode())
    made.run(2)

    class Doubling(Adder):
        """Snapshots count twice."""

        def apply(self, state: Any, message: Any) -> Any:
            """As ever, but for snapshots."""
            return super().apply(
                state, replace(message, v=message.v * 2) if message.start else message
            )

    deploy(made, Doubling)
    repair(made, ranges={str(A0): (0, 2)})
    rows = records_in_order(made, A0)
    assert [row["was"] for row in rows[1:]] == [row["value"] for row in rows[:-1]]
    assert made.machine().load(*saved(made)).value == rows[-1]["value"]


def saved(made: MemoryStream) -> tuple[bytes, int]:
    """The state of session s."""
    session = made.sessions(A0)["s"]
    return session.state_bytes or b"", session.state_version


def test_a_log_that_was_cut_and_grew_is_followed_back_to_where_it_ended() -> None:
    """New messages took the place of those that were folded: all of them are folded."""
    made = create_sliced_stream()
    made.kafka.truncate(A0, 45)
    made.run()
    send_random_messages(made, 30, seed=9)
    repair(made)
    made.run()
    assert_equals_clean_fold(made)


def test_message_time_goes_back_with_a_log() -> None:
    """Sessions expire by messages that are there."""
    made = create_stream(session_timeout_hours=1)
    made.kafka.create("in-a")
    for minute in (0, 30, 600):
        body = json.dumps({"type": "snapshot", "rows": [{"id": "a", "v": minute}]}).encode()
        made.kafka.produce("in-a", "s", body, timestamp=minute * 60_000)
    made.run(1)
    made.kafka.truncate(A0, 2)
    made.run()
    repair(made)
    body = json.dumps({"type": "update", "id": "a", "v": 1}).encode()
    made.kafka.produce("in-a", "s", body, timestamp=60 * 60_000)
    made.run()
    assert records_in_order(made, A0) == records_in_order(
        fold_without_trouble(made, session_timeout_hours=1), A0
    )


def test_the_same_command_goes_on_when_more_is_hurt_meanwhile() -> None:
    """The hold of the first try is taken over, what came is held besides."""
    made = create_sliced_stream(partitions=2)
    remove_file(made, made.accounts()[A0].state[-1].path)
    tools = made.open()
    first = plan_repair(tools, RepairRequest())
    RepairRun(tools).place_hold(made.ledger.head("s"), first.partitions, first.request.to_json())
    remove_file(made, made.accounts()[A1].state[-1].path)
    repair(made)
    assert [account.hold for account in made.accounts().values()] == [None, None]
    assert_equals_clean_fold(made)
    assert_equals_clean_fold(made, A1)


def test_a_hold_is_released_when_nothing_is_hurt_any_more() -> None:
    """Somebody restored the file: the same command gives the partition back."""
    made = create_sliced_stream()
    path = made.accounts()[A0].state[-1].path
    kept = made.files.files[path]
    remove_file(made, path)
    tools = made.open()
    first = plan_repair(tools, RepairRequest())
    RepairRun(tools).place_hold(made.ledger.head("s"), first.partitions, first.request.to_json())
    made.files.files[path] = kept
    repair(made)
    assert made.accounts()[A0].hold is None


def test_a_backfill_leaves_later_states_to_begin_from() -> None:
    """Only saved states within what was made again are not as committed any more."""
    made = create_sliced_stream()
    repair(made, ranges={str(A0): (5, 10)})
    made.kafka.delete_records(A0, 40)
    (part,) = plan_repair(made.open(), RepairRequest(partition=str(A0), start=50)).actions
    assert part.rewind.start == 49  # type: ignore[union-attr]


def test_files_and_sessions_hurt_in_one_partition_are_mended_by_one_command() -> None:
    """The range reaches from the first to the last of them."""
    made = quarantined()
    send(made, A0, ["a"], session="t")
    made.run()
    remove_file(made, made.ledger.files_now()[0].path)
    (part,) = plan_repair(made.open(), RepairRequest()).actions
    assert "quarantine" in part.rewind.request.reason  # type: ignore[union-attr]
    assert "missing" in part.rewind.request.reason  # type: ignore[union-attr]


def test_a_gap_that_is_open_stays_so_when_a_refold_tells_of_an_earlier_one() -> None:
    """A snapshot of the past closes what was open then, not what was opened since."""
    made = create_stream()
    made.kafka.create("in-a")
    send(made, A0, ["a"], POISON, ["a"], 1, POISON, session="q")
    made.run(2)
    before = [(gap.start, gap.until, gap.mended) for gap in gaps_of(made)]
    assert before == [(1, 2, None), (4, None, None)]
    repair(made, partition=str(A0), start=0)
    assert [(gap.start, gap.until, gap.mended) for gap in gaps_of(made)] == before


def test_a_fixed_machine_after_all_of_it() -> None:
    """And the plain case still is what it was."""
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    for number in range(30):
        made.kafka.produce(
            "in-a", "s", json.dumps({"v": number, "start": number % 10 == 0}).encode()
        )
    made.run(7)
    deploy(made, Adder)
    repair(made, partition=str(A0), start=0)
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)


def test_a_moved_session_that_begins_with_a_snapshot_waits_in_the_window_every_time() -> None:
    """A refold is not told who had moved: what a snapshot makes of it may not depend on that."""
    made = create_stream(tier="window", sequence="seq", window_messages=3, window_seconds=60)
    made.kafka.create("in-a", 2)
    for partition, sequence, value in ((0, 1, 1), (1, 12, 7)):
        body = {"type": "snapshot", "seq": sequence, "rows": [{"id": "a", "v": value}]}
        made.kafka.produce("in-a", "m", json.dumps(body).encode(), partition=partition)
        made.run()
    update = {"type": "update", "seq": 13, "id": "a", "v": 8}
    made.kafka.produce("in-a", "m", json.dumps(update).encode(), partition=1)
    made.run()
    before = (made.sessions(A1), made.rows(A1))
    repair(made, ranges={str(A1): (0, 2)})
    assert (made.sessions(A1), made.rows(A1)) == before


def test_a_run_whose_files_a_repair_made_void_goes_on_without_alarm() -> None:
    """A run that misses its own files, because a repair in mid-slice raised the epoch and swept them,
    begins again and ends well.
    """
    made = create_filled_stream(2)
    made.run()
    send(made, A0, 3, 4)
    send(made, A1, 5, session="nowhere yet")
    points: list[str] = []

    def interfere(point: str) -> None:
        points.append(point)
        if points.count("mid-fold") == 2 and point == "mid-fold":
            arm(None)
            repair(made, ranges={"in-a/0": (0, 3)})
            assert not [path for path in made.files.files if path.startswith("state/in-a/0/0-3-")]

    arm(interfere)
    try:
        outcome = made.run()
    finally:
        arm(None)
    assert outcome.findings == []
    assert {str(p): account.frontier for p, account in made.accounts().items()} == {
        "in-a/0": 5,
        "in-a/1": 4,
    }
    assert made.accounts()[A0].epoch == 1


@pytest.mark.parametrize(
    ("point", "is_made_again", "error", "text"),
    [
        ("state-loaded", True, ConfigError, "in-a was made again"),
        ("stage-folded", True, ConfigError, "in-a was made again"),
        ("state-loaded", False, IntegrityError, "its topic is not in Kafka"),
    ],
)
def test_a_topic_that_changes_during_a_refold_is_refused(
    point: str, is_made_again: bool, error: type[SeriatimError], text: str
) -> None:
    """A topic made again has other messages at the same offsets: none of them may replace what was
    folded. Nothing is changed, and the next run names the topic.
    """
    made = create_sliced_stream()
    before = (made.sessions(A0), made.rows(A0))
    points: list[str] = []

    def change_topic(name: str) -> None:
        points.append(name)
        if name == point:
            arm(None)
            made.kafka.delete("in-a")
            if is_made_again:
                made.kafka.create("in-a")
                send_random_messages(made, 70, seed=2)

    arm(change_topic)
    try:
        with pytest.raises(error, match=text):
            repair(made, 10, ranges={str(A0): (0, 60)})
    finally:
        arm(None)
    assert points[-1] == point
    assert (made.sessions(A0), made.rows(A0)) == before
    assert kinds(made)[-2:] == ["hold", "release"]
    findings = ["re-created"] if is_made_again else []
    assert [finding.finding for finding in made.run().findings] == findings
