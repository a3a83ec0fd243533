"""Streams on disk for tests of pages: real ledgers, manifests and status files, fed from a broker
in memory.

Next: tests/contracts/disk_streams.py, which has `DiskStream`.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetentionRules
from seriatim.memory import MemoryClock
from seriatim.operations.status import StreamStatus
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from seriatim.stream_files import StreamFile
from seriatim.web.app import RunSpan, create_app
from seriatim.web.read import PageReader
from seriatim.web.write_status import watch_stream_file, write_status_after_run, write_status_file
from tests.contracts.disk_streams import DiskStream

NOW = 1_794_843_300.0
"""Monday, 16 November 2026."""
HOUR = 3600.0
DAY_MS = 86_400_000
TOML = """topics = "in-.*"
machine = "table"
sequence = "seq"
tier = "{tier}"
output = {{path = "lake/{name}"}}
table = {{key = ["id"], columns = {{id = "string", v = "int64", at = "timestamp", cost = "decimal(9,2)"}}}}
"""


class TickingClock(MemoryClock):
    """A clock that advances by `step` whenever it is read."""

    step = 0.0

    def now_seconds(self) -> float:
        """Seconds since 1970."""
        self.now += self.step
        return self.now


class Lake:
    """A folder of streams, and the app over it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.streams = folder, folder / "streams"
        self.streams.mkdir(parents=True, exist_ok=True)
        self.now = NOW
        self.known: set[str] | None = None
        """The DAGs that the user may see; None: all."""
        self.runs: dict[tuple[str, str], RunSpan] = {}
        self.logged_in, self.refusal = True, 401

    def write(self, name: str, tier: str = "strict") -> Path:
        """A stream file; where its output goes."""
        (self.streams / f"{name}.toml").write_text(TOML.format(name=name, tier=tier))
        return self.folder / "lake" / name

    def stream(
        self, name: str, partitions: int = 2, slices: int = 3, tier: str = "strict", **fields: Any
    ) -> DiskStream:
        """A stream that was folded in some slices, a minute apart."""
        disk_stream = DiskStream(self.write(name, tier), name=name, tier=tier, **fields)
        disk_stream.clock = TickingClock(self.now - slices * 60.0)
        disk_stream.kafka.create("in-a", partitions, RetentionRules(retention_ms=3 * DAY_MS))
        chance = random.Random(name)
        for number in range(slices):
            for partition_number in range(partitions):
                first_values = [["a", "b"]] if not number else []
                self.send(
                    disk_stream, partition_number, "x", *first_values, *range(chance.randint(5, 40))
                )
            self.run(disk_stream)
            disk_stream.clock.sleep(60.0)
        return disk_stream

    def send(
        self, disk_stream: DiskStream, partition_number: int, session: str, *values: Any
    ) -> None:
        """Send messages with the present time."""
        log = disk_stream.kafka.topics["in-a"].messages[partition_number]
        message_count = len(log)
        disk_stream.send(f"in-a/{partition_number}", session, *values)
        log[message_count:] = [
            replace(message, timestamp=round(disk_stream.clock.now * 1000))
            for message in log[message_count:]
        ]

    def run(self, disk_stream: DiskStream, messages_max: int = 1_000_000) -> None:
        """Fold; the clock advances a little whenever it is read."""
        disk_stream.clock.step = 0.02
        disk_stream.run(messages_max)
        disk_stream.clock.step = 0.0

    def file(self, disk_stream: DiskStream) -> StreamFile:
        """The stream file, as it is loaded."""
        return StreamFile(disk_stream.stream, str(self.streams))

    def write_run_status(self, disk_stream: DiskStream) -> StreamStatus:
        """Write the status file as a run does at its end, and read it."""
        assert (
            write_status_after_run(
                self.file(disk_stream),
                disk_stream.kafka,
                disk_stream.ledger,
                disk_stream.files,
                disk_stream.clock,
            )
            == ""
        )
        return self.status(disk_stream.stream.name)

    def write_watch_status(self, disk_stream: DiskStream) -> StreamStatus:
        """Write the status file as a watch does."""
        file = self.file(disk_stream)
        status = watch_stream_file(
            file, disk_stream.kafka, disk_stream.ledger, disk_stream.files, disk_stream.clock
        )
        return write_status_file(file, status)

    def status(self, name: str) -> StreamStatus:
        """The status file."""
        saved_status = StatusFiles(LocalStore(self.folder / "lake" / name)).read_status()
        assert saved_status is not None
        return saved_status

    def reader(self) -> PageReader:
        """The reader behind the pages."""
        return PageReader(self.streams, lambda: self.now)

    def app(self) -> FastAPI:
        """The pages, mounted as Airflow mounts them, behind a login that this lake decides about."""

        def gate() -> Any:
            if not self.logged_in:
                raise HTTPException(self.refusal, "Not authenticated")
            return self

        outer = FastAPI()
        outer.mount(
            "/seriatim", create_app(self.reader(), gate, lambda dag, run: self.runs.get((dag, run)))
        )
        return outer

    def may_see(self, dag_id: str) -> bool:
        """Whether the user may see a DAG."""
        return self.known is None or dag_id in self.known

    def may_see_of(self, names: list[str]) -> list[str]:
        """The DAGs of a list that the user may see."""
        return [name for name in names if self.may_see(name)]

    def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        """Request a page."""
        app = self.app()

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as client:
                return await client.request(method, f"/seriatim{path}", headers=headers)

        return asyncio.run(ask())


def create_troubled_stream(lake: Lake, name: str = "orders") -> DiskStream:
    """A stream with a halted partition, a session in quarantine, and little time left."""
    disk_stream = lake.stream(name, partitions=4, slices=8)
    lake.send(disk_stream, 0, "y", ["a"], 1, 2)
    lake.send(disk_stream, 1, "y", ["a"], b"poison", 3)
    disk_stream.reader.lost_offsets = {
        (Partition("in-a", 2), len(disk_stream.kafka.topics["in-a"].messages[2]) + 4)
    }
    for partition_number in (2, 3):
        lake.send(disk_stream, partition_number, "x", *range(12))
    lake.run(disk_stream)
    return disk_stream
