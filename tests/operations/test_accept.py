"""Accept: a topic made again begins a new life by one entry, and both lives are in the records."""

from __future__ import annotations

import pytest
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.machine import Machine, UserMachine
from seriatim.errors import ConfigError
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream
from tests.operations.decision_helper import (
    accept,
    assert_records_match_state,
    recreate_topic,
    status_of,
    tables_from_records,
    tables_from_state,
)
from tests.operations.memory_streams import A0, A1, A2, create_filled_stream, frontiers, kinds, send


def test_a_topic_made_again_begins_a_new_life() -> None:
    """Old sessions end by the accept entry, the new life is read from 0, both are in the records."""
    made = create_filled_stream()
    send(made, A0, ["c"], 5, session="t")
    made.run()
    old = made.accounts()[A0]
    new = recreate_topic(made)
    assert [f.finding for f in made.run().findings] == ["re-created"]

    done = accept(made)

    (one,) = done.partitions
    assert (one.old_topic_id, one.new_topic_id, one.frontier, one.resumes_at) == (
        old.topic_id,
        new,
        old.frontier,
        0,
    )
    assert (one.ended_sessions, one.end_records) == (2, 3)
    account = made.accounts()[A0]
    assert (account.topic_id, account.frontier, account.initial_frontier, account.epoch) == (
        new,
        0,
        0,
        1,
    )
    assert (account.state, account.halt, account.log_end, account.messages) == ((), None, 0, 5)
    deletes = [row for row in made.rows() if row["offset"] == old.frontier]
    assert {row["op"] for row in deletes} == {"delete"}
    assert [row["index"] for row in deletes] == [0, 1, 2]
    assert {(row["topic_id"], row["source_offset"]) for row in deletes} == {
        (old.topic_id, old.frontier)
    }
    assert {row["session"]: row["timestamp"] for row in deletes} == {"s": 2, "t": 4}
    assert tables_from_records(made, A0) == {}
    assert_records_match_state(made)

    outcome = made.run()

    assert (outcome.messages, outcome.findings, frontiers(made)) == (2, [], {"in-a/0": 2})
    assert {row["topic_id"] for row in made.rows()} == {old.topic_id, new}
    assert tables_from_state(made, A0) == {"s": {"x": 7, "y": 0}}
    assert_records_match_state(made)
    entry = made.ledger.manifest_at("s", done.sequence).entry
    assert (entry.kind, entry.reason) == ("accept", "meant")
    assert made.run().findings == []


def test_it_is_accepted_before_any_run_has_found_it() -> None:
    """Accept looks at Kafka itself."""
    made = create_filled_stream()
    made.run()
    recreate_topic(made)
    accept(made)
    assert made.run().findings == []
    assert_records_match_state(made)


def test_partitions_more_and_fewer() -> None:
    """New ones are born at 0; those that are gone end, and go on from 0 if they come back."""
    made = create_filled_stream(2)
    made.run()
    new = recreate_topic(made, 3)
    accept(made)
    assert made.run().messages == 6
    assert {account.topic_id for account in made.accounts().values()} == {new}
    assert made.accounts()[A2].epoch == 0
    assert_records_match_state(made)

    newest = recreate_topic(made, 1)
    made.run()
    accept(made)
    outcome = made.run()
    assert outcome.findings == []
    assert frontiers(made) == {"in-a/0": 2, "in-a/1": 0, "in-a/2": 0}
    assert made.accounts()[A1].state == ()
    shown = {one.partition: one.topic_state for one in status_of(made).partitions}
    assert shown == {0: "live", 1: "retired", 2: "retired"}
    assert_records_match_state(made)

    made.kafka.add_partitions("in-a", 1)
    send(made, A1, ["x"], session="later")
    assert made.run().messages == 1
    assert {row["topic_id"] for row in made.rows(A1) if row["session"] == "later"} == {newest}
    assert_records_match_state(made)


