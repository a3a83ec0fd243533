"""Every command with --json, on good and on hurt streams: what scripts get, for
`tests/golden/json/COMMAND.json`.

A group is a story over a copy of the golden output (output.py). Each command of it is recorded with
its exit code and the shape of every JSON object on stdout and stderr (shape.py). Made by `python -m
tests.golden.make json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.golden.messages import Batch, Message
from tests.golden.output import GOLDEN, later, opened
from tests.golden.product import (
    FakeCluster,
    command,
    commands_with_json,
    forget_modules,
    link_jars,
)
from tests.golden.shape import answer_shape, kinds, shape

FOLDER = Path(__file__).parent / "json"
Cases = dict[str, dict[str, Any]]
"""By command and name of the case."""


class Recorder:
    """Runs commands and remembers what they printed."""

    def __init__(self, folder: Path, cluster: FakeCluster, group: str) -> None:
        self.folder, self.cluster, self.group = folder, cluster, group
        self.cases: Cases = {}

    def __call__(self, case: str, *words: str) -> list[dict[str, Any]]:
        """Run a command with --json; the objects on its stdout."""
        answer = command(*words, "--json")
        entry = answer_shape(words, answer, self.folder)
        name = command_of(words)
        cases = self.cases.setdefault(name, {})
        title = f"{self.group}: {case}"
        assert title not in cases, title
        cases[title] = entry
        return answer.objects()

    def send(self, topic: str, partition: int, session: str, content: Any) -> None:
        """One message more, of now."""
        value = json.dumps(content).encode() if isinstance(content, dict) else content
        message = Message(session.encode(), value, round(self.cluster.clock.now * 1000))
        self.cluster.produce([Batch(topic, partition, [message])])


def command_of(words: tuple[str, ...]) -> str:
    """The command's own name, of one word or two."""
    name = " ".join(words[:2])
    return name if name in commands_with_json() else words[0]


