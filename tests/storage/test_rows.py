"""The newest row of each key, merged from record files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowKeySpec
from seriatim.ledger.current_rows import PartitionCatchUp
from seriatim.storage.record_files import record_schema
from seriatim.storage.record_rows import RowMerger
from seriatim.storage.store import LocalStore

PARTITION = Partition("in-a", 0)


def write_file(root: Path, schema: pa.Schema, records: list[dict[str, Any]]) -> File:
    """Write records to a file of the partition."""
    offsets = [record["offset"] for record in records]
    name = f"records/{PARTITION}/0-{offsets[0]}-x.parquet"
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {"topic": "in-a", "partition": 0, "index": 0, "session": "s"}
    filled = [{**common, **record} for record in records]
    pq.write_table(pa.Table.from_pylist(filled, schema=schema), path)
    return File(
        path=name,
        size_bytes=path.stat().st_size,
        rows=len(records),
        digest="",
        first_offset=min(offsets),
        last_offset=max(offsets),
    )


def merged_rows(
    root: Path, schema: pa.Schema, spec: RowKeySpec, files: list[File], *topic_ids: str
) -> list[dict[str, Any]]:
    """The rows that the records of these files make."""
    merger = RowMerger(LocalStore(root), "s", schema, spec)
    catch_up = PartitionCatchUp(partition=PARTITION, files=tuple(files), topic_ids=topic_ids)
    rows: list[dict[str, Any]] = merger.merge(
        None, merger.read_changes(catch_up), PARTITION
    ).to_pylist()
    return rows


def test_a_machine_may_have_a_column_named_id_with_an_underscore(tmp_path: Path) -> None:
    """The name of a helper column does not clash with it when a topic was created again."""
    schema = record_schema({"_id": "string", "v": "int64"})
    spec = RowKeySpec(key=("_id",), columns=("_id", "v"))
    new = write_file(tmp_path, schema, [{"topic_id": "new", "offset": 0, "_id": "a", "v": 2}])
    old = write_file(tmp_path, schema, [{"topic_id": "old", "offset": 5, "_id": "a", "v": 1}])
    rows = merged_rows(tmp_path, schema, spec, [new, old], "old", "new")
    assert [(row["_id"], row["v"]) for row in rows] == [("a", 2)]


def test_a_row_may_be_gone_where_a_list_is_null(tmp_path: Path) -> None:
    """Arrow compares no lists, so a null is asked for as a null."""
    schema = record_schema({"id": "string", "tags": "list<string>"})
    spec = RowKeySpec(key=("id",), columns=("id", "tags"), deleted_when={"tags": None})
    records = [
        {"topic_id": "t", "offset": 0, "id": "a", "tags": ["x"]},
        {"topic_id": "t", "offset": 1, "id": "b", "tags": ["y"]},
        {"topic_id": "t", "offset": 2, "id": "a", "tags": None},
    ]
    file = write_file(tmp_path, schema, records)
    rows = merged_rows(tmp_path, schema, spec, [file], "t")
    assert [(row["id"], row["tags"]) for row in rows] == [("b", ["y"])]
