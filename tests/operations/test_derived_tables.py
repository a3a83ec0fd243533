"""The derived tables catch up with the ledger: once, whole, and whatever happened in between."""

from __future__ import annotations

from typing import Any

import pytest

from seriatim.engine.crash_points import arm
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Ledger
from seriatim.operations.followers import catch_up_derived, read_gaps
from seriatim.testing import MemoryDerived, MemoryStream
from tests.operations.memory_streams import A0, A1, create_filled_stream, send
from tests.operations.test_crash_points import Killed, killer
from tests.sim.chaos import Chaos


def hurt() -> MemoryStream:
    """A session in quarantine and out of it, by its next snapshot, in several slices."""
    made = create_filled_stream(2)
    made.run()
    send(made, A0, b"?", 8)
    return made


def head(made: MemoryStream) -> Ledger:
    """The ledger as it is."""
    found = made.ledger.head(made.stream.name)
    assert found is not None
    return found.ledger


def anew(made: MemoryStream) -> MemoryDerived:
    """The tables, made from the ledger's first entry on."""
    fresh = MemoryDerived(made.derived.read)
    catch_up_derived(made.ledger, fresh, head(made))
    return fresh


def tables(derived: MemoryDerived) -> dict[str, Any]:
    """What readers see."""
    return {"gaps": derived.rows("gaps"), "quarantine": derived.rows("quarantine")}


def where(made: MemoryStream) -> list[int]:
    """How far the tables are."""
    return [
        made.derived.applied_version("gaps").sequence,
        made.derived.applied_version("quarantine").sequence,
    ]


def test_a_first_run_makes_both_tables_empty() -> None:
    """People query them before anything was ever wrong."""
    made = create_filled_stream()
    assert made.run().derived_error == ""
    assert set(made.derived.versions) == {"gaps", "quarantine"}
    assert tables(made.derived) == {"gaps": [], "quarantine": []}
    assert where(made) == [head(made).sequence] * 2


def test_a_run_says_what_not_to_trust_and_which_messages_were_set_aside() -> None:
    """From the message that hurt; open, since nobody has mended it yet."""
    made = hurt()
    made.run()
    (gap,) = made.derived.rows("gaps")
    assert (gap["session"], gap["from"], gap["until"], gap["closed"]) == ("s", 3, None, None)
    assert (gap["finding"], gap["quarantined"], gap["opened"]) == (
        "poison",
        True,
        head(made).sequence,
    )
    first, second = made.derived.rows("quarantine")
    assert (first["offset"], first["value"], first["released_by"]) == (3, b"?", None)
    assert (second["offset"], second["kept_by"]) == (4, head(made).sequence)


def test_the_next_snapshot_closes_and_releases() -> None:
    """The gap ends where the snapshot is; the messages stay, with how their session was released."""
    made = hurt()
    made.run()
    send(made, A0, ["a"], 1)
    made.run()
    (gap,) = made.derived.rows("gaps")
    assert (gap["from"], gap["until"], gap["closed"], gap["closed_how"]) == (
        3,
        5,
        head(made).sequence,
        "snapshot",
    )
    released = {
        (row["released_by"], row["released_how"], row["released_offset"])
        for row in made.derived.rows("quarantine")
    }
    assert released == {(head(made).sequence, "snapshot", 5)}


def test_nothing_new_is_no_commit() -> None:
    """A run with nothing to do, and one whose slices hurt nobody, leave the tables as they are, yet
    known as of now.
    """
    made = hurt()
    made.run()
    before = made.derived.commits
    made.run()
    send(made, A1, 1, 2)
    made.run()
    assert made.derived.commits == before
    assert where(made) == [head(made).sequence] * 2


def test_entries_already_in_are_not_walked_again() -> None:
    """However long ago the tables changed."""
    made = hurt()
    made.run()
    send(made, A1, 1, 2)
    made.run()
    asked: list[int] = []
    real = made.ledger.entries
    made.ledger.entries = lambda stream, after: asked.append(after) or real(stream, after)  # type: ignore[func-returns-value, method-assign]
    made.run()
    assert asked == []
    last = head(made).sequence
    send(made, A1, 1, 2)
    made.run()
    assert asked == [last]


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(
    "point", ["committed", "witness-written", "swept", "derived-half", "derived"]
)
def test_a_crash_is_caught_up_with_next_time(point: str, releases: bool) -> None:
    """Even by a run that has nothing else to do; no message is in twice, and none is left as it
    was.
    """
    made = hurt()
    if releases:
        made.run()
        send(made, A0, ["a"], 1)
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            made.run()
    finally:
        arm(None)
    made.run()
    assert tables(made.derived) == tables(anew(made))
    offsets = [row["offset"] for row in made.derived.rows("quarantine")]
    assert sorted(set(offsets)) == sorted(offsets) != []
    assert [row["released_by"] is not None for row in made.derived.rows("quarantine")] == [
        releases
    ] * 2


