"""Hard days of streams under a real Airflow: everything at once, platforms that fail, halts,
repairs, open circuits.

All of it with secrets planted: the broker wants TLS and a login, the mail server a password,
Airflow's connections have one. The last test looks for them in all that was left behind. Long, so
for `make test-full`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiosmtpd.smtp import AuthResult, LoginPassword
from deltalake import DeltaTable

from seriatim.embedded import broker as embedded
from seriatim.kafka import client
from tests import browser
from tests.integration.guarded import GuardedBroker
from tests.integration.troubled import SECRETS, TroubledAirflow, settings

pytestmark = pytest.mark.full
LOGINS: list[bool] = []
PLANNED = "four-topic/2  goes on at offset 2, without 1 offset [1, 2)"
"""A line of the plan that a person is asked to approve."""


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, broker_program: embedded.KafkaProgram
) -> Iterator[TroubledAirflow]:
    """One Airflow with its broker for all of it."""
    folder = tmp_path_factory.mktemp("trouble")
    broker = GuardedBroker(
        folder / "guarded" / "kafka", broker_program, SECRETS["sasl"], SECRETS["key"]
    )
    airflow = tmp_path_factory.mktemp("airflow")
    made = TroubledAirflow(airflow, broker, **settings(broker))
    mail = {"disable_ssl": True, "disable_tls": True, "from_email": "seriatim@example.org"}
    server = {
        "host": "127.0.0.1",
        "port": made.mail_port,
        "login": "us",
        "password": SECRETS["smtp"],
        "extra": mail,
    }
    made.environment["AIRFLOW_CONN_SMTP_DEFAULT"] = json.dumps({"conn_type": "smtp", **server})
    made.guard = {"authenticator": is_ours, "auth_require_tls": False}
    try:
        broker.start()
        made.make_topics()
        made.write_streams()
        made.start()
        threading.Thread(target=made.collect_command_lines, daemon=True).start()
        yield made
    finally:
        made.stop()
        broker.stop()


def is_ours(_server: Any, _session: Any, _envelope: Any, _mechanism: str, given: Any) -> AuthResult:
    """The mail server's own word on a password."""
    good = isinstance(given, LoginPassword) and given.password.decode() == SECRETS["smtp"]
    LOGINS.append(good)
    return AuthResult(success=good, handled=good)


def test_everything_at_once_does_no_harm(place: TroubledAirflow) -> None:
    """A scheduled run, one by hand, a backfill by the form and one of Airflow: all green, no mail,
    the output right.
    """
    topic = "busy-topic"
    place.begin("busy")
    place.wait("the scheduled run begins", lambda: place.runs("busy"))
    for conf in ({}, {"action": "backfill", "partitions": [f"{topic}/0"]}):
        place.trigger("busy", **conf)
    place.backfill("busy", "2026-03-01")
    for number in range(1, 10):
        place.send(
            topic,
            [(p, {"type": "update", "seq": number + 1, "id": "a", "v": number}) for p in (0, 1)],
        )
        time.sleep(5)
    place.wait("all of them end", lambda: len(place.ended_runs("busy")) == 4)
    assert sorted(one["run_type"] for one in place.ended_runs("busy")) == [
        "backfill",
        "manual",
        "manual",
        "scheduled",
    ]
    assert {one["state"] for one in place.ended_runs("busy")} == {"success"}
    for run in (one["dag_run_id"] for one in place.ended_runs("busy")):
        assert "FencedError" not in "".join(
            place.log("busy", run, task) for task in ("plan", "fold", "check", "publish")
        )
    place.seriatim("run", "busy", "--check")
    assert place.offsets("busy") == [(p, offset) for p in (0, 1) for offset in range(10)]
    assert {row["v"] for row in place.rows("busy", "current")} == {9}
    place.seriatim("verify", "busy", "--kafka")
    assert place.mails("busy") == []


def test_a_backfill_of_airflow_with_nothing_to_do_says_so(place: TroubledAirflow) -> None:
    """It succeeds, commits nothing, and the log says what it is for and what folds a range again."""
    before, known = place.sequence("busy"), {one["dag_run_id"] for one in place.runs("busy")}
    place.backfill("busy", "2026-04-01")
    (run,) = {one["dag_run_id"] for one in place.runs("busy")} - known
    assert place.run("busy", run) == "success"
    log = place.log("busy", run, "fold")
    assert "trigger this DAG with action = backfill" in log
    assert "busy: nothing new" in log
    assert place.sequence("busy") == before


