"""Spark's own stateful operators in Python: applyInPandasWithState and transformWithStateInPandas.

Both get a session's messages in any order once a shuffle has spilled, so both sort by offset.
Decoding and the machine are ours (`bench/machine.py`, msgspec), so the difference is how messages,
state and records move between the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout

from bench.data import BATCH_MESSAGES_MAX, TOPIC, WARM_TOPIC
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
"""The same fetch settings as ours."""
ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.execution.arrow.transformWithStateInPandas.maxRecordsPerBatch": "20000",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
}
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB_PROVIDER,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""transformWithState has no other store; applyInPandasWithState is faster with Spark's default, in
memory.
"""


def fold(state: bytes | None, frames: Iterable[pd.DataFrame]) -> tuple[bytes, pd.DataFrame]:
    """Fold one session's messages of a batch: (its new state, the records)."""
    frame = pd.concat(list(frames)).sort_values("offset")
    machine = Rows()
    decoder = msgspec.json.Decoder(Snapshot | Insert | Update | Delete)
    rows = msgspec.msgpack.decode(state, type=dict[str, Row]) if state else {}
    records: list[tuple[Any, ...]] = []
    for partition, offset, key, value in zip(
        frame["partition"].tolist(),
        frame["offset"].tolist(),
        frame["key"],
        frame["value"],
        strict=True,
    ):
        message = decoder.decode(value)
        source = (partition, offset, key.decode(), message.seq)
        changes = machine.apply(rows, message)
        records += [(*source, *msgspec.structs.astuple(change)) for change in changes]
    # Without a nullable type pandas would turn integers beside nulls into floats.
    table = pd.DataFrame.from_records(records, columns=COLUMNS)
    table = table.astype({"size": "Int64", "old_size": "Int64"})
    return msgspec.msgpack.encode(rows), table


def fold_group(key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG001
    """The function for applyInPandasWithState."""
    state_bytes = state.get[0] if state.exists else None
    new_state_bytes, records = fold(state_bytes, frames)
    state.update((new_state_bytes,))
    yield records


class RowsProcessor(StatefulProcessor):
    """The processor for transformWithStateInPandas."""

    def init(self, handle: Any) -> None:
        self.rows = handle.getValueState("rows", "saved binary")

    def handleInputRows(  # noqa: N802  # Spark's name
        self,
        key: Any,  # noqa: ARG002
        rows: Iterable[pd.DataFrame],
        timerValues: Any,  # noqa: ARG002, N803
    ) -> Iterator[pd.DataFrame]:
        state_bytes = bytes(self.rows.get()[0]) if self.rows.exists() else None
        new_state_bytes, records = fold(state_bytes, rows)
        self.rows.update((new_state_bytes,))
        yield records

    def close(self) -> None:
        """There is nothing to close."""


def peer(folder: Path, operator: str) -> Callable[[], Any]:
    """The work of one of the two operators, warmed up."""
    settings = config.load_settings()
    spark_conf = dict(SETTINGS)
    if operator == "transform":
        spark_conf |= ROCKSDB
    spark = context.spark_session(f"spark-{operator}", settings, lambda _: None, spark_conf)
    servers = context.kafka_client(settings)["bootstrap.servers"]

    def run(topic: str, out: Path) -> None:
        options = {
            "kafka.bootstrap.servers": servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH_MESSAGES_MAX),
            **FETCH,
        }
        source = spark.readStream.format("kafka").options(**options).load()
        sessions = source.select("key", "value", "partition", "offset").groupBy("key")
        if operator == "apply":
            frame = sessions.applyInPandasWithState(
                fold_group, OUTPUT, "saved binary", "append", GroupStateTimeout.NoTimeout
            )
        else:
            frame = sessions.transformWithStateInPandas(RowsProcessor(), OUTPUT, "Append", "None")
        sink_options = {
            "compression": "zstd",
            "path": str(out / "records"),
            "checkpointLocation": str(out / "checkpoint"),
        }
        sink = frame.writeStream.format("parquet").options(**sink_options)
        query = sink.trigger(availableNow=True).start()
        query.awaitTermination()

    run(WARM_TOPIC, folder / "warm")
    return lambda: run(TOPIC, folder / "out")
