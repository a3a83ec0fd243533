"""What reviews of integrity found: each was wrong once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from seriatim import Machine
from seriatim.engine.machine import UserMachine
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.operations.accept import accept_restored_ledger
from seriatim.operations.release import release_session
from seriatim.operations.status import read_status
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream
from tests.contracts.disk_streams import DiskStream
from tests.contracts.verify_helper import verify
from tests.operations.memory_streams import A0, A1
from tests.operations.raising_machine import Adder
from tests.operations.test_tiers import (
    create_sequenced_stream,
    errors_of,
    marks,
    quarantine_reason,
    send_message,
)


@pytest.mark.long
@pytest.mark.parametrize("in_two_slices", [False, True])
def test_messages_that_waited_and_were_set_aside_are_no_damage(
    tmp_path: Path, in_two_slices: bool
) -> None:
    """They are older than their slice, and verify knows."""
    one = DiskStream(tmp_path, tier="window")
    one.kafka.create("in-a", 1)
    send_message(one, 1, rows=["a"])
    send_message(one, 3, 3)
    if in_two_slices:
        one.run()
    one.kafka.produce("in-a", "s", b"{", partition=0)
    one.run()
    assert verify(tmp_path, everything=True).difference is None


@pytest.mark.parametrize("slices", [1, 4])
def test_a_message_dropped_by_the_window_keeps_its_session_alive(slices: int) -> None:
    """Expiry goes by it, whatever the slices."""
    one = create_sequenced_stream("window", session_timeout_hours=1)
    for seq, minutes in ((2, 0), (2, 50), (3, 100)):
        body = json.dumps({"type": "update", "id": "a", "v": seq, "seq": seq}).encode()
        one.kafka.produce("in-a", "s", body, partition=0, timestamp=minutes * 60_000)
    one.run(messages_max=1 if slices > 1 else 100)
    assert [row["op"] for row in one.rows()] == ["snapshot", "snapshot", "update", "update"]


def test_a_session_that_begins_in_two_partitions_lives_in_the_first() -> None:
    """Without snapshots it cannot be told who is right; one of them goes on, and the other can be
    released.
    """
    stream = Stream(
        name="s",
        topics="in-.*",
        machine="angry:Adder",
        sequence="seq",
        output=OutputSettings(path="memory"),
    )
    one = MemoryStream(stream, lambda: UserMachine("angry:Adder", Adder, "seq"))
    one.kafka.create("in-a", 2)
    for part, seq in ((0, 1), (0, 2), (1, 3), (0, 3)):
        one.kafka.produce("in-a", "s", json.dumps({"seq": seq, "add": 1}).encode(), partition=part)
    outcome = one.run()
    assert [(f.finding, f.partition) for f in outcome.findings] == [("moved session", 1)]
    assert [row["total"] for row in one.rows(A0)] == [1, 2, 3]


class Rows(Struct):
    """Rows by name."""

    rows: dict[str, int]


class Put(Struct):
    """A row."""

    name: str
    v: int


class Fragile(Machine[Rows, Put, Put]):
    """Cannot take back a 7, and finds out half way."""

    def start(self, session: str) -> Rows:  # noqa: ARG002  # all begin empty
        """No rows."""
        return Rows({})

    def apply(self, state: Rows, message: Put) -> Iterable[Put]:
        """One record per row."""
        state.rows[message.name] = message.v
        yield message

    def end(self, state: Rows) -> Iterable[Put]:
        """Takes rows out one by one."""
        while state.rows:
            name, v = state.rows.popitem()
            if v == 7:
                raise ValueError("seven")
            yield Put(name, 0)


def test_an_end_that_raises_leaves_the_last_good_state() -> None:
    """The session is set aside with all its rows."""
    stream = Stream(
        name="s",
        topics="in-.*",
        machine="x:Fragile",
        session_timeout_hours=1,
        output=OutputSettings(path="memory"),
    )
    one = MemoryStream(stream, lambda: UserMachine("x:Fragile", Fragile))
    one.kafka.create("in-a", 1)
    sent: list[tuple[dict[str, Any], int]] = [
        ({"name": "a", "v": 7}, 0),
        ({"name": "b", "v": 1}, 0),
        ({"name": "c", "v": 1}, 3 * 3_600_000),
    ]
    for body, time in sent:
        one.kafka.produce("in-a", "s", json.dumps(body).encode(), partition=0, timestamp=time)
    assert errors_of(one.run()) == [("raised", 2)]
    assert quarantine_reason(one) == "raised"
    saved = one.sessions(Partition("in-a", 0))["s"].state_bytes or b""
    assert one.machine().load(saved, 1) == Rows({"a": 7, "b": 1})


def test_leaving_tier_window_by_a_snapshot_sets_nobody_aside() -> None:
    """What waited is kept and told as a warning; the snapshot itself counts."""
    one = create_sequenced_stream("window")
    send_message(one, 3, 3)
    one.run()
    one.stream = create_sequenced_stream("order").stream
    send_message(one, 9, rows=["z"])
    outcome = one.run()
    assert not errors_of(outcome)
    assert [f.level for f in outcome.findings] == ["warning", "warning"]
    assert quarantine_reason(one) is None
    assert [mark.closed_by for mark in marks(one)] == [""]


def test_a_release_names_its_partition() -> None:
    """A session that waits in two partitions of one topic."""
    one = create_sequenced_stream("strict")
    one.kafka.add_partitions("in-a", 2)
    send_message(one, 5, 5)
    one.run()
    send_message(one, 6, 6, partition=A1)
    one.run()
    with pytest.raises(ConfigError, match="waits in in-a/0, in-a/1"):
        release_session(one.open(), "s", "a reason")
    assert release_session(one.open(), "s", "a reason", "in-a/1").partition == A1


def test_a_run_that_has_nothing_to_commit_brings_the_witness_up() -> None:
    """One that died right after its commit left it behind: a ledger lost later must be missed all
    the same.
    """
    one = create_sequenced_stream("strict")
    one.run()
    one.ledger.stored_witness = None
    one.run()
    head = one.ledger.head("s")
    assert head is not None
    assert one.ledger.witness() == head.ledger.mark


def test_what_others_wrote_is_said_until_a_person_says_all_is_well() -> None:
    """Told once, then a banner; not good."""
    one = create_sequenced_stream("strict")
    one.run()
    one.ledger.foreign_commit("rows were deleted")
    assert [f.finding for f in one.run().findings] == ["foreign"]
    assert one.run().foreign_sequence >= 0
    shown = read_status(one.stream, one.kafka, one.ledger, one.files, one.clock)
    assert shown.verdict == "hurt"
    accept_restored_ledger(one.ledger, one.clock, "s", "r", "taken back")
    assert one.run().foreign_sequence == -1
    assert read_status(one.stream, one.kafka, one.ledger, one.files, one.clock).verdict == "good"


@pytest.mark.parametrize("tier", ["none", "once"])
def test_a_late_snapshot_that_is_applied_leaves_its_session_damaged(tier: Any) -> None:
    """Its number was passed over, so the state goes back in time: nobody is to trust it until the
    next snapshot.
    """
    one = create_sequenced_stream("none")
    send_message(one, 2, 2)
    send_message(one, 4, 4)
    one.run()
    one.stream = create_sequenced_stream(tier).stream
    send_message(one, 3, rows=["a"])
    send_message(one, 9, rows=["a"])
    one.run()
    told = [(mark.finding, mark.offset, mark.until, mark.closed_by) for mark in marks(one)]
    assert told == [
        ("sequence gap", 2, -1, ""),
        ("", 3, -1, "snapshot"),
        ("disorder", 3, -1, ""),
        ("sequence gap", 4, 4, ""),
        ("", 4, -1, "snapshot"),
    ]
