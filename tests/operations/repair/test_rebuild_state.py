"""Forward where state is damaged and Kafka has not what made it: records stay, folding them still
gives the state.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from seriatim.engine.machine import UserMachine
from seriatim.errors import IntegrityError
from seriatim.operations.repair.damage import RebuildStateAction, RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream
from tests.contracts.disk_streams import DiskStream
from tests.operations.adding_machines import (
    Adder,
    create_adding_stream,
    send_numbers,
    session_states,
)
from tests.operations.decision_helper import assert_records_match_state
from tests.operations.memory_streams import A0, create_stream, kinds, send
from tests.operations.prove.test_verify_no_false_alarms import assert_good
from tests.operations.repair_helper import (
    create_sliced_stream,
    gaps_of,
    records_in_order,
    remove_file,
    repair,
    send_random_messages,
)
from tests.operations.test_tiers import create_sequenced_stream, rows_of_session, send_message

POISON = b"{"


def lost(tier: Any = "strict", **more: Any) -> MemoryStream:
    """Sessions s, t, u and v at sequence 2, v touched once more; state of before that, and its
    messages, are gone.
    """
    made = create_sequenced_stream(tier, **more)
    for session in "tuv":
        send_message(made, 1, rows=["a"], session=session)
    for session in "stuv":
        send_message(made, 2, 2, session=session)
    made.run()
    send_message(made, 3, 3, session="v")
    made.run()
    made.kafka.delete_records(A0, 9)
    remove_file(made, made.accounts()[A0].state[0].path)
    return made


def test_what_is_lost_is_named_and_the_way_on() -> None:
    """The range from the last whole state on; forward is offered, and is another plan."""
    made = lost()
    planned = plan_repair(made.open(), RepairRequest())
    assert planned.actions == ()
    assert "[0, 9) is gone" in planned.notes[0]
    assert "repair s --partition in-a/0 --forward" in planned.notes[0]
    (part,) = plan_repair(made.open(), RepairRequest(forward=True)).actions
    assert isinstance(part, RebuildStateAction)


def test_sessions_go_on_by_proof_or_snapshot_and_those_of_whole_files_at_once() -> None:
    """One is proven by its sequence, one skipped some and waits, one was in a newer file: nothing
    of it was lost.
    """
    made = lost()
    before = records_in_order(made, A0)
    repair(made, forward=True)
    assert records_in_order(made, A0) == before
    assert_records_match_state(made)
    assert [(gap.session, gap.start, gap.until, gap.closed_how) for gap in gaps_of(made)] == [
        (None, 9, 9, "forward")
    ]
    for session, sequence in (("s", 3), ("t", 4), ("v", 4)):
        send_message(made, sequence, 9, session=session)
    outcome = made.run()
    assert (outcome.findings, outcome.headless) == ([], 1)
    assert (rows_of_session(made, "s"), rows_of_session(made, "t"), rows_of_session(made, "v")) == (
        {"a": 9, "b": 0},
        {"a": 2},
        {"a": 9},
    )
    send_message(made, 7, rows=["c"], session="t")
    send_message(made, 3, rows=["c"], session="u")
    assert made.run().findings == []
    assert [row["op"] for row in records_in_order(made, A0) if row["session"] == "t"][-2:] == [
        "snapshot",
        "delete",
    ]
    assert_records_match_state(made)
    assert [(gap.session, gap.start, gap.until) for gap in gaps_of(made)] == [
        (None, 9, 9),
        ("t", 10, 12),
    ]
    assert plan_repair(made.open(), RepairRequest()).notes == ()


@pytest.mark.long
def test_without_a_sequence_sessions_wait_for_a_snapshot_and_whole_ones_do_not() -> None:
    """Nothing else could prove it."""
    made = create_stream()
    made.kafka.create("in-a")
    for number in range(40):
        send(made, A0, ["a", "b"], session=f"k{number}")
    made.run()
    send(made, A0, 5, session="k1")
    made.run()
    made.kafka.delete_records(A0, 41)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, forward=True)
    send(made, A0, 7, session="k1")
    send(made, A0, 7, session="k2")
    assert made.run().headless == 1
    send(made, A0, ["a"], session="k2")
    made.run()
    assert (rows_of_session(made, "k1"), rows_of_session(made, "k2")) == (
        {"a": 7, "b": 0},
        {"a": 0},
    )
    assert_records_match_state(made)


def test_who_was_in_doubt_still_is() -> None:
    """A session of a whole file that waits for its snapshot since an earlier loss goes on waiting."""
    made = create_stream()
    made.kafka.create("in-a")
    for number in range(40):
        send(made, A0, ["a", "b"], session=f"k{number}")
    made.run()
    send(made, A0, 5, session="k1")
    made.kafka.delete_records(A0, 41)
    made.run()
    repair(made, forward=True)
    send(made, A0, 6, session="k1")
    assert made.run().headless == 1
    made.kafka.delete_records(A0, 42)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, forward=True)
    send(made, A0, 7, session="k1")
    assert made.run().headless == 1
    assert rows_of_session(made, "k1") == {"a": 0, "b": 0}
    send(made, A0, ["a"], session="k1")
    made.run()
    assert [gap for gap in gaps_of(made) if gap.closed is None] == []
    assert_records_match_state(made)


def test_a_gap_outlives_the_state_of_its_session() -> None:
    """A machine of one's own, in a tier that counts: its session is gone, and its next snapshot
    closes the gap.
    """
    made = create_adding_stream(Adder, tier="none", sequence="v")
    made.machine = lambda: UserMachine("m:Adder", Adder, sequence="v")
    made.kafka.create("in-a")
    for value, start in ((1, True), (5, False)):
        _put(made, value, start=start)
    made.run()
    assert [gap.closed for gap in gaps_of(made)] == [None]
    made.kafka.delete_records(A0, 2)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, forward=True)
    _put(made, 6, start=True)
    made.run()
    assert [gap for gap in gaps_of(made) if gap.closed is None] == []


def _put(made: MemoryStream, value: int, *, start: bool) -> None:
    made.kafka.produce("in-a", "s", json.dumps({"v": value, "start": start}).encode())


def test_quarantine_outlives_its_state() -> None:
    """The gaps say who was set aside: the ledger counts them on, and a snapshot ends it."""
    made = create_sequenced_stream("strict")
    send_message(made, 9, 9)
    send_message(made, 1, rows=["a"], session="t")
    made.run()
    made.kafka.delete_records(A0, 3)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, forward=True)
    assert made.accounts()[A0].quarantined == 1
    assert made.sessions(A0)["s"].finding == "sequence gap"
    send_message(made, 11, rows=["a"])
    assert made.run().quarantined == 0
    assert next((gap.until, gap.closed_how) for gap in gaps_of(made) if gap.session == "s") == (
        3,
        "snapshot",
    )
    assert_records_match_state(made)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_any_loss_of_state_leaves_what_the_records_make(seed: int) -> None:
    """Whichever files are damaged; and what comes later is as a fold that was never hurt has it,
    after snapshots.
    """
    chance = random.Random(seed)
    made = create_sliced_stream(60, chance.randint(3, 20))
    before = records_in_order(made, A0)
    made.kafka.delete_records(A0, 59)
    for file in made.accounts()[A0].state:
        if chance.random() < 0.6 or file == made.accounts()[A0].state[0]:
            remove_file(made, file.path)
    repair(made, forward=True)
    assert records_in_order(made, A0) == before
    assert_records_match_state(made)
    send_random_messages(made, 40, seed=seed + 1)
    made.run(chance.randint(3, 20))
    assert_records_match_state(made)
    assert made.accounts()[A0].quarantined == 0


def test_a_machine_of_ones_own_goes_on_by_what_older_files_have() -> None:
    """Without a sequence nothing proves it: its next snapshot does; sessions of newer files go on."""
    made = create_adding_stream(Adder)
    made.kafka.create("in-a")
    send_numbers(made, 60, 1, sessions=30)
    made.run()
    send_numbers(made, 3, 2, sessions=1)
    made.run()
    exact = {name: one for name, one in session_states(made).items() if name == "s0"}
    made.kafka.delete_records(A0, 63)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made, forward=True)
    assert session_states(made) == exact
    send_numbers(made, 60, 3, sessions=30)
    assert made.run().findings == []
    assert len(session_states(made)) == 30


def test_nothing_is_made_of_damaged_records() -> None:
    """They would be taken for the truth: refused by name, and nothing is changed."""
    made = lost()
    path = made.ledger.files_now()[0].path
    content = made.files.files[path].content
    made.files.files[path].content = bytes([content[0] ^ 1]) + content[1:]
    with pytest.raises(IntegrityError, match=path):
        repair(made, forward=True)
    assert kinds(made)[-1] == "release"


def test_a_partition_that_waits_for_lost_messages_too_goes_on_behind_both() -> None:
    """One command, one commit."""
    made = lost()
    send_message(made, 3, 3, session="s")
    send_message(made, 4, 4, session="v")
    made.kafka.delete_records(A0, 10)
    assert [one.finding for one in made.run().findings] == ["expired"]
    done = repair(made, forward=True)
    account = made.accounts()[A0]
    assert (account.frontier, account.halt, account.headless_since, done.sequence >= 0) == (
        10,
        None,
        10,
        True,
    )
    outcome = made.run()
    assert (outcome.findings, outcome.headless, rows_of_session(made, "v")) == ([], 0, {"a": 4})
    assert_records_match_state(made)


@pytest.mark.long
def test_on_real_files_verify_agrees(tmp_path: Path) -> None:
    """Rows with times and decimals, as records have them: right after, and after what follows."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 2)
    for session in "xyz":
        made.send("in-a/0", session, ["a", "b"], 1, None)
    made.run()
    made.send("in-a/0", "x", ["a", "c"], 3)
    made.run()
    assert_good(made)
    made.kafka.delete_records(A0, 11)
    (tmp_path / made.accounts()[A0].state[0].path).unlink()
    tools = made.open().with_ports(joiner=ParquetJoiner(LocalStore(tmp_path), "s"))
    RepairRun(tools).apply(plan_repair(tools, RepairRequest(forward=True)), 100)
    assert_good(made)
    made.send("in-a/0", "x", 4)
    made.send("in-a/0", "y", ["a", "d"], 5)
    assert made.run().findings == []
    assert_good(made)
    assert made.accounts()[A0].headless == 0


