"""Rewriting: several committed record files as one, row group by row group. The records stay as
they are.

A file is used only after its digest agrees with the ledger, and its pages with their checksums:
damage is never copied into a file that would then be proved by a digest of its own.

Next room: operations/compact.py chooses the files; join.py is for a refold, which changes what is
in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import ensure, raise_broken_promise
from seriatim.ledger.model import File
from seriatim.storage.files import ParquetFileWriter, damaged_record_file, file_digest

BEFORE_FIRST_RECORD = (-1, -1)


class ParquetRewriter:
    """Record files below one stream's output path."""

    def __init__(self, root: Path, stream: str, compression: str = "zstd") -> None:
        self.root, self.stream, self.compression = root, stream, compression

    def concatenate(
        self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]
    ) -> File:
        """One file of several that follow each other by offset."""
        schema = self._read_schema(files[0])
        writer = ParquetFileWriter(
            self.root, f"records/{partition}/{stem}.parquet", schema, self.compression
        )
        last = BEFORE_FIRST_RECORD
        for file in files:
            rows = 0
            for batch in self._read_batches(file, schema):
                last = _check_record_order(file, topic_id, batch, last)
                writer.add(batch)
                rows += batch.num_rows
            ensure(
                rows == file.rows,
                "a proved file has the rows that its entry says",
                file=file.path,
                rows=rows,
            )
        made = writer.finish() or raise_broken_promise(
            "files without records are never committed", file=files[0].path
        )
        return replace(made, first_offset=files[0].first_offset, last_offset=files[-1].last_offset)

    def _read_schema(self, file: File) -> pa.Schema:
        """A file's columns, without what Parquet adds to them."""
        with self._open(file) as parquet:
            return pa.schema(
                [pa.field(one.name, one.type, one.nullable) for one in parquet.schema_arrow]
            )

    def _read_batches(self, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows of a file, proved first."""
        self._verify_digest(file)
        with self._open(file) as parquet:
            for group in range(parquet.num_row_groups):
                try:
                    table = parquet.read_row_group(group, use_threads=False)
                except (OSError, pa.ArrowException) as error:
                    raise damaged_record_file(
                        self.stream, file, str(error).splitlines()[0]
                    ) from None
                ensure(
                    table.column_names == schema.names,
                    "files of one table have the same columns",
                    file=file.path,
                )
                for batch in filter(len, table.to_batches()):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def _open(self, file: File) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.root / file.path, page_checksum_verification=True)
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, str(error).splitlines()[0]) from None

    def _verify_digest(self, file: File) -> None:
        try:
            found = file_digest(self.root / file.path)
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        if found != file.digest:
            raise damaged_record_file(
                self.stream, file, f"its digest is {found}, the ledger says {file.digest}"
            )


def _check_record_order(
    file: File, topic_id: str, batch: pa.RecordBatch, previous_position: tuple[int, int]
) -> tuple[int, int]:
    """Prove that a batch goes on after `last` (offset and index), in the same life of its topic;
    where it ends.
    """
    offsets, indexes = (
        batch.column(name).to_numpy(zero_copy_only=False) for name in ("offset", "index")
    )
    step, turn = (
        np.diff(offsets, prepend=previous_position[0]),
        np.diff(indexes, prepend=previous_position[1]),
    )
    rising = bool(np.all((step > 0) | ((step == 0) & (turn > 0))))
    ensure(rising, "records follow each other by offset and index", file=file.path)
    lives = batch.column("topic_id").unique().to_pylist()
    ensure(
        lives == [topic_id],
        "a record file is of one life of its topic",
        file=file.path,
        found=str(lives),
    )
    return int(offsets[-1]), int(indexes[-1])
