"""What a reading is asked for beyond the messages: headers, and polls as large as the messages
allow.

Next room: operations/run.py reads; kafka/spark_reader.py turns a wish into settings.
"""

from __future__ import annotations

from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Ledger
from seriatim.operations.slicing import Ranges
from seriatim.ports import Log, ReadOptions

MESSAGES_WORTH_SAMPLING = 10_000
"""Below so many messages small polls cost less than looking at some."""


class ReadOptionsEstimator:
    """How large messages are, as the ledger knows it, or as a few of them show when it does not."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._sampled_bytes: dict[Partition, int] = {}

    def read_options(
        self, ledger: Ledger, ranges: Ranges, *, may_sample: bool = False
    ) -> ReadOptions:
        """Headers where messages wait in quarantine; and how large messages are, where that is
        known of all.
        """
        accounts = {partition: ledger.account(partition) for partition in ranges}
        sizes = {
            p: one.message_bytes // one.messages + 1
            for p, one in accounts.items()
            if one and one.messages
        }
        unknown = {p: whole for p, whole in ranges.items() if p not in sizes and len(whole)}
        if (
            may_sample
            and not self._sampled_bytes
            and sum(map(len, unknown.values())) >= MESSAGES_WORTH_SAMPLING
        ):
            self._sampled_bytes = self.log.sample_message_bytes(unknown)
        largest = max([*sizes.values(), *self._sampled_bytes.values()], default=0)
        headers = any(one is not None and one.quarantined for one in accounts.values())
        return ReadOptions(headers, largest if self._sampled_bytes or not unknown else 0)
