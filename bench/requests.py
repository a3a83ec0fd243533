"""How many requests a run makes of an object store, by what they are about.

    python -m bench.requests                # 12 and 24 partitions and the page, into results/requests.json
    python -m bench.requests --partitions   # the page alone

Every run is the command line in a process of its own. It reaches the embedded S3 server through a
proxy that counts. Measured are one slice in which every partition has new messages, on top of one
that is committed, a run with nothing to do, and refreshes of a page of 50 streams. Requests are counts,
so that a busy machine changes nothing; bytes are those of the messages' own records and state.

Next: docs/DEPLOY.md says what that costs; tests/cli/test_requests.py holds the limits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from confluent_kafka import Producer

from bench.run import RESULTS, print_progress, temporary_broker
from seriatim import config
from seriatim.demo.producer import create_topics
from seriatim.embedded import s3
from seriatim.operations.status import StreamStatus
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import open_store
from seriatim.web.read import PageReader
from tests.s3_proxy import ProxyProcess, proxy_process

TOPIC = "requests"
SESSIONS_PER_PARTITION = 20
UPDATES_PER_SESSION = 50
PAGE_STREAMS = 50
STREAM = """
topics = "requests"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string", price = "float64"}}
output = {path = "s3://seriatim/requests"}
slice = {read = "task"}
"""


def object_kind(path: str) -> str:
    """What a request is about: the folder below the output path, or the file in it."""
    parts = urlsplit(path)
    key = unquote(parts.path)
    if "prefix=" in parts.query:
        key = unquote(parts.query.partition("prefix=")[2].partition("&")[0])
    names = [name for name in key.split("/") if name not in ("", "seriatim")][1:]
    if "_delta_log" in names:
        return f"{names[0]}/_delta_log"
    return names[0] if names else "root"


def count_requests(requests: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The requests by method, by method and kind of object, and all of them."""
    kinds = Counter(f"{method} {object_kind(path)}" for method, path in requests)
    methods = Counter(method for method, _ in requests)
    return {
        "all": len(requests),
        "by_method": dict(sorted(methods.items())),
        "by_object": dict(kinds.most_common()),
    }


@contextmanager
def s3_server(home: Path) -> Iterator[dict[str, str]]:
    """An S3 server; the variables by which clients find it."""
    s3.start_s3_server(config.load_settings(), home, None, print_progress)
    try:
        yield s3.s3_environment(home)
    finally:
        s3.stop_s3_server(home, print_progress)


def send_round(servers: str, partitions: int, number: int) -> None:
    """Messages for every session of every partition; the first round begins with snapshots."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20})
    for partition in range(partitions):
        for session in range(SESSIONS_PER_PARTITION):
            messages: list[dict[str, Any]] = []
            if number == 0:
                rows = [{"id": str(row), "price": 1.0} for row in range(5)]
                messages.append({"type": "snapshot", "seq": 0, "rows": rows})
            for update in range(1, UPDATES_PER_SESSION + 1):
                row = {"type": "update", "id": str(update % 5), "price": float(update)}
                messages.append({**row, "seq": number * UPDATES_PER_SESSION + update})
            for message in messages:
                producer.produce(TOPIC, json.dumps(message), f"{partition}-{session}", partition)
            producer.poll(0)
    if producer.flush(60):
        raise SystemExit("the broker did not take all messages")


def run_stream(home: Path, servers: str, variables: dict[str, str]) -> None:
    """`seriatim run` of the stream."""
    environment = {
        **os.environ,
        **variables,
        "SERIATIM_KAFKA_BOOTSTRAP_SERVERS": servers,
        "SERIATIM_STREAMS": str(home / "streams"),
        "SERIATIM_SPARK_MASTER": "local[2]",
    }
    command = [sys.executable, "-m", "seriatim", "run", "requests"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"the run failed:\n{run.stderr[-2000:]}")


def measure(partitions: int) -> dict[str, Any]:
    """The requests of one slice over so many partitions, and of an idle run after it."""
    figures: dict[str, Any] = {}
    with temporary_broker() as (home, servers), s3_server(home) as variables:
        (home / "streams").mkdir()
        (home / "streams" / "requests.toml").write_text(STREAM)
        create_topics({"bootstrap.servers": servers}, {TOPIC: partitions})
        with proxy_process(variables["AWS_ENDPOINT_URL"]) as proxy:
            counted = {**variables, "AWS_ENDPOINT_URL": proxy.endpoint}

            def count_run(name: str) -> None:
                proxy.take_requests()
                run_stream(home, servers, counted)
                figures[name] = count_requests(proxy.take_requests())
                print_progress(f"{partitions} partitions, {name}: {figures[name]['all']} requests")

            send_round(servers, partitions, 0)
            count_run("first run")
            send_round(servers, partitions, 1)
            count_run("slice")
            count_run("idle run")
    return figures


def measure_page() -> dict[str, Any]:
    """The requests of each refresh of a page of many streams: at first, and after every stream has a
    new entry, until nothing is new.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server(Path(folder)) as variables,
        proxy_process(variables["AWS_ENDPOINT_URL"]) as proxy,
    ):
        os.environ.update({**variables, "AWS_ENDPOINT_URL": proxy.endpoint})
        return _count_refreshes(Path(folder), proxy)


def _count_refreshes(folder: Path, proxy: ProxyProcess) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    files = {}
    for number in range(PAGE_STREAMS):
        name = f"stream{number}"
        path = f"s3://seriatim/{name}"
        (folder / f"{name}.toml").write_text(STREAM.replace("s3://seriatim/requests", path))
        files[name] = StatusFiles(open_store(path), name)
    reader = PageReader(folder, time.time)

    def count_refresh() -> dict[str, Any]:
        proxy.take_requests()
        reader.stream_statuses(list(files))
        counted = count_requests(proxy.take_requests())
        print_progress(f"{PAGE_STREAMS} streams: {counted['all']} requests {counted['by_method']}")
        return counted

    for sequence, what in enumerate(("first look", "every stream has a new entry")):
        for name, of_stream in files.items():
            of_stream.write_status(StreamStatus(stream=name, verdict="good", sequence=sequence))
            witness = {"sequence": sequence, "sha256": "a"}
            of_stream.store.replace("head.json", json.dumps(witness).encode())
        refreshes = [count_refresh()]
        # A refresh that found nothing new has made no request but listings.
        while set(refreshes[-1]["by_object"]) != {"LIST root"}:
            refreshes.append(count_refresh())
        figures[what] = refreshes[0]
        figures[f"{what}, the refreshes"] = [counted["all"] for counted in refreshes]
    figures["nothing is new"] = refreshes[-1]
    return figures


def main() -> None:
    """Measure, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="*", default=[12, 24])
    options = parser.parse_args()
    file = RESULTS / "requests.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    for partitions in options.partitions:
        figures[str(partitions)] = measure(partitions)
    figures["page"] = measure_page()
    file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
