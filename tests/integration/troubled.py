"""Streams for tests of failures: an Airflow, the guarded broker they read, a topic for each, and
secrets planted around them.

Next: test_airflow_trouble.py makes things fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable

from seriatim import config
from seriatim.errors import PlatformError
from tests.dags.bag import ROOT, write_stream
from tests.integration.guarded import GuardedBroker
from tests.integration.standalone import API_TRIES, Standalone

ALERTS = "alerts = {to = ['ops@example.org']}"
BY_HAND = f"schedule = {{cron = ''}}\n{ALERTS}"
MONTHLY = f"schedule = {{cron = '0 0 1 * *'}}\n{ALERTS}"
"""A run by its schedule begins as soon as the DAG may run, and no other one for a while."""
SECRETS = {
    kind: f"canary-{kind}-{uuid.uuid4().hex}"
    for kind in ("sasl", "key", "spark", "smtp", "env", "extra")
}
"""A Kafka password, the password of a TLS key, two of Airflow's connections, the environment, a
connection's extra.
"""
SLOW_MACHINE = """
import time
from msgspec import Struct
from seriatim import Machine

class Count(Struct):
    n: int = 0

class Number(Struct):
    v: int

class Slow(Machine[Count, Number, Count]):
    def start(self, session):
        return Count()
    def apply(self, state, message):
        time.sleep(0.5)
        state.n += 1
        return [Count(state.n)]
"""
POSITIVE = {
    "expectations": [
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "v", "min_value": 0},
            "meta": {"name": "v is not negative"},
        }
    ]
}


class TroubledAirflow(Standalone):
    """An Airflow with the broker and the streams that it runs."""

    def __init__(self, folder: Path, broker: GuardedBroker, **settings: str) -> None:
        super().__init__(folder, **settings)
        self.broker, self.lines = broker, set[str]()
        self.producer = Producer({"bootstrap.servers": broker.plain, "log_level": 0})
        self.admin = AdminClient({"bootstrap.servers": broker.plain, "log_level": 0})
        (folder / "home").mkdir()
        (folder / "home" / "jars").symlink_to(config.load_settings().home / "jars")
        (folder / "expectations").mkdir()

    def write_streams(self) -> None:
        """Write all stream files, before Airflow reads them."""
        folder = self.folder / "streams"
        write_stream(folder, "busy", MONTHLY, "busy-topic")
        write_stream(folder, "four", BY_HAND, "four-topic")
        write_stream(folder, "keep", BY_HAND, "keep-topic")
        write_stream(folder, "gate", f"on_check_failure = 'stop'\n{BY_HAND}", "gate-topic")
        for name in ("gate", "keep"):
            (self.folder / "expectations" / f"{name}.json").write_text(json.dumps(POSITIVE))
        (folder / "slowly.py").write_text(SLOW_MACHINE)
        (folder / "slow.toml").write_text(
            f"topics = 'slow-topic'\nmachine = 'slowly:Slow'\n{BY_HAND}\n"
            "output = {path = 'lake/slow'}\nslice = {messages_max = 10}\n"
        )

    def make_topics(self) -> None:
        """A topic for each; but for the slow one, a session in each partition that begins by a
        snapshot.
        """
        for name, partitions in {"busy": 2, "four": 4, "gate": 1, "keep": 1, "slow": 1}.items():
            new = NewTopic(f"{name}-topic", num_partitions=partitions, replication_factor=1)
            self.admin.create_topics([new])[new.topic].result(timeout=120)
            snapshot = {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "v": 0}]}
            if name != "slow":
                self.send(new.topic, [(p, snapshot) for p in range(partitions)])

    def send(self, topic: str, messages: list[tuple[int, dict[str, Any]]]) -> None:
        """Messages by partition; a session for each."""
        for partition, value in messages:
            self.producer.produce(
                topic, json.dumps(value).encode(), f"session-{partition}", partition
            )
        assert self.producer.flush(60) == 0

    def seriatim(self, *words: str) -> str:
        """A command, as a person types it; what it printed."""
        return self._typed("seriatim", *words)

    def _typed(self, *words: str) -> str:
        """What a command printed. One that meets platform trouble is typed again, as its exit code
        says: on a busy machine a broker may not answer in time.
        """
        for _ in range(API_TRIES):
            process = subprocess.run(
                [sys.executable, "-m", *words],
                env=self.environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if process.returncode != PlatformError.exit_code:
                break
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout

    def rows(self, stream: str, table: str = "records") -> list[dict[str, Any]]:
        """All rows of a table."""
        table_rows = (
            DeltaTable(self.folder / "lake" / stream / table)
            .to_pyarrow_dataset()
            .to_table(use_threads=False)
        )
        return list(table_rows.to_pylist())

    def offsets(self, stream: str) -> list[tuple[int, int]]:
        """Partition and offset of each record, sorted."""
        return sorted((row["partition"], row["offset"]) for row in self.rows(stream))

    def run_to_end(self, dag: str, **conf: Any) -> tuple[str, str]:
        """Start a run by hand and wait for its end: (its id, how it ended)."""
        run = self.trigger(dag, **conf)
        return run, self.run(dag, run)

    def ended_runs(self, dag: str) -> list[dict[str, Any]]:
        """Runs that are over."""
        return [run for run in self.runs(dag) if run["state"] in ("success", "failed")]

    def backfill(self, dag: str, day: str) -> None:
        """Airflow's own backfill, as a person types it."""
        words = ["backfill", "create", "--dag-id", dag, "--from-date", day, "--to-date", day]

        def created() -> bool:
            try:
                return bool(self._typed("airflow", *words))
            except AssertionError as error:
                if "database is locked" in str(error):  # SQLite's, at once, where two write
                    return False
                raise

        self.wait("the backfill is created", created)

    def sequence(self, stream: str) -> int:
        """The last entry of a stream's ledger."""
        return int(json.loads(self.seriatim("status", stream, "--json"))["sequence"])

    def tries(self, dag: str, run: str, task: str) -> int:
        """How often a task was tried."""
        return int(self.api(f"dags/{dag}/dagRuns/{run}/taskInstances/{task}")["try_number"])

    def drivers(self, stream: str) -> list[psutil.Process]:
        """Spark drivers and their JVMs that fold a stream."""
        words = [
            (process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
        ]
        return [
            process
            for process, line in words
            if str(ROOT / "spark_apps/fold.py") in line and line[-1] == stream
        ]

    def collect_command_lines(self) -> None:
        """Collect every command line of this computer, for as long as Airflow runs."""
        while self.process is not None and self.process.poll() is None:
            for process in psutil.process_iter(["cmdline"]):
                self.lines.add(" ".join(process.info["cmdline"] or []))
            time.sleep(0.2)


def settings(broker: GuardedBroker) -> dict[str, str]:
    """The settings in which the secrets are planted."""
    spark = {"conn_type": "spark", "host": "local[2]", "login": "us", "password": SECRETS["spark"]}
    return {
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": broker.guarded,
        "SERIATIM_KAFKA_CONFIG": str(broker.client_config),
        "SERIATIM_SMTP": "",
        "AIRFLOW_CONN_SERIATIM_SPARK": json.dumps({**spark, "extra": {"token": SECRETS["extra"]}}),
        "AWS_SECRET_ACCESS_KEY": SECRETS["env"],
    }