def test_trouble_fails_no_run_and_is_told() -> None:
    """The records are committed; the next run catches up."""
    made = hurt()
    made.derived.refusals = 100
    outcome = made.run()
    assert outcome.slices == 1
    assert "could not be written" in outcome.derived_error
    assert "next run catches up" in outcome.derived_error
    made.derived.refusals = 0
    assert made.run().derived_error == ""
    assert tables(made.derived) == tables(anew(made))


def test_a_moment_of_trouble_is_tried_again() -> None:
    """As is another run's commit in between."""
    made = hurt()
    made.derived.refusals = 2
    assert made.run().derived_error == ""
    assert tables(made.derived) == tables(anew(made))


def test_a_lost_file_of_messages_is_told_with_its_name() -> None:
    """It is an integrity matter, and still fails no fold."""
    made = hurt()
    made.derived.refusals = 100
    made.run()
    made.derived.refusals = 0
    (path,) = [path for path in made.files.files if path.startswith("kept/")]
    del made.files.files[path]
    assert path in made.run().derived_error


def test_a_table_that_was_deleted_is_made_again() -> None:
    """Losing one is never losing data."""
    made = hurt()
    made.run()
    before = tables(made.derived)
    for table in ("gaps", "quarantine"):
        del made.derived.versions[table]
        made.run()
        assert tables(made.derived) == before


def test_a_rebuild_makes_both_anew() -> None:
    """Whatever was in them."""
    made = hurt()
    made.run()
    before = tables(made.derived)
    for versions in made.derived.versions.values():
        versions[-1].rows.clear()
    made.run()
    assert tables(made.derived) == {"gaps": [], "quarantine": []}
    catch_up_derived(made.ledger, made.derived, head(made), rebuild=True)
    assert tables(made.derived) == before


def test_tables_of_another_ledger_are_made_again() -> None:
    """The ledger was restored as of earlier and went on otherwise: what it never said is not in the
    tables.
    """
    made = create_filled_stream(2)
    made.run()
    kept = list(made.ledger.commits)
    send(made, A0, b"?", 8)
    made.run()
    assert made.derived.rows("gaps")
    made.ledger.commits, made.ledger.stored_witness = kept, None
    made.kafka.truncate(A0, 3)
    send(made, A0, 1)
    send(made, A1, 1)
    made.run()
    assert tables(made.derived) == tables(anew(made)) == {"gaps": [], "quarantine": []}


def test_gaps_are_known_as_of_the_ledger_however_far_the_table_is() -> None:
    """Whoever asks is answered from the entries that the table lacks."""
    made = hurt()
    made.derived.refusals = 1000
    made.run()
    asked = read_gaps(made.ledger, made.derived, head(made))
    assert [(gap.session, gap.start) for gap in asked] == [("s", 3)]
    made.derived.refusals = 0
    made.run()
    assert read_gaps(made.ledger, made.derived, head(made)) == asked


def test_a_halt_is_open_for_all_sessions_until_it_is_passed_over() -> None:
    """A hole under strict: the partition waits there, and the other goes on."""
    made = create_filled_stream(2)
    send(made, A0, 5, 6)
    made.reader.lost_offsets.add((A0, 3))
    made.run()
    halts = [gap for gap in read_gaps(made.ledger, made.derived, head(made)) if gap.session is None]
    assert [(gap.topic_partition, gap.start, gap.until, gap.finding) for gap in halts] == [
        (A0, 3, None, "gap")
    ]


def test_in_any_world_the_tables_are_those_of_the_ledger(seeds: range) -> None:
    """Crashes, zombies and runs within runs: what caught up step by step is what is made from the
    first entry.
    """
    seen: list[Gap] = []
    for seed in range(len(seeds) // 4):
        chaos = Chaos(seed)
        try:
            chaos.live()
        finally:
            arm(None)
        made = chaos.world
        assert tables(made.derived) == tables(anew(made)), f"seed={seed}"
        rows = made.derived.rows("quarantine")
        # A repair that sets a message aside again adds a row of its own: `kept_by` tells them apart.
        places = [
            (row["topic_id"], row["partition"], row["offset"], row["session"], row["kept_by"])
            for row in rows
        ]
        assert len(set(places)) == len(places), f"seed={seed}"
        seen += made.derived.versions["gaps"][-1].rows
    assert any(gap.closed for gap in seen)
    assert any(gap.closed is None for gap in seen)
    assert any(gap.quarantined for gap in seen)


@pytest.mark.parametrize("seed", [267, 288, 433, 1208])
def test_messages_that_a_repair_quarantines_again_are_released_where_their_session_was(
    seed: int,
) -> None:
    """In these worlds a snapshot had released the session before the repair read it again."""
    chaos = Chaos(seed)
    try:
        chaos.live()
    finally:
        arm(None)
    assert tables(chaos.world.derived) == tables(anew(chaos.world))
