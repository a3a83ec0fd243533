"""`make bench`: its own broker, the data, every contender in turn, several rounds; a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.contenders import CONTENDERS
from bench.data import MESSAGES, produce
from seriatim import config
from seriatim.embedded import broker

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    chosen = parser.parse_args()
    names, count = chosen.only.split(","), int(MESSAGES * chosen.scale)
    home = Path(tempfile.mkdtemp(prefix="seriatim-bench-"))
    try:
        info = broker.start(home, program=broker.program_of(config.load(), say), say=say)
        say(f"making {count:,} messages")
        produce(info.bootstrap_servers, count)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(chosen.rounds):
            for name in names:
                runs[name].append(run(name, home / "work", info.bootstrap_servers))
                say(f"round {number + 1} {name}: {runs[name][-1]['cpu_seconds'] / count * 1e6:.2f} µs CPU a message")
        keep(summary(runs, count))
    finally:
        broker.stop(home, say)
        shutil.rmtree(home)


def run(name: str, folder: Path, servers: str) -> dict[str, Any]:
    """One contender, in a process and a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **os.environ,
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_SPARK_DRIVER_MEMORY": "3g",
    }
    command = [sys.executable, "-m", "bench.contenders", name, str(folder)]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def summary(runs: dict[str, list[dict[str, Any]]], count: int) -> dict[str, Any]:
    """Best, median and all figures, and ratios to the floor."""
    contenders = {}
    for name, all_runs in runs.items():
        each = [round(one["cpu_seconds"] / count * 1e6, 3) for one in all_runs]
        contenders[name] = {
            "cpu_us_per_message": {"best": min(each), "median": round(statistics.median(each), 3), "all": each},
            "wall_seconds": round(min(one["wall_seconds"] for one in all_runs), 1),
            "peak_memory_mb": max(one["peak_memory_mb"] for one in all_runs),
            "answer": all_runs[0]["answer"],
        }
    ratios = {}
    if "floor" in contenders:
        base = contenders["floor"]["cpu_us_per_message"]
        for name, found in contenders.items():
            mine = found["cpu_us_per_message"]
            ratios[f"{name}/floor"] = {kind: round(mine[kind] / base[kind], 2) for kind in ("best", "median")}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"when": when, "machine": machine, "messages": count, "contenders": contenders, "ratios": ratios}


def keep(found: dict[str, Any]) -> None:
    """Print the table, store the figures."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"{found['messages']:,} messages, {found['machine']}")
    print(f"{'':12}{'µs CPU best':>14}{'median':>10}{'wall s':>10}{'peak MB':>10}{'× floor':>10}")
    for name, one in found["contenders"].items():
        cpu, ratio = one["cpu_us_per_message"], found["ratios"].get(f"{name}/floor", {}).get("best", "")
        print(
            f"{name:12}{cpu['best']:>14}{cpu['median']:>10}{one['wall_seconds']:>10}"
            f"{one['peak_memory_mb']:>10}{ratio:>10}"
        )


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
