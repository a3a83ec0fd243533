"""Retrace: any session at any offset is as a straight fold has it, whatever the stream lived
through since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import asdict

from seriatim.engine.findings import TIERS, Tier
from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger.manifests import Manifest
from seriatim.operations.inspect.replay import ReplayRun
from seriatim.operations.inspect.session_replay import find_session
from seriatim.operations.inspect.views import diff_states, state_to_plain
from seriatim.operations.release import release_session
from seriatim.operations.rewind import same_session
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import (
    Adder,
    BuggyAdder,
    RaisingAdder,
    create_adding_stream,
    deploy,
    send_numbers,
)
from tests.operations.decision_helper import accept, recreate_topic
from tests.operations.lookback_helper import (
    head_of,
    run_bisection,
    session_after,
    session_replay,
    session_rows,
    trace_steps,
)
from tests.operations.memory_streams import A0, A1, create_filled_stream, create_stream, send
from tests.operations.repair_helper import create_sliced_stream, repair

HOUR = 3_600_000


def noisy(
    made: MemoryStream, count: int, seed: int, partition: Partition = A0, *, poison: bool = True
) -> None:
    """Messages of three sessions with all that can be wrong: swapped, twice, missing, poison; some
    snapshots.
    """
    chance, counters, time = Random(seed), dict.fromkeys("stu", 0), 0
    for number in range(count):
        session = "stu"[number] if number < 3 else chance.choice("stu")
        counters[session] += 1
        seq = counters[session]
        drawn = chance.random()
        body: Any = {"type": "update", "seq": seq, "id": chance.choice("ab"), "v": number}
        if number < 3 or drawn < 0.1:
            body = {
                "type": "snapshot",
                "seq": seq,
                "rows": [{"id": one, "v": number} for one in "ab"],
            }
        elif drawn < 0.2:
            body |= {"seq": seq + chance.choice((-2, -1, 1, 2))}
        elif drawn < 0.25:
            body |= {"type": chance.choice(("insert", "delete"))}
        value = b"{" if poison and 0.25 < drawn < 0.27 else json.dumps(body).encode()
        time += chance.choice((0, 1_000, 20_000))
        made.kafka.produce(
            partition.topic, session, value, partition=partition.number, timestamp=time
        )


def straight(made: MemoryStream, until: int, partition: Partition = A0) -> dict[str, Any]:
    """The sessions of a world of its own, folded at once up to an offset."""
    other = MemoryStream(made.stream, made.machine)
    other.kafka = made.kafka
    other.reader.kafka = other.explain.kafka = made.kafka
    other.run(until={partition: until})
    return other.sessions(partition)


def assert_at(made: MemoryStream, offset: int, name: str, partition: Partition = A0) -> None:
    """A session after the message at an offset is as the straight fold has it."""
    meant = straight(made, offset + 1, partition).get(name)
    assert same_session(session_after(made, offset, name, partition), meant, made.machine()), (
        f"{name} at {offset}"
    )


def assert_committed(made: MemoryStream, partition: Partition = A0) -> None:
    """Every session traced from its beginning ends as it is committed, with the records that are
    committed.
    """
    for name, committed in made.sessions(partition).items():
        gone = session_replay(made, name, partition)
        gone.begin_at_or_after(0)
        start = gone.next_offset
        steps = list(gone.steps(gone.committed_end))
        assert same_session(gone.tracing_fold.session_to_save(), committed, made.machine()), name
        own = [{"offset": step.offset, **record} for step in steps for record in step.records]
        told = [
            {key: value for key, value in record.items() if key != "source_offset"}
            for record in own
        ]
        assert told == session_rows(made, name, partition, start), name


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
def test_state_at_random_offsets_equals_a_straight_fold(tier: Tier) -> None:
    """Twenty offsets in each of the five tiers, from slices of all sizes, with every kind of fault."""
    made = create_stream(tier=tier, sequence="seq", window_messages=3, window_seconds=60)
    made.kafka.create("in-a", 1)
    noisy(made, 240, seed=TIERS.index(tier))
    made.run(17)
    chance = Random(5)
    for _ in range(20):
        assert_at(made, chance.randrange(240), chance.choice("stu"))
    assert_committed(made)


def test_it_does_not_fold_from_the_beginning() -> None:
    """The nearest saved state is the base: no more messages are folded than lie between."""
    made = create_sliced_stream(60, 7)
    gone = session_replay(made, "s1")
    gone.begin_at(50)
    assert gone.next_offset == 49
    gone.fold_to(50)
    assert (gone.folds_begun, gone.messages_folded <= 1) == (1, True)


def test_after_a_repair_with_other_code() -> None:
    """What a repair made again is told as it was made again: states that it took back are no base."""
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a", 1)
    for number in range(30):
        body = {"v": 13 if number % 3 else 1, "start": number == 0}
        made.kafka.produce("in-a", "s", json.dumps(body).encode())
    made.run(4)
    deploy(made, Adder)
    repair(made, ranges={"in-a/0": (10, 20)})
    committed = {row["offset"]: row["value"] for row in made.rows(A0)}
    for offset in range(8, 30):
        gone = session_replay(made)
        gone.begin_at(offset + 1)
        gone.fold_to(offset + 1)
        assert (gone.tracing_fold.copy_of_state().value, gone.next_offset) == (
            committed[offset],
            offset + 1,
        )
    assert not gone.differs_from_saved()


def test_todays_machine_may_part_from_what_was_committed() -> None:
    """Folded from the beginning by other code the state is another one; that is seen where state
    was saved.
    """
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a", 1)
    for number in range(8):
        made.kafka.produce("in-a", "s", json.dumps({"v": 13, "start": number == 0}).encode())
    made.run(4)
    deploy(made, Adder)
    gone = session_replay(made)
    gone.begin_at(0)
    gone.fold_to(4)
    assert gone.differs_from_saved()
    gone.begin_at(4)
    assert not gone.differs_from_saved()


def test_a_machine_that_raises() -> None:
    """The message at which it raised is named; state is that of before, and what follows is set
    aside.
    """
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a", 1)
    for v in (1, 2, 99, 3):
        made.kafka.produce("in-a", "s", json.dumps({"v": v, "start": v == 1}).encode())
    made.run()
    steps = trace_steps(made)
    assert [step.outcome for step in steps] == ["applied", "applied", "set aside", "set aside"]
    assert [(one.finding, one.cause) for one in steps[2].findings] == [
        ("raised", "ValueError: ninety-nine")
    ]
    assert steps[3].after.value == 3
    assert_committed(made)


def test_machines_that_raise_now_and_then() -> None:
    """Random sums, some of which raise: every session as committed, with and without looking."""
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a", 1)
    send_numbers(made, 200, seed=3)
    made.run(23)
    assert_committed(made)
    for offset in range(0, 200, 10):
        assert_at(made, offset, f"s{offset % 4}")


def test_a_released_session_is_released_again() -> None:
    """By hand, at the same offset: the trace goes on as the run did."""
    made = create_filled_stream(2)
    send(made, A0, b"?", 8)
    made.run(2)
    release_session(made.open(), "s", "mended")
    send(made, A0, 9, 10)
    made.run(1)
    assert_committed(made)
    assert [step.outcome for step in trace_steps(made)][3:] == [
        "set aside",
        "set aside",
        "applied",
        "applied",
    ]


def test_what_a_forward_passed_over_is_passed_over_again() -> None:
    """The poison that somebody left behind is not folded, and sessions are in doubt behind it."""
    made = create_filled_stream(1, on_poison="halt")
    send(made, A0, b"?", session="t")
    send(made, A0, 8, ["a"], 9)
    made.run()
    repair(made, forward=True)
    made.run(1)
    assert_committed(made)
    assert [step.offset for step in trace_steps(made)] == [0, 1, 2, 4, 5, 6]


def test_an_expired_session_ends_by_its_partitions_time() -> None:
    """The time of others' messages counts, though they are not folded."""
    made = create_stream(session_timeout_hours=2)
    made.kafka.create("in-a", 1)
    for session, hour in (("s", 0), ("t", 1), ("t", 5), ("s", 2), ("s", 2), ("t", 9)):
        rows = [{"id": "a", "v": hour}]
        value = json.dumps({"type": "snapshot", "rows": rows}).encode()
        made.kafka.produce("in-a", session, value, timestamp=hour * HOUR)
    made.run(2)
    steps = trace_steps(made)
    assert [(step.outcome, step.ended) for step in steps] == [
        ("applied", False),
        ("ended, applied", True),
        ("ended, applied", True),
    ]
    assert_committed(made)
    for offset in range(6):
        assert_at(made, offset, "s")


