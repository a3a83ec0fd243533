"""Verify with a real broker: what Kafka has is what was folded, transactions and all; and where
they part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Producer

from tests.integration.lab import Lab
from tests.integration.test_slices import snapshot, update


def _transactions(lab: Lab, topic: str) -> None:
    """Ten transactions, every third aborted: markers and messages that a reader of committed ones
    never sees.
    """
    producer = Producer(
        {"bootstrap.servers": lab.servers, "transactional.id": f"verify-{topic}", "log_level": 0}
    )
    producer.init_transactions(30)
    sequence = 1
    for number in range(10):
        producer.begin_transaction()
        for i in range(20):
            body = (
                snapshot(1, ("a", 0.0, 0))
                if sequence + i == 1
                else update(sequence + i, "a", float(i))
            )
            producer.produce(topic, json.dumps(body).encode(), b"s", 0)
        producer.flush(30)
        if number % 3 == 2:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
            sequence += 20


def test_kafka_is_compared_and_the_place_of_parting_named(
    lab: Lab, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Plain and transactional messages are read again as they were folded; a changed capture parts
    at its offset.
    """
    parted, plain = topic(1), topic(1)
    _transactions(lab, parted)
    lab.send([(plain, 0, "p", snapshot(1, ("a", 0.0, 0)))])
    lab.send((plain, 0, "p", update(number, "a", float(number))) for number in range(2, 40))
    stream = lab.stream("verified", f"{parted}|{plain}")
    lab.fold(stream, messages_max=60)

    done = lab.command("verify", stream, "--kafka", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["compared"], found["folded"]) == ("good", 140 + 39, True)

    capture = tmp_path / "capture.jsonl"
    lines = [
        {
            "topic": plain,
            "partition": 0,
            "offset": offset,
            "key": "p",
            "value": (value or b"").decode(),
        }
        for _, offset, _, value in lab.read_topic(plain, 1)
    ]
    lines[7]["value"] = lines[6]["value"]
    capture.write_text("\n".join(map(json.dumps, lines)))
    views = ("--at", "raw", "--at", "kafka", "--at", "output", "--capture", str(capture))
    judged = lab.command("verify", stream, *views, "--json")
    assert judged.returncode == 3, judged.stderr
    told = json.loads(judged.stdout)
    assert [(one["partition"], one["offset"]) for one in told["partings"]] == [(f"{plain}/0", 7)]
    assert [row["level"] for row in told["wrong"] if row["at"] == "kafka"] == ["warning"]

    lab.delete_records(plain, {0: 10})
    later = lab.command("verify", stream, "--all", "--kafka")
    assert later.returncode == 0, later.stderr
    assert f"{plain}/0: Kafka no longer has all of" in later.stderr
