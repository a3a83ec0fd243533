"""Status file: what a look at Kafka found, as the content of the file that pages read. Changes
nothing.

Next: operations/stream_status.py brings the content up to date later; web/write_status.py writes
the file.
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
    """The content of the file. `has_run` says that a run ended just now; otherwise `previous` knows
    when the newest one did.
    """
    values = watch_input.status_values
    partitions = []
    for partition in msgspec.convert(values["partitions"], list[PartitionStatus]):
        limit_seconds = _warning_limit_seconds(partition, stream, watch_input.clocks)
        partitions.append(replace(partition, limit_seconds=limit_seconds))
    listed_sessions = values["quarantined"][:QUARANTINED_LISTED_MAX]
    last_run_seconds = _last_run_seconds(watch_input, previous)
    if has_run:
        last_run_seconds = watch_input.at_seconds
    return SavedStatus(
        stream=stream.name,
        at_seconds=watch_input.at_seconds,
        sequence=watch_input.ledger.sequence,
        last_run_seconds=last_run_seconds,
        tier=stream.tier,
        verdict=values["verdict"],
        circuit=values["circuit"],
        checked=values["checked"],
        rate=watch_input.ledger.pace.rate,
        partitions=partitions,
        quarantined=msgspec.convert(listed_sessions, list[QuarantinedSession]),
        quarantined_count=len(values["quarantined"]),
        concerns=watch_result.concerns,
    )


def _last_run_seconds(watch_input: WatchInput, previous: SavedStatus | None) -> float | None:
    """When the newest run ended: as the file says, or when something was committed since. None if
    no run ended yet.
    """
    noted_seconds = 0.0
    if previous is not None and previous.last_run_seconds is not None:
        noted_seconds = previous.last_run_seconds
    return max(noted_seconds, watch_input.ledger.pace.at_seconds) or None


def _warning_limit_seconds(
    partition: PartitionStatus, stream: Stream, clocks: PartitionClocks
) -> float | None:
    """The time left below which a person is warned about this partition; None if it has no limit."""
    clock = clocks.get(Partition(partition.topic, partition.partition))
    if clock is None or not clock.times_left:
        return None
    return clock.times_left[0].warning_seconds(stream.alerts.time_left_warning_hours)