def test_sessions_by_a_field_of_the_message() -> None:
    """Where the key is not the session, messages are found by what they say."""
    made = create_stream(session="field:who")
    made.kafka.create("in-a", 1)
    for number in range(20):
        body: Any = {"type": "update", "id": "a", "v": number, "who": number % 3}
        if number < 3:
            body = {"type": "snapshot", "rows": [{"id": "a", "v": 0}], "who": number}
        made.kafka.produce("in-a", "any", json.dumps(body).encode())
    made.run(6)
    assert_committed(made)
    assert_at(made, 13, "1")


def test_a_moved_session_is_set_aside_again() -> None:
    """Who lived elsewhere when it came is told with where."""
    made = create_filled_stream(2)
    made.run()
    send(made, A0, ["a"], session="m")
    made.run()
    send(made, A1, 5, session="m")
    made.run()
    step = trace_steps(made, "m", A1)[0]
    assert [(one.finding, one.cause) for one in step.findings] == [
        ("moved session", "it lives in in-a/0")
    ]
    assert_committed(made, A1)


def test_a_topics_new_life_is_looked_at_by_itself() -> None:
    """Offsets of the new life are its own; what was before is not in Kafka any more."""
    made = create_filled_stream(1)
    made.run()
    recreate_topic(made)
    made.run()
    with pytest.raises(ConfigError, match="made again"):
        session_replay(made)
    accept(made)
    made.run()
    assert_committed(made)
    assert [step.offset for step in trace_steps(made)] == [0, 1]


