"""Watch: what needs a person is said, with what to type; what does not is not."""

from __future__ import annotations

import json

from msgspec.structs import replace

from seriatim.engine.retention import RetentionRules
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import HoldEntry
from seriatim.ledger.model import Change
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.status import StreamStatus
from seriatim.operations.watch import watch_stream
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, B0, create_filled_stream, create_stream, send

HOUR = 3600.0


def watched(made: MemoryStream) -> StreamStatus:
    """One look."""
    return watch_stream(made.stream, made.kafka, made.ledger, made.files, made.clock)


def concerns(made: MemoryStream) -> dict[str, str]:
    """What needs a person: the kind and where."""
    return {one.kind: one.location for one in watched(made).concerns}


def test_a_stream_that_is_caught_up_needs_nobody() -> None:
    """Also when nothing came for days: an idle stream is not late."""
    made = create_filled_stream(partitions=2)
    made.run()
    made.clock.sleep(100 * HOUR)
    seen = watched(made)
    assert (seen.verdict, len(seen.partitions), seen.unread, seen.concerns) == ("good", 2, 0, [])
    assert (seen.nearest, seen.catches_up) == (None, True)


def test_a_stream_without_topics_waits_for_them_and_needs_nobody() -> None:
    """As soon as one is there, it is new, as any stream that was never run."""
    made = create_stream()
    waiting = watched(made)
    assert (waiting.verdict, waiting.concerns, waiting.tone) == ("waiting for topics", [], "warn")
    made.kafka.create("in-a", 1)
    assert watched(made).verdict == "new"


def test_messages_that_wait_while_no_run_comes_are_late() -> None:
    """Counted from the last entry, or from when the message came if that is later."""
    made = create_filled_stream()
    made.run()
    made.clock.sleep(100 * HOUR)
    made.kafka.produce("in-a", b"s", b"{}", timestamp=round(made.clock.now * 1000))
    made.clock.sleep(HOUR - 1)
    assert concerns(made) == {}
    made.clock.sleep(1)
    (late,) = watched(made).concerns
    assert late.kind == "late"
    assert late.text.startswith("1 message not folded yet, no run for 1 h 0 min since entry")
    assert late.next.startswith("seriatim run s")


def test_a_stream_that_was_never_run_is_late_too() -> None:
    """Its messages wait since they came."""
    made = create_filled_stream()
    for log in made.kafka.topics["in-a"].messages:
        log[:] = [replace(message, timestamp=1000) for message in log]
    made.clock.sleep(2 * HOUR)
    (late,) = watched(made).concerns
    assert "it was never run" in late.text


def test_what_waits_for_a_person_is_said_and_is_not_late() -> None:
    """A halted partition is not read by any run; quarantine counts its sessions."""
    made = create_filled_stream(partitions=2, sequence=None)
    send(made, A0, b"{}", b"no JSON")
    made.reader.lost_offsets.add((made_b := replace(A0, number=1), 3))
    send(made, made_b, 5)
    made.run()
    made.clock.sleep(100 * HOUR)
    assert concerns(made) == {"halted": "in-a/1", "quarantine": ""}
    halted, quarantine = watched(made).concerns
    assert halted.text.startswith("at offset 3: gap")
    assert quarantine.text == (
        "1 of at most 2 sessions in quarantine until the next snapshot: 1 poison; first s in in-a/0 at offset 3"
    )
    assert "seriatim repair s --partition in-a/1" in halted.next
    assert "seriatim repair s --partition in-a/0" in quarantine.next
    assert watched(made).verdict == "hurt"


def test_time_that_runs_out_comes_first() -> None:
    """With the figure, its reason, and the command that gives more time."""
    made = create_filled_stream()
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=10 * 3_600_000)
    made.run()
    send(made, A0, 4)
    made.clock.sleep(8 * HOUR)
    seen = watched(made)
    assert [one.kind for one in seen.concerns] == ["time left", "late"]
    assert seen.nearest is not None
    assert (seen.nearest.time_left_seconds, seen.nearest.partition_name) == (2 * HOUR, "in-a/0")
    assert seen.concerns[0].text.startswith(
        "2 h 0 min until Kafka drops offset 3. retention.ms keeps messages for 10 h"
    )
    assert "--add-config retention.ms=" in seen.concerns[0].next


def test_a_hold_is_brought_to_mind() -> None:
    """Somebody began a repair and has not ended it."""
    made = create_filled_stream()
    made.run()
    head = made.ledger.head("s")
    assert head is not None
    account = made.accounts()[A0]
    change = Change(
        partition=A0,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
    )
    commit(
        made.ledger,
        made.clock,
        head,
        HoldEntry(attempt="h", hold="id-1", changes=(change,), request='{"partition":"in-a/0"}'),
    )
    (held,) = watched(made).concerns
    assert (held.kind, held.text) == (
        "held",
        "held by repair id-1 since 1970-01-01 00:00:00 UTC: seriatim repair s --partition in-a/0",
    )
    assert "seriatim repair s --resume id-1" in held.next
    assert "seriatim repair s --abandon id-1" in held.next