def looking(run: Recorder) -> None:
    """Commands that change nothing."""
    run("one stream", "status", "orders")
    run("all streams", "status")
    run("a window that waits", "status", "waiting")
    run("a further table", "status", "market")
    run("no such stream", "status", "nobody")
    run("caught up", "plan", "orders")
    run("no such stream", "plan", "nobody")
    run("last", "version", "orders")
    run("an entry", "version", "orders", "--sequence", "3")
    run("checked", "version", "orders", "--checked")
    run("table machine", "state", "orders", "x0", "--topic", "in-a")
    run("in several topics", "state", "orders", "x0")
    run("in quarantine", "state", "orders", "y0", "--topic", "in-a")
    run("waiting", "state", "waiting", "y1")
    run("own machine", "state", "market", "m0")
    run("at an entry", "state", "orders", "x0", "--topic", "in-a", "--version", "5")
    run("at an offset", "state", "orders", "x0", "--topic", "in-a", "--at-offset", "4")
    run(
        "at a time", "state", "orders", "x0", "--topic", "in-a", "--at-time", "2026-11-16T12:30:00Z"
    )
    run("difference", "state", "orders", "x0", "--topic", "in-a", "--diff", "2", "25")
    run("no such session", "state", "orders", "nobody")
    run("a session", "trace", "orders", "x0", "--topic", "in-a", "--limit", "4")
    run("findings", "trace", "orders", "y0", "--topic", "in-a", "--findings")
    run("own machine", "trace", "market", "n0")
    run("a stop", "replay", "orders", "x0", "--topic", "in-a", "--break", "offset == 3")
    run("a stop at a finding", "replay", "orders", "y0", "--topic", "in-a", "--break-on-finding")
    run("never", "replay", "orders", "x0", "--topic", "in-a", "--break", "offset == 999")
    run(
        "into a folder",
        "replay",
        "orders",
        "--partition",
        "in-a/0",
        "--to",
        str(run.folder / "again"),
    )
    run("into a folder, all", "replay", "market", "--to", str(run.folder / "market again"))
    run("the same", "diff", "orders", str(run.folder / "again"))
    changed = run.folder / "changed" / "market.py"
    changed.parent.mkdir()
    changed.write_text(
        (GOLDEN / "streams/market.py")
        .read_text()
        .replace("book.sizes[message.price] - size", "size")
    )
    other, again = f"{changed}:Market", str(run.folder / "changed again")
    run("by another machine", "replay", "market", "--machine", other, "--to", again)
    run("it differs", "diff", "market", again)
    never_negative = "all(row.price != -1 for row in state.rows)"
    run(
        "broken",
        "bisect",
        "orders",
        "x0",
        "--topic",
        "in-a",
        "--every",
        "--invariant",
        never_negative,
    )
    run(
        "holds", "bisect", "orders", "x0", "--topic", "in-a", "--invariant", "len(state.rows) < 500"
    )
    run("a row", "explain", "orders", "--row", "c", "--session", "x0", "--topic", "in-a")
    run("several sessions", "explain", "orders", "--row", "a")
    run("nothing", "explain", "orders", "--row", "nothing")
    run("all", "gaps", "orders")
    run("open", "gaps", "orders", "--open")
    run("clean", "verify", "waiting", "--all", "--kafka")
    run("own machine", "verify", "market")
    run("messages", "verify", "orders", "--at", "kafka", "--at", "output")
    capture = run.folder / "capture.jsonl"
    capture.write_text(
        '{"topic": "in-a", "partition": 0, "offset": 0, "key": "x0", "value": "{}", "timestamp": 0}\n'
    )
    run("a capture", "verify", "orders", "--at", "raw", "--at", "kafka", "--capture", str(capture))
    run("written", "report", "orders", "--sequence", "12")
    run("dry run", "compact", "waiting", "--dry-run")
    run("dry run", "publish", "market", "--unchecked", "--dry-run")
    run("plan", "repair", "orders")
    run("nothing is hurt", "repair", "market", "--partition", "trades/0")
    run(
        "dry run",
        "backfill",
        "orders",
        "--partition",
        "in-a/0",
        "--from",
        "2",
        "--until",
        "9",
        "--dry-run",
    )
    run("nothing to accept", "accept", "orders", "in-a", "--dry-run")
    run("dry run", "retire", "orders", "in-b", "--dry-run")
    run("dry run", "quarantine", "release", "orders", "y0", "--topic", "in-a", "--dry-run")
    run("one stream", "watch", "orders", "--once")
    run("all streams", "watch", "--once")
    run("all streams", "top")
    run("without Kafka", "top", "orders", "--no-ask")


def working(run: Recorder) -> None:
    """Commands that do their work on a stream with new messages."""
    later(run.cluster)
    run("a backlog", "plan", "orders")
    run("a finding", "run", "orders")
    run("until offsets", "run", "waiting", "--until-offsets", '{"in-a": {"0": 27}}')
    run("traced", "run", "waiting", "--trace", "w1")
    run("own machine", "run", "market")
    run("nothing new", "run", "market")
    run("good", "check", "orders")
    run("nothing new", "check", "orders")
    run("to the last checked entry", "publish", "orders")
    run("there already", "publish", "orders")
    run("again since an entry", "publish", "orders", "--since", "26")
    run("no key", "publish", "market", "--unchecked", "--rebuild")
    run("done", "compact", "orders")
    run("nothing to do", "compact", "orders")
    run("done", "rebuild", "orders")
    run("done", "backfill", "orders", "--partition", "in-a/0", "--from", "2", "--until", "9")
    run("by time", "backfill", "market", "--from", "2026-11-16T12:00:00Z", "--machine", "unchanged")
    run("done", "quarantine", "release", "orders", "y1", "--because", "a test")
    run(
        "not in quarantine",
        "quarantine",
        "release",
        "orders",
        "x0",
        "--topic",
        "in-a",
        "--because",
        "a test",
    )
    plan = run("a session", "repair", "orders", "--session", "w1")
    run(
        "applied",
        "repair",
        "orders",
        "--session",
        "w1",
        "--apply",
        "--approval",
        plan[0]["approval"],
    )
    run(
        "an old approval",
        "repair",
        "orders",
        "--session",
        "w1",
        "--apply",
        "--approval",
        "of another plan",
    )
    run("no such hold", "repair", "orders", "--abandon", "nobody's")
    run("fold, check and publish", "run", "market", "--check")
    run("done", "retire", "orders", "in-b", "--because", "a test")
    run("retired already", "retire", "orders", "in-b", "--because", "a test")
    run("no reason", "retire", "orders", "in-a")
    run("taken back", "accept", "orders", "in-b", "--because", "a test")


