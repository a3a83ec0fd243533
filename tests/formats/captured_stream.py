"""A table from Debezium in memory, whose stream file may change.

Next: change_events.py has the messages.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from seriatim.engine.findings import Tier
from seriatim.engine.records import MAIN_TABLE
from seriatim.formats.debezium import debezium_decoder
from seriatim.stream import DebeziumSettings, OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream
from tests.formats.change_events import encode, event
from tests.operations.memory_streams import A0


class CapturedStream(MemoryStream):
    """A table of two columns, over a topic of one partition."""

    def __init__(self, session: str, before_images: str = "full", tier: Tier = "strict") -> None:
        self.captured = Stream(
            name="s",
            topics="in-.*",
            machine="table",
            decoder="debezium",
            session=session,
            tier=tier,
            table=TableSettings(key=("id",), columns={"id": "int64", "v": "int64"}),
            debezium=DebeziumSettings(before_images=before_images),  # type: ignore[arg-type]
            output=OutputSettings(path="memory"),
        )
        super().__init__(self.captured, self._new_machine)
        self.kafka.create("in-a", 1)

    def _new_machine(self) -> Any:
        return self.captured.table_machine(decoder=debezium_decoder(self.captured))

    def set_columns(self, columns: dict[str, str]) -> None:
        """Give the stream file other columns."""
        table = replace(self.captured.table, columns=columns)
        self.captured = replace(self.captured, table=table)
        self.files.columns[MAIN_TABLE] = self._new_machine().columns

    def set_before_images(self, before_images: str) -> None:
        """Let the stream file promise another kind of before-images."""
        debezium = DebeziumSettings(before_images=before_images)  # type: ignore[arg-type]
        self.captured = replace(self.captured, debezium=debezium)

    def send(self, op: str, after: Any, before: Any = None) -> None:
        """A change of a row."""
        key = json.dumps({"id": (after or before)["id"]})
        self.kafka.produce("in-a", key, encode(event(op, after, before)), partition=0)

    def rows_by_id(self) -> dict[int, Any]:
        """The rows of all sessions, as the saved state has them."""
        machine = self.machine()
        rows = {}
        for saved in self.sessions(A0).values():
            state = machine.load(saved.state_bytes or b"", saved.state_version)
            for row in machine.to_plain(state)["rows"]:
                rows[row["id"]] = row
        return rows
