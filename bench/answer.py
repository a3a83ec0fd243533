"""The answer: the number of a contender's records and a digest that depends neither on files nor on
the order.

A record is unique by partition, offset and id, so sorting by these gives one order of all.

Next: run.py, which refuses figures of contenders whose answers differ.
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
OUR_COLUMN_NAMES = {"old_price": "before_price", "old_size": "before_size"}
CONSUME_MESSAGES = 10_000


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
    """The answer in Parquet files; `names` has the columns that have other names there."""
    names = names or {}
    file_columns = [names.get(name, name) for name in COLUMNS]
    tables = []
    for file in sorted(folder.glob(pattern)):
        table = pq.read_table(file, columns=file_columns, partitioning=None)
        # Parquet gives the columns in the order of the file, so they are put into ours by name.
        table = table.select(file_columns).rename_columns(list(COLUMNS))
        tables.append(table.cast(SCHEMA))
    return _digest(pa.concat_tables(tables))


def of_topic(servers: str, topic: str, partitions: int) -> dict[str, Any]:
    """The answer in a topic of JSON records."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "answer", "enable.auto.commit": False}
    )
    topic_partitions = [TopicPartition(topic, number, 0) for number in range(partitions)]
    remaining = 0
    for topic_partition in topic_partitions:
        _, log_end = consumer.get_watermark_offsets(topic_partition)
        remaining += log_end
    consumer.assign(topic_partitions)
    decoder = msgspec.json.Decoder(Record)
    tables = []
    while remaining > 0:
        messages = consumer.consume(CONSUME_MESSAGES, timeout=10)
        if not messages:
            raise SystemExit(
                f"{remaining} records of {topic} did not come within 10 s: the broker is ill, "
                "run again"
            )
        remaining -= len(messages)
        records = [decoder.decode(message.value()) for message in messages]
        rows = [msgspec.structs.asdict(record) for record in records]
        tables.append(pa.Table.from_pylist(rows, schema=SCHEMA))
    consumer.close()
    return _digest(pa.concat_tables(tables))


def folder_bytes(folder: Path, pattern: str = "**/*") -> int:
    """The size of all files in a folder."""
    files = [path for path in folder.glob(pattern) if path.is_file()]
    return sum(file.stat().st_size for file in files)


def _digest(table: pa.Table) -> dict[str, Any]:
    sort_keys = [("partition", "ascending"), ("offset", "ascending"), ("id", "ascending")]
    table = table.take(pc.sort_indices(table, sort_keys))
    digest = xxhash.xxh3_128()
    for name in table.column_names:
        column = table[name]
        digest.update(column.is_null().cast(pa.int8()).to_numpy())
        if pa.types.is_string(column.type):
            digest.update(pc.binary_length(column).to_numpy())
            digest.update("".join(column.to_pylist()).encode())
        else:
            digest.update(column.fill_null(0).to_numpy())
    return {"records": len(table), "digest": digest.hexdigest()}