def test_a_platform_that_fails_is_tried_again_and_goes_on_from_the_ledger(
    place: TroubledAirflow,
) -> None:
    """Spark's JVM is killed after a commit: the second try folds the rest alone; nobody is mailed."""
    place.send("slow-topic", [(0, {"v": number}) for number in range(30)])
    place.begin("slow")
    run = place.trigger("slow")
    table = place.folder / "lake" / "slow" / "records"
    place.wait(
        "a slice is committed", lambda: DeltaTable.is_deltatable(str(table)) and place.rows("slow")
    )
    for process in place.drivers("slow"):
        if process.name() == "java":
            process.kill()
    done = len(place.rows("slow"))
    assert place.run("slow", run) == "success"
    assert place.tries("slow", run, "fold") == 2
    assert 10 <= done < 30
    assert f"{30 - done} messages → {30 - done} records" in place.log("slow", run, "fold", 2)
    assert sorted((row["offset"], row["n"]) for row in place.rows("slow")) == [
        (n, n + 1) for n in range(30)
    ]
    assert place.mails("slow") == []


def test_a_broker_that_is_away_for_a_while_is_waited_for(place: TroubledAirflow) -> None:
    """The first task fails as platform trouble and is tried again; when the broker is back the run
    is green.
    """
    place.send("slow-topic", [(0, {"v": 30})])
    place.broker.stop()
    try:
        run = place.trigger("slow")
        place.wait(
            "it is to be tried again", lambda: place.tasks("slow", run)["plan"] == "up_for_retry"
        )
    finally:
        place.broker.start()
    assert place.run("slow", run) == "success"
    assert "PlatformError" in place.log("slow", run, "plan", 1)
    assert len(place.rows("slow")) == 31
    assert place.mails("slow") == []


def test_one_partition_of_four_halts_and_three_are_published(place: TroubledAirflow) -> None:
    """The run is red and not tried again; what is good is checked and in `current`; one mail comes."""
    topic = "four-topic"
    place.begin("four")
    assert place.run_to_end("four")[1] == "success"
    place.producer.produce(topic, b"no JSON", None, 2)
    place.send(topic, [(p, {"type": "update", "seq": 2, "id": "a", "v": 7}) for p in range(4)])
    run, state = place.run_to_end("four")
    states = place.tasks("four", run)
    assert (state, states["fold"], states["check"], states["publish"]) == (
        "failed",
        "failed",
        "success",
        "success",
    )
    assert states["done"] == "upstream_failed"
    assert place.tries("four", run, "fold") == 1
    found = {row["session"]: row["v"] for row in place.rows("four", "current")}
    assert found == {"session-0": 7, "session-1": 7, "session-2": 0, "session-3": 7}
    told = place.api("assets/events?order_by=-timestamp")["asset_events"][0]
    assert (told["source_run_id"], {part["partition"] for part in told["extra"]["partitions"]}) == (
        run,
        {0, 1, 3},
    )
    place.wait("a mail comes", lambda: place.mails("four"))
    assert place.mails("four") == [f"[seriatim] four: PoisonError in {topic}/2 at offset 1"]


def answered(place: TroubledAirflow, answer: str) -> str:
    """A run of the repair DAG, with what the mail says to paste and what goes on without the
    message; to its end.
    """
    # A later mail may say something else, for example that a run is over: the values are in the mail
    # about the finding.
    texts = [place.text_of(mail) for mail in place.mails_about("four")]
    text = next(text for text in reversed(texts) if '{"stream"' in text)
    values = json.loads(
        text[text.index('{"stream"') : text.index("}", text.index('{"stream"')) + 1]
    )
    run = place.trigger("seriatim_repair", **values, forward=True)
    place.wait(
        "it asks", lambda: place.tasks("seriatim_repair", run)["approve"] == "awaiting_input"
    )
    path = f"dags/seriatim_repair/dagRuns/{run}/taskInstances/approve/-1/hitlDetails"
    asked = place.api(path)
    assert asked["subject"] == "Repair four?"
    assert PLANNED in asked["body"]
    if browser.found():
        assert_line_breaks_are_kept(place, run)

    def is_answered() -> bool:
        # A busy server may take the answer and then not say so: a second one would be refused.
        if not place.api(path)["response_received"]:
            place.api(path, {"chosen_options": [answer], "params_input": {}}, "PATCH")
        return True

    place.wait("the answer is taken", is_answered)
    assert place.run("seriatim_repair", run) == "success", logs(place, "seriatim_repair", run)
    return run