@pytest.mark.long
def test_what_kafka_has_no_more_is_said() -> None:
    """The refusal names what Kafka has, the saved states around, and from where on one can look."""
    made = create_sliced_stream(60, 10)
    made.kafka.delete_records(A0, 35)
    gone = session_replay(made, "s1")
    with pytest.raises(ConfigError) as told:
        gone.begin_at(33)
    assert "cannot be folded to offset 33" in told.value.message
    assert told.value.fields["kafka"] == "it has offsets 35 to 59"
    assert "--version" in told.value.next
    assert "every offset from 40 on can be looked at" in told.value.next
    gone.begin_at_or_after(0)
    assert gone.next_offset == 40
    made.kafka.delete_records(A0, 60)
    with pytest.raises(ConfigError) as told:
        session_replay(made, "s1").begin_at(33)
    assert told.value.fields["kafka"] == "it has no message; the next is offset 60"


def swept(before: int, log_start: int) -> MemoryStream:
    """Sixty messages in slices of seven; Kafka begins late, and old states are swept but the last
    one's.
    """
    made = create_sliced_stream(60, 7)
    gone = session_replay(made, "s1")
    gone.saved_points()
    live = {file.path for file in made.accounts()[A0].state}
    old = {
        f.path
        for one in gone.history.points
        if one.account.frontier < before
        for f in one.account.state
    }
    made.files.delete(old - live)
    made.kafka.delete_records(A0, log_start)
    return made


def test_it_begins_at_the_first_state_that_is_there() -> None:
    """Kafka begins at 10, states before 35 are swept: a way that may begin late begins at 35, and
    so does a replay.
    """
    made = swept(35, 10)
    gone = session_replay(made, "s1")
    gone.begin_at_or_after(0)
    assert gone.next_offset == 35
    assert run_bisection(made, "s1", "offset < 50").first_broken_offset == 52
    replaying = ReplayRun(
        made.open(),
        head_of(made),
        make_task_context=lambda _: raise_broken_promise("not asked"),
        without_state=False,
    )
    assert replaying.earliest_start(A0) == 35
    with pytest.raises(ConfigError) as told:
        list(replaying.run({A0: OffsetRange(20, 30)}))
    assert told.value.next.startswith("begin later with --from 35, or")


