"""The answer: what a contender's records say, as a count and a digest that do not depend on files
or their order.

Every contender names its columns here; a record is unique by partition, offset and id, so sorting
by these makes one order of all. Next room: run.py refuses figures of contenders whose answers
differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from confluent_kafka import Consumer, TopicPartition

COLUMNS = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "session": pa.string(),
    "sequence": pa.int64(),
    "op": pa.string(),
    "id": pa.string(),
    "price": pa.float64(),
    "size": pa.int64(),
    "old_price": pa.float64(),
    "old_size": pa.int64(),
}
SCHEMA = pa.schema(COLUMNS)
OURS = {"old_price": "before_price", "old_size": "before_size"}
AT_ONCE = 10_000


class Record(msgspec.Struct):
    """A record as JSON."""

    partition: int
    offset: int
    session: str
    sequence: int
    op: str
    id: str
    price: float | None = None
    size: int | None = None
    old_price: float | None = None
    old_size: int | None = None


def of_files(folder: Path, pattern: str, names: dict[str, str] | None = None) -> dict[str, Any]:
    """The answer in Parquet files; `names` where columns are called otherwise."""
    called = [(names or {}).get(name, name) for name in COLUMNS]
    files = sorted(folder.glob(pattern))
    tables = [
        pq.read_table(file, columns=called, partitioning=None).select(called) for file in files
    ]
    return _digest(
        pa.concat_tables([table.rename_columns(list(COLUMNS)).cast(SCHEMA) for table in tables])
    )


def of_topic(servers: str, topic: str, partitions: int) -> dict[str, Any]:
    """The answer in a topic of JSON records."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "answer", "enable.auto.commit": False}
    )
    places = [TopicPartition(topic, number, 0) for number in range(partitions)]
    left = sum(consumer.get_watermark_offsets(place)[1] for place in places)
    consumer.assign(places)
    decode, tables = msgspec.json.Decoder(Record).decode, []
    while left > 0:
        messages = consumer.consume(AT_ONCE, timeout=10)
        if not messages:
            raise SystemExit(
                f"{left} records of {topic} did not come within 10 s: the broker is ill, run again"
            )
        left -= len(messages)
        rows = [msgspec.structs.astuple(decode(message.value())) for message in messages]
        columns = zip(*rows, strict=True)
        tables.append(
            pa.table(
                [pa.array(c, t) for c, t in zip(columns, COLUMNS.values(), strict=True)],
                schema=SCHEMA,
            )
        )
    consumer.close()
    return _digest(pa.concat_tables(tables))


def folder_bytes(folder: Path, pattern: str = "**/*") -> int:
    """What lies in files."""
    return sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())


def _digest(table: pa.Table) -> dict[str, Any]:
    order = pc.sort_indices(
        table, [("partition", "ascending"), ("offset", "ascending"), ("id", "ascending")]
    )
    table, digest = table.take(order), xxhash.xxh3_128()
    for name in table.column_names:
        column = table[name]
        digest.update(column.is_null().cast(pa.int8()).to_numpy())
        if pa.types.is_string(column.type):
            digest.update(pc.binary_length(column).to_numpy())
            digest.update("".join(column.to_pylist()).encode())
        else:
            digest.update(column.fill_null(0).to_numpy())
    return {"records": len(table), "digest": digest.hexdigest()}
