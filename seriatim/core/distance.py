"""The loss bound: how far each session is from its last snapshot, in messages and in time.

One lost message spoils a session until its next snapshot, so the largest distance is the most that can
be lost at once. Measured at every message; slicing does not change it.

Next room: fold.py measures after each stretch; the ledger keeps the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from seriatim.core.message import Stretch
from seriatim.core.session import Counts, Session

Tell = Callable[[str, Session, int, int], None]
"""Session's name, session, offset, that of its last snapshot before: it is past the limit since this message."""


class Distance:
    """Measures one partition's sessions."""

    def __init__(self, limit_ms: int, tell: Tell) -> None:
        self.limit_ms, self.tell = limit_ms, tell
        self._anchors: dict[str, int] = {}
        """Where sessions' last snapshots are, as far as was measured: the fold itself is further."""

    def meet(self, sessions: Mapping[str, Session]) -> None:
        """Sessions that were just loaded."""
        self._anchors |= {name: session.snapshot_offset for name, session in sessions.items()}

    def measure(
        self,
        stretch: Stretch,
        names: Sequence[str | None],
        anchored: Collection[int],
        ended: Collection[int],
        sessions: dict[str, Session],
        counts: Counts,
    ) -> None:
        """Take in the messages of a stretch that were folded; with the positions of snapshots and ends among them."""
        if anchored or ended or self.limit_ms or not stretch.rises:
            self._one_by_one(stretch, names, anchored, ended, sessions, counts)
            return
        last = dict(zip(names, stretch.timestamps, strict=False))
        for name, number in Counter(names).items():
            session = sessions.get(name) if name is not None else None
            if session is not None and session.snapshot_timestamp >= 0:
                session.since_snapshot += number
                session.reach_ms = max(session.reach_ms, int(last[name]) - session.snapshot_timestamp)
                _note(session, counts)

    def _one_by_one(
        self,
        stretch: Stretch,
        names: Sequence[str | None],
        anchored: Collection[int],
        ended: Collection[int],
        sessions: dict[str, Session],
        counts: Counts,
    ) -> None:
        anchors, ends = set(anchored), set(ended)
        for i, (name, time) in enumerate(zip(names, stretch.timestamps, strict=False)):
            session = sessions.get(name) if name is not None else None
            if session is None:
                continue
            if i in ends:
                session.since_snapshot, session.reach_ms, session.snapshot_timestamp = 0, 0, -1
            if i in anchors:
                session.since_snapshot, session.reach_ms, session.snapshot_timestamp = 0, 0, int(time)
                if self.limit_ms:
                    self._anchors[str(name)] = stretch.start + i
            elif session.snapshot_timestamp >= 0:
                before = session.reach_ms
                session.since_snapshot += 1
                session.reach_ms = max(before, int(time) - session.snapshot_timestamp)
                _note(session, counts)
                if self.limit_ms and before <= self.limit_ms < session.reach_ms:
                    self.tell(str(name), session, stretch.start + i, self._anchors[str(name)])


def _note(session: Session, counts: Counts) -> None:
    session.touched = True
    counts.distance_messages = max(counts.distance_messages, session.since_snapshot)
    counts.distance_ms = max(counts.distance_ms, session.reach_ms)
