"""Commands that look back: what they refuse, and how a step is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from seriatim.cli import main, replay
from seriatim.cli.diff import ComparedRecords, _warn_missing_messages
from seriatim.cli.lookback import (
    LookbackCommand,
    message_values,
    parse_offset,
    parse_time_ms,
    print_step,
    render_time,
    render_value,
    step_values,
)
from seriatim.cli.replay import with_machine
from seriatim.cli.state import SessionState
from seriatim.engine.findings import shorten
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.operations.inspect.diff import DiffResult, RecordDifference
from seriatim.operations.inspect.replay import ReplayOutput
from seriatim.stream_files import StreamFile, load_runner, load_stream
from tests.operations.lookback_helper import head_of, session_replay, trace_steps
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send

STREAM = """
topics = "in-.*"
machine = "table"
[table]
key = ["id"]
columns = { id = "string", v = "int64" }
[output]
path = "lake/s"
"""
MACHINE = """
from msgspec import Struct
from seriatim import Machine

class Sum(Struct):
    total: int = 0

class Add(Struct):
    v: int

class Adder(Machine[Sum, Add, Add]):
    def start(self, session):
        return Sum()

    def apply(self, state, message):
        state.total += message.v
        return [Add(state.total)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of streams, one of which was never run."""
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams" / "s.toml").write_text(STREAM)
    monkeypatch.setenv("SERIATIM_STREAMS", str(tmp_path / "streams"))
    monkeypatch.setenv("SERIATIM_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["state", "s", "x", "--version", "1", "--at-offset", "2"],
            "--version and --at-offset cannot be given together",
        ),
        (
            ["state", "s", "x", "--partition", "in-a/0"],
            "--partition needs --at-offset, --at-time or --diff",
        ),
        (["state", "s", "x", "--at-time", "yesterday"], "neither an offset nor a time"),
        (["state", "s", "x", "--at-offset", "2"], "never run"),
        (["trace", "s", "x"], "never run"),
        (["trace", "nobody", "x"], "no stream 'nobody'"),
        (["bisect", "s", "x", "--invariant", "1"], "never run"),
        (["explain", "s", "--row", "a"], "never run"),
        (["state", "s", "\udcff"], "is not UTF-8: messages with such a key belong to no session"),
        (["state", "s", "\udcff", "--at-offset", "2"], "is not UTF-8"),
        (["trace", "s", "\udcff"], "is not UTF-8"),
        (["bisect", "s", "\udcff", "--invariant", "1"], "is not UTF-8"),
        (["replay", "s", "\udcff", "--step"], "is not UTF-8"),
        (["explain", "s", "--row", "a", "--session", "\udcff"], "is not UTF-8"),
        (["run", "s", "--trace", "\udcff"], "is not UTF-8"),
        (["trace", "s", "x", "--partition", f"in-a/{'9' * 5_000}"], "never run"),
        (["replay", "s", "x"], "must know where to stop"),
        (["replay", "s"], "stops in one session, or goes into a folder"),
        (
            ["replay", "s", "x", "--machine", "a:B", "--step"],
            "stops in one session, or goes into a folder",
        ),
        (["replay", "s", "x", "--break", "nobody == 1"], "is refused"),
        (
            ["replay", "s", "x", "--break", "1", "--to", "/tmp/nowhere-at-all"],
            "a break point is for one",
        ),
        (["replay", "s", "--to", "streams"], "not empty"),
        (["replay", "s", "--to", "lake/s"], "the output of stream s is"),
        (["replay", "s", "--to", "lake/s/deep"], "the output of stream s is"),
        (["replay", "s", "--to", "lake"], "the output of stream s is"),
        (["replay", "s", "--to", "link/lake/s"], "the output of stream s is"),
        (["replay", "s", "--to", "link/lake/s/deep"], "the output of stream s is"),
        (["replay", "s", "--to", "nowhere"], "a link that leads nowhere"),
        (["replay", "s", "--to", "nowhere/deep"], "a link that leads nowhere"),
        (["replay", "s", "--to", "circle"], "a link that leads nowhere"),
        (["replay", "s", "--to", "streams/s.toml/x"], "is a file"),
        (["replay", "s", "--to", "a\tb"], "has '\\t' in it, which Delta's library does not take"),
        (["diff", "s", "s"], "never run"),
        (["diff", "./streams", "s"], "no replay.json"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 and one screen that says what to do next, without a stack trace."""
    monkeypatch.chdir(folder)
    for link, to in (("link", "."), ("nowhere", "not-there"), ("circle", "circle")):
        (folder / link).symlink_to(to)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in told
    assert "  next  " in told
    assert "Traceback" not in told


@pytest.mark.parametrize(("stream", "named"), [("orders", "orders"), ("it's", "'it'\"'\"'s'")])
def test_outputs_that_differ_are_told_with_a_command_to_paste(stream: str, named: str) -> None:
    """It names the stream whose messages they are, which a folder of a replay says."""
    row = {"session": "x", "offset": 7}
    parting = RecordDifference(partition=Partition("a", 3), offset=7, index=0, left=row, right=None)
    result = DiffResult(only_left=1, differences=[parting])
    error = ComparedRecords("/tmp/again", "other", stream, result).error()
    assert error
    assert error.next == f"seriatim trace {named} x --partition a/3 --from 2 --until 8"


def test_a_replay_without_a_session_says_how_it_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the name that was typed."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(["replay", "s"])
    assert "seriatim replay s SESSION --break" in capsys.readouterr().err


def test_times_can_be_pasted_back() -> None:
    """What a trace prints is what --from takes."""
    for ms in (0, 1_794_845_532_367, -1_000):
        assert render_time(ms).startswith(("19", "20"))
    assert parse_time_ms(render_time(1_794_845_532_367)) == 1_794_845_532_367
    assert parse_time_ms("2026-11-16T08:00Z") == 1_794_816_000_000
    with pytest.raises(ConfigError, match="neither"):
        parse_time_ms("2026-13-99T99:99Z")
    assert render_time(10**17) == f"{10**17} ms"


def test_what_a_terminal_would_act_on_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages, rows and findings come from strangers: no escape reaches the terminal."""
    for hostile in ("\x1b[2J", "\x9b2J", "\x07", "\u202e", "\r"):
        assert render_value({"id": hostile}).isprintable()
        assert shorten(hostile).isprintable()
    made = create_stream(tier="none")
    made.kafka.create("in-a", 1)
    bad = '{"type": "insert", "id": "\\u001b[2J\\u009b\\u202e<script>", "v": 1}'
    send(made, A0, ["a"], bad.encode(), b"\x1b]0;title\x07", 5)
    made.run()
    for step in trace_steps(made):
        print_step(made.machine(), step, 2)
    told = capsys.readouterr().out
    assert not {"\x1b[2", "\x9b", "\x07", "\u202e", "\x1b]"} & {
        told[i : i + n] for n in (1, 2, 3) for i in range(len(told))
    }
    assert "not committed yet" in told
    assert "<script>" in told


def test_a_step_for_scripts() -> None:
    """All that is known of a message, as plain values."""
    made = create_filled_stream(1)
    made.run()
    step = trace_steps(made)[1]
    assert step_values(made.machine(), step, 3) == {
        "offset": 1,
        "time": "1970-01-01T00:00:00.001Z",
        "sequence": None,
        "outcome": "applied",
        "committed": True,
        "message": {"type": "update", "id": "a", "v": 1},
        "changes": [{"what": "a", "before": {"id": "a", "v": 0}, "after": {"id": "a", "v": 1}}],
        "records": [{"index": 0, "op": "update", "id": "a", "v": 1}],
        "findings": [],
        "damaged": False,
        "quarantined": False,
    }


def test_a_message_with_a_field_poison_is_no_poison() -> None:
    """Only a message that cannot be decoded is shown with its raw text."""
    made = create_filled_stream(1)
    send(made, A0, b"{")
    made.run()
    steps = trace_steps(made)
    own_message = replace(steps[1], raw=b'{"poison": 1}')
    assert message_values(made.machine(), own_message) == {"poison": 1}
    poison_values = [message_values(made.machine(), step) for step in steps if step.raw == b"{"]
    assert [values["raw"] for values in poison_values] == ["{"]


def test_another_machine_from_a_file(folder: Path) -> None:
    """By its path; the stream's own if both names are, another one else. What is no machine is
    refused in words.
    """
    file = load_stream("s", folder / "streams")
    (folder / "fixed.py").write_text(MACHINE)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "leaving.py").write_text("raise SystemExit(0)")
    other, same = with_machine(file, f"{folder / 'fixed.py'}:Adder")
    assert (same, load_runner(other).columns) == (False, {"v": "int64"})
    own = StreamFile(load_stream("s", folder / "streams").stream, file.folder)
    assert with_machine(own, None) == (own, True)
    assert with_machine(own, "table") == (own, True)
    for text, said in (
        (f"{folder / 'broken.py'}:Adder", "ZeroDivisionError"),
        (f"{folder / 'leaving.py'}:Adder", "SystemExit"),
        (f"{folder / 'absent.py'}:Adder", "there is no file"),
        ("~nobody-here/x.py:Adder", "no such home"),
        ("../../etc/passwd", "is no machine"),
        ("os:system; rm", "is no machine"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_machine(file, text)


def test_an_edge_is_an_offset_or_a_time() -> None:
    """A number that no log can have is refused in words, however long it is; digits of other
    alphabets are none.
    """
    assert (parse_offset("0"), parse_offset("41337"), parse_offset("9" * 18)) == (
        0,
        41337,
        int("9" * 18),
    )
    for text in ("9" * 19, "9" * 5_000, "-1", "\u0663", "1.5", ""):
        assert parse_offset(text) is None
        with pytest.raises(ConfigError, match="neither an offset nor a time"):
            parse_time_ms(text)
    for text in ("9" * 10, "9" * 5_000, "\u0663", "-1"):
        with pytest.raises(ConfigError, match="is not a partition"):
            Partition.parse(f"in-a/{text}")


def test_a_time_of_which_kafka_knows_nothing_is_refused() -> None:
    """Messages were dropped: the first at a time may be one of them, and no later state is shown
    for it.
    """
    made = create_filled_stream(1)
    send(made, A0, 3, 4)
    made.run()
    opened = LookbackCommand(StreamFile(made.stream, ""), made.open(), head_of(made))
    assert [opened.resolve_point(session_replay(made), render_time(ms)) for ms in (0, 3, 9)] == [
        0,
        3,
        5,
    ]
    made.kafka.delete_records(A0, 2)
    assert opened.resolve_point(session_replay(made), render_time(3)) == 3
    assert opened.resolve_point(session_replay(made), "1") == 2
    for dropped, ms in ((2, 1), (2, 2), (5, 3)):
        made.kafka.delete_records(A0, dropped)
        with pytest.raises(
            ConfigError, match=f"in-a/0: which message came first .* from offset {dropped} on"
        ):
            opened.resolve_point(session_replay(made), render_time(ms))


def test_nothing_false_and_empty_are_told_apart() -> None:
    """A state's table shows null, false and an empty text as three things, numbers and texts as
    they are.
    """
    values = {"nothing": None, "no": False, "yes": True, "empty": "", "number": 0, "text": "a"}
    place = {"session": "s", "topic": "in-a", "partition": 0, "status": "live", "offset": 7}
    shown = SessionState({**place, "state": {"rows": [values]}}).render()
    assert shown.splitlines()[-2].split() == [
        "null",
        "false",
        "true",
        '""',
        "0",
        "a",
    ]


def test_a_replay_says_what_it_did_without(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages that Kafka has no longer: told by the replay, in its manifest, and by whoever
    compares it.
    """
    part = ReplayOutput(
        partition=A0,
        topic_id="x",
        requested_start=0,
        start=0,
        until=9,
        base_sequence=-1,
        messages=6,
        missing_messages=3,
    )
    outputs = [part, replace(part, missing_messages=0)]
    replay.ReplayedRanges("s", "again", outputs, {}).render()
    assert (
        capsys.readouterr().err.count(
            "3 messages that were folded when this was committed are not in Kafka"
        )
        == 1
    )
    _warn_missing_messages("again", {"partitions": [replay._output_values(part)]})
    assert "again was folded without 3 messages of in-a/0" in capsys.readouterr().err
    for damaged in ({}, {"partitions": 7}, {"partitions": [7]}):
        _warn_missing_messages("again", damaged)
    assert capsys.readouterr().err == ""
