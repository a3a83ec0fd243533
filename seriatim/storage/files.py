"""The disk: files that are really there, and proved by a digest, before anybody is told their
names.

Used by the adapters that write files; nothing here knows what is inside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.model import File
from seriatim.operations.compaction_rules import Intent

ROWS_PER_GROUP = 131_072
BUFFERED_BYTES_MAX = 64 << 20
"""Rows wait in memory for a row group of a good size; large ones do not wait for many."""
RISING_COLUMNS = ("offset", "source_offset", "timestamp", "sequence")
"""Columns whose numbers mostly rise by small steps."""
BLOCK_BYTES = 1 << 20
DRAFT_TRIES_MAX = 5
COMMIT = re.compile(r"\d{20}\.json")
UNSYNCED_COMMITS_MAX = 16
"""So many processes in a row are never killed between a commit and its sync, each before it wrote a
witness.
"""
DRAFT_NAME = re.compile(r"\..+\.(json|zst)\.[0-9a-f]{8}")


def damaged_record_file(stream: str, file: File, why: str) -> DamagedFileError:
    """The error about a record file that is not as the stream's ledger says."""
    partition = file.path.partition("/")[2].rpartition("/")[0]
    return DamagedFileError(
        f"record file {file.path}: {why}",
        path=file.path,
        cause="the file was changed or lost after it was committed",
        next=f"seriatim repair {stream} --partition {partition}: it proves every"
        " file of the partition, and makes the records of damaged ones again",
    )


def sync(path: Path) -> None:
    """See a file, and its name, onto the disk."""
    for target in (path, path.parent):
        _sync_alone(target)


