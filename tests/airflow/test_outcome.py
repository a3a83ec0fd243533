"""What a process leaves when it ends becomes a typed error; where it leaves nothing, its exit code
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from seriatim import cli, config
from seriatim.airflow.outcome import (
    SCREEN_LINES_MAX,
    build_error,
    extract_error_screen,
    outcome_file,
    read_outcome,
)
from seriatim.engine.failure import CommandOutcome, Failure
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
from tests.engine.test_failure import ERRORS


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, ConfigError),
        (3, IntegrityError),
        (4, PlatformError),
        (5, FencedError),
        (-9, PlatformError),
        (137, PlatformError),
        (1, PlatformError),
    ],
)
def test_without_an_outcome_a_code_is_a_kind_of_error(code: int, kind: type[Exception]) -> None:
    """What is not ours may be tried again; Spark's launcher ends with 1 as well when it cannot
    start.
    """
    assert type(build_error("seriatim run", code, None)) is kind


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_outcome_is_the_error_that_the_command_ended_with(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: SeriatimError,
) -> None:
    """Written by the command, read by the task: class, words, facts and findings; and the screen of
    the note.
    """
    # A command with --json that an earlier test ran in this process leaves its choice behind.
    monkeypatch.setattr(cli.Options, "json", False)
    path = tmp_path / "outcome.json"
    with pytest.raises(SystemExit) as ended:
        cli.fail(error, path)
    back = build_error("seriatim run", error.exit_code, read_outcome(path))
    assert ended.value.code == error.exit_code
    assert (type(back), vars(back)) == (type(error), vars(error))
    assert extract_error_screen(back) == error.render() == capsys.readouterr().err.rstrip("\n")
    assert [one.name for one in tmp_path.iterdir()] == ["outcome.json"]


def test_a_code_of_ours_without_an_error_of_ours_left_no_word() -> None:
    """A wrong option ends with 2, and Typer has told it already."""
    error = build_error("seriatim plan", 2, CommandOutcome(exit_code=2))
    assert type(error) is ConfigError
    assert error.message == "seriatim plan ended with code 2 and left no message"


def test_a_process_without_a_word_still_says_how_it_ended() -> None:
    """By a signal, or by a code; and what that means."""
    assert (
        build_error("seriatim run", -9, None).message
        == "seriatim run was ended by signal 9 and left no message"
    )
    assert "goes on from the last commit" in build_error("seriatim run", 137, None).next


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_process_is_told_as_killed(code: int) -> None:
    """A shell reports signal 9 as 137. By whom is not known: the mail says where that can be read."""
    error = build_error("seriatim run", code, None)
    assert error.message == "seriatim run was ended by signal 9 and left no message"
    for words in ("dmesg", "memory limit", "from the last commit"):
        assert words in error.next


def test_an_outcome_of_another_end_is_not_believed() -> None:
    """A process that was killed after it left its outcome did not end with it."""
    failure = Failure.of(IntegrityError("orders: 1 new finding in a/3"))
    outcome = CommandOutcome(exit_code=3, failure=failure)
    assert type(build_error("x", -9, outcome)) is PlatformError
    assert "ended by signal 9" in build_error("x", -9, outcome).message
    assert type(
        build_error(
            "x", 1, CommandOutcome(exit_code=1, failure=Failure.of(BrokenPromiseError("oh")))
        )
    ) is (BrokenPromiseError)


@pytest.mark.parametrize("content", [b"", b"{", b'{"exit_code": "x"}', b"\xff"])
def test_an_outcome_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    """The code alone speaks then."""
    path = tmp_path / "outcome.json"
    path.write_bytes(content)
    assert read_outcome(path) is None
    assert read_outcome(tmp_path / "missing") is None


def test_an_outcome_of_a_later_version_is_read() -> None:
    """Fields that are not known here are passed over."""
    later = {
        "exit_code": 2,
        "new": 1,
        "failure": {"error": "ConfigError", "message": "m", "more": []},
    }
    outcome = msgspec.json.decode(msgspec.json.encode(later), type=CommandOutcome)
    assert type(build_error("x", 2, outcome)) is ConfigError


def test_a_long_screen_is_cut() -> None:
    """A note goes into a mail."""
    long = BrokenPromiseError("oh", detail="\n".join(map(str, range(100))))
    assert len(extract_error_screen(long).splitlines()) == SCREEN_LINES_MAX


def run(folder: Path, words: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    """A command as a task starts it."""
    return subprocess.run(
        [sys.executable, "-m", "seriatim", *words],
        cwd=folder,
        env={**os.environ, config.OUTCOME: str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_leaves_its_outcome(tmp_path: Path) -> None:
    """When it goes well, when Typer refuses it, when it fails; with --json and --debug as well."""
    (tmp_path / "streams").mkdir()
    with outcome_file() as path:
        ended = run(tmp_path, ["--version"], path)
        assert (ended.returncode, read_outcome(path)) == (0, CommandOutcome(exit_code=0))
        ended = run(tmp_path, ["plan", "--no-such-option"], path)
        assert (ended.returncode, read_outcome(path)) == (2, CommandOutcome(exit_code=2))
        for words in (["plan", "none"], ["--debug", "plan", "none"], ["publish", "none", "--json"]):
            path.unlink()
            run(tmp_path, words, path)
            outcome = read_outcome(path)
            assert outcome is not None
            assert outcome.exit_code == 2
            assert build_error("x", 2, outcome).message.startswith("no stream 'none'")
    assert not path.parent.exists()


def test_a_submitted_application_leaves_its_outcome(tmp_path: Path) -> None:
    """Also when it refuses what it was given to do."""
    path = tmp_path / "outcome.json"
    application = Path(__file__).parent.parent.parent / "spark_apps" / "fold.py"
    for words, message in (
        (["drop"], "['drop'] does not fold"),
        (["run", "none"], "no stream 'none'"),
    ):
        ended = subprocess.run(
            [sys.executable, str(application), *words],
            cwd=tmp_path,
            env={**os.environ, config.OUTCOME: str(path)},
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 2
        assert build_error("x", 2, read_outcome(path)).message.startswith(message)


def test_a_command_that_cannot_leave_its_outcome_ends_as_it_would(tmp_path: Path) -> None:
    """It says so, and its code says the most."""
    ended = run(tmp_path, ["--version"], tmp_path / "no" / "outcome.json")
    assert ended.returncode == 0
    assert "the outcome cannot be written" in ended.stderr


def test_children_of_a_command_do_not_know_its_outcome_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They inherit the environment, and the outcome is the command's own."""
    monkeypatch.setenv(config.OUTCOME, "/somewhere/outcome.json")
    assert config.take_outcome_path() == Path("/somewhere/outcome.json")
    assert config.OUTCOME not in config.child_environment()
    assert config.take_outcome_path() is None


def test_a_command_that_is_killed_leaves_no_outcome(tmp_path: Path) -> None:
    """Signal 9: the task says that it was ended so, and may try again."""
    kills_itself = "lambda _: os.kill(os.getpid(), signal.SIGKILL)"
    code = f"import os, signal; from seriatim import cli\ncli.app = {kills_itself}\ncli.main()"
    with outcome_file() as path:
        killed = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, config.OUTCOME: str(path)},
            capture_output=True,
            check=False,
        )
        error = build_error("seriatim run", killed.returncode, read_outcome(path))
    assert killed.returncode == -signal.SIGKILL
    assert (type(error), error.message) == (
        PlatformError,
        "seriatim run was ended by signal 9 and left no message",
    )
