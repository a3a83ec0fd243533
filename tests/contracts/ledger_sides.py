"""Ledgers in memory, on a Delta table on a disk and in a bucket, and entries made by hand.

Next: test_ledger.py holds all to the same contract.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from seriatim.engine.files import File
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput
from seriatim.ledger.commit import build_manifest, start_ledger
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.ledger.entries import Entry, SliceEntry
from seriatim.ledger.manifests import LedgerHead, Manifest, ManifestReference
from seriatim.ledger.model import Change, Ledger
from seriatim.memory import MemoryClock, MemoryFiles, MemoryLedger
from seriatim.storage.record_files import ParquetRecords, record_schema
from seriatim.storage.store import LocalStore, open_store

P, Q = Partition("in-a", 0), Partition("in-a", 1)


COLUMNS = {"op": "string", "at": "timestamp", "parts": "list<int64>"}


MESSAGE_BATCH = MessageBatch(0, [0], [b"s"], [b"v"])


NOTHING = Ledger(stream="s")


class MemorySide:
    """The fake ledger with its files, and what other writers may do to it."""

    def __init__(self) -> None:
        self.files = MemoryFiles(COLUMNS)
        self.store = MemoryLedger(self.files.read)

    def again(self) -> MemoryLedger:
        return self.store

    def foreign_append(self) -> None:
        self.store.foreign_commit("rows appended")

    def foreign_rewrite(self) -> None:
        self.store.foreign_commit()

    def lose(self, path: str) -> None:
        (self.files.files if path in self.files.files else self.store.store.objects).pop(path)

    def damage(self, path: str) -> None:
        self.store.store.objects[path] += b" "

    def active(self) -> list[str]:
        return [file.path for file in self.store.files_now()]


class RealSide:
    """A Delta table, and what other writers may do to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = ParquetRecords(LocalStore(root), COLUMNS, "zstd", ())
        self.store = self.again()

    def again(self) -> DeltaLedger:
        return DeltaLedger(LocalStore(self.root), record_schema(COLUMNS))

    def table(self) -> DeltaTable:
        return DeltaTable(self.root / "records")

    def foreign_append(self) -> None:
        write_deltalake(
            self.table(), pa.table({"op": ["mine"]}), mode="append", schema_mode="merge"
        )

    def foreign_rewrite(self) -> None:
        metrics = self.table().optimize.compact()
        assert metrics["numFilesRemoved"] > 0

    def lose(self, path: str) -> None:
        (self.root / path).unlink()

    def damage(self, path: str) -> None:
        full = self.root / path
        full.write_bytes(full.read_bytes() + b" ")

    def active(self) -> list[str]:
        uris = self.table().file_uris()
        return sorted("records/" + uri.rpartition("/records/")[2] for uri in uris)


class BucketSide(RealSide):
    """A Delta table in a bucket, and what other writers may do to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bucket = open_store(url)
        self.files = ParquetRecords(self.bucket, COLUMNS, "zstd", ())
        self.store = self.again()

    def again(self) -> DeltaLedger:
        return DeltaLedger(open_store(self.url), record_schema(COLUMNS))

    def table(self) -> DeltaTable:
        return DeltaTable(f"{self.url}/records", storage_options=self.bucket.delta_options())

    def lose(self, path: str) -> None:
        self.bucket.delete([path])

    def damage(self, path: str) -> None:
        self.bucket.replace(path, self.bucket.read(path) + b" ")


Side = MemorySide | RealSide | BucketSide


def change(partition: Partition = P, frontier: int = 0, until: int = 0, *files: File) -> Change:
    """A change that moves a frontier."""
    return Change(
        partition=partition,
        epoch=0,
        frontier=frontier,
        until=until,
        topic_id="id",
        initial_frontier=0,
        records=files,
    )


def slice_entry(
    frontier: int, until: int, *files: File, attempt: str = "a1", partition: Partition = P
) -> Entry:
    """An entry of a slice."""
    return SliceEntry(attempt=attempt, changes=(change(partition, frontier, until, *files),))


def start_side(side: Side) -> LedgerHead:
    """A ledger with its first entry."""
    return start_ledger(side.store, MemoryClock(), "s", "a0", (change(), change(Q)))


def record_file(side: Side, stem: str) -> File:
    """Write a record file of one record."""
    writer = side.files.record_writer(P, "id", stem)
    writer.write(
        MESSAGE_BATCH,
        FoldOutput([0], [0], [None], ["s"], [("insert", None, [1])], consumed_messages=1),
    )
    file = writer.close()
    assert file is not None
    return file


def prepare_commit(side: Side, head: LedgerHead | None, entry: Entry) -> Callable[[], str]:
    """A commit that is ready to be tried, without rules and without a second try. Calling it gives
    the manifest's hash.
    """
    manifest = build_manifest(entry, NOTHING if head is None else head.ledger)
    reference = side.store.put_manifest(manifest)
    store = side.again()

    def attempt() -> str:
        store.compare_and_set(head, manifest.entry, reference)
        return reference.sha256

    return attempt


def put_uncommitted_manifest(side: Side, sequence: int, attempt: str = "lost") -> ManifestReference:
    """Store a manifest that no commit names."""
    entry = SliceEntry(attempt=attempt, sequence=sequence)
    return side.store.put_manifest(Manifest(entry=entry, ledger=NOTHING))


def frontier(side: Side) -> tuple[int, int]:
    """The last sequence, and how far the first partition is."""
    head = side.again().head("s")
    assert head is not None
    return head.ledger.sequence, head.ledger.partitions[str(P)].frontier
