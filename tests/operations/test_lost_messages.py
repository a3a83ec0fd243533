"""Losses: what was folded and is gone from Kafka is never passed over in silence, wherever in a
slice it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError
from seriatim.operations import rewind
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.views import state_to_plain
from seriatim.operations.rewind import LossDetector, MessageLoss, SliceProof
from seriatim.testing import MemoryPastReader, MemoryStream
from tests.operations.lookback_helper import head_of, run_bisection
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send

GONE = "not in Kafka any more"


class OneWay(MemoryPastReader):
    """Reads one range at a time, as a consumer does: a new read ends the one before."""

    reads = 0

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[Any]:
        """Those of a range that are there, each in a stretch of its own."""
        self.reads += 1
        turn = self.reads
        for stretch in super().read(partition, offset_range):
            for i in range(len(stretch)):
                assert turn == self.reads, "another read began"
                yield stretch.__class__(
                    stretch.start + i,
                    stretch.timestamps[i : i + 1],
                    stretch.keys[i : i + 1],
                    stretch.values[i : i + 1],
                )


def way(made: MemoryStream, name: str = "s") -> SessionReplay:
    """A session's way, read by a reader that goes one way."""
    open_stream = made.open().with_ports(past_reader=OneWay(made.reader))
    return SessionReplay(open_stream, head_of(made), A0, name)


def state_at(made: MemoryStream, offset: int, name: str) -> Any:
    """What is shown after an offset."""
    gone = way(made, name)
    gone.begin_at(offset + 1)
    gone.fold_to(offset + 1)
    return state_to_plain(made.machine(), gone.tracing_fold.copy_of_state())


def told(made: MemoryStream, start: int, end: int, name: str) -> tuple[list[Any], bool]:
    """The steps of a trace as they come, and whether it was refused at last."""
    gone, steps = way(made, name), []
    try:
        gone.begin_at(start)
        gone.fold_to(start)
        for step in gone.steps(end):
            values = step.offset, step.outcome, state_to_plain(made.machine(), step.after)
            steps.append(values)
    except ConfigError as error:
        return steps, GONE in error.message
    return steps, False


def lived(seed: int) -> MemoryStream:
    """A stream of two sessions, of messages alone or of transactions, in slices of any size."""
    chance = Random(seed)
    made = create_stream(tier="none")
    made.kafka.create("in-a", 1, compacted=True)
    send(made, A0, ["a", "b"])
    send(made, A0, ["a"], session="t")
    transactions = chance.random() < 0.6
    while len(made.kafka.topics["in-a"].messages[0]) < 60:
        session = chance.choice("st")
        offset = len(made.kafka.topics["in-a"].messages[0])
        send(made, A0, ["a", "c"] if chance.random() < 0.1 else offset, session=session)
        if transactions and chance.random() < 0.3:
            made.kafka.end_transaction(A0, [offset], abort=chance.random() < 0.3)
    made.run(chance.choice((4, 9, 25, 1000)))
    return made


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_the_same_as_before_or_refused(seed: int) -> None:
    """Every state and every step of a trace, at any edge, is what it was before the compaction, or
    it is refused.
    """
    made, chance = lived(seed), Random(seed + 1)
    end = made.accounts()[A0].frontier
    names = ("s", "t")
    states = {(name, at): state_at(made, at, name) for name in names for at in range(end)}
    whole = {name: told(made, 0, end, name)[0] for name in names}
    before = chance.randrange(5, end)
    made.kafka.compact(A0, before)
    refused = 0
    for (name, at), meant in states.items():
        try:
            assert state_at(made, at, name) == meant, (name, at)
        except ConfigError as error:
            refused += GONE in error.message
    assert refused, "compaction took something"
    for name in names:
        start, until = sorted(chance.sample(range(end), 2))
        steps, stopped = told(made, start, until, name)
        meant = [step for step in whole[name] if start <= step[0] < until]
        assert steps == (meant[: len(steps)] if stopped else meant), name


def test_nothing_is_refused_that_lost_nothing() -> None:
    """Slices behind the compaction answer, and transactions whose messages are all there do, each
    counted once.
    """
    made = create_stream(tier="none")
    made.kafka.create("in-a", 1, compacted=True)
    send(made, A0, ["a"])
    for number in range(1, 30, 2):
        send(made, A0, number)
        made.kafka.end_transaction(A0, [number])
    made.run(10)
    states = [state_at(made, at, "s") for at in range(31)]
    made.kafka.compact(A0, 10)
    assert [state_at(made, at, "s") for at in range(10, 31)] == states[10:]
    with pytest.raises(
        ConfigError, match=r"6 of the messages of \[0, 10\) are not in Kafka any more"
    ):
        state_at(made, 8, "s")


def test_a_break_and_a_bisection_are_refused_too() -> None:
    """Asked inside a slice whose messages are gone; the saved states around are named instead."""
    made = create_filled_stream(1)
    send(made, A0, *range(3, 8))
    made.run()
    made.kafka.topics["in-a"].compacted = True
    made.kafka.compact(A0, 8)
    gone = way(made)
    gone.begin_at(0)
    with pytest.raises(ConfigError, match=GONE) as refused:
        list(gone.next_messages(6, lambda one: one.offset == 4))
    assert "--version" in refused.value.next
    with pytest.raises(ConfigError, match=GONE):
        run_bisection(made, "s", "not any(row.v >= 4 for row in state.rows)")


def test_slices_are_counted_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small slices with holes cost a few reads, not two each; what is lost is told of the
    slice that lost it.
    """
    made = create_stream(tier="none")
    made.kafka.create("in-a", 1)
    for number in range(40):
        send(made, A0, ["a"])
        made.kafka.end_transaction(A0, [2 * number])
    proofs, reread, heard = (
        [SliceProof(at, at + 2, 1) for at in range(0, 80, 2)],
        OneWay(made.reader),
        list[MessageLoss](),
    )
    monkeypatch.setattr(rewind, "COUNTED_OFFSETS_MAX", 20)
    assert (
        len(
            list(LossDetector(A0, proofs, reread).read_and_detect(OffsetRange(1, 79), heard.append))
        )
        == 39
    )
    assert (reread.reads, heard) == (9, [])
    proofs[7] = SliceProof(14, 16, 2)
    proofs[8:10] = [SliceProof(16, 20, 4)]
    list(LossDetector(A0, proofs, reread).read_and_detect(OffsetRange(1, 79), heard.append))
    assert heard == [
        MessageLoss(OffsetRange(15, 16), 1),
        MessageLoss(OffsetRange(17, 18), 1),
        MessageLoss(OffsetRange(19, 20), 1),
    ]
