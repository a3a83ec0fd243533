"""`seriatim compact` as a user types it: what was done, what was left out, damage by name; killed
anywhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seriatim import cli
from seriatim.engine.crash_points import COMPACT_POINTS
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import HoldEntry
from seriatim.ledger.model import Change
from tests.cli.test_verify import STREAM
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.test_compact_on_files import files, head_of, records
from tests.contracts.verify_helper import verify

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStream:
    """A stream file and its output, made long ago; no broker."""
    (tmp_path / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    return create_filled_output(tmp_path / "lake")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command: exit code, stdout, stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


def test_compact_says_what_it_did(lake: DiskStream, run: Run) -> None:
    """A table, one line, exit code 0; the second time there is nothing to do."""
    before = records(lake.root)
    code, out, err = run("compact", "s.toml", "--dry-run")
    assert (code, "files would become" in out) == (0, True)
    assert len(files(lake.root)) > 3
    code, out, err = run("compact", "s.toml")
    assert (code, "Traceback" in err) == (0, False)
    assert "s: 11 files became 5" in " ".join(out.split())
    assert len(files(lake.root)) == 3
    assert records(lake.root) == before
    assert "no files are worth joining" in run("compact", "s.toml")[1]


@pytest.mark.usefixtures("lake")
def test_scripts_get_one_object(run: Run) -> None:
    """With every piece, what it became, and what was swept: state that slices merged long ago goes
    at once.
    """
    code, out, _ = run("compact", "s.toml", "--partition", "in-a/0", "--json")
    told = json.loads(out)
    assert (code, told["stream"], told["held"], told["dry_run"]) == (0, "s", [], False)
    assert {(piece["topic"], piece["partition"]) for piece in told["pieces"]} == {("in-a", 0)}
    assert [(piece["into"], piece["dropped"], piece["refused"]) for piece in told["pieces"]] == [
        (1, "", {})
    ] * 2
    assert told["sequence"] == max(piece["entry"] for piece in told["pieces"])
    assert told["swept"]["replaced"] > 0


@pytest.mark.parametrize("arguments", [("--partition", "in-z/0"), ("--partition", "nonsense")])
@pytest.mark.usefixtures("lake")
def test_a_wrong_partition_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    """With what to type instead."""
    code, _, err = run("compact", "s.toml", *arguments)
    assert code == 2
    assert "TOPIC/NUMBER" in err


def test_damage_ends_with_3_and_the_way_out(lake: DiskStream, run: Run) -> None:
    """The file by name, and the repair to type."""
    hurt = (
        lake.root
        / "records"
        / next(name for name in files(lake.root) if name.startswith("in-a/1/"))
    )
    hurt.write_bytes(hurt.read_bytes()[:-1] + b"!")
    code, _, err = run("compact", "s.toml")
    assert code == 3
    assert hurt.name in err
    assert "seriatim repair s --partition in-a/1" in err


def test_held_partitions_are_told(lake: DiskStream, run: Run) -> None:
    """They are no error."""
    place = Partition("in-a", 0)
    account = head_of(lake).ledger.partitions[str(place)]
    change = Change(
        partition=place,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id="",
        initial_frontier=0,
    )
    commit(
        lake.ledger,
        lake.clock,
        head_of(lake),
        HoldEntry(attempt="h", hold="h", changes=(change,)),
    )
    code, out, err = run("compact", "s.toml", "--json")
    assert (code, json.loads(out)["held"]) == (0, ["in-a/0"])
    assert "a repair holds it" in err


@pytest.mark.usefixtures("lake")
def test_looking_back_past_what_was_swept_is_refused_by_name(run: Run) -> None:
    """Not with a stack trace, nor as damage: the oldest entry that is kept whole is named."""
    assert run("state", "s.toml", "x", "--topic", "in-a", "--version", "1")[0] == 0
    assert run("compact", "s.toml")[0] == 0
    code, _, err = run("state", "s.toml", "x", "--topic", "in-a", "--version", "1")
    assert code == 2
    assert "entry 1 cannot be looked at any more" in err
    assert "the oldest entry that is kept whole is 8" in err
    assert run("version", "s.toml", "--sequence", "1")[0] == 0
    assert run("state", "s.toml", "x", "--topic", "in-a", "--version", "8")[0] == 0
    assert run("state", "s.toml", "x", "--topic", "in-a")[0] == 0


@pytest.mark.parametrize("point", COMPACT_POINTS)
def test_killed_anywhere_the_same_command_ends_it(lake: DiskStream, run: Run, point: str) -> None:
    """A real process, kill -9 at the point: the records are whole at once, and all is well after
    one plain run.
    """
    before = records(lake.root)
    command = [sys.executable, "-m", "seriatim", "compact", "s.toml"]
    environ = os.environ | {"SERIATIM_CRASH_POINT": point}
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert records(lake.root) == before
    assert verify(lake.root).difference is None
    assert run("compact", "s.toml")[0] == 0
    assert len(files(lake.root)) == 3
    assert records(lake.root) == before
    checked = verify(lake.root)
    assert (checked.difference, checked.warnings) == (None, [])
