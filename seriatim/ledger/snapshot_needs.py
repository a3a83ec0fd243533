"""Asking producers: which sessions need a new snapshot, out of the ledger's entries alone. Pure.

A session that is set aside, or headless since messages were lost, is right again after its next
snapshot: whoever captures its table can send one at once. One request per session and incident; who
was right again meanwhile is not asked for.

Next room: operations/ask_for_snapshots.py asks after a run; kafka/snapshot_requests.py has the
topic.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Change, Entry


class SnapshotRequest(Struct, frozen=True, kw_only=True):
    """What is asked of a producer. Its names are fixed: producers read them."""

    stream: str
    topic: str
    partition: int
    session: str
    reason: str
    """The finding; `gap` where messages were lost that may have been the session's."""
    offset: int
    """Of the message since which the session waits: the same incident has the same."""

    @property
    def key(self) -> bytes:
        """The session's own, so that requests are spread as its messages are."""
        return self.session.encode()

    def to_json(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(self)


class SnapshotRequestCollector:
    """Sessions that need a snapshot, while entries are taken in."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._open_requests: dict[Partition, dict[str, SnapshotRequest]] = {}
        self._topic_ids: dict[Partition, str] = {}

    def add_entry(self, entry: Entry) -> None:
        """One more entry: who began to wait, and who is right again."""
        for change in entry.changes:
            if (
                self._topic_ids.get(change.partition) != change.topic_id
            ):  # a new life has none of the old sessions
                self._topic_ids[change.partition], self._open_requests[change.partition] = (
                    change.topic_id,
                    {},
                )
            for mark in change.marks:
                self._apply_mark(entry, change, mark)

    def _apply_mark(self, entry: Entry, change: Change, mark: GapMark) -> None:
        waiting = self._open_requests[change.partition]
        if mark.session is None or mark.until >= 0:
            return
        if mark.closed_by:
            waiting.pop(mark.session, None)
        elif entry.kind == "slice" and (mark.quarantined or mark.finding == "gap"):
            waiting.setdefault(mark.session, self._request(change.partition, mark, mark.session))

    def _request(self, partition: Partition, mark: GapMark, session: str) -> SnapshotRequest:
        return SnapshotRequest(
            stream=self.stream,
            topic=partition.topic,
            partition=partition.number,
            session=session,
            reason=mark.finding,
            offset=mark.offset,
        )

    def requests(self) -> list[SnapshotRequest]:
        """Who is to be asked for now."""
        return [request for waiting in self._open_requests.values() for request in waiting.values()]


def collect_snapshot_requests(stream: str, entries: Iterable[Entry]) -> list[SnapshotRequest]:
    """The requests that these entries call for."""
    asking = SnapshotRequestCollector(stream)
    for entry in entries:
        asking.add_entry(entry)
    return asking.requests()
