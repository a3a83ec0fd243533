"""Whole runs of the command line on a broker of their own: memory by backlog, the idle run,
sessions at rest, a repair.

    python -m bench.whole backlog --messages 1000000 20000000 --read spark task
    python -m bench.whole idle
    python -m bench.whole sessions
    python -m bench.whole repair

Every run is the command line in a process of its own, Spark's start-up included; memory is the peak
of the whole process tree (PSS). Kept in results/whole.json. Twenty million messages take some
minutes and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka import Producer

from bench.contenders import TABLE
from bench.data import TOPIC, produce
from bench.growth import snapshot, update
from bench.meter import Meter
from bench.run import RESULTS, say
from seriatim import config
from seriatim.demo.producer import create_topics
from seriatim.embedded import broker


@contextmanager
def place() -> Iterator[tuple[Path, str]]:
    """A folder with a broker."""
    home = Path(tempfile.mkdtemp(prefix="seriatim-bench-"))
    try:
        info = broker.start_broker(
            home, program=broker.find_kafka_program(config.load_settings(), say), print_notice=say
        )
        yield home, info.bootstrap_servers
    finally:
        broker.stop_broker(home, say)
        shutil.rmtree(home, ignore_errors=True)


def run(
    home: Path,
    servers: str,
    given: argparse.Namespace,
    read: str = "",
    words: Sequence[str] = ("run", "s"),
) -> dict[str, Any]:
    """A command, measured from start to end; each way to read has an output of its own."""
    (home / "streams").mkdir(exist_ok=True)
    read = read or given.read[0]
    text = TABLE.replace("TOPIC", TOPIC).replace("OUT", str(home / f"out-{read}"))
    text += f'[slice]\nread = "{read}"\nmessages_max = {given.slice}\n'
    (home / "streams" / "s.toml").write_text(text)
    more = {"SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers, "SERIATIM_STREAMS": str(home / "streams")}
    command = [sys.executable, "-m", "seriatim", *words]

    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **more}, stdout=log, stderr=log)
        found = Meter(psutil.Process(process.pid)).measure(process.wait)
    if process.returncode:
        raise SystemExit(f"the run failed:\n{(home / 'log').read_text()[-2000:]}")
    kept = ("seen_cpu_seconds", "wall_seconds", "peak_memory_mb")
    return {name: round(found[name], 1) for name in kept} | {"load": round(os.getloadavg()[0], 1)}


def backlog(given: argparse.Namespace) -> dict[str, Any]:
    """The first run over so many messages of backlog, in slices of at most `--slice`."""
    found: dict[str, Any] = {read: {} for read in given.read}
    for count in given.messages:
        with place() as (home, servers):
            say(f"making {count:,} messages")
            produce(servers, count)
            for read in given.read:
                found[read][f"{count}"] = run(home, servers, given, read)
                say(f"backlog of {count:,}, read by {read}: {found[read][f'{count}']}")
    return found


def idle(given: argparse.Namespace) -> dict[str, Any]:
    """A run with a little to do, then one with nothing: Spark is not even started."""
    with place() as (home, servers):
        produce(servers, 1000)
        return {
            given.read[0]: {"first": run(home, servers, given), "idle": run(home, servers, given)}
        }


def sessions(given: argparse.Namespace) -> dict[str, Any]:
    """A run that touches 1,000 sessions, ten messages each, of 1,000 and of a million that the
    partition has.
    """
    found = {}
    for many in given.messages:
        with place() as (home, servers):
            create_topics({"bootstrap.servers": servers}, {TOPIC: 1})
            _send(servers, ((f"session-{n:07}", snapshot(1, 3)) for n in range(many)))
            first = run(home, servers, given)
            step = many // 1000
            _send(
                servers,
                (
                    (f"session-{n * step:07}", update(2 + turn, turn % 3))
                    for turn in range(10)
                    for n in range(1000)
                ),
            )
            found[f"{many}"] = {"first": first, "touched": run(home, servers, given)}
            say(f"{many:,} sessions: {found[f'{many}']}")
    return {given.read[0]: found}


def repair(given: argparse.Namespace) -> dict[str, Any]:
    """So many messages, folded in ten slices, and all of them folded again: every state file was
    lost.
    """
    found: dict[str, Any] = {read: {} for read in given.read}
    for count in given.messages:
        with place() as (home, servers):
            say(f"making {count:,} messages")
            produce(servers, count)
            for read in given.read:
                first = run(
                    home, servers, given, read, ("run", "s", "--messages-max", str(count // 10))
                )
                lost = list((home / f"out-{read}" / "state").rglob("*.parquet"))
                for path in lost:
                    path.unlink()
                again = run(home, servers, given, read, ("repair", "s", "--apply"))
                log = (home / "log").read_text().splitlines()
                found[read][f"{count}"] = {"first": first, "repair": again, "said": log[-1]}
                say(
                    f"{count:,} messages, {len(lost)} state files lost, read by {read}: {found[read][f'{count}']}"
                )
                run(home, servers, given, read, ("verify", "s"))
    return found


def _send(servers: str, messages: Iterator[tuple[str, dict[str, Any]]]) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "enable.idempotence": True})
    for key, value in messages:
        while True:
            try:
                producer.produce(TOPIC, msgspec.json.encode(value), key, 0)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


WHOLE = {
    "backlog": (backlog, [1_000_000, 20_000_000]),
    "idle": (idle, []),
    "sessions": (sessions, [1_000, 1_000_000]),
    "repair": (repair, [1_000_000]),
}


def main() -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(WHOLE))
    parser.add_argument("--messages", type=int, nargs="+", default=None, help="amounts to compare")
    parser.add_argument(
        "--read",
        nargs="+",
        default=["spark"],
        choices=["spark", "task"],
        help="slice.read, one or both",
    )
    parser.add_argument(
        "--slice", type=int, default=2_000_000, help="slice.messages_max of the stream"
    )
    given = parser.parse_args()
    measure, usual = WHOLE[given.what]
    given.messages = given.messages or usual
    kept = RESULTS / "whole.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    found.setdefault(given.what, {}).update(measure(given))
    kept.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({given.what: found[given.what]}, indent=2))


if __name__ == "__main__":
    main()
