"""What `current` must hold, computed in the simplest way from the records as of an entry.

Next: test_publish.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.engine.records import RowKeySpec
from seriatim.operations.publish import PublishResult, publish_current
from seriatim.testing import MemoryCurrent, MemoryStream

OWN = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
Name = tuple[Any, ...]


def current_of(memory_stream: MemoryStream) -> MemoryCurrent:
    """A table `current` for a stream in memory."""
    key_spec = memory_stream.machine().row_key_spec
    assert key_spec is not None
    return MemoryCurrent(key_spec, lambda file: memory_stream.files.read(file).rows)


def publish_to(
    memory_stream: MemoryStream, current: Any, sequence: int | None = None, **options: Any
) -> PublishResult:
    """Publish, as the command does."""
    return publish_current(
        memory_stream.stream.name, memory_stream.ledger, current, sequence=sequence, **options
    )


def expected_rows(
    memory_stream: MemoryStream, sequence: int, key_spec: RowKeySpec
) -> dict[Name, dict[str, Any]]:
    """Every row by partition, session and key: the records of the table as of an entry, one after
    the other.
    """
    topic_ids: list[str] = []
    files: dict[str, Any] = {}
    for manifest in memory_stream.ledger.entries(memory_stream.stream.name, -1):
        entry = manifest.entry
        if entry.sequence > sequence:
            break
        topic_ids += [
            account.topic_id
            for account in manifest.ledger.partitions.values()
            if account.topic_id not in topic_ids
        ]
        files = {path: file for path, file in files.items() if path not in entry.removed_paths}
        files |= {file.path: file for change in entry.changes for file in change.records}
    records = [row for file in files.values() for row in memory_stream.files.read(file).rows]
    records.sort(
        key=lambda row: (
            topic_ids.index(row["topic_id"]),
            row["partition"],
            row["offset"],
            row["index"],
        )
    )
    return rows_after_records(records, key_spec)


def rows_after_records(
    records: list[dict[str, Any]], key_spec: RowKeySpec
) -> dict[Name, dict[str, Any]]:
    """The rows that remain after records in order."""
    rows: dict[Name, dict[str, Any]] = {}
    for record in records:
        name = name_of(record, key_spec)
        rows.pop(name, None)
        if not (
            key_spec.deleted_when
            and all(record[column] == value for column, value in key_spec.deleted_when.items())
        ):
            rows[name] = {column: record[column] for column in (*OWN, *key_spec.columns)}
    return rows


def name_of(row: Mapping[str, Any], key_spec: RowKeySpec) -> Name:
    """What names a row."""
    return (
        row["topic"],
        row["partition"],
        row["session"],
        *(row[column] for column in key_spec.key),
    )


def by_name(rows: list[dict[str, Any]], key_spec: RowKeySpec) -> dict[Name, dict[str, Any]]:
    """What a reader of the table sees, each row once."""
    found = {name_of(row, key_spec): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def check(memory_stream: MemoryStream, current: MemoryCurrent) -> None:
    """`current` is the fold of the records as of the entry that it names."""
    published_sequence = current.published_version().sequence
    assert by_name(current.rows(), current.row_key_spec) == expected_rows(
        memory_stream, published_sequence, current.row_key_spec
    )
