"""Traces beside a real run: the run is the same with and without, and what is told is what it did."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from seriatim.cli import run
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.memory.store import MemoryStore
from seriatim.operations.inspect import run_traces as shadows
from seriatim.operations.inspect.run_traces import ShadowTrace
from seriatim.ports import Task
from seriatim.storage import traces
from seriatim.storage.store import LocalStore
from seriatim.stream_files import StreamFile
from seriatim.testing import MemoryPastReader, MemoryStream, OpenMemoryStream
from tests.operations.adding_machines import RaisingAdder, create_adding_stream, send_numbers
from tests.operations.inspect.test_session_replay import noisy
from tests.operations.lookback_helper import explain_row, trace_steps
from tests.operations.memory_streams import A0, create_stream, send

Rows = dict[tuple[str, int], list[dict[str, Any]]]


def watched(made: MemoryStream, names: tuple[str, ...]) -> Rows:
    """Let the runs of a world be traced; the rows by partition and start, as files would have them."""
    kept: Rows = {}

    opened = made.open

    def open_traced(runner: Runner | None = None) -> OpenMemoryStream:
        open_stream = opened(runner)
        return open_stream.with_ports(make_task=lambda works: task(open_stream, works))

    def task(open_stream: OpenMemoryStream, works: dict[Partition, PartitionWork]) -> Task:
        plain = open_stream.make_task(works)

        def run(partition: Partition, whole: OffsetRange, stretches: Iterable[Any]) -> bytes:
            work = works[partition]
            shadow = ShadowTrace(made.stream, made.machine(), work, made.files, names)
            content = plain(partition, whole, shadow.pass_through(stretches))  # type: ignore[arg-type]
            if rows := shadow.counting_rows(content):
                kept[str(partition), work.start] = rows
            return content

        return run

    made.open = open_traced  # type: ignore[method-assign]
    return kept


def told(kept: Rows) -> list[tuple[Any, ...]]:
    """All rows in order, in short."""
    rows = [row for place in sorted(kept) for row in kept[place]]
    return [
        (row["session"], row["offset"], row["outcome"], json.loads(row["records"])) for row in rows
    ]


@pytest.mark.long
@pytest.mark.parametrize("tier", ["none", "strict", "window"])
def test_a_traced_run_tells_what_a_trace_tells(tier: Any) -> None:
    """Message by message, across slices; the run's own output is that of a run without."""
    fields: dict[str, Any] = {
        "tier": tier,
        "sequence": "seq",
        "window_messages": 3,
        "window_seconds": 60,
    }
    made, plain = create_stream(**fields), create_stream(**fields)
    for one in (made, plain):
        one.kafka.create("in-a", 1)
        noisy(one, 120, seed=4)
    kept = watched(made, ("s", "u"))
    made.run(17)
    plain.run(17)
    strip = [{k: v for k, v in row.items() if k != "topic_id"} for row in made.rows()]
    assert strip == [{k: v for k, v in row.items() if k != "topic_id"} for row in plain.rows()]
    wanted = [("s", step) for step in trace_steps(made, "s")] + [
        ("u", step) for step in trace_steps(made, "u")
    ]
    wanted.sort(key=lambda one: one[1].offset)
    assert told(kept) == [(name, step.offset, step.outcome, step.records) for name, step in wanted]


def test_a_try_that_does_not_count_leaves_nothing() -> None:
    """A machine that raises is folded again with care: each message is told once."""
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a", 1)
    send_numbers(made, 100, seed=3)
    kept = watched(made, ("s0",))
    made.run(13)
    assert [offset for _, offset, _, _ in told(kept)] == [
        step.offset for step in trace_steps(made, "s0")
    ]


