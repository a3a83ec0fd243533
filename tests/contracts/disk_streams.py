"""A whole stream on disk without Spark: the real files and the real ledger, fed from a broker in
memory.

Next: tests/operations/memory_streams.py, the same with everything in memory.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.formats.debezium import debezium_decoder
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.storage.derived_tables import DeltaDerived
from seriatim.storage.record_files import ParquetRecords, older_schema, record_schema
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import Store, open_store
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream, OpenMemoryStream

COLUMNS = {"id": "string", "v": "int64", "at": "timestamp", "cost": "decimal(9,2)"}


class DiskFiles(ParquetRecords, StateFiles):
    """Record and state files in one, as the fake has them."""

    def __init__(self, store: Store, columns: dict[str, str], leave_out: tuple[str, ...]) -> None:
        ParquetRecords.__init__(self, store, columns, "zstd", leave_out)
        StateFiles.__init__(self, store, "s")


class DiskStream(MemoryStream):
    """A stream of rows over topics in-…, whose output lies below `root`, or at `url` in a bucket."""

    def __init__(
        self, root: Path, *, url: str = "", output_partitions: tuple[str, ...] = (), **fields: Any
    ) -> None:
        table = TableSettings(key=("id",), columns=COLUMNS, before=True)
        output = OutputSettings(path=url or str(root), partition_by=output_partitions)
        stream_fields = {
            "name": "s",
            "sequence": "seq",
            "table": table,
            "machine": "table",
            **fields,
        }
        stream = Stream(topics="in-.*", output=output, **stream_fields)
        decoder = debezium_decoder(stream) if stream.decoder == "debezium" else None
        self.root, self.runner = root, stream.table_machine(decoder=decoder)
        super().__init__(stream, lambda: self.runner)
        self._sequences = dict[tuple[str, str], int]()
        self._open()

    def _open(self) -> None:
        """Open files and ledger, as a new process does."""
        columns, parts = self.runner.columns, self.stream.output.partition_by
        store = open_store(self.stream.output.path)
        self.files: Any = DiskFiles(store, columns, parts)
        self.ledger: Any = DeltaLedger(
            store, record_schema(columns), parts, partial(older_schema, self.runner)
        )
        self.derived: Any = DeltaDerived(store, "zstd")

    def set_columns(self, columns: dict[str, str]) -> None:
        """Give the stream file other columns. From now on processes see these."""
        self.stream = replace(self.stream, table=replace(self.stream.table, columns=columns))
        decoder = debezium_decoder(self.stream) if self.stream.decoder == "debezium" else None
        self.runner = self.stream.table_machine(decoder=decoder)
        self._open()

    def open(self, runner: Runner | None = None) -> OpenMemoryStream:
        """Open the stream, as a process of its own does."""
        self._open()
        return super().open(runner)

    def send(self, place: str, session: str, *values: Any) -> None:
        """Send messages: a list is a snapshot of these rows, None a delete of row a, a number an
        update of row a.
        """
        partition = Partition.parse(place)
        for value in values:
            sequence = self._sequences[place, session] = (
                self._sequences.get((place, session), 0) + 1
            )
            body: dict[str, Any] = {"type": "update", "id": "a", "v": value}
            if isinstance(value, list):
                rows = [
                    {"id": row_id, "v": 0, "at": "2026-01-01T12:00:00+02:00", "cost": "1.5"}
                    for row_id in value
                ]
                body = {"type": "snapshot", "rows": rows}
            elif value is None:
                body = {"type": "delete", "id": "a"}
            content = (
                value
                if isinstance(value, bytes)
                else json.dumps({**body, "seq": sequence}).encode()
            )
            self.kafka.produce(partition.topic, session, content, partition=partition.number)


def create_filled_output(root: Path, **fields: Any) -> DiskStream:
    """Two topics, three partitions, several slices, one session in quarantine and one that came out
    of it.
    """
    disk_stream = DiskStream(root, **fields)
    disk_stream.kafka.create("in-a", 2)
    disk_stream.kafka.create("in-b", 1)
    for number, place in enumerate(("in-a/0", "in-a/1", "in-b/0")):
        for session in ("x", "y"):
            disk_stream.send(place, session, ["a", "b"], 1, 2)
        disk_stream.run()
        disk_stream.send(place, "x", 3, None, ["a", "c"], number)
        disk_stream.run()
    disk_stream.send("in-a/0", "y", b"poison", 4, ["a"], 5)
    disk_stream.send("in-b/0", "y", b"poison", 4)
    disk_stream.run(messages_max=4)
    return disk_stream