def test_a_state_whose_messages_were_compacted_away_is_not_planned_to_be_folded_again() -> None:
    """The log begins where it did, and what made the state is gone from its middle: only forward is
    a plan.
    """
    made = create_sequenced_stream("strict")
    for session in "tuv":
        send_message(made, 1, rows=["a"], session=session)
    for session in "stuv":
        send_message(made, 2, 2, session=session)
    made.run()
    made.kafka.topics["in-a"].compacted = True
    before = records_in_order(made, A0)
    made.kafka.compact(A0, 5)
    remove_file(made, made.accounts()[A0].state[0].path)
    planned = plan_repair(made.open(), RepairRequest())
    assert planned.actions == ()
    assert "are not in Kafka any more" in planned.notes[0]
    assert "repair s --partition in-a/0 --forward" in planned.notes[0]
    (part,) = plan_repair(made.open(), RepairRequest(forward=True)).actions
    assert isinstance(part, RebuildStateAction)
    repair(made, forward=True)
    assert records_in_order(made, A0) == before
    assert plan_repair(made.open(), RepairRequest()).actions == ()


def test_a_state_of_a_compacted_topic_that_lost_nothing_yet_is_folded_again() -> None:
    """A cleanup policy alone refuses nothing."""
    made = create_sliced_stream()
    made.kafka.topics["in-a"].compacted = True
    remove_file(made, made.accounts()[A0].state[-1].path)
    repair(made)
    assert kinds(made)[-1] == "repair"
