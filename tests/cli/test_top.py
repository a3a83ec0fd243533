"""`seriatim top`: all streams at a glance, as a user types it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from signal import SIGINT, default_int_handler, signal
from threading import Event, Thread
from typing import Any

import pytest
from rich.console import Console

from seriatim import cli, clock, context
from seriatim.cli.top import render_streams_screen, run_in_thread
from seriatim.errors import KafkaSilentError, PlatformError
from tests.web.streams_on_disk import Lake, create_troubled_stream


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A stream in trouble and one that is well, as the command line finds them."""
    made = Lake(tmp_path)
    # `top` says by the real clock how old a look is, and how much of the time left is gone since.
    made.now = time.time()
    worlds: dict[str, Any] = {
        "orders": create_troubled_stream(made),
        "payments": made.stream("payments", slices=1),
    }
    monkeypatch.setenv("SERIATIM_STREAMS", str(made.streams))
    monkeypatch.setattr(context, "log", lambda file, _: worlds[file.stream.name].kafka)
    monkeypatch.setattr(clock, "WallClock", lambda: worlds["orders"].clock)
    return made


def top(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What it says."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", *arguments])
    assert ended.value.code == code
    return capsys.readouterr().out


@pytest.mark.usefixtures("lake")
def test_what_needs_a_person_comes_first_with_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a terminal it looks once, and colours nothing."""
    said = top(capsys)
    assert said.index("orders") < said.index("payments")
    assert "needs a person" in said
    assert "■■■■" in said
    table = [
        line.split()[:3]
        for line in said.partition("orders halted")[0].splitlines()
        if len(line.split()) > 3
    ]
    assert table == [
        ["stream", "tier", "verdict"],
        ["orders", "strict", "needs"],  # needs a person
        ["payments", "strict", "good"],
    ]
    assert "orders halted in-a/2: at offset 165: gap" in said
    assert "→ seriatim repair orders --partition in-a/2" in said
    assert "\033" not in said


def test_scripts_get_one_object_for_each_stream(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its partitions; Kafka is asked, and what it said is left for pages."""
    seen = {one["stream"]: one for one in map(json.loads, top(capsys, "--json").splitlines())}
    orders = seen["orders"]
    assert (orders["verdict"], orders["lag"], orders["quarantined"], orders["gaps_open"]) == (
        "hurt",
        8,
        1,
        2,
    )
    assert (orders["nearest"], orders["partitions"][2]["halted"]["offset"]) == ("in-a/2", 165)
    assert orders["time_left_seconds"] > 0
    assert lake.status("payments").verdict == "good"


def test_without_asking_the_last_look_is_shown(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of a stream that nobody looked at, what the ledger knows."""
    said = top(capsys, "payments", "--no-ask", "--once")
    assert "good" in said
    assert "never" in said
    assert not (lake.folder / "lake" / "payments" / "status.json").exists()


def test_a_broker_that_is_silent_hides_nothing(
    lake: Lake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's side is shown, and why the rest is old."""

    def silent(*_: Any) -> Any:
        raise PlatformError("Kafka does not answer", next="check the broker")

    top(capsys)
    monkeypatch.setattr(context, "log", silent)
    said = top(capsys, "--once")
    assert "payments: Kafka does not answer" in said
    assert "seriatim repair orders" in said
    assert lake.status("payments").verdict == "good"


def test_a_broker_that_is_silent_is_waited_for_once(
    lake: Lake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty seconds for each of two hundred streams would be an hour without a picture."""
    asked: list[str] = []

    def silent(file: Any, _: Any) -> Any:
        asked.append(file.stream.name)
        raise KafkaSilentError("Kafka at x:1 does not answer", next="check the broker")

    for name in (
        "broken",
        "ruined",
    ):  # before and after it, neither of which says anything about Kafka
        (lake.streams / f"{name}.toml").write_text("topics =")
    monkeypatch.setattr(context, "log", silent)
    said = top(capsys)
    assert asked == ["orders"]
    assert "payments: Kafka at x:1 does not answer" in said
    assert "broken: broken.toml: not TOML" in said
    assert "ruined: ruined.toml: not TOML" in said


@pytest.mark.usefixtures("lake")
def test_a_stream_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With the code of bad arguments."""
    top(capsys, "nothing", "--once", code=2)


def test_names_that_a_terminal_would_obey_are_made_visible(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session's name is whatever a producer sent."""
    made = lake.stream("angry", slices=1)
    lake.send(made, 0, "\033[2J\033[31mred", b"poison")
    lake.run(made)
    lake.write_run_status(made)
    said = top(capsys, "angry", "--no-ask", "--once")
    assert "\033" not in said
    assert "red" in said


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40])
def test_a_narrow_terminal_does_without_columns_not_without_names(lake: Lake, width: int) -> None:
    """What a stream is called, how it is and how long there is time is there in full."""
    reader = lake.reader()
    console = Console(width=width, file=StringIO(), force_terminal=False)
    console.print(
        render_streams_screen(
            [reader.stream_status(name) for name in reader.stream_names()], lake.now, width
        )
    )
    said = console.file.getvalue()  # type: ignore[attr-defined]  # it is the text above
    table = said.partition("orders halted")[0]
    # The narrowest terminal breaks the verdict between its words.
    words = ("orders", "payments", "needs a", "person", "time left")
    assert all(word in table for word in words)
    assert ("needs a person" in table) is (width > 40)
    assert "…" not in table
    assert ("Kafka as of" in table) is (width == 200)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C means what it means in a terminal, though a run in the background hands down that it
    is ignored.
    """
    before = signal(SIGINT, default_int_handler)
    yield
    signal(SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_a_look_that_hangs_lets_ctrl_c_through() -> None:
    """A client waits in C for a broker that is silent: Ctrl-C ends the waiting before the client
    answers.
    """
    began, broker_answers, has_ended = Event(), Event(), Event()

    def silent() -> list[Any]:
        began.set()
        with suppress(KeyboardInterrupt):  # a client that waits in C does not notice it
            broker_answers.wait(600)
        has_ended.set()
        return []

    def interrupt() -> None:
        began.wait()
        os.kill(os.getpid(), SIGINT)

    Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(silent)
    assert not has_ended.is_set()
    broker_answers.set()
    assert run_in_thread(list) == []
    with pytest.raises(PlatformError, match="gone"):
        run_in_thread(lambda: _raise(PlatformError("gone")))


def _raise(error: Exception) -> Any:
    raise error
