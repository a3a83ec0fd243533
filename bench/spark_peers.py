"""Spark's own ways with state in Python: applyInPandasWithState and transformWithStateInPandas.

Both get a session's messages in any order once a shuffle has spilled, so both sort by offset.
Decoding and the machine are ours (`bench/machine.py`, msgspec), so what differs is how messages,
state and records travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout

from bench.data import AT_ONCE, TOPIC, WARM_TOPIC
from bench.machine import Delete, Insert, Row, Rows, Snapshot, Update
from seriatim import config, context

OUTPUT = (
    "partition int, offset long, session string, sequence long, op string, id string, "
    "price double, size long, old_price double, old_size long"
)
COLUMNS = [column.split()[0] for column in OUTPUT.split(", ")]
FETCH = {
    "kafka.max.poll.records": "5000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(32 << 20),
}
"""The settings that ours reads with, too."""
STATE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.execution.arrow.transformWithStateInPandas.maxRecordsPerBatch": "20000",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
}
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""transformWithState knows no other store; applyInPandasWithState is faster with Spark's default,
in memory.
"""


def fold(state: bytes | None, frames: Iterable[pd.DataFrame]) -> tuple[bytes, pd.DataFrame]:
    """One session's messages of a batch: sorted, decoded, applied."""
    frame = pd.concat(list(frames)).sort_values("offset")
    machine, decode = Rows(), msgspec.json.Decoder(Snapshot | Insert | Update | Delete).decode
    rows = msgspec.msgpack.decode(state, type=dict[str, Row]) if state else {}
    records: list[tuple[Any, ...]] = []
    for partition, offset, key, value in zip(
        frame["partition"].tolist(),
        frame["offset"].tolist(),
        frame["key"],
        frame["value"],
        strict=True,
    ):
        message = decode(value)
        place = (partition, offset, key.decode(), message.seq)
        records += [
            (*place, made.op, made.id, made.price, made.size, made.old_price, made.old_size)
            for made in machine.apply(rows, message)
        ]
    made = pd.DataFrame.from_records(records, columns=COLUMNS)
    return msgspec.msgpack.encode(rows), made.astype({"size": "Int64", "old_size": "Int64"})


def applied(key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG001
    """For applyInPandasWithState."""
    saved, records = fold(state.get[0] if state.exists else None, frames)
    state.update((saved,))
    yield records


class Transforming(StatefulProcessor):
    """For transformWithStateInPandas."""

    def init(self, handle: Any) -> None:
        self.rows = handle.getValueState("rows", "saved binary")

    def handleInputRows(  # noqa: N802  # Spark's name
        self,
        key: Any,  # noqa: ARG002
        rows: Iterable[pd.DataFrame],
        timerValues: Any,  # noqa: ARG002, N803
    ) -> Iterator[pd.DataFrame]:
        saved, records = fold(bytes(self.rows.get()[0]) if self.rows.exists() else None, rows)
        self.rows.update((saved,))
        yield records

    def close(self) -> None:
        """Nothing to give back."""


def peer(folder: Path, way: str) -> Callable[[], Any]:
    """One of the two, warmed up."""
    settings = config.load_settings()
    more = {**SETTINGS, **(ROCKSDB if way == "transform" else {})}
    spark = context.spark_session(f"spark-{way}", settings, lambda _: None, more)
    servers = context.kafka_client(settings)["bootstrap.servers"]

    def run(topic: str, out: Path) -> None:
        options = {
            "kafka.bootstrap.servers": servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
            **FETCH,
        }
        source = (
            spark.readStream.format("kafka")
            .options(**options)
            .option("maxOffsetsPerTrigger", AT_ONCE)
            .load()
        )
        sessions = source.select("key", "value", "partition", "offset").groupBy("key")
        if way == "apply":
            frame = sessions.applyInPandasWithState(
                applied, OUTPUT, "saved binary", "append", GroupStateTimeout.NoTimeout
            )
        else:
            frame = sessions.transformWithStateInPandas(Transforming(), OUTPUT, "Append", "None")
        sink = (
            frame.writeStream.format("parquet")
            .option("compression", "zstd")
            .option("path", str(out / "records"))
        )
        query = (
            sink.option("checkpointLocation", str(out / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run(WARM_TOPIC, folder / "warm")
    return lambda: run(TOPIC, folder / "out")
