"""Plan: what the next run would do. Asks Kafka and the ledger, and commits nothing.

A plan is a preview for people: `fold` does not depend on it and looks at everything again.

Next: operations/slicing.py decides what is read; operations/run.py reads it.
"""

from __future__ import annotations

from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import ShortRetention, partition_clocks, short_retentions
from seriatim.operations.slicing import SlicePlan, plan_slices
from seriatim.ports import Clock, LedgerStore, Log
from seriatim.stream import Stream


def plan_run(stream: Stream, log: Log, store: LedgerStore) -> tuple[Ledger, SlicePlan]:
    """The ledger as it is, and what a run would do next."""
    head = read_head(store, stream.name)
    ledger = head.ledger if head else Ledger(stream=stream.name)
    return ledger, discover_topics(stream, log, ledger)


def short_retention(stream: Stream, log: Log, ledger: Ledger, clock: Clock) -> list[ShortRetention]:
    """Topics that keep messages for less than 72 hours."""
    bounds = log.bounds(stream.topics)
    return short_retentions(partition_clocks(ledger, log, bounds, clock.now_seconds()))


def discover_topics(stream: Stream, log: Log, ledger: Ledger) -> SlicePlan:
    """Ask Kafka for the topics of the stream, and compare them with the ledger.

    Refused: `topics` that never matched anything, and a stream that reads the topic to which it
    sends its own snapshot requests.
    """
    bounds = log.bounds(stream.topics)
    if not bounds and not ledger.partitions:
        raise ConfigError(
            f"{stream.name}: no topic matches {stream.topics!r}",
            next=f"check `topics` in {stream.name}.toml (it must match whole names) and the broker's address",
        )
    if any(partition.topic == stream.snapshot_requests for partition in bounds):
        raise ConfigError(
            f"{stream.name}: snapshot_requests: {stream.snapshot_requests!r} is a topic that the stream reads itself",
            next=f"name another topic in {stream.name}.toml, or change `topics` so that it does not match this one",
        )
    return plan_slices(ledger, bounds, stream.tier, stream.on_poison)
