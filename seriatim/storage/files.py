"""Files on the disk: each is synced and has a digest before its name is published.

The modules that write files use this one; nothing here knows what is inside them.

Next: record_files.py and state_files.py write files; ledger/delta_store.py names them.
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
"""Rows wait in memory for a row group of a good size, but not longer than up to this size."""
RISING_COLUMNS = ("offset", "source_offset", "timestamp", "sequence")
"""Columns whose numbers mostly rise by small steps."""
BLOCK_BYTES = 1 << 20
DRAFT_TRIES_MAX = 5
COMMIT_FILE_NAME = re.compile(r"\d{20}\.json")
UNSYNCED_COMMITS_MAX = 16
"""How many commits back may still be unsynced: as many processes in a row were killed between a
commit and its sync. More than this never happens.
"""
DRAFT_NAME = re.compile(r"\..+\.(json|zst)\.[0-9a-f]{8}")


def damaged_record_file(stream: str, file: File, damage: str) -> DamagedFileError:
    """The error about a record file that is not as the ledger of the stream says."""
    partition = file.path.partition("/")[2].rpartition("/")[0]
    return DamagedFileError(
        f"record file {file.path}: {damage}",
        path=file.path,
        cause="the file was changed or lost after it was committed",
        next=f"seriatim repair {stream} --partition {partition}: it proves every"
        " file of the partition, and makes the records of damaged ones again",
    )


def sync(path: Path) -> None:
    """Sync a file to the disk, and its folder, which has its name."""
    _sync_alone(path)
    _sync_alone(path.parent)


def _sync_alone(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_log(table: Path, version: int | None = None) -> None:
    """Sync the last commits of a Delta table to the disk, before anything is written that relies on
    them.

    delta-rs does not fsync what it writes to a local log. After a power cut a commit may be gone,
    while a file of ours that was synced later is there.

    1. Choose the commits: `version` and the one before it. Without a version, the newest ones:
       earlier commits may be of a process that was killed before it got here.
    2. Sync their files, and the checkpoints that delta-rs may have written along with them.
    3. Sync the folder of the log, which has their names; for a new table the folders above it, too.
    """
    log = table / "_delta_log"
    # 1. The commits.
    if version is None:
        versions = _newest_versions(log)
        if not versions:
            return
    else:
        versions = [version]
        # The commit before may be gone: a log may be cleaned up behind a checkpoint.
        if (log / f"{version - 1:020d}.json").exists():
            versions.insert(0, version - 1)
    # 2. Their files.
    for number in versions:
        _sync_alone(log / f"{number:020d}.json")
        checkpoint = log / f"{number:020d}.checkpoint.parquet"
        if checkpoint.exists():
            _sync_alone(checkpoint)
            _sync_alone(log / "_last_checkpoint")
    # 3. The folders.
    _sync_alone(log)
    if 0 in versions:
        _sync_alone(table)
        _sync_alone(table.parent)


def _newest_versions(log: Path) -> list[int]:
    commit_files = [name for name in file_names(log) if COMMIT_FILE_NAME.fullmatch(name)]
    newest = commit_files[-UNSYNCED_COMMITS_MAX:]
    return [int(name.removesuffix(".json")) for name in newest]


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file at once: readers see the old one or the new one, never a part."""
    for tries_left in reversed(range(DRAFT_TRIES_MAX)):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            draft.write_bytes(content)
            sync(draft)
            draft.replace(path)
            break
        except FileNotFoundError:
            # Another run swept the draft: it cannot know that its writer is alive. Write it again.
            if not tries_left:
                raise
        finally:
            draft.unlink(missing_ok=True)
    sync(path)


