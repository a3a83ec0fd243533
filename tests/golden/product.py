"""Every internal name of the product that the golden tests need, in this one module.

The golden tests drive the command line and read Delta tables, so that they survive a change of the
code below them. What they cannot do without is here: a Kafka in memory behind the command line
(`FakeCluster`), and the list of commands. When modules of the product move, only this file has to
follow; the golden files must not change.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import typer.main

from seriatim import cli, config, context
from seriatim import clock as clock_module
from seriatim.embedded import doctor
from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetentionRules
from seriatim.kafka import past_messages as consumer_module
from seriatim.kafka import sending
from seriatim.testing import MemoryBatches, MemoryClock, MemoryKafka, MemoryReader
from tests.command_tree import load_commands
from tests.golden.messages import Batch

NOW_SECONDS = 1_794_843_300.0
"""What the fake clock says: Monday, 16 November 2026."""


class Answer(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one for each line."""
        return [json.loads(line) for line in self.out.splitlines()]

    def told(self) -> list[dict[str, Any]]:
        """The JSON objects on stderr, one for each line."""
        return [
            json.loads(line) if line.startswith("{") else {"not JSON": line}
            for line in self.err.splitlines()
        ]


def command(*words: str) -> Answer:
    """Run a command line in this process."""
    # Some commands print bytes, which only a stream over bytes takes.
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        # Typer makes its tree of commands anew for every call, which takes longer than most commands.
        patch.setattr(typer.main, "get_command", lambda _: command_tree())
        try:
            cli.main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Killed:
            code = -9
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]  # BytesIO
    assert code != 1, f"{words}: a bug of the product: {printed}"
    return Answer(code, *printed)


@cache
def command_tree(make: Any = typer.main.get_command) -> Any:
    """The commands as Typer has them, made once."""
    return make(cli.app)


def commands_with_json() -> list[str]:
    """Every command that has the option --json, as `quarantine release`."""
    with_json = []
    for words, command in load_commands().items():
        if any("--json" in option.opts for option in command.params):
            with_json.append(words)
    return sorted(with_json)


class FakeCluster:
    """A Kafka in memory. While it is `installed` the command line reads it instead of a broker,
    without Spark.
    """

    def __init__(self, attempts: str = "attempt") -> None:
        self.kafka = MemoryKafka()
        self.clock = MemoryClock(NOW_SECONDS)
        self.lost: set[tuple[Partition, int]] = set()
        """Offsets that get lost between the log and the reader: unexplained holes."""
        self.kills = False
        """Whether the next fold is killed: its command ends on the spot, as a process would."""
        self._attempts = (f"{attempts}{number:04}" for number in count(1))

    def lose(self, topic: str, partition: int, offset: int) -> None:
        """Let a message vanish between the log and the reader."""
        self.lost.add((Partition(topic, partition), offset))

    def expire(self, topic: str, partition: int, before: int) -> None:
        """Let everything before an offset expire."""
        self.kafka.delete_records(Partition(topic, partition), before)

    def truncate(self, topic: str, partition: int, end: int) -> None:
        """Lose the end of a log, as an unclean election does."""
        self.kafka.truncate(Partition(topic, partition), end)

    def create_topics(self, _client: Mapping[str, str], topics: Mapping[str, int]) -> None:
        """Create the topics that do not exist."""
        for topic, partitions in topics.items():
            if topic not in self.kafka.topics:
                self.kafka.create(topic, partitions)

    def retain(self, topic: str, hours: int) -> None:
        """Set the retention of a topic."""
        self.kafka.topics[topic].rules = RetentionRules(retention_ms=hours * 3_600_000)

    def produce(self, batches: Iterable[Batch]) -> None:
        """Append messages to the log. A transaction takes one more offset, for its marker."""
        for batch in batches:
            offsets = []
            place = Partition(batch.topic, batch.partition)
            for message in batch.messages:
                _, offset = self.kafka.produce(
                    batch.topic,
                    message.key,
                    message.value,
                    partition=batch.partition,
                    timestamp=message.timestamp,
                )
                offsets.append(offset)
            if batch.outcome != "plain":
                self.kafka.end_transaction(place, offsets, abort=batch.outcome == "abort")

    @contextmanager
    def installed(self, folder: Path) -> Iterator[None]:
        """Let the command line find this cluster, and the streams of `folder`."""
        with pytest.MonkeyPatch.context() as patch, environment(folder, patch):
            patch.setattr(context, "log", lambda *_, **__: self.kafka)
            patch.setattr(
                context,
                "hole_explainer",
                lambda file, _: MemoryBatches(self.kafka, file.stream.isolation),
            )
            patch.setattr(context, "LazySpark", lambda file, *_: FakeReader(self, file))
            patch.setattr(context, "new_attempt", lambda: next(self._attempts))
            patch.setattr(
                sending, "MessageSender", type("MessageSender", (FakeSender,), {"cluster": self})
            )
            patch.setattr(sending, "create_topics", self.create_topics)
            patch.setattr(clock_module, "WallClock", lambda: self.clock)
            patch.setattr(time, "time", self.clock.now_seconds)
            # Doctor would start Spark, which takes longer than all other commands together.
            patch.setitem(doctor.CHECKS, "Spark", lambda _: "not looked at")
            patch.setattr(
                consumer_module,
                "KafkaPastMessageReader",
                type("KafkaPastMessageReader", (FakeReread,), {"cluster": self}),
            )
            yield


