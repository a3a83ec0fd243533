"""The way back: which saved state is chosen, what is read for it, and what is repeated after it."""

from __future__ import annotations

from collections.abc import Iterator

from seriatim.engine.offsets import OffsetRange
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account
from seriatim.operations.rewind import LedgerHistory, RefoldRequest, Rewind, RewindChooser
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_filled_stream, send
from tests.operations.repair_helper import create_sliced_stream, gaps_of, repair


def chooser_of(
    memory_stream: MemoryStream, log_start: int = 0, damaged_frontiers: tuple[int, ...] = ()
) -> RewindChooser:
    """A chooser that takes the states at these frontiers for damaged."""
    history = LedgerHistory(memory_stream.ledger, "s")
    history.read_on()

    def describe_damage(account: Account) -> str:
        return f"state at {account.frontier}" if account.frontier in damaged_frontiers else ""

    account = memory_stream.accounts()[A0]
    return RewindChooser(account, log_start, history.of_partition(A0), describe_damage)


def test_the_nearest_good_state_is_chosen() -> None:
    """States are at the borders of slices of seven; of damaged ones the newest is named."""
    memory_stream = create_sliced_stream(60, 7)
    nearest = chooser_of(memory_stream).find_base(33)
    assert nearest.point is not None
    assert nearest.point.account.frontier == 28
    older = chooser_of(memory_stream, damaged_frontiers=(28, 21)).find_base(33)
    assert older.point is not None
    assert older.point.account.frontier == 14
    everything = tuple(range(61))
    none = chooser_of(memory_stream, damaged_frontiers=everything).find_base(33)
    assert (none.point, none.damage, none.expired_offset) == (None, "state at 28", -1)


def test_a_state_since_which_messages_are_gone_is_no_base() -> None:
    """The newest good one is named. A later state may do where no earlier one does."""
    memory_stream = create_sliced_stream(60, 7)
    chooser = chooser_of(memory_stream, log_start=30, damaged_frontiers=(28, 35))
    base = chooser.find_base(33)
    assert (base.point, base.damage, base.expired_offset) == (None, "", 21)
    later = chooser.first_base_from(33)
    assert later is not None
    assert later.account.frontier == 42
    assert chooser_of(memory_stream, log_start=61).first_base_from(0) is None


def test_only_what_came_since_is_read() -> None:
    """Reading on gives the same history as reading everything at once, and reads no entry twice."""
    memory_stream = create_sliced_stream(20, 7)
    sequences: list[int] = []
    entries = memory_stream.ledger.entries

    def counted(stream: str, after: int) -> Iterator[Manifest]:
        for manifest in entries(stream, after):
            sequences.append(manifest.entry.sequence)
            yield manifest

    memory_stream.ledger.entries = counted  # type: ignore[method-assign]
    history = LedgerHistory(memory_stream.ledger, "s")
    history.read_on()
    history.read_on(history.sequence)
    send(memory_stream, A0, 1, b"?", session="s0")
    memory_stream.run()
    history.read_on()
    last_sequence = history.sequence
    repair(memory_stream, partition="in-a/0", start=10)
    sequences.clear()
    history.read_on()
    assert sequences == [last_sequence + 1, last_sequence + 2]
    at_once = LedgerHistory(memory_stream.ledger, "s")
    at_once.read_on()
    assert history.of_partition(A0) == at_once.of_partition(A0)
    assert history.requests_by_hold == at_once.requests_by_hold
    assert history.gaps == at_once.gaps == gaps_of(memory_stream)
    assert history.gaps


def test_what_happened_between_messages_is_met_in_order() -> None:
    """Releases and the begin of losses end a piece; behind a loss come those that begin where it
    ends.
    """
    account = create_filled_account()
    rewind = Rewind(
        request=RefoldRequest(partition=A0, start=0, until=40),
        account=account,
        base=Account(topic_id=account.topic_id, frontier=0, initial_frontier=0),
        sequence=0,
        frontier=40,
        releases_by_hand={0: ("s",), 25: ("s",), 33: ("t",)},
        passed_ranges=(OffsetRange(10, 14), OffsetRange(14, 20), OffsetRange(30, 30)),
    )
    offsets = []
    offset = 0
    while offset < 40:
        offset = rewind.next_intervention(offset, 40)
        *_, offset = rewind.stage_end_offsets(offset)
        offsets.append((offset, rewind.headless_since(offset)))
    assert offsets == [(20, 20), (25, 20), (30, 30), (33, 30), (40, 30)]


def create_filled_account() -> Account:
    """The account of a partition that was folded once."""
    memory_stream = create_filled_stream(1)
    memory_stream.run()
    return memory_stream.accounts()[A0]
