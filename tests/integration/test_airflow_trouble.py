"""Hard days of streams under a real Airflow: everything at once, platforms that fail, halts, repairs, open circuits.

All of it with secrets planted: the broker wants TLS and a login, the mail server a password, Airflow's connections have
one. The last test looks for them in all that was left behind. Long, so for `make test-full`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiosmtpd.smtp import AuthResult, LoginPassword
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable

from seriatim import client, config
from seriatim.embedded import broker as embedded
from tests.dags.bag import ROOT, write_stream
from tests.integration.guarded import GuardedBroker
from tests.integration.standalone import Standalone

pytestmark = pytest.mark.full
TOLD = "alerts = {to = ['ops@example.org']}"
BY_HAND = f"schedule = {{cron = ''}}\n{TOLD}"
MONTHLY = f"schedule = {{cron = '0 0 1 * *'}}\n{TOLD}"
"""A run by its schedule begins as soon as the DAG may run, and no other one for a while."""
SECRETS = {kind: f"canary-{kind}-{uuid.uuid4().hex}" for kind in ("sasl", "key", "spark", "smtp", "env", "extra")}
"""A Kafka password, the password of a TLS key, two of Airflow's connections, the environment, a connection's extra."""
LOGINS: list[bool] = []
SLOWLY = """
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


