"""A forward as a value: how far it goes, what it publishes, and when it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.files import Certificate
from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.session import Counts
from seriatim.errors import ConfigError
from seriatim.ledger.entries import (
    ENTRY_TYPES,
    AcceptEntry,
    RepairEntry,
    SliceEntry,
    apply_entry,
)
from seriatim.ledger.gaps import GapsFold
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change, Halt, Ledger
from seriatim.operations.repair.forward import plan_forward
from seriatim.operations.rewind import PartitionHistory, RefoldRequest, Rewind, plan_stages

P = Partition("in-a", 0)


def halted(finding: str = "expired", **fields: Any) -> Account:
    """A partition that waits at offset 10, in epoch 3, with two sessions in quarantine."""
    halt = Halt(finding, 10, "c", 7)
    return Account(
        topic_id="one",
        frontier=10,
        initial_frontier=0,
        epoch=3,
        halt=halt,
        hold="h",
        quarantined=2,
        **fields,
    )


def moved(
    account: Account, start: int = 0, end: int = 30, there: int | None = None, topic_id: str = "one"
) -> Change:
    """What a forward does, with Kafka's bounds as given."""
    return plan_forward("s", P, account, Bounds(topic_id, start, end), there)


@pytest.mark.parametrize(
    ("finding", "start", "there", "until"),
    [
        ("expired", 25, None, 25),
        ("expired", 30, None, 30),
        ("gap", 0, 14, 14),
        ("gap", 0, None, 30),
        ("gap", 20, 14, 20),
        ("gap", 20, 22, 22),
        ("poison", 0, None, 11),
        ("poison", 0, 10, 11),
        ("poison", 20, None, 20),
        ("truncated", 0, 10, 10),
    ],
)
def test_where_the_partition_goes_on(
    finding: str, start: int, there: int | None, until: int
) -> None:
    """At the log start, at the first message behind the hole, behind the poison; never before the
    log start.
    """
    change = moved(halted(finding), start, there=there)
    assert (change.frontier, change.until, change.headless_since) == (10, until, until)


def test_what_it_does_to_the_partition() -> None:
    """A new epoch, no halt, no hold; sessions, state, records and those in quarantine as they were."""
    before = halted(records=8, messages=9, headless=1)
    change = moved(before, 25)
    entry = RepairEntry(attempt="a", hold="h", changes=(change,))
    after = apply_entry(
        entry, Ledger(stream="s", sequence=7, partitions={"in-a/0": before})
    ).partitions["in-a/0"]
    expected = replace(
        before, epoch=4, frontier=25, halt=None, hold=None, headless_since=25, log_end=30
    )
    assert after == expected


def test_the_gap_of_the_halt_ends_where_the_partition_goes_on() -> None:
    """One gap for all sessions, from the old frontier to the new one; what is open of sessions
    stays so.
    """
    before, walk = halted(), GapsFold()
    hurt = GapMark(finding="raised", offset=4, session="x", quarantined=True)
    for change, kind, account in (
        (replace(moved(before, 25), marks=(hurt,), frontier=0, until=10), "slice", before),
        (moved(before, 25), "repair", replace(before, halt=None)),
    ):
        ledger = Ledger(stream="s", sequence=7, partitions={"in-a/0": account})
        walk.add_entry(
            Manifest(
                entry=ENTRY_TYPES[kind](attempt="a", sequence=7, changes=(change,)), ledger=ledger
            )
        )
    assert [
        (gap.session, gap.start, gap.until, gap.finding, gap.closed_how) for gap in walk.gaps
    ] == [
        ("x", 4, None, "raised", None),
        (None, 10, 25, "expired", "forward"),
    ]


def test_a_forward_of_a_halt_that_the_table_never_saw_is_published_all_the_same() -> None:
    """Its gap is opened and closed at once."""
    walk, account = GapsFold(), halted()
    entry = RepairEntry(attempt="a", sequence=9, changes=(moved(account, 25),))
    ledger = Ledger(stream="s", sequence=9, partitions={"in-a/0": replace(account, halt=None)})
    walk.add_entry(Manifest(entry=entry, ledger=ledger))
    (gap,) = walk.gaps
    assert (gap.start, gap.until, gap.opened, gap.closed, gap.closed_how) == (
        10,
        25,
        9,
        9,
        "forward",
    )


