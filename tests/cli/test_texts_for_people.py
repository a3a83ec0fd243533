"""What commands print for people: each number has its unit, each advice does what it says, and no
fact stands there twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.product import Answer, FakeCluster, command

STREAM = """
topics = "in-[a-z]+"
machine = "table"
sequence = "seq"
tier = "strict"
table = {key = ["id"], columns = {id = "string", v = "int64"}}
output = {path = "lake/s"}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    """A stream of one topic with two partitions; nothing is folded."""
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/s.toml").write_text(STREAM)
    cluster = FakeCluster()
    cluster.kafka.create("in-a", 2)
    with cluster.installed(tmp_path):
        yield cluster


def send(cluster: FakeCluster, partition: int, session: str, *contents: Any) -> None:
    """Send messages of a session: a list of rows is a snapshot, a number a later update with this
    sequence, bytes are bytes.
    """
    for content in contents:
        body = {"type": "update", "seq": content, "id": "a", "v": content}
        if isinstance(content, list):
            rows = [{"id": row, "v": 0} for row in content]
            body = {"type": "snapshot", "seq": 1, "rows": rows}
        value = content if isinstance(content, bytes) else json.dumps(body).encode()
        now_ms = round(cluster.clock.now_seconds() * 1000)
        cluster.kafka.produce("in-a", session, value, partition=partition, timestamp=now_ms)


def flat(text: str) -> str:
    """A text in one line."""
    return " ".join(text.split())


def run_with(cluster: FakeCluster, *contents: Any) -> Answer:
    """Session x of partition 0 and session y of partition 1 send the same, and a run folds it."""
    send(cluster, 0, "x", ["a"], *contents)
    send(cluster, 1, "y", ["a"], *contents)
    return command("run", "s")


def test_advice_about_several_partitions_names_none(cluster: FakeCluster) -> None:
    """The command that is offered for a group is about all of its sessions, and plans for all."""
    findings = run_with(cluster, b"{").err
    shown = flat(command("status", "s").out)
    assert "2 sessions" in shown
    assert "seriatim repair s" in shown
    assert "seriatim repair s --partition" not in shown
    (plan,) = command("repair", "s", "--json").objects()
    assert [part["partition"] for part in plan["parts"]] == ["in-a/0", "in-a/1"]
    # In the findings of the run each of the two stands by itself, with its partition.
    assert "seriatim repair s --partition in-a/1" in flat(findings)


def test_poison_of_a_session_is_healed_by_a_snapshot_not_by_a_refold(cluster: FakeCluster) -> None:
    """The advice says so. `--forward` passes over nothing here: it plans the same refold."""
    send(cluster, 0, "x", ["a"], b"{")
    finding = flat(command("run", "s").err)
    assert "ask the producer for a snapshot of the session" in finding
    assert "Folding again helps only if the decoder, the schema registry" in finding
    assert "fix the producer" not in finding
    plans = [
        command("repair", "s", "--partition", "in-a/0", *options, "--json").objects()[0]["parts"]
        for options in ([], ["--forward"])
    ]
    assert plans[0] == plans[1]
    assert [part["what"] for part in plans[0]] == ["refold"]
    repaired = command("repair", "s", "--apply")
    assert repaired.code == 3
    assert "poison at offset 1 is still there" in repaired.err
    assert "the same messages give them again: ask the producer for a snapshot" in flat(
        repaired.err
    )
    send(cluster, 0, "x", ["a", "b"])
    assert command("run", "s").code == 0
    assert command("status", "s").out.startswith("s: good,")


def test_poison_is_healed_by_a_refold_once_the_stream_file_reads_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """The stored messages are decoded again, as the stream file is now."""
    snapshot = b'{"type":"snapshot","kind":"snapshot","seq":1,"rows":[{"id":"a","v":0}]}'
    send(cluster, 0, "x", snapshot, b'{"kind":"update","seq":2,"id":"a","v":2}')
    assert command("run", "s").code == 3
    file = tmp_path / "streams/s.toml"
    file.write_text(file.read_text().replace("table = {", 'table = {type_field = "kind", '))
    assert command("repair", "s", "--apply").code == 0


def test_status_says_that_a_message_never_came_once(cluster: FakeCluster) -> None:
    """In the title of the group; the session has the sequence, and the advice what helps."""
    run_with(cluster, 3)
    shown = command("status", "s").out
    assert shown.startswith("s: needs a person, tier strict")
    assert shown.count("never came") == 1
    assert "sequence 2 is not in Kafka, up to the end of the log at offset 2" in shown
    assert "cannot help" not in shown
    planned = command("repair", "s")
    assert planned.out.count("never came") == 2  # one for each session
    assert "cannot help" not in planned.out
    assert "IntegrityError" not in planned.out
    assert planned.err.startswith("IntegrityError: s: 2 problems are left\n")
    assert "see 'not repaired by this' above" in planned.err


