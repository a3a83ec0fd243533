"""Rewrites several committed record files as one, row group by row group. The records stay as they
are.

A file is used only after its digest agrees with the ledger, and its pages with their checksums.
Damage is never copied into a file that would then be proved by a digest of its own.

Next: operations/compact.py chooses the files; join.py is for a refold, which changes what is in
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import ensure, raise_broken_promise
from seriatim.ledger.model import File
from seriatim.storage.arrow import follows_previous
from seriatim.storage.delta import first_line
from seriatim.storage.files import ParquetFileWriter, damaged_record_file, file_digest

BEFORE_FIRST_RECORD = (-1, -1)


class ParquetRewriter:
    """The record files of one stream, below its output path."""

    def __init__(
        self,
        root: Path,
        stream: str,
        compression: str = "zstd",
    ) -> None:
        self.root = root
        self.stream = stream
        self.compression = compression

    def concatenate(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
        files: Sequence[File],
    ) -> File:
        """Write one file of several that follow each other by offset, and return it."""
        schema = self._read_schema(files[0])
        path = f"records/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.root, path, schema, self.compression)
        position = BEFORE_FIRST_RECORD
        for file in files:
            rows = 0
            for batch in self._read_batches(file, schema):
                position = _check_record_order(file, topic_id, batch, position)
                writer.add(batch)
                rows += batch.num_rows
            ensure(
                rows == file.rows,
                "a proved file has the rows that its entry says",
                file=file.path,
                rows=rows,
            )
        merged_file = writer.finish()
        if merged_file is None:
            raise_broken_promise("files without records are never committed", file=files[0].path)
        return replace(
            merged_file,
            first_offset=files[0].first_offset,
            last_offset=files[-1].last_offset,
        )

    def _read_schema(self, file: File) -> pa.Schema:
        """The columns of a file, without the metadata that Parquet adds to them."""
        with self._open(file) as parquet:
            columns = parquet.schema_arrow
            fields = [pa.field(column.name, column.type, column.nullable) for column in columns]
            return pa.schema(fields)

    def _read_batches(self, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows of a file, which is proved by its digest first."""
        self._verify_digest(file)
        with self._open(file) as parquet:
            for group in range(parquet.num_row_groups):
                try:
                    table = parquet.read_row_group(group, use_threads=False)
                except (OSError, pa.ArrowException) as error:
                    raise damaged_record_file(self.stream, file, first_line(error)) from None
                ensure(
                    table.column_names == schema.names,
                    "files of one table have the same columns",
                    file=file.path,
                )
                for batch in table.to_batches():
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def _open(self, file: File) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.root / file.path, page_checksum_verification=True)
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, first_line(error)) from None

    def _verify_digest(self, file: File) -> None:
        try:
            digest = file_digest(self.root / file.path)
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        if digest != file.digest:
            damage = f"its digest is {digest}, the ledger says {file.digest}"
            raise damaged_record_file(self.stream, file, damage)


def _check_record_order(
    file: File,
    topic_id: str,
    batch: pa.RecordBatch,
    previous_position: tuple[int, int],
) -> tuple[int, int]:
    """Prove that a batch goes on after the previous offset and index, under the same topic id.
    Returns the offset and index of its last record.
    """
    offsets = batch.column("offset").to_numpy(zero_copy_only=False)
    indexes = batch.column("index").to_numpy(zero_copy_only=False)
    previous_offset, previous_index = previous_position
    in_order = follows_previous(offsets, indexes, previous_offset, previous_index)
    ensure(
        bool(in_order.all()),
        "records follow each other by offset and index",
        file=file.path,
    )
    topic_ids = batch.column("topic_id").unique().to_pylist()
    ensure(
        topic_ids == [topic_id],
        "a record file has one topic id",
        file=file.path,
        found=str(topic_ids),
    )
    return int(offsets[-1]), int(indexes[-1])
