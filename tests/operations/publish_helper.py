"""What `current` must hold, folded the plainest way there is from the records of an entry.

Next room: test_publish.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seriatim.engine.record_kinds import RowKeySpec
from seriatim.operations.publish import PublishResult, publish_current
from seriatim.testing import MemoryCurrent, MemoryStream

OWN = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
Name = tuple[Any, ...]


def current_of(made: MemoryStream) -> MemoryCurrent:
    """A table `current` for a stream in memory."""
    keyed = made.machine().row_key_spec
    assert keyed is not None
    return MemoryCurrent(keyed, lambda file: made.files.read(file).rows)


def publish_to(
    made: MemoryStream, current: Any, sequence: int | None = None, **more: Any
) -> PublishResult:
    """Publish, as the command does."""
    return publish_current(made.stream.name, made.ledger, current, sequence=sequence, **more)


def plain(made: MemoryStream, sequence: int, keyed: RowKeySpec) -> dict[Name, dict[str, Any]]:
    """Every row by partition, session and key: the records of the table as of an entry, one after
    the other.
    """
    lives: list[str] = []
    files: dict[str, Any] = {}
    for manifest in made.ledger.entries(made.stream.name, -1):
        entry = manifest.entry
        if entry.sequence > sequence:
            break
        lives += [
            account.topic_id
            for account in manifest.ledger.partitions.values()
            if account.topic_id not in lives
        ]
        files = {path: file for path, file in files.items() if path not in entry.removed_paths}
        files |= {file.path: file for change in entry.changes for file in change.records}
    records = [row for file in files.values() for row in made.files.read(file).rows]
    records.sort(
        key=lambda row: (
            lives.index(row["topic_id"]),
            row["partition"],
            row["offset"],
            row["index"],
        )
    )
    return folded(records, keyed)


def folded(records: list[dict[str, Any]], keyed: RowKeySpec) -> dict[Name, dict[str, Any]]:
    """Records in order, as the rows that they leave."""
    rows: dict[Name, dict[str, Any]] = {}
    for record in records:
        name = name_of(record, keyed)
        rows.pop(name, None)
        if not (
            keyed.deleted_when
            and all(record[column] == value for column, value in keyed.deleted_when.items())
        ):
            rows[name] = {column: record[column] for column in (*OWN, *keyed.columns)}
    return rows


def name_of(row: Mapping[str, Any], keyed: RowKeySpec) -> Name:
    """What names a row."""
    return (row["topic"], row["partition"], row["session"], *(row[column] for column in keyed.key))


def by_name(rows: list[dict[str, Any]], keyed: RowKeySpec) -> dict[Name, dict[str, Any]]:
    """What a reader of the table sees, each row once."""
    found = {name_of(row, keyed): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def check(made: MemoryStream, current: MemoryCurrent) -> None:
    """`current` is the fold of the records as of the entry that it names."""
    at = current.published_version().sequence
    assert by_name(current.rows(), current.row_key_spec) == plain(made, at, current.row_key_spec)