def logs(place: TroubledAirflow, dag: str, run: str) -> str:
    """What the tasks of a run said, for whoever reads why a test failed."""
    texts = []
    for task, state in place.tasks(dag, run).items():
        if state in ("success", "failed", "up_for_retry"):
            texts.append(
                f"{task} {state}:\n{place.log(dag, run, task, place.tries(dag, run, task))}"
            )
    return "\n".join(texts)


def assert_line_breaks_are_kept(place: TroubledAirflow, run: str) -> None:
    """The plan is the one text that a person must judge: in a real browser each of its lines is one."""
    page = browser.Browser(place.folder / f"browser-{run}")
    try:
        page.size(1280, 900)
        page.open(
            f"http://127.0.0.1:{place.port}/dags/seriatim_repair/runs/{run}/tasks/approve/required_actions"
        )
        page.wait(f"document.body.innerText.includes({json.dumps(PLANNED)})")
        lines = page.text().splitlines()
        page.picture(place.folder / "approval.png")
    finally:
        page.close()
    planned = lines.index(PLANNED)
    assert (
        lines[planned - 2] == f"As of entry {place.sequence('four')}, this is done in one commit:"
    )
    # Each fact has a line of its own, behind its label.
    assert [line[2:11].strip() for line in lines[planned + 1 : planned + 3]] == ["waits", "cause"]


def test_a_repair_that_is_rejected_changes_nothing_and_says_so(place: TroubledAirflow) -> None:
    """Nothing is committed, and the log of the question says what became of it."""
    place.begin("seriatim_repair")
    before = place.sequence("four")
    run = answered(place, "Reject")
    assert place.tasks("seriatim_repair", run)["apply"] == "skipped"
    assert place.sequence("four") == before
    assert "rejected: nothing was changed" in place.log("seriatim_repair", run, "approve")


def test_a_repair_that_is_approved_is_applied(place: TroubledAirflow) -> None:
    """The partition goes on, the next run folds what waited, and the end of it is mailed."""
    run = answered(place, "Approve")
    assert place.tasks("seriatim_repair", run)["apply"] == "success"
    next_run, state = place.run_to_end("four")
    assert state == "success", logs(place, "four", next_run)
    found = {row["session"]: row["v"] for row in place.rows("four", "current")}
    assert found == {f"session-{p}": 7 for p in range(4)}
    place.seriatim("verify", "four", "--kafka")
    place.seriatim("watch", "four", "--once", "--no-mail")


def test_a_replay_by_the_form_goes_into_scratch_and_changes_nothing(place: TroubledAirflow) -> None:
    """The log names the folder; it has the partition's records, and the ledger has no entry of it."""
    before = place.sequence("four")
    run, state = place.run_to_end("four", action="replay", partitions=["four-topic/0"])
    assert state == "success"
    (folder,) = (place.folder / "home" / "scratch" / "four").iterdir()
    assert str(folder) in place.log("four", run, "fold")
    made = (
        DeltaTable(folder / "records").to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
    )
    ours = [row for row in place.rows("four") if row["partition"] == 0]
    assert [(row["offset"], row["v"]) for row in made] == sorted(
        (row["offset"], row["v"]) for row in ours
    )
    assert place.sequence("four") == before