def test_what_lies_behind_a_halt_is_not_told() -> None:
    """Only up to where the task stopped: the next run tells the rest."""
    made = create_stream(on_poison="halt")
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], 1)
    send(made, A0, b"?", session="t")
    send(made, A0, 2)
    kept = watched(made, ("s",))
    made.run()
    assert [offset for _, offset, _, _ in told(kept)] == [0, 1]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of a task, characters of a column, bytes of all files: the oldest go."""
    monkeypatch.setattr(shadows, "ROWS_MAX", 5)
    monkeypatch.setattr(shadows, "TEXT_MAX", 50)
    made = create_stream()
    made.kafka.create("in-a", 1)
    send(made, A0, ["a", "b", "c", "d"], *range(20))
    kept = watched(made, ("s",))
    made.run()
    (rows,) = kept.values()
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[5]["outcome"].startswith(
        "left out: 16 messages of s from here to the end of the task"
    )
    assert (rows[5]["session"], rows[5]["message"], rows[5]["topic"]) == (None, None, "in-a")
    assert len(rows[0]["records"]) == 51
    for number in range(4):
        traces.write_trace_rows(LocalStore(tmp_path), A0, f"0-{number}", rows)
    one = (tmp_path / "traces" / str(A0) / "0-0.parquet").stat().st_size
    assert len(traces.prune(LocalStore(tmp_path), 2 * one)) == 2
    left = list((tmp_path / "traces").rglob("*.parquet"))
    assert len(left) == 2
    assert pq.read_table(left[0], partitioning=None).num_rows == 6


def test_the_newest_traces_of_each_partition_stay() -> None:
    """The newest of each first, whatever their offsets are; what a killed task left goes."""
    store = MemoryStore()
    for key in ("a/0/0-7", "a/0/0-12", "a/0/1-2", "b/0/0-900", "b/0/0-1000", "b/0/strange"):
        store.create(f"traces/{key}.parquet", b"12345")
    store.writer("traces/a/0/0-3.parquet").write(b"half")
    deleted = traces.prune(store, 4 * 5)
    assert deleted == ["traces/a/0/0-7.parquet", "traces/b/0/strange.parquet"]
    assert list(store.unfinished_keys("")) == []
    assert traces.prune(store, 4 * 5) == []


def test_what_a_task_holds_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few messages may be large: beyond the bound they are counted, for all sessions in the order
    they came.
    """
    monkeypatch.setattr(shadows, "BYTES_MAX", 3_000)
    made = create_stream()
    made.kafka.create("in-a", 1)
    for session in "st":
        send(made, A0, [f"row-{number}" for number in range(9)], session=session)
    for number in range(20):
        send(made, A0, number, session="st"[number % 2])
    kept = watched(made, ("s", "t"))
    made.run()
    (rows,) = kept.values()
    texts = [
        len(row[name])
        for row in rows[:-1]
        for name in ("message", "changes", "records", "findings")
    ]
    assert sum(texts[:-4]) < 3_000 <= sum(texts)
    assert [row["offset"] for row in rows] == list(range(len(rows)))
    assert f"left out: {22 - len(rows) + 1} messages of s, t" in rows[-1]["outcome"]


def test_what_is_left_out_behind_a_halt_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run tells it."""
    monkeypatch.setattr(shadows, "ROWS_MAX", 2)
    made = create_stream(on_poison="halt")
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], 1)
    send(made, A0, b"?", session="t")
    send(made, A0, 2)
    kept = watched(made, ("s",))
    made.run()
    assert [row["offset"] for rows in kept.values() for row in rows] == [0, 1]


def test_traces_are_bounded_however_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails leaves as much room as one that ends well; one that traced nothing touches
    nothing.
    """
    pruned: list[str] = []
    monkeypatch.setattr(traces, "prune", lambda store: pruned.append(store.url))
    file = StreamFile(stream=create_stream().stream, folder="")
    with run._prune_traces_afterwards(file, ()):
        pass
    assert pruned == []
    with pytest.raises(OSError, match="broken"), run._prune_traces_afterwards(file, ("s",)):
        raise OSError("broken")
    assert pruned == ["memory"]


def test_what_no_row_can_hold_is_told_otherwise(tmp_path: Path) -> None:
    """A number that no float is, in a field that the table has not; a time that no calendar has:
    told, kept, read.
    """
    made = create_stream(on_poison="skip")
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], b'{"type": "update", "id": "a", "v": 5, "extra": 1e999}')
    made.kafka.produce("in-a", "s", b'{"type": "update", "id": "a", "v": 6}', timestamp=10**17)
    made.run()
    work = PartitionWork(partition=A0, start=0, end=3, epoch=0, topic_id="x", state=(), attempt="a")
    shadow = ShadowTrace(made.stream, made.machine(), work, made.files, ("s",))
    assert (
        len(list(shadow.pass_through(MemoryPastReader(made.reader).read(A0, OffsetRange(0, 3)))))
        == 1
    )
    rows = shadow.rows
    assert [json.loads(row["message"]).get("v") for row in rows] == [None, 5, None]
    assert [row["timestamp"] is None for row in rows] == [False, False, True]
    traces.write_trace_rows(LocalStore(tmp_path), A0, "0-0", rows)
    assert len(explain_row(made, "a")[0].touches) == 2


def test_a_run_ends_well_where_old_traces_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not needed: that they could not be deleted is said."""

    def fails(_: Path) -> Any:
        raise PermissionError("not allowed")

    monkeypatch.setattr(traces, "prune", fails)
    run._prune_traces(StreamFile(stream=create_stream().stream, folder=""))
    assert "old traces could not be deleted: not allowed" in capsys.readouterr().err


def test_whatever_goes_wrong_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the trace, or when its rows are kept: said in one sentence, and the messages went through."""

    def fails(*_: Any) -> Any:
        raise OSError("no space left")

    made = create_stream()
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], 1, 2)
    work = PartitionWork(partition=A0, start=0, end=3, epoch=0, topic_id="x", state=(), attempt="a")
    given = list(MemoryPastReader(made.reader).read(A0, OffsetRange(0, 3)))
    late = ShadowTrace(made.stream, made.machine(), work, made.files, ("s",))
    assert list(late.pass_through(given)) == given
    assert len(late.rows) == 3
    late.write_counting_rows(msgspec.msgpack.encode(TaskResult()), fails)
    assert "no space left. The run goes on" in late.trouble
    monkeypatch.setattr(shadows, "plain_view_of_message", fails)
    early = ShadowTrace(made.stream, made.machine(), work, made.files, ("s",))
    assert list(early.pass_through(given)) == given
    assert "is not traced, from offset 0 on: OSError: no space left" in early.trouble