def test_what_is_named_instead_is_there() -> None:
    """Only saved states that have the session are named, and the offset from which on every one can
    be looked at.
    """
    made = swept(35, 10)
    gone = session_replay(made, "s1")
    with pytest.raises(ConfigError, match="cannot be folded to offset 20") as told:
        gone.begin_at(20)
    assert re.findall(r"s1 --topic in-a --version (\d+) shows", told.value.next) == ["5"]
    assert "every offset from 35 on can be looked at" in told.value.next
    for offset in range(35, 60):
        gone.begin_at(offset)
    everything = swept(60, 10)
    gone = session_replay(everything, "s1")
    gone.begin_at_or_after(0)
    assert gone.next_offset == 60


def test_the_end_of_a_log_that_was_cut_can_be_looked_at() -> None:
    """What was saved at the frontier is there, though Kafka has the last messages no longer."""
    made = create_filled_stream(1)
    made.run()
    made.kafka.topics["in-a"].messages[0].pop()
    assert session_after(made, 2).last_offset == 2
    with pytest.raises(ConfigError, match="its log was cut at offset 2"):
        trace_steps(made)


def test_messages_that_were_compacted_away_are_missed() -> None:
    """A slice of which messages are gone by now would be folded to something else: refused."""
    made = create_filled_stream(1)
    send(made, A0, 3, 4, 5)
    made.run()
    made.kafka.topics["in-a"].compacted = True
    made.kafka.compact(A0, 5)
    gone = session_replay(made)
    gone.begin_at(0)
    with pytest.raises(ConfigError, match="not in Kafka any more"):
        gone.fold_to(6)


class Old(Struct):
    """A state of before."""

    total: int = 0


class New(Struct):
    """The state of now."""

    total: int = 0
    count: int = 0


class Plus(Struct):
    """A message."""

    v: int


class First(Machine[Old, Plus, Plus]):
    """The machine of before."""

    def start(self, session: str) -> Old:  # noqa: ARG002
        """Nothing."""
        return Old()

    def apply(self, state: Old, message: Plus) -> list[Plus]:
        """Add."""
        state.total += message.v
        return [Plus(state.total)]


class Second(Machine[New, Plus, Plus]):
    """The machine of now."""

    state_version = 2

    def start(self, session: str) -> New:  # noqa: ARG002
        """Nothing."""
        return New()

    def apply(self, state: New, message: Plus) -> list[Plus]:
        """Add, and count."""
        state.total += message.v
        state.count += 1
        return [Plus(state.total)]

    def upgrade(self, old: bytes, version: int) -> New:  # noqa: ARG002
        """What was counted is not known."""
        import msgspec

        return New(msgspec.msgpack.decode(old, type=Old).total)


def test_a_state_of_an_older_version_is_upgraded() -> None:
    """The base was saved by version 1; it is folded on as the run did it."""
    stream = Stream(name="s", topics="in-.*", machine="x:M", output=OutputSettings(path="memory"))
    kinds: list[type[Machine[Any, Any, Any]]] = [First]
    made = MemoryStream(stream, lambda: UserMachine("x:M", kinds[-1]))
    made.kafka.create("in-a", 1)
    for v in (1, 2):
        made.kafka.produce("in-a", "s", json.dumps({"v": v}).encode())
    made.run()
    kinds.append(Second)
    for v in (3, 4):
        made.kafka.produce("in-a", "s", json.dumps({"v": v}).encode())
    made.run()
    gone = session_replay(made)
    gone.begin_at(2)
    assert [step.after for step in gone.steps(4)] == [New(6, 1), New(10, 2)]


def test_a_session_is_found_where_it_lives() -> None:
    """By its state; one that nobody knows is said to be unknown, with what to do."""
    made = create_filled_stream(2)
    send(made, A1, ["a"], session="only-there")
    made.run()
    tools, head = made.open(), head_of(made)
    assert find_session(tools, head, "only-there").partition == A1
    assert find_session(tools, head, "s", partition=A0).partition == A0
    with pytest.raises(ConfigError, match="there is no session 'x'") as told:
        find_session(tools, head, "x")
    assert "--partition" in told.value.next
    with pytest.raises(ConfigError, match="no partition in-a/7"):
        find_session(tools, head, "s", partition=Partition("in-a", 7))


