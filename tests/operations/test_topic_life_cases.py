"""Cases that a strict reader found: topics made again, gone, poison passed over, warnings beside
errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import Struct

from seriatim import Machine
from seriatim.engine.files import SourceFailedError
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import PlatformError
from seriatim.testing import fold
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send


def test_a_topic_made_again_with_more_partitions_waits_whole() -> None:
    """Partitions that only the new life has are not folded either."""
    made = create_filled_stream()
    made.run()
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 3)
    for number in range(3):
        send(made, Partition("in-a", number), ["a"], 1)

    outcome = made.run()

    assert {(f.finding, f.partition_name) for f in outcome.findings} == {
        ("re-created", f"in-a/{n}") for n in range(3)
    }
    assert outcome.messages == 0
    assert made.run().findings == []


def test_reading_a_partition_that_the_new_topic_lacks_fails_as_a_source_does() -> None:
    """The topic in memory was made again with fewer partitions while a run read it."""
    made = create_filled_stream(2)
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 1)
    with pytest.raises(SourceFailedError, match="in-a/1: there is no such partition"):
        made.kafka.read(Partition("in-a", 1), OffsetRange(0, 1))
    with pytest.raises(PlatformError, match="in-a/1: there is no such partition"):
        made.explain(Partition("in-a", 1), OffsetRange(0, 1))


def test_a_topic_deleted_with_unread_messages_is_a_finding() -> None:
    """What was never read is named; a topic that was read to its end may go in peace."""
    made = create_filled_stream()
    made.kafka.create("in-b", 1)
    made.run()
    send(made, A0, 3, 4)
    made.run(until={A0: 4})
    made.kafka.delete("in-a")

    (finding,) = made.run().findings

    assert (finding.finding, finding.partition_name, finding.offset) == ("expired", "in-a/0", 4)
    assert "[4, 5)" in finding.cause
    made.kafka.delete("in-b")
    assert made.run().findings == []


def test_a_partition_halted_by_poison_goes_on_once_the_stream_says_skip() -> None:
    """The advice in the finding works: with tier none and skip the next run passes over it."""
    made = create_stream(tier="none", on_poison="halt")
    made.kafka.create("in-a", 1)
    send(made, A0, ["a"], 1, b"?", 2)
    assert made.run().messages == 2
    other = create_stream(tier="none", on_poison="skip")
    other.kafka, other.reader, other.files, other.ledger = (
        made.kafka,
        made.reader,
        made.files,
        made.ledger,
    )

    outcome = other.run()

    assert [finding.level for finding in outcome.findings] == ["warning"]
    assert outcome.messages == 2
    assert other.accounts()[A0].halt is None


class Tick(Struct):
    """A message: what the machine is to do."""

    do: str = ""

    def __post_init__(self) -> None:
        if self.do == "refuse":
            raise KeyError("a user's own check")


class Count(Struct):
    """A record, and the state."""

    n: int = 0


class Leaves(BaseException):
    """What a user's code may raise: not even an Exception."""


class Counter(Machine[Count, Tick, Count]):
    """Counts messages, and raises when told to."""

    def start(self, session: str) -> Count:  # noqa: ARG002  # every session begins alike
        return Count()

    def apply(self, state: Count, message: Tick) -> Iterator[Count]:
        state.n += 1
        if message.do == "leave":
            raise Leaves
        yield Count(state.n)


def test_warnings_never_hide_an_error() -> None:
    """However many messages are passed over, a session set aside is told."""
    done = fold(Counter, [{}, *[b"?"] * 150, {"do": "leave"}], tier="none", on_poison="skip")

    errors = [
        (finding.finding, finding.offset) for finding in done.findings if finding.level == "error"
    ]
    assert errors == [("raised", 151)]
    assert len(done.findings) == 101


def test_whatever_a_machine_raises_is_a_finding_and_is_undone() -> None:
    """A BaseException sets the session aside with the state it had before that message."""
    done = fold(Counter, [{}, {}, {"do": "leave"}, {}])

    (finding,) = done.findings
    assert (finding.finding, finding.offset) == ("raised", 2)
    assert done.state == Count(2)


def test_a_message_type_that_raises_makes_poison() -> None:
    """A user's own check in a message is named by offset, like any other message that cannot be
    decoded.
    """
    done = fold(Counter, [{}, {"do": "refuse"}])

    (finding,) = done.findings
    assert (finding.finding, finding.offset) == ("poison", 1)
    assert "a user's own check" in finding.cause


def test_what_is_passed_over_leaves_no_trace_in_state() -> None:
    """State is the same however slices are cut around a skipped message."""

    def last_offsets(messages_max: int) -> list[int]:
        made = create_stream(tier="none", on_poison="skip")
        made.kafka.create("in-a", 1)
        send(made, A0, ["a"], b"?")
        made.run(messages_max)
        return [session.last_offset for session in made.sessions(A0).values()]

    assert last_offsets(100) == last_offsets(1) == [0]
