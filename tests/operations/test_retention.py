"""The clock over whole streams: a simulated Kafka that drops messages, and what a person is told
before it does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetentionRules
from seriatim.engine.task import PartitionWork
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import (
    PartitionClock,
    partition_clocks,
    short_retention,
    time_left_warnings,
    with_time_left,
)
from seriatim.operations.status import read_status, topic_state
from seriatim.ports import Task
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send

BEGAN = 1_800_000_000
RATE_SECONDS = 30
"""A message every half minute."""
HOURS = 6
VALUE = b'{"type":"update","id":"a","v":1}'
SIZE = len(VALUE) + 1
WHOLE = HOURS * 3600
LIMITS = {
    "time": RetentionRules(retention_ms=WHOLE * 1000),
    "bytes": RetentionRules(retention_bytes=WHOLE // RATE_SECONDS * SIZE),
}


def ledger_of(made: MemoryStream) -> Ledger:
    """The ledger as it is."""
    head = made.ledger.head("s")
    return head.ledger if head else Ledger(stream="s")


def clock_of(made: MemoryStream, place: Partition = A0) -> PartitionClock:
    """The clock of one partition, now."""
    return partition_clocks(
        ledger_of(made), made.kafka, made.kafka.bounds("in-.*"), made.clock.now
    )[place]


def told(made: MemoryStream) -> list[Finding]:
    """The warnings of now."""
    clocked = partition_clocks(
        ledger_of(made), made.kafka, made.kafka.bounds("in-.*"), made.clock.now
    )
    return time_left_warnings(made.stream, ledger_of(made), clocked)


def produced(made: MemoryStream, seconds: int, segment_messages: int = 1) -> Iterator[int]:
    """Let time pass while a producer sends and Kafka drops; after each message."""
    for passed in range(RATE_SECONDS, seconds + 1, RATE_SECONDS):
        made.clock.sleep(RATE_SECONDS)
        made.kafka.produce("in-a", b"s", VALUE, partition=0, timestamp=round(made.clock.now * 1000))
        made.kafka.expire(made.clock.now, segment_messages)
        yield passed


def stalled(rules: RetentionRules) -> MemoryStream:
    """A stream that was folded once and then no more; Kafka goes on."""
    made = create_stream()
    made.clock.sleep(BEGAN)
    made.kafka.create("in-a", 1, rules)
    made.kafka.produce(
        "in-a", b"s", b'{"type":"snapshot","rows":[{"id":"a","v":0}]}', timestamp=BEGAN * 1000
    )
    for _ in produced(made, WHOLE // 2):
        pass
    made.run()
    return made


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("segment_messages", [1, 20])
def test_the_figure_is_the_truth_at_a_constant_rate(limit: str, segment_messages: int) -> None:
    """Until the loss every figure is within 10% of what is left, or a segment of it, and never says
    more than that.
    """
    made = stalled(LIMITS[limit])
    frontier = ledger_of(made).partitions["in-a/0"].frontier
    figures, lost = [], None
    for passed in produced(made, 2 * WHOLE, segment_messages):
        if made.kafka.bounds("in-a")[A0].log_start > frontier:
            lost = passed
            break
        figures.append((passed, clock_of(made).times_left[0]))
    assert lost is not None
    assert len(figures) > 300
    for passed, left in figures:
        truth, blur = lost - passed, segment_messages * RATE_SECONDS
        assert (
            -2 * RATE_SECONDS <= truth - left.seconds <= max(0.1 * truth, blur + 2 * RATE_SECONDS)
        ), (truth, left)
        assert left.retention_seconds == pytest.approx(WHOLE, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("warning_hours", [1, 2, 24, 1000])
def test_the_warning_comes_while_a_quarter_is_left(limit: str, warning_hours: int) -> None:
    """Whatever hours are agreed: at the first warning 25% of the retention is left, and not more
    than half.
    """
    made = stalled(LIMITS[limit])
    made.stream = replace(
        made.stream, alerts=replace(made.stream.alerts, time_left_warning_hours=warning_hours)
    )
    frontier = ledger_of(made).partitions["in-a/0"].frontier
    first = lost = None
    for passed in produced(made, 2 * WHOLE):
        if first is None and told(made):
            first = passed
        if made.kafka.bounds("in-a")[A0].log_start > frontier:
            lost = passed
            break
    assert first is not None
    assert lost is not None
    assert lost - first + RATE_SECONDS >= 0.25 * WHOLE
    assert lost - first <= 0.52 * WHOLE


@pytest.mark.long
def test_a_run_that_folds_takes_the_warning_away() -> None:
    """What is committed cannot be lost; a warning is told anew while it holds, and no entry carries
    it.
    """
    made = stalled(LIMITS["time"])
    for _ in produced(made, WHOLE * 3 // 4):
        pass
    (warning,) = told(made)
    assert told(made) == [warning]
    assert (warning.finding, warning.level, warning.partition_name) == (
        "time left",
        "warning",
        "in-a/0",
    )
    assert "until Kafka drops offset" in warning.found
    assert "retention.ms keeps messages for 6 h" in warning.cause
    screen = warning.render("s")
    assert screen.startswith("TimeLeftWarning: s in-a/0: time left at offset ")
    assert "--entity-name in-a --add-config retention.ms=259200000" in screen
    outcome = made.run()
    assert outcome.findings == []
    assert told(made) == []


def test_many_partitions_of_a_topic_are_one_warning() -> None:
    """The nearest is named, the others are counted; a halted one is told apart, for no run helps
    it.
    """
    made = create_filled_stream(partitions=4)
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=36_000_000)
    made.reader.lost_offsets.add((Partition("in-a", 3), 1))
    made.run()
    for number in range(3):
        send(made, Partition("in-a", number), *range(number + 1))
    made.clock.sleep(9 * 3600)
    found = {warning.partition_name: warning.cause for warning in told(made)}
    assert set(found) == {"in-a/0", "in-a/3"}
    assert "1 wait here, and 2 more of the topic's partitions are near" in found["in-a/0"]
    assert "2 wait. Halted at 1 (gap)" in found["in-a/3"]


def test_a_partition_that_waits_for_a_person_does_not_catch_up() -> None:
    """However fast a run is: no run reads it, and the warning says so."""
    made = stalled(LIMITS["time"])
    made.reader.lost_offsets.add((A0, made.kafka.bounds("in-a")[A0].log_end))
    for _ in produced(made, WHOLE * 3 // 4):
        pass
    assert [finding.finding for finding in made.run().findings] == ["gap"]
    (warning,) = told(made)
    assert "no run reads it until a person decides" in warning.cause
    assert clock_of(made).will_catch_up is False


def test_whether_it_catches_up_comes_from_measured_entries() -> None:
    """A run that took ten seconds for its messages is faster than the producer; one that took a day
    is not.
    """
    for took, answer in ((10, True), (10 * WHOLE, False)):
        made = stalled(LIMITS["time"])
        assert clock_of(made).needed_seconds == 0
        for _ in produced(made, WHOLE // 10):
            pass
        assert clock_of(made).will_catch_up is None
        _slowly(made, took)
        for _ in produced(made, WHOLE // 10):
            pass
        assert clock_of(made).will_catch_up is answer


def _slowly(made: MemoryStream, took: float) -> None:
    """Run, with a task that takes its time."""
    folding = made.folding()
    quick = folding.open_stream.make_task

    def task(works: dict[Partition, PartitionWork]) -> Task:
        made.clock.sleep(took)
        return quick(works)

    folding.open_stream = made.open().with_ports(make_task=task)
    folding.run(1_000_000)


def test_findings_say_how_long_there_is_to_act() -> None:
    """A halt is told with the time left of its partition, as a person and as scripts read it."""
    made = stalled(LIMITS["time"])
    made.reader.lost_offsets.add((A0, made.kafka.bounds("in-a")[A0].log_end))
    for _ in produced(made, 600):
        pass
    found = made.run().findings
    clocked = partition_clocks(
        ledger_of(made), made.kafka, made.kafka.bounds("in-.*"), made.clock.now
    )
    (gap,) = with_time_left(found, clocked)
    assert gap.time_left_seconds == pytest.approx(WHOLE - 600, abs=60)
    assert "  time left  5 h 50 min" in gap.render("s")
    assert gap.to_dict("s")["time_left_seconds"] == gap.time_left_seconds


def test_topics_that_keep_for_less_than_72_hours_are_named() -> None:
    """With what it is and the command that makes it more."""
    made = stalled(LIMITS["time"])
    made.kafka.create("in-b", 2, RetentionRules(retention_ms=72 * 3_600_000))
    (found,) = short_retention(made.stream, made.kafka, ledger_of(made), made.clock)
    assert (found.topic, found.hours) == ("in-a", {"retention.ms": 6.0})
    assert "in-a: retention.ms keeps messages for 6 h 0 min" in found.text
    assert found.next.endswith("--entity-name in-a --add-config retention.ms=604800000")


def test_a_clock_that_is_ahead_does_not_make_the_rate_look_low() -> None:
    """One message from the year 2100 among those of now: by bytes it is as urgent as before."""
    made = stalled(LIMITS["bytes"])
    for _ in produced(made, WHOLE // 2):
        pass
    before = clock_of(made).times_left[0].seconds
    made.kafka.produce("in-a", b"s", VALUE, partition=0, timestamp=4_102_444_800_000)
    assert clock_of(made).times_left[0].seconds == pytest.approx(before, rel=0.02)


def test_status_shows_time_left_and_whether_it_catches_up() -> None:
    """In seconds, per partition; nothing where nothing waits."""
    made = stalled(LIMITS["time"])
    (part,) = read_status(made.stream, made.kafka, made.ledger, made.files, made.clock).partitions
    assert (part.time_left_seconds, part.catches_up, part.lag) == (None, True, 0)
    for _ in produced(made, 3600):
        pass
    (part,) = read_status(made.stream, made.kafka, made.ledger, made.files, made.clock).partitions
    assert part.time_left_seconds == pytest.approx(WHOLE - 3600, abs=60)


def states(made: MemoryStream) -> dict[str, str]:
    """Each topic's state."""
    found = read_status(made.stream, made.kafka, made.ledger, made.files, made.clock)
    return {part.topic: part.topic_state for part in found.partitions}