REFUSED = {
    "nothing waits": ((replace(halted(), halt=None), 25), "seriatim status s"),
    "retired": ((halted(retired=True), 25), "seriatim status s"),
    "made again": ((halted(), 25, 30, None, "two"), "seriatim accept s in-a"),
    "nothing is lost": ((halted(), 5), "seriatim repair s --partition in-a/0 --apply"),
    "the hole is no more": (
        (halted("gap"), 5, 30, 10),
        "seriatim repair s --partition in-a/0 --apply",
    ),
    "the log is still cut": ((halted("truncated"), 0, 7), "written past offset 10"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_and_what_to_do_instead(why: str) -> None:
    """A forward loses for good, so it is never more than needed."""
    given, told = REFUSED[why]
    with pytest.raises(ConfigError, match="in-a/0 cannot be moved forward") as refused:
        moved(*given)  # type: ignore[arg-type]
    assert told in refused.value.next


def test_a_topic_that_is_gone_is_retired_instead() -> None:
    """There is nothing to go on with."""
    with pytest.raises(ConfigError, match="no such topic") as refused:
        plan_forward("s", P, halted(), None, None)
    assert "seriatim retire s in-a" in refused.value.next


def test_a_new_life_of_the_topic_is_in_no_doubt() -> None:
    """Its offsets begin again: what was lost of the old life says nothing of them."""
    before = replace(halted("re-created", headless_since=8), hold=None)
    change = Change(
        partition=P,
        epoch=3,
        frontier=10,
        until=0,
        topic_id="two",
        initial_frontier=0,
        halt=before.halt,
        headless_since=-1,
    )
    ledger = Ledger(stream="s", sequence=7, partitions={"in-a/0": before})
    after = apply_entry(AcceptEntry(attempt="a", changes=(change,)), ledger).partitions["in-a/0"]
    assert (after.topic_id, after.headless_since) == ("two", -1)


def rewind(*passed: tuple[int, int], borders: tuple[int, ...] = (40,)) -> Rewind:
    """A refold of [0, 40) across what forwards passed over."""
    account = Account(topic_id="one", frontier=40, initial_frontier=0)
    return Rewind(
        request=RefoldRequest(partition=P, start=0, until=borders[0]),
        account=account,
        base=Account(topic_id="one", frontier=0, initial_frontier=0),
        sequence=0,
        frontier=40,
        commit_offsets=borders,
        passed_ranges=tuple(OffsetRange(start, end) for start, end in passed),
    )


@pytest.mark.parametrize(
    ("passed", "borders", "expected"),
    [
        ([], (40,), [(0, 40, True)]),
        ([(10, 14)], (40,), [(0, 10, False), (14, 40, True)]),
        ([(10, 14), (20, 21)], (40,), [(0, 10, False), (14, 20, False), (21, 40, True)]),
        ([(0, 14)], (40,), [(14, 40, True)]),
        ([(30, 40)], (40,), [(0, 30, True)]),
        ([(0, 40)], (40,), []),
        ([(10, 14)], (14, 40), [(0, 10, True), (14, 28, False), (28, 40, True)]),
        ([(10, 14)], (10, 40), [(0, 10, True), (14, 20, False), (20, 40, True)]),
    ],
)
def test_a_refold_goes_around_what_was_passed_over(
    passed: list[tuple[int, int]], borders: tuple[int, ...], expected: list[tuple[int, int, bool]]
) -> None:
    """No stage has any of it; what could be met at its end can be met before it, where state is the
    same.
    """
    made = list(plan_stages(rewind(*passed, borders=borders), 100))
    assert [
        (stage.offset_range.start, stage.offset_range.end, stage.ends_at_commit) for stage in made
    ] == expected


def test_sessions_are_in_doubt_behind_what_was_passed_over() -> None:
    """Each stage by the last loss before it."""
    one = rewind((10, 14), (20, 21))
    assert [one.headless_since(offset) for offset in (0, 10, 14, 20, 21, 40)] == [
        -1,
        -1,
        14,
        14,
        21,
        21,
    ]


def test_messages_are_counted_across_a_forward() -> None:
    """What was passed over was never folded: Kafka need not have it for a refold."""
    past, halt = PartitionHistory(), Halt("gap", 4, "c")
    ledger = Ledger(stream="s", sequence=0)
    changes = {
        "slice": Change(
            partition=P,
            epoch=0,
            frontier=0,
            until=4,
            topic_id="one",
            initial_frontier=0,
            certificate=certificate(0, 4),
            halt=halt,
        ),
        "repair": Change(
            partition=P,
            epoch=0,
            frontier=4,
            until=9,
            topic_id="one",
            initial_frontier=0,
            headless_since=9,
        ),
        "later": Change(
            partition=P,
            epoch=1,
            frontier=9,
            until=12,
            topic_id="one",
            initial_frontier=0,
            certificate=certificate(9, 12),
        ),
    }
    for name, change in changes.items():
        account = Account(
            topic_id="one", frontier=change.until, initial_frontier=0, epoch=change.epoch
        )
        entry_type = RepairEntry if name == "repair" else SliceEntry
        entry = entry_type(attempt="a", changes=(change,))
        past.add_entry(
            Manifest(entry=entry, ledger=replace(ledger, partitions={"in-a/0": account})), change
        )
    assert past.passed_ranges() == [OffsetRange(4, 9)]
    assert [past.count_messages(*span) for span in ((0, 4), (0, 12), (4, 12), (0, 9), (0, 7))] == [
        4,
        7,
        3,
        4,
        None,
    ]


def certificate(start: int, until: int) -> Certificate:
    """Every offset is a message."""
    return Certificate(
        partition=P, epoch=0, start=start, until=until, counts=Counts(messages=until - start)
    )