def test_an_open_circuit_stops_the_stream_until_it_is_accepted(place: TroubledAirflow) -> None:
    """With on_check_failure = "stop" the next run is refused, with the command that goes on; then
    it goes on.
    """
    topic = "gate-topic"
    place.begin("gate")
    place.send(topic, [(0, {"type": "update", "seq": 2, "id": "a", "v": -5})])
    run, state = place.run_to_end("gate")
    assert (state, place.tasks("gate", run)["check"]) == ("failed", "failed")
    place.wait("a mail comes", lambda: place.mails("gate"))
    place.send(topic, [(0, {"type": "update", "seq": 3, "id": "a", "v": 6})])
    refused, state = place.run_to_end("gate")
    assert (state, place.tries("gate", refused, "plan")) == ("failed", 1)
    log = place.log("gate", refused, "plan")
    assert 'the stream says on_check_failure = "stop"' in log
    (way_out,) = re.findall(r"seriatim (accept gate --sequence \d+) --because", log)
    assert place.offsets("gate") == [(0, 0), (0, 1)]
    place.seriatim(*way_out.split(), "--because", "a rebate")
    assert place.run_to_end("gate")[1] == "success"
    assert {row["v"] for row in place.rows("gate", "current")} == {6}
    assert len([one for one in place.mails("gate") if "over: " not in one]) == 1


def test_an_open_circuit_holds_publishing_until_it_is_accepted(place: TroubledAirflow) -> None:
    """By default folding goes on, and `current` stays as it was until a person accepts; then the
    next run publishes.
    """
    topic = "keep-topic"
    place.begin("keep")
    assert place.run_to_end("keep")[1] == "success"
    for number, value in ((2, -5), (3, 6)):
        place.send(topic, [(0, {"type": "update", "seq": number, "id": "a", "v": value})])
        run, state = place.run_to_end("keep")
        assert (number, state, place.tasks("keep", run)["fold"]) == (
            number,
            "failed" if value < 0 else state,
            "success",
        )
        assert {row["v"] for row in place.rows("keep", "current")} == {0}
    assert place.offsets("keep") == [(0, 0), (0, 1), (0, 2)]
    status = json.loads(place.seriatim("status", "keep", "--json"))
    assert status["circuit"] == "open"
    (way_out,) = set(
        re.findall(r"seriatim (accept keep --sequence \d+) --because", place.text("keep"))
    )
    place.seriatim(*way_out.split(), "--because", "a rebate")
    assert place.run_to_end("keep")[1] == "success"
    assert {row["v"] for row in place.rows("keep", "current")} == {6}
    assert len([one for one in place.mails("keep") if "over: " not in one]) == 1


def opened(path: Path) -> bytes:
    """A file as whoever opens it reads it: manifests and Parquet are compressed, and hide what a
    search would find.
    """
    if path.suffix == ".zst":
        with pa.input_stream(str(path), compression="zstd") as stream:
            return bytes(stream.read())
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        return f"{file.metadata.metadata} {file.read().to_pylist()}".encode()
    return path.read_bytes()


def spoken(mail: EmailMessage) -> bytes:
    """A mail as it is read: text beyond ASCII is sent in base64."""
    parts = [str(part.get_content()) for part in mail.walk() if not part.is_multipart()]
    return "\n".join([str(mail["Subject"]), *parts]).encode() + bytes(mail)


def test_planted_secrets_are_nowhere(place: TroubledAirflow) -> None:
    """Not in logs, databases (XCom, rendered templates), command lines, output, reports, notes or
    mails.
    """
    places: dict[str, bytes] = {
        "command lines": "\n".join(place.lines).encode(errors="surrogateescape")
    }
    places["mails"] = b"\n".join(spoken(mail) for mail in place.post.mails)
    places |= {str(path): opened(path) for path in place.folder.rglob("*") if path.is_file()}
    assert len(place.lines) > 20
    assert any("spark_apps/fold.py" in line for line in place.lines)
    assert place.post.mails
    assert (len(LOGINS), all(LOGINS)) == (len(place.post.mails), True)
    assert any(path.endswith("airflow.db") for path in places)
    assert any("/logs/" in path for path in places)
    assert any("/reports/" in path for path in places)
    assert b"Stream four: a run failed" in places["mails"]  # what is there can be found
    for suffix in (".parquet", ".zst"):
        assert any(
            path.endswith(suffix) and b"four-topic" in content for path, content in places.items()
        )
    key = client.java_settings(client.read_client_settings(place.broker.client_config))[
        "ssl.keystore.key"
    ]
    for kind, secret in {**SECRETS, "key opened": key.splitlines()[1]}.items():
        assert [where for where, content in places.items() if secret.encode() in content] == [], (
            kind
        )
