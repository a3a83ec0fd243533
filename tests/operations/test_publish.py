"""`current` is the fold of the records as of the entry that it names, however it got there."""

from __future__ import annotations

import pytest

from seriatim.engine.crash_points import PUBLISH_POINTS, arm
from seriatim.errors import ConfigError, PlatformError
from seriatim.operations.accept import accept_topic as decide
from seriatim.testing import MemoryCurrent, MemoryStream
from tests.operations.memory_streams import A0, A1, create_filled_stream, create_stream, send
from tests.operations.publish_helper import check, current_of, publish_to
from tests.operations.test_crash_points import Killed, killer


def accepted(made: MemoryStream) -> None:
    """A person accepts that in-a was made again."""
    decide(made.open(), "in-a", "it was meant")


def values(current: MemoryCurrent) -> dict[tuple[str, int, str, str], int]:
    """The rows' values by topic, partition, session and id."""
    return {
        (row["topic"], row["partition"], row["session"], row["id"]): row["v"]
        for row in current.rows()
    }


def test_the_table_as_of_the_last_entry() -> None:
    """One row for each key that a session has, with the offset that last touched it."""
    made = create_filled_stream(2)
    made.run()
    current = current_of(made)
    done = publish_to(made, current)
    assert values(current) == {
        ("in-a", n, "s", row): v for n in (0, 1) for row, v in (("a", 2), ("b", 0))
    }
    assert [(row["id"], row["offset"]) for row in current.rows() if row["partition"] == 0] == [
        ("a", 2),
        ("b", 0),
    ]
    assert (done.sequence, done.previous_sequence, done.has_changed) == (
        made.ledger.commits[-1].entry.sequence,
        -1,
        True,
    )  # type: ignore[union-attr]
    check(made, current)


def test_rows_that_were_deleted_are_gone() -> None:
    """By a delete, or by a snapshot that does not name them."""
    made = create_filled_stream()
    send(made, A0, b'{"type": "delete", "id": "a"}')
    made.run()
    current = current_of(made)
    publish_to(made, current)
    assert set(values(current)) == {("in-a", 0, "s", "b")}
    send(made, A0, ["c"])
    made.run()
    publish_to(made, current)
    assert set(values(current)) == {("in-a", 0, "s", "c")}
    check(made, current)


def test_only_what_is_new_is_read() -> None:
    """Files of touched partitions, from the frontier that is published on."""
    made = create_filled_stream(2)
    made.run()
    current = current_of(made)
    publish_to(made, current)
    send(made, A1, 7)
    made.run()
    (catch,) = publish_to(made, current, dry_run=True).catch_ups
    assert (catch.partition, catch.first_new_offset, catch.until, catch.is_full_rebuild) == (
        A1,
        3,
        4,
        False,
    )
    assert [file.first_offset for file in catch.files] == [3]
    assert values(current)["in-a", 1, "s", "a"] == 2, "a dry run changes nothing"
    publish_to(made, current)
    assert values(current)["in-a", 1, "s", "a"] == 7
    check(made, current)


def test_an_entry_may_be_named_and_the_table_never_goes_back() -> None:
    """Except by a rebuild."""
    made = create_filled_stream()
    made.run()
    early = made.run().sequence
    send(made, A0, 8)
    late = made.run().sequence
    current = current_of(made)
    assert publish_to(made, current, early).sequence == early
    assert values(current)["in-a", 0, "s", "a"] == 2
    publish_to(made, current)
    again = publish_to(made, current, early)
    assert (again.has_changed, again.sequence, current.published_version().sequence) == (
        False,
        late,
        late,
    )
    publish_to(made, current, early, rebuild=True)
    assert current.published_version().sequence == early
    assert values(current)["in-a", 0, "s", "a"] == 2
    with pytest.raises(ConfigError, match="there is no entry 99"):
        publish_to(made, current, 99)


def test_a_stream_that_never_ran_has_nothing_to_publish() -> None:
    """It is told what to do first."""
    made = create_stream()
    with pytest.raises(ConfigError, match="never run"):
        publish_to(made, current_of(made))


def test_publishing_twice_is_publishing_once() -> None:
    """The commit says which entry it reaches."""
    made = create_filled_stream()
    made.run()
    current = current_of(made)
    publish_to(made, current)
    assert current.table is not None
    version = current.table.version
    assert not publish_to(made, current).has_changed
    assert current.table.version == version


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("point", PUBLISH_POINTS)
def test_a_crash_is_caught_up_with(point: str, first: bool) -> None:
    """Readers see the table as of one entry or of the next, never half; the next publish ends
    right.
    """
    made = create_filled_stream(2)
    made.run()
    current = current_of(made)
    if not first:
        publish_to(made, current)
        send(made, A0, 5)
        send(made, A1, 6)
        made.run()
    before = current.rows()
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            publish_to(made, current)
    finally:
        arm(None)
    assert (current.rows() == before) == (point != "current-published")
    publish_to(made, current)
    check(made, current)
    assert current.published_version().sequence == made.ledger.head("s").ledger.sequence  # type: ignore[union-attr]


def test_somebody_else_who_publishes_is_no_trouble() -> None:
    """What a moment refuses is tried again; a disk that stays full is told."""
    made = create_filled_stream()
    made.run()
    current = current_of(made)
    current.refusals = 2
    assert publish_to(made, current).has_changed
    check(made, current)
    send(made, A0, 5)
    made.run()
    current.refusals = 100
    with pytest.raises(PlatformError, match="could not be written"):
        publish_to(made, current)


def test_a_new_life_of_a_topic() -> None:
    """The old life's rows are taken back by its last records; the new one's are there, however
    often it happens.
    """
    made = create_filled_stream(2)
    made.run()
    current = current_of(made)
    publish_to(made, current)
    for life in range(3):
        made.kafka.delete("in-a")
        made.kafka.create("in-a", 2)
        send(made, A0, ["a"], 10 + life, session="t")
        made.run()
        accepted(made)
        if life == 1:
            publish_to(made, current)
            assert current.rows() == []
            check(made, current)
        made.run()
        if life != 0:
            publish_to(made, current)
            assert values(current) == {("in-a", 0, "t", "a"): 10 + life}
            check(made, current)
    publish_to(made, current, rebuild=True)
    assert values(current) == {("in-a", 0, "t", "a"): 12}
    check(made, current)


def test_a_ledger_that_was_restored_and_went_on_otherwise() -> None:
    """A table that has seen entries that are not in it is made again."""
    made = create_filled_stream()
    made.run()
    kept = list(made.ledger.commits)
    current = current_of(made)
    send(made, A0, 5)
    made.run()
    publish_to(made, current)
    made.ledger.commits, made.ledger.stored_witness = kept, None
    made.kafka.truncate(A0, 3)
    send(made, A0, 9)
    made.run()
    assert publish_to(made, current).previous_sequence == -1
    assert values(current)["in-a", 0, "s", "a"] == 9
    check(made, current)
