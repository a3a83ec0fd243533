"""After a forward: ledger, gaps, status, plan and verify agree, and each session goes on by
snapshot or proof.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError
from seriatim.ledger.commit import commit, read_head
from seriatim.ledger.entries import HoldEntry, RepairEntry
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Change
from seriatim.operations.followers import catch_up_derived
from seriatim.operations.plan import discover_topics
from seriatim.operations.release import release_session
from seriatim.operations.repair.forward import plan_forward
from seriatim.operations.status import read_status
from seriatim.testing import MemoryStream
from tests.contracts.disk_streams import DiskStream
from tests.operations.memory_streams import A0
from tests.operations.prove.test_verify_at import judged
from tests.operations.prove.test_verify_no_false_alarms import assert_good
from tests.operations.repair_helper import records_in_order, repair
from tests.operations.test_tiers import create_sequenced_stream, rows_of_session, send_message


def move_on(one: MemoryStream, partition: Partition = A0, there: int | None = None) -> Change:
    """Hold the partition, then pass over what is lost, as a repair does."""
    head = read_head(one.ledger, "s")
    assert head is not None
    account = head.ledger.partitions[str(partition)]
    change = plan_forward("s", partition, account, one.kafka.bounds("in-.*").get(partition), there)
    held = replace(change, until=change.frontier, marks=(), headless_since=-1)
    head, _ = commit(one.ledger, one.clock, head, HoldEntry(attempt="h", hold="h", changes=(held,)))
    head, done = commit(
        one.ledger, one.clock, head, RepairEntry(attempt="h", hold="h", changes=(change,))
    )
    catch_up_derived(one.ledger, one.derived, head.ledger)
    return done.changes[0]


def gaps(one: MemoryStream) -> list[tuple[Any, ...]]:
    """The table in short."""
    rows: list[Gap] = one.derived.gaps(one.derived.applied_version("gaps"))
    return [(gap.session, gap.start, gap.until, gap.finding, gap.closed_how) for gap in rows]


def expired() -> MemoryStream:
    """Sessions s, t and u at sequence 2; then messages of s and t are gone before they were read."""
    one = create_sequenced_stream("strict")
    for session in "tu":
        send_message(one, 1, rows=["a"], session=session)
    for session in "stu":
        send_message(one, 2, 2, session=session)
    one.run()
    for session in "st":
        send_message(one, 3, 3, session=session)
    one.kafka.delete_records(A0, 8)
    one.run()
    return one


def test_expired_then_forward() -> None:
    """Green again; u is proven by its sequence, s and t wait for a snapshot; gaps says what not to
    trust.
    """
    one = expired()
    move_on(one)
    assert gaps(one) == [(None, 6, 8, "expired", "forward")]
    for session in "stu":
        send_message(one, 3 + (session != "u"), 9, session=session)
    outcome = one.run()
    assert (outcome.findings, outcome.headless, outcome.earlier_halts) == ([], 2, [])
    assert (rows_of_session(one, "u"), rows_of_session(one, "s"), rows_of_session(one, "t")) == (
        {"a": 9},
        {"a": 2, "b": 0},
        {"a": 2},
    )
    send_message(one, 5, rows=["a"], session="t")
    send_message(one, 6, 7, session="t")
    send_message(one, 5, 7, session="s")
    outcome = one.run()
    assert (outcome.findings, outcome.headless, rows_of_session(one, "t")) == ([], 1, {"a": 7})
    assert gaps(one) == [
        (None, 6, 8, "expired", "forward"),
        ("s", 8, None, "gap", None),
        ("t", 9, 11, "gap", "snapshot"),
    ]


@pytest.mark.parametrize("messages_max", [1, 2, 100])
def test_slices_change_nothing(messages_max: int) -> None:
    """The ledger says since where: each slice judges the same."""
    one = expired()
    move_on(one)
    for seq, session in ((3, "u"), (5, "s"), (4, "u"), (6, "s"), (4, "t"), (5, "t")):
        send_message(one, seq, seq, session=session)
    send_message(one, 7, rows=["a"], session="s")
    one.run(messages_max)
    account = one.accounts()[A0]
    assert (account.headless, account.quarantined, account.frontier) == (4, 0, 15)
    assert (rows_of_session(one, "u"), rows_of_session(one, "s"), rows_of_session(one, "t")) == (
        {"a": 4},
        {"a": 0},
        {"a": 2},
    )
    assert gaps(one)[1:] == [("s", 9, 14, "gap", "snapshot"), ("t", 12, None, "gap", None)]


def test_plan_and_status_after_a_forward() -> None:
    """Nothing waits, nothing is lost: the next run reads from the new frontier."""
    one = expired()
    before = read_status(one.stream, one.kafka, one.ledger, one.files, one.clock).partitions[0]
    assert before.halt is not None
    assert (before.halt.finding, before.frontier, before.epoch) == ("expired", 6, 0)
    move_on(one)
    send_message(one, 3, 9, session="u")
    head = read_head(one.ledger, "s")
    assert head is not None
    plan = discover_topics(one.stream, one.kafka, head.ledger)
    assert (plan.ranges, plan.waiting_partitions, plan.findings) == (
        {A0: OffsetRange(8, 9)},
        [],
        [],
    )
    shown = read_status(one.stream, one.kafka, one.ledger, one.files, one.clock)
    part = shown.partitions[0]
    assert (part.frontier, part.epoch, part.halt, part.hold, part.lag) == (
        8,
        1,
        None,
        None,
        1,
    )
    assert shown.verdict == "good"


def test_a_run_beside_the_hold_leaves_the_partition_alone() -> None:
    """A slice that was read before the forward is fenced by the epoch."""
    one = expired()
    folding = one.folding()
    folding._open_ledger()
    move_on(one)
    stale = folding.head.ledger.partitions[str(A0)]
    assert stale.epoch + 1 == one.accounts()[A0].epoch
    send_message(one, 3, 9, session="u")
    assert one.run().findings == []


def test_a_gap_is_passed_over_to_the_first_message_that_is_there() -> None:
    """Sequence 3 of s is missing in the log: the partition goes on at its next message, which
    proves nothing.
    """
    one = create_sequenced_stream("strict")
    for seq in (2, 3, 4):
        send_message(one, seq, seq)
    one.reader.lost_offsets.add((A0, 2))
    assert [finding.finding for finding in one.run().findings] == ["gap"]
    move_on(one, there=3)
    outcome = one.run()
    assert (outcome.findings, outcome.headless, rows_of_session(one)) == ([], 1, {"a": 2, "b": 0})
    assert gaps(one) == [(None, 2, 3, "gap", "forward"), ("s", 3, None, "gap", None)]


def test_poison_is_passed_over() -> None:
    """The message after it goes on by its sequence."""
    one = create_sequenced_stream("strict", on_poison="halt")
    one.kafka.produce("in-a", None, b"?", partition=0)
    send_message(one, 2, 5)
    one.run()
    move_on(one)
    outcome = one.run()
    assert (outcome.findings, outcome.headless, rows_of_session(one)) == ([], 0, {"a": 5, "b": 0})
    assert gaps(one) == [(None, 1, 2, "poison", "forward")]


def test_a_session_in_quarantine_stays_there_over_a_forward() -> None:
    """The ledger counts it on, and a snapshot releases it."""
    one = create_sequenced_stream("strict")
    send_message(one, 9, 9)
    send_message(one, 1, rows=["a"], session="t")
    one.run()
    send_message(one, 2, 2, session="t")
    one.kafka.delete_records(A0, 4)
    one.run()
    move_on(one)
    assert one.accounts()[A0].quarantined == 1
    send_message(one, 10, 9)
    send_message(one, 11, rows=["a"])
    outcome = one.run()
    assert (outcome.quarantined, outcome.headless, rows_of_session(one)) == (0, 0, {"a": 0})
    assert gaps(one)[0] == ("s", 1, 5, "sequence gap", "snapshot")


@pytest.mark.parametrize("poisoned", [True, False])
def test_a_person_releases_a_session_that_lost_nothing(poisoned: bool) -> None:
    """In quarantine since, or headless since: its next messages apply, whatever their sequence."""
    one = expired()
    move_on(one)
    if poisoned:
        one.kafka.produce("in-a", "s", b"?", partition=0)
    else:
        send_message(one, 4, 4)
    one.run()
    with pytest.raises(ConfigError, match="'t' is not in quarantine"):
        release_session(one.open(), "t", "never met since")
    made = release_session(one.open(), "s", "asked the producer")
    assert (made.finding, made.offset) == (("poison" if poisoned else "gap"), 8)
    send_message(one, 7, 9)
    outcome = one.run()
    assert (outcome.findings, outcome.headless, rows_of_session(one), outcome.quarantined) == (
        [],
        0,
        {"a": 9, "b": 0},
        0,
    )
    assert gaps(one)[1][2:] == (9, "poison" if poisoned else "gap", "hand")


def test_one_in_quarantine_before_the_loss_is_released_after_it() -> None:
    """A person's word is as good as a snapshot: the loss is not held against it again."""
    one = create_sequenced_stream("strict")
    send_message(one, 9, 9)
    one.run()
    send_message(one, 10, 10)
    one.kafka.delete_records(A0, 3)
    one.run()
    move_on(one)
    release_session(one.open(), "s", "asked the producer")
    send_message(one, 12, 12)
    outcome = one.run()
    assert (outcome.findings, outcome.headless, rows_of_session(one)) == ([], 0, {"a": 12, "b": 0})


