"""Topics that are made again, accepted and retired, on a real broker; ledgers put back; messages
Spark cannot read.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaException, Producer

from seriatim import context, stream_files
from seriatim.operations.accept import accept_topic
from seriatim.operations.run import FoldRun, ProgressCallback, RunOutcome
from tests.integration.lab import Lab, fold_records, silent
from tests.integration.test_slices import snapshot, update

Create = Callable[..., str]


def fold(lab: Lab, name: str, messages_max: int, progress: ProgressCallback) -> RunOutcome:
    """Run a stream in this process, with somebody who acts after each slice."""
    file = stream_files.load_stream(name, lab.settings.streams)
    open_stream = context.open_for_fold(file, lab.settings, silent)
    open_stream.spark.spark = lab.spark()
    return FoldRun(open_stream, progress=progress).run(messages_max)


def make_again(lab: Lab, topic: Create, name: str, partitions: int = 1) -> None:
    """Delete a topic and make it again under its name."""
    lab.admin.delete_topics([name])[name].result(120)
    for left in reversed(range(1200)):
        try:
            topic(partitions, name=name)
            return
        except KafkaException:
            if not left:
                raise
            time.sleep(0.1)


def life(
    name: str, partition: int, rows: str, count: int, price: float
) -> list[tuple[str, int, str, Any]]:
    """One session: a snapshot, then updates."""
    first = (name, partition, f"s{partition}", snapshot(1, *((row, 0.0, 1) for row in rows)))
    return [
        first,
        *(
            (name, partition, f"s{partition}", update(2 + i, rows[0], price + i))
            for i in range(count)
        ),
    ]


def is_right(lab: Lab, stream: str, name: str) -> None:
    """Folding the records in the order of their entries gives the state; no two records have one
    place.
    """
    records = lab.records(stream)
    places = [(row["topic_id"], row["partition"], row["offset"], row["index"]) for row in records]
    assert len(places) == len(set(places))
    ids = list(dict.fromkeys(row["topic_id"] for file in by_commit(lab, stream) for row in file))
    tables = fold_records(
        sorted(records, key=lambda row: (ids.index(row["topic_id"]), row["offset"], row["index"]))
    )
    state = {
        key: {row["id"]: row for row in one["state"]["rows"]}
        for key, one in lab.sessions(stream).items()
    }
    assert {key: table for key, table in tables.items() if table} == state
    assert all(key[0] == name for key in state)


def by_commit(lab: Lab, stream: str) -> list[list[dict[str, Any]]]:
    """The records of each version of the table, oldest first."""
    last = lab.table(stream, "records").version()
    tables = [lab.table(stream, "records", version) for version in range(last + 1)]
    return [table.to_pyarrow_dataset().to_table(use_threads=False).to_pylist() for table in tables]


def test_made_again_between_runs(lab: Lab, topic: Create) -> None:
    """Found, told what to type; accepted by the real command, both lives are in the records; then
    retired.
    """
    name = topic(2)
    lab.send([*life(name, 0, "ab", 3, 1.0), *life(name, 1, "cd", 2, 1.0)])
    stream = lab.stream("again", name)
    lab.fold(stream)
    old = lab.ledger(stream).partitions[f"{name}/0"].topic_id
    make_again(lab, topic, name, 3)
    lab.send(
        [*life(name, 0, "ab", 9, 50.0), *life(name, 1, "x", 1, 60.0), *life(name, 2, "y", 1, 70.0)]
    )

    outcome = lab.fold(stream)

    assert {(f.finding, f.partition_name) for f in outcome.findings} == {
        ("re-created", f"{name}/{p}") for p in range(3)
    }
    assert f"seriatim accept {stream} {name} --because" in outcome.findings[0].advice(stream)
    assert lab.fold(stream).findings == []

    looked = lab.command("accept", stream, name, "--dry-run", "--json")
    done = lab.command("accept", stream, name, "--because", "new cluster", "--json")

    assert done.returncode == 0, done.stderr
    told, seen = json.loads(done.stdout), json.loads(looked.stdout)
    assert told["partitions"] == seen["partitions"]
    assert [
        (p["frontier"], p["starts"], p["sessions"], p["records"]) for p in told["partitions"]
    ] == [
        (4, 0, 1, 2),
        (3, 0, 1, 2),
        (0, 0, 0, 0),
    ]
    entry = lab.manifest(stream, told["sequence"]).entry
    assert (entry.kind, entry.reason) == ("accept", "new cluster")
    assert lab.sessions(stream) == {}

    assert lab.fold(stream).findings == []

    new = lab.ledger(stream).partitions[f"{name}/0"].topic_id
    assert {row["topic_id"] for row in lab.records(stream)} == {old, new}
    assert len(lab.records(stream)) == (5 + 4) + 4 + (11 + 2 + 2)
    is_right(lab, stream, name)
    status = json.loads(lab.command("status", stream, "--json").stdout)
    assert status["verdict"] == "good"
    assert [
        (p["topic_id"], p["frontier"], p["lag"], p["topic_state"]) for p in status["partitions"]
    ] == [
        (new, 10, 0, "live"),
        (new, 2, 0, "live"),
        (new, 2, 0, "live"),
    ]

    looked_at = lab.command("verify", stream, "--kafka")
    assert looked_at.returncode == 0, looked_at.stderr

    over = lab.command("retire", stream, name, "--because", "done")
    assert over.returncode == 0, over.stderr
    lab.send([(name, 0, "s0", update(11, "a", 99.0))])
    assert lab.fold(stream).messages == 0
    assert all(account.retired for account in lab.ledger(stream).partitions.values())


def test_made_again_in_mid_run_between_two_slices(lab: Lab, topic: Create) -> None:
    """The slice under way is not committed, the finding names the topic; after accept both lives
    are there.
    """
    name, other = topic(1), topic(1)
    lab.send([*life(name, 0, "ab", 60, 1.0), *life(other, 0, "q", 60, 1.0)])
    stream = lab.stream("midway", f"{name}|{other}")
    acted: list[int] = []

    def between(done: int, _: int) -> None:
        if done and not acted:
            acted.append(done)
            make_again(lab, topic, name)
            lab.send(life(name, 0, "xy", 200, 500.0))

    outcome = fold(lab, stream, 20, between)

    assert [(f.finding, f.partition_name, f.offset) for f in outcome.findings] == [
        ("re-created", f"{name}/0", acted[0] // 2)
    ]
    accounts = lab.ledger(stream).partitions
    assert (accounts[f"{name}/0"].frontier, accounts[f"{other}/0"].frontier) == (acted[0] // 2, 61)
    old = accounts[f"{name}/0"].topic_id
    assert not [
        row for row in lab.records(stream) if row["topic"] == name and row["price"] == 500.0
    ]

    accept_topic(
        context.ConnectedStream(
            stream_files.load_stream(stream, lab.settings.streams),
            lab.settings,
            writes_records=True,
        ),
        name,
        "meant",
    )
    again = lab.fold(stream, messages_max=50)

    assert (again.findings, again.messages) == ([], 201)
    records = [row for row in lab.records(stream) if row["topic"] == name]
    new = lab.ledger(stream).partitions[f"{name}/0"].topic_id
    assert [row["topic_id"] for row in records].count(new) == 202
    assert {row["topic_id"] for row in records} == {old, new}
    lives = [[row for row in records if row["topic_id"] == one] for one in (old, new)]
    assert fold_records(lives[0])[name, "s0"] == {}
    table = {row["id"]: row for row in lab.sessions(stream)[name, "s0"]["state"]["rows"]}
    assert (
        fold_records(lives[1])[name, "s0"]
        == table
        == {
            "x": {"id": "x", "price": 699.0, "size": 1},
            "y": {"id": "y", "price": 0.0, "size": 1},
        }
    )


def test_a_timestamp_that_spark_cannot_read_halts_its_partition_alone(
    lab: Lab, topic: Create
) -> None:
    """Nanoseconds where milliseconds belong: named with its offset; the others go on, the next run
    is green.
    """
    forever = str(2**63 - 1)
    name = topic(
        2, {"message.timestamp.after.max.ms": forever, "message.timestamp.before.max.ms": forever}
    )
    lab.send([*life(name, 0, "ab", 30, 1.0), *life(name, 1, "cd", 30, 1.0)])
    producer = Producer({"bootstrap.servers": lab.servers})
    producer.produce(
        name, json.dumps(update(32, "a", 5.0)), "s0", 0, timestamp=1_700_000_000_000_000_000
    )
    assert producer.flush(30) == 0
    lab.send([(name, 0, "s0", update(33, "a", 6.0)), (name, 1, "s1", update(32, "c", 6.0))])
    stream = lab.stream("nano", name)

    outcome = lab.fold(stream, messages_max=40)

    (finding,) = outcome.findings
    assert (finding.finding, finding.partition_name, finding.offset) == ("poison", f"{name}/0", 31)
    assert "1700000000000000000" in finding.cause
    frontiers = {
        place: account.frontier for place, account in lab.ledger(stream).partitions.items()
    }
    assert frontiers == {f"{name}/0": 31, f"{name}/1": 32}
    again = lab.fold(stream)
    assert (again.findings, again.messages, len(again.earlier_halts)) == ([], 0, 1)


def test_a_ledger_put_back_on_purpose(lab: Lab, topic: Create) -> None:
    """Refused with the command to type; accepted, the rest is folded again, once."""
    name = topic(1)
    lab.send(life(name, 0, "ab", 3, 1.0))
    stream = lab.stream("backup", name)
    lab.fold(stream)
    root, copy = lab.root(stream), lab.folder / "copy"
    shutil.copytree(root / "records", copy)
    lab.send([(name, 0, "s0", update(5, "a", 9.0))])
    lab.fold(stream)
    digest = lab.digest(stream)
    shutil.rmtree(root / "records")
    shutil.copytree(copy, root / "records")

    refused = lab.command("run", stream)
    assert refused.returncode == 3
    assert f"seriatim accept {stream} --restored --because" in refused.stderr
    done = lab.command("accept", stream, "--restored", "--because", "Monday's backup", "--json")
    assert json.loads(done.stdout)["witness"] == 2, done.stderr
    assert json.loads(done.stdout)["ledger"] == 1
    assert lab.fold(stream).messages == 1
    assert lab.digest(stream) == digest

    shutil.rmtree(root / "records")
    begun = lab.command("accept", stream, "--restored", "--because", "from scratch")
    assert begun.returncode == 0, begun.stderr
    assert "begins at the first offsets" in begun.stdout
    assert lab.fold(stream).messages == 5
    assert lab.digest(stream) == digest
