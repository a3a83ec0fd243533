"""Snapshot distance: how far each session is from its last snapshot, in messages and in time.

One lost message spoils a session until its next snapshot, so the largest distance is the most that
can be lost at once. It is measured at every message, so how messages are cut into slices does not
change it.

Next: engine/fold.py measures after each batch; the ledger stores the largest distance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from seriatim.engine.messages import MessageBatch
from seriatim.engine.session import Counts, Session

OnDistanceExceeded = Callable[[str, Session, int, int], None]
"""Called at the message that goes beyond the limit, with the session's name, the session, the
message's offset, and the offset of the session's last snapshot.
"""


class SnapshotDistance:
    """Measures the sessions of one partition."""

    def __init__(self, limit_ms: int, on_exceeded: OnDistanceExceeded) -> None:
        self.limit_ms = limit_ms
        self.on_exceeded = on_exceeded
        self._snapshot_offsets: dict[str, int] = {}
        """The offset of the last measured snapshot by session. The sessions themselves have the last
        snapshot of the batch, which may be a later one.
        """

    def add_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Add sessions that were just loaded."""
        for name, session in sessions.items():
            self._snapshot_offsets[name] = session.snapshot_offset

    def measure(
        self,
        batch: MessageBatch,
        names: Sequence[str | None],
        snapshot_positions: Collection[int],
        end_positions: Collection[int],
        sessions: dict[str, Session],
        counts: Counts,
    ) -> None:
        """Measure the folded messages of a batch, given the positions of snapshots and of messages
        before which their session was ended.
        """
        if snapshot_positions or end_positions or self.limit_ms or not batch.has_rising_timestamps:
            self._measure_one_by_one(
                batch, names, snapshot_positions, end_positions, sessions, counts
            )
            return
        # Timestamps only rise, so the last message of a session is the farthest from its snapshot.
        last_times = dict(zip(names, batch.timestamps, strict=False))
        for name, message_count in Counter(names).items():
            session = sessions.get(name) if name is not None else None
            if session is None or session.snapshot_timestamp < 0:
                continue
            session.messages_since_snapshot += message_count
            distance_ms = int(last_times[name]) - session.snapshot_timestamp
            session.snapshot_distance_ms = max(session.snapshot_distance_ms, distance_ms)
            _record_distance(session, counts)

    def _measure_one_by_one(
        self,
        batch: MessageBatch,
        names: Sequence[str | None],
        snapshot_positions: Collection[int],
        end_positions: Collection[int],
        sessions: dict[str, Session],
        counts: Counts,
    ) -> None:
        snapshots = set(snapshot_positions)
        ends = set(end_positions)
        for i, (name, time) in enumerate(zip(names, batch.timestamps, strict=False)):
            session = sessions.get(name) if name is not None else None
            if session is None or name is None:
                continue
            if i in ends:
                _restart_at(session, -1)
            if i in snapshots:
                _restart_at(session, int(time))
                if self.limit_ms:
                    self._snapshot_offsets[name] = batch.start + i
            elif session.snapshot_timestamp >= 0:
                distance_before = session.snapshot_distance_ms
                distance = max(distance_before, int(time) - session.snapshot_timestamp)
                session.messages_since_snapshot += 1
                session.snapshot_distance_ms = distance
                _record_distance(session, counts)
                if self.limit_ms and distance_before <= self.limit_ms < distance:
                    snapshot_offset = self._snapshot_offsets[name]
                    self.on_exceeded(name, session, batch.start + i, snapshot_offset)


def _restart_at(session: Session, snapshot_timestamp: int) -> None:
    """Measure from a snapshot at this time; -1: from the next snapshot."""
    session.messages_since_snapshot = 0
    session.snapshot_distance_ms = 0
    session.snapshot_timestamp = snapshot_timestamp


def _record_distance(session: Session, counts: Counts) -> None:
    session.is_touched = True
    counts.distance_messages = max(counts.distance_messages, session.messages_since_snapshot)
    counts.distance_ms = max(counts.distance_ms, session.snapshot_distance_ms)
