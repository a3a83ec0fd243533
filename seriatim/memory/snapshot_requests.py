"""Snapshot requests in memory.

Next: kafka/snapshot_requests.py has the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.errors import PlatformError
from seriatim.ledger.snapshot_needs import SnapshotRequest


class MemoryRequests:
    """A topic of requests. While `is_down` is set, its broker does not answer."""

    def __init__(self) -> None:
        self.sent_requests: list[SnapshotRequest] = []
        self.is_down = False
        self._last_requested = (-1, "")

    def last_requested_entry(self) -> tuple[int, str]:
        """The entry up to which producers were asked."""
        return self._last_requested

    def put_last_requested_entry(self, sequence: int, sha256: str) -> None:
        """Note that producers were asked up to this entry."""
        self._last_requested = (sequence, sha256)

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, or raise `PlatformError`."""
        if self.is_down:
            raise PlatformError(
                "producers could not be asked for snapshots: the broker is down", next="start it"
            )
        self.sent_requests += requests