class Place(Standalone):
    """Airflow, and the broker and the streams that it works with."""

    def __init__(self, folder: Path, broker: GuardedBroker, **settings: str) -> None:
        super().__init__(folder, **settings)
        self.broker, self.lines = broker, set[str]()
        self.producer = Producer({"bootstrap.servers": broker.plain, "log_level": 0})
        self.admin = AdminClient({"bootstrap.servers": broker.plain, "log_level": 0})
        (folder / "home").mkdir()
        (folder / "home" / "jars").symlink_to(config.load().home / "jars")
        (folder / "expectations").mkdir()

    def write_streams(self) -> None:
        """All of them, before Airflow looks."""
        folder = self.folder / "streams"
        write_stream(folder, "busy", MONTHLY, "busy-topic")
        write_stream(folder, "four", BY_HAND, "four-topic")
        write_stream(folder, "gate", f"on_check_failure = 'stop'\n{BY_HAND}", "gate-topic")
        (self.folder / "expectations" / "gate.json").write_text(json.dumps(POSITIVE))
        (folder / "slowly.py").write_text(SLOWLY)
        (folder / "slow.toml").write_text(
            f"topics = 'slow-topic'\nmachine = 'slowly:Slow'\n{BY_HAND}\n"
            "output = {path = 'lake/slow'}\nslice = {messages_max = 10}\n"
        )

    def make_topics(self) -> None:
        """A topic for each; but for the slow one, a session in each partition that begins by a snapshot."""
        for name, partitions in {"busy": 2, "four": 4, "gate": 1, "slow": 1}.items():
            new = NewTopic(f"{name}-topic", num_partitions=partitions, replication_factor=1)
            self.admin.create_topics([new])[new.topic].result(timeout=30)
            first = {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "v": 0}]}
            if name != "slow":
                self.send(new.topic, [(p, first) for p in range(partitions)])

    def send(self, topic: str, messages: list[tuple[int, dict[str, Any]]]) -> None:
        """Messages by partition; a session for each."""
        for partition, value in messages:
            self.producer.produce(topic, json.dumps(value).encode(), f"session-{partition}", partition)
        assert self.producer.flush(60) == 0

    def seriatim(self, *words: str) -> str:
        """A command, as a person types it; what it printed."""
        return self._typed("seriatim", *words)

    def _typed(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def rows(self, stream: str, table: str = "records") -> list[dict[str, Any]]:
        """All rows of a table."""
        found = DeltaTable(self.folder / "lake" / stream / table).to_pyarrow_dataset().to_table(use_threads=False)
        return list(found.to_pylist())

    def offsets(self, stream: str) -> list[tuple[int, int]]:
        """Partition and offset of each record, sorted."""
        return sorted((row["partition"], row["offset"]) for row in self.rows(stream))

    def ran(self, dag: str, **conf: Any) -> tuple[str, str]:
        """A run by hand, to its end: its id, and how it ended."""
        run = self.trigger(dag, **conf)
        return run, self.run(dag, run)

    def ended(self, dag: str) -> list[dict[str, Any]]:
        """Runs that are over."""
        return [one for one in self.runs(dag) if one["state"] in ("success", "failed")]

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
        words = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return [one for one, line in words if str(ROOT / "spark_apps/fold.py") in line and line[-1] == stream]

    def keep_lines(self) -> None:
        """Remember every command line of this machine, for as long as Airflow runs."""
        while self.process is not None and self.process.poll() is None:
            for process in psutil.process_iter(["cmdline"]):
                self.lines.add(" ".join(process.info["cmdline"] or []))
            time.sleep(0.2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, broker_program: embedded.Program) -> Iterator[Place]:
    """One Airflow with its broker for all of it."""
    folder = tmp_path_factory.mktemp("trouble")
    broker = GuardedBroker(folder / "guarded" / "kafka", broker_program, SECRETS["sasl"], SECRETS["key"])
    airflow = tmp_path_factory.mktemp("airflow")
    made = Place(airflow, broker, **settings(broker))
    mail = {"disable_ssl": True, "disable_tls": True, "from_email": "seriatim@example.org"}
    server = {"host": "127.0.0.1", "port": made.mail_port, "login": "us", "password": SECRETS["smtp"], "extra": mail}
    made.environment["AIRFLOW_CONN_SMTP_DEFAULT"] = json.dumps({"conn_type": "smtp", **server})
    made.guard = {"authenticator": is_ours, "auth_require_tls": False}
    try:
        broker.start()
        made.make_topics()
        made.write_streams()
        made.start()
        threading.Thread(target=made.keep_lines, daemon=True).start()
        yield made
    finally:
        made.stop()
        broker.stop()


def settings(broker: GuardedBroker) -> dict[str, str]:
    """Where the secrets are planted."""
    spark = {"conn_type": "spark", "host": "local[2]", "login": "us", "password": SECRETS["spark"]}
    return {
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": broker.guarded,
        "SERIATIM_KAFKA_CONFIG": str(broker.client_config),
        "SERIATIM_SMTP": "",
        "AIRFLOW_CONN_SERIATIM_SPARK": json.dumps({**spark, "extra": {"token": SECRETS["extra"]}}),
        "AWS_SECRET_ACCESS_KEY": SECRETS["env"],
    }


def is_ours(_server: Any, _session: Any, _envelope: Any, _mechanism: str, given: Any) -> AuthResult:
    """The mail server's own word on a password."""
    good = isinstance(given, LoginPassword) and given.password.decode() == SECRETS["smtp"]
    LOGINS.append(good)
    return AuthResult(success=good, handled=good)


def test_everything_at_once_does_no_harm(place: Place) -> None:
    """A scheduled run, one by hand, a backfill by the form and one of Airflow: all green, no mail, the output right."""
    topic = "busy-topic"
    place.begin("busy")
    place.wait("the scheduled run begins", lambda: place.runs("busy"))
    for conf in ({}, {"action": "backfill", "partitions": [f"{topic}/0"]}):
        place.trigger("busy", **conf)
    place.backfill("busy", "2026-03-01")
    for number in range(1, 10):
        place.send(topic, [(p, {"type": "update", "seq": number + 1, "id": "a", "v": number}) for p in (0, 1)])
        time.sleep(5)
    place.wait("all of them end", lambda: len(place.ended("busy")) == 4)
    assert sorted(one["run_type"] for one in place.ended("busy")) == ["backfill", "manual", "manual", "scheduled"]
    assert {one["state"] for one in place.ended("busy")} == {"success"}
    for run in (one["dag_run_id"] for one in place.ended("busy")):
        assert "FencedError" not in "".join(
            place.log("busy", run, task) for task in ("plan", "fold", "check", "publish")
        )
    place.seriatim("run", "busy", "--check")
    assert place.offsets("busy") == [(p, offset) for p in (0, 1) for offset in range(10)]
    assert {row["v"] for row in place.rows("busy", "current")} == {9}
    place.seriatim("verify", "busy", "--kafka")
    assert place.mails("busy") == []


def test_a_backfill_of_airflow_with_nothing_to_do_says_so(place: Place) -> None:
    """It succeeds, commits nothing, and the log says what it is for and what folds a range again."""
    before, known = place.sequence("busy"), {one["dag_run_id"] for one in place.runs("busy")}
    place.backfill("busy", "2026-04-01")
    (run,) = {one["dag_run_id"] for one in place.runs("busy")} - known
    assert place.run("busy", run) == "success"
    log = place.log("busy", run, "fold")
    assert "trigger this DAG with action = backfill" in log
    assert "busy: nothing new" in log
    assert place.sequence("busy") == before


def test_a_platform_that_fails_is_tried_again_and_goes_on_from_the_ledger(place: Place) -> None:
    """Spark's JVM is killed after a commit: the second try folds the rest alone; nobody is mailed."""
    place.send("slow-topic", [(0, {"v": number}) for number in range(30)])
    place.begin("slow")
    run = place.trigger("slow")
    table = place.folder / "lake" / "slow" / "records"
    place.wait("a slice is committed", lambda: DeltaTable.is_deltatable(str(table)) and place.rows("slow"))
    for process in place.drivers("slow"):
        if process.name() == "java":
            process.kill()
    done = len(place.rows("slow"))
    assert place.run("slow", run) == "success"
    assert place.tries("slow", run, "fold") == 2
    assert 10 <= done < 30
    assert f"{30 - done} messages → {30 - done} records" in place.log("slow", run, "fold", 2)
    assert sorted((row["offset"], row["n"]) for row in place.rows("slow")) == [(n, n + 1) for n in range(30)]
    assert place.mails("slow") == []


def test_a_broker_that_is_away_for_a_while_is_waited_for(place: Place) -> None:
    """The first task fails as platform trouble and is tried again; when the broker is back the run is green."""
    place.send("slow-topic", [(0, {"v": 30})])
    place.broker.stop()
    try:
        run = place.trigger("slow")
        place.wait("it is to be tried again", lambda: place.tasks("slow", run)["plan"] == "up_for_retry")
    finally:
        place.broker.start()
    assert place.run("slow", run) == "success"
    assert "PlatformError" in place.log("slow", run, "plan", 1)
    assert len(place.rows("slow")) == 31
    assert place.mails("slow") == []


def test_one_partition_of_four_halts_and_three_are_published(place: Place) -> None:
    """The run is red and not tried again; what is good is checked and in `current`; one mail comes."""
    topic = "four-topic"
    place.begin("four")
    assert place.ran("four")[1] == "success"
    place.producer.produce(topic, b"no JSON", None, 2)
    place.send(topic, [(p, {"type": "update", "seq": 2, "id": "a", "v": 7}) for p in range(4)])
    run, state = place.ran("four")
    states = place.tasks("four", run)
    assert (state, states["fold"], states["check"], states["publish"]) == ("failed", "failed", "success", "success")
    assert states["done"] == "upstream_failed"
    assert place.tries("four", run, "fold") == 1
    found = {row["session"]: row["v"] for row in place.rows("four", "current")}
    assert found == {"session-0": 7, "session-1": 7, "session-2": 0, "session-3": 7}
    told = place.api("assets/events?order_by=-timestamp")["asset_events"][0]
    assert (told["source_run_id"], {part["partition"] for part in told["extra"]["partitions"]}) == (run, {0, 1, 3})
    place.wait("a mail comes", lambda: place.mails("four"))
    assert place.mails("four") == [f"[seriatim] four: PoisonError in {topic}/2 at offset 1"]


def answered(place: Place, answer: str) -> str:
    """A run of the repair DAG, with what the mail says to paste and what goes on without the message; to its end."""
    text = place.text("four")
    values = json.loads(text[text.index('{"stream"') : text.index("}", text.index('{"stream"')) + 1])
    run = place.trigger("seriatim_repair", **values, forward=True)
    place.wait("it asks", lambda: place.tasks("seriatim_repair", run)["approve"] == "awaiting_input")
    path = f"dags/seriatim_repair/dagRuns/{run}/taskInstances/approve/-1/hitlDetails"
    asked = place.api(path)
    assert asked["subject"] == "Repair four?"
    assert "four-topic/2  goes on at offset 2, without 1 offsets [1, 2)" in asked["body"]
    place.api(path, {"chosen_options": [answer], "params_input": {}}, "PATCH")
    assert place.run("seriatim_repair", run) == "success"
    return run


def test_a_repair_that_is_rejected_changes_nothing_and_says_so(place: Place) -> None:
    """Nothing is committed, and the log of the question says what became of it."""
    place.begin("seriatim_repair")
    before = place.sequence("four")
    run = answered(place, "Reject")
    assert place.tasks("seriatim_repair", run)["apply"] == "skipped"
    assert place.sequence("four") == before
    assert "rejected: nothing was changed" in place.log("seriatim_repair", run, "approve")


def test_a_repair_that_is_approved_is_applied(place: Place) -> None:
    """The partition goes on, the next run folds what waited, and the end of it is mailed."""
    run = answered(place, "Approve")
    assert place.tasks("seriatim_repair", run)["apply"] == "success"
    assert place.ran("four")[1] == "success"
    found = {row["session"]: row["v"] for row in place.rows("four", "current")}
    assert found == {f"session-{p}": 7 for p in range(4)}
    place.seriatim("verify", "four", "--kafka")
    place.seriatim("watch", "four", "--once", "--no-mail")


def test_a_replay_by_the_form_goes_into_scratch_and_changes_nothing(place: Place) -> None:
    """The log names the folder; it has the partition's records, and the ledger has no entry of it."""
    before = place.sequence("four")
    run, state = place.ran("four", action="replay", partitions=["four-topic/0"])
    assert state == "success"
    (folder,) = (place.folder / "home" / "scratch" / "four").iterdir()
    assert str(folder) in place.log("four", run, "fold")
    made = DeltaTable(folder / "records").to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
    ours = [row for row in place.rows("four") if row["partition"] == 0]
    assert [(row["offset"], row["v"]) for row in made] == sorted((row["offset"], row["v"]) for row in ours)
    assert place.sequence("four") == before


def test_an_open_circuit_stops_the_stream_until_it_is_accepted(place: Place) -> None:
    """With on_check_failure = "stop" the next run is refused, with the command that goes on; then it goes on."""
    topic = "gate-topic"
    place.begin("gate")
    place.send(topic, [(0, {"type": "update", "seq": 2, "id": "a", "v": -5})])
    run, state = place.ran("gate")
    assert (state, place.tasks("gate", run)["check"]) == ("failed", "failed")
    place.wait("a mail comes", lambda: place.mails("gate"))
    place.send(topic, [(0, {"type": "update", "seq": 3, "id": "a", "v": 6})])
    refused, state = place.ran("gate")
    assert (state, place.tries("gate", refused, "plan")) == ("failed", 1)
    log = place.log("gate", refused, "plan")
    assert 'the stream says on_check_failure = "stop"' in log
    (way_out,) = re.findall(r"seriatim (accept gate --sequence \d+) --because", log)
    assert place.offsets("gate") == [(0, 0), (0, 1)]
    place.seriatim(*way_out.split(), "--because", "a rebate")
    assert place.ran("gate")[1] == "success"
    assert {row["v"] for row in place.rows("gate", "current")} == {6}
    assert len([one for one in place.mails("gate") if "over: " not in one]) == 1


def test_planted_secrets_are_nowhere(place: Place) -> None:
    """Not in logs, databases (XCom, rendered templates), command lines, output, reports, notes or mails."""
    places: dict[str, bytes] = {"command lines": "\n".join(place.lines).encode()}
    places["mails"] = b"\n".join(bytes(mail) for mail in place.post.mails)
    places |= {str(path): path.read_bytes() for path in place.folder.rglob("*") if path.is_file()}
    assert len(place.lines) > 20
    assert any("spark_apps/fold.py" in line for line in place.lines)
    assert place.post.mails
    assert (len(LOGINS), all(LOGINS)) == (len(place.post.mails), True)
    assert any(path.endswith("airflow.db") for path in places)
    assert any("/logs/" in path for path in places)
    assert any("/reports/" in path for path in places)
    opened = client.for_java(client.read(place.broker.client_config))["ssl.keystore.key"]
    for kind, secret in {**SECRETS, "key opened": opened.splitlines()[1]}.items():
        assert [where for where, content in places.items() if secret.encode() in content] == [], kind
