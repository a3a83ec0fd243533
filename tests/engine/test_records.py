"""The columns of every record are written down once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from seriatim.engine.offsets import Partition
from seriatim.engine.records import (
    LAST_RECORD_COLUMNS,
    RECORD_COLUMN_NAMES,
    RECORD_COLUMNS,
    RISING_COLUMN_NAMES,
    RecordSource,
    owner_values,
    record_values,
)
from seriatim.storage.record_files import record_schema

ROOT = Path(__file__).parents[2]
OTHER_TABLES = {
    "seriatim/cli/status.py": "the columns of sessions that a person sees",
    "seriatim/kafka/spark_reader.py": "the columns of Spark's Kafka source",
    "seriatim/kafka/task_reader.py": "the same columns, read without Spark",
    "seriatim/storage/derived_tables.py": "the tables `gaps` and `quarantine`",
    "seriatim/storage/record_files.py": "files of quarantined messages",
    "seriatim/storage/traces.py": "the table of traces",
}
"""Files with a list of names that are not the columns of a record, and what it is."""
HOME = "seriatim/engine/records.py"


def test_the_schema_of_a_table_begins_with_the_columns_of_every_record() -> None:
    """Names, order and types, as they are in every table that was ever written."""
    assert record_schema({"v": "int64"}) == pa.schema(
        [
            ("topic", pa.string()),
            ("topic_id", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("index", pa.int32()),
            ("source_offset", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("session", pa.string()),
            ("sequence", pa.int64()),
            ("v", pa.int64()),
        ]
    )
    assert RISING_COLUMN_NAMES == ("offset", "source_offset", "timestamp", "sequence")


def test_the_document_names_the_columns_of_every_record() -> None:
    """STREAMS.md has them in their order."""
    text = (ROOT / "docs/STREAMS.md").read_text()
    assert f"The columns are `{', '.join(RECORD_COLUMN_NAMES)}`" in text


def test_every_column_gets_its_value_from_its_source() -> None:
    """One value for all records, or one for each."""
    source = RecordSource(
        partition=Partition("in-a", 3),
        topic_id="T",
        offsets=[7, 8],
        indexes=[0, 1],
        source_offsets=[5, 8],
        timestamps=[70, 80],
        sessions=["x", "y"],
        sequences=[1, None],
    )
    owner = {"topic": "in-a", "topic_id": "T", "partition": 3}
    assert record_values(source) == [
        owner
        | {
            "offset": 7,
            "index": 0,
            "source_offset": 5,
            "timestamp": 70,
            "session": "x",
            "sequence": 1,
        },
        owner
        | {
            "offset": 8,
            "index": 1,
            "source_offset": 8,
            "timestamp": 80,
            "session": "y",
            "sequence": None,
        },
    ]
    assert owner_values(Partition("in-a", 3), "T") == owner
    fields = {field for column in RECORD_COLUMNS for field in column.source.split(".")[:1]}
    assert fields == set(RecordSource.__struct_fields__)


def test_what_current_shows_of_a_record_are_columns_of_it() -> None:
    """Each of them, once."""
    assert set(LAST_RECORD_COLUMNS) <= set(RECORD_COLUMN_NAMES)
    assert len(set(LAST_RECORD_COLUMNS)) == len(LAST_RECORD_COLUMNS)


def lists_of_columns(source: str) -> Iterator[int]:
    """The lines of lists in which three names of columns follow each other, as names alone, as
    pairs, as fields, or as keys.
    """
    for node in ast.walk(ast.parse(source)):
        elements: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            elements = list(node.elts)
        elif isinstance(node, ast.Dict):
            elements = list(node.keys)
        in_a_row = 0
        for element in elements:
            in_a_row = in_a_row + 1 if _first_text(element) in RECORD_COLUMN_NAMES else 0
            if in_a_row == 3:
                yield node.lineno


def _first_text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Tuple) and node.elts:
        return _first_text(node.elts[0])
    if isinstance(node, ast.Call) and node.args:
        return _first_text(node.args[0])
    return ""


def _without_printed_values(source: str) -> str:
    """The source with empty dictionaries: what a command prints as JSON is no list of columns."""

    class Emptied(ast.NodeTransformer):
        def visit_Dict(self, _node: ast.Dict) -> ast.Dict:
            return ast.Dict(keys=[], values=[])

    return ast.unparse(Emptied().visit(ast.parse(source)))


def test_there_is_no_second_list_of_columns() -> None:
    """A new column is added in one place."""
    files = set()
    for path in sorted((ROOT / "seriatim").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        source = path.read_text()
        if name.startswith(("seriatim/cli", "seriatim/operations", "seriatim/engine")):
            source = _without_printed_values(source)
        if any(lists_of_columns(source)):
            files.add(name)
    assert files - OTHER_TABLES.keys() == {HOME}
    assert OTHER_TABLES.keys() - files == set(), "no longer such a list: take it off"


@pytest.mark.parametrize(
    "source",
    [
        'COLUMNS = ("topic", "topic_id", "partition")',
        'SCHEMA = [pa.field("op"), pa.field("offset"), pa.field("index"), pa.field("session")]',
        'SCHEMA = [("offset", 1), ("index", 2), ("session", 3)]',
        'row = {"offset": 1, "index": 2, "session": 3}',
    ],
)
def test_a_second_list_is_seen(source: str) -> None:
    """The search itself can fail."""
    assert list(lists_of_columns(source)) == [1]
