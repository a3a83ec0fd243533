"""Status: what the last look said, how it stands now, and what the ledger knows better."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from seriatim.engine.findings import Concern
from seriatim.ledger.model import Account, FailedRange, Halt, Ledger
from seriatim.operations.status import (
    HaltStatus,
    PartitionStatus,
    StreamStatus,
    Tone,
    stream_status_now,
    time_tone,
    urgent_first,
)

PLACE = PartitionStatus(
    topic="t",
    partition=0,
    frontier=10,
    log_start=0,
    log_end=30,
    lag=20,
    time_left_seconds=7200,
    limit_seconds=3600.0,
)
LATE = Concern(kind="late", text="no run", next="seriatim run s")
STATUS = StreamStatus(
    stream="s", at_seconds=1000.0, sequence=4, verdict="good", partitions=[PLACE], concerns=[LATE]
)
LEDGER = Ledger(
    stream="s",
    sequence=5,
    partitions={"t/0": Account(topic_id="i", frontier=25, initial_frontier=0, log_end=30, epoch=2)},
)


def seen(
    status: StreamStatus | None = STATUS, ledger: Ledger | None = None, now: float = 1000.0
) -> StreamStatus:
    """A stream as of a moment."""
    return stream_status_now("s", "strict", status, ledger, now)


def test_time_left_counts_down_to_nothing() -> None:
    """From its figure of then; it is never less than none, and its colour follows."""
    for passed, left, tone in ((0, 7200, "warn"), (3600, 3600, "bad"), (10_000, 0, "bad")):
        (place,) = seen(now=1000.0 + passed).partitions
        assert (place.time_left_seconds, time_tone(place)) == (left, tone)


def test_a_newer_ledger_wins_where_it_knows() -> None:
    """Frontier, lag, epoch, verdict; log start and time left stay Kafka's, as of the look."""
    found = seen(ledger=LEDGER)
    (place,) = found.partitions
    assert (place.frontier, place.lag, place.epoch, place.log_start, place.time_left_seconds) == (
        25,
        5,
        2,
        0,
        7200,
    )
    assert (found.sequence, found.lag, found.at_seconds) == (5, 5, 1000.0)
    assert found.concerns == [LATE]


def test_who_caught_up_has_no_time_left() -> None:
    """Nothing waits that Kafka could drop."""
    done = replace(LEDGER, partitions={"t/0": replace(LEDGER.partitions["t/0"], frontier=30)})
    assert seen(ledger=done).nearest is None


def test_without_a_look_the_ledger_tells_what_it_knows() -> None:
    """Partitions in the order of their numbers; when Kafka was asked is not known."""
    account = LEDGER.partitions["t/0"]
    found = seen(None, replace(LEDGER, partitions={f"t/{n}": account for n in (0, 10, 2)}))
    assert [place.partition for place in found.partitions] == [0, 2, 10]
    assert (found.verdict, found.at_seconds, found.gaps_open) == ("good", None, None)
    assert seen(None).verdict == "new"


def test_a_halt_names_the_very_command() -> None:
    """From the look, or from a ledger that is newer; once, whoever tells it."""
    halt = HaltStatus("gap", 25, "unexplained")
    told = Concern(kind="halted", location="t/0", text="halted", next="seriatim status s")
    looked = replace(
        STATUS, verdict="hurt", partitions=[replace(PLACE, halt=halt)], concerns=[told]
    )
    account = replace(LEDGER.partitions["t/0"], halt=Halt("gap", 25, "unexplained"))
    for found in (seen(looked), seen(looked, replace(LEDGER, partitions={"t/0": account}))):
        (concern,) = found.concerns
        assert (concern.key, concern.text) == ("halted t/0", "at offset 25: gap, unexplained")
        assert concern.next.startswith("seriatim repair s --partition t/0")
        assert found.tone == "bad"


def test_what_a_newer_ledger_ended_is_over() -> None:
    """A halt that was repaired since the look is not shown any more."""
    looked = replace(
        STATUS, verdict="hurt", partitions=[replace(PLACE, halt=HaltStatus("gap", 25))], concerns=[]
    )
    assert seen(looked, LEDGER).concerns == []


def test_an_open_circuit_and_quarantine_are_told_by_the_ledger() -> None:
    """With the way out."""
    account = replace(LEDGER.partitions["t/0"], quarantined=2, hold="h1")
    failed = (FailedRange(partition="t/0", epoch=0, start=0, until=9, judged_until=5),)
    found = seen(
        ledger=replace(LEDGER, circuit="open", failed_ranges=failed, partitions={"t/0": account})
    )
    assert {one.kind for one in found.concerns} == {"late", "held", "circuit", "quarantine"}
    assert (found.quarantined_count, found.verdict, found.tone) == (2, "hurt", "bad")
    (circuit,) = [one for one in found.concerns if one.kind == "circuit"]
    assert "seriatim" in circuit.next


@pytest.mark.parametrize(
    ("change", "tone"),
    [
        ({}, "good"),
        ({"time_left_seconds": 7200, "limit_seconds": 3600.0}, "warn"),
        ({"time_left_seconds": 3600, "limit_seconds": 3600.0}, "bad"),
        ({"hold": "h"}, "warn"),
        ({"hold": "h", "topic_state": "absent"}, "bad"),
        ({"halt": HaltStatus("gap", 1)}, "bad"),
        ({"topic_state": "absent"}, "bad"),
        ({"topic_state": "retired", "halt": HaltStatus("gap", 1)}, ""),
        ({"topic_state": "drained"}, "good"),
    ],
)
def test_a_partitions_colour(change: dict[str, object], tone: Tone) -> None:
    """Red needs a person, yellow soon will, what is retired has none."""
    assert PartitionStatus(**{"topic": "t", "partition": 0, **change}).tone == tone  # type: ignore[arg-type]


def test_what_needs_a_person_comes_first() -> None:
    """Then the least time left, then the name."""
    hurt = StreamStatus(stream="z", verdict="hurt")
    near = StreamStatus(stream="y", verdict="good", partitions=[replace(PLACE, limit_seconds=1.0)])
    far = StreamStatus(
        stream="b",
        verdict="good",
        partitions=[replace(PLACE, time_left_seconds=9999, limit_seconds=1.0)],
    )
    none = StreamStatus(stream="a", verdict="good")
    assert [one.stream for one in urgent_first([none, far, near, hurt])] == ["z", "y", "b", "a"]


def test_a_verdict_and_its_colour_agree() -> None:
    """A stream that folds well may be red or yellow all the same, and then it is not called good."""
    place = replace(PLACE, time_left_seconds=None)
    good = StreamStatus(stream="s", verdict="good", partitions=[place])
    assert (good.verdict_text, good.tone) == ("good", "good")
    held = replace(good, partitions=[replace(place, hold="h")])
    assert (held.verdict_text, held.tone) == ("to look at", "warn")
    absent = replace(good, partitions=[replace(place, topic_state="absent")])
    assert (absent.verdict_text, absent.tone) == ("needs a person", "bad")
