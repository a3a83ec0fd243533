"""Producers are asked for snapshots: once per incident, never silently not, and nothing depends on
it.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.errors import ConfigError
from seriatim.ledger.manifests import REQUESTED_NOTE
from seriatim.ledger.model import EntryMark
from seriatim.memory import MemoryLedger
from seriatim.operations.plan import plan_run
from seriatim.operations.release import release_session
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0
from tests.operations.repair.test_forward import expired, move_on
from tests.operations.test_tiers import create_sequenced_stream, send_message


def asking() -> MemoryStream:
    """A stream that asks, with session s in quarantine since offset 1."""
    one = create_sequenced_stream("strict", snapshot_requests="asks")
    send_message(one, 9, 9)
    one.run()
    return one


def sent(one: MemoryStream) -> list[tuple[str, str, int]]:
    """What was asked so far."""
    return [
        (request.session, request.reason, request.offset) for request in one.requests.sent_requests
    ]


def test_a_session_is_asked_for_once() -> None:
    """However often it runs, and however many of its messages are set aside; a new incident is
    another one.
    """
    one = asking()
    assert sent(one) == [("s", "sequence gap", 1)]
    send_message(one, 10, 10)
    one.run()
    one.run()
    assert len(sent(one)) == 1
    send_message(one, 11, rows=["a"])
    send_message(one, 15, 1)
    one.run()
    assert sent(one)[1:] == [("s", "sequence gap", 4)]


def test_a_stream_that_does_not_ask_does_not() -> None:
    """The default."""
    one = create_sequenced_stream("strict")
    send_message(one, 9, 9)
    assert one.run().snapshot_request_error == ""
    assert sent(one) == []


def test_requests_to_a_topic_that_the_stream_reads_are_refused() -> None:
    """It would fold its own requests; said by plan and run, before anything is read."""
    one = create_sequenced_stream("strict")
    send_message(one, 9, 9)
    one.stream = replace(one.stream, snapshot_requests=A0.topic)
    with pytest.raises(ConfigError, match=r"snapshot_requests: .* reads itself"):
        one.run()
    with pytest.raises(ConfigError, match="snapshot_requests"):
        plan_run(one.stream, one.kafka, one.ledger)
    assert not one.accounts()


def test_who_is_headless_after_a_loss_is_asked_for() -> None:
    """At its first message that proves nothing, not before: who is never met needs nothing."""
    one = expired()
    one.stream = replace(one.stream, snapshot_requests="asks")
    move_on(one)
    one.run()
    assert sent(one) == []
    send_message(one, 3, 9, session="u")
    send_message(one, 5, 9, session="s")
    send_message(one, 6, 9, session="s")
    one.run(1)
    assert sent(one) == [("s", "gap", 9)]


def test_trouble_is_told_and_fails_nothing() -> None:
    """The run is as good as any; the next one asks."""
    one = create_sequenced_stream("strict", snapshot_requests="asks")
    send_message(one, 9, 9)
    one.requests.is_down = True
    outcome = one.run()
    assert "broker is down" in outcome.snapshot_request_error
    assert one.accounts()[A0].frontier == 2
    one.requests.is_down = False
    assert one.run().snapshot_request_error == ""
    assert sent(one) == [("s", "sequence gap", 1)]


class Forgetful(MemoryLedger):
    """Dies before it remembers what was asked."""

    def put_note(self, *_: Any) -> None:
        """The disk is full."""
        raise OSError("no space left")


def test_a_crash_loses_no_request() -> None:
    """Killed after the commit, the next run asks; killed after asking, it asks again: the incident
    is the same.
    """
    one = create_sequenced_stream("strict", snapshot_requests="asks")
    send_message(one, 9, 9)
    one.ledger = Forgetful(one.files.read)
    assert "no space left" in one.run().snapshot_request_error
    assert "no space left" in one.run().snapshot_request_error
    assert sent(one) == [("s", "sequence gap", 1)] * 2


def test_who_was_right_again_before_anybody_asked_is_not_asked_for() -> None:
    """A person released it while the broker was down."""
    one = create_sequenced_stream("strict", snapshot_requests="asks")
    send_message(one, 9, 9)
    one.requests.is_down = True
    one.run()
    release_session(one.open(), "s", "looked at")
    one.requests.is_down = False
    one.run()
    assert sent(one) == []


@pytest.mark.parametrize("note", [EntryMark(7, "another ledger's"), EntryMark()])
def test_a_note_of_another_ledger_means_nothing(note: EntryMark) -> None:
    """Put back, or lost: what is still open is asked for again, never left out."""
    one = asking()
    one.ledger.put_note(REQUESTED_NOTE, note)
    one.run()
    assert len(sent(one)) == 2
