"""The slices of the default reader where Spark cannot plan them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from seriatim.engine.files import SourceFailedError
from seriatim.engine.offsets import Bounds, OffsetRange, Partition, Ranges
from seriatim.kafka import spark_reader
from seriatim.kafka.spark_reader import TaskReader
from seriatim.ports import Source

A = Partition("a", 0)
B = Partition("a", 1)
BOUNDS = {A: Bounds("id", 0, 5), B: Bounds("id", 0, 3)}
REASON = "Python worker failed to connect back"


class FailingQuery:
    """A query that fails, before its first batch or with it."""

    has_batch = False

    def __init__(self, *parts: Any) -> None:
        self.make_source = parts[-1]

    def run(self) -> None:
        if self.has_batch:
            self.make_source({A: OffsetRange(0, 5)}, None)
        raise SourceFailedError(REASON)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> TaskReader:
    """A reader whose queries fail."""
    spark: Any = None
    monkeypatch.setattr(spark_reader, "_AvailableNowQuery", FailingQuery)
    monkeypatch.setattr(TaskReader, "_stream_frame", lambda *_: None)
    return TaskReader(spark, lambda *_: iter(()), lambda: BOUNDS)


def test_slices_are_cut_here_if_spark_cannot_start_to_plan(
    reader: TaskReader, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark gives the planning process ten seconds; a busy host is not a reason to fail a run."""
    seen: list[Ranges] = []

    def on_slice(ranges: Ranges, _: Source) -> bool:
        seen.append(ranges)
        return True

    with caplog.at_level(logging.WARNING, "seriatim"):
        reader.read_slices({A: 0, B: 1}, 4, on_slice)
    assert seen == [
        {A: OffsetRange(0, 2), B: OffsetRange(1, 3)},
        {A: OffsetRange(2, 5)},
    ]
    assert REASON in caplog.text


def test_a_query_that_fails_later_is_a_failure_to_read(
    reader: TaskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice may be committed already: discovery decides, and nothing is read a second time."""
    monkeypatch.setattr(FailingQuery, "has_batch", True)
    with pytest.raises(SourceFailedError, match=REASON):
        reader.read_slices({A: 0}, 4, lambda *_: True)
