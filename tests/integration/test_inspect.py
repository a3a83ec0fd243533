"""Looking back for real: the commands on a real broker, over what Spark folded."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seriatim import context, stream_files
from seriatim.operations.run import FoldRun
from tests.integration.lab import Lab, silent

COUNT = 10_000


@pytest.fixture
def hurt(lab: Lab, topic: Callable[..., str]) -> tuple[Lab, str, str]:
    """A stream of tier none with a session of 10,000 messages, two of which are swapped: 7777 and
    7778 of its own.
    """
    name = topic(1)
    own: list[dict[str, Any]] = [
        {"type": "snapshot", "seq": 1, "rows": [{"id": "base", "price": 1.0, "size": 1}]}
    ]
    own += [
        {"type": "update", "seq": n, "id": "base", "price": float(n)} for n in range(2, COUNT + 1)
    ]
    own[7777] = {"type": "delete", "seq": 7779, "id": "left-over"}
    own[7778] = {"type": "insert", "seq": 7778, "id": "left-over", "price": 5.0, "size": 5}
    other = {"type": "snapshot", "seq": 1, "rows": []}
    messages: list[Any] = [(name, 0, "else", other)]
    for body in own:
        messages += [(name, 0, "hunted", body), (name, 0, "else", other)]
    lab.send(messages)
    stream = lab.stream("hunt", name, tier="none", sequence=None)
    fold_traced(lab, stream, 12_000)
    return lab, stream, name


def fold_traced(lab: Lab, stream: str, messages_max: int) -> None:
    """Run a stream in this process, with the hunted session traced where its messages are."""
    file = stream_files.load_stream(stream, lab.settings.streams)
    open_stream = context.open_for_fold(file, lab.settings, silent)
    open_stream.spark.spark, open_stream.spark.traced_sessions = lab.spark(), ("hunted",)
    FoldRun(open_stream).run(messages_max)
    store = lab.store(stream)
    keys = [key for key, _ in store.keys("traces/") if key.endswith(".parquet")]
    keys.sort(key=lambda key: int(Path(key).stem.split("-")[1]))
    tables = [pq.read_table(pa.BufferReader(store.read(key))) for key in keys]
    rows = pa.concat_tables(tables).to_pylist()
    assert [row["offset"] for row in rows] == list(range(1, 2 * COUNT, 2))
    assert [row["offset"] for row in rows if row["findings"] != "[]"] == [15555]


def told(lab: Lab, *arguments: str, code: int = 0) -> Any:
    """What a command prints as JSON."""
    done = lab.command(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_the_commands(hurt: tuple[Lab, str, str], tmp_path: Path) -> None:
    """From a row that should not be there to the two offsets, by explain, bisect and trace; then a
    break, a replay.
    """
    lab, stream, name = hurt
    row = told(lab, "explain", stream, "--row", "left-over")
    assert [(touch["offset"], len(touch["records"])) for touch in row["touches"]] == [
        (15555, 0),
        (15557, 1),
    ]
    assert (row["session"], row["value"]["price"]) == ("hunted", 5.0)
    found = told(lab, "bisect", stream, "hunted", "--invariant", "len(state.rows) < 2", code=3)
    assert (found["broken"], found["good"], found["folds"] < 25) == (15557, 15555, True)
    trace = lab.command("trace", stream, "hunted", "--from", "15555", "--until", "15558", "--json")
    steps = [json.loads(line) for line in trace.stdout.splitlines()]
    assert [
        (step["message"]["seq"], [one["finding"] for one in step["findings"]]) for step in steps
    ] == [
        (7779, ["precondition"]),
        (7778, []),
    ]
    state = told(lab, "state", stream, "hunted", "--at-offset", "15556")
    assert (state["offset"], [one["id"] for one in state["state"]["rows"]]) == (15555, ["base"])
    stop = told(lab, "replay", stream, "hunted", "--break", "message.seq == 7778")
    assert (stop["stopped"], len(stop["state"]["rows"])) == (15557, 1)
    again = tmp_path / "again"
    made = told(
        lab, "replay", stream, "--partition", f"{name}/0", "--from", "13000", "--to", str(again)
    )
    assert (made["partitions"][0]["from"], made["partitions"][0]["asked"]) == (12000, 13000)
    assert told(lab, "diff", stream, str(again))["count"] == 0
    refused = lab.command("replay", stream, "hunted", "--break", "message.price <")
    assert (refused.returncode, "is refused" in refused.stderr) == (2, True)
    the_first_line_comes_before_the_end(lab, stream)
    a_terminal_gets_pdb(lab, stream)


def the_first_line_comes_before_the_end(lab: Lab, stream: str) -> None:
    """The trace's first line is printed while the trace goes on: it is not gathered first, and it
    needs no Spark.

    `python -m bench.answers` has the seconds, docs/HUNTING.md the figures.
    """
    process = lab.start("trace", stream, "hunted", "--json")
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    assert line["offset"] == 1
    # The pipe holds less than the whole trace, so a process that is not read from cannot have ended.
    assert process.poll() is None
    below = [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.communicate()
    assert below == [], "a trace starts no other process, and so no Java"


def a_terminal_gets_pdb(lab: Lab, stream: str) -> None:
    """A person at a terminal stops in pdb, inside the machine's apply, and can go on."""
    leader, follower = pty.openpty()
    environment = {
        **os.environ,
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": lab.servers,
        "SERIATIM_STREAMS": str(lab.folder / "streams"),
    }
    command = [
        sys.executable,
        "-m",
        "seriatim",
        "replay",
        stream,
        "hunted",
        "--break",
        "offset == 15557",
    ]
    child = subprocess.Popen(
        command, env=environment, stdin=follower, stdout=follower, stderr=follower, cwd=lab.folder
    )
    os.close(follower)
    os.write(leader, b"p len(state), message.c0\ncontinue\n")
    heard = b""
    try:
        while chunk := os.read(leader, 4096):
            heard += chunk
    except OSError:  # the other side is gone
        pass
    os.close(leader)
    assert child.wait(timeout=300) == 0
    assert b"(1, 'left-over')" in heard
    assert b"def apply" in heard or b"kind = message.__class__" in heard
