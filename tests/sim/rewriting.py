"""Entries that replace files, made by hand: what repairs and compactions do to the records.

A repair here changes, drops and adds records at random: a table that follows the ledger must be
right whatever the reason was.

Next: mixes.py mixes them with slices; test_current.py checks `current` after all of it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import CompactEntry, Entry, HoldEntry, RepairEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Change
from seriatim.storage.parquet import ParquetFileWriter
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream

Rows = list[dict[str, Any]]


class Rewriter:
    """Replaces record files of a stream in memory or on disk."""

    def __init__(self, memory_stream: MemoryStream, random: Random) -> None:
        self.memory_stream, self.random = memory_stream, random
        self.root: Path | None = getattr(memory_stream, "root", None)
        self.file_count = 0

    def rows(self, file: File) -> Rows:
        """The records of a file."""
        if self.root is None:
            return [dict(row) for row in self.memory_stream.files.files[file.path].rows]
        return pq.ParquetFile(self.root / file.path).read().to_pylist()

    def write(self, partition: Partition, rows: Rows) -> File:
        """A record file of these rows."""
        self.file_count += 1
        path = f"records/{partition}/by-hand-{self.file_count}"
        if self.root is None:
            self.memory_stream.files.open(path)
            return self.memory_stream.files.close(path, msgspec.msgpack.encode(rows), rows)
        writer = ParquetFileWriter(
            LocalStore(self.root), f"{path}.parquet", self.memory_stream.files.schema, "zstd"
        )  # type: ignore[attr-defined]
        writer.add(pa.RecordBatch.from_pylist(rows, schema=self.memory_stream.files.schema))  # type: ignore[attr-defined]
        file = writer.finish()
        assert file is not None
        return replace(file, first_offset=rows[0]["offset"], last_offset=rows[-1]["offset"])

    def files(self, partition: Partition, topic_id: str) -> list[File]:
        """The record files of a partition while its topic had one id, by offset."""
        active = self.memory_stream.ledger.active_files(self._head())
        partition_files = [file for file in active if file.path.startswith(f"records/{partition}/")]
        return sorted(
            (f for f in partition_files if self.rows(f)[0]["topic_id"] == topic_id),
            key=lambda file: file.first_offset,
        )

    def repair(self, partition: Partition) -> None:
        """Replace the records from some offset on by others."""
        account = self._account(partition)
        rewound = self.random.randint(account.initial_frontier, account.frontier)
        touched = [
            file for file in self.files(partition, account.topic_id) if file.last_offset >= rewound
        ]
        old = [row for file in touched for row in self.rows(file)]
        new = [
            new_row
            for row in old
            for new_row in ([row] if row["offset"] < rewound else self._otherwise(row))
        ]
        cut = self.random.randint(0, len(new))
        while 0 < cut < len(new) and new[cut - 1]["offset"] == new[cut]["offset"]:
            cut += 1
        new_files = [
            self.write(partition, half_rows) for half_rows in (new[:cut], new[cut:]) if half_rows
        ]
        hold_id = f"hold{self.file_count}-{self.random.random()}"
        empty_change = self._change(partition, account)
        self._commit(HoldEntry(attempt=hold_id, hold=hold_id, changes=(empty_change,)))
        change = replace(
            empty_change,
            records=tuple(new_files),
            replaced_from=rewound,
            removed_rows=len(old),
            quarantined=account.quarantined,
        )
        paths = tuple(file.path for file in touched)
        self._commit(
            RepairEntry(attempt=hold_id, hold=hold_id, changes=(change,), removed_paths=paths)
        )

    def _otherwise(self, row: dict[str, Any]) -> Rows:
        """A record as a repaired machine could give it: the same, another one, or none."""
        chance = self.random.random()
        if chance < 0.2:
            return []
        if chance < 0.4:
            return [{**row, "op": "delete", "v": None}]
        return [{**row, "op": "update", "v": 1000 + self.file_count}] if chance < 0.7 else [row]

    def compact(self, partition: Partition) -> None:
        """Join some neighbouring files into one."""
        account = self._account(partition)
        files = self.files(partition, account.topic_id)
        if len(files) < 2:
            return
        first_index = self.random.randrange(len(files) - 1)
        joined_files = files[first_index : first_index + self.random.randint(2, 4)]
        joined_file = self.write(
            partition, [row for file in joined_files for row in self.rows(file)]
        )
        change = replace(self._change(partition, account), records=(joined_file,))
        self._commit(
            CompactEntry(
                attempt="compact",
                changes=(change,),
                removed_paths=tuple(file.path for file in joined_files),
            )
        )

    def _head(self) -> LedgerHead:
        head = self.memory_stream.ledger.head(self.memory_stream.stream.name)
        assert head is not None
        return head

    def _account(self, partition: Partition) -> Account:
        account = self._head().ledger.account(partition)
        assert account is not None
        return account

    def _change(self, partition: Partition, account: Account) -> Change:
        return Change(
            partition=partition,
            epoch=account.epoch,
            frontier=account.frontier,
            until=account.frontier,
            topic_id=account.topic_id,
            initial_frontier=account.initial_frontier,
            log_end=account.log_end,
        )

    def _commit(self, entry: Entry) -> None:
        commit(self.memory_stream.ledger, self.memory_stream.clock, self._head(), entry)
