"""Streams on disk for tests of pages: real ledgers, manifests and status files, fed from a broker
in memory.

Next room: tests/contracts/disk_streams.py, which these are made of.
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
from seriatim.kafka.retention import RetentionRules
from seriatim.memory import MemoryClock
from seriatim.operations.stream_status import SavedStatus
from seriatim.operations.watch import assess_watch_input, read_watch_input
from seriatim.storage.status_file import StatusFiles
from seriatim.stream_files import StreamFile
from seriatim.web.app import RunSpan, create_app
from seriatim.web.read import PageReader
from seriatim.web.write_status import write_status_after_run, write_status_file
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


class Ticking(MemoryClock):
    """Each look at it takes a while."""

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
        """The DAGs that the visitor may see; None: all."""
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
        made = DiskStream(self.write(name, tier), name=name, tier=tier, **fields)
        made.clock = Ticking(self.now - slices * 60.0)
        made.kafka.create("in-a", partitions, RetentionRules(retention_ms=3 * DAY_MS))
        luck = random.Random(name)
        for number in range(slices):
            for place in range(partitions):
                first = [["a", "b"]] if not number else []
                self.send(made, place, "x", *first, *range(luck.randint(5, 40)))
            self.run(made)
            made.clock.sleep(60.0)
        return made

    def send(self, made: DiskStream, place: int, session: str, *values: Any) -> None:
        """Messages of now."""
        log = made.kafka.topics["in-a"].messages[place]
        known = len(log)
        made.send(f"in-a/{place}", session, *values)
        log[known:] = [replace(one, timestamp=round(made.clock.now * 1000)) for one in log[known:]]

    def run(self, made: DiskStream, messages_max: int = 1_000_000) -> None:
        """Fold; every look at the clock takes a moment."""
        made.clock.step = 0.02
        made.run(messages_max)
        made.clock.step = 0.0

    def file(self, made: DiskStream) -> StreamFile:
        """Its file, as read."""
        return StreamFile(made.stream, str(self.streams))

    def ran(self, made: DiskStream) -> SavedStatus:
        """What a run leaves at its end."""
        assert (
            write_status_after_run(self.file(made), made.kafka, made.ledger, made.files, made.clock)
            == ""
        )
        return self.status(made.stream.name)

    def watched(self, made: DiskStream) -> SavedStatus:
        """What a watch leaves."""
        seen = read_watch_input(made.stream, made.kafka, made.ledger, made.files, made.clock)
        return write_status_file(
            self.file(made), seen, assess_watch_input(made.stream, seen), made.ledger
        )

    def status(self, name: str) -> SavedStatus:
        """The status file."""
        found = StatusFiles(self.folder / "lake" / name).read_status()
        assert found is not None
        return found

    def reader(self) -> PageReader:
        """What pages read."""
        return PageReader(self.streams, lambda: self.now)

    def app(self) -> FastAPI:
        """The pages, mounted as Airflow does, behind a gate that this lake holds."""

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
        """The visitor's rights."""
        return self.known is None or dag_id in self.known

    def may_see_of(self, names: list[str]) -> list[str]:
        """The visitor's rights, of many."""
        return [name for name in names if self.may_see(name)]

    def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        """A page."""
        app = self.app()

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as client:
                return await client.request(method, f"/seriatim{path}", headers=headers)

        return asyncio.run(ask())


def hurt(lake: Lake, name: str = "orders") -> DiskStream:
    """A stream with a halted partition, a session in quarantine, and little time left."""
    made = lake.stream(name, partitions=4, slices=8)
    lake.send(made, 0, "y", ["a"], 1, 2)
    lake.send(made, 1, "y", ["a"], b"poison", 3)
    made.reader.lost_offsets = {
        (Partition("in-a", 2), len(made.kafka.topics["in-a"].messages[2]) + 4)
    }
    for place in (2, 3):
        lake.send(made, place, "x", *range(12))
    lake.run(made)
    return made
