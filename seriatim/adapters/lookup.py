"""Lookup: records of a Delta table by what is in their columns, and stretch by stretch in their order.

Reads the table as of when it was opened; changes nothing. What can be told from the log or the footers is not read.

Next room: steps/explain.py and steps/diff.py ask; delta.py commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from seriatim.core.errors import ConfigError
from seriatim.core.offsets import OffsetRange, Partition

ORDER = ("offset", "index")


class DeltaLookup:
    """A table of records: `records/` below an output path, or below a folder that a replay wrote."""

    def __init__(self, root: Path, version: int | None = None) -> None:
        self.root = root
        try:
            self.table = DeltaTable(root / "records", version=version)
        except (DeltaError, OSError) as error:
            raise ConfigError(
                f"{root}: there is no table of records in it: {str(error).splitlines()[0][:200]}",
                next="give the name of a stream that was run, or a folder that `seriatim replay … --to` wrote",
            ) from None

    @property
    def version(self) -> int:
        """The table's, as read."""
        return self.table.version()

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns."""
        return [field.name for field in self.table.schema().fields]

    def where(self, match: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Records with these values."""
        condition = None
        for name, value in match.items():
            one = pc.field(name).is_null() if value is None else pc.field(name) == value
            condition = one if condition is None else condition & one
        dataset = self.table.to_pyarrow_dataset()
        yield from dataset.to_table(filter=condition, use_threads=False).to_pylist()

    def places(self) -> dict[tuple[Partition, str], OffsetRange]:
        """What is there, by partition and life of the topic: first and last offset."""
        dataset = self.table.to_pyarrow_dataset()
        found = dataset.to_table(columns=["topic", "partition", "topic_id", "offset"], use_threads=False)
        groups = found.group_by(["topic", "partition", "topic_id"], use_threads=False)
        return {
            (Partition(row["topic"], row["partition"]), row["topic_id"]): OffsetRange(
                row["offset_min"], row["offset_max"] + 1
            )
            for row in groups.aggregate([("offset", "min"), ("offset", "max")]).to_pylist()
        }

    def read(self, place: tuple[Partition, str], whole: OffsetRange, columns: Sequence[str] | None = None) -> pa.Table:
        """The records of a range, by offset and index."""
        partition, topic_id = place
        wanted = (
            (pc.field("topic") == partition.topic)
            & (pc.field("partition") == partition.number)
            & (pc.field("topic_id") == topic_id)
            & (pc.field("offset") >= whole.start)
            & (pc.field("offset") < whole.end)
        )
        dataset = self.table.to_pyarrow_dataset()
        found = dataset.to_table(filter=wanted, columns=columns and list(columns), use_threads=False)
        return found.sort_by([(name, "ascending") for name in ORDER]).combine_chunks()
