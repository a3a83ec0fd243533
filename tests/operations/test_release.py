"""Release by hand: a session leaves quarantine with its last good state, by one entry with its
reason.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.engine.crash_points import arm
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.operations.followers import catch_up_derived
from seriatim.operations.release import release_session
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, A1, B0, create_filled_stream, send
from tests.operations.repair_helper import repair
from tests.operations.test_crash_points import Killed, killer
from tests.operations.test_sweep import named, there


def hurt(**fields: Any) -> MemoryStream:
    """A session in quarantine since offset 3."""
    made = create_filled_stream(2, **fields)
    send(made, A0, b"?", 8)
    made.run()
    return made


def session(made: MemoryStream) -> Session:
    """The session as it is saved."""
    return made.sessions(A0)["s"]


def values(made: MemoryStream) -> list[int]:
    """What its records say."""
    return [row["v"] for row in made.rows(A0)]


def test_a_released_session_goes_on_from_its_last_good_state() -> None:
    """What was set aside stays so; what comes next applies."""
    made = hurt()
    before = session(made).state_bytes
    done = release_session(made.open(), "s", "the producer was mended")
    assert (done.partition, done.finding, done.offset, done.frontier) == (A0, "poison", 3, 5)
    assert (session(made).finding, session(made).state_bytes) == (None, before)
    send(made, A0, 9)
    outcome = made.run()
    assert not outcome.findings
    assert values(made)[-1] == 9
    assert 8 not in values(made)
    assert made.accounts()[A0].quarantined == 0


def test_the_ledger_says_who_was_released_and_why() -> None:
    """One entry, which moves nothing but the epoch; the tables say by hand."""
    made = hurt()
    before = made.accounts()[A0]
    done = release_session(made.open(), "s", "why not")
    entry = made.ledger.manifest_at("s", done.sequence).entry
    assert (entry.kind, entry.reason) == ("accept", "why not")
    after = made.accounts()[A0]
    assert (after.frontier, after.epoch, after.messages) == (
        before.frontier,
        before.epoch + 1,
        before.messages,
    )
    made.run()
    (gap,) = made.derived.rows("gaps")
    assert (gap["until"], gap["closed"], gap["closed_how"]) == (5, done.sequence, "hand")
    kept = made.derived.rows("quarantine")
    assert [(row["released_by"], row["released_how"]) for row in kept] == [
        (done.sequence, "hand")
    ] * 2


@pytest.mark.parametrize("tier", ["once", "strict"])
def test_its_sequence_begins_anew(tier: str) -> None:
    """The next message follows those that were set aside: it is no gap, and the one after it is
    counted from it.
    """
    table = TableSettings(key=("id",), columns={"id": "string", "v": "int64"}, before=False)
    fields: Any = {"machine": "table", "table": table, "tier": tier, "sequence": "seq"}
    stream = Stream(name="s", topics="in-.*", output=OutputSettings(path="memory"), **fields)
    made = MemoryStream(stream, stream.table_machine)
    made.kafka.create("in-a", 1)

    def put(number: int, **body: Any) -> None:
        made.kafka.produce("in-a", "s", json.dumps({**body, "seq": number}).encode(), partition=0)

    put(1, type="snapshot", rows=[{"id": "a", "v": 0}])
    put(2, type="update", id="missing", v=1)
    put(3, type="update", id="a", v=3)
    made.run()
    release_session(made.open(), "s", "why not")
    put(4, type="update", id="a", v=4)
    put(5, type="update", id="a", v=5)
    assert not made.run().findings
    assert values(made) == [0, 4, 5]
    put(7, type="update", id="a", v=7)
    assert [finding.finding for finding in made.run().findings] == ["sequence gap"]


def test_a_dry_run_changes_nothing() -> None:
    """It says who it would be."""
    made = hurt()
    commits, files = len(made.ledger.commits), set(made.files.files)
    assert release_session(made.open(), "s", "", dry_run=True).sequence == -1
    assert (len(made.ledger.commits), set(made.files.files)) == (commits, files)


@pytest.mark.parametrize("name", ["s", "nobody"])
def test_who_is_not_in_quarantine_is_not_released(name: str) -> None:
    """Neither a live session nor a name that nobody has; the message says where to look."""
    made = create_filled_stream()
    made.run()
    with pytest.raises(ConfigError, match="is not in quarantine") as caught:
        release_session(made.open(), name, "why not")
    assert "seriatim status s" in caught.value.next


def test_a_session_that_waits_in_two_topics_is_chosen_by_topic() -> None:
    """A session is a key's life in a topic."""
    made = hurt()
    made.kafka.create("in-b", 1)
    send(made, B0, ["a"], b"?")
    made.run()
    with pytest.raises(ConfigError, match="waits in in-a/0, in-b/0"):
        release_session(made.open(), "s", "why not")
    assert release_session(made.open(), "s", "why not", "in-b").partition == B0
    assert session(made).finding == "poison"