@contextmanager
def environment(
    folder: Path, patch: pytest.MonkeyPatch, servers: str = "127.0.0.1:1"
) -> Iterator[None]:
    """The settings of the command line, for the streams of `folder`."""
    for name in [
        name for name in os.environ if name.startswith("SERIATIM_") and "TESTS" not in name
    ]:
        if name not in ("SERIATIM_IVY_SETTINGS", "SERIATIM_HOME"):
            patch.delenv(name)
    patch.setenv("SERIATIM_STREAMS", str(folder / "streams"))
    patch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", servers)
    patch.setenv("SERIATIM_OUTBOX", str(folder / "outbox"))
    patch.chdir(folder)
    yield


def forget_modules(folder: Path) -> None:
    """Forget the machines that were imported from a folder. A command of a user is a process of its
    own; in this one, a later stream of the same name would find them.
    """
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if source and Path(source).is_relative_to(folder):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(folder)]
    importlib.invalidate_caches()


def link_jars(home: Path) -> None:
    """Let a home of the embedded broker have the JARs of this machine's real home."""
    link = home / "jars"
    if not link.exists():
        link.symlink_to(config.load_settings().home / "jars")


class Killed(BaseException):
    """The process of a command was killed; nothing of the product may catch it."""


class FakeReader:
    """Reads the fake cluster and folds in this process, by the very task that Spark would run."""

    spark: Any = None
    traced_sessions: tuple[str, ...] = ()

    def __init__(self, cluster: FakeCluster, file: Any) -> None:
        self.cluster, self.file = cluster, file
        self.reader = MemoryReader(cluster.kafka, file.stream.isolation)
        self.reader.lost_offsets = cluster.lost

    def read_slices(self, *words: Any, **options: Any) -> None:
        """From the given offsets to the log ends of now, in slices."""
        self.reader.read_slices(*words, **options)

    def read_ranges(self, *words: Any, **options: Any) -> Any:
        """These ranges and no others."""
        return self.reader.read_ranges(*words, **options)

    def make_task(self, works: Mapping[Partition, Any]) -> Any:
        """The work of one slice, as the product makes it for Spark."""
        if self.cluster.kills:
            raise Killed
        fold_task = context.SparkFoldTask(
            self.file,
            context.WorkTable.of_works(works),
            traced_sessions=self.traced_sessions,
        )
        return lambda partition, whole, stretches: fold_task(
            partition, whole, (arrow_batch(stretch) for stretch in stretches)
        )

    def stop(self) -> None:
        """There is no Spark to be stopped."""

    def kill(self) -> None:
        """There is no Spark to be killed."""


class FakeSender:
    """Sends messages to the fake cluster, which has them at once."""

    cluster: FakeCluster

    def __init__(self, client: Mapping[str, str]) -> None:  # noqa: ARG002  # there is no client
        self.sent_count = 0

    def send(self, topic: str, key: str | None, value: bytes, source: str = "") -> None:  # noqa: ARG002
        """One message, of now."""
        self.sent_count += 1
        now_ms = round(self.cluster.clock.now * 1000)
        self.cluster.kafka.produce(topic, key, value, timestamp=now_ms)

    def finish(self) -> int:
        """All are there."""
        return self.sent_count


class FakeReread:
    """Messages of the past, read again from the fake cluster."""

    cluster: FakeCluster
    with_headers = False

    def __init__(self, client: Mapping[str, str], isolation: str) -> None:  # noqa: ARG002  # there is no client
        self.reader = MemoryReader(self.cluster.kafka, isolation)
        self.reader.lost_offsets = self.cluster.lost

    def read(self, partition: Partition, whole: Any) -> Iterator[Any]:
        """The messages of a range that are there."""
        yield from self.reader.batches(partition, whole, with_headers=self.with_headers)

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic may lose messages in the middle."""
        return self.cluster.kafka.topics[topic].compacted

    def close(self) -> None:
        """There is no connection to be closed."""


def arrow_batch(stretch: Any) -> pa.RecordBatch:
    """Messages as the columns that Spark hands to the task."""
    length = len(stretch.keys)
    timestamps = [timestamp * 1000 for timestamp in stretch.timestamps]
    columns = {
        "offset": pa.array(range(stretch.start, stretch.start + length), pa.int64()),
        "timestamp": pa.array(timestamps, pa.int64()).cast(pa.timestamp("us", "UTC")),
        "key": pa.array(stretch.keys, pa.binary()),
        "value": pa.array(stretch.values, pa.binary()),
    }
    if stretch.headers is not None:
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        rows = [
            [{"key": name, "value": value} for name, value in headers]
            for headers in stretch.headers
        ]
        columns["headers"] = pa.array(rows, kind)
    return pa.record_batch(columns)
