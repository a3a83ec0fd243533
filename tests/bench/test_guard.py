"""A small benchmark with a loose guard: a fold that has become five times slower is seen by `make test`.

Taken in one process and compared with a yardstick beside it (the same messages decoded and written untouched), so the
machine's speed cancels out. Real figures are those of `make bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.growth import PLACE, batches, opened, snapshot, update
from seriatim import wiring
from seriatim.adapters.arrow import stretches
from seriatim.steps.task import Work, read_result, run_task

MESSAGES, SESSIONS = 30_000, 50
USUAL = {"table": 3.9, "bench.machine:Rows": 5.3}
"""Times the yardstick, as measured on the day this was written (plain folds: what is compiled is not looked at)."""
SLIP = 5


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of the best of three."""
    taken = []
    for _ in range(3):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def given() -> list[pa.RecordBatch]:
    sent = [(f"s-{n}", snapshot(1, 5)) for n in range(SESSIONS)]
    return batches(0, sent + [(f"s-{n % SESSIONS}", update(2 + n // SESSIONS, n % 5)) for n in range(MESSAGES)])


def yardstick(messages: list[pa.RecordBatch], folder: Path) -> None:
    """Decoded into objects, written untouched."""
    for batch in messages:
        for value in batch.column("value").to_pylist():
            msgspec.json.decode(value)
    pq.write_table(pa.Table.from_batches(messages), folder / "untouched.parquet", compression="zstd")


@pytest.mark.parametrize("machine", sorted(USUAL))
def test_a_fivefold_slip_is_seen(tmp_path: Path, machine: str) -> None:
    """From batches to closed files, all checks on, against the yardstick."""
    file, messages, number = opened(tmp_path, machine), given(), count()

    def fold() -> None:
        work = Work(
            partition=PLACE,
            start=0,
            end=MESSAGES + SESSIONS,
            epoch=0,
            topic_id="id",
            attempt=f"a{next(number)}",
        )
        assert read_result(run_task(work, stretches(messages), wiring.kit(file, {}))).certificate

    times = cpu_seconds(fold) / cpu_seconds(lambda: yardstick(messages, tmp_path))
    assert times < USUAL[machine] * SLIP, (
        f"{times:.1f} times the yardstick, {USUAL[machine]} is usual: profile the fold"
    )
