"""The audit: a stream's output read anew, byte by byte, for verify. Nothing here is taken from a
run.

The Delta log is read from its JSON files, not through a Delta library, which would skip over
checkpoints and believe them; what readers see is asked of the library beside it.

Next room: operations/prove/verify.py compares what was read; operations/prove/chain.py and
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
from seriatim.storage.files import file_digest, file_names, write_file

COMMIT_METADATA_KEY = "seriatim"
DATA_FOLDERS = ("records", "state", "kept", "manifests")
SIGN_OFF_FILE = "verified.json"
READ_ERRORS = (OSError, pa.ArrowException, ValueError)
"""What reading a damaged file raises."""


class FileAudit:
    """A stream's output below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def commits(self) -> list[Commit]:
        """The Delta log, oldest first."""
        folder, running, found = self.root / "records" / "_delta_log", hashlib.sha256(), []
        for path in sorted(folder.glob("*.json")):
            if path.stem.isdecimal():
                content = path.read_bytes()
                running.update(content)
                found.append(_parse_commit(int(path.stem), content, running.hexdigest()))
        return found

    def paths_readers_see(self, version: int) -> set[str]:
        """The table's files at a version, as a Delta library tells them."""
        try:
            adds = pa.table(DeltaTable(self.root / "records", version=version).get_add_actions())
        except (DeltaError, *READ_ERRORS) as error:
            raise UnreadableFileError(_first_line(error)) from None
        return {f"records/{unquote(path)}" for path in adds.column("path").to_pylist()}

    def other_tables(self) -> dict[str, tuple[int, set[str]]]:
        """The tables of further kinds of records: the entry that each has reached (-1: unreadable),
        and its files.
        """
        found = {}
        for name in (name for name in file_names(self.root) if name.startswith(OTHER_TABLE_PREFIX)):
            try:
                table = DeltaTable(self.root / name)
                adds = pa.table(table.get_add_actions()).column("path").to_pylist()
                marks = [
                    int(commit[COMMIT_METADATA_KEY]["sequence"])
                    for commit in table.history()
                    if COMMIT_METADATA_KEY in commit
                ]
            except TableNotFoundError:
                continue
            except (DeltaError, *READ_ERRORS, KeyError, TypeError):
                adds, marks = [], []
            found[name.removeprefix(OTHER_TABLE_PREFIX)] = (
                max(marks, default=-1),
                {f"{name}/{unquote(path)}" for path in adds},
            )
        return found

    def witness(self) -> bytes | None:
        """head.json, as it is."""
        return self._read_bytes_or_none("head.json")

    def sign_off(self) -> bytes | None:
        """verified.json, as it is."""
        return self._read_bytes_or_none(SIGN_OFF_FILE)

    def put_sign_off(self, content: bytes) -> None:
        """Write verified.json."""
        write_file(self.root / SIGN_OFF_FILE, content)

    def put_differing_file(self, path: str) -> None:
        """Write differs.json, or take it away."""
        note = self.root / "differs.json"
        if path:
            write_file(note, json.dumps({"file": path}).encode())
        else:
            note.unlink(missing_ok=True)

    def manifest(self, path: str) -> tuple[str, bytes]:
        """A manifest's SHA-256, and what is packed in it."""
        packed = self._read_bytes_or_none(path)
        if packed is None:
            raise UnreadableFileError("it is missing")
        try:
            return hashlib.sha256(packed).hexdigest(), pa.CompressedInputStream(
                pa.BufferReader(packed), "zstd"
            ).read()
        except READ_ERRORS as error:
            raise UnreadableFileError(_first_line(error)) from None

    def paths(self) -> list[str]:
        """Every file of the four folders but the Delta log's own."""
        rooms = (
            *DATA_FOLDERS,
            *(name for name in file_names(self.root) if name.startswith(OTHER_TABLE_PREFIX)),
        )
        found = [
            path.relative_to(self.root) for room in rooms for path in (self.root / room).rglob("*")
        ]
        return [
            str(path)
            for path in found
            if "_delta_log" not in path.parts and (self.root / path).is_file()
        ]

    def size(self, path: str) -> int | None:
        """In bytes; None if it is not there."""
        full = self.root / path
        return full.stat().st_size if full.is_file() else None

    def digest(self, path: str) -> str:
        """XXH3-128 of the whole file."""
        return file_digest(self.root / path)

    def outline(self, path: str) -> FileOutline:
        """What a record or quarantine file holds; every page is read, and its checksum proved."""
        outline, before = FileOutline(), (-1, -1, "")
        for batch in self._batches(path):
            before = _add_batch_to_outline(outline, batch, before)
        return outline

    def last_rows(
        self, path: str, key: Sequence[str], columns: Sequence[str], gone: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, tuple[Any, ...] | None, int]]:
        """Each row of each session as this file leaves it: session, key, row (None: it is gone) and
        offset.
        """
        wanted = list(dict.fromkeys(["session", "offset", *gone, *key, *columns]))
        for batch in self._batches(path, wanted):
            table = pa.Table.from_batches([batch]).append_column(
                "_row", pa.array(range(batch.num_rows))
            )
            groups = table.select(["session", *key, "_row"]).group_by(
                ["session", *key], use_threads=False
            )
            last = groups.aggregate([("_row", "max")]).column("_row_max").combine_chunks().sort()
            rows = table.take(last).to_pylist()
            for row in rows:
                name = row[key[0]] if len(key) == 1 else tuple(row[column] for column in key)
                is_gone = all(row[column] == value for column, value in gone.items())
                new = None if is_gone else tuple(row[column] for column in columns)
                yield row["session"], name, new, row["offset"]

    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of a file; columns it does not have are left out."""
        for batch in self._batches(path, columns):
            yield from batch.to_pylist()

    def _batches(self, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(self.root / path, page_checksum_verification=True) as file:
                there = (
                    [column for column in columns if column in file.schema_arrow.names]
                    if columns
                    else None
                )
                for group in range(file.num_row_groups):
                    yield from file.read_row_group(group, there).combine_chunks().to_batches()
        except READ_ERRORS as error:
            raise UnreadableFileError(_first_line(error)) from None

    def _read_bytes_or_none(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None


def _add_batch_to_outline(
    outline: FileOutline, batch: pa.RecordBatch, previous_position: tuple[int, int, str]
) -> tuple[int, int, str]:
    """Take in a batch; its last offset, index and topic id."""
    if not batch.num_rows:
        return previous_position
    names, offsets = batch.schema.names, batch.column("offset").to_numpy(zero_copy_only=False)
    indexes = (
        batch.column("index").to_numpy(zero_copy_only=False)
        if "index" in names
        else np.zeros_like(offsets)
    )
    ids = batch.column("topic_id").dictionary_encode()
    lives, codes = ids.dictionary.to_pylist(), ids.indices.to_numpy(zero_copy_only=False)
    step, turn = (
        np.diff(offsets, prepend=previous_position[0]),
        np.diff(indexes, prepend=previous_position[1]),
    )
    same = (
        np.diff(
            codes,
            prepend=lives.index(previous_position[2]) if previous_position[2] in lives else -1,
        )
        == 0
    )
    wrong = np.flatnonzero(same & ((step < 0) | ((step == 0) & (turn <= 0))))
    if outline.first_disorder is None and len(wrong):
        outline.first_disorder = int(offsets[wrong[0]]), int(indexes[wrong[0]])
    if "source_offset" in names and outline.early_offset < 0:
        early = np.flatnonzero(
            batch.column("source_offset").to_numpy(zero_copy_only=False) > offsets
        )
        outline.early_offset = int(offsets[early[0]]) if len(early) else -1
    outline.first_offset = (
        int(offsets.min())
        if outline.first_offset < 0
        else min(outline.first_offset, int(offsets.min()))
    )
    outline.last_offset = max(outline.last_offset, int(offsets.max()))
    outline.rows += batch.num_rows
    outline.distinct_offsets += int(np.count_nonzero((step != 0) | ~same))
    outline.topic_ids |= set(lives)
    for column, values in (
        ("topic", outline.topics),
        ("partition", outline.partitions),
        ("session", outline.sessions),
    ):
        if column in names:
            values |= set(batch.column(column).unique().to_pylist())
    return int(offsets[-1]), int(indexes[-1]), lives[codes[-1]]


def _parse_commit(version: int, content: bytes, log_digest: str) -> Commit:
    """One commit's JSON lines. Whatever cannot be read is told, not raised."""
    try:
        actions = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
        files = [
            action[kind] for action in actions for kind in ("add", "remove") if action.get(kind)
        ]
        signs = [
            action["commitInfo"][COMMIT_METADATA_KEY]
            for action in actions
            if COMMIT_METADATA_KEY in action.get("commitInfo", {})
        ]
        return Commit(
            version=version,
            signature=msgspec.convert(signs[0], CommitSignature) if signs else None,
            transaction=next(
                (
                    t["txn"]["version"]
                    for t in actions
                    if "txn" in t and t["txn"]["appId"] == COMMIT_METADATA_KEY
                ),
                None,
            ),
            adds=tuple(_parse_add_action(action["add"]) for action in actions if action.get("add")),
            removes=tuple(
                f"records/{unquote(a['remove']['path'])}" for a in actions if a.get("remove")
            ),
            is_rewrite=bool(files) and not any(file["dataChange"] for file in files),
            log_sha256=log_digest,
        )
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        return Commit(version=version, read_error=_first_line(error), log_sha256=log_digest)


def _parse_add_action(action: Mapping[str, Any]) -> AddedFile:
    stats = json.loads(action.get("stats") or "{}")
    return AddedFile(
        path=f"records/{unquote(action['path'])}",
        size=action["size"],
        rows=stats.get("numRecords", -1),
        first_offset=stats.get("minValues", {}).get("offset", -1),
        last_offset=stats.get("maxValues", {}).get("offset", -1),
        partition_values=dict(action.get("partitionValues") or {}),
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
