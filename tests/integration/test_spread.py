"""A hot partition, spread and not, through real Kafka and real Spark."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.integration.lab import Lab, Sent

MACHINE = """
import os
from msgspec import Struct
from seriatim import Machine

class Change(Struct):
    seq: int
    value: int
    begins: bool = False

class Sum(Struct):
    total: int
    process: int

class Sums(Machine[dict[str, int], Change, Sum]):
    def start(self, session): return {"total": 0}
    def is_snapshot(self, message): return message.begins
    def apply(self, state, message):
        state["total"] = message.value + (0 if message.begins else state["total"])
        return [Sum(state["total"], os.getpid())]
"""
SESSIONS = 40


def sent(topic: str, count: int, known: dict[str, int], seed: int) -> list[Sent]:
    """Nearly all messages in one partition."""
    chance, messages = random.Random(seed), []
    for number in range(count):
        partition = 1 if number % 100 == 0 else 0
        name = f"p{partition}-{chance.randrange(SESSIONS)}"
        known[name] = known.get(name, 0) + 1
        value = {"seq": known[name], "value": chance.randrange(9), "begins": known[name] == 1}
        messages.append((topic, partition, name, value))
    return messages


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without who made them."""
    return [{name: value for name, value in row.items() if name != "process"} for row in rows]


def test_a_hot_partition_is_spread_and_nobody_sees_it(lab: Lab, topic: Callable[..., str]) -> None:
    """Two processes fold its sessions, and records, state and findings are those of one; then a
    message is missing.
    """
    name, known = topic(2), dict[str, int]()
    (lab.folder / "streams" / "spreadsums.py").write_text(MACHINE)
    for stream, how in (("one", "partition"), ("many", "session")):
        lab.stream(
            stream, name, {"machine": "spreadsums:Sums", "sequence": "seq", "parallelism": how}
        )
    lab.send(sent(name, 25_000, known, 1))
    assert [lab.fold(stream).messages for stream in ("one", "many")] == [25_000, 25_000]
    one, many = lab.records("one"), lab.records("many")
    assert told(many) == told(one)
    processes = [
        len({row["process"] for row in rows if row["partition"] == 0}) for rows in (one, many)
    ]
    assert processes == [1, 2]

    known["p0-7"] += 1
    lab.send(sent(name, 25_000, known, 2))
    outcomes = [lab.fold(stream) for stream in ("one", "many")]
    assert [[found.finding for found in outcome.findings] for outcome in outcomes] == [
        ["sequence gap"]
    ] * 2
    assert told(lab.records("many")) == told(lab.records("one"))
