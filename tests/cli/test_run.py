"""`seriatim run`, `plan` and `state` as a user types them: arguments, code that is too old, lines
for scripts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seriatim import cli, config, context, stream_files
from seriatim.cli import output, run
from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.model import Halt, Ledger
from seriatim.operations.run import FoldRun, RunOutcome, StopOffsets

STREAM = """
topics = "none-[a-z]+"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string"}}
output = {path = "lake/t"}
"""
GAP = Finding(finding="gap", topic="a", partition=0, offset=7)


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A stream file, and no broker that answers."""
    (tmp_path / "t.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    return "t"


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_negative_offsets_are_refused() -> None:
    """An end before the first message is a slip, and the sentence says where."""
    assert run._parse_until_offsets('{"um": {"0": 0}}') == {Partition("um", 0): 0}
    with pytest.raises(ConfigError, match="um/0 has -5"):
        run._parse_until_offsets('{"um": {"0": -5}}')


def test_every_line_is_json_for_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings, what waits, quarantine and progress: one JSON object per line of stderr."""
    monkeypatch.setattr(cli.Options, "json", True)
    halt = Halt(finding="gap", offset=7, cause="why", sequence=3)
    output.RunProgress("t")(5, 5)
    run.print_outcome("t", RunOutcome(earlier_halts=[(Partition("a", 0), halt)], quarantined=2))
    progress, waiting, quarantine = _lines(capsys)
    assert (progress["done"], progress["total"]) == (5, 5)
    assert (waiting["waiting"], waiting["offset"]) == ("a/0", 7)
    assert quarantine["quarantined"] == 2


def test_an_error_is_json_for_scripts(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The closing error of `run --json` too; without it, a screen."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", stream, "--json", "--until-offsets", '{"a": {"0": -1}}'])
    (error,) = _lines(capsys)
    assert ended.value.code == 2
    assert error["error"] == "ConfigError"
    assert set(error) >= {"message", "next"}
    with pytest.raises(SystemExit):
        cli.main(["run", stream, "--until-offsets", '{"a": {"0": -1}}'])
    assert capsys.readouterr().err.startswith("ConfigError: ")


@pytest.mark.parametrize("error", [PlatformError("broke"), ValueError("broke")])
def test_findings_are_told_when_a_run_breaks(
    stream: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are committed, so no later run would tell them: whatever ends the run, they come first."""

    def breaks(self: FoldRun, messages_max: int, until: StopOffsets | None = None) -> RunOutcome:  # noqa: ARG001
        self.outcome.findings.append(GAP)
        raise error

    monkeypatch.setattr(FoldRun, "run", breaks)
    with pytest.raises(SystemExit):
        cli.main(["run", stream, "--json"])
    finding, closing = _lines(capsys)
    assert (finding["finding"], finding["offset"]) == ("gap", 7)
    assert "broke" in str(closing["message"])


def test_older_code_may_not_look(stream: str) -> None:
    """Code that would misread the state is refused before it reads: older, or another machine."""
    file = stream_files.load_stream(stream, config.load_settings().streams)
    context.refuse_machine_for_ledger(file, Ledger(stream="t"))
    with pytest.raises(ConfigError, match="knows only"):
        context.refuse_machine_for_ledger(
            file, Ledger(stream="t", machine="table", state_version=99)
        )
    with pytest.raises(ConfigError, match="written by machine"):
        context.refuse_machine_for_ledger(
            file, Ledger(stream="t", machine="other", state_version=1)
        )
