"""`python -m seriatim.fast`: compile the fold, by folding a little of everything with it.

Next: ready.py, which says where the compiled code is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from seriatim.engine.row_parts import StoredRow, StoredRows, summarize_rows
from seriatim.engine.session import Session
from seriatim.fast import ready

if TYPE_CHECKING:
    from seriatim.fast.table import CompiledTable
    from seriatim.storage.arrow import ArrowMessageBatch


def compile_all() -> None:
    """Call every compiled function with the types that tasks call it with."""
    from seriatim.engine.fold import Fold
    from seriatim.engine.offsets import Partition
    from seriatim.fast.fold import CompiledFold
    from seriatim.fast.table import CompiledTable

    columns = {"id": "string", "n": "int64", "x": "float64", "ok": "bool"}
    runner = CompiledTable(key=["id"], columns=columns, sequence="seq")
    fold: Fold = CompiledFold(Partition("t", 0), runner, "strict", "quarantine", lambda _: {})
    fold.fold_batch(_to_batch(list(_sample_messages())))
    (session,) = fold.touched_sessions().values()
    runner.repack_heap(always=True)
    runner.load_sessions([session.state_bytes or b""])
    runner.dump(session.state)
    assert session.state_bytes is not None
    loaded_rows = runner.load(session.state_bytes, 1)
    _compile_stored_rows(runner, runner.load(session.state_bytes, 1))
    runner.to_plain_rows(loaded_rows)
    _compile_unpacking()


def _to_batch(values: list[bytes]) -> ArrowMessageBatch:
    """A batch of messages of one session."""
    from seriatim.storage.arrow import ArrowMessageBatch

    message_columns = {
        "timestamp": pa.array([0] * len(values), pa.timestamp("us", "UTC")),
        "key": pa.array([b"s"] * len(values)),
        "value": pa.array(values),
    }
    return ArrowMessageBatch(pa.RecordBatch.from_pydict(message_columns), 0)


class _SampleRows:
    """The stored rows of a session that has none."""

    stored_count = 0
    is_complete = True

    def find(self, key_hashes: Collection[int]) -> list[StoredRow]:  # it has none
        return []

    def read_all(self) -> list[StoredRow]:
        return []


def _compile_stored_rows(runner: CompiledTable, rows: Any) -> None:
    """Compile what reads and saves sessions that are stored row by row."""
    from seriatim.fast.fold import BatchSessionNames, CompiledBatch
    from seriatim.fast.sessions import TaskSessions

    rows.stored_rows = StoredRows(summarize_rows((), 0), _SampleRows())
    runner.row_changes(rows)
    batch = _to_batch([b'{"type":"update","seq":1,"id":"d","x":2.5}'])
    names = BatchSessionNames(batch.record_batch.column("key"))
    compiled_batch = CompiledBatch(runner, names, batch, batch.record_batch.column("value"))
    sessions = {"s": Session(state=rows, is_active=True)}
    compiled_batch.set_sessions(TaskSessions(runner, headless_since=-1), sessions)
    compiled_batch.read_stored_rows()


def _compile_unpacking() -> None:
    """Compile what unpacks Kafka's records. The types are what counts: no record is needed."""
    from seriatim.fast.kafka_records import CRC_TABLES, crc32c, unpack_records

    data = np.frombuffer(b"", np.uint8)
    numbers = np.zeros(7, np.int64)
    sizes = np.zeros(1, np.int32)
    edges = np.zeros(2, np.int32)
    content = np.zeros(1, np.uint8)
    crc32c(data, 0, 0, CRC_TABLES)
    unpack_records(
        data,
        batch_header=numbers,
        row=0,
        read_at=numbers,
        offsets=numbers,
        times=numbers,
        header_positions=numbers,
        key_sizes=sizes,
        key_edges=edges,
        keys=content,
        value_sizes=sizes,
        value_edges=edges,
        values=content,
    )


def _sample_messages() -> Iterator[bytes]:
    yield b'{"type":"snapshot","seq":1,"rows":[{"id":"a","n":1,"x":1.5,"ok":true},{"id":"b"}]}'
    yield b'{"type":"insert","seq":2,"id":"c","n":-7,"x":0.30000000000000004,"ok":false}'
    yield b'{"type":"update","seq":3,"id":"\\u0061","x":2.5}'
    yield b'{"type":"delete","seq":4,"id":"\\u0062"}'
    for number in range(5, 30):
        yield b'{"type":"update","seq":%d,"id":"a","x":2.5,"other":[{"k":null}]}' % number
    yield b'{"type":"delete","seq":30,"id":"c"}'
    yield b'{"type":"snapshot","seq":31,"rows":[{"id":"a"}]}'


def main() -> None:
    """Compile, unless it is compiled already. Exits with a message if the code cannot be saved."""
    if ready.is_ready():
        return
    if ready.compiled_folder() is None:
        sys.exit(
            "the compiled fold cannot be saved: neither the package's folder nor ~/.cache can be"
            " written to. Make one of them writable, then type `python -m seriatim.fast` again."
            " Until then tasks take the plain fold, which is slower."
        )
    with ready.compiling() as is_first:
        if not is_first:
            return
        sys.stderr.write("compiling the fold: about half a minute\n")
        compile_all()
        ready.mark_ready()


if __name__ == "__main__":
    main()
