"""`make bench`: a broker of its own, the data, every contender in turn, several rounds; a table, a
picture, a JSON file.

Figures are saved after every run of a contender; the same command goes on where an earlier one was
interrupted (`--fresh` begins again). `--against REF` compares ours with an earlier commit instead.

Next: contenders.py, what is measured; against.py, the comparison with an earlier commit.
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
from bench.data import WARM_TOPIC, produce_messages
from bench.picture import bar_chart
from bench.shapes import SHAPES, Shape
from seriatim import config
from seriatim.embedded import broker

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
BEGIN_MARK, END_MARK = "<!-- figures of make bench: begin -->\n", "<!-- end -->\n"
RUN_SECONDS_MAX = 900
ROUNDS = 3
OURS = ("table", "machine", "table-spark", "machine-spark")
FIRST_SHAPE = "sessions"
Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Measure, print and save."""
    options = _arguments()
    shape = SHAPES[options.shape]
    names = _chosen_contenders(options, shape)
    count = int(shape.messages * options.scale)
    results = Path(options.results)
    if options.against:
        compare(options.against, names, options.rounds or against.ROUNDS, count, results)
        return
    unfinished = results / f"unfinished{_suffix(options.shape)}.json"
    runs = {} if options.fresh else _load_unfinished(unfinished, count)
    with _broker_with_data(count, shape) as (home, servers):
        for name, number in _remaining_runs(names, options.rounds or ROUNDS, runs):
            measurement = run(name, home, servers, count, shape=shape)
            runs.setdefault(name, []).append(measurement)
            _refuse_other_answers(runs)
            unfinished.parent.mkdir(exist_ok=True)
            unfinished.write_text(json.dumps({"messages": count, "runs": runs}))
            print_progress(f"round {number + 1} {name}: {_one_line(measurement, count)}")
    chosen_runs = {name: runs[name] for name in names}
    result = {"shape": options.shape, **summary(chosen_runs, count)}
    save_results(result, results, docs=options.docs)
    unfinished.unlink()


def _suffix(shape_name: str) -> str:
    """What the names of a shape's files have that those of the first shape lack."""
    return "" if shape_name == FIRST_SHAPE else f"-{shape_name}"


def _chosen_contenders(options: argparse.Namespace, shape: Shape) -> list[str]:
    """The contenders of `--only`, or all that make sense. Exits at an unknown name."""
    if not options.only:
        return list(OURS if options.against else shape.only or CONTENDERS)
    names: list[str] = options.only.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise SystemExit(f"no contender is called {name}; there are {', '.join(CONTENDERS)}")
    return names


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
            against.make_ready(tree, print_progress)
        with _broker_with_data(count) as (home, servers):
            for number, name, side in against.order_of_runs(names, rounds):
                measurement = run(name, home, servers, count, trees[side])
                measured[name][side].append(measurement)
                against.refuse_other_answers(measured)
                line = _one_line(measurement, count)
                print_progress(f"round {number + 1} {name} {side}: {line}")
    contenders = against.compared(measured)
    result = {"ref": ref, "commit": commit, **_circumstances(count), "contenders": contenders}
    results.mkdir(exist_ok=True)
    (results / "against.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(against.table_of(result)))
    if slower := against.slower_contenders(contenders):
        raise SystemExit(f"slower than {ref}: {', '.join(slower)}")


@contextmanager
def _broker_with_data(count: int, shape: Shape = SHAPES[FIRST_SHAPE]) -> Iterator[tuple[Path, str]]:
    """A broker with all messages on it: its folder and its address."""
    with temporary_broker() as (home, servers):
        print_progress(f"making {count:,} messages")
        produce_messages(servers, shape.make_messages(count))
        produce_messages(servers, shape.make_messages(shape.warm_messages), WARM_TOPIC)
        yield home, servers


@contextmanager
def temporary_broker() -> Iterator[tuple[Path, str]]:
    """A broker in a temporary folder: the folder and the broker's address."""
    home = Path(tempfile.mkdtemp(prefix="seriatim-bench-"))
    try:
        program = broker.find_kafka_program(config.load_settings(), print_progress)
        info = broker.start_broker(home, program=program, print_notice=print_progress)
        yield home, info.bootstrap_servers
    finally:
        broker.stop_broker(home, print_progress)
        shutil.rmtree(home, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--shape", choices=SHAPES, default=FIRST_SHAPE, help="the shape of the work"
    )
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
        "--fresh", action="store_true", help="forget what an interrupted run has measured"
    )
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument(
        "--docs", action="store_true", help="put table and picture into docs/PERFORMANCE.md"
    )
    return parser.parse_args()


