"""The audit: the output of a stream read again, byte by byte, for `verify`. Nothing here comes from a
run.

The Delta log is read from its JSON files. A Delta library would start from a checkpoint and believe
it. What readers see is asked of the library in addition.

Next: operations/prove/verify.py compares what was read; operations/prove/chain.py and
operations/prove/rules.py have the rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from seriatim.engine.record_kinds import OTHER_TABLE_PREFIX
from seriatim.operations.prove.chain import AddedFile, Commit, CommitSignature
from seriatim.operations.prove.rules import FileOutline
from seriatim.ports import UnreadableFileError
from seriatim.storage.delta import COMMIT_METADATA_KEY, first_line
from seriatim.storage.files import file_digest, file_names, write_file

DATA_FOLDERS = ("records", "state", "kept", "manifests")
SIGN_OFF_FILE = "verified.json"
READ_ERRORS = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""
Position = tuple[int, int, str]
"""The offset, index and topic id of a row."""


class FileAudit:
    """The output of one stream, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def commits(self) -> list[Commit]:
        """The commits of the Delta log, oldest first."""
        folder = self.root / "records" / "_delta_log"
        log_digest = hashlib.sha256()
        commits = []
        for path in sorted(folder.glob("*.json")):
            if path.stem.isdecimal():
                content = path.read_bytes()
                log_digest.update(content)
                commits.append(_parse_commit(int(path.stem), content, log_digest.hexdigest()))
        return commits

    def paths_readers_see(self, version: int) -> set[str]:
        """The paths of the table's files at a version, as a Delta library gives them."""
        try:
            table = DeltaTable(self.root / "records", version=version)
            adds = pa.table(table.get_add_actions())
        except (DeltaError, *READ_ERRORS) as error:
            raise UnreadableFileError(_first_line(error)) from None
        return {f"records/{unquote(path)}" for path in adds.column("path").to_pylist()}

    def other_tables(self) -> dict[str, tuple[int, set[str]]]:
        """The tables of further kinds of records by name: the entry that each has reached (-1 if it
        cannot be read), and its files.
        """
        tables = {}
        for folder in self._other_table_folders():
            try:
                table = DeltaTable(self.root / folder)
                paths = pa.table(table.get_add_actions()).column("path").to_pylist()
                sequence = _reached_sequence(table)
            except TableNotFoundError:
                continue
            except (DeltaError, *READ_ERRORS, KeyError, TypeError):
                paths = []
                sequence = -1
            name = folder.removeprefix(OTHER_TABLE_PREFIX)
            tables[name] = (sequence, {f"{folder}/{unquote(path)}" for path in paths})
        return tables

    def _other_table_folders(self) -> list[str]:
        return [name for name in file_names(self.root) if name.startswith(OTHER_TABLE_PREFIX)]

    def witness(self) -> bytes | None:
        """The content of head.json; None if there is no such file."""
        return self._read_bytes_or_none("head.json")

    def sign_off(self) -> bytes | None:
        """The content of verified.json; None if there is no such file."""
        return self._read_bytes_or_none(SIGN_OFF_FILE)

    def put_sign_off(self, content: bytes) -> None:
        """Write verified.json."""
        write_file(self.root / SIGN_OFF_FILE, content)

    def put_differing_file(self, path: str) -> None:
        """Note the path in differs.json. An empty path deletes the note."""
        note_file = self.root / "differs.json"
        if path:
            write_file(note_file, json.dumps({"file": path}).encode())
        else:
            note_file.unlink(missing_ok=True)

    def manifest(self, path: str) -> tuple[str, bytes]:
        """The SHA-256 of a manifest file, and its unpacked content."""
        packed = self._read_bytes_or_none(path)
        if packed is None:
            raise UnreadableFileError("it is missing")
        try:
            content = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
        except READ_ERRORS as error:
            raise UnreadableFileError(_first_line(error)) from None
        return hashlib.sha256(packed).hexdigest(), content

    def paths(self) -> list[str]:
        """The paths of all files in the data folders, without those of Delta logs."""
        paths = []
        for folder in (*DATA_FOLDERS, *self._other_table_folders()):
            for full_path in (self.root / folder).rglob("*"):
                path = full_path.relative_to(self.root)
                if "_delta_log" not in path.parts and full_path.is_file():
                    paths.append(str(path))
        return paths

    def size(self, path: str) -> int | None:
        """The size of a file in bytes; None if there is no such file."""
        full_path = self.root / path
        if not full_path.is_file():
            return None
        return full_path.stat().st_size

    def digest(self, path: str) -> str:
        """XXH3-128 of the whole file."""
        return file_digest(self.root / path)

    def outline(self, path: str) -> FileOutline:
        """What a record or quarantine file holds. Every page is read and proved by its checksum."""
        outline = FileOutline()
        position: Position = (-1, -1, "")
        for batch in self._batches(path):
            if batch.num_rows:
                position = _add_batch_to_outline(outline, batch, position)
        return outline

    def last_rows(
        self,
        path: str,
        key: Sequence[str],
        columns: Sequence[str],
        gone: Mapping[str, Any],
    ) -> Iterator[tuple[str, Any, tuple[Any, ...] | None, int]]:
        """Each row of each session as this file leaves it: session, key, row and offset.

        The row is None if it was deleted: its last record has the values `gone`.
        """
        read_columns = list(dict.fromkeys(["session", "offset", *gone, *key, *columns]))
        for batch in self._batches(path, read_columns):
            row_numbers = pa.array(range(batch.num_rows))
            table = pa.Table.from_batches([batch]).append_column("_row", row_numbers)
            for row in _last_of_each_key(table, ["session", *key]).to_pylist():
                key_values = tuple(row[column] for column in key)
                row_key = key_values[0] if len(key) == 1 else key_values
                is_gone = all(row[column] == value for column, value in gone.items())
                values = None if is_gone else tuple(row[column] for column in columns)
                yield row["session"], row_key, values, row["offset"]

    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a file. Columns that it does not have are left out."""
        for batch in self._batches(path, columns):
            yield from batch.to_pylist()

    def _batches(self, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(self.root / path, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                read_columns = None
                if columns:
                    read_columns = [column for column in columns if column in names]
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, read_columns)
                    yield from table.combine_chunks().to_batches()
        except READ_ERRORS as error:
            raise UnreadableFileError(_first_line(error)) from None

    def _read_bytes_or_none(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None


def _reached_sequence(table: DeltaTable) -> int:
    """The highest entry that a commit of ours on this table names; -1 if there is none."""
    reached = -1
    for commit in table.history():
        mark = commit.get(COMMIT_METADATA_KEY)
        if mark is not None:
            reached = max(reached, int(mark["sequence"]))
    return reached


def _last_of_each_key(table: pa.Table, key: list[str]) -> pa.Table:
    """The last row of each key, in the order of the table."""
    groups = table.select([*key, "_row"]).group_by(key, use_threads=False)
    last_row_numbers = groups.aggregate([("_row", "max")]).column("_row_max")
    return table.take(last_row_numbers.combine_chunks().sort())


def _add_batch_to_outline(
    outline: FileOutline,
    batch: pa.RecordBatch,
    previous_position: Position,
) -> Position:
    """Add the rows of a batch. Returns the position of its last row."""
    names = batch.schema.names
    offsets = _numpy_column(batch, "offset")
    indexes = _numpy_column(batch, "index") if "index" in names else np.zeros_like(offsets)
    encoded_ids = batch.column("topic_id").dictionary_encode()
    topic_ids = encoded_ids.dictionary.to_pylist()
    id_codes = encoded_ids.indices.to_numpy(zero_copy_only=False)
    previous_offset, previous_index, previous_id = previous_position
    previous_code = topic_ids.index(previous_id) if previous_id in topic_ids else -1
    offset_steps = np.diff(offsets, prepend=previous_offset)
    index_steps = np.diff(indexes, prepend=previous_index)
    # A topic that was created again starts over at offset 0, under a new id.
    same_id = np.diff(id_codes, prepend=previous_code) == 0
    is_disorder = (offset_steps < 0) | ((offset_steps == 0) & (index_steps <= 0))
    disordered_rows = np.flatnonzero(same_id & is_disorder)
    if outline.first_disorder is None and len(disordered_rows):
        row = disordered_rows[0]
        outline.first_disorder = int(offsets[row]), int(indexes[row])
    outline.rows += batch.num_rows
    outline.distinct_offsets += int(np.count_nonzero((offset_steps != 0) | ~same_id))
    outline.topic_ids |= set(topic_ids)
    _add_offsets(outline, batch, offsets)
    _add_distinct_values(outline, batch)
    return int(offsets[-1]), int(indexes[-1]), topic_ids[id_codes[-1]]


def _add_offsets(outline: FileOutline, batch: pa.RecordBatch, offsets: Any) -> None:
    """Add the lowest and highest offset, and the first record that is earlier than its source."""
    lowest_offset = int(offsets.min())
    if outline.first_offset < 0 or lowest_offset < outline.first_offset:
        outline.first_offset = lowest_offset
    outline.last_offset = max(outline.last_offset, int(offsets.max()))
    if "source_offset" in batch.schema.names and outline.early_offset < 0:
        source_offsets = _numpy_column(batch, "source_offset")
        early_rows = np.flatnonzero(source_offsets > offsets)
        if len(early_rows):
            outline.early_offset = int(offsets[early_rows[0]])


def _add_distinct_values(outline: FileOutline, batch: pa.RecordBatch) -> None:
    value_sets: dict[str, set[Any]] = {
        "topic": outline.topics,
        "partition": outline.partitions,
        "session": outline.sessions,
    }
    for name, values in value_sets.items():
        if name in batch.schema.names:
            values.update(batch.column(name).unique().to_pylist())


def _numpy_column(batch: pa.RecordBatch, name: str) -> Any:
    return batch.column(name).to_numpy(zero_copy_only=False)


def _parse_commit(version: int, content: bytes, log_digest: str) -> Commit:
    """One commit from its JSON lines. What cannot be read becomes a `read_error`, not an exception:
    verify goes on with the next commit.
    """
    try:
        lines = content.decode().splitlines()
        actions = [json.loads(line) for line in lines if line.strip()]
        adds = [action["add"] for action in actions if action.get("add")]
        removes = [action["remove"] for action in actions if action.get("remove")]
        files = [*adds, *removes]
        return Commit(
            version=version,
            signature=_parse_signature(actions),
            transaction=_parse_transaction(actions),
            adds=tuple(_parse_add_action(add) for add in adds),
            removes=tuple(f"records/{unquote(remove['path'])}" for remove in removes),
            is_rewrite=bool(files) and not any(file["dataChange"] for file in files),
            log_sha256=log_digest,
        )
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        return Commit(
            version=version,
            read_error=_first_line(error),
            log_sha256=log_digest,
        )


def _parse_signature(actions: Sequence[Mapping[str, Any]]) -> CommitSignature | None:
    for action in actions:
        commit_info = action.get("commitInfo", {})
        if COMMIT_METADATA_KEY in commit_info:
            return msgspec.convert(commit_info[COMMIT_METADATA_KEY], CommitSignature)
    return None


def _parse_transaction(actions: Sequence[Mapping[str, Any]]) -> int | None:
    """The version of our transaction in a commit; None if it has none."""
    for action in actions:
        if "txn" in action and action["txn"]["appId"] == COMMIT_METADATA_KEY:
            version: int | None = action["txn"]["version"]
            return version
    return None


def _parse_add_action(action: Mapping[str, Any]) -> AddedFile:
    stats = json.loads(action.get("stats") or "{}")
    lowest = stats.get("minValues", {})
    highest = stats.get("maxValues", {})
    return AddedFile(
        path=f"records/{unquote(action['path'])}",
        size=action["size"],
        rows=stats.get("numRecords", -1),
        first_offset=lowest.get("offset", -1),
        last_offset=highest.get("offset", -1),
        partition_values=dict(action.get("partitionValues") or {}),
    )


def _first_line(error: BaseException) -> str:
    return first_line(error)[:300]
