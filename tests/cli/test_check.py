"""`seriatim check` and what closes the circuit, as a user types it, on real files, without a
broker; killed, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

from seriatim import config
from seriatim.engine.crash_points import CHECK_POINTS
from seriatim.engine.failure import CommandOutcome
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.manifests import REPORTED_NOTE
from seriatim.ledger.model import EntryMark
from seriatim.operations.prove.suite import load_suites
from seriatim.stream import OutputSettings, Stream
from tests.cli.test_publish import STREAM, typed
from tests.contracts.disk_streams import DiskStream, create_filled_output

OWN = {
    "name": "s",
    "expectations": [
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "v", "max_value": 4},
            "severity": "critical",
            "meta": {"name": "v is small"},
        }
    ],
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStream:
    """A stream that was run; no broker answers."""
    (tmp_path / "streams").mkdir()
    (tmp_path / "expectations").mkdir()
    (tmp_path / "streams" / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "streams"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    stream = create_filled_output(tmp_path / "lake")
    stream.ledger.put_note(REPORTED_NOTE, EntryMark(8))
    return stream


def own(made: DiskStream, suite: Any) -> None:
    """Write the stream's own suite."""
    (made.root.parent / "expectations" / "s.json").write_text(
        suite if isinstance(suite, str) else json.dumps(suite)
    )


def sequence_of(made: DiskStream) -> int:
    """The last ledger entry."""
    head = made.ledger.head("s")
    assert head is not None
    return int(head.ledger.sequence)


def current_rows(made: DiskStream) -> int:
    """How many rows readers of `current` see."""
    return DeltaTable(made.root / "current").to_pyarrow_dataset().count_rows()


def test_check_then_publish(made: DiskStream, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is published before it is checked; then all of it, and the versions say so."""
    assert typed("publish", "s") == 0
    assert "next: seriatim check s" in capsys.readouterr().err
    assert current_rows(made) == 0
    assert typed("check", "s") == 0
    told = capsys.readouterr().out
    assert "s: entries 1 to 8 are good: " in told
    assert told.endswith("; the verdict is entry 9\n")
    assert typed("check", "s", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["sequence"], values["checked"], values["circuit"]) == (None, 9, "closed")
    assert typed("publish", "s") == 0
    assert "current is as of entry 9" in capsys.readouterr().out
    assert current_rows(made) > 0
    assert typed("version", "s", "--checked", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"stream": "s", "sequence": 9, "version": 9}
    assert typed("version", "s", "--checked", "--sequence", "1") == 2


def test_a_bad_check_opens_the_circuit_until_it_is_accepted(
    made: DiskStream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 3 once, with partition, rows, example and commands; later a banner; accept closes it."""
    assert typed("check", "s") == 0
    own(made, OWN)
    made.send("in-a/1", "x", 9, ["a"], 1)
    made.run()
    capsys.readouterr()
    monkeypatch.setenv(config.OUTCOME, str(made.root / "outcome.json"))
    assert typed("check", "s") == 3
    told = capsys.readouterr().err
    assert "CheckError: s in-a/1: check at offset 10" in told
    failure = msgspec.json.decode(
        (made.root / "outcome.json").read_bytes(), type=CommandOutcome
    ).failure
    assert failure is not None
    assert failure.error == "FindingsError", (
        "by its class an alert knows that the findings were told already"
    )
    assert [(finding.finding, finding.offset) for finding in failure.findings] == [("check", 10)]
    assert "1 of 4 records: 9" in told
    assert "v is small (expectations/s.json)" in told
    assert 'seriatim accept s --sequence 10 --because "…"' in told
    assert typed("check", "s") == 0
    assert "the circuit is open" in capsys.readouterr().err
    assert typed("publish", "s") == 0
    assert "the circuit is open" in capsys.readouterr().err
    assert typed("accept", "s", "--sequence", "10") == 2
    assert typed("accept", "s", "--sequence", "10", "--dry-run") == 0
    assert "right as it is: in-a/1 [" in capsys.readouterr().out
    assert typed("accept", "s", "--sequence", "10", "--because", "rebates", "--json") == 0
    assert json.loads(capsys.readouterr().out)["circuit"] == "closed"
    assert typed("publish", "s") == 0
    assert f"current is as of entry {sequence_of(made)}" in capsys.readouterr().out
    assert typed("accept", "s", "--sequence", "10", "--because", "again") == 2


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ("{", "expectations/s.json"),
        ({"expectations": [{"type": "nonsense"}]}, "is no expectation"),
        (
            {
                "expectations": [
                    {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "no"}}
                ]
            },
            "no column",
        ),
        (
            {"expectations": [{"type": "expect_the_moon", "kwargs": {"column": "v"}}]},
            "does not know expect_the_moon",
        ),
        (
            {
                "expectations": [
                    {
                        "type": "expect_column_values_to_match_regex",
                        "kwargs": {"column": "v", "regex": "("},
                    }
                ]
            },
            "the check itself is broken",
        ),
    ],
)
def test_a_broken_check_is_exit_2_and_no_verdict(
    made: DiskStream, capsys: pytest.CaptureFixture[str], suite: Any, said: str
) -> None:
    """It names the file to fix; nothing counts as judged."""
    own(made, suite)
    before = sequence_of(made)
    assert typed("check", "s") == 2
    told = capsys.readouterr().err
    assert said in told
    assert "fix" in told
    assert "Traceback" not in told
    assert sequence_of(made) == before