def test_nobody_is_released_where_the_topic_waits_for_a_decision() -> None:
    """The topic was made again: its sessions end with its old life."""
    made = hurt()
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 2)
    made.run()
    with pytest.raises(ConfigError, match="waits: re-created") as caught:
        release_session(made.open(), "s", "why not")
    assert "seriatim accept s in-a" in caught.value.next


def test_nobody_is_released_where_messages_are_gone_before_that_is_passed_over() -> None:
    """`accept` refuses a topic that was not created again, so the advice is to go on without them."""
    made = hurt(tier="strict")
    send(made, A0, 8, 9)
    made.kafka.delete_records(A0, 7)
    made.run()
    with pytest.raises(ConfigError, match="waits: expired, so no session in it") as caught:
        release_session(made.open(), "s", "why not")
    assert "accept" not in caught.value.next
    assert caught.value.next.endswith("seriatim repair s --partition in-a/0 --forward --apply")
    repair(made, partition="in-a/0", forward=True)
    assert release_session(made.open(), "s", "why not").partition == A0


def test_a_release_on_a_ledger_that_moves_is_made_on_top_of_it() -> None:
    """Another run was faster: the state is that of its slice."""
    made = hurt()
    send(made, A0, 8)
    calls = [0]

    def faster(name: str) -> None:
        calls[0] += name == "put_manifest"
        if name == "put_manifest" and calls[0] == 1:
            made.run()

    made.ledger.on_call = faster
    assert release_session(made.open(), "s", "why not").frontier == 6
    made.ledger.on_call = lambda _: None
    assert session(made).finding is None


def test_a_slice_that_was_folded_meanwhile_is_refused_and_folded_again() -> None:
    """It loaded the session as it was before: it would take the release back."""
    made = hurt()
    send(made, A0, 8)
    send(made, A1, 8)
    done: list[Any] = []

    real = made.reader.read_slices

    def follow(starts: Any, messages_max: int, on_slice: Any, wish: Any) -> None:
        def between(ranges: Any, source: Any) -> bool:
            answers = source.map

            def mapped(task: Any, **more: Any) -> Any:
                found = answers(task, **more)
                if not done:
                    done.append(release_session(made.open(), "s", "why not"))
                return found

            source.map = mapped
            return bool(on_slice(ranges, source))

        real(starts, messages_max, between, wish)

    made.reader.read_slices = follow  # type: ignore[method-assign]
    made.run()
    assert session(made).finding is None
    made.run()
    assert values(made)[-1] == 8


@pytest.mark.parametrize(
    "point", ["state-file-written", "manifest-written", "committed", "witness-written"]
)
def test_a_crash_leaves_it_done_or_not(point: str) -> None:
    """And it can be said again; what the crash left is swept."""
    made = hurt()
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            release_session(made.open(), "s", "why not")
    finally:
        arm(None)
    if session(made).finding is not None:
        release_session(made.open(), "s", "why not")
    send(made, A0, 9)
    made.run()
    assert values(made)[-1] == 9
    assert there(made) == named(made)
    fresh = type(made.derived)(made.derived.read)
    head = made.ledger.head("s")
    assert head is not None
    catch_up_derived(made.ledger, fresh, head.ledger)
    assert fresh.rows("gaps") == made.derived.rows("gaps")
