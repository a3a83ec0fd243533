"""`seriatim new` as a user types it: the files are there, their test passes, and a run folds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim.testing import MemoryKafka
from tests.golden.product import Answer, FakeCluster, command, forget_modules

NOW_MS = 1_794_843_000_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    """A Kafka in memory, and an empty folder of a user."""
    cluster = FakeCluster()
    with cluster.installed(tmp_path):
        yield cluster
    forget_modules(tmp_path)


def send(kafka: MemoryKafka, topic: str, key: str | None, *contents: Any) -> None:
    """Messages of a topic, which is created."""
    if topic not in kafka.topics:
        kafka.create(topic)
    for content in contents:
        kafka.produce(topic, key, json.dumps(content).encode(), timestamp=NOW_MS)


ORDERS = [
    {"id": f"o{i}", "seq": i + 1, "from": "x", "timestamp": "2024-05-01T12:00:00Z", "price": i / 2}
    for i in range(5)
]


def run_pytest(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a test as a user would, with a configuration that is none of ours."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path.name],
        cwd=path.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def new_and_run(name: str, *options: str) -> dict[str, Any]:
    """Make a stream and run it; what `new` printed."""
    made = command("new", name, *options, "--json")
    assert made.code == 0, made.err
    run = command("run", name, "--json")
    assert run.code == 0, run.err
    return made.objects()[0]


def test_a_sample_becomes_a_stream_that_runs(cluster: FakeCluster, tmp_path: Path) -> None:
    """Fields with names that Python or every record has for itself come out as columns; the test of
    the scaffold passes; a run and a check find nothing.
    """
    send(cluster.kafka, "orders", "a", *ORDERS)
    made = new_and_run("orders")
    assert made["sampled"] == 5
    guesses = {guess["about"]: guess["value"] for guess in made["guesses"]}
    assert (guesses["key"], guesses["session"], guesses["sequence"]) == ("id", "key", "seq")
    assert made["files"] == [
        "expectations/orders.json",
        "streams/orders.py",
        "streams/test_orders.py",
        "streams/orders.toml",
    ]
    tested = run_pytest(tmp_path / "streams/test_orders.py")
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    assert command("check", "orders", "--json").code == 0
    published = command("publish", "orders", "--json")
    assert published.code == 0, published.err


def test_messages_of_the_table_machine_get_its_stream_file(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """There is no machine to write; the test folds the table by the keys of the stream file."""
    rows = [{"id": "a", "price": 1.5}]
    send(cluster.kafka, "rows", "s", {"type": "snapshot", "seq": 1, "rows": rows})
    send(cluster.kafka, "rows", "s", {"type": "update", "seq": 2, "id": "a", "price": 2.0})
    made = new_and_run("rows")
    assert not (tmp_path / "streams/rows.py").exists()
    assert made["guesses"][0]["value"] == "table"
    tested = run_pytest(tmp_path / "streams/test_rows.py")
    assert tested.returncode == 0, tested.stdout


def test_expectations_name_the_columns_as_the_table_has_them(cluster: FakeCluster) -> None:
    """A column whose name is taken is called otherwise in the records. The row before a change is no
    column.
    """
    rows = [{"id": "a", "timestamp": 5, "a b": 1}]
    update = {"type": "update", "seq": 2, "id": "a", "timestamp": 6, "before": {"timestamp": 5}}
    send(cluster.kafka, "odd", "s", {"type": "snapshot", "seq": 1, "rows": rows}, update)
    made = new_and_run("odd")
    assert made["left_out"] == {}
    checked = command("check", "odd", "--json")
    assert checked.code == 0, checked.err


def test_without_messages_it_is_an_example(cluster: FakeCluster, tmp_path: Path) -> None:
    """Its test passes, and messages like those of the example are folded."""
    made = command("new", "later", "--json")
    assert made.code == 0, made.err
    assert made.objects()[0]["sampled"] == 0
    tested = run_pytest(tmp_path / "streams/test_later.py")
    assert tested.returncode == 0, tested.stdout
    send(cluster.kafka, "later", "k", {"id": "a", "amount": 1.5, "seq": 1})
    assert command("run", "later", "--json").code == 0


@pytest.mark.parametrize("name", ["json", "2fast", "pytest", "class", "with-dashes"])
@pytest.mark.usefixtures("cluster")
def test_any_name_gets_a_module_that_can_be_imported(name: str, tmp_path: Path) -> None:
    """Names of Python's own modules, of packages, of keywords and of no identifiers."""
    assert command("new", name, "--json").code == 0
    assert (tmp_path / f"streams/{name}.toml").exists()


def test_field_names_of_others_do_no_harm(cluster: FakeCluster) -> None:
    """They are data: line breaks, quotes and names that differ by case alone."""
    content = {'a"\n[output]\npath="x"': 1, "Id": "a", "id": "b", "ID": {"x": 1}, "ü b": [1, 2]}
    send(cluster.kafka, "odd", "k", content, content)
    made = new_and_run("odd")
    assert list(made["left_out"]) == ['a"\n[output]\npath="x"', "ID"]


def refused(*words: str) -> tuple[Answer, dict[str, Any]]:
    """A command that is refused, and its error."""
    answer = command(*words, "--json")
    assert answer.code == 2
    assert answer.out == ""
    return answer, answer.told()[-1]


@pytest.mark.usefixtures("cluster")
def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """The error names the file, and no other file is written."""
    test = tmp_path / "streams" / "test_mine.py"
    test.parent.mkdir()
    test.write_text("mine")
    _, error = refused("new", "mine")
    assert "streams/test_mine.py: there already" in error["message"]
    assert [path.name for path in test.parent.iterdir()] == ["test_mine.py"]
    assert test.read_text() == "mine"
    assert not (tmp_path / "expectations").exists()


@pytest.mark.parametrize("name", ["a/b", "", "records", "seriatim_watch", "x" * 65])
@pytest.mark.usefixtures("cluster")
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    """Also the names of suites, since expectations/records.json is for all streams."""
    _, error = refused("new", name)
    assert "cannot name a new stream" in error["message"]
    assert error["allowed"].startswith("a letter or a digit, then letters, digits, - and _")


@pytest.mark.usefixtures("cluster")
def test_a_wrong_pattern_is_refused() -> None:
    """Before anything is written."""
    _, error = refused("new", "x", "--topic", "(")
    assert "not a regular expression" in error["message"]


def test_messages_that_are_not_json_need_a_decoder(cluster: FakeCluster, tmp_path: Path) -> None:
    """The error says which way there is; --no-sample goes on without the messages."""
    cluster.kafka.create("csv")
    cluster.kafka.produce("csv", "k", b"1;2;3", timestamp=NOW_MS)
    _, error = refused("new", "csv")
    assert "decoder" in error["next"]
    assert not (tmp_path / "streams").exists()
    assert command("new", "csv", "--no-sample", "--json").code == 0


def test_the_sample_is_bounded(cluster: FakeCluster) -> None:
    """1,000 messages of all partitions together, from the oldest on."""
    cluster.kafka.create("big", 3)
    for i in range(3000):
        value = json.dumps({"id": f"{i}"}).encode()
        cluster.kafka.produce("big", f"{i % 30}", value, partition=i % 3, timestamp=NOW_MS)
    (made,) = command("new", "big", "--json").objects()
    assert made["sampled"] == 999


@pytest.mark.usefixtures("cluster")
def test_a_folder_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder of streams should be."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "file" / "streams"))
    _, error = refused("new", "x")
    assert "nothing was written" in error["message"]
