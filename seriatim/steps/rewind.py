"""Rewind: where a refold begins, and where it may meet what is committed. Reads, and changes nothing.

The nearest earlier state that is still good: no later repair took it back, its files are as committed, and Kafka
has every message since.

Next room: core/history.py knows the past; steps/refold.py folds from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from seriatim.core import history
from seriatim.core.errors import ConfigError, IntegrityError, broken
from seriatim.core.history import Past
from seriatim.core.ledger import Account
from seriatim.core.offsets import Partition
from seriatim.core.refold import Rewind, Wanted
from seriatim.core.slice import Bounds
from seriatim.ports import Head, Joiner, LedgerStore
from seriatim.steps.refold import lost


def pasts(store: LedgerStore, head: Head, partitions: Iterable[Partition]) -> dict[Partition, Past]:
    """The pasts of partitions, as of `head`."""
    last = head.ledger.sequence
    entries = (manifest for manifest in store.entries(head.ledger.stream, -1) if manifest.entry.sequence <= last)
    return history.read(entries, partitions)


class Chooser:
    """Chooses where to begin, for the partitions of one stream."""

    def __init__(self, head: Head, bounds: Mapping[Partition, Bounds], pasts: dict[Partition, Past], joiner: Joiner):
        self.ledger, self.bounds, self.pasts, self.joiner = head.ledger, bounds, pasts, joiner
        self._proved: dict[str, str] = {}
        """Files that were looked at, and what is wrong with each: many saved states share their oldest."""

    def rewind(self, wanted: Wanted, *, rebuild: bool = False, back: bool = False) -> Rewind:
        """A partition's refold. Raises `IntegrityError` where what it needs is gone.

        `rebuild`: all state is made again. `back`: a log that was cut is followed back to its end.
        """
        account = self.ledger.account(wanted.partition) or broken("a refold is of a known partition")
        seen = self._seen(wanted.partition)
        cut = account.halt.log_end if account.halt is not None and account.halt.finding == "truncated" else -1
        frontier = min(account.frontier, seen.log_end, cut if cut >= 0 else seen.log_end)
        if frontier < account.frontier and not back:
            raise self._cut(wanted.partition, account, frontier)
        rebuild |= frontier < account.frontier or bool(self._damaged(account))
        start = min(wanted.start, frontier)
        until = min(max(wanted.until, start), frontier)
        past = self.pasts[wanted.partition]
        sequence, base = self._base(wanted.partition, start, seen.log_start)
        borders = tuple(point.account.frontier for point in past.borders(until, frontier))
        return Rewind(
            wanted=Wanted(
                partition=wanted.partition,
                start=start,
                until=until,
                sessions=None if rebuild else wanted.sessions,
                why=wanted.why,
            ),
            account=account,
            base=base,
            sequence=sequence,
            frontier=frontier,
            borders=borders,
            released=past.released(),
            rebuild=rebuild,
            passed=tuple(whole for whole in past.passed() if base.frontier < whole.end <= frontier),
        )

    def _seen(self, partition: Partition) -> Bounds:
        seen = self.bounds.get(partition)
        stream = self.ledger.stream
        if seen is None:
            raise lost(stream, partition, "its topic is not in Kafka, or matches no more")
        if (over := self.is_over(partition)) is not None:
            raise over
        return seen

    def is_over(self, partition: Partition) -> ConfigError | None:
        """Why nothing of a partition can be folded again: its topic was made again."""
        account, seen, stream = self.ledger.account(partition), self.bounds.get(partition), self.ledger.stream
        if account is None or seen is None or seen.topic_id == account.topic_id:
            return None
        return ConfigError(
            f"{stream}: topic {partition.topic} was made again: what was folded cannot be read any more",
            next=f'seriatim accept {stream} {partition.topic} --because "…" begins its new life',
        )

    def _cut(self, partition: Partition, account: Account, end: int) -> IntegrityError:
        stream = self.ledger.stream
        return IntegrityError(
            f"{stream}: {partition} cannot be folded again: its log was cut at offset {end},"
            f" and it was folded up to {account.frontier}",
            next=f"first follow the log back to where it ends: seriatim repair {stream} --partition {partition}",
        )

    def _base(self, partition: Partition, start: int, log_start: int) -> tuple[int, Account]:
        """The nearest state at or before `start` that is as committed, and its entry."""
        stream, account, damage = self.ledger.stream, self.ledger.partitions[str(partition)], ""
        for point in self.pasts[partition].usable(start):
            at = point.account.frontier
            if hurt := self._damaged(point.account):
                damage = damage or "; ".join(f"{path}: {why}" for path, why in hurt.items())
            elif at < log_start:
                raise lost(
                    stream,
                    partition,
                    waits=account.halt is not None or bool(self._damaged(account)),
                    what=f"it would begin at offset {at}, and Kafka has nothing before offset {log_start}:"
                    f" [{at}, {log_start}) is gone",
                )
            else:
                return point.sequence, point.account
        raise IntegrityError(
            f"{stream}: {partition} cannot be folded again: no state at or before offset {start} is as committed",
            cause=damage[:600],
            next="restore one of these files from a backup, then repair again",
        )

    def _damaged(self, account: Account) -> dict[str, str]:
        """State files that are not as committed."""
        unseen = [file for file in account.state if file.path not in self._proved]
        found = self.joiner.damaged(unseen)
        self._proved |= {file.path: found.get(file.path, "") for file in unseen}
        return {file.path: why for file in account.state if (why := self._proved[file.path])}
