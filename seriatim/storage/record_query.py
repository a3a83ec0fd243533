"""Lookup: records of a Delta table by what is in their columns, and stretch by stretch in their
order.

Reads the table as of when it was opened; changes nothing. What can be told from the log or the
footers is not read.

Next room: operations/inspect/explain.py and operations/inspect/diff.py ask; delta.py commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import and_
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from msgspec import Struct

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_kinds import OTHER_TABLE_PREFIX
from seriatim.errors import ConfigError, DamagedFileError

RECORD_ORDER = ("offset", "index")


class RecordQuery:
    """A table of records: `records/` below an output path, or below a folder that a replay wrote."""

    def __init__(self, root: Path, stream: str | None, version: int | None = None) -> None:
        """`stream` is whose output it is; None: a replay wrote it."""
        self.root, self.stream = root, stream
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

    @property
    def other_tables(self) -> list[str]:
        """Names of the machine's other tables, beside this one."""
        return sorted(
            path.parent.name for path in self.root.glob(f"{OTHER_TABLE_PREFIX}*/_delta_log")
        )

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Records with these values."""
        for part in self._files:
            yield from self._read_file(part, column_values, None, None).to_pylist()

    def read(
        self,
        partition_and_topic_id: tuple[Partition, str],
        offset_range: OffsetRange,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The records of a range, by offset and index."""
        partition, topic_id = partition_and_topic_id
        match = {"topic": partition.topic, "partition": partition.number, "topic_id": topic_id}
        near = [
            part
            for part in self._files
            if part.first_offset < offset_range.end and offset_range.start <= part.last_offset
        ]
        found = [self._read_file(part, match, offset_range, columns) for part in near]
        empty = self.schema.empty_table()
        both = pa.concat_tables([empty if columns is None else empty.select(list(columns)), *found])
        return both.sort_by([(name, "ascending") for name in RECORD_ORDER]).combine_chunks()

    @cached_property
    def schema(self) -> pa.Schema:
        """The table's, as Arrow has it."""
        return pa.schema(
            [
                (field.name, _normalized_type(field.type))
                for field in pa.schema(self.table.schema().to_arrow())
            ]  # no views
        )

    @cached_property
    def _files(self) -> list[_TableFile]:
        """The table's files.

        delta-rs's own dataset is of no use here: with a filter it drops every row of a file whose
        statistics do not name each column, and ours name the offset alone.
        """
        rows = pa.table(self.table.get_add_actions()).to_pylist()
        return [
            _TableFile(
                row["path"], row["min"]["offset"], row["max"]["offset"], row.get("partition") or {}
            )
            for row in sorted(
                rows, key=lambda row: (row["path"].rpartition("/")[0], row["min"]["offset"])
            )
        ]

    def _read_file(
        self,
        file: _TableFile,
        match: Mapping[str, Any],
        offset_range: OffsetRange | None,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        """What of one file is wanted, with the columns that are only in its place in the table."""
        outside = {name: value for name, value in match.items() if name in file.partition_values}
        empty = (
            self.schema.empty_table()
            if columns is None
            else self.schema.empty_table().select(list(columns))
        )
        if any(str(file.partition_values[name]) != str(value) for name, value in outside.items()):
            return empty
        wanted = [
            _equals_or_null(name, value)
            for name, value in match.items()
            if name not in file.partition_values
        ]
        if offset_range is not None:
            wanted += [
                pc.field("offset") >= offset_range.start,
                pc.field("offset") < offset_range.end,
            ]
        condition = reduce(and_, wanted) if wanted else None
        path = self.root / "records" / file.path
        try:
            found = pq.read_table(path, filters=condition, use_threads=False, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(
                f"{path}: it cannot be read: {(str(error).splitlines() or [''])[0][:200]}",
                path=f"records/{file.path}",
                next=self._advice,
            ) from None
        for name, value in file.partition_values.items():
            filled = pa.array([value] * found.num_rows, pa.string()).cast(
                self.schema.field(name).type
            )
            found = found.append_column(name, filled)
        return found.select(empty.column_names).cast(empty.schema)

    @property
    def _advice(self) -> str:
        """What to do about a file that cannot be read."""
        if self.stream is None:
            return "fold the replay again into another folder"
        return f"seriatim verify {self.stream} tells what is hurt"


class _TableFile(Struct, frozen=True):
    """A file of the table."""

    path: str
    first_offset: int
    last_offset: int
    partition_values: dict[str, Any]
    """Columns that the table is partitioned by: they are not in the file."""


def _equals_or_null(name: str, value: Any) -> pc.Expression:
    return pc.field(name).is_null() if value is None else pc.field(name) == value


def _normalized_type(kind: Any) -> pa.DataType:
    """A type as Parquet files give it."""
    kind = pa.field("x", kind).type
    swapped = {
        pa.string_view(): pa.string(),
        pa.large_string(): pa.string(),
        pa.binary_view(): pa.binary(),
    }
    return (
        pa.list_(_normalized_type(kind.value_type))
        if pa.types.is_list(kind)
        else swapped.get(kind, kind)
    )
