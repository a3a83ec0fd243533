"""A real run leaves the status file at its end: what Kafka said, for pages that do not ask it."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.integration.lab import Lab


def test_a_run_leaves_what_kafka_said(lab: Lab, topic: Callable[..., str]) -> None:
    """Log bounds, lag and the end of the run, as of the ledger's last entry; `top` shows it without
    asking.
    """
    name = topic(partitions=2)
    first = {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "price": 1.0, "size": 1}]}
    lab.stream("orders", name)
    lab.send([(name, number, f"session-{number}", first) for number in (0, 1)])
    done = lab.command("run", "orders")
    assert done.returncode == 0, done.stderr
    store = lab.store("orders")
    found = json.loads(bytes(store.read("status.json")))
    assert [
        (one["frontier"], one["log_start"], one["log_end"], one["lag"])
        for one in found["partitions"]
    ] == [
        (1, 0, 1, 0),
        (1, 0, 1, 0),
    ]
    assert found["sequence"] == json.loads(bytes(store.read("head.json")))["sequence"]
    assert found["ran_seconds"] == found["at_seconds"] > 1.7e9
    seen = json.loads(lab.command("top", "--no-ask", "--json").stdout)
    assert (seen["verdict"], seen["lag"], seen["gaps_open"], seen["as_of_seconds"]) == (
        "good",
        0,
        0,
        found["at_seconds"],
    )
