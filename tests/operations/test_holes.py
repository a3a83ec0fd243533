"""Holes in whole runs: explained ones are counted and passed over, the rest is what the tier says."""

from __future__ import annotations

from typing import Any

import pytest

from seriatim.engine.files import Certificate
from seriatim.engine.findings import GapMark
from seriatim.engine.holes import ExplainedRange
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import PlatformError
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_stream, frontiers, offsets, send


def transact(made: MemoryStream, *values: Any, abort: bool = False) -> None:
    """Send messages in a transaction of their own."""
    since = made.kafka.bounds("in-a")[A0].log_end
    send(made, A0, *values)
    made.kafka.end_transaction(A0, range(since, since + len(values)), abort=abort)


def transactional(**fields: Any) -> MemoryStream:
    """A world of transactions: offsets 0 to 2 good, 3 to 4 void, 5 to 6 good, each with its marker
    after it.
    """
    made = create_stream(**fields)
    made.kafka.create("in-a")
    transact(made, ["a"], 1)
    transact(made, 2, abort=True)
    transact(made, 3)
    return made


def certificates(made: MemoryStream) -> list[Certificate]:
    """All of them, in order."""
    entries = [commit.entry for commit in made.ledger.commits if commit.entry is not None]
    return [
        change.certificate for entry in entries for change in entry.changes if change.certificate
    ]


def marks(made: MemoryStream) -> list[tuple[str, int, int]]:
    """What the ledger says not to trust: finding, from, until."""
    entries = [commit.entry for commit in made.ledger.commits if commit.entry is not None]
    found: list[GapMark] = [
        mark for entry in entries for change in entry.changes for mark in change.marks
    ]
    return [(mark.finding, mark.offset, mark.until) for mark in found]


@pytest.mark.parametrize("messages_max", [1, 2, 3, 100])
def test_transactions_are_no_finding(messages_max: int) -> None:
    """However they are sliced, also where a slice is one marker or ends in markers: counted by
    cause, all folded.
    """
    made = transactional()
    outcome = made.run(messages_max)
    assert outcome.findings == []
    assert offsets(made, A0) == [0, 1, 5]
    assert frontiers(made) == {"in-a/0": 7}
    assert made.accounts()[A0].counts == {"hole: aborted": 1, "hole: marker": 3}
    assert marks(made) == []


@pytest.mark.parametrize("messages_max", [1, 100])
def test_who_reads_uncommitted_gets_aborted_messages(messages_max: int) -> None:
    """Only the markers are holes then."""
    made = transactional(isolation="read_uncommitted")
    assert made.run(messages_max).findings == []
    assert offsets(made, A0) == [0, 1, 3, 5]
    assert made.accounts()[A0].counts == {"hole: marker": 3}


def test_a_compacted_topic_is_read_without_alarm() -> None:
    """What compaction took away is counted; what is left is folded."""
    made = create_stream()
    made.kafka.create("in-a", compacted=True)
    for session in ("s", "t", "s", "s", "t"):
        send(made, A0, ["a"], session=session)
    made.kafka.compact(A0, 4)
    assert made.run().findings == []
    assert offsets(made, A0) == [3, 4]
    assert made.accounts()[A0].counts == {"hole: compacted": 3}


@pytest.mark.parametrize("messages_max", [1, 100])
def test_a_loss_beside_markers_halts_at_its_own_offset(messages_max: int) -> None:
    """What is explained before it is committed; the finding names the lost offsets and no others."""
    made = transactional()
    made.reader.lost_offsets = {(A0, 5)}
    outcome = made.run(messages_max)
    (finding,) = outcome.findings
    assert (finding.finding, finding.offset) == ("gap", 5)
    assert "[5, 6)" in finding.cause
    assert frontiers(made) == {"in-a/0": 5}
    assert made.accounts()[A0].counts == {"hole: aborted": 1, "hole: marker": 2}


@pytest.mark.parametrize("messages_max", [1, 100])
def test_a_loss_that_is_only_counted_is_marked(messages_max: int) -> None:
    """Each lost stretch, by its own bounds, is for the gaps table; what is explained is not."""
    made = transactional(tier="none")
    made.reader.lost_offsets = {(A0, 1), (A0, 5)}
    assert made.run(messages_max).findings == []
    assert made.accounts()[A0].counts == {
        "hole: aborted": 1,
        "hole: marker": 3,
        "hole: unexplained": 2,
    }
    assert marks(made) == [("gap", 1, 2), ("gap", 5, 6)]


def test_offsets_gone_before_they_were_read_are_marked_too() -> None:
    """A tier that only counts them goes on behind them."""
    made = transactional(tier="none")
    made.run()
    transact(made, 4, 5)
    made.kafka.delete_records(A0, 8)
    assert made.run().findings == []
    assert marks(made) == [("expired", 7, 8)]
    assert made.accounts()[A0].counts == {"hole: aborted": 1, "hole: expired": 1, "hole: marker": 4}


def test_every_offset_is_in_one_certificate() -> None:
    """Messages and holes by cause make up each range, slice by slice."""
    made = transactional()
    made.run(2)
    found = certificates(made)
    assert [(one.start, one.until) for one in found] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [one.holes for one in found] == [
        {},
        {"marker": 1, "aborted": 1},
        {"marker": 1},
        {"marker": 1},
    ]


@pytest.mark.parametrize("tier", ["strict", "none"])
def test_without_holes_nobody_is_asked(tier: str) -> None:
    """The cost of explaining is paid by those who have holes."""
    made = create_stream(tier=tier)
    made.kafka.create("in-a")
    send(made, A0, ["a"], 1, 2)

    def refuse(partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        raise AssertionError(f"asked about {partition} {hole}")

    made.explain = refuse  # type: ignore[assignment]
    assert made.run(2).messages == 3


@pytest.mark.parametrize("messages_max", [1, 100])
def test_a_hole_that_cannot_be_explained_now_is_platform_trouble(messages_max: int) -> None:
    """In a task and in the driver: the run fails with what to do, nothing halts, the next run goes
    on.
    """
    made = transactional()
    explain = made.explain

    def fail(partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        raise PlatformError(f"{partition} {hole}: cannot be asked", next="ask again")

    made.explain = fail  # type: ignore[assignment]
    with pytest.raises(PlatformError, match="cannot be asked") as caught:
        made.run(messages_max)
    assert caught.value.next == "ask again"
    made.explain = explain
    assert made.run().findings == []
    assert offsets(made, A0) == [0, 1, 5]
