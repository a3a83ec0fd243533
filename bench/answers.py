"""How soon the command line answers: `--help`, the first line of a trace, and DAGs parsed by
Airflow.

    python -m bench.answers
    python -m bench.answers help dags

Seconds by the clock and of CPU, best and median of several runs, saved in results/answers.json. On
a busy machine the clock says little. What makes these commands quick (nothing heavy is imported,
lines are printed as they come) is held by tests. `trace` starts a broker and folds 10,000 messages
with Spark first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.contenders import TABLE
from bench.data import TOPIC, produce
from bench.run import RESULTS, ROOT, print_progress, temporary_broker

TRACE_MESSAGES = 10_000
TRACED_SESSION = "p0-session-0000"
STREAM_COUNT = 100
PARSE = """
import json, time
from airflow.dag_processing.dagbag import DagBag
import airflow.providers.apache.spark.operators.spark_submit
wall, cpu = time.monotonic(), time.process_time()
bag = DagBag(dag_folder={folder!r})
wall, cpu = time.monotonic() - wall, time.process_time() - cpu
assert len(bag.dags) >= {count} and not bag.import_errors, bag.import_errors
print(json.dumps([wall, cpu]))
"""
Seconds = tuple[float, float]
"""Seconds by the clock, and of CPU."""


def main() -> None:
    """Measure the commands that are named, print and save the figures."""
    measures: dict[str, Callable[[int], list[Seconds]]] = {
        "help": measure_help,
        "trace": measure_trace,
        "dags": measure_dag_parsing,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "only", nargs="*", metavar="WHAT", help=f"of {', '.join(measures)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args()
    for name in options.only:
        if name not in measures:
            parser.error(f"{name} is none of {', '.join(measures)}")
    results_file = Path(options.results) / "answers.json"
    results: dict[str, Any] = {}
    if results_file.exists():
        results = json.loads(results_file.read_text())
    for name in options.only or measures:
        print_progress(f"measuring {name}")
        load = round(os.getloadavg()[0], 1)
        runs = measures[name](options.rounds)
        results[name] = {**summary_of(runs), "load_before": load}
        print(f"{name}: {json.dumps(results[name])}")
    results_file.parent.mkdir(exist_ok=True)
    results_file.write_text(json.dumps(results, indent=2) + "\n")


def summary_of(runs: list[Seconds]) -> dict[str, Any]:
    """Best and median of each clock."""
    return {
        "wall_seconds": _best_and_median([wall for wall, _ in runs]),
        "cpu_seconds": _best_and_median([cpu for _, cpu in runs]),
    }


def _best_and_median(seconds: list[float]) -> dict[str, float]:
    return {"best": round(min(seconds), 2), "median": round(statistics.median(seconds), 2)}


def measure_help(rounds: int) -> list[Seconds]:
    """`seriatim --help`, until its first line."""
    return [first_line(["--help"], {}) for _ in range(rounds)]


def measure_trace(rounds: int) -> list[Seconds]:
    """`seriatim trace` of a session, imports included, until its first line."""
    with temporary_broker() as (home, servers):
        produce(servers, TRACE_MESSAGES)
        (home / "streams").mkdir()
        stream_text = TABLE.replace("TOPIC", TOPIC).replace("OUT", str(home / "out"))
        (home / "streams" / "s.toml").write_text(stream_text)
        environment = {
            "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
            "SERIATIM_STREAMS": str(home / "streams"),
        }
        fold = subprocess.run(
            [sys.executable, "-m", "seriatim", "run", "s"],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if fold.returncode:
            raise SystemExit(f"the stream could not be folded:\n{fold.stderr[-3000:]}")
        arguments = ["trace", "s", TRACED_SESSION, "--json"]
        return [first_line(arguments, environment) for _ in range(rounds)]


def first_line(arguments: Sequence[str], environment: dict[str, str]) -> Seconds:
    """The seconds from the start of a command to its first line."""
    began = time.monotonic()
    command = [sys.executable, "-m", "seriatim", *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        wall = time.monotonic() - began
        # The process lives, or has ended and was not waited for: its CPU time can still be read.
        times = psutil.Process(process.pid).cpu_times()
        process.kill()
    if not line:
        raise SystemExit(f"seriatim {' '.join(arguments)} says nothing")
    return wall, times.user + times.system


def measure_dag_parsing(rounds: int) -> list[Seconds]:
    """Airflow's parser over our DAG folder with a hundred streams; Airflow's own import is not
    counted.
    """
    with tempfile.TemporaryDirectory(prefix="seriatim-bench-") as folder:
        streams = Path(folder) / "streams"
        streams.mkdir()
        for number in range(STREAM_COUNT):
            text = TABLE.replace("TOPIC", f"in-{number}").replace("OUT", f"lake/{number}")
            (streams / f"s{number}.toml").write_text(text)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIRFLOW", "SERIATIM"))
        }
        environment = {
            **inherited,
            "AIRFLOW_HOME": f"{folder}/airflow",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "SERIATIM_HOME": f"{folder}/home",
            "SERIATIM_STREAMS": str(streams),
        }
        return [_parse_dags(environment) for _ in range(rounds)]


def _parse_dags(environment: dict[str, str]) -> Seconds:
    code = PARSE.format(folder=str(ROOT / "dags"), count=STREAM_COUNT)
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"the DAGs could not be parsed:\n{process.stderr[-3000:]}")
    printed_line = process.stdout.splitlines()[-1]
    wall, cpu = json.loads(printed_line)
    return wall, cpu


if __name__ == "__main__":
    main()
