"""A guard on what a message costs: counted in calls of functions, which are the same on a busy
machine.

What a call costs is not seen here: `make bench AGAINST=REF` compares CPU with an earlier commit.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest

from bench.growth import PARTITION, create_stream, snapshot, to_batches, update
from seriatim import context
from seriatim.engine.task import PartitionWork, read_result, run_task
from seriatim.storage.arrow import message_batches
from tests.calls import count_calls

SESSIONS = 50
CALLS_PER_MESSAGE = {"table": 8.9, "bench.machine:Rows": 14.9}
"""Of the plain folds, as counted; those of C included."""
TOLERANCE = 1.25


def messages_of(count: int) -> list[pa.RecordBatch]:
    """A snapshot for each session, then so many updates in turn."""
    snapshots = [(f"s-{n}", snapshot(1, 5)) for n in range(SESSIONS)]
    return to_batches(
        0,
        snapshots + [(f"s-{n % SESSIONS}", update(2 + n // SESSIONS, n % 5)) for n in range(count)],
    )


@pytest.mark.parametrize("machine", sorted(CALLS_PER_MESSAGE))
def test_a_message_costs_no_more_calls(tmp_path: Path, machine: str) -> None:
    """From batches to closed files, all checks on: 4,000 further messages take the usual number of
    calls each.
    """
    file = create_stream(tmp_path, machine)
    number = count()

    def calls_of(message_count: int) -> int:
        messages = messages_of(message_count)
        work = PartitionWork(
            partition=PARTITION,
            start=0,
            end=message_count + SESSIONS,
            epoch=0,
            topic_id="id",
            attempt=f"a{next(number)}",
        )

        def fold() -> None:
            assert read_result(
                run_task(work, message_batches(messages), context.task_context(file, {}))
            ).certificate

        return count_calls(fold)

    calls_of(1_000)  # what is imported and built once is not a message's
    calls_per_message = (calls_of(6_000) - calls_of(2_000)) / 4_000
    usual = CALLS_PER_MESSAGE[machine]
    assert calls_per_message < usual * TOLERANCE, (
        f"{calls_per_message:.1f} calls a message, {usual} are usual"
    )
    assert calls_per_message > usual / TOLERANCE, (
        f"cheaper than usual: set it to {calls_per_message:.1f}"
    )
