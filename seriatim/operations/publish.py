"""Publish: bring the table `current` to an entry of the ledger, in one commit that names the entry.

The steps, and what a crash after each of them leaves behind:

1. read the ledger, and how far the table is; start over if the table is of another ledger   nothing
2. plan what to read: the new records of a partition, or all of them if they were replaced   nothing
3. read them, and write the rows of the touched partitions again                             unnamed files
4. commit by compare-and-set: remove the old files, add the new ones                         it is done
5. delete files that left the table long ago                                                 next time

Next: operations/followers.py has the loop; ledger/current_rows.py has the rules of what is read;
storage/current_table.py is the table.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from seriatim.engine.crash_points import crash_point
from seriatim.errors import ConfigError
from seriatim.ledger.commit import require_head
from seriatim.ledger.current_rows import (
    CurrentWriteResult,
    PartitionCatchUp,
    ReplacedPartitions,
    TopicIdsByPartition,
    must_read_entries,
    plan_catch_ups,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger
from seriatim.operations.followers import Follower, catch_up, entries_between
from seriatim.ports import CurrentStore, LedgerStore, ProgressCallback, PublishedVersion


class PublishResult(Struct, kw_only=True):
    """What publishing did, or would do."""

    sequence: int
    """The entry that the table shows. After a dry run: the entry that it would show."""
    previous_sequence: int = -1
    """The entry that it showed before; -1 if there was no table, or if it was built from nothing."""
    has_changed: bool = False
    """Whether there was something to do."""
    catch_ups: list[PartitionCatchUp] = field(default_factory=list)
    written: CurrentWriteResult = CurrentWriteResult()

    def records_to_read(self) -> int:
        """How many records have to be read."""
        return sum(catch_up.record_count() for catch_up in self.catch_ups)


def publish_current(
    stream: str,
    store: LedgerStore,
    current: CurrentStore,
    *,
    sequence: int | None = None,
    rebuild: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> PublishResult:
    """Bring `current` to an entry, which is the newest one if `sequence` is None.

    With `rebuild` the table is built again from nothing. Without it the table never goes back: an
    entry before the published one changes nothing.
    """
    target = _target_ledger(stream, store, sequence)
    follower = CurrentFollower(store, current, dry_run=dry_run, progress=progress)
    catch_up(store, [follower], target, rebuild=rebuild)
    return follower.result


class CatchUpPlan:
    """Plans what has to be read to get from one entry to another. Of the entries in between it only
    needs to know which records they wrote again.
    """

    def __init__(self, store: LedgerStore, published: PublishedVersion, target: Ledger) -> None:
        self.store = store
        self.target = target
        self.before: Ledger | None = None
        self.topic_ids: TopicIdsByPartition = {}
        if published.sequence >= 0:
            self.before = store.ledger_at(target.stream, published.sequence)
            self.topic_ids = published.topic_ids
        self.needs_entries = must_read_entries(self.before, target)
        self._replaced = ReplacedPartitions(self.before, self.topic_ids)

    def add_entry(self, manifest: Manifest) -> None:
        """Note which records the entry wrote again, and new topic ids."""
        self._replaced.add_entry(manifest)
        self.topic_ids = self._replaced.several_topic_ids()

    def catch_ups(self) -> list[PartitionCatchUp]:
        """What has to be read, by partition."""
        files = self.store.files_at(self.target.stream, self.target.sequence)
        replaced = self._replaced.names
        return plan_catch_ups(self.before, self.target, replaced, self.topic_ids, files)


class CurrentFollower(Follower[PublishedVersion]):
    """The table `current`, as the loop of all followers brings it up."""

    description = "the table current"
    advice = "check that the output path can be written and has room, then publish again"
    needs_entries = False

    def __init__(
        self,
        store: LedgerStore,
        current: CurrentStore,
        *,
        dry_run: bool,
        progress: ProgressCallback | None,
    ) -> None:
        self.store = store
        self.current = current
        self.dry_run = dry_run
        self.progress = progress
        self.result = PublishResult(sequence=-1)

    def applied_version(self) -> PublishedVersion:
        """The entry that the table shows."""
        published = self.current.published_version()
        # What is true if the table turns out to be up to date, and `put` is never called.
        self.result = PublishResult(
            sequence=published.sequence, previous_sequence=published.sequence
        )
        return published

    def begin(self, applied: PublishedVersion, target: Ledger) -> None:
        """Step 2: begin to plan."""
        super().begin(applied, target)
        self.plan = CatchUpPlan(self.store, applied, target)
        self.needs_entries = self.plan.needs_entries

    def add_entry(self, manifest: Manifest) -> None:
        """Step 2, for one entry."""
        self.plan.add_entry(manifest)

    def put(self) -> None:
        """Steps 3 to 5; nothing in a dry run."""
        target = self.plan.target
        result = PublishResult(
            sequence=target.sequence,
            previous_sequence=self.applied.sequence,
            has_changed=True,
            catch_ups=self.plan.catch_ups(),
        )
        if not self.dry_run:
            report_progress = _record_counter(self.progress, result.records_to_read())
            result.written = self.current.put_rows(
                self.applied,
                self.entry,
                self.plan.topic_ids,
                result.catch_ups,
                report_progress,
            )
            crash_point("current-published")
        self.result = result


def _record_counter(progress: ProgressCallback | None, total: int) -> Callable[[int], None]:
    """The progress callback, with the total filled in."""

    def report_records_read(records_read: int) -> None:
        if progress is not None:
            progress(records_read, total)

    return report_records_read


def changes_since(
    stream: str,
    store: LedgerStore,
    since: int,
    result: PublishResult,
) -> PublishResult:
    """The result of a publication for a caller that last saw entry `since`.

    That entry may be earlier than the one published before: a process may have published in between
    and died before it could say so. An entry later than the published one is refused.
    """
    if since > result.sequence:
        raise ConfigError(
            f"{stream}: there is no entry {since} up to which anything is published",
            next=f"current is as of entry {result.sequence}: a later one was of another ledger, so read all again",
        )
    target = _target_ledger(stream, store, result.sequence)
    plan = CatchUpPlan(store, PublishedVersion(sequence=since), target)
    if plan.needs_entries:
        for manifest in entries_between(store, since, target):
            plan.add_entry(manifest)
    return PublishResult(
        sequence=result.sequence,
        previous_sequence=since,
        has_changed=since < result.sequence,
        catch_ups=plan.catch_ups(),
        written=result.written,
    )


def _target_ledger(stream: str, store: LedgerStore, sequence: int | None) -> Ledger:
    """The ledger as of an entry; the newest one if `sequence` is None."""
    head = require_head(store, stream)
    newest_sequence = head.ledger.sequence
    if sequence is None or sequence == newest_sequence:
        return head.ledger
    if not 0 <= sequence < newest_sequence:
        raise ConfigError(
            f"{stream}: there is no entry {sequence}", next=f"give one from 0 to {newest_sequence}"
        )
    return store.ledger_at(stream, sequence)