def hurt(run: Recorder) -> None:
    """Partitions that wait: a gap, an expired and a truncated log, a topic that was made again,
    little time left.
    """
    later(run.cluster)
    cluster = run.cluster
    cluster.retain("in-a", 3)
    run("short retention", "plan", "orders")
    cluster.lose("in-a", 0, 27)
    cluster.truncate("in-a", 1, 20)
    cluster.kafka.delete("in-b")
    cluster.kafka.create("in-b")
    run.send("in-b", 0, "new", {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "price": 1.0}]})
    run("findings", "plan", "orders")
    run("findings of partitions", "run", "orders")
    run("waiting", "run", "orders")
    run("waiting", "plan", "orders")
    run("halted", "status", "orders")
    run("concerns", "watch", "orders", "--once")
    run("hurt", "top", "orders")
    run("gap", "gaps", "orders", "--open")
    run("partitions that wait", "repair", "orders")
    run("forward, plan", "repair", "orders", "--partition", "in-a/0", "--forward")
    run("forward, applied", "repair", "orders", "--partition", "in-a/0", "--forward", "--apply")
    run("truncated, applied", "repair", "orders", "--partition", "in-a/1", "--apply")
    run("a new life, dry run", "accept", "orders", "in-b", "--dry-run")
    run("a new life", "accept", "orders", "in-b", "--because", "a test")
    run("after a new life", "status", "orders")
    cluster.kafka.delete("trades")
    run("gone", "run", "market")
    run("gone", "status", "market")
    cluster.expire("in-a", 0, 30)
    run.send("in-a", 0, "x0", b"late")
    cluster.expire("in-a", 0, 31)
    run("expired", "run", "orders")


def doubtful(run: Recorder) -> None:
    """A check that fails, a repair that is interrupted, files that are damaged, an output restored
    from a backup.
    """
    run.send("in-a", 0, "x0", {"type": "update", "seq": 12, "id": "a", "price": -3.0})
    run("well", "run", "orders")
    judged = run("bad", "check", "orders")
    run("circuit open", "status", "orders")
    run("circuit open", "publish", "orders")
    run("circuit open", "watch", "orders", "--once")
    to = str(judged[0]["to"])
    run("a check, dry run", "accept", "orders", "--sequence", to, "--dry-run")
    run("a check", "accept", "orders", "--sequence", to, "--because", "a test")
    backup = run.folder / "backup"
    shutil.copytree(run.folder / "out/orders", backup)
    run.cluster.kills = True
    run("killed", "backfill", "orders", "--partition", "in-a/1", "--from", "2", "--until", "9")
    run.cluster.kills = False
    held = run("held", "status", "orders")[0]["partitions"]
    hold = next(part["held"] for part in held if part["held"])
    run("held", "plan", "orders")
    run("held", "compact", "orders")
    run("abandoned", "repair", "orders", "--abandon", hold)
    (records,) = (run.folder / "out/orders/records/in-a/1").glob("compact-*.parquet")
    records.unlink()
    run("a file is missing", "verify", "orders", "--all")
    run("a file is missing", "repair", "orders")
    run("a file is made again", "repair", "orders", "--partition", "in-a/1", "--apply")
    witness = (run.folder / "out/orders/head.json").read_bytes()
    shutil.rmtree(run.folder / "out/orders")
    shutil.copytree(backup, run.folder / "out/orders")
    (run.folder / "out/orders/head.json").write_bytes(witness)
    run("older than its witness", "status", "orders")
    run("older than its witness", "run", "orders")
    run("older than its witness", "verify", "orders")
    run("restored, dry run", "accept", "orders", "--restored", "--dry-run")
    run("restored", "accept", "orders", "--restored", "--because", "a test")


