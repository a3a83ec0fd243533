"""`make bench`: its own broker, the data, every contender in turn, several rounds; a table, a
picture, a JSON file.

What was measured is kept after every run of a contender; the same command goes on where an earlier
one was broken off (`--fresh` begins anew). `--against REF` compares ours with an earlier commit
instead: against.py. Next room: contenders.py.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import against
from bench.contenders import CONTENDERS
from bench.data import MESSAGES, WARM_MESSAGES, WARM_TOPIC, produce
from bench.picture import bars
from seriatim import config
from seriatim.embedded import broker

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
MARKS = "<!-- figures of make bench: begin -->\n", "<!-- end -->\n"
RUN_SECONDS_MAX = 900
ROUNDS = 3
OURS = ("table", "machine", "table-spark", "machine-spark")
Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Measure, print, keep."""
    chosen = _arguments()
    default_names = OURS if chosen.against else tuple(CONTENDERS)
    names = chosen.only.split(",") if chosen.only else list(default_names)
    count = int(MESSAGES * chosen.scale)
    if strange := [name for name in names if name not in CONTENDERS]:
        raise SystemExit(f"no contender is called {strange[0]}; there are {', '.join(CONTENDERS)}")
    if chosen.against:
        compare(chosen.against, names, chosen.rounds or against.ROUNDS, count, Path(chosen.results))
        return
    unfinished = Path(chosen.results) / "unfinished.json"
    runs = {} if chosen.fresh else _begun(unfinished, count)
    with _broker_with_data(count) as (home, servers):
        for name, number in _left(names, chosen.rounds or ROUNDS, runs):
            found = run(name, home, servers, count)
            runs.setdefault(name, []).append(found)
            _refuse_other_answers(runs)
            unfinished.parent.mkdir(exist_ok=True)
            unfinished.write_text(json.dumps({"messages": count, "runs": runs}))
            say(f"round {number + 1} {name}: {_short(found, count)}")
    keep(
        summary({name: runs[name] for name in names}, count), Path(chosen.results), docs=chosen.docs
    )
    unfinished.unlink()


def compare(ref: str, names: list[str], rounds: int, count: int, results: Path) -> None:
    """Our contenders of `ref` and of the working tree in turn; exit code 1 if one has become
    slower.
    """
    commit = against.commit_of(ROOT, ref)
    measured: against.Measured = {name: {"before": [], "now": []} for name in names}
    with against.checked_out(ROOT, ref) as earlier_tree:
        trees: dict[against.Side, Path] = {"before": earlier_tree, "now": ROOT}
        for tree in trees.values():
            against.refuse_other_product(tree)
            against.compile_fold(tree, say)
        with _broker_with_data(count) as (home, servers):
            for number, name, side in against.order_of_runs(names, rounds):
                measurement = run(name, home, servers, count, trees[side])
                measured[name][side].append(measurement)
                against.refuse_other_answers(measured)
                say(f"round {number + 1} {name} {side}: {_short(measurement, count)}")
    contenders = against.compared(measured)
    result = {"ref": ref, "commit": commit, **_circumstances(count), "contenders": contenders}
    results.mkdir(exist_ok=True)
    (results / "against.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(against.table_of(result)))
    if slower := against.slower_contenders(contenders):
        raise SystemExit(f"slower than {ref}: {', '.join(slower)}")


@contextmanager
def _broker_with_data(count: int) -> Iterator[tuple[Path, str]]:
    """The bench's own broker with all messages on it: its folder and its address."""
    home = Path(tempfile.mkdtemp(prefix="seriatim-bench-"))
    try:
        info = broker.start_broker(
            home, program=broker.find_kafka_program(config.load_settings(), say), print_notice=say
        )
        say(f"making {count:,} messages")
        produce(info.bootstrap_servers, count)
        produce(info.bootstrap_servers, WARM_MESSAGES, WARM_TOPIC)
        yield home, info.bootstrap_servers
    finally:
        broker.stop_broker(home, say)
        shutil.rmtree(home, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--rounds", type=int, help=f"default: {ROUNDS}; with --against {against.ROUNDS}"
    )
    parser.add_argument("--only", help=f"contenders, default: all; with --against {','.join(OURS)}")
    parser.add_argument(
        "--against",
        metavar="REF",
        help="compare ours with this commit; exit code 1 if it was faster",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget what a broken-off run has measured"
    )
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument(
        "--docs", action="store_true", help="put table and picture into docs/PERFORMANCE.md"
    )
    return parser.parse_args()


def _begun(unfinished: Path, count: int) -> Runs:
    """What a broken-off run of as many messages has measured."""
    if not unfinished.exists():
        return {}
    kept = json.loads(unfinished.read_text())
    if kept["messages"] != count:
        return {}
    say(
        f"going on with {sum(map(len, kept['runs'].values()))} runs of a bench that was broken off; --fresh forgets it"
    )
    return kept["runs"]


def _left(names: list[str], rounds: int, runs: Runs) -> Iterator[tuple[str, int]]:
    """In turn, so that a slow minute hurts everybody alike."""
    for number in range(rounds):
        for name in names:
            if len(runs.get(name, [])) <= number:
                yield name, number


def run(name: str, home: Path, servers: str, count: int, tree: Path = ROOT) -> dict[str, Any]:
    """One contender of a source tree, in a process and a folder of its own."""
    folder = home / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **against.environment_of(tree),
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_SPARK_DRIVER_MEMORY": "3g",
    }
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "bench.contenders", name, str(folder), str(count), str(home)]
    ended = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=RUN_SECONDS_MAX,
    )
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-3000:]}")
    return {**json.loads(ended.stdout.splitlines()[-1]), "load": round(load, 1)}