def _load_unfinished(unfinished: Path, count: int) -> Runs:
    """What an interrupted run of as many messages has measured."""
    if not unfinished.exists():
        return {}
    content = json.loads(unfinished.read_text())
    if content["messages"] != count:
        return {}
    runs: Runs = content["runs"]
    run_count = sum(len(contender_runs) for contender_runs in runs.values())
    print_progress(
        f"going on with {run_count} runs of a bench that was interrupted; --fresh forgets it"
    )
    return runs


def _remaining_runs(names: list[str], rounds: int, runs: Runs) -> Iterator[tuple[str, int]]:
    """The runs that are missing: all contenders in turn, so that a slow minute slows all of them."""
    for number in range(rounds):
        for name in names:
            if len(runs.get(name, [])) <= number:
                yield name, number


def run(
    name: str,
    home: Path,
    servers: str,
    count: int,
    tree: Path = ROOT,
    shape: Shape = SHAPES[FIRST_SHAPE],
) -> dict[str, Any]:
    """One contender of a source tree, in a process and a folder of its own."""
    folder = home / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **against.environment_of(tree),
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_SPARK_DRIVER_MEMORY": "3g",
        "BENCH_SLICE_MESSAGES": str(shape.slice_messages),
    }
    load_before = os.getloadavg()[0]
    command = [sys.executable, "-m", "bench.contenders", name, str(folder), str(count), str(home)]
    process = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=RUN_SECONDS_MAX,
    )
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stderr[-3000:]}")
    printed_line = process.stdout.splitlines()[-1]
    measurement: dict[str, Any] = json.loads(printed_line)
    measurement["load"] = round(load_before, 1)
    if not shape.warm_messages and "cpu_seconds" in measurement:
        _add_start(measurement)
    return measurement


def _add_start(measurement: dict[str, Any]) -> None:
    """Count the start of a contender as its work: from the command on."""
    measurement["cpu_seconds"] += measurement["startup_cpu_seconds"]
    measurement["wall_seconds"] += measurement["startup_wall_seconds"]


def _refuse_other_answers(runs: Runs) -> None:
    """Exit if contenders gave other records: their figures cannot be compared.

    The floor folds nothing and has no records; its answer has no digest.
    """
    answers = {}
    digests = set()
    for name, contender_runs in runs.items():
        for measurement in contender_runs:
            if "answer" in measurement:
                answers[name] = measurement["answer"]
                digests.add(measurement["answer"].get("digest"))
    if len(digests - {None}) > 1:
        raise SystemExit(f"the answers differ, so the figures mean nothing: {answers}")


def summary(runs: Runs, count: int) -> dict[str, Any]:
    """Best, median and all figures, and ratios to the floor and to ours."""
    contenders = {}
    cannot_run = {}
    for name, contender_runs in runs.items():
        reasons = [run["cannot_run"] for run in contender_runs if "cannot_run" in run]
        if reasons:
            cannot_run[name] = reasons[0]
        else:
            contenders[name] = _contender_summary(contender_runs, count)
    result = {
        **_circumstances(count),
        "contenders": contenders,
        "ratios": ratios(contenders),
    }
    if cannot_run:
        result["cannot_run"] = cannot_run
    return result


