"""Publish: bring the table `current` to an entry of the ledger, in one commit that names the entry.

The steps, and what a crash after each of them leaves behind:

1. read the ledger, and how far the table is; start over if the table is of another ledger   nothing
2. plan what to read: the new records of a partition, or all of them if they were replaced   nothing
3. read them, and write the rows of the touched partitions again                             unnamed files
4. commit by compare-and-set: remove the old files, add the new ones                         it is done
5. delete files that left the table long ago                                                 next time

Next: storage/current_rows.py plans what is read; storage/current_table.py is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.commit import TRIES_MAX, read_head
from seriatim.ledger.model import Ledger, Manifest
from seriatim.ports import CommitConflictError, CurrentStore, LedgerStore
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    PartitionCatchUp,
    PublishedVersion,
    TopicIdsByPartition,
    find_replaced_partitions,
    must_read_entries,
    plan_catch_ups,
)

PublishProgress = Callable[[int, int], None]
"""Called with the number of records read so far, and with the number of records to read."""


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
    progress: PublishProgress | None = None,
) -> PublishResult:
    """Bring `current` to an entry, which is the newest one if `sequence` is None.

    With `rebuild` the table is built again from nothing. Without it the table never goes back: an
    entry before the published one changes nothing.
    """
    # Step 1.
    target = _target_ledger(stream, store, sequence)
    for _ in range(TRIES_MAX):
        published = _reset_if_unknown(store, current.published_version(), target)
        if rebuild:
            published = PublishedVersion(token=published.token)
        elif published.sequence >= target.sequence:
            return PublishResult(sequence=published.sequence, previous_sequence=published.sequence)
        # Step 2.
        catch_ups, lives = _plan_catch_ups(store, published, target)
        result = PublishResult(
            sequence=target.sequence,
            previous_sequence=published.sequence,
            has_changed=True,
            catch_ups=catch_ups,
        )
        if dry_run:
            return result
        # Steps 3 to 5.
        report_progress = _record_counter(progress, result.records_to_read())
        try:
            result.written = current.put_rows(published, target, lives, catch_ups, report_progress)
        except CommitConflictError as error:
            # Another process publishes at the same time, or the disk is full.
            conflict = error
            continue
        crash_point("current-published")
        return result
    raise PlatformError(
        f"{stream}: the table current could not be written, {TRIES_MAX} times",
        cause=str(conflict)[:400],
        next="check that the output path can be written and has room, then publish again",
    )


def _record_counter(progress: PublishProgress | None, total: int) -> Callable[[int], None]:
    """The progress callback, with the total filled in."""

    def report_records_read(records_read: int) -> None:
        if progress is not None:
            progress(records_read, total)

    return report_records_read


def changes_since(
    stream: str, store: LedgerStore, since: int, result: PublishResult
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
    catch_ups, _ = _plan_catch_ups(store, PublishedVersion(sequence=since), target)
    return PublishResult(
        sequence=result.sequence,
        previous_sequence=since,
        has_changed=since < result.sequence,
        catch_ups=catch_ups,
        written=result.written,
    )


def _target_ledger(stream: str, store: LedgerStore, sequence: int | None) -> Ledger:
    """The ledger as of an entry; the newest one if `sequence` is None."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run", next=f"seriatim run {stream}")
    newest_sequence = head.ledger.sequence
    if sequence is None or sequence == newest_sequence:
        return head.ledger
    if not 0 <= sequence < newest_sequence:
        raise ConfigError(
            f"{stream}: there is no entry {sequence}", next=f"give one from 0 to {newest_sequence}"
        )
    return store.ledger_at(stream, sequence)


def _reset_if_unknown(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> PublishedVersion:
    """How far the table is. A table that shows an entry of another ledger starts over."""
    if published.sequence >= 0:
        if published.sha256 == target.sha256:
            return published
        if store.has_manifest(published.sha256, published.sequence - 1):
            return published
    return replace(published, sequence=-1, topic_ids={})


def _plan_catch_ups(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> tuple[list[PartitionCatchUp], TopicIdsByPartition]:
    """What has to be read to get from the published entry to the target, and the lives of topics
    that had several.
    """
    before = None
    if published.sequence >= 0:
        before = store.ledger_at(target.stream, published.sequence)
    replaced: set[str] = set()
    lives = dict(published.topic_ids)
    if must_read_entries(before, target):
        manifests = _manifests_between(store, published, target)
        replaced, lives = find_replaced_partitions(before, manifests, lives)
    files = store.files_at(target.stream, target.sequence)
    return plan_catch_ups(before, target, replaced, lives, files), lives


def _manifests_between(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> Iterator[Manifest]:
    """The entries after the published one, up to the target. They come one at a time, because each
    manifest holds a whole ledger.
    """
    manifests = store.entries(target.stream, published.sequence)
    return takewhile(lambda manifest: manifest.ledger.sequence <= target.sequence, manifests)
