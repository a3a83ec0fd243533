"""`seriatim status`, `state`, `version` and `plan` as a user types them: one bad stream hides no
other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seriatim import cli, context
from seriatim.memory import MemoryKafka
from tests.cli.test_run import STREAM


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Streams `good` and `worse` are fine, between them `bad` is not; Kafka is in memory and has
    nothing.
    """
    folder = tmp_path / "streams"
    folder.mkdir()
    for name in ("good", "worse"):
        (folder / f"{name}.toml").write_text(STREAM.replace("lake/t", f"lake/{name}"))
    (folder / "bad.toml").write_text(STREAM.replace("machine", "machin"))
    monkeypatch.setenv("SERIATIM_STREAMS", str(folder))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.setattr(context, "log", lambda _file, _settings: MemoryKafka())
    return folder


def ended(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_a_bad_stream_file_does_not_hide_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All others are shown, the error is told, and the exit code says that something is wrong."""
    assert ended("status") == 2
    shown, told = capsys.readouterr()
    assert [line.split(":")[0] for line in shown.splitlines() if "tier strict" in line] == [
        "good",
        "worse",
    ]
    assert told.startswith("ConfigError: bad.toml: machin: unknown key")
    (folder / "bad.toml").unlink()
    assert ended("status") == 0


def test_a_refused_ledger_does_not_hide_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A witness without a ledger, say: the more serious of two codes is given."""
    lake = folder.parent / "lake" / "good"
    lake.mkdir(parents=True)
    (lake / "head.json").write_text('{"sequence": 4, "sha256": "x"}')
    assert ended("status") == 3
    shown, told = capsys.readouterr()
    assert "worse: waiting for topics" in shown
    assert "IntegrityError: good: there is no ledger" in told


def test_errors_of_status_are_json_for_scripts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object per line: streams on stdout, errors on stderr."""
    assert ended("status", "--json") == 2
    shown, told = capsys.readouterr()
    assert [json.loads(line)["stream"] for line in shown.splitlines()] == ["good", "worse"]
    (error,) = [json.loads(line) for line in told.splitlines()]
    assert (error["error"], "bad.toml" in error["message"]) == ("ConfigError", True)
    assert folder.is_dir()


@pytest.mark.parametrize("command", [["status"], ["state", "s"], ["version"], ["plan"]])
def test_an_error_is_json_for_scripts(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever looks at a stream."""
    name, *rest = command
    assert ended(name, "bad", *rest, "--json") == 2
    error = json.loads(capsys.readouterr().err)
    assert set(error) >= {"error", "message", "next"}
    assert folder.is_dir()


@pytest.mark.parametrize("file", ["lake", "lake/good"])
def test_an_output_path_that_is_a_file_is_a_slip_of_configuration(
    folder: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not trouble of the platform: trying again would not help. A folder on the way to it is no
    better.
    """
    path = folder.parent / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert ended("run", "good") == 2
    told = capsys.readouterr().err
    assert f"good.toml: output.path: {path} is a file" in told
    assert "fix output.path in good.toml" in told
