"""Spark may run a task again whenever it likes: at a second action, after a lost executor, or beside
a slow one. Results are the same each time, and what the other attempts wrote is swept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from seriatim import context, stream_files
from seriatim.engine.offsets import Partition, Ranges
from seriatim.engine.task import TaskResult, read_result
from seriatim.operations.run import FoldRun
from seriatim.ports import DEFAULT_READ_OPTIONS, OnSlice, ReadOptions, Source
from tests.integration.lab import Lab, silent
from tests.integration.test_kills import swept
from tests.integration.test_slices import tables


def essence(contents: list[bytes]) -> dict[str, Any]:
    """What results say of the data, without the names of files."""
    results: list[TaskResult] = [read_result(content) for content in contents]
    return {
        str(result.partition): (
            result.certificate,
            [file.digest for file in (*result.records, *(result.state or ()))],
            [file.path for file in result.records],
        )
        for result in results
    }


class TwiceSource:
    """A source whose every action is done twice."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def map(self, task: Any, *, has_small_messages: bool = False) -> list[bytes]:
        first = self.source.map(task, has_small_messages=has_small_messages)
        second = self.source.map(task, has_small_messages=has_small_messages)
        before, after = essence(first), essence(second)
        assert set(before) == set(after)
        for name, (certificate, digests, paths) in before.items():
            assert (certificate, digests) == after[name][:2]
            assert set(paths).isdisjoint(after[name][2])
        return second


class Twice(context.LazySpark):
    """Spark, asked for everything twice."""

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        super().read_slices(
            starts,
            messages_max,
            lambda ranges, source: on_slice(ranges, TwiceSource(source)),
            options,
        )

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        return TwiceSource(super().read_ranges(ranges, options))


@pytest.mark.parametrize("read", ["task", "spark"])
def test_a_frame_can_be_run_twice(lab: Lab, topic: Callable[..., str], read: str) -> None:
    """Certificates and digests of both are equal, and no file of the first one is left."""
    name = topic(2)
    lab.send(tables({name: 2}, 20, 3000))
    plain, twice = lab.stream("plain", name), lab.stream("twice", name, slice={"read": read})
    file = stream_files.load_stream(twice, lab.settings.streams)
    open_stream = context.open_for_fold(file, lab.settings, silent)
    open_stream.spark = Twice(file, lab.settings, silent)
    open_stream.reader = open_stream.spark
    open_stream.spark.spark = lab.spark()

    outcome = FoldRun(open_stream).run(2000)
    lab.fold(plain)

    assert (outcome.messages, outcome.slices) == (3000, 2)
    assert lab.digest(twice) == lab.digest(plain)
    assert swept(lab, twice)
