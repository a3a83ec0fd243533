"""The loss bound: how far each session is from its last snapshot, in messages and in time.

One lost message spoils a session until its next snapshot, so the largest distance is the most that
can be lost at once. Measured at every message; slicing does not change it.

Next room: fold.py measures after each stretch; the ledger keeps the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from seriatim.engine.messages import MessageBatch
from seriatim.engine.session import Counts, Session

OnDistanceExceeded = Callable[[str, Session, int, int], None]
"""Session's name, session, offset, that of its last snapshot before: it is past the limit since
this message.
"""


class SnapshotDistance:
    """Measures one partition's sessions."""

    def __init__(self, limit_ms: int, on_exceeded: OnDistanceExceeded) -> None:
        self.limit_ms, self.on_exceeded = limit_ms, on_exceeded
        self._snapshot_offsets: dict[str, int] = {}
        """Where sessions' last snapshots are, as far as was measured: the fold itself is further."""

    def add_sessions(self, sessions: Mapping[str, Session]) -> None:
        """Sessions that were just loaded."""
        self._snapshot_offsets |= {
            name: session.snapshot_offset for name, session in sessions.items()
        }

    def measure(
        self,
        batch: MessageBatch,
        names: Sequence[str | None],
        snapshot_positions: Collection[int],
        end_positions: Collection[int],
        sessions: dict[str, Session],
        counts: Counts,
    ) -> None:
        """Take in the messages of a stretch that were folded; with the positions of snapshots and
        ends among them.
        """
        if snapshot_positions or end_positions or self.limit_ms or not batch.has_rising_timestamps:
            self._measure_one_by_one(
                batch, names, snapshot_positions, end_positions, sessions, counts
            )
            return
        last = dict(zip(names, batch.timestamps, strict=False))
        for name, number in Counter(names).items():
            session = sessions.get(name) if name is not None else None
            if session is not None and session.snapshot_timestamp >= 0:
                session.messages_since_snapshot += number
                session.snapshot_distance_ms = max(
                    session.snapshot_distance_ms, int(last[name]) - session.snapshot_timestamp
                )
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
        anchors, ends = set(snapshot_positions), set(end_positions)
        for i, (name, time) in enumerate(zip(names, batch.timestamps, strict=False)):
            session = sessions.get(name) if name is not None else None
            if session is None:
                continue
            if i in ends:
                (
                    session.messages_since_snapshot,
                    session.snapshot_distance_ms,
                    session.snapshot_timestamp,
                ) = 0, 0, -1
            if i in anchors:
                (
                    session.messages_since_snapshot,
                    session.snapshot_distance_ms,
                    session.snapshot_timestamp,
                ) = 0, 0, int(time)
                if self.limit_ms:
                    self._snapshot_offsets[str(name)] = batch.start + i
            elif session.snapshot_timestamp >= 0:
                before = session.snapshot_distance_ms
                session.messages_since_snapshot += 1
                session.snapshot_distance_ms = max(before, int(time) - session.snapshot_timestamp)
                _record_distance(session, counts)
                if self.limit_ms and before <= self.limit_ms < session.snapshot_distance_ms:
                    self.on_exceeded(
                        str(name), session, batch.start + i, self._snapshot_offsets[str(name)]
                    )


def _record_distance(session: Session, counts: Counts) -> None:
    session.is_touched = True
    counts.distance_messages = max(counts.distance_messages, session.messages_since_snapshot)
    counts.distance_ms = max(counts.distance_ms, session.snapshot_distance_ms)
