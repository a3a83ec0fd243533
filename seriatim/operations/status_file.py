"""Glance: what a look at Kafka said, as the file that pages read. Changes nothing.

Next room: operations/stream_status.py says how it stands later; web/write_status.py keeps it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.operations.retention import PartitionClocks
from seriatim.operations.stream_status import (
    QUARANTINED_LISTED_MAX,
    PartitionStatus,
    QuarantinedSession,
    SavedStatus,
)
from seriatim.operations.watch import WatchInput, WatchResult
from seriatim.stream import Stream


def build_saved_status(
    stream: Stream,
    watch_input: WatchInput,
    watch_result: WatchResult,
    *,
    has_run: bool,
    previous: SavedStatus | None = None,
) -> SavedStatus:
    """The file's content. `ran`: a run came to its end just now; `before` knows when the last one
    did.
    """
    found, now = watch_input.status_values, watch_input.at_seconds
    places = msgspec.convert(found["partitions"], list[PartitionStatus])
    sessions = msgspec.convert(
        found["quarantined"][:QUARANTINED_LISTED_MAX], list[QuarantinedSession]
    )
    return SavedStatus(
        stream=stream.name,
        at_seconds=now,
        sequence=watch_input.ledger.sequence,
        last_run_seconds=now if has_run else _last_run_seconds(watch_input, previous),
        tier=stream.tier,
        verdict=found["verdict"],
        circuit=found["circuit"],
        checked=found["checked"],
        rate=watch_input.ledger.pace.rate,
        partitions=[
            replace(one, limit_seconds=_warning_limit_seconds(one, stream, watch_input.clocks))
            for one in places
        ],
        quarantined=sessions,
        quarantined_count=len(found["quarantined"]),
        concerns=watch_result.concerns,
    )


def _last_run_seconds(watch_input: WatchInput, previous: SavedStatus | None) -> float | None:
    """When a run last ended: as it was noted, and not before it last committed something."""
    noted = previous.last_run_seconds if previous else None
    return max(noted or 0.0, watch_input.ledger.pace.at_seconds) or None


def _warning_limit_seconds(
    partition: PartitionStatus, stream: Stream, clocks: PartitionClocks
) -> float | None:
    """The time left at which a person is told of this partition."""
    clock = clocks.get(Partition(partition.topic, partition.partition))
    return (
        clock.times_left[0].warning_seconds(stream.alerts.time_left_warning_hours)
        if clock and clock.times_left
        else None
    )
