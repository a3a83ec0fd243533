"""`python -m seriatim.fast`: compile the bulk fold, by folding a little of everything with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from seriatim.fast import ready


class _SampleMessageBatch:
    """Messages with no file and no Kafka behind them."""

    def __init__(self, keys: list[bytes], values: list[bytes]) -> None:
        self.record_batch = pa.RecordBatch.from_pydict(
            {"key": pa.array(keys), "value": pa.array(values)}
        )
        self.start, self.values, self.keys = 0, values, keys
        self.timestamps = np.zeros(len(keys), np.int64)

    def __len__(self) -> int:
        return len(self.values)

    def invalid_timestamp_positions(self) -> list[int]:
        """All come at the same good time."""
        return []


def compile_all() -> None:
    """Call every compiled function as tasks call it."""
    from seriatim.engine.fold import Fold
    from seriatim.engine.offsets import Partition
    from seriatim.fast.fold import BulkFold
    from seriatim.fast.table import BulkTable

    columns = {"id": "string", "n": "int64", "x": "float64", "ok": "bool"}
    runner = BulkTable(key=["id"], columns=columns, sequence="seq")
    fold: Fold = BulkFold(Partition("t", 0), runner, "strict", "quarantine", lambda _: {})
    sent = list(_sample_messages())
    fold.fold_batch(_SampleMessageBatch([b"s"] * len(sent), sent))  # type: ignore[arg-type]  # it has what a stretch must have
    (session,) = fold.touched_sessions().values()
    runner.repack_heap(always=True)
    assert session.state_bytes is not None
    runner.to_plain_rows(runner.load(session.state_bytes, 1))
    _compile_unpacking()


def _compile_unpacking() -> None:
    """Kafka's records: none at all will do."""
    from seriatim.fast.kafka_records import CRC_TABLES, crc32c, unpack_records

    none, number = np.frombuffer(b"", np.uint8), np.zeros(7, np.int64)
    sizes, edges, room = np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(1, np.uint8)
    crc32c(none, 0, 0, CRC_TABLES)
    unpack_records(
        none, number, 0, number, number, number, number, sizes, edges, room, sizes, edges, room
    )


def _sample_messages() -> Iterator[bytes]:
    yield b'{"type":"snapshot","seq":1,"rows":[{"id":"a","n":1,"x":1.5,"ok":true},{"id":"b"}]}'
    yield b'{"type":"insert","seq":2,"id":"c","n":-7,"x":0.30000000000000004,"ok":false}'
    yield b'{"type":"update","seq":3,"id":"\\u0061","x":2.5}'
    yield b'{"type":"delete","seq":4,"id":"\\u0062"}'
    for number in range(5, 30):
        yield b'{"type":"update","seq":%d,"id":"a","x":2.5,"other":[{"k":null}]}' % number
    yield b'{"type":"delete","seq":30,"id":"c"}'


def main() -> None:
    """Do what is not done yet."""
    if ready.is_ready():
        return
    if ready.compiled_folder() is None:
        sys.exit(
            "the bulk fold cannot be compiled: neither the package nor ~/.cache can be written to"
        )
    sys.stderr.write("compiling the bulk fold: about half a minute\n")
    compile_all()
    ready.mark_ready()


if __name__ == "__main__":
    main()
