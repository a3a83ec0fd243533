"""Repair: one command, and the output is what a straight fold of Kafka gives."""

from __future__ import annotations

import json
import random

import pytest

from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import (
    Adder,
    BuggyAdder,
    RaisingAdder,
    create_adding_stream,
    deploy,
    expected_outcome,
    send_numbers,
    session_states,
)
from tests.operations.memory_streams import A0, A1, create_stream, kinds
from tests.operations.repair_helper import (
    assert_equals_clean_fold,
    create_sliced_stream,
    gaps_of,
    records_in_order,
    remove_file,
    repair,
    send_random_messages,
)


def test_a_lost_record_file_is_made_again() -> None:
    """Only its range is folded again; all other files stay in the table under their names."""
    made = create_sliced_stream()
    before, files = records_in_order(made, A0), [file.path for file in made.ledger.files_now()]
    remove_file(made, files[3])
    done = repair(made)
    after = [file.path for file in made.ledger.files_now()]
    assert records_in_order(made, A0) == before
    assert set(files) - set(after) == {files[3]}
    assert len(set(after) - set(files)) == 1
    assert done.ranges[A0].start >= 21
    assert made.accounts()[A0].epoch == 1
    assert_equals_clean_fold(made)


def test_a_lost_state_file_is_made_again() -> None:
    """From the nearest state before it that is as committed, with the records since: whatever code
    makes them.
    """
    made = create_sliced_stream()
    files = [file.path for file in made.ledger.files_now()]
    remove_file(made, made.accounts()[A0].state[-1].path)
    with pytest.raises(IntegrityError):
        made.sessions(A0)
    repair(made)
    assert [file.path for file in made.ledger.files_now()][:-1] == files[:-1]
    assert_equals_clean_fold(made)
    send_random_messages(made, 20, seed=5)
    made.run(7)
    assert_equals_clean_fold(made)


def test_nothing_hurt_nothing_done() -> None:
    """A repair of what is well changes nothing, the ledger included."""
    made = create_sliced_stream()
    before = kinds(made)
    assert plan_repair(made.open(), RepairRequest()).actions == ()
    assert repair(made).sequence == -1
    assert kinds(made) == before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_a_bug_fixed_later(seed: int) -> None:
    """From the first wrong message on everything is as if the code had been right all along, in any
    slicing.
    """
    chance = random.Random(seed)
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a", 2)
    for partition in (A0, A1):
        send_numbers(made, 120, seed, partition)
    made.run(chance.randint(5, 60))
    others = [file.path for file in made.ledger.files_now() if "/1/" in file.path]
    deploy(made, Adder)
    done = repair(made, chance.randint(5, 200), partition=str(A0), start=0)
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)
    assert [file.path for file in made.ledger.files_now() if "/1/" in file.path] == others
    assert done.ranges[A0].start == 0
    send_numbers(made, 40, seed + 1)
    made.run(13)
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_sessions_set_aside_by_a_bug(seed: int) -> None:
    """Once the machine is fixed, repair finds them by itself, and their messages take effect after
    all.
    """
    chance = random.Random(seed)
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a")
    send_numbers(made, 120, seed, sessions=6)
    made.run(chance.randint(5, 60))
    hurt = made.accounts()[A0].quarantined
    others = {name: one for name, one in session_states(made).items() if one[1] is None}
    deploy(made, Adder)
    done = repair(made, chance.randint(5, 200))
    assert (done.sequence >= 0) == (hurt > 0)
    assert made.accounts()[A0].quarantined == 0
    right = expected_outcome(made)[1]
    assert {name: right[name] for name in others} == others
    assert session_states(made) == right
    wrong = {gap.session for gap in gaps_of(made) if gap.mended is None}
    mine = [row for row in records_in_order(made, A0) if row["session"] not in wrong]
    assert mine == [row for row in expected_outcome(made)[0] if row["session"] not in wrong]


def test_a_quarantine_that_a_snapshot_ended_is_mended_too() -> None:
    """A repair from an offset takes back every gap that began since, open or closed."""
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a")
    for value, start in ((1, True), (99, False), (5, False), (2, True), (99, False), (3, False)):
        made.kafka.produce("in-a", "s", json.dumps({"v": value, "start": start}).encode())
    made.run(2)
    assert [(gap.start, gap.until, gap.closed_how) for gap in gaps_of(made)] == [
        (1, 3, "snapshot"),
        (4, None, None),
    ]
    deploy(made, Adder)
    repair(made, partition=str(A0), start=0)
    assert [(gap.start, gap.until, gap.closed_how) for gap in gaps_of(made)] == [
        (1, 3, "snapshot"),
        (4, 6, "repair"),
    ]
    assert all(gap.mended == made.ledger.head("s").ledger.sequence for gap in gaps_of(made))  # type: ignore[union-attr]
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)


