"""Repair on a real broker: one command each, and the output is a straight fold of what Kafka holds."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from seriatim import context, stream_files
from seriatim.engine.crash_points import CRASH_POINTS, REPAIR_POINTS, arm
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RefoldResult, RepairRun
from tests.integration.lab import Lab
from tests.integration.test_slices import tables

ADDER = """
from seriatim import Machine
from msgspec import Struct

class Total(Struct):
    value: int = 0

class Add(Struct):
    v: int
    start: bool = False

class Sum(Struct):
    value: int
    was: int

class Adder(Machine[Total, Add, Sum]):
    \"\"\"Adds up.\"\"\"

    def start(self, session: str) -> Total:
        return Total()

    def apply(self, state: Total, message: Add):
        %(bug)s
        was = state.value
        state.value = message.v if message.start else was + message.v
        return [Sum(state.value, was)]

    def is_snapshot(self, message: Add) -> bool:
        return message.start
"""
BUG = """if message.v == 99:
            raise ValueError("ninety-nine")
        if message.v % 13 == 0:
            message = Add(message.v + 1, message.start)"""


def repaired(lab: Lab, name: str, messages_max: int = 100_000, **request: Any) -> RefoldResult:
    """One command, in this process."""
    file = stream_files.load_stream(name, lab.settings.streams)
    tools = context.open_for_fold(file, lab.settings, lambda _: None)
    tools.spark.spark = lab.spark()
    return RepairRun(tools).apply(plan_repair(tools, RepairRequest(**request)), messages_max)


def active(lab: Lab, name: str) -> set[str]:
    """The record files of the table."""
    return set(lab.table(name, "records").get_add_actions(flatten=True)["path"].to_pylist())


def assert_verified(lab: Lab, name: str) -> None:
    """`seriatim verify` finds nothing."""
    ended = lab.command("verify", name)
    assert ended.returncode == 0, ended.stderr


def test_a_lost_record_file_and_a_flipped_bit_in_state(lab: Lab, topic: Callable[..., str]) -> None:
    """Found by the same command; other partitions' files stay under their names."""
    name = topic(3)
    lab.send(tables({name: 3}, 30, 9000))
    one, hurt = lab.stream("one", name), lab.stream("hurt", name)
    lab.fold(one)
    lab.fold(hurt, 2500)
    before, accounts = active(lab, hurt), lab.ledger(hurt).partitions
    record_path = sorted(path for path in before if path.startswith(f"{name}/0/"))[1]
    lab.delete(hurt, f"records/{record_path}")
    lab.flip_bit(hurt, accounts[f"{name}/1"].state[-1].path)

    done = repaired(lab, hurt)

    assert {str(partition) for partition in done.ranges} == {f"{name}/0", f"{name}/1"}
    assert {path for path in before if "/2/" in path} == {
        path for path in active(lab, hurt) if "/2/" in path
    }
    assert lab.digest(hurt) == lab.digest(one)
    assert_verified(lab, hurt)


def test_slices_of_other_partitions_commit_during_a_long_repair(
    lab: Lab, topic: Callable[..., str]
) -> None:
    """Between its stages a run folds what came for the others; the held one waits, and is folded
    afterwards.
    """
    name = topic(3)
    lab.send(tables({name: 3}, 20, 6000))
    one, hurt = lab.stream("one", name), lab.stream("hurt", name)
    lab.fold(hurt, 1500)
    lab.delete(hurt, lab.ledger(hurt).partitions[f"{name}/0"].state[0].path)
    lab.send(tables({name: 3}, 20, 3000, seed=2))
    before = {place: account.frontier for place, account in lab.ledger(hurt).partitions.items()}
    beside: list[dict[str, int]] = []

    def meanwhile(point: str) -> None:
        if point == "stage-folded" and len(beside) < 2:
            arm(None)
            lab.fold(
                hurt,
                300,
                {
                    f"{name}/{part}": before[f"{name}/{part}"] + 400 * (1 + len(beside))
                    for part in (1, 2)
                },
            )
            beside.append(
                {place: account.frontier for place, account in lab.ledger(hurt).partitions.items()}
            )
            arm(meanwhile)

    arm(meanwhile)
    try:
        repaired(lab, hurt, 30, partition=f"{name}/0")
    finally:
        arm(None)
    assert [
        [seen[f"{name}/{part}"] - before[f"{name}/{part}"] for part in range(3)] for seen in beside
    ] == [
        [0, 400, 400],
        [0, 800, 800],
    ]
    entries = [lab.manifest(hurt, number).entry for number in range(lab.ledger(hurt).sequence + 1)]
    kinds = [entry.kind for entry in entries]
    assert kinds[-1] == "repair"
    assert kinds[kinds.index("hold") + 1 : -1].count("slice") >= 4
    lab.fold(hurt)
    lab.fold(one)
    assert lab.digest(hurt) == lab.digest(one)
    assert_verified(lab, hurt)