def test_settings_that_may_not_be_read_make_the_clock_blind() -> None:
    """None would look like never: it is said once for each topic."""
    made = create_filled_stream(partitions=2)
    made.kafka.create("in-b", 1)
    made.kafka.topics["in-a"].rules = RetentionRules(is_known=False)
    made.run()
    (blind,) = watched(made).concerns
    assert (blind.kind, blind.location) == ("blind", "in-a")
    assert "DescribeConfigs" in blind.next


def test_the_nearest_of_all_partitions_is_shown() -> None:
    """The least time left, and whose it is; the lag of all."""
    made = create_filled_stream()
    made.kafka.topics["in-a"].rules = RetentionRules(retention_ms=1000 * 3_600_000)
    made.kafka.create("in-b", 1, RetentionRules(retention_ms=500 * 3_600_000))
    send(made, B0, ["a"])
    seen = watched(made)
    assert seen.nearest is not None
    assert (seen.nearest.partition_name, seen.nearest.time_left_seconds) == ("in-b/0", 500 * 3600)
    assert (seen.unread, seen.catches_up) == (4, None)


def test_a_buffer_that_nothing_drains_is_raised() -> None:
    """Only the session's own messages drain it; after its window and a late run's time a person is
    asked.
    """
    made = create_stream(tier="window", sequence="seq", window_seconds=60)
    made.kafka.create("in-a", 1)
    for body in (
        b'{"type":"snapshot","seq":1,"rows":[]}',
        b'{"type":"insert","seq":3,"id":"a","v":1}',
    ):
        made.kafka.produce("in-a", b"quiet", body, timestamp=0)
    made.run()
    made.clock.sleep(HOUR + 60)
    assert concerns(made) == {}
    made.clock.sleep(1)
    (buffer,) = watched(made).concerns
    assert (buffer.kind, buffer.location) == ("buffer", "in-a/0")
    assert buffer.text == "messages of 1 session wait for earlier ones, longest quiet: 1 h 1 min"
    assert "sequence 2" in buffer.next


def test_a_backlog_that_is_being_folded_is_not_late() -> None:
    """However old its messages are: an entry was made just now."""
    made = create_filled_stream()
    made.clock.sleep(100 * HOUR)
    made.run(until={A0: 1})
    assert watched(made).unread == 2
    assert concerns(made) == {}
    made.clock.sleep(HOUR)
    assert concerns(made) == {"late": ""}


def test_a_swap_is_told_when_the_missing_message_has_arrived() -> None:
    """Before that the session only waits; the later look goes on where the earlier ended."""
    made = create_stream(tier="strict", sequence="seq")
    made.kafka.create("in-a")
    for sequence, kind in ((1, "snapshot"), (2, "update"), (4, "update")):
        tell_sequence(made, sequence, kind)
    made.run()
    first_look = searched(made)
    assert [concern.key for concern in first_look.concerns] == ["quarantine"]
    assert "sequence gap (a message never came)" in first_look.concerns[0].text
    assert 'quarantine release s s --topic in-a/0 --because "…"' in first_look.concerns[0].next
    assert "seriatim repair" not in first_look.concerns[0].next
    tell_sequence(made, 3, "update")
    made.run()
    quarantine, swapped = searched(made, first_look).concerns
    assert "sequence gap (messages were swapped)" in quarantine.text
    assert swapped.key == "swapped in-a/0"
    assert "sequence 3 came later, at offset 3" in swapped.text
    assert swapped.next.startswith("seriatim repair s --partition in-a/0 --session s --apply")


def test_a_look_without_a_search_keeps_what_is_known() -> None:
    """A run writes the status file too, and does not search."""
    made = create_stream(tier="strict", sequence="seq")
    made.kafka.create("in-a")
    for sequence, kind in ((1, "snapshot"), (3, "update")):
        tell_sequence(made, sequence, kind)
    made.run()
    first_look = searched(made)
    status = watch_stream(
        made.stream, made.kafka, made.ledger, made.files, made.clock, previous=first_look
    )
    assert status.quarantined == first_look.quarantined
    assert status.quarantined[0].missing is not None


def tell_sequence(made: MemoryStream, sequence: int, kind: str) -> None:
    """Send an update of row a with this sequence, or a snapshot."""
    body: dict[str, object] = {"type": kind, "seq": sequence, "id": "a", "v": sequence}
    if kind == "snapshot":
        body = {"type": kind, "seq": sequence, "rows": [{"id": "a", "v": 0}]}
    made.kafka.produce("in-a", "s", json.dumps(body).encode(), partition=0)


def searched(made: MemoryStream, previous: StreamStatus | None = None) -> StreamStatus:
    """One look that also searches for missing messages."""
    search = MissingMessageSearch(made.open())
    return watch_stream(
        made.stream,
        made.kafka,
        made.ledger,
        made.files,
        made.clock,
        search=search,
        previous=previous,
    )
