"""Glance: what a look at Kafka said, as the file that pages read. Changes nothing.

Next room: core/status.py says how it stands later; page/leave.py keeps it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from seriatim.core.offsets import Partition
from seriatim.core.status import SESSIONS_MAX, PartitionStatus, Quarantined, Status
from seriatim.core.stream import Stream
from seriatim.steps.retention import Clocks
from seriatim.steps.watch import Gathered, Look


def status_of(stream: Stream, seen: Gathered, look: Look, *, ran: bool, before: Status | None = None) -> Status:
    """The file's content. `ran`: a run came to its end just now; `before` knows when the last one did."""
    found, now = seen.found, seen.at_seconds
    places = msgspec.convert(found["partitions"], list[PartitionStatus])
    sessions = msgspec.convert(found["quarantined"][:SESSIONS_MAX], list[Quarantined])
    return Status(
        stream=stream.name,
        at_seconds=now,
        sequence=seen.ledger.sequence,
        ran_seconds=now if ran else _ran(seen, before),
        tier=stream.tier,
        verdict=found["verdict"],
        circuit=found["circuit"],
        checked=found["checked"],
        rate=seen.ledger.pace.rate,
        partitions=[replace(one, limit_seconds=_limit(one, stream, seen.clocked)) for one in places],
        quarantined=sessions,
        quarantined_count=len(found["quarantined"]),
        concerns=look.concerns,
    )


def _ran(seen: Gathered, before: Status | None) -> float | None:
    """When a run last ended: as it was noted, and not before it last committed something."""
    noted = before.ran_seconds if before else None
    return max(noted or 0.0, seen.ledger.pace.at_seconds) or None


def _limit(one: PartitionStatus, stream: Stream, clocked: Clocks) -> float | None:
    """The time left at which a person is told of this partition."""
    clock = clocked.get(Partition(one.topic, one.partition))
    return clock.left[0].warned_seconds(stream.alerts.time_left_warning_hours) if clock and clock.left else None