def beginning(run: Recorder) -> None:
    """Commands of the first hour: what is there, and a stream of one's own."""
    run("all", "topics")
    run("some", "topics", "in-.*")
    run("none", "topics", "nobody")
    run("no pattern", "topics", "(")
    run("all", "streams")
    (run.folder / "streams/broken.toml").write_text("machine = 1\n")
    run("a broken one", "streams")
    lines = run.folder / "lines.jsonl"
    lines.write_text('{"id": "a", "seq": 1}\n{"id": "b", "seq": 2}\n{"id": "a", "seq": 3}\n')
    run("no such topic", "produce", "FILE", str(lines), "--topic", "mine")
    run("sent", "produce", "FILE", str(lines), "--topic", "mine", "--create", "--key", "id")
    run("no such field", "produce", "FILE", str(lines), "--topic", "mine", "--key", "name")
    run("no such file", "produce", "FILE", "nowhere.jsonl", "--topic", "mine")
    run("from a sample", "new", "mine")
    run("there already", "new", "mine")
    run("for the table machine", "new", "copy", "--topic", "in-a")
    run("an example", "new", "later")
    run("no such name", "new", "records")
    forget_modules(run.folder)


GROUPS: dict[str, Callable[[Recorder], None]] = {
    "beginning": beginning,
    "looking": looking,
    "working": working,
    "hurt": hurt,
    "doubtful": doubtful,
}


def doctor() -> Cases:
    """What doctor prints. How many lines there are, and what they say, depends on the machine."""
    with TemporaryDirectory() as folder, opened(Path(folder)):
        lines = [kinds(line) for line in command("doctor", "--json").objects()]
    return {
        "doctor": {
            "doctor: each line": [
                line for number, line in enumerate(lines) if line not in lines[:number]
            ]
        }
    }


def embedded_server(server: str, home: Path) -> Cases:
    """What is said of an embedded server (`kafka`, `s3` or `cluster`): of the one that runs in `home`, and where
    none runs.
    """
    link_jars(home)
    cases: Cases = {f"{server} status": {}, f"{server} start": {}}
    with TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIATIM_HOME", str(home))
        for verb, case in (("status", "runs"), ("start", "runs already")):
            answer = command(server, verb, "--json")
            # Its lines on stderr are for people.
            told = {"exit": answer.code, "stdout": [shape(line, home) for line in answer.objects()]}
            cases[f"{server} {verb}"][f"{server}: {case}"] = told
        patch.setenv("SERIATIM_HOME", empty)
        answer = command(server, "status", "--json")
        told = {"exit": answer.code, "stdout": [shape(line, home) for line in answer.objects()]}
        cases[f"{server} status"][f"{server}: does not run"] = told
    return cases


def recorded(group: str) -> Cases:
    """All cases of a group."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        with opened(root) as cluster:
            run = Recorder(root, cluster, group)
            GROUPS[group](run)
    return run.cases


def file_of(name: str) -> Path:
    """The golden file of a command."""
    return FOLDER / f"{name.replace(' ', '-')}.json"


def write(cases: Cases) -> None:
    """Write golden files."""
    FOLDER.mkdir(exist_ok=True)
    for name, entries in cases.items():
        file_of(name).write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def pinned(group: str) -> Cases:
    """The golden cases of a group."""
    found: Cases = {}
    for name in commands_with_json():
        entries = json.loads(file_of(name).read_text())
        chosen = {
            title: entry for title, entry in entries.items() if title.startswith(f"{group}: ")
        }
        if chosen:
            found[name] = chosen
    return found
