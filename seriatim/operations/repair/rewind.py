"""Where a refold begins, and at which offsets it can be compared with what is committed.

A refold begins at the nearest earlier state that is still good: no later repair took it back, its
files are as committed, and Kafka has every message since. This module reads and changes nothing.

Next: ledger/history.py knows the past; operations/repair/refold.py folds from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from seriatim.engine.offsets import Bounds, Partition
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger import history
from seriatim.ledger.history import CommitPoint, PartitionHistory
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account
from seriatim.operations.repair.refold import lost_messages_error
from seriatim.operations.repair.refold_rules import RefoldRequest, Rewind
from seriatim.ports import Joiner, LedgerStore


def histories_as_of(
    store: LedgerStore, head: LedgerHead, partitions: Iterable[Partition]
) -> dict[Partition, PartitionHistory]:
    """The histories of partitions up to the entry of `head`."""
    manifests = (
        manifest
        for manifest in store.entries(head.ledger.stream, -1)
        if manifest.entry.sequence <= head.ledger.sequence
    )
    return history.read_histories(manifests, partitions)


class RewindChooser:
    """Chooses where refolds begin, for the partitions of one stream."""

    def __init__(
        self,
        head: LedgerHead,
        bounds: Mapping[Partition, Bounds],
        histories: Mapping[Partition, PartitionHistory],
        joiner: Joiner,
    ):
        self.ledger = head.ledger
        self.bounds = bounds
        self.histories = histories
        self.joiner = joiner
        self._checked_files: dict[str, str] = {}
        """Files that were checked, and what is wrong with each (empty: nothing). Saved states share
        their oldest files, so the same file comes up again and again.
        """

    def choose_rewind(
        self, request: RefoldRequest, *, rebuilds_state: bool = False, follows_cut_log: bool = False
    ) -> Rewind:
        """The refold of a partition. Raises `IntegrityError` if what it needs is gone.

        `rebuilds_state`: all state is made again. `follows_cut_log`: if the log was cut, the
        partition goes back to its end; without this a cut log is refused.
        """
        partition = request.partition
        account = self.ledger.account(partition)
        if account is None:
            raise_broken_promise("a refold is of a known partition")
        bounds = self._checked_bounds(partition)
        frontier = _frontier_after_refold(account, bounds)
        is_log_cut = frontier < account.frontier
        if is_log_cut and not follows_cut_log:
            raise self._cut_log_error(partition, account, frontier)
        if is_log_cut or self._damaged_state_files(account):
            rebuilds_state = True
        start = min(request.start, frontier)
        until = min(max(request.until, start), frontier)
        past = self.histories[partition]
        base = self._find_base(partition, start, bounds.log_start)
        commit_points = past.commit_points(until, frontier)
        passed_ranges = [
            passed
            for passed in past.passed_ranges()
            if base.account.frontier < passed.end <= frontier
        ]
        refold_request = RefoldRequest(
            partition=partition,
            start=start,
            until=until,
            sessions=None if rebuilds_state else request.sessions,
            reason=request.reason,
        )
        return Rewind(
            request=refold_request,
            account=account,
            base=base.account,
            sequence=base.sequence,
            frontier=frontier,
            commit_offsets=tuple(point.account.frontier for point in commit_points),
            releases_by_hand=past.releases_by_hand(),
            rebuilds_state=rebuilds_state,
            passed_ranges=tuple(passed_ranges),
        )

    def _checked_bounds(self, partition: Partition) -> Bounds:
        """The bounds of a partition. A topic that is gone, or was created again, is refused."""
        bounds = self.bounds.get(partition)
        if bounds is None:
            loss = "its topic is not in Kafka, or matches no more"
            raise lost_messages_error(self.ledger.stream, partition, loss)
        recreated = self.recreated_topic_error(partition)
        if recreated is not None:
            raise recreated
        return bounds

    def recreated_topic_error(self, partition: Partition) -> ConfigError | None:
        """The error that says that a topic was created again; None if it was not.

        Nothing of such a partition can be folded again.
        """
        stream = self.ledger.stream
        account = self.ledger.account(partition)
        bounds = self.bounds.get(partition)
        if account is None or bounds is None or bounds.topic_id == account.topic_id:
            return None
        return ConfigError(
            f"{stream}: topic {partition.topic} was made again: what was folded cannot be read any"
            " more",
            next=f'seriatim accept {stream} {partition.topic} --because "…" begins its new life',
        )

    def _cut_log_error(self, partition: Partition, account: Account, end: int) -> IntegrityError:
        stream = self.ledger.stream
        return IntegrityError(
            f"{stream}: {partition} cannot be folded again: its log was cut at offset {end},"
            f" and it was folded up to {account.frontier}",
            next="first follow the log back to where it ends:"
            f" seriatim repair {stream} --partition {partition}",
        )

    def _find_base(self, partition: Partition, start: int, log_start: int) -> CommitPoint:
        """The nearest point at or before `start` whose state is as committed.

        Raises `IntegrityError` if there is none, or if Kafka has not all messages since.
        """
        first_damage = ""
        for point in self.histories[partition].usable_points(start):
            damaged_files = self._damaged_state_files(point.account)
            if not damaged_files:
                self._refuse_expired(partition, point.account.frontier, log_start)
                return point
            # Not an error yet: an older state may still be good.
            if not first_damage:
                damage_texts = [f"{path}: {defect}" for path, defect in damaged_files.items()]
                first_damage = "; ".join(damage_texts)
        raise IntegrityError(
            f"{self.ledger.stream}: {partition} cannot be folded again: no state at or before"
            f" offset {start} is as committed",
            cause=first_damage[:600],
            next="restore one of these files from a backup, then repair again",
        )

    def _refuse_expired(self, partition: Partition, offset: int, log_start: int) -> None:
        """Refuse to begin at an offset that Kafka has dropped already."""
        if offset >= log_start:
            return
        account = self.ledger.partitions[str(partition)]
        raise lost_messages_error(
            self.ledger.stream,
            partition,
            f"it would begin at offset {offset}, and Kafka has nothing before offset {log_start}:"
            f" [{offset}, {log_start}) is gone",
            is_halted=account.halt is not None or bool(self._damaged_state_files(account)),
        )

    def _damaged_state_files(self, account: Account) -> dict[str, str]:
        """State files that are not as committed, and what is wrong with each."""
        unchecked_files = [file for file in account.state if file.path not in self._checked_files]
        damaged = self.joiner.find_damaged_files(unchecked_files)
        for file in unchecked_files:
            self._checked_files[file.path] = damaged.get(file.path, "")
        defects = {file.path: self._checked_files[file.path] for file in account.state}
        return {path: defect for path, defect in defects.items() if defect}


def _frontier_after_refold(account: Account, bounds: Bounds) -> int:
    """The frontier of a partition; if its log was cut, the end of what was not cut."""
    frontier = min(account.frontier, bounds.log_end)
    halt = account.halt
    if halt is not None and halt.finding == "truncated" and halt.log_end >= 0:
        # Producers may have written again since the halt. What counts is where the cut was.
        frontier = min(frontier, halt.log_end)
    return frontier