@pytest.mark.parametrize(
    "point",
    [
        *CHECK_POINTS,
        pytest.param("manifest-written", marks=pytest.mark.full),
        pytest.param("committed", marks=pytest.mark.full),
    ],
)
def test_killed_anywhere_the_next_check_ends_right(made: DiskStream, point: str) -> None:
    """A crashed check is not a pass, and not half a verdict."""
    command = [sys.executable, "-m", "seriatim", "check", "s"]
    run = subprocess.run(
        command, env={**os.environ, "SERIATIM_CRASH_POINT": point}, check=False, timeout=900
    )
    assert run.returncode == -signal.SIGKILL
    done = point == "committed"
    head = made.ledger.head("s")
    assert head is not None
    assert head.ledger.checked == (9 if done else 0)
    assert typed("check", "s") == 0
    assert sequence_of(made) == 9


def test_own_suites_take_the_place_of_stock_ones(tmp_path: Path) -> None:
    """By name, wherever the stock one is; those for other machines are left out."""
    stream = Stream(name="s", topics="t", machine="book:Book", output=OutputSettings(path="x"))
    folder = tmp_path / "expectations"
    folder.mkdir()
    (folder / "s.json").write_text(
        json.dumps(
            {
                "expectations": [
                    {
                        "type": "expect_column_values_to_not_be_null",
                        "kwargs": {"column": "session"},
                        "severity": "info",
                        "meta": {"name": "session is there"},
                    },
                    {
                        "type": "expect_column_values_to_be_in_set",
                        "severity": "warning",
                        "meta": {"name": "counted"},
                    },
                ]
            }
        )
    )
    made = load_suites(stream, tmp_path / "streams")
    severities = {
        one.name: one.severity for one in (*made.records.expectations, *made.ledger.expectations)
    }
    assert severities["session is there"] == "info"
    assert severities["counted"] == "warning"
    assert "op is known" not in severities
    assert len(made.ledger.expectations) == 3


def test_a_finding_does_not_stop_the_steps_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Fold's failure is raised at the end; check's is told; anything else ends it at once."""
    from seriatim.cli.run import _run_steps

    walked: list[str] = []

    def step(name: str, error: Exception | None = None) -> Any:
        def run() -> None:
            walked.append(name)
            if error is not None:
                raise error

        return run

    with pytest.raises(IntegrityError, match="fold"):
        _run_steps(
            [
                step("fold", IntegrityError("fold")),
                step("check", IntegrityError("check")),
                step("publish"),
            ]
        )
    assert walked == ["fold", "check", "publish"]
    assert "IntegrityError: check" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        _run_steps([step("fold", ConfigError("broken")), step("check")])
    assert walked[3:] == ["fold"]


def test_a_check_leaves_a_report_and_any_other_can_be_asked_for(
    made: DiskStream, capsys: pytest.CaptureFixture[str]
) -> None:
    """One HTML file under reports/, named by the last entry."""
    assert typed("check", "s") == 0
    assert f"report {made.root / 'reports' / '0000000009.html'}" in capsys.readouterr().err
    assert typed("report", "s", "--sequence", "4") == 0
    path = Path(capsys.readouterr().out.strip())
    assert (path.name, path.read_text()[:15]) == ("0000000004.html", "<!doctype html>")
    assert typed("report", "s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sequence"] == 9
    assert typed("report", "s", "--sequence", "99") == 2
