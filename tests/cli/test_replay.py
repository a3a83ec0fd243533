"""Which ranges a replay folds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from seriatim.cli.lookback import LookbackCommand
from seriatim.cli.replay import _ranges_to_replay
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.model import Account, Ledger


def test_where_from_is_given_the_past_is_not_searched_for_a_start() -> None:
    """That search reads the whole history of a partition and saved states of it."""
    account = Account(topic_id="id", frontier=9, initial_frontier=0)
    ledger = Ledger(stream="s", sequence=1, partitions={"in-a/0": account})
    file: Any = SimpleNamespace(stream=SimpleNamespace(name="s"))
    open_stream: Any = None  # offsets are given, so nothing is asked of Kafka
    head: Any = SimpleNamespace(ledger=ledger)
    command = LookbackCommand(file, open_stream, head)
    searched: list[Partition] = []

    def earliest_start(partition: Partition) -> int:
        searched.append(partition)
        return 2

    replay_run: Any = SimpleNamespace(earliest_start=earliest_start)
    partition = Partition("in-a", 0)
    ranges = _ranges_to_replay(command, replay_run, None, None, "3", "7")
    assert (ranges, searched) == ({partition: OffsetRange(3, 7)}, [])
    ranges = _ranges_to_replay(command, replay_run, None, None, None, None)
    assert (ranges, searched) == ({partition: OffsetRange(2, 9)}, [partition])
