"""Several kinds of records from one machine: each in its table, all decided by the same ledger
entry.
"""

from __future__ import annotations

from typing import Any

import pytest

from seriatim.engine.crash_points import CRASH_POINTS, arm
from seriatim.engine.machine import Machine, UserMachine
from seriatim.errors import ConfigError
from seriatim.ledger.model import Ledger
from seriatim.operations.accept import accept_topic
from seriatim.operations.followers import catch_up_derived
from seriatim.testing import CRASH, MemoryStream, fold
from tests.operations.market_machine import (
    Book,
    Level,
    Market,
    Note,
    Order,
    Trade,
    create_market_stream,
    send_busy_market,
    send_order,
)
from tests.operations.memory_streams import A0, A1
from tests.operations.publish_helper import check, current_of, publish_to
from tests.operations.repair_helper import repair
from tests.operations.test_crash_points import Killed, killer


def head(made: MemoryStream) -> Ledger:
    """The ledger as it is."""
    found = made.ledger.head("s")
    assert found is not None
    return found.ledger


def tables(made: MemoryStream) -> dict[str, list[dict[str, Any]]]:
    """What readers of each table see, in order, without what depends on slices."""
    found = {"": made.rows(), **{table: made.other_rows(table) for table in ("trade", "note")}}
    return {
        table: sorted(
            rows, key=lambda row: (row["topic_id"], row["partition"], row["offset"], row["index"])
        )
        for table, rows in found.items()
    }


def straight(made: MemoryStream, partitions: int = 1) -> dict[str, list[dict[str, Any]]]:
    """The same messages folded in one go, in a world without trouble."""
    other = create_market_stream(partitions)
    other.kafka = made.kafka
    other.reader.kafka = other.explain.kafka = made.kafka
    other.run()
    return tables(other)


def test_each_kind_goes_to_its_table() -> None:
    """The first to records; `index` counts through all records of a message, and so tells their
    order.
    """
    made = create_market_stream()
    send_order(made, A0, "whole")
    send_order(made, A0, "trade", size=5)
    made.run()
    assert [(row["offset"], row["index"], row["size"]) for row in made.rows()] == [
        (0, 0, 5),
        (1, 2, 0),
    ]
    assert [(row["offset"], row["index"], row["number"]) for row in made.other_rows("trade")] == [
        (1, 0, 1)
    ]
    assert [(row["index"], row["text"], row["session"]) for row in made.other_rows("note")] == [
        (1, "1 is gone", "s")
    ]
    (change,) = [
        change
        for commit in made.ledger.commits
        for change in commit.entry.changes
        if change.records
    ]  # type: ignore[union-attr]
    assert [
        file.path.partition("/")[0] for files in change.other_records.values() for file in files
    ] == [
        "records-trade",
        "records-note",
    ]
    assert change.certificate is not None
    counts = change.certificate.counts
    assert (counts.records, counts.other_records) == (2, {"trade": 1, "note": 1})
    assert made.accounts()[A0].records == 2


def test_the_kit_for_users_gives_all_kinds_in_order() -> None:
    """As the machine gave them, whatever ends in between."""
    done = fold(
        Market, [Order("whole", "1", 5), Order("trade", "1", 2), CRASH, Order("trade", "1", 3)]
    )
    assert done.records == [
        Level("1", 5),
        Trade(1, 2),
        Level("1", 3),
        Trade(2, 3),
        Note("1 is gone"),
        Level("1", 0),
    ]
    assert done.state == Book({"1": 0}, 2)


def test_every_table_says_how_far_it_is() -> None:
    """Also one that got nothing from the last entries; each entry with something for it is a commit
    of its own.
    """
    made = create_market_stream()
    send_order(made, A0, "whole")
    first = made.run().sequence
    send_busy_market(made, A0)
    made.run(messages_max=2)
    send_order(made, A0, "quote")
    made.run()
    assert [
        made.derived.outputs.applied_version(table).sequence for table in ("trade", "note")
    ] == [head(made).sequence] * 2
    entries = [commit.entry for commit in made.ledger.commits if commit.entry is not None]
    trades = [
        entry.sequence
        for entry in entries
        if any(change.other_records.get("trade") for change in entry.changes)
    ]
    assert len(trades) > 2
    assert {one.entry.sequence for one in made.derived.outputs.versions["trade"]} >= {
        first,
        *trades,
        head(made).sequence,
    }


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", [*CRASH_POINTS, "output-half"])
def test_a_crash_is_caught_up_with(point: str, times: int) -> None:
    """Wherever it was: no table lacks a record, and none has one twice."""
    made = create_market_stream(2)
    send_busy_market(made, A0)
    made.run()
    send_busy_market(made, A1)
    send_order(made, A0, "trade", "2", 1)
    arm(killer(point, times))
    try:
        made.run(messages_max=4)
    except Killed:
        pass
    finally:
        arm(None)
    made.run()
    assert tables(made) == straight(made, 2)
    assert {
        made.derived.outputs.applied_version(table).sequence for table in ("trade", "note")
    } == {head(made).sequence}
    named = {
        file.path
        for commit in made.ledger.commits
        for c in commit.entry.changes
        for file in c.files()
    }  # type: ignore[union-attr]
    assert {path for path in made.files.files if path.startswith("records")} <= named, (
        "orphans are swept"
    )


