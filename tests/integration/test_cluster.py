"""A stream that is folded by a Spark cluster: a master and two workers, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from deltalake import DeltaTable

from seriatim.embedded.cluster import ClusterInfo
from tests.integration.lab import Lab

PARTITIONS = 4
UPDATES = 50
MANY_UPDATES = 20_000
WAIT_SECONDS_MAX = 900


def snapshot_and_updates(topic: str, updates: int) -> list[tuple[str, int, str, Any]]:
    """In each partition one session: a snapshot of one row, and updates of its size."""
    messages: list[tuple[str, int, str, Any]] = []
    for partition in range(PARTITIONS):
        key = f"session-{partition}"
        row = {"id": "a", "price": 1.5, "size": 0}
        messages.append((topic, partition, key, {"type": "snapshot", "seq": 1, "rows": [row]}))
        for number in range(updates):
            update = {"type": "update", "seq": 2 + number, "id": "a", "size": number + 1}
            messages.append((topic, partition, key, update))
    return messages


def test_a_run_check_and_verify_on_the_cluster(
    lab: Lab, topic: Callable[..., str], spark_cluster: ClusterInfo
) -> None:
    """The command line folds, and verify reads, on the cluster that SERIATIM_SPARK_MASTER names: each
    message has its record, and verify says the same as in its own process.
    """
    name = topic(PARTITIONS)
    lab.stream("orders", name)
    lab.send(snapshot_and_updates(name, UPDATES))
    run = lab.command("run", "orders", SERIATIM_SPARK_MASTER=spark_cluster.master)
    assert run.returncode == 0, run.stderr
    assert sizes_by_partition(lab) == {
        number: list(range(UPDATES + 1)) for number in range(PARTITIONS)
    }
    here = lab.command("verify", "orders", "--all", "--json")
    there = lab.command(
        "verify",
        "orders",
        "--all",
        "--json",
        SERIATIM_SPARK_MASTER=spark_cluster.master,
        SERIATIM_SPARK_RECORDS_MIN="0",
    )
    assert "are read on the executors" in there.stderr
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout) == json.loads(here.stdout)


@pytest.mark.full
def test_the_heavy_steps_on_the_cluster(
    lab: Lab, topic: Callable[..., str], spark_cluster: ClusterInfo
) -> None:
    """check, publish, compact and repair of one stream on the executors, and of its twin in their own
    process: the same verdict, rows and files, and verify is content with both.
    """
    name = topic(PARTITIONS)
    lab.send(snapshot_and_updates(name, UPDATES))
    cluster = {
        "SERIATIM_SPARK_MASTER": spark_cluster.master,
        "SERIATIM_SPARK_RECORDS_MIN": "0",
    }
    here = answers_of_heavy_steps(lab, "here", name, {})
    there = answers_of_heavy_steps(lab, "there", name, cluster)
    for key in ("verdict", "records", "promises", "expectations"):
        assert there["check"][key] == here["check"][key]
    for key in ("partitions", "rows_written", "files_written"):
        assert there["publish"][key] == here["publish"][key]
    assert compacted_pieces(there) == compacted_pieces(here) != []
    for stream in ("here", "there"):
        assert lab.command("verify", stream, "--all").returncode == 0
    assert records_of(lab, "there", "current") == records_of(lab, "here", "current") != []
    assert records_of(lab, "there", "records") == records_of(lab, "here", "records") != []


def answers_of_heavy_steps(
    lab: Lab, stream: str, topic_name: str, environment: dict[str, str]
) -> dict[str, Any]:
    """Fold, check, publish, compact, lose a file, repair; the JSON of the steps in between."""
    lab.stream(stream, topic_name)
    assert lab.command("run", stream, "--messages-max", "60").returncode == 0
    answers = {}
    for step in ("check", "publish", "compact"):
        done = lab.command(step, stream, "--json", **environment)
        assert done.returncode == 0, done.stderr
        assert ("on the executors" in done.stderr) == bool(environment), done.stderr
        answers[step] = json.loads(done.stdout)
    min((lab.root(stream) / "records" / topic_name / "1").glob("compact-*.parquet")).unlink()
    repaired = lab.command("repair", stream, "--apply", **environment)
    assert repaired.returncode == 0, repaired.stderr
    return answers


def compacted_pieces(answers: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What was compacted, without the names of entries."""
    pieces = answers["compact"]["pieces"]
    return [(one["partition"], one["what"], one["files"], one["into"]) for one in pieces]


def records_of(lab: Lab, stream: str, table: str) -> list[dict[str, Any]]:
    """The rows of a table, in an order of its own."""
    rows = DeltaTable(lab.root(stream) / table).to_pyarrow_dataset().to_table(use_threads=False)
    return sorted(rows.to_pylist(), key=str)


def sizes_by_partition(lab: Lab) -> dict[int, list[int]]:
    """The sizes in the records of each partition, by offset."""
    sizes: dict[int, list[int]] = {}
    for record in sorted(lab.records("orders"), key=lambda record: record["offset"]):
        sizes.setdefault(record["partition"], []).append(record["size"])
    return sizes


def processes_of(kind: str, run: subprocess.Popen[str], info: ClusterInfo) -> list[psutil.Process]:
    """The processes of a kind that work for this run now."""
    if kind == "driver":
        return [psutil.Process(run.pid)]
    words = {"executor": "CoarseGrainedExecutorBackend", "Python worker": "spark_daemon"}[kind]
    found = []
    for worker in info.workers:
        for process in psutil.Process(worker.pid).children(recursive=True):
            try:
                if any(words in word for word in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["executor", "Python worker", "driver"])
def test_a_process_is_lost_in_the_middle(
    lab: Lab, topic: Callable[..., str], spark_cluster: ClusterInfo, kind: str
) -> None:
    """After the first commit all processes of a kind are killed once. The run, or for the driver the
    next run, ends with one record for each message, in order.
    """
    name = topic(PARTITIONS)
    lab.stream("orders", name)
    lab.send(snapshot_and_updates(name, MANY_UPDATES))
    run = lab.start(
        "run", "orders", "--messages-max", "8000", SERIATIM_SPARK_MASTER=spark_cluster.master
    )
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    log = lab.root("orders") / "records" / "_delta_log"
    while len(list(log.glob("*.json"))) < 2 or not processes_of(kind, run, spark_cluster):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for process in processes_of(kind, run, spark_cluster):
        process.kill()
    _, errors = run.communicate(timeout=3600)
    if kind == "driver":
        assert run.returncode == -9
        again = lab.command("run", "orders", SERIATIM_SPARK_MASTER=spark_cluster.master)
        assert again.returncode == 0, again.stderr
    else:
        assert run.returncode == 0, errors
        assert "Traceback" not in errors
    assert sizes_by_partition(lab) == {
        number: list(range(MANY_UPDATES + 1)) for number in range(PARTITIONS)
    }
