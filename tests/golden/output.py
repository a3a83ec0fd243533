"""Outputs of each format, kept as files: how they were made, and how they are opened again over the
same messages.

`tests/golden/output_v3/` and `output_v4/` have stream files, three outputs (`out.tar.xz`), and the
messages that made them (`messages.jsonl`). It is what a user of that format has on disk, so every
later version must go on with it. Made by `python -m tests.golden.make output` by the version that
writes the format, which nobody should need again: the files are the point. What comes of it
(`outcomes.json`) is made anew by `python -m tests.golden.make outcomes`, for a deliberate change only.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.golden.messages import Batch, Message, from_lines, sessions_of, to_lines
from tests.golden.outcomes import outcome
from tests.golden.product import NOW_SECONDS, Answer, FakeCluster, command
from tests.golden.shape import answer_shape

HERE = Path(__file__).parent
GOLDEN = HERE / "output_v3"
"""The oldest output. Tests that need one output take this one."""
NEWEST = HERE / "output_v4"
"""What the present format writes."""
GOLDENS = (GOLDEN, NEWEST)
TOPICS = {"in-a": 2, "in-b": 1, "trades": 1}
STREAMS = ("orders", "waiting", "market")
LOST = ("in-b", 0, 24)
"""The message that got lost between Kafka and the fold."""
LATER = 4
"""The phase of the messages that are not folded yet."""


class Script:
    """What the producers send, phase by phase."""

    def __init__(self) -> None:
        self.phases: list[list[Batch]] = []
        self.sequences: dict[tuple[str, str], int] = {}
        self.sent = 0

    def phase(self) -> None:
        """Begin a phase."""
        self.phases.append([])

    def raw(self, place: str, session: str | None, content: bytes | None) -> None:
        """Send bytes."""
        topic, _, partition = place.rpartition("/")
        self.sent += 1
        timestamp = round(NOW_SECONDS * 1000) - 7_200_000 + self.sent * 10_000
        # Sessions of two partitions of one topic have names of their own, so that each can be asked for by name.
        key = None if session is None else f"{session}{partition}".encode()
        self.phases[-1].append(Batch(topic, int(partition), [Message(key, content, timestamp)]))

    def send(self, place: str, session: str, kind: str, **fields: Any) -> None:
        """Send a message of a table, with the next number of its session."""
        number = self.sequences[place, session] = self.sequences.get((place, session), 0) + 1
        self.raw(place, session, json.dumps({"type": kind, "seq": number, **fields}).encode())

    def skip(self, place: str, session: str) -> None:
        """Leave out the next number of a session."""
        self.sequences[place, session] += 1

    def snapshot(self, place: str, session: str, *rows: str) -> None:
        """Send a snapshot of these rows."""
        values = [
            {
                "id": name,
                "price": 1.5 + len(name),
                "size": 10,
                "at": "2026-11-16T12:00:00+02:00",
                "cost": "1.25",
            }
            for name in rows
        ]
        self.send(place, session, "snapshot", rows=values)

    def updates(self, place: str, session: str, row: str, *prices: float | None) -> None:
        """Send an update of one row for each price."""
        for price in prices:
            self.send(place, session, "update", id=row, price=price)

    def order(self, session: str, kind: str, price: str, size: int) -> None:
        """Send a message of the market."""
        content = json.dumps({"kind": kind, "price": price, "size": size}).encode()
        self.raw("trades/0", session, content)


def script() -> Script:
    """All phases."""
    made = Script()
    made.phase()  # 0: all is well
    for place in ("in-a/0", "in-a/1", "in-b/0"):
        for session in ("x", "y", "z"):
            made.snapshot(place, session, "a", "b")
            made.updates(place, session, "a", 1.0, 2.0, None)
            made.send(place, session, "insert", id="c", price=7.25, size=2**53, cost="99.99")
            made.send(place, session, "delete", id="b")
    for session in ("m", "n"):
        made.order(session, "whole", "10", 5)
        made.order(session, "quote", "11", 8)
        made.order(session, "trade", "11", 3)
    made.phase()  # 1: poison, a lost number that comes later, a lost message, restarts
    made.raw("in-a/0", "y", b"poison")
    made.updates("in-a/0", "y", "a", 3.0, 4.0)
    made.raw("in-a/1", "z", b"{")
    made.updates("in-a/1", "z", "a", 5.0)
    made.snapshot("in-a/1", "z", "d", "e")
    made.snapshot("in-a/0", "x", "a", "c", "f")
    made.raw("in-a/1", "x", None)
    made.skip("in-a/1", "y")
    made.updates("in-a/1", "y", "a", 6.0)
    made.updates("in-b/0", "x", "a", 8.0, 9.0)
    made.updates("in-b/0", "y", "a", 8.0, 9.0)
    made.updates("in-b/0", "z", "a", *(float(number) for number in range(4)))
    made.snapshot("in-b/0", "x", "a", "g")
    made.order("m", "trade", "10", 5)
    made.order("n", "trade", "no such price", 1)
    made.phase()  # 2: a price that the suite of expectations does not like
    made.updates("in-a/0", "x", "a", 10.0, -1.0, 11.0)
    made.updates("in-b/0", "x", "a", 12.0)
    made.order("m", "whole", "12", 1)
    made.phase()  # 3: after the compaction
    made.updates("in-a/0", "x", "c", 13.0)
    made.snapshot("in-a/1", "w", "a")
    made.updates("in-a/1", "w", "a", 14.0, 15.0)
    made.order("m", "quote", "13", 4)
    made.phase()  # 4: what a later version folds
    made.snapshot("in-a/0", "y", "a", "b")
    made.updates("in-a/0", "y", "a", 16.0)
    made.updates("in-a/0", "x", "f", 17.0, 18.0)
    made.updates("in-a/1", "w", "a", 19.0)
    made.raw("in-a/1", "w", b"poison again")
    made.snapshot("in-b/0", "z", "h")
    made.updates("in-b/0", "z", "h", 20.0)
    made.order("n", "whole", "10", 2)
    made.order("m", "trade", "13", 1)
    return made


def new_cluster(attempts: str) -> FakeCluster:
    """A Kafka with the topics, and nothing in them."""
    cluster = FakeCluster(attempts)
    for topic, partitions in TOPICS.items():
        cluster.kafka.create(topic, partitions)
    cluster.lose(*LOST)
    return cluster


def done(expected: int, *words: str) -> Answer:
    """Run a command that must end with this exit code."""
    answer = command(*words, "--json")
    assert answer.code == expected, f"{words}: {answer}"
    return answer


def make(folder: Path) -> None:
    """Make the outputs, by the commands that a user types, with the story that they tell."""
    cluster, phases = new_cluster("made"), script().phases
    for path in (folder / "out", folder / "outbox"):
        shutil.rmtree(path, ignore_errors=True)
    lines = [line for number, batches in enumerate(phases) for line in to_lines(number, batches)]
    (folder / "messages.jsonl").write_text("\n".join(lines) + "\n")
    with cluster.installed(folder):
        cluster.produce(phases[0])
        for stream in STREAMS:
            done(0, "run", stream, "--messages-max", "8")
            cluster.clock.sleep(60)
        done(0, "check", "orders")
        done(0, "publish", "orders")
        done(0, "publish", "market", "--unchecked")
        cluster.produce(phases[1])
        for stream in STREAMS:
            done(3, "run", stream, "--messages-max", "9")
            cluster.clock.sleep(60)
        done(0, "repair", "orders", "--partition", "in-b/0", "--forward", "--apply")
        cluster.produce(phases[2])
        done(0, "run", "orders")
        bad = done(3, "check", "orders").objects()[0]
        done(0, "accept", "orders", "--sequence", str(bad["to"]), "--because", "a rebate")
        done(0, "backfill", "orders", "--partition", "in-a/1", "--from", "3", "--until", "9")
        done(0, "compact", "orders")
        cluster.clock.sleep(60)
        cluster.produce(phases[3])
        for stream in STREAMS:
            done(0, "run", stream, "--messages-max", "3")
        done(0, "check", "orders")
        done(0, "publish", "orders")
    for path in folder.rglob("reports"):
        shutil.rmtree(path)
    for path in folder.glob("out/*/*/_delta_log/*.json"):
        # Delta notes where a table was made. It is only a remark, and the folder is nobody's business.
        path.write_text(path.read_text().replace(str(folder), "/golden"))


def pack(folder: Path, golden: Path) -> None:
    """Keep the outputs as one small archive: they are some three hundred files that look much
    alike.
    """
    with tarfile.open(golden / "out.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted((folder / "out").rglob("*")):
            if path.is_file():
                archive.add(path, str(path.relative_to(folder)), filter=_nameless)


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = round(NOW_SECONDS)
    return member


@contextmanager
def opened(folder: Path, golden: Path = GOLDEN) -> Iterator[FakeCluster]:
    """A copy of the golden output in an empty folder, over the messages that made it."""
    with tarfile.open(golden / "out.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for name in ("streams", "expectations"):
        shutil.copytree(golden / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    cluster = new_cluster("later")
    cluster.clock.now += 3_600
    phases = from_lines((golden / "messages.jsonl").read_text().splitlines())
    cluster.produce(batch for phase in range(LATER) for batch in phases[phase])
    with cluster.installed(folder):
        yield cluster


def later(cluster: FakeCluster) -> None:
    """The messages that the output has not seen."""
    cluster.produce(from_lines((GOLDEN / "messages.jsonl").read_text().splitlines())[LATER])


def everything(folder: Path) -> dict[str, Any]:
    """What the three outputs are."""
    batches = [batch for phase in script().phases for batch in phase]
    found = {}
    for stream, topics in (
        ("orders", ("in-a", "in-b")),
        ("waiting", ("in-a",)),
        ("market", ("trades",)),
    ):
        sessions = [place for place in sessions_of(batches) if place[0] in topics]
        found[stream] = outcome(stream, folder / "out" / stream, sessions)
    return found


def told_of(*words: str) -> dict[str, Any]:
    """What a command prints for scripts, and its exit code."""
    return answer_shape(words, command(*words, "--json"), Path.cwd())


def verified(*words: str) -> dict[str, Any]:
    """What verify finds. How many files there are, and which are waiting to be swept, is not pinned
    here.
    """
    answer = command("verify", "orders", *words, "--json")
    values = answer.objects()[0]
    kept = {key: values[key] for key in ("verdict", "sessions", "compared", "folded")}
    difference = values["difference"] and values["difference"]["what"]
    return {"exit": answer.code, **kept, "difference": difference}


def folded_on(cluster: FakeCluster) -> dict[str, Any]:
    """Fold the later messages of all streams; what the runs said."""
    later(cluster)
    return {stream: told_of("run", stream) for stream in STREAMS}


def damage(folder: Path) -> None:
    """Delete the record file that the compaction of one partition made, and change a byte of
    another one's state.
    """
    (records,) = (folder / "out/orders/records/in-a/0").glob("compact-*.parquet")
    records.unlink()
    (state,) = (folder / "out/orders/state/in-b/0").glob("1-25-*.parquet")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0xFF
    state.write_bytes(content)


def repaired(folder: Path) -> dict[str, Any]:
    """Damage the output, and repair it."""
    damage(folder)
    said = [
        verified("--all"),
        told_of("repair", "orders"),
        told_of("repair", "orders", "--apply"),
        verified("--all", "--kafka"),
    ]
    return {"said": said, "outcome": everything(folder)}


def published(folder: Path, cluster: FakeCluster) -> dict[str, Any]:
    """Fold on, compact, check, publish, verify."""
    folded_on(cluster)
    said = [
        told_of(*words)
        for words in (("compact", "orders"), ("check", "orders"), ("publish", "orders"))
    ]
    said.append(told_of("publish", "market", "--unchecked"))
    said.append(verified("--all", "--kafka"))
    return {"said": said, "outcome": everything(folder)}


def outcomes(golden: Path) -> dict[str, Any]:
    """All that this version makes of a golden output."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder, opened(Path(folder), golden) as cluster:
        found["read"] = everything(Path(folder))
        found["verified"] = verified("--all", "--kafka")
        found["runs"] = folded_on(cluster)
        found["folded"] = everything(Path(folder))
    with TemporaryDirectory() as folder, opened(Path(folder), golden):
        found["repaired"] = repaired(Path(folder))
    with TemporaryDirectory() as folder, opened(Path(folder), golden) as cluster:
        found["published"] = published(Path(folder), cluster)
    return found


def pinned(golden: Path = GOLDEN) -> dict[str, Any]:
    """What must come of it."""
    values: dict[str, Any] = json.loads((golden / "outcomes.json").read_text())
    return values
