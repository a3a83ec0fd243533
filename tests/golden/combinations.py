"""Every combination of tier and machine, as stream files, and what the command line makes of each.

`tests/golden/digests.json` has the outcome of each. Made by `python -m tests.golden.make digests`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.golden.messages import PARTITIONS, sessions_of, world
from tests.golden.outcomes import digest, findings, outcome
from tests.golden.product import FakeCluster, command

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PINNED = HERE / "digests.json"
TIERS = ("none", "once", "order", "window", "strict")
MACHINES = {"table": "tables", "orderbook": "books"}
"""A machine, and the messages it is made for."""
COMBINATIONS = [(tier, machine) for tier in TIERS for machine in MACHINES]
MESSAGES_MAX = 260
"""Messages of a slice, so that there are several."""
TABLE = 'machine = "table"\ntable = {key = ["id"], columns = {id = "string", price = "float64", size = "int64"}}\n'
ORDERBOOK = 'machine = "orderbook:OrderBook"\n'


def stream_text(tier: str, machine: str, topics: str, read: str) -> str:
    """A stream file."""
    more = TABLE if machine == "table" else ORDERBOOK
    return (
        f'topics = "{topics}"\ntier = "{tier}"\nsequence = "seq"\n{more}'
        "window_messages = 6\nwindow_seconds = 3600\nsession_timeout_hours = 6\n"
        f'output = {{path = "out/{tier}-{machine}"}}\nslice = {{read = "{read}"}}\n'
    )


def write_stream(
    folder: Path, tier: str, machine: str, topics: str = "golden-[ab]", read: str = "task"
) -> str:
    """Write the stream file of a combination; its name."""
    (folder / "streams").mkdir(exist_ok=True)
    shutil.copy(ROOT / "streams" / "orderbook.py", folder / "streams")
    name = f"{tier}-{machine}"
    (folder / "streams" / f"{name}.toml").write_text(stream_text(tier, machine, topics, read))
    return name


def folded_in_memory(folder: Path, tier: str, machine: str) -> dict[str, Any]:
    """What the command line makes of a combination, over a Kafka in memory."""
    batches = world(MACHINES[machine])
    cluster = FakeCluster()
    for topic, partitions in PARTITIONS.items():
        cluster.kafka.create(topic, partitions)
    cluster.produce(batches)
    name = write_stream(folder, tier, machine)
    with cluster.installed(folder):
        answer = command("run", name, "--messages-max", str(MESSAGES_MAX), "--json")
        told = findings(answer.told(), {})
        digests = outcome(name, folder / "out" / name, sessions_of(batches))
    return {**digests, "findings": digest(told), "findings_count": counted(told)}


def counted(told: list[dict[str, Any]]) -> dict[str, int]:
    """How many findings there are of each kind."""
    kinds = [f"{row['finding']} ({row['level']})" for row in told]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def pinned() -> dict[str, Any]:
    """The golden outcomes, by name of the stream."""
    values: dict[str, Any] = json.loads(PINNED.read_text())
    return values