def test_one_session_alone() -> None:
    """The others' records stay as they are, byte for byte, though they share files with it."""
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    send_numbers(made, 100, 3)
    made.run(30)
    before = records_in_order(made, A0)
    deploy(made, Adder)
    repair(made, session="s1", start=0)
    right = {(row["offset"], row["index"]): row for row in expected_outcome(made)[0]}
    for old, new in zip(before, records_in_order(made, A0), strict=True):
        assert new == (right[old["offset"], old["index"]] if old["session"] == "s1" else old)
    assert session_states(made)["s1"] == expected_outcome(made)[1]["s1"]


def test_what_is_not_known_is_asked_for() -> None:
    """A request that says too little, or the impossible, says what is allowed."""
    made = create_sliced_stream()
    for request, says in (
        ({"start": 3}, "--partition"),
        ({"session": "s1"}, "--from"),
        ({"session": "nobody"}, "there is no session 'nobody'"),
        ({"partition": "in-a/7"}, "name one of these"),
        ({"partition": "in-a/0", "start": 60}, "0 to 59"),
    ):
        with pytest.raises(ConfigError) as refused:
            plan_repair(made.open(), RepairRequest(**request))  # type: ignore[arg-type]
        assert says in refused.value.render()


def test_what_kafka_no_longer_has_is_said() -> None:
    """Nothing is changed, and the range that is gone is named."""
    made = create_sliced_stream()
    made.kafka.delete_records(A0, 30)
    with pytest.raises(IntegrityError, match=r"\[14, 30\) is gone"):
        plan_repair(made.open(), RepairRequest(partition=str(A0), start=20))
    assert not repair(made, partition=str(A0), start=40).new_findings
    assert_equal_to_itself(made)


def assert_equal_to_itself(made: MemoryStream) -> None:
    """No record is there twice, none is out of its place."""
    places = [(row["offset"], row["index"]) for row in records_in_order(made, A0)]
    assert len(places) == len(set(places))


def test_messages_compacted_away_since_are_not_taken_for_nothing() -> None:
    """The refold would be of other messages than were folded: it is refused, and the hold is given
    back.
    """
    made = create_stream()
    made.kafka.create("in-a", compacted=True)
    send_random_messages(made, 60)
    made.run(7)
    made.kafka.compact(A0, 20)
    with pytest.raises(IntegrityError, match="are gone"):
        repair(made, partition=str(A0), start=0)
    assert made.accounts()[A0].hold is None
    assert kinds(made)[-2:] == ["hold", "release"]


def test_a_log_that_was_cut_is_followed_back() -> None:
    """Records, state and frontier go back to the log end together; what comes then is folded from
    there.
    """
    made = create_sliced_stream()
    made.kafka.truncate(A0, 45)
    assert [one.finding for one in made.run().findings] == ["truncated"]
    repair(made)
    account = made.accounts()[A0]
    assert (account.frontier, account.halt, account.epoch) == (45, None, 1)
    assert_equals_clean_fold(made)
    send_random_messages(made, 30, seed=9)
    made.run(11)
    assert_equals_clean_fold(made)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_repairs_upon_repairs(seed: int) -> None:
    """Any mix of slices, losses, fixes and repairs ends as a straight fold."""
    chance = random.Random(seed)
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    for number in range(chance.randint(3, 8)):
        send_numbers(made, chance.randint(5, 40), seed * 100 + number)
        made.run(chance.randint(3, 30))
        active, account = [file.path for file in made.ledger.files_now()], made.accounts()[A0]
        kind = chance.choice(("record", "state", "from", "none"))
        if kind == "record" and active:
            remove_file(made, chance.choice(active))
        elif kind == "state" and account.state:
            remove_file(made, chance.choice(account.state).path)
        if kind == "from" and account.frontier:
            repair(
                made,
                chance.randint(3, 50),
                partition=str(A0),
                start=chance.randrange(account.frontier),
            )
        elif kind != "none":
            repair(made, chance.randint(3, 50))
    deploy(made, Adder)
    repair(made, 25, partition=str(A0), start=0)
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)