def test_status_is_right_before_and_after() -> None:
    """Hurt and re-created, then good and live."""
    made = create_filled_stream()
    made.run()
    new = recreate_topic(made)
    made.run()
    before = status_of(made)
    assert before.verdict == "hurt"
    (one,) = before.partitions
    assert one.halt is not None
    assert (one.topic_state, one.halt.finding) == ("re-created", "re-created")
    accept(made)
    made.run()
    after = status_of(made)
    assert after.verdict == "good"
    (one,) = after.partitions
    assert (one.topic_id, one.frontier, one.lag, one.topic_state) == (new, 2, 0, "live")
    assert (one.epoch, one.halt) == (1, None)


def test_sessions_in_quarantine_end_too() -> None:
    """Their rows were in the records, so they are taken back; nobody is in quarantine any more."""
    made = create_filled_stream()
    send(made, A0, b"?", 9)
    made.run()
    assert made.accounts()[A0].quarantined == 1
    recreate_topic(made)
    accept(made)
    assert made.accounts()[A0].quarantined == 0
    assert_records_match_state(made)


def test_whatever_halted_the_old_life_ends_with_it() -> None:
    """A partition that waited at a gap is told to be made again as well, and accepted as the others
    are.
    """
    made = create_filled_stream(2)
    made.reader.lost_offsets = {(A0, 1)}
    made.run()
    made.reader.lost_offsets = set()
    recreate_topic(made, 2)
    assert {(f.finding, f.partition_name) for f in made.run().findings} == {
        ("re-created", "in-a/0"),
        ("re-created", "in-a/1"),
    }
    assert made.run().findings == []
    accept(made)
    assert made.run().findings == []
    assert all(account.halt is None for account in made.accounts().values())
    assert_records_match_state(made)


def test_what_was_never_read_of_the_old_life_is_a_gap() -> None:
    """Named by the entry, under the old topic id, so that the gaps table has it."""
    made = create_filled_stream()
    made.run()
    old = made.accounts()[A0].topic_id
    send(made, A0, 3, 4)
    made.run(until={A0: 4})
    recreate_topic(made)
    done = accept(made)
    assert done.partitions[0].unread_messages == 1
    (change,) = made.ledger.manifest_at("s", done.sequence).entry.changes
    assert [(m.finding, m.offset, m.until, m.topic_id) for m in change.marks] == [
        ("re-created", 4, 5, old)
    ]


def test_a_new_life_that_has_lost_its_beginning_starts_where_it_can() -> None:
    """The person is shown what is gone, and it is published as a gap; a halt would only ask the
    same again.
    """
    made = create_filled_stream()
    made.run()
    recreate_topic(made)
    send(made, A0, ["a"])
    made.kafka.delete_records(A0, 2)
    done = accept(made)
    assert done.partitions[0].resumes_at == 2
    (change,) = made.ledger.manifest_at("s", done.sequence).entry.changes
    assert ("expired", 0, 2) in [(mark.finding, mark.offset, mark.until) for mark in change.marks]
    outcome = made.run()
    assert (outcome.findings, outcome.messages) == ([], 1)
    assert_records_match_state(made)


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    """Partitions, ids, sessions and records, counted by the machine itself."""
    made = create_filled_stream(2)
    made.run()
    recreate_topic(made, 2)
    files, entries = set(made.files.files), len(made.ledger.commits)
    looked = accept(made, dry_run=True)
    assert (set(made.files.files), len(made.ledger.commits), looked.sequence) == (
        files,
        entries,
        -1,
    )
    assert looked.partitions == accept(made).partitions


