"""Rewrites several committed record files as one, row group by row group. The records stay as they
are.

A file is used only after its digest agrees with the ledger, and its pages with their checksums.
Damage is never copied into a file that would then be proved by a digest of its own.

Next: operations/compact.py chooses the files; join.py is for a refold, which changes what is in
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import ensure, raise_broken_promise
from seriatim.storage.delta_table import first_line
from seriatim.storage.parquet import ParquetFileWriter, damaged_record_file, open_parquet
from seriatim.storage.record_rows import RecordOrderScan
from seriatim.storage.store import Store, digest_object


class ParquetRewriter:
    """The record files of one stream."""

    def __init__(
        self,
        store: Store,
        stream: str,
        compression: str = "zstd",
    ) -> None:
        self.store = store
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
        writer = ParquetFileWriter(self.store, path, schema, self.compression)
        order_scan = RecordOrderScan()
        for file in files:
            rows = 0
            for batch in self._read_batches(file, schema):
                _check_records(file, topic_id, batch, order_scan)
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
                table = parquet.read_row_group(group, use_threads=False)
                ensure(
                    table.column_names == schema.names,
                    "files of one table have the same columns",
                    file=file.path,
                )
                for batch in table.to_batches():
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    @contextmanager
    def _open(self, file: File) -> Iterator[pq.ParquetFile]:
        """A file for reading. Whatever is wrong with it is said of the file by its name."""
        try:
            with open_parquet(self.store, file.path) as parquet:
                yield parquet
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, first_line(error)) from None

    def _verify_digest(self, file: File) -> None:
        try:
            digest = digest_object(self.store, file.path)
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        if digest != file.digest:
            damage = f"its digest is {digest}, the ledger says {file.digest}"
            raise damaged_record_file(self.stream, file, damage)


def _check_records(
    file: File,
    topic_id: str,
    batch: pa.RecordBatch,
    order_scan: RecordOrderScan,
) -> None:
    """Prove that a batch goes on after the batch before it, under the same topic id."""
    ensure(
        len(order_scan.scan(batch).disordered_rows) == 0,
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