def _sync_alone(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_log(table: Path, version: int | None = None) -> None:
    """See the last commits of a Delta table onto the disk, before anything is written that relies
    on them.

    delta-rs does not fsync what it writes to a local log: after a power cut a commit may be gone,
    while a file of ours that was synced later is there.

    1. The commit file of `version` and the one before it. Without a version: the newest ones. Earlier commits may be
       of a process that was killed before it got here.
    2. The checkpoint that delta-rs may have written along with the commit.
    3. The folder of the log, which has their names; of a new table the folders above it, too.
    """
    log = table / "_delta_log"
    if version is None:
        commits = [name for name in file_names(log) if COMMIT.fullmatch(name)]
        if not commits:
            return
        versions = [int(name.removesuffix(".json")) for name in commits[-UNSYNCED_COMMITS_MAX:]]
    else:
        # The one before may be gone: a log may be cleaned up behind a checkpoint.
        before = [version - 1] if (log / f"{version - 1:020d}.json").exists() else []
        versions = [*before, version]
    for number in versions:
        _sync_alone(log / f"{number:020d}.json")
        checkpoint = log / f"{number:020d}.checkpoint.parquet"
        if checkpoint.exists():
            _sync_alone(checkpoint)
            _sync_alone(log / "_last_checkpoint")
    _sync_alone(log)
    if 0 in versions:
        _sync_alone(table)
        _sync_alone(table.parent)


def write_file(path: Path, content: bytes) -> None:
    """Put a whole file in place at once: readers see the old one or the new one, never half."""
    for left in reversed(range(DRAFT_TRIES_MAX)):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            draft.write_bytes(content)
            sync(draft)
            draft.replace(path)
            break
        except FileNotFoundError:  # another run swept the draft, taking it for a dead one's
            if not left:
                raise
        finally:
            draft.unlink(missing_ok=True)
    sync(path)


def sweep_drafts(folder: Path) -> list[str]:
    """Delete what `write_file` left half done; whoever is writing now begins again."""
    drafts = [name for name in file_names(folder) if DRAFT_NAME.fullmatch(name)]
    for name in drafts:
        (folder / name).unlink(missing_ok=True)
    return drafts


def file_digest(path: Path) -> str:
    """XXH3-128 of a whole file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_names(folder: Path) -> list[str]:
    """The names in a folder; none if there is no such folder."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A folder for a while. Those that processes of this machine left when they were killed go,
    too.
    """
    mine = f"seriatim-{purpose}-{socket.gethostname()}-"
    for name in file_names(Path(tempfile.gettempdir())):
        found = re.fullmatch(rf"{re.escape(mine)}(\d+)-\w+", name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SweepNotes:
    """What sweeping goes by, beside the ledger: intents, and the oldest entry whose files are all
    there.
    """

    root: Path

    def intents(self, partition: Partition) -> list[Intent]:
        """The intents of a partition. One that cannot be read stands for anything, and so protects
        it.
        """
        folder = self.root / "intents" / str(partition)
        names = [
            name
            for name in file_names(folder)
            if name.endswith(".json") and not name.startswith(".")
        ]
        return [_read_intent(partition, folder / name) for name in names]

    def put_intent(self, intent: Intent) -> None:
        """Write an intent, before anything is written under it."""
        write_file(self._intent_path(intent), msgspec.json.encode(intent))

    def drop_intent(self, intent: Intent) -> None:
        """Delete an intent, and half ones of before."""
        self._intent_path(intent).unlink(missing_ok=True)
        sweep_drafts(self._intent_path(intent).parent)

    def _intent_path(self, intent: Intent) -> Path:
        return self.root / "intents" / str(intent.partition) / f"{intent.attempt}.json"

    def oldest_complete_entry(self) -> tuple[int, str]:
        """The oldest entry whose files are all there. Losing the note means looking at all entries
        again.
        """
        try:
            seen = json.loads((self.root / "swept.json").read_bytes())
            return int(seen["sequence"]), str(seen["sha256"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1, ""

    def put_oldest_complete_entry(self, sequence: int, sha256: str) -> None:
        """Note how far was swept."""
        write_file(
            self.root / "swept.json", json.dumps({"sequence": sequence, "sha256": sha256}).encode()
        )


def _read_intent(partition: Partition, path: Path) -> Intent:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Intent)
    except (OSError, ValueError):  # msgspec's own errors are of the latter kind
        return Intent(partition=partition, attempt=path.name.removesuffix(".json"))


def column_encodings(schema: pa.Schema) -> dict[str, Any]:
    """Rising numbers as differences, the rest by dictionary: two fifths smaller and faster than the
    defaults.
    """
    rising = [name for name in RISING_COLUMNS if name in schema.names]
    return {
        "use_dictionary": [name for name in schema.names if name not in rising],
        "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
        "write_statistics": [name for name in (*RISING_COLUMNS, "session") if name in schema.names],
    }


class ParquetFileWriter:
    """A Parquet file being written: opened with the first rows, row groups gathered to a good size.

    Names are unique: nothing is ever overwritten.
    """

    def __init__(self, root: Path, path: str, schema: pa.Schema, compression: str) -> None:
        self.root, self.path, self.schema = root, path, schema
        self.compression = "NONE" if compression == "none" else compression
        self._buffered_batches: list[pa.RecordBatch] = []
        self._buffered_rows = self._buffered_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def add(self, batch: pa.RecordBatch, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._buffered_batches.append(batch)
        self._buffered_rows += batch.num_rows
        self._buffered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._buffered_rows >= rows_per_group or self._buffered_bytes > BUFFERED_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            full = self.root / self.path
            ensure(not full.exists(), "the file is there already", path=self.path)
            full.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                full,
                self.schema,
                compression=self.compression,
                write_page_checksum=True,
                **column_encodings(self.schema),
            )
            crash_point("record-file-open")
        self._writer.write_table(pa.Table.from_batches(self._buffered_batches, self.schema))
        crash_point("record-file-half")
        self._buffered_batches, self._buffered_rows, self._buffered_bytes = [], 0, 0

    def finish(self) -> File | None:
        if self._buffered_rows:
            self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        full = self.root / self.path
        sync(full)
        return File(
            path=self.path, size_bytes=full.stat().st_size, rows=self.rows, digest=file_digest(full)
        )
