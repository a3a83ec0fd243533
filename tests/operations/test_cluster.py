"""A stream belongs to one Kafka cluster, whose id is in its ledger."""

from __future__ import annotations

import pytest

from seriatim.errors import ConfigError
from seriatim.operations.plan import plan_run
from tests.operations.memory_streams import A0, create_filled_stream, send


def test_another_cluster_is_refused_before_anything_is_read() -> None:
    """Its offsets say nothing about what is committed, even if its topics had the same ids."""
    made = create_filled_stream()
    made.run()
    ledger = made.ledger.head("s").ledger  # type: ignore[union-attr]
    assert ledger.cluster_id == "memory"
    send(made, A0, 3)
    made.kafka.cluster_id = "other"
    for look in (made.run, lambda: plan_run(made.stream, made.kafka, made.ledger)):
        with pytest.raises(ConfigError, match="cluster other, but what is committed") as raised:
            look()
        assert "memory" in raised.value.message
        assert raised.value.next
    assert made.ledger.head("s").ledger == ledger  # type: ignore[union-attr]
    made.kafka.cluster_id = ""
    assert made.run().messages == 1


def test_an_output_of_before_takes_the_cluster_over() -> None:
    """With its next slice, without a decision of a person."""
    made = create_filled_stream()
    made.kafka.cluster_id = ""
    made.run()
    made.kafka.cluster_id = "late"
    made.run()
    assert made.ledger.head("s").ledger.cluster_id == ""  # type: ignore[union-attr]
    send(made, A0, 3)
    made.run()
    assert made.ledger.head("s").ledger.cluster_id == "late"  # type: ignore[union-attr]
