"""Slices: discovery against the ledger, and ranges cut so that nothing overlaps or is skipped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.findings import TIERS, Tier
from seriatim.engine.offsets import Bounds, OffsetRange, Partition, cut_into_slices
from seriatim.errors import BrokenPromiseError
from seriatim.ledger.model import Account, Halt, Ledger
from seriatim.operations.plan import SlicePlan, plan_slices

A0, A1, B0 = Partition("a", 0), Partition("a", 1), Partition("b", 0)
KNOWN = Account(topic_id="id", frontier=10, initial_frontier=0)
ranges_drawn = st.dictionaries(
    st.builds(Partition, st.sampled_from(["a", "b"]), st.integers(0, 5)),
    st.builds(
        lambda start, count: OffsetRange(start, start + count),
        st.integers(0, 100),
        st.integers(0, 60),
    ),
    max_size=8,
)


def planned(account: Account, seen: Bounds, tier: Tier = "strict") -> SlicePlan:
    """The plan for one known partition."""
    return plan_slices(
        Ledger(stream="s", sequence=0, partitions={"a/0": account}), {A0: seen}, tier
    )


@given(ranges_drawn, st.integers(1, 70))
def test_slices_tile_their_ranges(ranges: dict[Partition, OffsetRange], messages_max: int) -> None:
    """Cut however small, the slices of a partition touch end to end and none is too large."""
    slices = cut_into_slices(ranges, messages_max)
    for piece in slices:
        assert 0 < sum(map(len, piece.values())) <= messages_max
    for partition, whole in ranges.items():
        at = whole.start
        for piece in slices:
            if partition in piece:
                assert piece[partition].start == at
                at = piece[partition].end
        assert at == whole.end


def test_a_slice_holds_something() -> None:
    """No progress would be made in slices of nothing."""
    with pytest.raises(BrokenPromiseError, match="at least one"):
        cut_into_slices({A0: OffsetRange(0, 3)}, 0)


def test_a_known_partition_is_read_from_its_frontier() -> None:
    """From where the last commit ended to where the log ends now."""
    made = planned(KNOWN, Bounds("id", 0, 25))
    assert made.ranges == {A0: OffsetRange(10, 25)}
    assert made.backlog == 15
    assert not (made.findings)
    assert not (made.new_accounts)
    assert not (made.skipped_ranges)


def test_a_new_topic_begins_at_its_first_offset() -> None:
    """What expired before we ever looked was never ours."""
    made = plan_slices(Ledger(stream="s"), {B0: Bounds("new", 7, 9)}, "strict")
    assert made.new_accounts[B0] == Account(topic_id="new", frontier=7, initial_frontier=7)
    assert made.ranges == {B0: OffsetRange(7, 9)}


def test_a_partition_added_to_a_known_topic_begins_at_0() -> None:
    """If its beginning is gone already, that is a loss and is said."""
    ledger = Ledger(stream="s", sequence=0, partitions={"a/0": KNOWN})
    made = plan_slices(ledger, {A0: Bounds("id", 0, 10), A1: Bounds("id", 0, 4)}, "strict")
    assert made.ranges[A1] == OffsetRange(0, 4)
    made = plan_slices(ledger, {A0: Bounds("id", 0, 10), A1: Bounds("id", 2, 4)}, "strict")
    assert [(f.finding, f.partition_name) for f in made.findings] == [("expired", "a/1")]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seen", [Bounds("other", 0, 99), Bounds("id", 0, 9)])
def test_re_created_and_truncated_topics_halt_in_every_tier(tier: Tier, seen: Bounds) -> None:
    """Another topic id, or a log that ends before the frontier, is never read on."""
    made = planned(KNOWN, seen, tier)
    (finding,) = made.findings
    assert finding.finding == ("re-created" if seen.topic_id == "other" else "truncated")
    assert (finding.partition_name, finding.offset) == ("a/0", 10)
    assert not made.ranges
    if seen.topic_id == "other":
        assert (finding.expected, finding.found) == ("topic id id", "topic id other")


def test_expired_messages_halt_a_strict_stream() -> None:
    """The lost range is named to the offset."""
    made = planned(KNOWN, Bounds("id", 14, 25))
    assert "4 messages [10, 14)" in made.findings[0].cause
    assert not made.ranges


def test_expired_messages_are_counted_without_a_tier() -> None:
    """Reading goes on at the log start, and what was passed over is a range too."""
    made = planned(KNOWN, Bounds("id", 14, 25), "none")
    assert made.skipped_ranges == {A0: OffsetRange(10, 14)}
    assert made.ranges == {A0: OffsetRange(14, 25)}
    assert not made.findings


@pytest.mark.parametrize(
    "account",
    [replace(KNOWN, halt=Halt("gap", 10, "")), replace(KNOWN, hold="h1")],
    ids=["halted", "held"],
)
def test_halted_and_held_partitions_wait(account: Account) -> None:
    """They are neither read nor found anew."""
    made = planned(account, Bounds("id", 50, 60))
    assert made.waiting_partitions == [A0]
    assert not (made.ranges)
    assert not (made.findings)


def test_topics_that_went_are_named() -> None:
    """A known partition that Kafka no longer has is no range."""
    made = plan_slices(Ledger(stream="s", sequence=0, partitions={"a/0": KNOWN}), {}, "strict")
    assert made.missing_partitions == [A0]
    assert not made.ranges


def test_retired_partitions_are_left_out() -> None:
    """Neither read nor judged, whatever Kafka has now; nor gone, when it has nothing."""
    over = replace(KNOWN, retired=True)
    made = planned(over, Bounds("other", 50, 60))
    assert made.retired_partitions == [A0]
    assert (made.ranges, made.findings, made.waiting_partitions, made.new_accounts) == (
        {},
        [],
        [],
        {},
    )
    assert planned(over, Bounds("id", 0, 60)).retired_partitions == [A0]
    gone = plan_slices(
        Ledger(stream="s", sequence=0, partitions={"a/0": replace(over, log_end=20)}), {}, "strict"
    )
    assert (gone.missing_partitions, gone.findings) == ([], [])


def test_partitions_added_to_a_retired_topic_are_not_read() -> None:
    """To one of which only a partition is retired they are."""
    over = replace(KNOWN, retired=True)
    seen = {A0: Bounds("id", 0, 60), A1: Bounds("id", 0, 60), B0: Bounds("id-b", 0, 60)}
    whole = plan_slices(Ledger(stream="s", sequence=0, partitions={"a/0": over}), seen, "strict")
    assert whole.retired_partitions == [A0, A1]
    assert list(whole.new_accounts) == [B0]
    one = plan_slices(
        Ledger(stream="s", sequence=0, partitions={"a/0": over, "a/2": KNOWN}), seen, "strict"
    )
    assert (one.retired_partitions, list(one.new_accounts)) == ([A0], [A1, B0])


def test_a_halted_partition_is_found_to_be_made_again_once() -> None:
    """It waits for another decision then."""
    made = planned(replace(KNOWN, halt=Halt("gap", 10, "")), Bounds("other", 0, 60))
    assert [finding.finding for finding in made.findings] == ["re-created"]
    again = planned(replace(KNOWN, halt=Halt("re-created", 10, "")), Bounds("other", 0, 60))
    assert (again.findings, again.waiting_partitions) == ([], [A0])
    held = planned(replace(KNOWN, hold="h1"), Bounds("other", 0, 60))
    assert (held.findings, held.waiting_partitions) == ([], [A0])