def test_a_bug_fixed_later(lab: Lab, topic: Callable[..., str]) -> None:
    """Repair finds sessions set aside; what is silently wrong is named; a partition without either
    keeps its files.
    """
    name = topic(3)
    chance, count = random.Random(5), 4000
    values = [99 if chance.random() < 0.002 else chance.randrange(90) for _ in range(count)]
    sent = [(i % 2, f"s{i % 20}", {"v": value, "start": i < 40}) for i, value in enumerate(values)]
    sent += [(2, f"t{i % 20}", {"v": 1 + i % 12, "start": i < 20}) for i in range(count // 2)]
    lab.send([(name, partition, key, value) for partition, key, value in sent])
    module = lab.folder / "streams" / "adder.py"
    given = {"machine": "adder:Adder"}
    module.write_text(ADDER % {"bug": BUG})
    hurt = lab.stream("hurt", name, given)
    assert lab.command("run", hurt, "--messages-max", "900").returncode == 3
    untouched = {path for path in active(lab, hurt) if path.startswith(f"{name}/2/")}
    module.write_text(ADDER % {"bug": "pass"})
    right = lab.stream("right", name, given)
    assert lab.command("run", right).returncode == 0

    ended = lab.command("repair", hurt, "--apply")
    assert ended.returncode == 0, ended.stderr
    assert all(account.quarantined == 0 for account in lab.ledger(hurt).partitions.values())
    assert untouched == {path for path in active(lab, hurt) if path.startswith(f"{name}/2/")}
    ended = lab.command("backfill", hurt, "--partitions", f"{name}/0,{name}/1")
    assert ended.returncode == 0, ended.stderr

    assert untouched == {path for path in active(lab, hurt) if path.startswith(f"{name}/2/")}
    assert len(untouched) > 1
    assert lab.digest(hurt) == lab.digest(right)
    assert_verified(lab, hurt)
    gaps = json.loads(lab.command("gaps", hurt, "--json").stdout)["gaps"]
    assert gaps
    assert all(gap["mended"] for gap in gaps)


def test_messages_gone_before_they_were_read(lab: Lab, topic: Callable[..., str]) -> None:
    """Repair says what is lost; forward goes on and publishes the gap; each session resumes by
    snapshot or proof.
    """
    name = topic(2)
    update = {"type": "update", "id": "a", "price": 2.0}

    def snapshot(sequence: int) -> dict[str, Any]:
        return {"type": "snapshot", "seq": sequence, "rows": [{"id": "a", "price": 1.0, "size": 1}]}

    lab.send(
        [
            (name, 0, "lost", snapshot(1)),
            (name, 0, "whole", snapshot(1)),
            (name, 0, "lost", {**update, "seq": 2}),
        ]
    )
    lab.send([(name, 1, "other", snapshot(1)), (name, 1, "other", {**update, "seq": 2})])
    stream = lab.stream("gone", name)
    lab.fold(stream)
    before = {path for path in active(lab, stream) if path.startswith(f"{name}/1/")}
    lab.send([(name, 0, "lost", {**update, "seq": 3})] * 3)
    lab.delete_records(name, {0: 6})
    lab.send([(name, 0, "whole", {**update, "seq": 2}), (name, 0, "lost", {**update, "seq": 6})])
    assert lab.command("run", stream).returncode == 3

    told = lab.command("repair", stream)
    assert told.returncode == 3
    assert "[3, 6)" in told.stdout
    assert "--forward" in told.stdout + told.stderr
    assert lab.command("repair", stream, "--forward", "--apply").returncode == 0
    ended = lab.command("run", stream, "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["headless"] == 1
    lab.send([(name, 0, "lost", snapshot(7))])
    assert lab.fold(stream).findings == []

    assert (
        before == {path for path in active(lab, stream) if path.startswith(f"{name}/1/")} != set()
    )
    offsets = [
        (row["session"], row["offset"]) for row in lab.records(stream) if row["partition"] == 0
    ]
    assert offsets == [("lost", 0), ("whole", 1), ("lost", 2), ("whole", 6), ("lost", 8)]
    gaps = json.loads(lab.command("gaps", stream, "--json").stdout)["gaps"]
    assert [(gap["session"], gap["from"], gap["until"]) for gap in gaps] == [
        (None, 3, 6),
        ("lost", 7, 8),
    ]
    assert_verified(lab, stream)


POINTS = (
    *REPAIR_POINTS,
    *(
        p
        for p in CRASH_POINTS
        if p not in ("ledger-read", "table-created", "plan-made", "slice-folded")
    ),
)


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p == "stage-folded" else pytest.mark.full) for p in POINTS],
)
def test_killed_at_a_stage_and_again(lab: Lab, topic: Callable[..., str], point: str) -> None:
    """Kill -9 leaves a hold that status shows; the same command finishes the repair."""
    name = topic(2)
    lab.send(tables({name: 2}, 20, 4000))
    one, hurt = lab.stream("one", name), lab.stream("hurt", name)
    lab.fold(one)
    lab.fold(hurt, 1000)
    lab.delete(hurt, lab.ledger(hurt).partitions[f"{name}/0"].state[-1].path)
    words = ("repair", hurt, "--partition", f"{name}/0", "--apply", "--messages-max", "300")

    ended = lab.command(*words, SERIATIM_CRASH_POINT=point)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    held = lab.ledger(hurt).partitions[f"{name}/0"].hold
    assert (held is None) == (
        point in ("manifest-written", "swept", "derived-half", "derived")
    )  # of the hold
    if held is not None:
        assert held in lab.command("status", hurt).stdout
    ended = lab.command(*words)

    assert ended.returncode == 0, ended.stderr
    assert lab.ledger(hurt).partitions[f"{name}/0"].hold is None
    assert lab.digest(hurt) == lab.digest(one)