def sweep_drafts(folder: Path) -> list[str]:
    """Delete the drafts that `write_file` left when it was killed. Returns their names.

    A process that is writing one right now writes it again.
    """
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
    """A temporary folder. Folders that killed processes of this host left behind are deleted,
    too.
    """
    temporary = Path(tempfile.gettempdir())
    prefix = f"seriatim-{purpose}-{socket.gethostname()}-"
    for name in file_names(temporary):
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)-\w+", name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(temporary / name, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SweepNotes:
    """What sweeping needs beside the ledger: intents, and the oldest entry whose files are all
    there.
    """

    root: Path

    def intents(self, partition: Partition) -> list[Intent]:
        """The intents of a partition. One that cannot be read may stand for anything, and so it
        protects all files of the partition.
        """
        folder = self.root / "intents" / str(partition)
        intents = []
        for name in file_names(folder):
            is_draft = name.startswith(".")
            if name.endswith(".json") and not is_draft:
                intents.append(_read_intent(partition, folder / name))
        return intents

    def put_intent(self, intent: Intent) -> None:
        """Write an intent, before anything is written under it."""
        write_file(self._intent_path(intent), msgspec.json.encode(intent))

    def drop_intent(self, intent: Intent) -> None:
        """Delete an intent, and drafts beside it."""
        path = self._intent_path(intent)
        path.unlink(missing_ok=True)
        sweep_drafts(path.parent)

    def _intent_path(self, intent: Intent) -> Path:
        return self.root / "intents" / str(intent.partition) / f"{intent.attempt}.json"

    def oldest_complete_entry(self) -> tuple[int, str]:
        """The oldest entry whose files are all there, and its hash. If the note is lost, all entries
        are looked at again.
        """
        try:
            noted = json.loads((self.root / "swept.json").read_bytes())
            return int(noted["sequence"]), str(noted["sha256"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1, ""

    def put_oldest_complete_entry(self, sequence: int, sha256: str) -> None:
        """Note how far was swept."""
        content = json.dumps({"sequence": sequence, "sha256": sha256})
        write_file(self.root / "swept.json", content.encode())


def _read_intent(partition: Partition, path: Path) -> Intent:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Intent)
    except (OSError, ValueError):
        # The errors of msgspec are ValueErrors.
        return Intent(partition=partition, attempt=path.name.removesuffix(".json"))


def column_encodings(schema: pa.Schema) -> dict[str, Any]:
    """The encodings of columns: rising numbers as differences, the rest by dictionary. That is two
    fifths smaller, and faster, than the defaults.
    """
    rising = [name for name in RISING_COLUMNS if name in schema.names]
    not_rising = [name for name in schema.names if name not in rising]
    with_statistics = list(rising)
    if "session" in schema.names:
        with_statistics.append("session")
    return {
        "use_dictionary": not_rising,
        "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
        "write_statistics": with_statistics,
    }


class ParquetFileWriter:
    """Writes one Parquet file. It is opened with the first rows; rows are gathered to row groups of
    a good size.

    Names are unique: nothing is ever overwritten.
    """

    def __init__(
        self,
        root: Path,
        path: str,
        schema: pa.Schema,
        compression: str,
    ) -> None:
        self.root = root
        self.path = path
        self.schema = schema
        self.compression = "NONE" if compression == "none" else compression
        self.rows = 0
        self._buffered_batches: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch, rows_per_group: int = ROWS_PER_GROUP) -> None:
        """Add rows. They are written once a row group is full."""
        self._buffered_batches.append(batch)
        self._buffered_rows += batch.num_rows
        self._buffered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._buffered_rows >= rows_per_group or self._buffered_bytes > BUFFERED_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            self._writer = self._open()
            crash_point("record-file-open")
        self._writer.write_table(pa.Table.from_batches(self._buffered_batches, self.schema))
        crash_point("record-file-half")
        self._buffered_batches = []
        self._buffered_rows = 0
        self._buffered_bytes = 0

    def _open(self) -> pq.ParquetWriter:
        full_path = self.root / self.path
        ensure(not full_path.exists(), "the file is there already", path=self.path)
        full_path.parent.mkdir(parents=True, exist_ok=True)
        return pq.ParquetWriter(
            full_path,
            self.schema,
            compression=self.compression,
            write_page_checksum=True,
            **column_encodings(self.schema),
        )

    def finish(self) -> File | None:
        """Write what is buffered, close and sync the file. Returns its description for the ledger;
        None if there were no rows.
        """
        if self._buffered_rows:
            self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        full_path = self.root / self.path
        sync(full_path)
        return File(
            path=self.path,
            size_bytes=full_path.stat().st_size,
            rows=self.rows,
            digest=file_digest(full_path),
        )