def _contender_summary(runs: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """The figures of one contender: of times the least, of memory the most."""
    cpu_us = [round(run["cpu_seconds"] / count * 1e6, 3) for run in runs]
    wall_seconds = min(run["wall_seconds"] for run in runs)
    startup_cpu_seconds = min(run["startup_cpu_seconds"] for run in runs)
    return {
        "cpu_us_per_message": {
            "best": min(cpu_us),
            "median": round(statistics.median(cpu_us), 3),
            "all": cpu_us,
        },
        "wall_seconds": round(wall_seconds, 1),
        "peak_memory_mb": max(run["peak_memory_mb"] for run in runs),
        "output_bytes": runs[0]["output_bytes"],
        "startup_cpu_seconds": round(startup_cpu_seconds, 1),
        "load_before": [run["load"] for run in runs],
        "answer": runs[0]["answer"],
    }


def _circumstances(count: int) -> dict[str, Any]:
    """When and where figures were taken, and on how much."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"when": when, "machine": machine, "messages": count}


def ratios(contenders: dict[str, Any]) -> dict[str, Any]:
    """CPU per message: every contender's to the floor's, and every peer's to ours, which is how many
    times faster ours is.
    """
    pairs = [(name, "floor") for name in contenders]
    peers = [name for name in contenders if name not in OURS and name != "floor"]
    pairs += [(peer, our) for our in OURS for peer in peers]
    all_ratios = {}
    for name, base in pairs:
        if base not in contenders:
            continue
        cpu_us = contenders[name]["cpu_us_per_message"]
        base_cpu_us = contenders[base]["cpu_us_per_message"]
        all_ratios[f"{name}/{base}"] = {
            "best": round(cpu_us["best"] / base_cpu_us["best"], 2),
            "median": round(cpu_us["median"] / base_cpu_us["median"], 2),
        }
    return all_ratios


def save_results(result: dict[str, Any], folder: Path, *, docs: bool) -> None:
    """Print the table, save the figures and a picture of them, also in the documents if wanted."""
    folder.mkdir(exist_ok=True)
    shape_name = result["shape"]
    is_first = shape_name == FIRST_SHAPE
    file_name = "latest" if is_first else shape_name
    (folder / f"{file_name}.json").write_text(json.dumps(result, indent=2) + "\n")
    markdown = "\n".join(table(result))
    print(markdown)
    if not is_first:
        return
    bars = {}
    for name, figures in result["contenders"].items():
        cpu_us = figures["cpu_us_per_message"]
        bars[name] = (cpu_us["best"], cpu_us["median"])
    picture = bar_chart("CPU µs a message, best and median", bars)
    (folder / "latest.svg").write_text(picture)
    if docs:
        (DOCS / "images" / "bench_contenders.svg").write_text(picture)
        page = DOCS / "PERFORMANCE.md"
        text_before, _, remainder = page.read_text().partition(BEGIN_MARK)
        _, _, text_after = remainder.partition(END_MARK)
        page.write_text(f"{text_before}{BEGIN_MARK}{markdown}\n{END_MARK}{text_after}")


def table(result: dict[str, Any]) -> Iterator[str]:
    """The figures for people, as Markdown."""
    shape_name = result.get("shape", FIRST_SHAPE)
    shape_text = "" if shape_name == FIRST_SHAPE else f"shape {shape_name}, "
    yield f"{shape_text}{result['messages']:,} messages, {result['machine']}, {result['when']}\n"
    yield "| contender | µs CPU best | median | wall s | peak MB | output MB | × floor | start-up CPU s | load |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, figures in result["contenders"].items():
        cpu_us = figures["cpu_us_per_message"]
        floor_ratio = result["ratios"].get(f"{name}/floor", {}).get("best", "")
        output_mb = figures["output_bytes"] / 1e6
        load = ", ".join(map(str, figures["load_before"]))
        yield (
            f"| {name} | {cpu_us['best']:.2f} | {cpu_us['median']:.2f} "
            f"| {figures['wall_seconds']} | {figures['peak_memory_mb']} "
            f"| {output_mb:.0f} | {floor_ratio} | {figures['startup_cpu_seconds']} | {load} |"
        )
    for name, reason in result.get("cannot_run", {}).items():
        yield f"| {name} | cannot run here: {reason} |"


def _one_line(measurement: dict[str, Any], count: int) -> str:
    if "cannot_run" in measurement:
        return f"cannot run here: {measurement['cannot_run']}"
    cpu_us = measurement["cpu_seconds"] / count * 1e6
    return f"{cpu_us:.2f} µs CPU a message, {measurement['wall_seconds']:.1f} s"


def print_progress(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
