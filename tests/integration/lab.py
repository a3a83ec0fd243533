"""A folder with stream files, a real broker, Spark, and methods that read the output.

`fold` runs in this process with a Spark session shared by all tests of a worker; `command` runs the
real command line in a process of its own, which can be killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from deltalake import DeltaTable

from seriatim import config, context, stream_files
from seriatim.embedded.broker import BrokerInfo
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import read_head
from seriatim.ledger.gaps import quarantine_files
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger
from seriatim.operations.run import FoldRun, RunOutcome
from seriatim.storage.store import Store, open_store

TABLE = {
    "machine": "table",
    "sequence": "seq",
    "table": {"key": ["id"], "columns": {"id": "string", "price": "float64", "size": "int64"}},
}
Sent = tuple[str, int, str | bytes | None, Any]
"""Topic, partition, key, value: a dict is sent as JSON."""


class Lab:
    """One test's streams and their output."""

    def __init__(
        self,
        folder: Path,
        broker: BrokerInfo,
        spark: Any,
        read: str = "task",
        output_root: str = "lake",
    ) -> None:
        self.folder, self.servers, self.spark, self.read = (
            folder,
            broker.bootstrap_servers,
            spark,
            read,
        )
        self.output_root = output_root
        """Below it each stream has its output, unless its test says where."""
        self.settings = config.load_settings(
            {
                **os.environ,
                "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": self.servers,
                "SERIATIM_STREAMS": str(folder / "streams"),
                "SERIATIM_SPARK_MASTER": "local[2]",
            }
        )
        (folder / "streams").mkdir()
        self.admin = AdminClient({"bootstrap.servers": self.servers})

    def stream(
        self, name: str, topics: str, base_fields: Mapping[str, Any] | None = None, **more: Any
    ) -> str:
        """Write a stream file; the fields that are not named are those of the stock table."""
        values = {
            **(TABLE if base_fields is None else base_fields),
            "topics": topics,
            "output": {"path": f"{self.output_root}/{name}"},
            "slice": {"read": self.read},
            **more,
        }
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        (self.folder / "streams" / f"{name}.toml").write_text("\n".join(lines) + "\n")
        return name

    def send(
        self, messages: Iterable[Sent], headers: list[tuple[str, bytes]] | None = None
    ) -> None:
        """Put messages on the broker, in order."""
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "linger.ms": 20,
                "message.max.bytes": 20_000_000,
                "enable.idempotence": True,
                "log_level": 0,
            }
        )
        failed: list[str] = []
        for topic, partition, key, value in messages:
            content = json.dumps(value).encode() if isinstance(value, dict) else value
            while True:
                try:
                    producer.produce(
                        topic,
                        content,
                        key,
                        partition,
                        headers=headers,
                        on_delivery=lambda error, _: failed.append(str(error)) if error else None,
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(60) == 0
        assert not failed, failed[0]

    def fold(
        self, name: str, messages_max: int | None = None, until: dict[str, int] | None = None
    ) -> RunOutcome:
        """Run a stream in this process."""
        file = stream_files.load_stream(name, self.settings.streams)
        open_stream = context.open_for_fold(file, self.settings, silent)
        open_stream.spark.spark = self.spark()
        folding = FoldRun(open_stream)
        ends = {Partition.parse(place): end for place, end in until.items()} if until else None
        return folding.run(messages_max or file.stream.slice.messages_max, ends)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the real command line."""
        base_fields = {
            **os.environ,
            "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": self.servers,
            "SERIATIM_STREAMS": str(self.folder / "streams"),
            "SERIATIM_SPARK_MASTER": "local[2]",
            "SERIATIM_SPARK_DRIVER_MEMORY": "1g",
            **environment,
        }
        command = [sys.executable, "-m", "seriatim", *arguments]
        return subprocess.Popen(
            command,
            env=base_fields,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_hear_ctrl_c,  # noqa: PLW1509  # nothing here has threads that hold locks over a fork
        )

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the real command line to its end."""
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=900)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def root(self, name: str) -> Path:
        """The stream's output folder, for tests that look at files of a disk."""
        if "://" in self.output_root:
            pytest.skip("looks at files of a disk")
        return self.folder / "lake" / name

    def records(self, name: str) -> list[dict[str, Any]]:
        """All records, in order, as any Delta reader sees them."""
        rows = (
            self.table(name, "records").to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
        )
        return sorted(
            rows, key=lambda row: (row["topic"], row["partition"], row["offset"], row["index"])
        )

    def store(self, name: str) -> Store:
        """The store of the stream's output."""
        file = stream_files.load_stream(name, self.settings.streams)
        return open_store(file.stream.output.path)

    def table(self, name: str, folder: str, version: int | None = None) -> DeltaTable:
        """A Delta table of the output, as any reader sees it."""
        store = self.store(name)
        options = store.delta_options()
        return DeltaTable(f"{store.url}/{folder}", version=version, storage_options=options)

    def quarantined_rows(self, name: str) -> list[dict[str, Any]]:
        """The quarantined messages of all entries, file by file. In a bucket there may also be files of
        a first try, which no entry names.
        """
        store = self.store(name)
        rows: list[dict[str, Any]] = []
        for sequence in range(1, self.ledger(name).sequence + 1):
            for quarantined in quarantine_files(self.manifest(name, sequence).entry):
                content = store.read(quarantined.file.path)
                rows += pq.read_table(pa.BufferReader(content)).to_pylist()
        return rows

    def delete(self, name: str, key: str) -> None:
        """Delete an object of the output, as somebody who tidies up."""
        assert self.store(name).delete([key]) == [key]

    def flip_bit(self, name: str, key: str) -> None:
        """Flip one bit in the middle of an object of the output."""
        store = self.store(name)
        content = bytearray(store.read(key))
        content[len(content) // 2] ^= 4
        store.replace(key, content)

    def ledger(self, name: str) -> Ledger:
        """The ledger after its last entry."""
        file = stream_files.load_stream(name, self.settings.streams)
        head = read_head(context.ledger(file), name)
        assert head is not None
        return head.ledger

    def manifest(self, name: str, sequence: int) -> Manifest:
        """An entry and the ledger after it."""
        return context.ledger(stream_files.load_stream(name, self.settings.streams)).manifest_at(
            name, sequence
        )

    def sessions(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Every session's saved state, decoded."""
        file = stream_files.load_stream(name, self.settings.streams)
        runner, store, found = stream_files.load_runner(file), context.state(file), {}
        for place, account in self.ledger(name).partitions.items():
            for session, saved in store.all_sessions(account.state):
                state = (
                    None
                    if saved.state_bytes is None
                    else runner.to_plain(runner.load(saved.state_bytes, saved.state_version))
                )
                found[Partition.parse(place).topic, session] = {
                    "state": state,
                    "finding": saved.finding,
                    "sequence": saved.sequence,
                    "last_offset": saved.last_offset,
                    "snapshot_offset": saved.snapshot_offset,
                }
        return found

    def digest(self, name: str) -> tuple[str, str]:
        """One digest of all records and one of all state: the same for the same outcome."""
        table = self.table(name, "records").to_pyarrow_dataset().to_table(use_threads=False)
        order = [(column, "ascending") for column in ("topic", "partition", "offset", "index")]
        ordered = table.sort_by(order).combine_chunks()
        records = xxhash.xxh3_128()
        for column in ordered.column_names:
            records.update(json.dumps(ordered.column(column).to_pylist(), default=str).encode())
        sessions = sorted(
            (*key, json.dumps(value, default=str)) for key, value in self.sessions(name).items()
        )
        return records.hexdigest(), xxhash.xxh3_128_hexdigest(json.dumps(sessions).encode())

    def read_topic(
        self, topic: str, partitions: int
    ) -> list[tuple[int, int, bytes | None, bytes | None]]:
        """The messages of a topic: partition, offset, key, value."""
        consumer = Consumer(
            {"bootstrap.servers": self.servers, "group.id": "lab", "auto.offset.reset": "earliest"}
        )
        ends = {
            p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=120)
            for p in range(partitions)
        }
        consumer.assign([TopicPartition(topic, p, low) for p, (low, _) in ends.items()])
        message_count, found = sum(high - low for low, high in ends.values()), []
        until = time.monotonic() + 300
        while len(found) < message_count and time.monotonic() < until:
            for message in consumer.consume(10_000, 1.0):
                assert message.error() is None
                found.append(
                    (message.partition(), message.offset(), message.key(), message.value())
                )
        consumer.close()
        assert len(found) == message_count
        return sorted(found, key=lambda message: message[:2])

    def add_partitions(self, topic: str, total: int) -> None:
        """Give a topic more partitions."""
        self.admin.create_partitions([NewPartitions(topic, total)])[topic].result(120)

    def delete_records(self, topic: str, before: dict[int, int]) -> None:
        """Delete a topic's oldest messages."""
        places = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
        for answer in self.admin.delete_records(places).values():
            answer.result(120)


def silent(_: str) -> None:
    """Print nothing."""


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + " }"
    return json.dumps(value)


def fold_messages(
    messages: Iterable[tuple[int, int, bytes | None, bytes | None]],
) -> dict[str, dict[str, Any]]:
    """Tables by session, folded from the messages in the simplest way."""
    tables: dict[str, dict[str, Any]] = {}
    for _, _, key, value in messages:
        assert key is not None
        assert value is not None
        session, message = key.decode(), json.loads(value)
        if message["type"] == "snapshot":
            tables[session] = {row["id"]: row for row in message["rows"]}
        elif session not in tables:
            continue
        elif message["type"] == "delete":
            del tables[session][message["id"]]
        else:
            row = tables[session].setdefault(
                message["id"], {"id": message["id"], "price": None, "size": None}
            )
            row.update({name: message[name] for name in ("price", "size") if name in message})
    return tables


def fold_records(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Tables by topic and session, folded from the records alone."""
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        table = tables.setdefault((record["topic"], record["session"]), {})
        if record["op"] == "delete":
            del table[record["id"]]
        else:
            table[record["id"]] = {name: record[name] for name in ("id", "price", "size")}
    return tables


def _hear_ctrl_c() -> None:
    """Let the process react to Ctrl-C: a test run in the background ignores it, and children inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
