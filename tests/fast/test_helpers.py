"""Sessions spread over helpers give what one fold gives, and what is not as usual is folded again,
alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from seriatim import context, stream_files
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, TaskContext, TaskResult, read_result, run_task
from seriatim.errors import PlatformError
from seriatim.fast.helpers import fold
from seriatim.storage.arrow import message_batches

PLACE = Partition("t", 0)
MACHINE = """
from seriatim import Machine
from msgspec import Struct

class Change(Struct):
    seq: int
    kind: str
    value: int = 0

class Sum(Struct):
    total: int | None

class Sums(Machine[dict, Change, Sum]):
    def start(self, session): return {"total": 0}
    def is_snapshot(self, message): return message.kind == "snapshot"
    def apply(self, state, message):
        print("machines may say what they like")
        if message.kind == "raise": raise ValueError("no")
        if message.kind == "snapshot":
            state["total"] = message.value
            return [Sum(message.value), Sum(None)]
        state["total"] += message.value
        return [] if message.value % 5 == 0 else [Sum(state["total"])]
"""
STREAM = """
topics = "t"
machine = "sums:Sums"
sequence = "seq"
parallelism = "session"
output = {path = "lake"}
"""
Sent = tuple[bytes | None, bytes]


@pytest.fixture
def file(tmp_path: Path) -> stream_files.StreamFile:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "sums.py").write_text(MACHINE)
    (tmp_path / "streams" / "s.toml").write_text(STREAM)
    return stream_files.load_stream("s", tmp_path / "streams")


def produced(seed: int, count: int, known: dict[str, int]) -> list[Sent]:
    """Messages of ten sessions, each beginning with a snapshot; `known` has their sequences so far."""
    chance, sent = random.Random(seed), []
    for _ in range(count):
        name = f"session-{chance.randrange(10)}"
        kind = "snapshot" if name not in known or chance.random() < 0.05 else "add"
        known[name] = known.get(name, 0) + 1
        value = {"seq": known[name], "kind": kind, "value": chance.randrange(100)}
        sent.append((name.encode(), msgspec.json.encode(value)))
    return sent


def batches(sent: list[Sent], start: int, at_once: int = 97) -> Iterator[pa.RecordBatch]:
    for low in range(0, len(sent), at_once):
        part = sent[low : low + at_once]
        offsets = range(start + low, start + low + len(part))
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array(
                [1_700_000_000_000_000 + n * 7 for n in offsets], pa.timestamp("us", "UTC")
            ),
            "key": pa.array([key for key, _ in part], pa.binary()),
            "value": pa.array([value for _, value in part], pa.binary()),
        }
        yield pa.RecordBatch.from_pydict(columns)


def folded(
    file: stream_files.StreamFile,
    given: Any,
    start: int,
    end: int,
    state: tuple[File, ...],
    parts: int,
    attempt: str,
) -> TaskResult:
    work = PartitionWork(
        partition=PLACE, start=start, end=end, epoch=0, topic_id="id", state=state, attempt=attempt
    )
    with fold.with_helpers(file, work, context.task_context(file, {}), parts) as kit:
        return read_result(run_task(work, message_batches(given), kit))


def content(file: stream_files.StreamFile, result: TaskResult) -> tuple[Any, ...]:
    """Everything that a result says, without the names of its files."""
    root = Path(file.stream.output.path)
    records = [pq.read_table(root / one.path, partitioning=None) for one in result.records]
    edges = [(one.rows, one.first_offset, one.last_offset) for one in result.records]
    state = sorted(context.state(file).all_sessions(result.state or ()))
    return (
        edges,
        records,
        state,
        result.certificate,
        result.sessions_without_state,
        result.findings,
        result.marks,
    )


@pytest.mark.parametrize("parts", [2, 3])
def test_many_hands_give_what_one_gives(file: stream_files.StreamFile, parts: int) -> None:
    """Records in the same order, the same state, the same certificate, over two tasks with state
    between them.
    """
    known: dict[str, int] = {}
    tasks = [produced(parts, 900, known), produced(parts + 10, 700, known)]
    start, before, beside = 40, tuple[File, ...](), tuple[File, ...]()
    for number, sent in enumerate(tasks):
        end = start + len(sent)
        plain = folded(file, batches(sent, start), start, end, before, 1, f"plain{number}")
        spread = folded(file, batches(sent, start), start, end, beside, parts, f"spread{number}")
        assert content(file, spread) == content(file, plain)
        start, before, beside = end, plain.state or (), spread.state or ()
    assert plain.certificate is not None
    assert plain.certificate.counts.snapshots > 10


@pytest.mark.parametrize(
    "bad",
    [
        (b"session-1", b'{"seq": 9999, "kind": "raise"}'),
        (b"session-1", b'{"seq": 9999, "kind": "add", "value": 1}'),
        (b"session-1", b"not JSON"),
        (None, b"{}"),
    ],
    ids=["raised", "a jump", "poison", "nobody's"],
)
def test_what_is_not_as_usual_is_folded_again_alone(
    file: stream_files.StreamFile, bad: Sent
) -> None:
    """The rules about trouble are the plain fold's: nothing of this try counts."""
    sent = produced(1, 500, {})
    sent.insert(300, bad)
    result = folded(file, batches(sent, 0), 0, len(sent), (), 2, "a")
    assert result.needs_headers_and_one_process
    assert result.certificate is None