@pytest.mark.long
def test_of_a_long_past_no_more_is_read_than_is_needed() -> None:
    """Two hundred entries: the last ones are enough for a late offset, and an early one is found
    all the same.
    """
    made = create_stream()
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], *range(199))
    made.run(1)
    read: list[int] = []
    entries = made.ledger.entries

    def counted(stream: str, after: int) -> Iterator[Manifest]:
        for one in entries(stream, after):
            read.append(one.entry.sequence)
            yield one

    made.ledger.entries = counted  # type: ignore[method-assign]
    assert_at(made, 190, "s")
    assert len(read) <= 64
    for offset in (0, 3, 120, 199):
        assert_at(made, offset, "s")
    assert session_after(made, 120).last_offset == 120


def lives(seed: int) -> MemoryStream:
    """A world of one partition through all that runs, repairs, releases and forwards do to it, in
    any order.
    """
    chance = Random(seed)
    fields: dict[str, Any] = {"tier": chance.choice(TIERS), "sequence": "seq"}
    fields |= {
        "window_messages": 3,
        "window_seconds": 60,
        "session_timeout_hours": chance.choice((0, 1)),
    }
    made = create_stream(
        on_poison=chance.choice(("quarantine", "quarantine", "halt", "skip")), **fields
    )
    made.kafka.create("in-a", 1)
    noisy(made, 40, chance.randrange(10**6))
    made.run(chance.choice((3, 7, 20)))

    def refold() -> None:
        account = made.accounts()[A0]
        edges = sorted(chance.sample(range(account.initial_frontier, account.frontier + 1), 2))
        repair(made, chance.choice((3, 1000)), ranges={"in-a/0": (edges[0], edges[1])})

    def let_go() -> None:
        waiting = [name for name, one in made.sessions(A0).items() if one.finding]
        release_session(made.open(), chance.choice([*waiting, "s"]), "meant")

    deeds: list[Callable[[], object]] = [
        lambda: noisy(made, chance.randrange(5, 40), chance.randrange(10**6)),
        lambda: made.run(chance.choice((3, 7, 20, 1000))),
        refold,
        lambda: repair(
            made, session=chance.choice("stu"), start=chance.randrange(40), partition="in-a/0"
        ),
        let_go,
        lambda: repair(made, forward=True, partition="in-a/0"),
    ]
    for _ in range(chance.randrange(6, 16)):
        with suppress(
            ConfigError, IntegrityError, ValueError
        ):  # nothing to release, to pass over, to fold again
            chance.choice(deeds)()
    return made


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_stream_lived_through(seed: int) -> None:
    """From its beginning and from every saved state on, each session's way ends as it is committed."""
    made = lives(seed)
    assert_committed(made)
    for point in session_replay(made).saved_points():
        for name, committed in made.sessions(A0).items():
            gone = session_replay(made, name)
            gone.begin_at(point.account.frontier)
            gone.fold_to(gone.committed_end)
            assert same_session(gone.tracing_fold.session_to_save(), committed, made.machine()), (
                name,
                point.account.frontier,
            )


def test_a_state_reads_the_same_however_it_was_sliced() -> None:
    """Times in UTC and decimals with all their digits, in states, changes and records: as a saved
    state has them.
    """
    table = TableSettings(
        key=("id",), columns={"id": "timestamp", "cost": "decimal(9,2)"}, before=False
    )
    stream = Stream(
        name="s", topics="in-.*", machine="table", table=table, output=OutputSettings(path="memory")
    )
    told = []
    for size in (1, 9):
        made = MemoryStream(stream, stream.table_machine)
        made.kafka.create("in-a", 1)
        row = {"id": "2026-01-01T12:00:00+02:00", "cost": "2"}
        for body in (
            {"type": "snapshot", "rows": [row]},
            {"type": "update", **row, "cost": "1E+1"},
        ):
            made.kafka.produce("in-a", "s", json.dumps(body).encode())
        made.run(size)
        steps, runner = trace_steps(made), made.machine()
        changed = [
            asdict(one) for step in steps for one in diff_states(runner, step.before, step.after)
        ]
        states = [state_to_plain(runner, step.after) for step in steps]
        told.append(msgspec.json.encode([changed, states, [step.records for step in steps]]))
    assert told[0] == told[1]
    assert b"+02:00" not in told[0]
    assert (
        b'{"what":"2026-01-01T10:00:00Z","before":null,"after":{"id":"2026-01-01T10:00:00Z","cost":"2.00"}}'
        in told[0]
    )
    assert told[0].endswith(b'"op":"update","id":"2026-01-01T10:00:00Z","cost":"10.00"}]]]')
