"""A stream under a real Airflow: scheduler, broker, Spark, and mails received on loopback. One
Airflow for the module.

Of the seven ways a run can die, one is that of a stream's own DAG, and the others are DAGs of their
own with a stream's alert. The stream `orders` runs once by its schedule, as soon as it is let run,
and then by hand: no test waits for the clock.
"""

from __future__ import annotations

import json
import time
import urllib.error
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable

from seriatim import config, context, stream_files
from seriatim.embedded.broker import BrokerInfo
from tests.dags.bag import write_stream
from tests.integration.standalone import Standalone

WAYS = {
    "exception": "raise ValueError('planted')",
    "exit": "",  # a stream's own DAG: its fold ends with code 2
    "timeout": "import time; time.sleep(600)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "run_timeout": "import time; time.sleep(600)",
    "marked": "import time; time.sleep(600)",
    "broken_callback": "raise ValueError('planted')",
}
SAMPLE = ("killed", "exit")
PARTITIONS = 4
TOLD = "alerts = {to = ['ops@example.org']}"
BY_HAND = f"schedule = {{cron = ''}}\n{TOLD}"
DAGS = '''
"""DAGs that die, each in its way, with the alert of a stream."""
from datetime import timedelta
from airflow.sdk import DAG, task
from seriatim.airflow.failure_callback import FailureCallback

def broken(context):
    raise RuntimeError("the task's own callback is broken")

'''
ONE = """
with DAG("die_{way}", schedule=None, on_failure_callback=FailureCallback(["s_{way}"], {folder!r}){more}) as dag_{way}:
    @task(task_id="work"{task})
    def work():
        {code}
    work()
"""


SLOW = """
import time
from msgspec import Struct
from seriatim import Machine

class State(Struct):
    n: int = 0

class Slow(Machine[State, State, State]):
    def start(self, session):
        return State()
    def apply(self, state, message):
        time.sleep(600)
        return []
"""


def dag_of(way: str) -> str:
    """The DAG that dies in this way."""
    return "s_exit" if way == "exit" else f"die_{way}"


def dying(folder: str, way: str, name: str = "") -> str:
    """A DAG that dies in this way."""
    more = ", dagrun_timeout=timedelta(seconds=5)" if way == "run_timeout" else ""
    task = ", execution_timeout=timedelta(seconds=5)" if way == "timeout" else ""
    task += ", on_failure_callback=broken" if way == "broken_callback" else ""
    return ONE.format(way=name or way, folder=folder, more=more, task=task, code=WAYS[way])


def send(broker: BrokerInfo, topic: str, messages: list[tuple[int, dict[str, Any]]]) -> None:
    """Messages by partition; a session for each."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for partition, value in messages:
        producer.produce(topic, json.dumps(value).encode(), f"session-{partition}", partition)
    assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def topic(broker: BrokerInfo) -> str:
    """Four partitions, a session in each, which begins by a snapshot."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(name, num_partitions=PARTITIONS, replication_factor=1)])[
        name
    ].result(timeout=120)
    first = {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "v": 0}]}
    send(broker, name, [(number, first) for number in range(PARTITIONS)])
    return name


