"""The check-up: it sees what is missing, and what is missing decides the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from msgspec.structs import replace

from seriatim.config import Settings
from seriatim.embedded import doctor, jars
from seriatim.embedded.broker import BrokerInfo
from seriatim.embedded.doctor import DoctorCheck
from tests.mail_catcher import certificate_for_loopback, free_port


def _look(name: str, settings: Settings) -> DoctorCheck:
    return next(check for check in doctor.run_checks(settings) if check.name == name)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """An empty machine; Spark is not started, for that takes seconds and has its own test."""
    monkeypatch.setitem(doctor.CHECKS, "Spark", lambda _: "not looked at")
    return Settings(home=tmp_path / "home", streams=tmp_path / "streams")


def test_missing_jars_are_told_with_the_command(settings: Settings) -> None:
    """An empty home has no JARs, and the fix is a command."""
    check = _look("JARs of Spark", settings)
    assert (check.is_good, check.is_required, check.fix) == (
        False,
        True,
        "seriatim jars fetch --group spark",
    )


def test_a_damaged_jar_is_seen(settings: Settings) -> None:
    """Every file is hashed, whatever was remembered of it."""
    folder = settings.home / "jars"
    folder.mkdir(parents=True)
    for jar in jars.locked_jars("spark"):
        (folder / jar.file_name).write_bytes(b"no JAR")
    assert (
        "is damaged; 3 more are missing or damaged" in _look("JARs of Spark", settings).description
    )


@pytest.mark.parametrize(
    ("master", "said"),
    [("local[*]", "look at the load of this host"), ("spark://h:7077", "SERIATIM_SPARK_MASTER")],
)
def test_spark_that_does_not_answer_on_this_host_is_not_a_wrong_address(
    master: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks for a mistake in a setting because the host is busy."""
    monkeypatch.setattr(doctor, "SPARK_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "_jars_check", lambda _group: lambda _settings: "")
    settings = Settings(home=tmp_path, streams=tmp_path, spark_master=master)
    (check,) = (check for check in doctor.run_checks(settings) if check.name == "Spark")
    assert said in check.fix


def test_no_broker_is_optional_a_configured_one_is_not(settings: Settings) -> None:
    """Nobody must run the embedded broker; a server that was named must answer."""
    assert not _look("Kafka", settings).is_required
    named = Settings(
        home=settings.home, streams=settings.streams, kafka_bootstrap_servers="127.0.0.1:1"
    )
    check = _look("Kafka", named)
    assert (check.is_good, check.is_required) == (False, True)


def test_a_broker_that_answers_is_good(settings: Settings, broker: BrokerInfo) -> None:
    """The address is shown."""
    named = Settings(
        home=settings.home,
        streams=settings.streams,
        kafka_bootstrap_servers=broker.bootstrap_servers,
    )
    assert _look("Kafka", named) == DoctorCheck("Kafka", True, True, broker.bootstrap_servers)


def test_an_environment_that_only_folds_needs_no_airflow(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark and Airflow may live apart: what is not installed at all is not missing, half of it is."""
    there = {*doctor.PACKAGES, "pyspark"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.0" if name in there else None)
    assert not _look("Airflow", settings).is_required
    there.add("apache-airflow")
    assert "great-expectations" in _look("Airflow", settings).description


def test_an_environment_that_only_schedules_needs_no_jars(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyspark nothing is folded here, so no JAR is missing."""
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name == "pyspark" else "1.0"
    )
    assert not _look("JARs of Spark", settings).is_required


def test_a_missing_package_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every environment needs is required everywhere. All of them are counted."""
    count = len(doctor.PACKAGES)
    expected = f"{count} installed, in versions that fit together"
    assert _look("packages", settings).description == expected
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name == "deltalake" else "1.0"
    )
    assert _look("packages", settings).description == "not installed: deltalake"


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A file stands where the home should be."""
    (tmp_path / "home").write_text("a file")
    check = _look("home", Settings(home=tmp_path / "home", streams=tmp_path))
    assert "is not writable" in check.description
    assert check.fix == "set SERIATIM_HOME to a folder you may write to"


def test_outputs_of_streams_are_tried(settings: Settings, tmp_path: Path) -> None:
    """A stream whose output would lie below a file is told; one below a folder is good."""
    settings.streams.mkdir()
    stream = (
        'topics = "a"\nmachine = "table"\n[table]\nkey = ["id"]\ncolumns = {{ id = "string" }}\n'
    )
    stream += '[output]\npath = "{path}"\n'
    (settings.streams / "good.toml").write_text(stream.format(path=tmp_path / "lake" / "good"))
    assert _look("outputs", settings).description == "streams that write to this host: 1 of 1"
    (tmp_path / "file").write_text("")
    (settings.streams / "bad.toml").write_text(stream.format(path=tmp_path / "file" / "bad"))
    assert "is a file" in _look("outputs", settings).description


def test_a_mail_server_is_talked_to(settings: Settings, tmp_path: Path) -> None:
    """A server that answers is good, a silent port is told, none at all is no harm."""
    address = f"127.0.0.1:{free_port()}"
    named = Settings(home=tmp_path, streams=tmp_path, smtp=address)
    assert not _look("mail", settings).is_required
    assert "takes no mail: ConnectionRefusedError" in _look("mail", named).description
    server = Controller(object(), hostname="127.0.0.1", port=int(address.split(":")[1]))
    server.start()
    try:
        assert _look("mail", named) == DoctorCheck("mail", True, True, address)
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")  # it is TLS all along
def test_a_mail_server_is_talked_to_as_mails_are_sent(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS from the start, with a login, and with the port that an address without one means."""
    assert "127.0.0.1:25" in _look("mail", replace(settings, smtp="127.0.0.1")).description
    context, certificate = certificate_for_loopback(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asked: list[bytes] = []

    def login(
        _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any
    ) -> AuthResult:
        asked.append(data.password)
        return AuthResult(success=data.password == b"right", handled=False)

    server = Controller(
        object(), hostname="127.0.0.1", port=free_port(), ssl_context=context,
        authenticator=login, auth_required=True, auth_require_tls=False,
    )  # fmt: skip
    server.start()
    try:
        named = replace(
            settings, smtp=f"127.0.0.1:{server.port}", smtp_tls="tls", smtp_user="seriatim"
        )
        assert _look("mail", replace(named, smtp_password="right")).is_good
        refused = _look("mail", replace(named, smtp_password="wrong"))
        assert "it refused the user or the password" in refused.description
        assert "wrong" not in refused.description
    finally:
        server.stop()
    assert {b"right", b"wrong"} <= set(asked)


def test_doctor_exits_by_what_is_required(tmp_path: Path) -> None:
    """With an empty home the table has a cross, and the exit code is 2; every line is JSON if
    asked.
    """
    command = [sys.executable, "-m", "seriatim", "doctor", "--json"]
    environ = os.environ | {"SERIATIM_HOME": str(tmp_path), "SERIATIM_STREAMS": str(tmp_path)}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in map(json.loads, run.stdout.splitlines())}
    assert run.returncode == 2
    assert checks["Python"]["good"]
    assert not checks["JARs of Kafka"]["good"]


def test_doctor_is_content_with_a_machine_that_has_everything(tmp_path: Path) -> None:
    """After make setup: Spark starts, nothing required is missing, exit 0."""
    command = [sys.executable, "-m", "seriatim", "doctor"]
    environ = os.environ | {"SERIATIM_STREAMS": str(tmp_path), "SERIATIM_SPARK_MASTER": "local[1]"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "✓ Spark          4.2.0 on local[1]" in run.stdout


def test_each_check_says_what_it_does_before_it_does_it(settings: Settings) -> None:
    """Some take seconds, and nobody should wonder what is going on."""
    activities: list[str] = []
    checks = doctor.run_checks(settings, activities.append)
    assert next(checks).name == "Python"
    assert activities == ["looking at Python"]
    assert next(checks).name == "Java"
    assert activities[-1] == "looking at Java"
    assert set(doctor.ACTIVITIES) <= set(doctor.CHECKS)
