"""Entries that replace files, made by hand: what repairs and compactions do to the records, without
what makes them.

A repair here changes, drops and adds records as it likes: whoever follows the ledger must not care
why.

Next room: mixes.py mixes them with slices; test_current.py holds `current` against all of it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import commit
from seriatim.ledger.model import Account, Change, Entry, File
from seriatim.ports import LedgerHead
from seriatim.storage.files import ParquetFileWriter
from seriatim.testing import MemoryStream

Rows = list[dict[str, Any]]


class Rewriter:
    """Replaces record files of a stream in memory or on disk."""

    def __init__(self, made: MemoryStream, random: Random) -> None:
        self.made, self.random = made, random
        self.root: Path | None = getattr(made, "root", None)
        self.made_so_far = 0

    def rows(self, file: File) -> Rows:
        """The records of a file."""
        if self.root is None:
            return [dict(row) for row in self.made.files.files[file.path].rows]
        return pq.ParquetFile(self.root / file.path).read().to_pylist()

    def write(self, partition: Partition, rows: Rows) -> File:
        """A record file of these rows."""
        self.made_so_far += 1
        path = f"records/{partition}/by-hand-{self.made_so_far}"
        if self.root is None:
            self.made.files.open(path)
            return self.made.files.close(path, msgspec.msgpack.encode(rows), rows)
        writer = ParquetFileWriter(self.root, f"{path}.parquet", self.made.files.schema, "zstd")  # type: ignore[attr-defined]
        writer.add(pa.RecordBatch.from_pylist(rows, schema=self.made.files.schema))  # type: ignore[attr-defined]
        file = writer.finish()
        assert file is not None
        return replace(file, first_offset=rows[0]["offset"], last_offset=rows[-1]["offset"])

    def files(self, partition: Partition, life: str) -> list[File]:
        """The record files of one life of a partition, by offset."""
        active = self.made.ledger.active_files(self._head())
        mine = [file for file in active if file.path.startswith(f"records/{partition}/")]
        return sorted(
            (f for f in mine if self.rows(f)[0]["topic_id"] == life),
            key=lambda file: file.first_offset,
        )

    def repair(self, partition: Partition) -> None:
        """Make the records from some offset on again, otherwise."""
        account = self._account(partition)
        rewound = self.random.randint(account.initial_frontier, account.frontier)
        touched = [
            file for file in self.files(partition, account.topic_id) if file.last_offset >= rewound
        ]
        old = [row for file in touched for row in self.rows(file)]
        new = [
            one
            for row in old
            for one in ([row] if row["offset"] < rewound else self._otherwise(row))
        ]
        cut = self.random.randint(0, len(new))
        while 0 < cut < len(new) and new[cut - 1]["offset"] == new[cut]["offset"]:
            cut += 1
        halves = [self.write(partition, half) for half in (new[:cut], new[cut:]) if half]
        held = f"hold{self.made_so_far}-{self.random.random()}"
        nothing = self._change(partition, account)
        self._commit(Entry(kind="hold", attempt=held, hold=held, changes=(nothing,)))
        change = replace(
            nothing,
            records=tuple(halves),
            replaced_from=rewound,
            removed_rows=len(old),
            quarantined=account.quarantined,
        )
        paths = tuple(file.path for file in touched)
        self._commit(
            Entry(kind="repair", attempt=held, hold=held, changes=(change,), removed_paths=paths)
        )

    def _otherwise(self, row: dict[str, Any]) -> Rows:
        """A record as a mended machine makes it: the same, another one, or none."""
        drawn = self.random.random()
        if drawn < 0.2:
            return []
        if drawn < 0.4:
            return [{**row, "op": "delete", "v": None}]
        return [{**row, "op": "update", "v": 1000 + self.made_so_far}] if drawn < 0.7 else [row]

    def compact(self, partition: Partition) -> None:
        """Some neighbouring files as one."""
        account = self._account(partition)
        files = self.files(partition, account.topic_id)
        if len(files) < 2:
            return
        first = self.random.randrange(len(files) - 1)
        some = files[first : first + self.random.randint(2, 4)]
        whole = self.write(partition, [row for file in some for row in self.rows(file)])
        change = replace(self._change(partition, account), records=(whole,))
        self._commit(
            Entry(
                kind="compact",
                attempt="compact",
                changes=(change,),
                removed_paths=tuple(file.path for file in some),
            )
        )

    def _head(self) -> LedgerHead:
        head = self.made.ledger.head(self.made.stream.name)
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
        commit(self.made.ledger, self.made.clock, self._head(), entry)