def test_a_topic_is_drained_when_it_is_folded_and_silent() -> None:
    """Not while messages wait, not before its hours are over, not if it never had any; a message
    makes it live.
    """
    made = create_filled_stream(topic_drained_hours=2)
    made.kafka.create("in-b", 1)
    made.clock.sleep(3 * 3600)
    assert states(made) == {"in-a": "live", "in-b": "live"}
    made.run()
    assert states(made) == {"in-a": "drained", "in-b": "live"}
    send(made, A0, 3)
    made.run()
    made.clock.now = 2 * 3600 - 1
    assert states(made) == {"in-a": "live", "in-b": "live"}


def test_a_topic_whose_messages_all_expired_is_drained_if_that_took_long_enough() -> None:
    """Its last message is as old as the retention at least; with a shorter one nobody knows."""
    for hours, state in ((72, "drained"), (1, "live")):
        made = create_filled_stream()
        made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=hours * 3_600_000)
        made.run()
        made.kafka.delete_records(A0, 3)
        assert states(made) == {"in-a": state}


def test_gone_with_everything_read_is_retired_otherwise_absent() -> None:
    """A topic that is merely not there is not called retired while something of it was never read."""
    made = create_filled_stream()
    made.run()
    read = made.accounts()[A0]
    assert topic_state(read, None) == "retired"
    send(made, A0, 3)
    made.reader.lost_offsets.add((A0, 3))
    made.run()
    assert topic_state(made.accounts()[A0], None) == "absent"
    made.kafka.delete("in-a")
    assert states(made) == {"in-a": "absent"}