@pytest.mark.long
def test_verify_agrees(tmp_path: Path) -> None:
    """On real files: right after the forward, and after the slices that follow, on from a sign-off
    and as a whole.
    """
    one = DiskStream(tmp_path)
    one.kafka.create("in-a", 2)
    for session in "xyz":
        one.send("in-a/0", session, ["a", "b"], 1)
    one.run()
    assert_good(one)
    one.send("in-a/0", "x", 2, 3)
    one.send("in-a/0", "y", 2)
    one.kafka.delete_records(A0, 8)
    one.run()
    move_on(one)
    assert_good(one)
    one.send("in-a/0", "x", 4)
    one.send("in-a/0", "z", 2)
    one.run(1)
    assert_good(one)
    one.send("in-a/0", "x", ["b"], None)
    one.run(1)
    done = assert_good(one)
    assert (done.warnings, one.accounts()[A0].headless, one.accounts()[A0].quarantined) == (
        [],
        1,
        1,
    )


@pytest.mark.long
def test_headless_messages_are_no_parting(tmp_path: Path) -> None:
    """Poison was passed over, and y skipped a number meanwhile: Kafka has its messages, the output
    rightly has not.
    """
    one = DiskStream(tmp_path, on_poison="halt")
    one.kafka.create("in-a", 1)
    for session in "xy":
        one.send("in-a/0", session, ["a"], 1)
    one.send("in-a/0", "x", b"poison")
    one.run()
    one._sequences["in-a/0", "x"] -= 1
    one._sequences["in-a/0", "y"] += 1
    move_on(one)
    for session in "xy":
        one.send("in-a/0", session, 2, 3)
    one.run()
    one.send("in-a/0", "y", ["a"], 4)
    one.run()
    done = judged(one, "kafka", "output")
    assert (done.first_differences, one.accounts()[A0].headless) == ([], 2)