def test_a_halt_at_a_hole_is_folded_again_alone(file: stream_files.StreamFile) -> None:
    """Helpers are ahead of the hole by then: what they folded behind it must not be saved."""
    sent = produced(1, 600, {})
    given = [*batches(sent[:200], 0), *batches(sent[210:], 210)]
    with gap(file) as kit:
        work = PartitionWork(partition=PLACE, start=0, end=600, epoch=0, topic_id="id", attempt="a")
        with fold.with_helpers(file, work, kit, 2) as ready:
            result = read_result(run_task(work, message_batches(given), ready))
    assert result.needs_headers_and_one_process


@contextmanager
def gap(file: stream_files.StreamFile) -> Iterator[TaskContext]:
    """A kit for which no hole has an explanation."""
    yield replace(
        context.task_context(file, {}), explain=lambda _partition, hole: [(hole, "unexplained")]
    )


def test_a_helper_that_dies_is_platform_trouble(file: stream_files.StreamFile) -> None:
    """The run fails by name, and the next one folds the same again."""
    sent = produced(1, 900, {})
    work = PartitionWork(partition=PLACE, start=0, end=900, epoch=0, topic_id="id", attempt="a")
    with fold.with_helpers(file, work, context.task_context(file, {}), 2) as kit:
        helpers = kit.make_fold.keywords["helpers"]  # type: ignore[attr-defined]
        helpers[1].process.kill()
        with pytest.raises(PlatformError, match="helper process of a hot partition died"):
            read_result(run_task(work, message_batches(batches(sent, 0)), kit))
    assert all(helper.process.returncode is not None for helper in helpers)


@pytest.mark.parametrize(
    ("changes", "share", "parts"),
    [
        ({}, 1.0, 4),
        ({}, 0.5, 2),
        ({}, 0.125, 1),
        ({"parallelism": "partition"}, 1.0, 1),
        ({"tier": "window"}, 1.0, 1),
        ({"session_timeout_hours": 1}, 1.0, 1),
        ({"session": "field:who"}, 1.0, 1),
    ],
)
def test_only_a_hot_partition_is_spread(
    file: stream_files.StreamFile, changes: dict[str, Any], share: float, parts: int
) -> None:
    """As many processes as its share of the slice is worth, and one where a rule looks beyond a
    session.
    """
    kit, file = (
        context.task_context(file, {}),
        replace(file, stream=replace(file.stream, **changes)),
    )
    work = PartitionWork(
        partition=PLACE, start=0, end=50_000, epoch=0, topic_id="id", attempt="a", share=share
    )
    assert fold.choose_helper_count(file, work, kit, 4) == parts
    assert fold.choose_helper_count(file, replace(work, end=1_000), kit, 4) == 1
