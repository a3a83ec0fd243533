"""A stream that is folded by a Spark cluster: a master and two workers, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

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