@pytest.mark.long
@pytest.mark.parametrize("finding", ["gap", "poison"])
@pytest.mark.parametrize("stage", [1, 3, 100])
@pytest.mark.parametrize("begin", [0, 5, 9])
def test_a_refold_passes_over_what_a_forward_passed_over(
    finding: str, stage: int, begin: int
) -> None:
    """The same code gives the same again: records, state, who is headless and what not to trust."""
    one = create_sequenced_stream("strict", on_poison="halt")
    send_message(one, 1, rows=["a"], session="t")
    for seq in (2, 3):
        send_message(one, seq, seq)
        send_message(one, seq, seq, session="t")
    if finding == "gap":
        send_message(one, 4, 4)
        one.reader.lost_offsets.add((A0, 6))
    else:
        one.kafka.produce("in-a", "s", b"?", partition=0)
    one.run(2)
    repair(one, forward=True)
    for seq in (4, 5):
        send_message(one, seq + 1, seq)
        send_message(one, seq, seq, session="t")
    send_message(one, 9, rows=["a", "c"])
    send_message(one, 10, 7)
    send_message(one, 6, 6, session="t")
    one.run(2)
    before = records_in_order(one, A0), one.sessions(A0), gaps(one)
    assert (one.accounts()[A0].headless, rows_of_session(one), rows_of_session(one, "t")) == (
        2,
        {"a": 7, "c": 0},
        {"a": 6},
    )
    assert gaps(one) == [(None, 6, 7, finding, "forward"), ("s", 7, 11, "gap", "snapshot")]
    repair(one, stage, ranges={"in-a/0": (begin, 14)})
    assert one.accounts()[A0].epoch == 2
    assert (
        records_in_order(one, A0),
        one.sessions(A0),
        [gap for gap in gaps(one) if gap[-1] != "repair"],
    ) == before


def test_a_release_right_behind_a_forward_is_made_again() -> None:
    """Who was released where the partition went on behind a loss is not set aside by a refold of
    what was before.
    """
    one = create_sequenced_stream("strict", on_poison="halt")
    send_message(one, 2, 2)
    one.run()
    send_message(one, 9, 9)
    one.kafka.produce("in-a", None, b"?")
    one.run()
    repair(one, forward=True, partition="in-a/0")
    repair(one, ranges={"in-a/0": (0, 4)})
    assert one.sessions(A0)["s"].finding == "sequence gap"
    release_session(one.open(), "s", "it is right as it is")
    repair(one, ranges={"in-a/0": (0, 2)})
    assert one.sessions(A0)["s"].finding is None


def test_so_it_is_where_a_refold_begins_with_the_loss() -> None:
    """The saved state is from right before the loss: what the session was released for stays in the
    records.
    """
    one = create_sequenced_stream("once", on_poison="halt")
    send_message(one, 2, 2)
    send_message(one, 9, 9)
    one.kafka.produce("in-a", None, b"?")
    one.run()
    repair(one, forward=True, partition="in-a/0")
    release_session(one.open(), "s", "it is right as it is")
    send_message(one, 12, 12)
    one.run()
    before = records_in_order(one, A0)
    assert before[-1]["v"] == 12
    repair(one, ranges={"in-a/0": (3, 5)})
    assert records_in_order(one, A0) == before
