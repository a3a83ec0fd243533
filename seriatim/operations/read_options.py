"""Read options: what a run asks of the reader beyond the messages themselves.

These are headers, and an estimate of the message size, from which the reader chooses how much it
fetches at once.

Next: operations/run.py reads with them; kafka/spark_reader.py turns them into settings.
"""

from __future__ import annotations

from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.slicing import Ranges
from seriatim.ports import Log, ReadOptions

MESSAGES_WORTH_SAMPLING = 10_000
"""With fewer messages than this, small fetches cost less than sampling the message size."""


class ReadOptionsEstimator:
    """Estimates the size of messages from the ledger, and samples Kafka where that is not enough."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._sampled_bytes: dict[Partition, int] = {}

    def read_options(
        self, ledger: Ledger, ranges: Ranges, *, may_sample: bool = False
    ) -> ReadOptions:
        """The options for reading these ranges.

        Headers are read where a session is in quarantine. The message size is that of the partition
        with the largest messages; it is 0 while some partition's size is not known.
        """
        average_sizes = []
        unmeasured_ranges: Ranges = {}
        has_quarantine = False
        for partition, offset_range in ranges.items():
            account = ledger.account(partition)
            if account is not None and account.quarantined:
                has_quarantine = True
            if account is not None and account.messages:
                average_sizes.append(_average_message_bytes(account))
            elif len(offset_range):
                unmeasured_ranges[partition] = offset_range
        if may_sample and not self._sampled_bytes:
            self._sample_if_worthwhile(unmeasured_ranges)
        largest_average = max([*average_sizes, *self._sampled_bytes.values()], default=0)
        if unmeasured_ranges and not self._sampled_bytes:
            largest_average = 0
        return ReadOptions(has_quarantine, largest_average)

    def _sample_if_worthwhile(self, unmeasured_ranges: Ranges) -> None:
        messages = sum(len(offset_range) for offset_range in unmeasured_ranges.values())
        if messages >= MESSAGES_WORTH_SAMPLING:
            self._sampled_bytes = self.log.sample_message_bytes(unmeasured_ranges)


def _average_message_bytes(account: Account) -> int:
    return account.message_bytes // account.messages + 1
