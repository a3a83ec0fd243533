"""Which sessions need a new snapshot from their producer, by the entries of the ledger alone. Pure.

A session that is quarantined, or headless since messages were lost, is right again after its next
snapshot. The producer that captures its table can send one at once. There is one request per
session and incident, and none for a session that is right again meanwhile.

Next: operations/ask_for_snapshots.py sends requests after a run; kafka/snapshot_requests.py has the
topic.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.ledger.entries import Entry, SliceEntry
from seriatim.ledger.model import Change


class SnapshotRequest(Struct, frozen=True, kw_only=True):
    """A request to a producer for a snapshot. Its field names are fixed: producers read them."""

    stream: str
    topic: str
    partition: int
    session: str
    reason: str
    """The finding. It is `gap` if messages were lost that may have been the session's."""
    offset: int
    """The offset since which the session waits. It identifies the incident."""

    @property
    def key(self) -> bytes:
        """The key of the request is the session, so that requests are spread as its messages."""
        return self.session.encode()

    def to_json(self) -> bytes:
        """The request as it is sent."""
        return msgspec.json.encode(self)


class SnapshotRequestCollector:
    """Collects the sessions that need a snapshot, while entries are added one by one."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._open_requests: dict[Partition, dict[str, SnapshotRequest]] = {}
        self._topic_ids: dict[Partition, str] = {}

    def add_entry(self, entry: Entry) -> None:
        """Add one more entry: which sessions began to wait, and which are right again."""
        for change in entry.changes:
            if self._topic_ids.get(change.partition) != change.topic_id:
                # A topic that was created again has none of the old sessions.
                self._topic_ids[change.partition] = change.topic_id
                self._open_requests[change.partition] = {}
            for mark in change.marks:
                self._apply_mark(entry, change, mark)

    def _apply_mark(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        if mark.session is None or mark.until >= 0:
            return
        open_requests = self._open_requests[change.partition]
        if mark.closed_by:
            open_requests.pop(mark.session, None)
        elif isinstance(entry, SliceEntry) and (mark.quarantined or mark.finding == "gap"):
            # A second mark of an open incident asks for nothing new: the first offset stays.
            request = self._request(change.partition, mark, mark.session)
            open_requests.setdefault(mark.session, request)

    def _request(
        self,
        partition: Partition,
        mark: GapMark,
        session: str,
    ) -> SnapshotRequest:
        return SnapshotRequest(
            stream=self.stream,
            topic=partition.topic,
            partition=partition.number,
            session=session,
            reason=mark.finding,
            offset=mark.offset,
        )

    def requests(self) -> list[SnapshotRequest]:
        """The requests for all sessions that need a snapshot now."""
        requests: list[SnapshotRequest] = []
        for open_requests in self._open_requests.values():
            requests.extend(open_requests.values())
        return requests


def collect_snapshot_requests(stream: str, entries: Iterable[Entry]) -> list[SnapshotRequest]:
    """The requests that these entries call for."""
    collector = SnapshotRequestCollector(stream)
    for entry in entries:
        collector.add_entry(entry)
    return collector.requests()
