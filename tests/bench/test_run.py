"""The bench itself: its figures, who may be compared with whom, and going on after a break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import answer, run
from bench.contenders import CONTENDERS
from bench.shapes import LARGE_TABLE_SLICE, SHAPES
from seriatim.testing import fold_table

NAMES = {
    "floor", "table", "machine", "spark-apply", "spark-transform", "spark-scala", "flink-heap", "flink-rocksdb",
    "kafka-streams", "quix",
}  # fmt: skip


def taken(cpu_seconds: float, digest: str = "d") -> dict[str, Any]:
    return {
        "cpu_seconds": cpu_seconds,
        "wall_seconds": 2.0,
        "peak_memory_mb": 100,
        "output_bytes": 10,
        "startup_cpu_seconds": 1.0,
        "load": 0.5,
        "answer": {"records": 7, "digest": digest},
    }


def test_every_contender_has_its_name() -> None:
    """The names that people script against."""
    assert set(CONTENDERS) >= NAMES


def test_the_figures_have_their_shape() -> None:
    """Best, median and all of each; ratios to the floor and to ours; who cannot run is named with
    the reason.
    """
    runs = {
        "floor": [taken(8.0), taken(10.0)],
        "table": [taken(4.0), taken(6.0)],
        "flink-heap": [taken(16.0)] * 2,
    }
    found = run.summary({**runs, "quix": [{"cannot_run": "no wheel"}]}, 1_000_000)
    assert set(found) == {"when", "machine", "messages", "contenders", "ratios", "cannot_run"}
    assert found["contenders"]["table"]["cpu_us_per_message"] == {
        "best": 4.0,
        "median": 5.0,
        "all": [4.0, 6.0],
    }
    assert found["ratios"]["table/floor"] == {"best": 0.5, "median": 0.56}
    assert found["ratios"]["flink-heap/table"] == {"best": 4.0, "median": 3.2}
    assert found["cannot_run"] == {"quix": "no wheel"}
    assert "quix" in "\n".join(run.table(found))


def test_who_gives_another_answer_is_not_compared() -> None:
    """Fast and wrong is no figure."""
    run._refuse_other_answers({"table": [taken(1.0)], "machine": [taken(1.0)]})
    with pytest.raises(SystemExit, match="the answers differ"):
        run._refuse_other_answers({"table": [taken(1.0)], "machine": [taken(1.0, "other")]})


def test_a_broken_off_bench_goes_on(tmp_path: Path) -> None:
    """Only with as many messages as before; what is left is run in turn."""
    (tmp_path / "u.json").write_text(json.dumps({"messages": 100, "runs": {"floor": [taken(1.0)]}}))
    assert run._load_unfinished(tmp_path / "u.json", 200) == {}
    runs = run._load_unfinished(tmp_path / "u.json", 100)
    assert list(run._remaining_runs(["floor", "table"], 2, runs)) == [
        ("table", 0),
        ("floor", 1),
        ("table", 1),
    ]


def test_an_answer_does_not_depend_on_files_or_order(tmp_path: Path) -> None:
    """The same records in another order and other files are the same answer; one value changed is
    another.
    """
    row = {
        "session": "s",
        "sequence": 1,
        "op": "update",
        "id": "a",
        "price": 1.5,
        "size": None,
        "old_price": None,
    }
    rows = [{**row, "partition": n % 2, "offset": n, "old_size": n} for n in range(10)]

    def kept(name: str, *parts: list[dict[str, Any]]) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            pq.write_table(
                pa.Table.from_pylist(part, schema=answer.SCHEMA),
                tmp_path / name / f"{number}.parquet",
            )
        return answer.of_files(tmp_path / name, "*.parquet")

    first = kept("one", rows)
    assert kept("two", rows[7:], rows[:7]) == first
    assert kept("three", [*rows[:9], {**rows[9], "price": 1.25}]) != first


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_in_order(name: str) -> None:
    """A contender that finds something folds data twice, and its figure means nothing."""
    messages = [(key, message) for _, key, message in SHAPES[name].make_messages(2_000)]
    columns = {"id": "string", "price": "float64", "size": "int64"}
    folded = fold_table(messages, key=["id"], columns=columns, sequence="seq")
    assert (folded.findings, folded.headless, len(messages)) == ([], 0, 2_000)
    assert folded.records


def test_change_capture_has_a_session_for_each_row() -> None:
    """Two messages per key, a fifth of all messages are deletes."""
    messages = [message for _, _, message in SHAPES["cdc"].make_messages(10_000)]
    assert len({message["session"] for message in messages}) == 5_000
    deletes = [message for message in messages if message["type"] == "delete"]
    assert 0.18 < len(deletes) / len(messages) < 0.22


def test_a_slice_of_the_large_table_touches_one_row_in_a_hundred() -> None:
    """After all rows were inserted."""
    count = 4 * LARGE_TABLE_SLICE
    messages = [message for _, _, message in SHAPES["large-table"].make_messages(count)]
    inserted = [message["id"] for message in messages if message["type"] == "insert"]
    first_slice = messages[count // 2 : count // 2 + LARGE_TABLE_SLICE]
    touched = {message["id"] for message in first_slice}
    assert touched <= set(inserted)
    assert len(touched) == pytest.approx(len(inserted) / 100, rel=0.01)


def test_each_shape_has_results_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`latest.json` and the picture stay those of the first shape."""
    for name in ("sessions", "cdc"):
        figures = {"shape": name, **run.summary({"floor": [taken(8.0)], "table": [taken(4.0)]}, 10)}
        run.save_results(figures, tmp_path, docs=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cdc.json",
        "latest.json",
        "latest.svg",
    ]
    assert json.loads((tmp_path / "cdc.json").read_text())["shape"] == "cdc"
    assert "shape cdc" in capsys.readouterr().out


def test_a_start_counts_where_nothing_was_warmed_up() -> None:
    """A small run is mostly its start."""
    measurement = {**taken(2.0), "startup_wall_seconds": 3.0}
    run._add_start(measurement)
    assert (measurement["cpu_seconds"], measurement["wall_seconds"]) == (3.0, 5.0)
