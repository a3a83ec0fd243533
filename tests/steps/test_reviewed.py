"""Cases that a strict reader found: topics made again, gone, poison passed over, warnings beside errors."""

from __future__ import annotations

from seriatim.core.offsets import Partition
from tests.steps.worlds import A0, begun, send, world


def test_a_topic_made_again_with_more_partitions_waits_whole() -> None:
    """Partitions that only the new life has are not folded either."""
    made = begun()
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 3)
    for number in range(3):
        send(made, Partition("in-a", number), ["a"], 1)

    outcome = made.run()

    assert {(f.finding, f.place) for f in outcome.findings} == {("re-created", f"in-a/{n}") for n in range(3)}
    assert outcome.messages == 0
    assert made.run().findings == []


def test_a_topic_deleted_with_unread_messages_is_a_finding() -> None:
    """What was never read is named; a topic that was read to its end may go in peace."""
    made = begun()
    made.kafka.create("in-b", 1)
    made.run()
    send(made, A0, 3, 4)
    made.run(until={A0: 4})
    made.kafka.delete("in-a")

    (finding,) = made.run().findings

    assert (finding.finding, finding.place, finding.offset) == ("expired", "in-a/0", 4)
    assert "[4, 5)" in finding.cause
    made.kafka.delete("in-b")
    assert made.run().findings == []


def test_a_partition_halted_by_poison_goes_on_once_the_stream_says_skip() -> None:
    """The advice in the finding works: with tier none and skip the next run passes over it."""
    made = world(tier="none", on_poison="halt")
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], 1, b"?", 2)
    assert made.run().messages == 2
    other = world(tier="none", on_poison="skip")
    other.kafka, other.reader, other.files, other.ledger = made.kafka, made.reader, made.files, made.ledger

    outcome = other.run()

    assert [finding.level for finding in outcome.findings] == ["warning"]
    assert outcome.messages == 2
    assert other.accounts()[A0].halt is None


def test_warnings_never_hide_an_error() -> None:
    """However many messages are passed over, a session set aside is told."""
    made = world(tier="none", on_poison="skip", sequence=None)
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], *[b"?"] * 150)
    made.kafka.produce("in-a", None, b'{"type": "update", "id": "a", "v": 1}', partition=0)

    outcome = made.run()

    assert len(outcome.findings) == 100
    assert made.accounts()[A0].counts["poison"] == 151


def test_what_is_passed_over_leaves_no_trace_in_state() -> None:
    """State is the same however slices are cut around a skipped message."""

    def last_offsets(messages_max: int) -> list[int]:
        made = world(tier="none", on_poison="skip")
        made.kafka.create("in-a", 1)
        send(made, A0, ["a"], b"?")
        made.run(messages_max)
        return [session.last_offset for session in made.sessions(A0).values()]

    assert last_offsets(100) == last_offsets(1) == [0]
