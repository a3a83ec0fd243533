"""What a bucket costs beside a disk: CPU of whole runs, and what slow requests add to a run.

    python -m bench.bucket cpu --messages 1600000       # into results/bucket.json
    python -m bench.bucket latency

Every run is the command line in a process of its own, at local[2], with the embedded broker and S3 server.

- cpu: the same messages into an output on disk and into one in a bucket, in turn. CPU seconds are those
  of the run with everything below it; the servers are not in them.
- latency: one slice of 12 partitions through two proxies, in turn. One of them makes each request
  30 ms longer. On a busy machine the wall of two runs differs by more than that adds, so there is a
  second figure: for how long at least one request was made to wait. The run cannot grow by more.

Next: requests.py counts the requests; docs/DEPLOY.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.data import TOPIC, produce
from bench.growth import current_load
from bench.meter import Meter
from bench.requests import STREAM, s3_server, send_round
from bench.requests import TOPIC as SLICE_TOPIC
from bench.run import RESULTS, print_progress, temporary_broker
from seriatim.kafka.sending import create_topics
from tests.s3_proxy import proxy_process

PARTITIONS = 12
DELAY_SECONDS = 0.03


def measured_run(
    home: Path, servers: str, topic: str, name: str, path: str, variables: dict[str, str]
) -> dict[str, float]:
    """`seriatim run` of a stream with this output path, from start to end."""
    (home / "streams").mkdir(exist_ok=True)
    text = STREAM.replace('"requests"', f'"{topic}"', 1).replace("s3://seriatim/requests", path)
    (home / "streams" / f"{name}.toml").write_text(text)
    environment = {
        **os.environ,
        **variables,
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_STREAMS": str(home / "streams"),
        "SERIATIM_SPARK_MASTER": "local[2]",
    }
    command = [sys.executable, "-m", "seriatim", "run", name]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        measurement = Meter(psutil.Process(process.pid)).measure(process.wait)
    if process.returncode:
        raise SystemExit(f"the run failed:\n{(home / 'log').read_text()[-2000:]}")
    figures = {
        "cpu_seconds": round(measurement["seen_cpu_seconds"], 1),
        "wall_seconds": round(measurement["wall_seconds"], 1),
        "load": current_load(),
    }
    print_progress(f"{path}: {figures}")
    return figures


def measure_cpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The ratio of CPU in a bucket to CPU on disk, of so many messages, after each round; the first runs
    of outputs.
    """
    runs: dict[str, list[dict[str, float]]] = {"disk": [], "bucket": []}
    with temporary_broker() as (home, servers), s3_server(home) as variables:
        produce(servers, options.messages)
        for turn in range(options.rounds):
            on_disk = (f"disk{turn}", str(home / f"lake{turn}"))
            in_bucket = (f"bucket{turn}", f"s3://seriatim/cpu{turn}")
            for kind, place in (("disk", on_disk), ("bucket", in_bucket)):
                runs[kind].append(measured_run(home, servers, TOPIC, *place, variables))
            yield {"messages": options.messages, **_cpu_figures(runs)}


def _cpu_figures(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    best = {kind: min(run["cpu_seconds"] for run in of_kind) for kind, of_kind in runs.items()}
    medians = {
        kind: statistics.median(run["cpu_seconds"] for run in of_kind)
        for kind, of_kind in runs.items()
    }
    return {
        "runs": runs,
        "ratio_by_best": round(best["bucket"] / best["disk"], 3),
        "ratio_by_median": round(medians["bucket"] / medians["disk"], 3),
    }


def waiting_seconds(arrivals: list[float]) -> float:
    """For how long at least one request was made to wait. Waits of requests that came at the same time
    count once.
    """
    total = 0.0
    end = 0.0
    for arrival in sorted(arrivals):
        total += arrival + DELAY_SECONDS - max(arrival, end)
        end = arrival + DELAY_SECONDS
    return round(total, 2)


def measure_latency(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What 30 ms more for each request add to the wall of a run of one slice, after each round."""
    runs: dict[str, list[dict[str, float]]] = {"near": [], "far": []}
    with temporary_broker() as (home, servers), s3_server(home) as variables:
        create_topics({"bootstrap.servers": servers}, {SLICE_TOPIC: PARTITIONS})
        endpoint = variables["AWS_ENDPOINT_URL"]
        near_proxy = proxy_process(endpoint)
        far_proxy = proxy_process(endpoint, delay_seconds=DELAY_SECONDS)
        with near_proxy as near, far_proxy as far:
            for turn in range(options.rounds + 1):
                send_round(servers, PARTITIONS, turn)
                for kind, proxy in (("near", near), ("far", far)):
                    at = {**variables, "AWS_ENDPOINT_URL": proxy.endpoint}
                    path = f"s3://seriatim/{kind}"
                    proxy.take_requests()
                    run = measured_run(home, servers, SLICE_TOPIC, kind, path, at)
                    run["requests"] = len(proxy.take_requests())
                    run["waiting_seconds"] = waiting_seconds(proxy.arrivals)
                    # The first run of an output makes its tables.
                    if turn:
                        runs[kind].append(run)
                if turn:
                    yield {"delay_seconds": DELAY_SECONDS, **_latency_figures(runs)}


def _latency_figures(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    differences = [
        round(far_run["wall_seconds"] - near_run["wall_seconds"], 1)
        for near_run, far_run in zip(runs["near"], runs["far"], strict=True)
    ]
    return {
        "runs": runs,
        "wall_grows_by_seconds": statistics.median(differences),
        "wall_grows_at_most_by_seconds": max(run["waiting_seconds"] for run in runs["far"]),
    }


MEASURES = {"cpu": measure_cpu, "latency": measure_latency}


def main() -> None:
    """Measure, and store the figures beside the others, after every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--messages", type=int, default=1_600_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    file = RESULTS / "bucket.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    for figures_so_far in MEASURES[options.what](options):
        figures[options.what] = figures_so_far
        file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
