"""Whole runs of the command line on a broker of their own: memory by backlog, the idle run,
sessions without new messages, a repair.

    python -m bench.whole backlog --messages 1000000 20000000 --read task spark
    python -m bench.whole idle
    python -m bench.whole sessions
    python -m bench.whole repair

Every run is the command line in a process of its own, Spark's start-up included; memory is the peak
of the whole process tree (PSS). Saved in results/whole.json. Twenty million messages take some
minutes and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka import Producer

from bench.contenders import TABLE
from bench.data import TOPIC, produce, send
from bench.growth import current_load, snapshot, update
from bench.meter import Meter
from bench.run import RESULTS, print_progress, temporary_broker
from seriatim.kafka.sending import create_topics

SAVED_FIGURES = ("seen_cpu_seconds", "wall_seconds", "peak_memory_mb")
TOUCHED_SESSIONS = 1000


def run(
    home: Path,
    servers: str,
    options: argparse.Namespace,
    read: str = "",
    arguments: Sequence[str] = ("run", "s"),
) -> dict[str, Any]:
    """Measure a command from start to end; each value of `slice.read` has an output of its own."""
    (home / "streams").mkdir(exist_ok=True)
    read = read or options.read[0]
    text = TABLE.replace("TOPIC", TOPIC).replace("OUT", str(home / f"out-{read}"))
    text += f'[slice]\nread = "{read}"\nmessages_max = {options.slice}\n'
    (home / "streams" / "s.toml").write_text(text)
    environment = {
        **os.environ,
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_STREAMS": str(home / "streams"),
    }
    command = [sys.executable, "-m", "seriatim", *arguments]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        meter = Meter(psutil.Process(process.pid))
        measurement = meter.measure(process.wait)
    if process.returncode:
        raise SystemExit(f"the run failed:\n{(home / 'log').read_text()[-2000:]}")
    figures = {name: round(measurement[name], 1) for name in SAVED_FIGURES}
    figures["load"] = current_load()
    return figures


def measure_backlog(options: argparse.Namespace) -> dict[str, Any]:
    """The first run over so many messages of backlog, in slices of at most `--slice`."""
    results: dict[str, Any] = {read: {} for read in options.read}
    for count in options.messages:
        with temporary_broker() as (home, servers):
            print_progress(f"making {count:,} messages")
            produce(servers, count)
            for read in options.read:
                figures = run(home, servers, options, read)
                results[read][str(count)] = figures
                print_progress(f"backlog of {count:,}, read by {read}: {figures}")
    return results


def measure_idle(options: argparse.Namespace) -> dict[str, Any]:
    """A run over a few messages, then one without any: Spark is not even started."""
    with temporary_broker() as (home, servers):
        produce(servers, 1000)
        first = run(home, servers, options)
        idle = run(home, servers, options)
    return {options.read[0]: {"first": first, "idle": idle}}


def measure_sessions(options: argparse.Namespace) -> dict[str, Any]:
    """A run that touches 1,000 sessions, ten messages each, of 1,000 and of a million that the
    partition has.
    """
    results = {}
    for session_count in options.messages:
        with temporary_broker() as (home, servers):
            create_topics({"bootstrap.servers": servers}, {TOPIC: 1})
            snapshots = ((f"session-{n:07}", snapshot(1, 3)) for n in range(session_count))
            _send_all(servers, snapshots)
            first = run(home, servers, options)
            step = session_count // TOUCHED_SESSIONS
            updates = []
            for turn in range(10):
                message = update(2 + turn, turn % 3)
                updates += [(f"session-{n * step:07}", message) for n in range(TOUCHED_SESSIONS)]
            _send_all(servers, updates)
            figures = {"first": first, "touched": run(home, servers, options)}
        results[str(session_count)] = figures
        print_progress(f"{session_count:,} sessions: {figures}")
    return {options.read[0]: results}


def measure_repair(options: argparse.Namespace) -> dict[str, Any]:
    """So many messages, folded in ten slices, and all of them folded again: every state file was
    lost.
    """
    results: dict[str, Any] = {read: {} for read in options.read}
    for count in options.messages:
        with temporary_broker() as (home, servers):
            print_progress(f"making {count:,} messages")
            produce(servers, count)
            for read in options.read:
                results[read][str(count)] = _measure_one_repair(home, servers, options, read, count)
    return results


def _measure_one_repair(
    home: Path, servers: str, options: argparse.Namespace, read: str, count: int
) -> dict[str, Any]:
    """Fold, lose every state file, repair, verify."""
    fold = ("run", "s", "--messages-max", str(count // 10))
    first = run(home, servers, options, read, fold)
    state_files = list((home / f"out-{read}" / "state").rglob("*.parquet"))
    for path in state_files:
        path.unlink()
    repair = run(home, servers, options, read, ("repair", "s", "--apply"))
    log_lines = (home / "log").read_text().splitlines()
    figures = {"first": first, "repair": repair, "said": log_lines[-1]}
    print_progress(
        f"{count:,} messages, {len(state_files)} state files lost, read by {read}: {figures}"
    )
    run(home, servers, options, read, ("verify", "s"))
    return figures


def _send_all(servers: str, messages: Iterable[tuple[str, dict[str, Any]]]) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "enable.idempotence": True})
    for key, message in messages:
        send(producer, TOPIC, msgspec.json.encode(message), key, 0)
    producer.flush()


MEASURES: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], list[int]]] = {
    "backlog": (measure_backlog, [1_000_000, 20_000_000]),
    "idle": (measure_idle, []),
    "sessions": (measure_sessions, [1_000, 1_000_000]),
    "repair": (measure_repair, [1_000_000]),
}
"""By name: what measures, and the amounts if `--messages` names none."""


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(MEASURES))
    parser.add_argument("--messages", type=int, nargs="+", default=None, help="amounts to compare")
    parser.add_argument(
        "--read",
        nargs="+",
        default=["task"],
        choices=["task", "spark"],
        help="slice.read, one or both",
    )
    parser.add_argument(
        "--slice", type=int, default=2_000_000, help="slice.messages_max of the stream"
    )
    options = parser.parse_args()
    measure, default_amounts = MEASURES[options.what]
    options.messages = options.messages or default_amounts
    results_file = RESULTS / "whole.json"
    results: dict[str, Any] = {}
    if results_file.exists():
        results = json.loads(results_file.read_text())
    results.setdefault(options.what, {}).update(measure(options))
    results_file.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({options.what: results[options.what]}, indent=2))


if __name__ == "__main__":
    main()
