"""The demo's stage: what it writes, and what it breaks. tests/demo/test_whole_demo.py runs all of it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from seriatim import config, stream_files
from seriatim.demo import stage
from seriatim.demo.generator import CollectionPoints, DemoMessage
from seriatim.demo.processes import DemoPorts, DemoRecord, demo_lock, write_record


def sequences(messages: list[DemoMessage]) -> dict[str, list[int]]:
    """The producer's counters by session, as sent."""
    found: dict[str, list[int]] = {}
    for message in messages:
        found.setdefault(message.key, []).append(msgspec.json.decode(message.value)["seq"])
    return found


RECORD = DemoRecord.of_this_process("mark", DemoPorts())


def test_its_stream_runs_every_minute_and_tells_somebody(tmp_path: Path) -> None:
    """The repository's own demo stream, with other topics and three more keys."""
    stage.write_stream_file(tmp_path, str(tmp_path))
    made = stream_files.load_stream(stage.STREAM, tmp_path / "streams").stream
    assert (made.schedule.cron, made.alerts.to) == ("* * * * *", ("on-call@localhost",))
    assert made.snapshot_requests == stage.REQUESTS_TOPIC
    stock = tomllib.loads((stage.ROOT / "streams" / "demo.toml").read_text())
    assert (made.machine, made.sequence) == (stock["machine"], stock["sequence"])
    assert made.table is not None
    assert list(made.table.key) == stock["table"]["key"]
    assert made.output.path == str(tmp_path / "lake" / stage.STREAM)


def test_what_the_quick_start_breaks_does_not_hurt_it(tmp_path: Path) -> None:
    """Neither of the two streams reads a topic of the other, and they share neither name, output,
    outbox nor broker.
    """
    stage.write_stream_file(tmp_path, str(tmp_path))
    live = stream_files.load_stream(stage.STREAM, tmp_path / "streams").stream
    quick_start = stream_files.load_stream("demo", stage.ROOT / "streams").stream
    quick_start_topics = [f"demo-{letter}" for letter in "abc"]
    assert all(re.fullmatch(live.topics, topic) for topic in stage.TOPICS)
    assert not any(re.fullmatch(live.topics, topic) for topic in quick_start_topics)
    for topic in (*stage.TOPICS, stage.REQUESTS_TOPIC):
        assert not re.fullmatch(quick_start.topics, topic)
    assert (live.name, live.output.path) != (quick_start.name, quick_start.output.path)
    settings = config.load_settings()
    environ = stage.airflow_environment(tmp_path, settings, "127.0.0.1:9092", RECORD)
    assert config.load_settings(environ, tmp_path).outbox != settings.outbox


def test_a_stream_file_of_ones_own_stays(tmp_path: Path) -> None:
    """At each start the demo writes its own file, and takes away that of an earlier version alone."""
    streams = tmp_path / "streams"
    streams.mkdir()
    for content, stays in (('snapshot_requests = "asks-of-demo"', False), ("# mine", True)):
        (streams / "demo.toml").write_text(content)
        (streams / "orders.toml").write_text("# mine")
        stage.write_stream_file(tmp_path, str(tmp_path))
        assert (streams / "demo.toml").exists() == stays
        assert (streams / "orders.toml").read_text() == "# mine"


def test_what_is_asked_of_the_producer_is_done_once() -> None:
    """One message is missing, two neighbours of another session are swapped, all else is as it was."""
    asked = iter([False] * 200 + [True])
    points = CollectionPoints(["demo-a"], sessions=5, seed=3)
    sent = list(
        islice(stage.break_messages_on_request(points.messages(), lambda: next(asked, False)), 600)
    )
    plain = list(islice(CollectionPoints(["demo-a"], sessions=5, seed=3).messages(), 601))
    hurt = {
        key
        for key, numbers in sequences(sent).items()
        if numbers != list(range(1, len(numbers) + 1))
    }
    assert len(hurt) == 2
    assert len(set(plain) - set(sent)) == 1
    assert set(sent) < set(plain)


def test_nothing_is_broken_unasked() -> None:
    """Message by message the same."""
    points = (CollectionPoints(["demo-a"], sessions=5, seed=3).messages() for _ in range(2))
    plain, through = next(points), stage.break_messages_on_request(next(points), lambda: False)
    assert list(islice(through, 500)) == list(islice(plain, 500))


