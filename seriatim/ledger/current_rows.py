"""What the table `current` is made of: one row for each key that a session has now, as of a
published entry. Pure.

The last record of a row says what the row is, or that it is deleted. Records are ordered by topic
id (a topic that was created again has a new one), then by offset, then by index. So what changed
between two entries lies between their frontiers, in whichever files it is now, and compaction needs
no care. If a repair wrote records again, or a topic was created again, all rows of the partition
are built anew.

Next: operations/publish.py decides what is read; storage/current_table.py reads it and has the
table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from seriatim.engine.files import File, Files, group_by_partition
from seriatim.engine.offsets import Partition
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger

TopicIdsByPartition = dict[str, tuple[str, ...]]
"""The topic ids of each partition that had several, oldest first."""


class PartitionCatchUp(Struct, frozen=True, kw_only=True):
    """What is read of one partition to bring its rows up to an entry."""

    partition: Partition
    files: Files
    topic_ids: tuple[str, ...]
    """Topic ids, oldest first."""
    first_new_offset: int = -1
    """Only records from this offset on are applied, on top of the present rows. -1: all records are
    read, and the rows are built anew.
    """
    until: int = 0
    """The frontier of the partition at that entry."""
    epoch: int = 0
    """The epoch of the partition at that entry."""

    @property
    def is_full_rebuild(self) -> bool:
        """Whether all rows of the partition are built anew."""
        return self.first_new_offset < 0

    def record_count(self) -> int:
        """How many records the files have."""
        return sum(file.rows for file in self.files)


def must_read_entries(before: Ledger | None, after: Ledger) -> bool:
    """Whether the entries between two ledgers must be read.

    Slices alone never replace records. Everything else raises the epoch of its partitions.
    """
    accounts_before = before.partitions if before else {}
    for partition_name, account in after.partitions.items():
        account_before = accounts_before.get(partition_name)
        epoch_before = account_before.epoch if account_before else 0
        if account.epoch != epoch_before:
            return True
    return False


class ReplacedPartitions:
    """Finds, entry by entry, the partitions whose records were written again, and the topic ids of
    those that had several.
    """

    def __init__(self, before: Ledger | None, topic_ids: TopicIdsByPartition) -> None:
        self.names: set[str] = set()
        """The partitions whose records were written again."""
        self._all_topic_ids: dict[str, list[str]] = {}
        accounts_before = before.partitions if before else {}
        for partition_name, account in accounts_before.items():
            known_ids = topic_ids.get(partition_name, (account.topic_id,))
            self._all_topic_ids[partition_name] = list(known_ids)

    def add_entry(self, manifest: Manifest) -> None:
        """Add the next entry."""
        for change in manifest.entry.changes:
            partition_name = str(change.partition)
            topic_id = manifest.ledger.partitions[partition_name].topic_id
            partition_ids = self._all_topic_ids.setdefault(partition_name, [])
            if topic_id not in partition_ids:
                partition_ids.append(topic_id)
            if manifest.entry.replaces_records(change):
                self.names.add(partition_name)

    def several_topic_ids(self) -> TopicIdsByPartition:
        """The topic ids of each partition that had several by now, oldest first."""
        several = {}
        for partition_name, partition_ids in self._all_topic_ids.items():
            if len(partition_ids) > 1:
                several[partition_name] = tuple(partition_ids)
        return several


def plan_catch_ups(
    before: Ledger | None,
    after: Ledger,
    replaced_partitions: Collection[str],
    topic_ids: TopicIdsByPartition,
    files: Iterable[File],
) -> list[PartitionCatchUp]:
    """What has to be read to get from one entry (None: from nothing) to another.

    `files` are those of the table at the later entry.
    """
    files_by_partition, foreign_files = group_by_partition(files, after.partitions)
    accounts_before = before.partitions if before else {}
    catch_ups = []
    for partition_name, account in after.partitions.items():
        account_before = accounts_before.get(partition_name)
        own_files = files_by_partition.get(partition_name, [])
        if (
            account_before is not None
            and account_before.topic_id == account.topic_id
            and partition_name not in replaced_partitions
        ):
            first_new_offset = account_before.frontier
            partition_ids: tuple[str, ...] = (account.topic_id,)
            own_files = [file for file in own_files if file.last_offset >= first_new_offset]
            has_news = account.frontier > first_new_offset
        else:
            first_new_offset = -1
            partition_ids = topic_ids.get(partition_name, (account.topic_id,))
            has_news = True
        read_files = (*own_files, *foreign_files) if has_news else ()
        # Without any file left, a partition that is built anew must still lose its old rows.
        must_empty = first_new_offset < 0 and account_before is not None
        if read_files or must_empty:
            catch_up = PartitionCatchUp(
                partition=Partition.parse(partition_name),
                files=read_files,
                topic_ids=partition_ids,
                first_new_offset=first_new_offset,
                until=account.frontier,
                epoch=account.epoch,
            )
            catch_ups.append(catch_up)
    return catch_ups


class CurrentWriteResult(Struct, frozen=True):
    """What one update of the table wrote."""

    written_rows: int = 0
    written_files: int = 0
    removed_files: int = 0
    """Files that were replaced."""