def _refuse_other_answers(runs: Runs) -> None:
    """Figures of somebody who did something else mean nothing. The floor folds nothing and has no
    records.
    """
    answers = {
        name: one["answer"]
        for name, all_runs in runs.items()
        for one in all_runs
        if "answer" in one
    }
    folded = {name: found["digest"] for name, found in answers.items() if "digest" in found}
    if len(set(folded.values())) > 1:
        raise SystemExit(f"the answers differ, so the figures mean nothing: {answers}")


def summary(runs: Runs, count: int) -> dict[str, Any]:
    """Best, median and all figures, and ratios to the floor and to ours."""
    contenders, absent = {}, {}
    for name, all_runs in runs.items():
        if reasons := [one["cannot_run"] for one in all_runs if "cannot_run" in one]:
            absent[name] = reasons[0]
            continue
        each = [round(one["cpu_seconds"] / count * 1e6, 3) for one in all_runs]
        contenders[name] = {
            "cpu_us_per_message": {
                "best": min(each),
                "median": round(statistics.median(each), 3),
                "all": each,
            },
            "wall_seconds": round(min(one["wall_seconds"] for one in all_runs), 1),
            "peak_memory_mb": max(one["peak_memory_mb"] for one in all_runs),
            "output_bytes": all_runs[0]["output_bytes"],
            "startup_cpu_seconds": round(min(one["startup_cpu_seconds"] for one in all_runs), 1),
            "load_before": [one["load"] for one in all_runs],
            "answer": all_runs[0]["answer"],
        }
    found = {**_circumstances(count), "contenders": contenders}
    return {**found, "ratios": ratios(contenders), **({"cannot_run": absent} if absent else {})}


def _circumstances(count: int) -> dict[str, Any]:
    """When and where figures were taken, and on how much."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"when": when, "machine": machine, "messages": count}


def ratios(contenders: dict[str, Any]) -> dict[str, Any]:
    """CPU per message: everybody's to the floor's, and every peer's to ours (so many times ours is
    faster).
    """
    pairs = [(name, "floor") for name in contenders]
    peers = [name for name in contenders if name not in OURS and name != "floor"]
    pairs += [(peer, our) for our in OURS for peer in peers]
    return {
        f"{name}/{base}": {
            kind: round(
                contenders[name]["cpu_us_per_message"][kind]
                / contenders[base]["cpu_us_per_message"][kind],
                2,
            )
            for kind in ("best", "median")
        }
        for name, base in pairs
        if base in contenders
    }


def keep(found: dict[str, Any], results: Path, *, docs: bool) -> None:
    """Print the table, store the figures, draw them."""
    results.mkdir(exist_ok=True)
    (results / "latest.json").write_text(json.dumps(found, indent=2) + "\n")
    print("\n".join(table(found)))
    cpu = {name: one["cpu_us_per_message"] for name, one in found["contenders"].items()}
    drawn = bars(
        "CPU µs a message, best and median", {n: (c["best"], c["median"]) for n, c in cpu.items()}
    )
    (results / "latest.svg").write_text(drawn)
    if docs:
        (DOCS / "images" / "bench_contenders.svg").write_text(drawn)
        page = DOCS / "PERFORMANCE.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        page.write_text("".join([before, MARKS[0], "\n".join(table(found)), "\n", MARKS[1], after]))


def table(found: dict[str, Any]) -> Iterator[str]:
    """The figures for people, as Markdown."""
    yield f"{found['messages']:,} messages, {found['machine']}, {found['when']}\n"
    yield "| contender | µs CPU best | median | wall s | peak MB | output MB | × floor | start-up CPU s | load |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, one in found["contenders"].items():
        cpu, ratio = (
            one["cpu_us_per_message"],
            found["ratios"].get(f"{name}/floor", {}).get("best", ""),
        )
        load = ", ".join(map(str, one["load_before"]))
        yield (
            f"| {name} | {cpu['best']:.2f} | {cpu['median']:.2f} | {one['wall_seconds']} | {one['peak_memory_mb']} "
            f"| {one['output_bytes'] / 1e6:.0f} | {ratio} | {one['startup_cpu_seconds']} | {load} |"
        )
    for name, reason in found.get("cannot_run", {}).items():
        yield f"| {name} | cannot run here: {reason} |"


def _short(found: dict[str, Any], count: int) -> str:
    if "cannot_run" in found:
        return f"cannot run here: {found['cannot_run']}"
    return (
        f"{found['cpu_seconds'] / count * 1e6:.2f} µs CPU a message, {found['wall_seconds']:.1f} s"
    )


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