def test_break_without_a_demo_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what to do, also where one ran earlier; with one that runs, the producer finds a flag."""
    assert stage.request_break(tmp_path / "none") == 2
    assert stage.request_break(tmp_path) == 2
    with demo_lock(tmp_path):
        write_record(tmp_path, DemoRecord.of_this_process("mark", DemoPorts.beginning_at(9100)))
        capsys.readouterr()
        assert stage.request_break(tmp_path) == 0
        assert (tmp_path / stage.BREAK_FILE).exists()
        told = capsys.readouterr().out
        assert "make demo" not in told
        assert "http://127.0.0.1:9102" in told
    (tmp_path / stage.BREAK_FILE).unlink()
    assert stage.request_break(tmp_path) == 2
    assert "make demo" in capsys.readouterr().out
    assert not (tmp_path / stage.BREAK_FILE).exists()


def test_your_own_servers_are_not_the_demos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mails go to its catcher, its messages to its broker, its database is its own; your
    password is nowhere.
    """
    theirs = {
        "SMTP_PASSWORD": "canary",
        "SMTP_USER": "me",
        "SMTP_TLS": "starttls",
        "KAFKA_CONFIG": "/none/such",
    }
    theirs |= {
        "KAFKA_BOOTSTRAP_SERVERS": "yours:9092",
        "OUTBOX": "/yours",
        "IVY_SETTINGS": "/mirror.xml",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(f"SERIATIM_{name}", value)
    monkeypatch.setenv("AIRFLOW_CONN_SMTP_DEFAULT", "canary")
    environ = stage.airflow_environment(tmp_path, config.load_settings(), "127.0.0.1:9092", RECORD)
    assert "canary" not in environ.values()
    seen = config.load_settings(environ, tmp_path)
    assert (seen.smtp_user, seen.smtp_tls, seen.kafka_config, seen.ivy_settings) == (
        "",
        "none",
        None,
        Path("/mirror.xml"),
    )
    assert (seen.smtp, seen.kafka_bootstrap_servers) == (
        f"127.0.0.1:{RECORD.ports.mail}",
        "127.0.0.1:9092",
    )
    assert seen.outbox != "/yours"
    (tmp_path / stage.SETTINGS_FILE).touch(mode=0o644)
    stage.write_settings_file(tmp_path, environ)
    assert (tmp_path / stage.SETTINGS_FILE).stat().st_mode & 0o777 == 0o600
    told = (
        "from seriatim import config; s = config.load_settings(); "
        "print(s.smtp_user, s.smtp_password, s.kafka_config)"
    )
    words = [
        "bash",
        "-c",
        f'source "$1" && python -c "{told}"',
        "bash",
        str(tmp_path / stage.SETTINGS_FILE),
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout.split() == ["None"]


def test_airflow_listens_here_alone_and_finds_our_dags(tmp_path: Path) -> None:
    """Everybody is an admin in the demo: so nobody else may reach it."""
    environ = stage.airflow_environment(tmp_path, config.load_settings(), "127.0.0.1:9092", RECORD)
    assert environ["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert (Path(environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "streams.py").exists()
    assert environ["SERIATIM_STREAMS"] == str(tmp_path / "streams")


def test_a_demo_in_a_bucket_takes_nothing_of_yours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and outbox are in the bucket of its own server, also for a shell that has your
    credentials and endpoint.
    """
    monkeypatch.setenv("AWS_SESSION_TOKEN", "yours")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://yours")
    root = stage.output_root(tmp_path, is_in_bucket=True)
    stage.write_stream_file(tmp_path, root)
    live = stream_files.load_stream(stage.STREAM, tmp_path / "streams").stream
    assert live.output.path == f"s3://seriatim/lake/{stage.STREAM}"
    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "demo"}
    environ = stage.airflow_environment(
        tmp_path, config.load_settings(), "127.0.0.1:9092", RECORD, variables
    )
    assert "AWS_SESSION_TOKEN" not in environ
    assert config.load_settings(environ, tmp_path).outbox == "s3://seriatim/outbox"
    stage.write_settings_file(tmp_path, environ)
    words = ["bash", "-c", 'source "$1" && env', "bash", str(tmp_path / stage.SETTINGS_FILE)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"AWS_ACCESS_KEY_ID=demo", "AWS_ENDPOINT_URL=http://127.0.0.1:1"} <= set(told)
    assert not [line for line in told if line.startswith("AWS_") and "yours" in line]


def test_a_shell_can_be_told_of_the_demo(tmp_path: Path) -> None:
    """What mails say to type is about the demo's stream then, not about the one of the repository."""
    environ = stage.airflow_environment(tmp_path, config.load_settings(), "127.0.0.1:9092", RECORD)
    stage.write_settings_file(tmp_path, environ)
    told = "from seriatim import config; s = config.load_settings(); print(s.streams, s.kafka_bootstrap_servers)"
    words = [
        "bash",
        "-c",
        f'source "$1" && python -c "{told}"',
        "bash",
        str(tmp_path / stage.SETTINGS_FILE),
    ]
    said = subprocess.run(
        words, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert said.stdout.split() == [str(tmp_path / "streams"), "127.0.0.1:9092"]
