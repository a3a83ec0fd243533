"""What a reading is asked for beyond the messages: headers, and polls as large as the messages allow.

Next room: steps/fold.py reads; adapters/spark.py turns a wish into settings.
"""

from __future__ import annotations

from seriatim.core.ledger import Ledger
from seriatim.core.offsets import Partition
from seriatim.core.slice import Ranges
from seriatim.ports import Log, Wish

WORTH_A_LOOK = 10_000
"""Below so many messages small polls cost less than looking at some."""


class Wishes:
    """How large messages are, as the ledger knows it, or as a few of them show when it does not."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._seen: dict[Partition, int] = {}

    def of(self, ledger: Ledger, ranges: Ranges, *, look: bool = False) -> Wish:
        """Headers where messages wait in quarantine; and how large messages are, where that is known of all."""
        accounts = {partition: ledger.account(partition) for partition in ranges}
        sizes = {p: one.bytes // one.messages + 1 for p, one in accounts.items() if one and one.messages}
        unknown = {p: whole for p, whole in ranges.items() if p not in sizes and len(whole)}
        if look and not self._seen and sum(map(len, unknown.values())) >= WORTH_A_LOOK:
            self._seen = self.log.message_bytes(unknown)
        largest = max([*sizes.values(), *self._seen.values()], default=0)
        headers = any(one is not None and one.quarantined for one in accounts.values())
        return Wish(headers, largest if self._seen or not unknown else 0)