def test_a_plan_without_an_action_says_that_it_would_change_nothing(cluster: FakeCluster) -> None:
    """It only says what cannot be repaired, so nothing would be done in a commit."""
    run_with(cluster, 3)
    planned = command("repair", "s").out
    assert "s: as of entry 1, this repair would change nothing" in planned
    assert "in one commit" not in planned


def test_a_session_in_quarantine_in_another_partition_is_told(cluster: FakeCluster) -> None:
    """Of two partitions, state shows the one with the newer message, where the session is live."""
    send(cluster, 0, "x", ["a"], b"{")
    command("run", "s")
    cluster.clock.now += 60
    send(cluster, 1, "x", ["a"])
    command("run", "s")
    said = "s: session 'x' was in in-a/0 (in quarantine there) as well; this is in-a/1"
    for words in (
        ["state", "s", "x"],
        ["state", "s", "x", "--at-offset", "0"],
        ["trace", "s", "x"],
    ):
        shown = command(*words)
        assert said in shown.err, words
        (notice,) = [json.loads(line) for line in command(*words, "--json").err.splitlines()]
        partitions = [{"partition": "in-a/0", "status": "quarantined"}]
        assert notice == {"other_partitions": partitions, "message": said}, words
    assert command("state", "s", "x").out.startswith(
        "x in in-a/1, live, last message at offset 0\n"
    )


def test_a_stream_that_waits_for_a_person_says_so_everywhere(cluster: FakeCluster) -> None:
    """Scripts get one word, people a sentence."""
    run_with(cluster, 3)
    for words in (["status", "s"], ["watch", "s", "--once"], ["streams"], ["top", "s"]):
        answer = command(*words)
        assert "needs a person" in flat(answer.out), words
        assert "hurt" not in answer.out, words
    assert command("status", "s", "--json").objects()[0]["verdict"] == "hurt"
    assert command("streams", "--json").objects()[0]["streams"][0]["state"] == "hurt"


def test_the_loss_bound_says_between_what(cluster: FakeCluster) -> None:
    """In messages and minutes, and what that means."""
    send(cluster, 0, "x", ["a"], 2, 3)
    command("run", "s")
    assert (
        "Largest distance between two snapshots of a session: 2 messages, 0.0 minutes"
        " (one lost message can damage up to this much)"
    ) in command("status", "s").out


def test_gaps_say_which_numbers_are_offsets_and_which_entries(cluster: FakeCluster) -> None:
    """In the table; the keys of JSON are shorter, and stay."""
    run_with(cluster, 3)
    heading, *_ = command("gaps", "s").out.strip().splitlines()
    for words in ("from offset", "until offset", "opened by entry", "repaired by entry"):
        assert words in heading
    (gaps,) = command("gaps", "s", "--json").objects()
    assert {"from", "until", "opened", "closed", "closed_how", "mended"} <= set(gaps["gaps"][0])


def test_a_plan_of_nothing_says_nothing_new(cluster: FakeCluster) -> None:
    """And names what waits, with the command that says why. A new topic without a message is shown."""
    assert "s: new partitions, without a message so far" in command("plan", "s").out
    run_with(cluster, 3)
    assert flat(command("plan", "s").out) == (
        "s: nothing new s: 2 sessions in quarantine; `seriatim status s` says why"
    )
    send(cluster, 0, "x", 4)
    assert "s: 1 message in about 1 slice" in command("plan", "s").out


def test_the_rows_of_explain_say_what_the_numbers_are(cluster: FakeCluster) -> None:
    """Offsets are called so, and a row exists or was deleted."""
    run_with(cluster, 2)
    heading, _, *rows = command("explain", "s", "--row", "a").out.strip().splitlines()
    assert all(words in heading for words in ("first offset", "last offset", "row now"))
    assert all(row.rstrip().endswith("exists") for row in rows)
    shown = command("explain", "s", "--row", "a", "--session", "x").out
    assert "\n  offset 1  " in shown
    assert "\nrow now: {" in shown
    (sessions,) = command("explain", "s", "--row", "a", "--json").objects()
    assert [row["now"] for row in sessions["sessions"]] == ["there", "there"]


def test_a_repair_shows_how_a_lost_file_is_made_again_and_with_apply_does_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """As `verify` says it."""
    run_with(cluster, 2)
    (lost,) = tmp_path.rglob("records/in-a/0/*.parquet")
    lost.unlink()
    verified = command("verify", "s", "--all")
    advice = "`seriatim repair s` shows how it is made again from Kafka, and does it with --apply;"
    assert advice in flat(verified.out + verified.err)
    assert "nothing was changed" in command("repair", "s", "--partition", "in-a/0").out
    assert command("verify", "s", "--all").code == 3
    assert command("repair", "s", "--partition", "in-a/0", "--apply").code == 0
    assert command("verify", "s", "--all").code == 0