def test_nothing_to_accept_is_refused_by_name() -> None:
    """Unknown, being read, not in Kafka, never run: each says what helps."""
    made = create_filled_stream()
    with pytest.raises(ConfigError, match="never run"):
        accept(made)
    made.run()
    with pytest.raises(
        ConfigError, match="nothing to accept: in-a is the topic that the ledger knows"
    ):
        accept(made)
    with pytest.raises(ConfigError, match="'in-b' was never read") as unknown:
        accept(made, "in-b")
    assert unknown.value.fields["known"] == "in-a"
    with pytest.raises(ConfigError, match="not a partition"):
        accept(made, "in-a/x")
    made.kafka.delete("in-a")
    with pytest.raises(ConfigError, match="not in Kafka") as gone:
        accept(made)
    assert "seriatim retire s in-a" in gone.value.next
    assert kinds(made) == ["start", "slice"]


def test_other_findings_are_not_accepts_business() -> None:
    """It says at what the partition waits and what to do."""
    made = create_filled_stream()
    made.reader.lost_offsets = {(A0, 1)}
    made.run()
    with pytest.raises(ConfigError, match="not made again") as refused:
        accept(made)
    assert "in-a/0 waits at offset 1: gap" in refused.value.fields["waits"]
    assert "seriatim repair s --partition in-a/0" in refused.value.next


def test_a_held_topic_is_refused() -> None:
    """A repair works there."""
    made = create_filled_stream()
    made.run()
    recreate_topic(made)
    head = made.ledger.head("s")
    assert head is not None
    held = replace(head.ledger.partitions["in-a/0"], hold="h1")
    made.ledger.head = lambda _: replace(  # type: ignore[method-assign]
        head, ledger=replace(head.ledger, partitions={"in-a/0": held})
    )
    with pytest.raises(ConfigError, match="held by repair h1"):
        accept(made)


def test_the_topic_that_the_ledger_knows_is_back() -> None:
    """A run against the wrong cluster found every topic made again: pointed back, accept lets them
    go on.
    """
    made = create_filled_stream()
    made.run()
    right = made.kafka.topics["in-a"]
    recreate_topic(made)
    assert made.run().findings
    made.kafka.topics["in-a"] = right
    send(made, A0, 3)
    assert made.run().messages == 0
    done = accept(made)
    assert (done.is_new_life, done.partitions[0].resumes_at, done.partitions[0].end_records) == (
        False,
        3,
        0,
    )
    assert made.run().messages == 1
    assert_records_match_state(made)


class Count(Struct):
    """What was counted."""

    n: int = 0


class Tick(Struct):
    """What is counted."""

    n: int


class Total(Struct):
    """What came of it."""

    n: int


class Counting(Machine[Count, Tick, Total]):
    """Takes its total back when a session ends."""

    def start(self, _: str) -> Count:
        return Count()

    def apply(self, count: Count, tick: Tick) -> list[Total]:
        count.n += tick.n
        return [Total(n=count.n)]

    def end(self, count: Count) -> list[Total]:
        if count.n == 13:
            raise ValueError("thirteen")
        return [Total(n=-count.n)]


def counting() -> MemoryStream:
    """A stream with a machine of one's own."""
    stream = Stream(
        name="s", topics="in-.*", machine="own:Counting", output=OutputSettings(path="memory")
    )
    made = MemoryStream(stream, lambda: UserMachine("own:Counting", Counting))
    made.kafka.create("in-a", 2)
    return made


def test_a_machine_of_ones_own_says_how_a_session_ends() -> None:
    """By its `end`; one that cannot is named with its session, and nothing is changed."""
    made = counting()
    made.kafka.produce("in-a", "a", b'{"n": 4}', partition=0)
    made.kafka.produce("in-a", "b", b'{"n": 13}', partition=1)
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a")
    files = set(made.files.files)
    with pytest.raises(ConfigError, match=r"cannot end session 'b': ValueError: thirteen"):
        accept(made)
    assert set(made.files.files) == files

    made = counting()
    made.kafka.produce("in-a", "a", b'{"n": 4}')
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a")
    accept(made)
    assert [row["n"] for row in made.rows()] == [4, -4]
