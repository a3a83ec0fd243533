"""Rewind: where a refold begins, and where it may meet what is committed. Reads, and changes
nothing.

The nearest earlier state that is still good: no later repair took it back, its files are as
committed, and Kafka has every message since.

Next room: ledger/history.py knows the past; operations/repair/refold.py folds from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger import history
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.model import Account
from seriatim.operations.repair.refold import lost_messages_error
from seriatim.operations.repair.refold_rules import RefoldRequest, Rewind
from seriatim.operations.slicing import Bounds
from seriatim.ports import Joiner, LedgerHead, LedgerStore


def histories_as_of(
    store: LedgerStore, head: LedgerHead, partitions: Iterable[Partition]
) -> dict[Partition, PartitionHistory]:
    """The pasts of partitions, as of `head`."""
    last = head.ledger.sequence
    entries = (
        manifest
        for manifest in store.entries(head.ledger.stream, -1)
        if manifest.entry.sequence <= last
    )
    return history.read_histories(entries, partitions)


class RewindChooser:
    """Chooses where to begin, for the partitions of one stream."""

    def __init__(
        self,
        head: LedgerHead,
        bounds: Mapping[Partition, Bounds],
        histories: Mapping[Partition, PartitionHistory],
        joiner: Joiner,
    ):
        self.ledger, self.bounds, self.histories, self.joiner = (
            head.ledger,
            bounds,
            histories,
            joiner,
        )
        self._checked_files: dict[str, str] = {}
        """Files that were looked at, and what is wrong with each: many saved states share their
        oldest.
        """

    def choose_rewind(
        self, request: RefoldRequest, *, rebuilds_state: bool = False, follows_cut_log: bool = False
    ) -> Rewind:
        """A partition's refold. Raises `IntegrityError` where what it needs is gone.

        `rebuild`: all state is made again. `back`: a log that was cut is followed back to its end.
        """
        account = self.ledger.account(request.partition) or raise_broken_promise(
            "a refold is of a known partition"
        )
        seen = self._checked_bounds(request.partition)
        cut = (
            account.halt.log_end
            if account.halt is not None and account.halt.finding == "truncated"
            else -1
        )
        frontier = min(account.frontier, seen.log_end, cut if cut >= 0 else seen.log_end)
        if frontier < account.frontier and not follows_cut_log:
            raise self._cut_log_error(request.partition, account, frontier)
        rebuilds_state |= frontier < account.frontier or bool(self._damaged_state_files(account))
        start = min(request.start, frontier)
        until = min(max(request.until, start), frontier)
        past = self.histories[request.partition]
        sequence, base = self._find_base(request.partition, start, seen.log_start)
        borders = tuple(point.account.frontier for point in past.commit_points(until, frontier))
        return Rewind(
            request=RefoldRequest(
                partition=request.partition,
                start=start,
                until=until,
                sessions=None if rebuilds_state else request.sessions,
                reason=request.reason,
            ),
            account=account,
            base=base,
            sequence=sequence,
            frontier=frontier,
            commit_offsets=borders,
            releases_by_hand=past.releases_by_hand(),
            rebuilds_state=rebuilds_state,
            passed_ranges=tuple(
                whole for whole in past.passed_ranges() if base.frontier < whole.end <= frontier
            ),
        )

    def _checked_bounds(self, partition: Partition) -> Bounds:
        seen = self.bounds.get(partition)
        stream = self.ledger.stream
        if seen is None:
            raise lost_messages_error(
                stream, partition, "its topic is not in Kafka, or matches no more"
            )
        if (over := self.recreated_topic_error(partition)) is not None:
            raise over
        return seen

    def recreated_topic_error(self, partition: Partition) -> ConfigError | None:
        """Why nothing of a partition can be folded again: its topic was made again."""
        account, seen, stream = (
            self.ledger.account(partition),
            self.bounds.get(partition),
            self.ledger.stream,
        )
        if account is None or seen is None or seen.topic_id == account.topic_id:
            return None
        return ConfigError(
            f"{stream}: topic {partition.topic} was made again: what was folded cannot be read any more",
            next=f'seriatim accept {stream} {partition.topic} --because "…" begins its new life',
        )

    def _cut_log_error(self, partition: Partition, account: Account, end: int) -> IntegrityError:
        stream = self.ledger.stream
        return IntegrityError(
            f"{stream}: {partition} cannot be folded again: its log was cut at offset {end},"
            f" and it was folded up to {account.frontier}",
            next=f"first follow the log back to where it ends: seriatim repair {stream} --partition {partition}",
        )

    def _find_base(self, partition: Partition, start: int, log_start: int) -> tuple[int, Account]:
        """The nearest state at or before `start` that is as committed, and its entry."""
        stream, account, damage = self.ledger.stream, self.ledger.partitions[str(partition)], ""
        for point in self.histories[partition].usable_points(start):
            at = point.account.frontier
            if hurt := self._damaged_state_files(point.account):
                damage = damage or "; ".join(f"{path}: {why}" for path, why in hurt.items())
            elif at < log_start:
                raise lost_messages_error(
                    stream,
                    partition,
                    is_halted=account.halt is not None or bool(self._damaged_state_files(account)),
                    loss=f"it would begin at offset {at}, and Kafka has nothing before offset {log_start}:"
                    f" [{at}, {log_start}) is gone",
                )
            else:
                return point.sequence, point.account
        raise IntegrityError(
            f"{stream}: {partition} cannot be folded again: no state at or before offset {start} is as committed",
            cause=damage[:600],
            next="restore one of these files from a backup, then repair again",
        )

    def _damaged_state_files(self, account: Account) -> dict[str, str]:
        """State files that are not as committed."""
        unseen = [file for file in account.state if file.path not in self._checked_files]
        found = self.joiner.find_damaged_files(unseen)
        self._checked_files |= {file.path: found.get(file.path, "") for file in unseen}
        return {file.path: why for file in account.state if (why := self._checked_files[file.path])}
