"""The founding bug, red and green: when a shuffle spills, Spark's own stateful operator loses
order; we do not.

The red half must stay red: if Spark ever stops failing here, we want to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seriatim import context, stream_files
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from tests.integration.lab import Lab, fold_records, silent
from tests.integration.test_slices import snapshot, update

MESSAGES = 200_000
SPILL = "spark.shuffle.spill.numElementsForceSpillThreshold"


def test_spark_loses_order_when_it_spills_and_we_do_not(
    lab: Lab, topic: Callable[..., str], tmp_path: Path
) -> None:
    """The same 200,000 messages under forced spills: Spark delivers inversions and a stuck row, we
    deliver none.
    """
    spark = lab.spark()
    before = spark.sparkContext.getConf().get(SPILL)
    assert before == "20000", "the laboratory's Spark is made to spill"

    inversions, last_price = spark_operator(spark, tmp_path)

    name = topic(1)
    lab.send([(name, 0, "s", snapshot(1, ("x", 0.0, 0)))])
    lab.send((name, 0, "s", update(i + 1, "x", float(i))) for i in range(1, MESSAGES))
    assert inversions > 0, "Spark's own operator kept order: has the founding bug been fixed?"
    assert last_price != MESSAGES - 1, "no stuck row: has the founding bug been fixed?"
    for read in ("task", "spark"):
        stream = lab.stream(f"ours-{read}", name, slice={"read": read})
        assert lab.fold(stream).messages == MESSAGES
        records = lab.records(stream)
        assert [row["offset"] for row in records] == list(range(MESSAGES))
        assert [row["sequence"] for row in records] == list(range(1, MESSAGES + 1))
        assert fold_records(records)[name, "s"]["x"]["price"] == MESSAGES - 1


def spark_operator(spark: Any, folder: Path) -> tuple[int, float]:
    """ApplyInPandasWithState over the same messages: steps backward it delivered, and the price it
    ended with.
    """
    source, sink = folder / "in", folder / "out"
    source.mkdir()
    offsets = pa.array(range(MESSAGES), pa.int64())
    pq.write_table(
        pa.table({"key": pa.repeat("s", MESSAGES), "offset": offsets}), source / "0.parquet"
    )

    def fold(_: tuple[str], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        last, backward = state.get if state.exists else (-1, 0)
        for frame in frames:
            for offset in frame["offset"]:
                backward += int(offset < last)
                last = int(offset)
        state.update((last, backward))
        yield pd.DataFrame({"last": [last], "backward": [backward]})

    read = spark.readStream.schema("key string, offset long").parquet(str(source))
    out = read.groupBy("key").applyInPandasWithState(
        fold, "last long, backward long", "last long, backward long", "append", "NoTimeout"
    )
    query = out.writeStream.format("parquet").option("path", str(sink))
    query = (
        query.option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    (row,) = pq.read_table(sink).to_pylist()
    return row["backward"], float(row["last"])


@pytest.mark.parametrize("read", ["task", "spark"])
def test_no_shuffle_in_our_plan(lab: Lab, topic: Callable[..., str], read: str) -> None:
    """The physical plan exchanges nothing, for exact ranges and for a slice. Where Spark's source
    reads, it sorts within partitions.
    """
    name = topic(2)
    lab.send([(name, p, "s", snapshot(1, ("x", 0.0, 0))) for p in range(2)])
    stream = lab.stream("plan", name, slice={"read": read})
    file = stream_files.load_stream(stream, lab.settings.streams)
    reader = context.LazySpark(file, lab.settings, silent)
    reader.spark = lab.spark()
    ranges = {Partition(name, p): OffsetRange(0, 1) for p in range(2)}
    sources: list[Any] = [reader.read_ranges(ranges)]
    plans: list[tuple[str, int]] = []

    def on_slice(_: Ranges, source: Any) -> bool:
        for read_source in (*sources, source):
            frame = read_source.build_frame(
                context.SparkFoldTask(file, context.WorkTable.of_works({}))
            )
            plan = frame._jdf.queryExecution().executedPlan().toString()
            plans.append((plan, frame.rdd.getNumPartitions()))
        return True

    reader.read_slices(dict.fromkeys(ranges, 0), 100, on_slice)

    assert len(plans) == 2
    for plan, partition_count in plans:
        assert ("Sort [topic" in plan) is (read == "spark")
        assert "MapInArrow" in plan
        assert "Exchange" not in plan
        assert partition_count == 2
