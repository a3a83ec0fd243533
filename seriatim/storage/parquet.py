"""Parquet files in a store: how their columns are encoded, and a writer that knows the digests of what
it wrote.

Nothing here knows what is inside a file.

Next: record_files.py and state_files.py write files; ledger/delta_store.py names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, partition_name_of_path
from seriatim.engine.records import RISING_COLUMN_NAMES
from seriatim.errors import DamagedFileError, raise_broken_promise
from seriatim.storage.store import AlreadyThereError, Sink, Store, digest_object

ROWS_PER_GROUP = 131_072
DEFAULT_FILE_BYTES = 128 << 20
"""A file that has grown so large is finished, and the next one is begun. In a bucket a file is gathered
in memory until then.
"""
BUFFERED_BYTES_MAX = 64 << 20
"""Rows wait in memory for a row group of a good size, but not longer than up to this size."""


class ChangedFileError(Exception):  # not a SeriatimError: each reader has its own advice
    """A committed file is missing, or is not as the ledger says."""


def damaged_record_file(stream: str, file: File, damage: str) -> DamagedFileError:
    """The error about a record file that is not as the ledger of the stream says."""
    partition = partition_name_of_path(file.path)
    return DamagedFileError(
        f"record file {file.path}: {damage}",
        path=file.path,
        cause="the file was changed or lost after it was committed",
        next=f"seriatim repair {stream} --partition {partition}: it proves every"
        " file of the partition, and makes the records of damaged ones again",
    )


def describe_damage(store: Store, file: File, *, check_digest: bool = True) -> str:
    """What is wrong with a committed file, compared with what the ledger says of it; empty if nothing
    is. Without `check_digest` only its size is compared.
    """
    try:
        size = store.size(file.path)
        if size is None:
            return "it is missing"
        digest = file.digest
        if check_digest and size == file.size_bytes:
            digest = digest_object(store, file.path)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return _compare_with_ledger(file, size, digest)


def open_proved(store: Store, file: File) -> pa.NativeFile:
    """Open a committed file after it was proved by its digest. `ChangedFileError` says what is wrong.

    From a server the file is read whole, and opened from memory.
    """
    if store.is_remote:
        try:
            content = store.read_again(file.path, file.digest)
        except FileNotFoundError:
            raise ChangedFileError("it is missing") from None
        except OSError as error:
            raise ChangedFileError(f"it cannot be read: {error.strerror}") from None
        damage = _compare_with_ledger(file, len(content), xxhash.xxh3_128(content).hexdigest())
        if damage:
            raise ChangedFileError(damage)
        return pa.BufferReader(content)
    damage = describe_damage(store, file)
    if damage:
        raise ChangedFileError(damage)
    return store.open(file.path)


def _compare_with_ledger(file: File, size_bytes: int, digest: str) -> str:
    """How a file differs from what the ledger says of it; empty if it does not."""
    if size_bytes != file.size_bytes:
        return f"it has {size_bytes} bytes, the ledger says {file.size_bytes}"
    if digest != file.digest:
        return f"its digest is {digest}, the ledger says {file.digest}"
    return ""


@contextmanager
def open_parquet(store: Store, path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for reading. Its pages are proved by their checksums.

    A damaged file raises an `OSError` or a `pa.ArrowException`, here or when it is read.
    """
    with store.open(path) as file:
        yield pq.ParquetFile(file, page_checksum_verification=True)


def with_added_columns(table: pa.Table, fields: Iterable[pa.Field]) -> pa.Table:
    """The table with these columns too, null where it has none: they were added to the table of records
    after the file was written.
    """
    for field in fields:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table


def column_encodings(schema: pa.Schema) -> dict[str, Any]:
    """The encodings of columns: rising numbers as differences, blocks of state as they are, the rest
    by dictionary. That is two fifths smaller, and faster, than the defaults.
    """
    rising = [name for name in RISING_COLUMN_NAMES if name in schema.names]
    # No two blocks are the same, so a dictionary of them would be of no use.
    without_dictionary = [*rising, "bloom", "block"]
    with_dictionary = [name for name in schema.names if name not in without_dictionary]
    with_statistics = list(rising)
    if "session" in schema.names:
        with_statistics.append("session")
    return {
        "use_dictionary": with_dictionary,
        "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
        "write_statistics": with_statistics,
    }


class ParquetFileWriter:
    """Writes one Parquet file. It is opened with the first rows; rows are gathered to row groups of
    a good size. Nobody sees the file before it is finished.

    Names are unique: nothing is ever overwritten.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        schema: pa.Schema,
        compression: str,
    ) -> None:
        self.store = store
        self.path = path
        self.schema = schema
        self.compression = "NONE" if compression == "none" else compression
        self.rows = 0
        self._buffered_batches: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._sink: Sink | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch, rows_per_group: int = ROWS_PER_GROUP) -> None:
        """Add rows. They are written once a row group is full."""
        self._buffered_batches.append(batch)
        self._buffered_rows += batch.num_rows
        self._buffered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._buffered_rows >= rows_per_group or self._buffered_bytes > BUFFERED_BYTES_MAX:
            self._flush()

    @property
    def written_bytes(self) -> int:
        """How large the file is so far, without the rows that are still gathered."""
        return 0 if self._sink is None else self._sink.tell()

    def _flush(self) -> None:
        if self._writer is None:
            self._sink = self.store.writer(self.path)
            self._writer = pq.ParquetWriter(
                self._sink,
                self.schema,
                compression=self.compression,
                write_page_checksum=True,
                **column_encodings(self.schema),
            )
            crash_point("record-file-open")
        self._writer.write_table(pa.Table.from_batches(self._buffered_batches, self.schema))
        crash_point("record-file-half")
        self._buffered_batches = []
        self._buffered_rows = 0
        self._buffered_bytes = 0

    def finish(self) -> File | None:
        """Write what is buffered, and publish the file. Returns its description for the ledger; None
        if there were no rows.
        """
        if self._buffered_rows:
            self._flush()
        if self._writer is None or self._sink is None:
            return None
        # The writer only adds the footer. The file becomes visible when the sink is finished.
        self._writer.close()
        try:
            written = self._sink.finish()
        except AlreadyThereError:
            raise_broken_promise("the file is there already", path=self.path)
        return File(
            path=self.path,
            size_bytes=written.size_bytes,
            rows=self.rows,
            digest=written.xxh3,
            sha256=written.sha256,
        )


def part_path(path: str, number: int) -> str:
    """The path of a further file of one writer: of `0-5-a.parquet` the second is `0-5-a.1.parquet`."""
    return f"{path.removesuffix('.parquet')}.{number}.parquet" if number else path


def first_line(error: BaseException) -> str:
    """The first line of an error, without what libraries add below it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
