"""How soon the command line answers: `--help`, the first line of a trace, and DAGs parsed by
Airflow.

    python -m bench.answers
    python -m bench.answers help dags

Seconds by the clock and of CPU, best and median of several runs, kept in results/answers.json. On a
busy machine the clock says little; what keeps these short (nothing heavy is imported, lines are not
gathered first) is held by tests. `trace` starts a broker and folds 10,000 messages with Spark
first.
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
from bench.run import RESULTS, ROOT, say
from bench.whole import place

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
"""By the clock, and of CPU."""


def main() -> None:
    """Measure what was asked for, print, keep."""
    measures: dict[str, Callable[[int], list[Seconds]]] = {
        "help": help_text,
        "trace": trace,
        "dags": dags,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "only", nargs="*", metavar="WHAT", help=f"of {', '.join(measures)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", default=str(RESULTS))
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.only if name not in measures]:
        parser.error(f"{unknown[0]} is none of {', '.join(measures)}")
    kept_file = Path(chosen.results) / "answers.json"
    kept = json.loads(kept_file.read_text()) if kept_file.exists() else {}
    for name in chosen.only or measures:
        say(f"measuring {name}")
        load = round(os.getloadavg()[0], 1)
        kept[name] = {**summary_of(measures[name](chosen.rounds)), "load_before": load}
        print(f"{name}: {json.dumps(kept[name])}")
    kept_file.parent.mkdir(exist_ok=True)
    kept_file.write_text(json.dumps(kept, indent=2) + "\n")


def summary_of(runs: list[Seconds]) -> dict[str, Any]:
    """Best and median of each clock."""
    wall, cpu = [run[0] for run in runs], [run[1] for run in runs]
    return {
        "wall_seconds": {"best": round(min(wall), 2), "median": round(statistics.median(wall), 2)},
        "cpu_seconds": {"best": round(min(cpu), 2), "median": round(statistics.median(cpu), 2)},
    }


def help_text(rounds: int) -> list[Seconds]:
    """`seriatim --help`, until its first line."""
    return [first_line(["--help"], {}) for _ in range(rounds)]


def trace(rounds: int) -> list[Seconds]:
    """`seriatim trace` of a session, imports included, until its first line."""
    with place() as (home, servers):
        produce(servers, TRACE_MESSAGES)
        (home / "streams").mkdir()
        stream_text = TABLE.replace("TOPIC", TOPIC).replace("OUT", str(home / "out"))
        (home / "streams" / "s.toml").write_text(stream_text)
        environment = {
            "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
            "SERIATIM_STREAMS": str(home / "streams"),
        }
        folded = subprocess.run(
            [sys.executable, "-m", "seriatim", "run", "s"],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if folded.returncode:
            raise SystemExit(f"the stream could not be folded:\n{folded.stderr[-3000:]}")
        return [
            first_line(["trace", "s", TRACED_SESSION, "--json"], environment) for _ in range(rounds)
        ]


def first_line(words: Sequence[str], environment: dict[str, str]) -> Seconds:
    """From the start of a command to its first line."""
    began = time.monotonic()
    command = [sys.executable, "-m", "seriatim", *words]
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
        # Asked of the living process (or of one that nobody has waited for yet), so CPU is up to now.
        times = psutil.Process(process.pid).cpu_times()
        process.kill()
    if not line:
        raise SystemExit(f"seriatim {' '.join(words)} says nothing")
    return wall, times.user + times.system


def dags(rounds: int) -> list[Seconds]:
    """Airflow's parser over our DAG folder with a hundred streams; Airflow's own import is not
    counted.
    """
    with tempfile.TemporaryDirectory(prefix="seriatim-bench-") as folder:
        streams = Path(folder) / "streams"
        streams.mkdir()
        for number in range(STREAM_COUNT):
            text = TABLE.replace("TOPIC", f"in-{number}").replace("OUT", f"lake/{number}")
            (streams / f"s{number}.toml").write_text(text)
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("AIRFLOW", "SERIATIM"))
            },
            "AIRFLOW_HOME": f"{folder}/airflow",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "SERIATIM_HOME": f"{folder}/home",
            "SERIATIM_STREAMS": str(streams),
        }
        return [_parse(environment) for _ in range(rounds)]


def _parse(environment: dict[str, str]) -> Seconds:
    code = PARSE.format(folder=str(ROOT / "dags"), count=STREAM_COUNT)
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"the DAGs could not be parsed:\n{answer.stderr[-3000:]}")
    wall, cpu = json.loads(answer.stdout.splitlines()[-1])
    return wall, cpu


if __name__ == "__main__":
    main()
