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
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
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


class Sessions:
    """Stands for Spark while several streams are run: which session each of them folds with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> None:
        self.used: dict[str, str] = {}
        self.ended: list[tuple[str, bool]] = []
        """Each session, and whether its JVM ended with it."""
        self._errors = errors
        monkeypatch.setattr(run, "_fold_stream", self._fold)
        monkeypatch.setattr(
            context,
            "end_spark_session",
            lambda session, *, with_jvm: self.ended.append((session, with_jvm)),
        )

    def _fold(self, open_stream: context.ConnectedStream, *_: object) -> None:
        spark = open_stream.spark
        if spark.spark is None:
            spark.spark = f"session {len(set(self.used.values())) + 1}"
        name = open_stream.stream.name
        assert name in [stream.name for stream in spark.shared_with]
        self.used[name] = spark.spark
        if name in self._errors:
            raise self._errors[name]


@pytest.fixture
def four_streams(stream: str, tmp_path: Path) -> list[str]:  # noqa: ARG001  # it sets the folder
    """Stream files that differ in their outputs."""
    names = ["a", "b", "c", "d"]
    for name in names:
        text = STREAM.replace("lake/t", str(tmp_path / "lake" / name))
        (tmp_path / f"{name}.toml").write_text(text)
    return names


def test_several_streams_share_one_spark(
    four_streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started by the first and ended after the last."""
    sessions = Sessions(monkeypatch, {})
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *four_streams])
    assert ended.value.code == 0
    assert sessions.used == dict.fromkeys(four_streams, "session 1")
    assert sessions.ended == [("session 1", False)]


def test_a_stream_that_fails_does_not_stop_the_others(
    four_streams: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error is told where it occurs. After platform trouble the next stream gets a new Spark:
    it may be the old one that failed.
    """
    errors = {"a": IntegrityError("a is hurt"), "b": PlatformError("the JVM is gone")}
    sessions = Sessions(monkeypatch, errors)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *four_streams, "nosuch"])
    assert sessions.used == {"a": "session 1", "b": "session 1", "c": "session 2", "d": "session 2"}
    assert sessions.ended == [("session 1", True), ("session 2", False)]
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    for text in ("a is hurt", "the JVM is gone", "3 of 5 streams failed: nosuch ended with"):
        assert printed.count(text) == 1


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([FencedError("x"), IntegrityError("x")], 3),
        ([IntegrityError("x"), PlatformError("x"), FencedError("x")], 4),
        ([PlatformError("x"), ConfigError("x")], 2),
        ([ConfigError("x"), BrokenPromiseError("x"), IntegrityError("x")], 1),
        ([FencedError("x")], 5),
    ],
)
def test_the_gravest_end_decides_the_exit_code(errors: list[SeriatimError], code: int) -> None:
    """The first of 1, 2, 4, 3, 5 that occurred, in whatever order."""
    for ordered in (errors, errors[::-1]):
        by_name = {str(number): error for number, error in enumerate(ordered)}
        assert run._gravest_error(by_name, 9).exit_code == code


@pytest.mark.parametrize("option", [("--trace", "s"), ("--until-offsets", '{"a": {"0": 1}}')])
def test_what_is_of_one_stream_is_refused_for_several(
    four_streams: list[str], option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Offsets and sessions name one stream."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *four_streams, *option])
    assert ended.value.code == 2
    assert f"{option[0]}: 4 streams are named" in capsys.readouterr().err


def test_the_rate_is_that_of_folding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start of Spark, before the first message, makes nobody expect a longer run."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    progress = output.RunProgress("t")
    now[0] = 60.0
    progress(0, 300)
    now[0] = 70.0
    progress(100, 300)
    assert "t: 100 of 300 messages · 10/s · 20 s to go" in capsys.readouterr().err
    now[0] = 560.0
    progress(150, 300)
    assert " · 0.3/s · " in capsys.readouterr().err, "slow is not standing still"


@pytest.mark.parametrize("list_all", [True, False])
def test_ninety_findings_fit_on_one_screen(list_all: bool) -> None:
    """By kind and cause, each with what to type; with --all every one is there."""
    findings = [
        Finding(
            finding="sequence gap",
            topic="a",
            partition=number % 3,
            offset=number,
            session=f"s{number}",
        )
        for number in range(60)
    ]
    findings += [
        Finding(
            finding="poison",
            topic="a",
            partition=0,
            offset=number,
            session="p",
            cause=f"byte {number}",
        )
        for number in range(30)
    ]
    text = "\n\n".join(output.render_findings("t", findings, list_all=list_all))
    assert ("offset 59" in text) == list_all
    assert (len(text.splitlines()) < 40) != list_all
    if not list_all:
        assert "GapError: t 3 partitions: 60 × sequence gap, 60 sessions" in text
        assert "PoisonError: t a/0: 30 × poison, 1 session" in text
        assert "90 findings in all; with --all each is printed" in text
