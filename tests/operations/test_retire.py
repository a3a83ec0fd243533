"""Retire: a topic, or a partition, is over; accept takes it back."""

from __future__ import annotations

import pytest

from seriatim.errors import ConfigError, FencedError
from tests.operations.decision_helper import (
    accept,
    assert_records_match_state,
    recreate_topic,
    retire,
    run_before_ledger_call,
    status_of,
    tables_from_state,
)
from tests.operations.memory_streams import A0, A1, A2, B0, create_filled_stream, frontiers, send


def test_retired_is_neither_read_nor_found() -> None:
    """Its state is kept, status shows it apart and good; the other topics go on."""
    made = create_filled_stream()
    made.kafka.create("in-b")
    send(made, B0, ["a"])
    made.run()
    send(made, A0, 3)
    send(made, B0, 1)
    done = retire(made)
    assert [(one.partition, one.unread_messages) for one in done.partitions] == [(A0, 1)]
    assert made.run().messages == 1
    recreate_topic(made)
    made.kafka.add_partitions("in-a", 1)
    outcome = made.run()
    assert (outcome.findings, outcome.messages, outcome.missing_partitions) == ([], 0, [])
    assert frontiers(made) == {"in-a/0": 3, "in-b/0": 2}
    assert tables_from_state(made, A0) == {"s": {"a": 2, "b": 0}}
    shown = status_of(made)
    assert shown.verdict == "good"
    assert {(one.topic, one.partition): one.topic_state for one in shown.partitions} == {
        ("in-a", 0): "retired",
        ("in-a", 1): "retired",
        ("in-b", 0): "live",
    }
    assert made.ledger.manifest_at("s", done.sequence).entry.reason == "over"


def test_accept_takes_a_retired_topic_back() -> None:
    """The same topic goes on from its frontier; one made again begins a new life."""
    made = create_filled_stream()
    made.run()
    retire(made)
    send(made, A0, 3)
    made.run()
    assert accept(made).is_new_life is False
    assert made.run().messages == 1
    retire(made)
    recreate_topic(made)
    made.run()
    assert accept(made).is_new_life is True
    assert made.run().messages == 2
    assert_records_match_state(made)


def test_one_partition_may_be_retired() -> None:
    """The others go on, and partitions added later are read."""
    made = create_filled_stream(2)
    made.run()
    retire(made, "in-a/1")
    send(made, A0, 3)
    send(made, A1, 3)
    made.kafka.add_partitions("in-a", 1)
    send(made, A2, ["q"])
    made.run()
    assert frontiers(made) == {"in-a/0": 4, "in-a/1": 3, "in-a/2": 1}
    with pytest.raises(ConfigError, match="retired already"):
        retire(made, "in-a/1")
    accept(made, "in-a/1")
    made.run()
    assert frontiers(made)["in-a/1"] == 4
    assert_records_match_state(made)


def test_retiring_a_topic_of_which_a_run_moved_the_frontier_is_fenced() -> None:
    """The decision was about what is no longer so; a slice on a retired partition is dropped, the
    rest commits.
    """
    made = create_filled_stream(2)
    made.run()
    send(made, A0, 3)
    run_before_ledger_call(made, "put_manifest", made.run)
    with pytest.raises(FencedError):
        retire(made)
    send(made, A0, 4)
    send(made, A1, 4)
    run_before_ledger_call(made, "compare_and_set", lambda: retire(made, "in-a/0"))
    made.run()
    assert frontiers(made) == {"in-a/0": 4, "in-a/1": 4}
    assert made.accounts()[A0].retired
    assert_records_match_state(made)