def test_a_table_that_was_lost_or_is_of_another_ledger_is_made_again() -> None:
    """From the entries alone."""
    made = create_market_stream()
    send_busy_market(made, A0)
    made.run(messages_max=3)
    before = tables(made)
    del made.derived.outputs.versions["trade"]
    send_order(made, A0, "quote")
    made.run()
    assert tables(made)["trade"] == before["trade"]
    kept = list(made.ledger.commits)
    send_order(made, A0, "trade", "0", 1)
    made.run()
    made.ledger.commits, made.ledger.stored_witness = kept, None
    made.kafka.truncate(A0, made.accounts()[A0].frontier)
    send_order(made, A0, "trade", "0", 2)
    made.run()
    assert tables(made) == straight(made)


def test_trouble_with_a_table_fails_no_run() -> None:
    """It is told, and the next run catches up."""
    made = create_market_stream()
    send_busy_market(made, A0)
    made.derived.outputs.refusals = 100
    outcome = made.run()
    assert outcome.slices
    assert "records-trade" in outcome.derived_error
    made.derived.outputs.refusals = 2
    assert made.run().derived_error == ""
    assert tables(made) == straight(made)


def test_a_machine_that_raises_or_gives_unfit_records_of_another_kind() -> None:
    """Nothing of the hurt message is in any table; the session waits for its next book."""
    made = create_market_stream()
    send_busy_market(made, A0)
    send_order(made, A0, "boom")
    send_busy_market(made, A0, 1)
    send_order(made, A0, "trade", "0", 1.5)
    send_order(made, A0, "quote", "0", 4)
    outcome = made.run()
    assert [finding.finding for finding in outcome.findings] == ["raised", "raised"]
    offsets = {row["offset"] for rows in tables(made).values() for row in rows}
    assert not offsets & {10, 15, 16}
    assert max(offsets) == 14


@pytest.mark.long
@pytest.mark.parametrize("start", [0, 11, 25, 39])
@pytest.mark.parametrize("messages_max", [3, 1000])
def test_a_repair_from_some_offset(start: int, messages_max: int) -> None:
    """All tables are as a straight fold has them, each record once, and before the offset the files
    stay.
    """
    made = create_market_stream(2)
    for _ in range(4):
        send_busy_market(made, A0)
        send_busy_market(made, A1)
        made.run(messages_max=8)
    before = {table: made.derived.outputs.files(table) for table in ("trade", "note")}
    repair(made, messages_max, partition=str(A0), start=start)
    assert tables(made) == straight(made, 2)
    for table, files in before.items():
        now = made.derived.outputs.files(table)
        stay = [file for file in files if file.last_offset < start or "in-a/1" in file.path]
        assert [file for file in now if file in files] == stay


def test_a_lost_file_of_another_table_is_found_and_made_again() -> None:
    """By a plain repair, which looks at all tables."""
    made = create_market_stream(2)
    for _ in range(3):
        send_busy_market(made, A0)
        send_busy_market(made, A1)
        made.run(messages_max=8)
    lost = made.derived.outputs.files("trade")[1]
    del made.files.files[lost.path]
    done = repair(made)
    assert [str(partition) for partition in done.ranges] == [
        lost.path.partition("/")[2].rpartition("/")[0]
    ]
    assert tables(made) == straight(made, 2)


def test_a_new_life_ends_all_tables_of_the_old_one() -> None:
    """What `end` gives goes to its tables too."""
    made = create_market_stream()
    send_busy_market(made, A0)
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a")
    send_busy_market(made, A0, 1)
    made.run()
    accept_topic(made.open(), "in-a", "it was meant")
    catch_up_derived(made.ledger, made.derived, head(made))
    assert [row["text"] for row in made.other_rows("note")][-1] == "the end"
    made.run()
    current = current_of(made)
    publish_to(made, current)
    check(made, current)
    assert {row["topic_id"] for row in current.rows()} == {made.accounts()[A0].topic_id}


def test_kinds_without_a_name_of_their_own_are_refused() -> None:
    """Before anything is read."""
    Same = type("trade", (Note,), {})  # noqa: N806  # a class
    kinds: Any = Machine[Book, Order, Level | Trade | Same]  # type: ignore[valid-type]
    with pytest.raises(ConfigError, match="records-trade"):
        UserMachine("x:Odd", type("Odd", (Market,), {"__orig_bases__": (kinds,)}))
