"""A message that the reader itself cannot take: named by offset, its partition waits at it, nobody
else does.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.errors import PlatformError
from seriatim.testing import MemoryStream
from tests.operations.decision_helper import assert_records_match_state
from tests.operations.memory_streams import A0, A1, create_filled_stream, frontiers, send

NANOSECONDS = 1_700_000_000_000_000_000


def hurt(made: MemoryStream, number: int = 0, stamp: int = NANOSECONDS) -> None:
    """A message whose timestamp does not fit, then a good one."""
    made.kafka.produce(
        "in-a", "s", b'{"type": "update", "id": "a", "v": 7}', partition=number, timestamp=stamp
    )
    send(made, A1 if number else A0, 8)


@pytest.mark.long
@pytest.mark.parametrize("messages_max", [1, 2, 100])
@pytest.mark.parametrize("stamp", [NANOSECONDS, -NANOSECONDS])
def test_its_partition_halts_at_it_and_the_others_go_on(messages_max: int, stamp: int) -> None:
    """What is before it is committed; the finding names offset and timestamp; the next run is
    green.
    """
    made = create_filled_stream(2)
    hurt(made, stamp=stamp)
    send(made, A1, 3, 4)

    outcome = made.run(messages_max)

    (finding,) = outcome.findings
    assert (finding.finding, finding.partition_name, finding.offset, finding.scope) == (
        "poison",
        "in-a/0",
        3,
        "partition",
    )
    assert str(stamp) in finding.cause
    assert frontiers(made) == {"in-a/0": 3, "in-a/1": 5}
    again = made.run(messages_max)
    assert (again.findings, [str(partition) for partition, _ in again.earlier_halts]) == (
        [],
        ["in-a/0"],
    )
    assert_records_match_state(made)


def test_several_partitions_and_a_halt_before_it() -> None:
    """A partition that halts earlier is not told about what it has not reached."""
    made = create_filled_stream(2)
    send(made, A0, b"?")
    hurt(made, 0)
    hurt(made, 1)
    made.stream = replace(made.stream, on_poison="halt")
    outcome = made.run()
    assert {(f.finding, f.partition_name, f.offset) for f in outcome.findings} == {
        ("poison", "in-a/0", 3),
        ("poison", "in-a/1", 3),
    }
    assert "cannot be read" in {f.partition_name: f.cause for f in outcome.findings}["in-a/1"]
    assert "cannot be read" not in {f.partition_name: f.cause for f in outcome.findings}["in-a/0"]


def test_a_stream_that_skips_poison_passes_over_it() -> None:
    """Each is named as a warning, and the rest is folded."""
    made = create_filled_stream(tier="none", on_poison="skip")
    hurt(made)
    hurt(made)
    outcome = made.run()
    assert [(f.offset, f.level) for f in outcome.findings] == [(3, "warning"), (5, "warning")]
    assert frontiers(made) == {"in-a/0": 7}
    assert made.accounts()[A0].counts["hole: unreadable"] == 2
    assert_records_match_state(made)


def test_a_reading_that_breaks_for_another_reason_is_platform_trouble() -> None:
    """Nothing is scanned, nothing is halted."""
    made = create_filled_stream()
    made.reader.failures = ["the broker went away"]
    with pytest.raises(PlatformError, match="reading from Kafka broke"):
        made.run()
    made.run()
    assert frontiers(made) == {"in-a/0": 3}


def test_a_reading_that_breaks_on_the_way_to_it_is_platform_trouble_too() -> None:
    """And the next run goes on."""
    made = create_filled_stream()
    hurt(made)
    real = made.kafka.first_unreadable_messages

    def then_fail(ranges: Any) -> Any:
        made.reader.failures = ["the broker went away"] if len(ranges) and real(ranges) else []
        return real(ranges)

    folding = made.folding()
    calls = iter([real, then_fail])
    made.kafka.first_unreadable_messages = lambda ranges: next(calls, real)(ranges)  # type: ignore[method-assign]  # noqa: PLW0108  # one after the other
    with pytest.raises(PlatformError, match="reading from Kafka broke"):
        folding.run(100)
    made.kafka.first_unreadable_messages = real  # type: ignore[method-assign]
    assert [finding.offset for finding in made.run().findings] == [3]