@pytest.fixture(scope="module")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, broker: BrokerInfo, topic: str, full: bool
) -> Iterator[Standalone]:
    """An Airflow with a DAG for each way to die, and one for the stream `orders`."""
    servers = {"SERIATIM_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers}
    made = Standalone(tmp_path_factory.mktemp("airflow"), **servers)
    (made.folder / "home").mkdir()
    (made.folder / "home" / "jars").symlink_to(config.load_settings().home / "jars")
    dags = DAGS
    for way in WAYS if full else SAMPLE:
        write_stream(made.folder / "streams", f"s_{way}", BY_HAND)
        dags += dying(str(made.folder), way) if way != "exit" else ""
    (made.folder / "streams" / "s_exit.toml").write_text(
        f"topics = '{topic}'\nmachine = 'gone:Gone'\noutput = {{path = 'lake/gone'}}\n{BY_HAND}\n"
    )
    (made.dags / "dying.py").write_text(dags)
    write_stream(
        made.folder / "streams", "orders", f"schedule = {{cron = '0 0 1 * *'}}\n{TOLD}", topic
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def deaths(airflow: Standalone) -> dict[str, str]:
    """Runs that die in the ways of the sample, at once, while the stream `orders` has its own."""
    return {way: begun(airflow, way) for way in SAMPLE}


def begun(airflow: Standalone, way: str) -> str:
    """A run that dies in this way."""
    airflow.begin(dag_of(way))
    return airflow.trigger(dag_of(way))


def records(airflow: Standalone) -> list[tuple[int, int, str]]:
    """Partition, offset and op of all records of `orders`."""
    table = DeltaTable(airflow.folder / "lake" / "orders" / "records")
    rows = table.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
    return sorted((row["partition"], row["offset"], row["op"]) for row in rows)


def ledger(airflow: Standalone) -> tuple[int, dict[str, int]]:
    """The last entry of `orders`, and the epoch of each partition."""
    head = context.ledger(stream_files.load_stream("orders", airflow.folder / "streams")).head(
        "orders"
    )
    assert head is not None
    return head.ledger.sequence, {place: one.epoch for place, one in head.ledger.partitions.items()}


def test_a_stream_file_is_all_it_takes(airflow: Standalone, deaths: dict[str, str]) -> None:
    """Its DAG appears and a scheduled run folds, checks and publishes; the log has our lines and no
    Spark noise.
    """
    assert set(SAMPLE) <= set(deaths)
    airflow.begin("orders")
    run = str(
        airflow.wait("a scheduled run begins", lambda: airflow.runs("orders"))[0]["dag_run_id"]
    )
    assert run.startswith("scheduled__")
    assert airflow.run("orders", run) == "success"
    assert set(airflow.tasks("orders", run).values()) == {"success"}
    assert records(airflow) == [(number, 0, "snapshot") for number in range(PARTITIONS)]
    log = airflow.log("orders", run, "fold")
    assert "4 messages → 4 records in 1 slice" in log
    assert "Traceback" not in log
    assert "WARN" not in log
    published = airflow.api("assets/events")["asset_events"]
    assert {part["until"] for part in published[0]["extra"]["partitions"]} == {1}


def test_a_finding_fails_one_run_and_is_mailed_once(
    airflow: Standalone, broker: BrokerInfo, topic: str
) -> None:
    """It is not retried; the other partitions are checked and published; the next run is green with
    a banner.
    """
    send(broker, topic, [(1, {"type": "update", "seq": 9, "id": "a", "v": 1})])
    send(broker, topic, [(p, {"type": "update", "seq": 2, "id": "a", "v": 1}) for p in (0, 2, 3)])
    run = airflow.trigger("orders")
    assert airflow.run("orders", run) == "failed"
    later = airflow.trigger("orders")
    states = airflow.tasks("orders", run)
    assert (states["fold"], states["check"], states["publish"]) == ("failed", "success", "success")
    airflow.wait("a mail comes", lambda: airflow.mails("orders"))
    subject, *followers = airflow.mails("orders")
    assert all(follower.startswith("Re:") for follower in followers)
    assert subject == f"[seriatim] orders: GapError in {topic}/1 at offset 1"
    text = airflow.text("orders")
    for said in (
        "session-1",
        "seriatim ",
        f"/dags/orders/runs/{run[:6]}",
        # The numbers between never came: no repair is offered, which would find the same gap again.
        "quarantine release",
        "reports/",
    ):
        assert said in text
    assert airflow.run("orders", later) == "success"
    assert "1 session in quarantine" in airflow.log("orders", later, "fold")
    assert [one for one in records(airflow) if one[1] == 1] == [(p, 1, "update") for p in (0, 2, 3)]
    mails = airflow.mails("orders")
    assert len([mail for mail in mails if not mail.startswith("Re:")]) == 1
    tries = airflow.api(f"dags/orders/dagRuns/{run}/taskInstances/fold")["try_number"]
    assert tries == 1


def test_what_may_not_be_asked_is_refused_at_the_trigger(airflow: Standalone) -> None:
    """With what is wrong in the answer."""
    for conf in ({"action": "rm"}, {"topics": ["$(id)"]}, {"from": "-1"}, {"messages_max": 0}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            airflow.trigger("orders", **conf)
        assert refused.value.code in (400, 422)


@pytest.mark.full
def test_what_a_schema_cannot_say_is_refused_by_plan(airflow: Standalone, topic: str) -> None:
    """A range that goes backward; the log says why. Nothing is checked or published, no asset has an
    event, and nobody is mailed: who triggered it sees it.
    """
    events_before = airflow.api("assets/events")["total_entries"]
    mails_before = airflow.mails("orders")
    run = airflow.trigger(
        "orders", action="backfill", partitions=[f"{topic}/0"], **{"from": "5", "until": "4"}
    )
    assert airflow.run("orders", run) == "failed"
    states = airflow.tasks("orders", run)
    assert states.pop("plan") == "failed"
    assert set(states.values()) == {"upstream_failed"}
    assert "until: 4 is not after from (5)" in airflow.log("orders", run, "plan")
    assert airflow.api("assets/events")["total_entries"] == events_before
    # The callback has left its note and a watch has read it, as for any other failed run.
    outbox = airflow.folder / "home" / "outbox"
    airflow.wait("the notes are read", lambda: not list(outbox.glob("orders-*/notes/*")))
    assert airflow.mails("orders") == mails_before


@pytest.mark.full
def test_a_stream_whose_topics_are_not_there_yet_waits(airflow: Standalone) -> None:
    """Its run is skipped and not red, the log says what it waits for, and nobody is mailed."""
    write_stream(airflow.folder / "streams", "early", BY_HAND, "not-there-yet")
    airflow.begin("early")
    run = airflow.trigger("early")
    assert airflow.run("early", run) == "success"
    assert set(airflow.tasks("early", run).values()) == {"skipped"}
    assert "early: waiting for topics: no topic matches 'not-there-yet' yet" in airflow.log(
        "early", run, "plan"
    )
    assert airflow.mails("early") == []


@pytest.mark.full
def test_a_backfill_of_one_partition_and_an_offset_range(airflow: Standalone, topic: str) -> None:
    """By the form; the records are the same, replaced in one commit that raised the epoch of that
    partition alone.
    """
    before, (last, epochs) = records(airflow), ledger(airflow)
    run = airflow.trigger(
        "orders", action="backfill", partitions=[f"{topic}/0"], **{"from": "0", "until": "2"}
    )
    assert airflow.run("orders", run) == "success"
    assert records(airflow) == before
    file = stream_files.load_stream("orders", airflow.folder / "streams")
    entries = [manifest.entry for manifest in context.ledger(file).entries("orders", last)]
    (repair,) = [entry for entry in entries if entry.kind == "repair"]
    assert [str(change.partition) for change in repair.changes] == [f"{topic}/0"]
    assert ledger(airflow)[1] == {**epochs, f"{topic}/0": epochs[f"{topic}/0"] + 1}


def marked(airflow: Standalone, dag: str, run: str, task: str) -> None:
    """A person marks a task as failed while it runs."""
    airflow.wait("it runs", lambda: airflow.tasks(dag, run)[task] == "running")
    airflow.api(f"dags/{dag}/dagRuns/{run}/taskInstances/{task}", {"new_state": "failed"}, "PATCH")


@pytest.mark.parametrize(
    "way", [way if way in SAMPLE else pytest.param(way, marks=pytest.mark.full) for way in WAYS]
)
def test_however_a_run_dies_one_mail_comes(
    airflow: Standalone, deaths: dict[str, str], way: str
) -> None:
    """With the stream, the run, a link to it, and what to type next."""
    run, dag = deaths.get(way) or begun(airflow, way), dag_of(way)
    if way == "marked":
        marked(airflow, dag, run, "work")
    assert airflow.run(dag, run) == "failed"
    airflow.wait("a mail comes", lambda: airflow.mails(f"s_{way}"))
    text = airflow.text(f"s_{way}")
    assert run in text
    assert (
        "put gone.py beside the stream file" if way == "exit" else f"seriatim status s_{way}"
    ) in text
    assert f"http://127.0.0.1:{airflow.port}/dags/{dag}/runs/" in text
    time.sleep(5)
    assert len(airflow.mails(f"s_{way}")) == 1


@pytest.mark.full
def test_a_mail_server_that_is_down_loses_nothing(airflow: Standalone) -> None:
    """The mail waits in the outbox, and the watch DAG sends it when the server is back."""
    airflow.mail_down()
    try:
        write_stream(airflow.folder / "streams", "s_again", BY_HAND)
        (airflow.dags / "again.py").write_text(
            DAGS + dying(str(airflow.folder), "exception", "again")
        )
        airflow.begin("die_again")
        assert airflow.run("die_again", airflow.trigger("die_again")) == "failed"
        desks = airflow.folder / "home" / "outbox"
        airflow.wait(
            "a mail waits",
            lambda: [p for p in desks.glob("s_again-*/state/*.json") if "subject" in p.read_text()],
        )
    finally:
        airflow.mail_up()
    airflow.begin("seriatim_watch")
    airflow.run("seriatim_watch", airflow.trigger("seriatim_watch"))
    airflow.wait("the mail comes", lambda: airflow.mails("s_again"))
    assert len(airflow.mails("s_again")) == 1


def slow_run(airflow: Standalone, stream: str, topic: str) -> str:
    """A run of a new stream whose fold takes ten minutes."""
    (airflow.folder / "streams" / "slowly.py").write_text(SLOW)
    (airflow.folder / "streams" / f"{stream}.toml").write_text(
        f"topics = '{topic}'\nmachine = 'slowly:Slow'\noutput = {{path = 'lake/{stream}'}}\n{BY_HAND}\n"
    )
    airflow.begin(stream)
    return airflow.trigger(stream)


def drivers(airflow: Standalone, stream: str) -> list[psutil.Process]:
    """The processes of this Airflow that fold a stream."""
    fold_processes = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "spark_apps/fold.py" not in command or f"run {stream}" not in command:
            continue
        # Processes end at any moment, and another test run may have a stream of this name.
        with suppress(psutil.Error):
            if process.environ().get("AIRFLOW_HOME") == airflow.environment["AIRFLOW_HOME"]:
                fold_processes.append(process)
    return fold_processes


@pytest.mark.full
def test_a_run_that_is_marked_failed_is_told_by_watch(airflow: Standalone, topic: str) -> None:
    """Airflow calls no callback when a person marks a whole run failed; the next watch tells it,
    once.
    """
    run = slow_run(airflow, "stopped", topic)
    # A task that is ended before its own code begins leaves no note. Airflow calls it running already.
    airflow.wait("it folds", lambda: drivers(airflow, "stopped"))
    airflow.api(f"dags/stopped/dagRuns/{run}", {"state": "failed"}, "PATCH")
    notes = airflow.folder / "home" / "outbox"
    airflow.wait(
        "the fold has left its note", lambda: list(notes.glob("stopped-*/notes/*-task-*.json"))
    )
    airflow.begin("seriatim_watch")
    for _ in range(2):
        airflow.run("seriatim_watch", airflow.trigger("seriatim_watch"))
    airflow.wait("the mail comes", lambda: airflow.mails("stopped"))
    assert len(airflow.mails("stopped")) == 1
    text = airflow.text("stopped")
    assert run in text
    assert "probably marked failed by hand" in text


@pytest.mark.full
def test_a_fold_that_is_marked_failed_takes_its_driver_along(
    airflow: Standalone, topic: str
) -> None:
    """The driver and spark-submit's JVM end; nobody goes on folding behind a red task. One mail
    comes of it.
    """
    run = slow_run(airflow, "slow", topic)

    airflow.wait("it folds", lambda: drivers(airflow, "slow"))
    marked(airflow, "slow", run, "fold")
    airflow.wait("the driver is gone", lambda: not drivers(airflow, "slow"))
    assert airflow.run("slow", run) == "failed"
    airflow.wait("a mail comes", lambda: airflow.mails("slow"))
    time.sleep(5)
    assert len(airflow.mails("slow")) == 1
