"""Publish: the table `current`, brought to an entry of the ledger. One commit, which names that
entry.

1. read the ledger, and how far the table is; a table that this ledger does not know begins anew        nothing
2. say what is to be read: per partition the records past what is in, or all where they were made again  nothing
3. read them, and write the rows of the touched partitions anew                                          files unnamed
4. commit, compare-and-set: removes the old files, adds the new ones                                     done
5. delete files that left the table long ago                                                             later

Next room: storage/current_rows.py says what is read; storage/current_table.py has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.errors import ConfigError, PlatformError
from seriatim.ledger.commit import TRIES_MAX, read_head
from seriatim.ledger.model import Ledger, Manifest
from seriatim.ports import CommitConflictError, CurrentStore, LedgerStore
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    Lives,
    PartitionCatchUp,
    PublishedVersion,
    find_replaced_partitions,
    must_read_entries,
    plan_catch_ups,
)


class PublishProgress(Protocol):
    """Told how many records were read, of how many."""

    def __call__(self, done: int, total: int) -> None: ...


def _ignore_progress(done: int, total: int) -> None:
    """Nobody watches."""


class PublishResult(Struct, kw_only=True):
    """What publishing did, or would do."""

    sequence: int
    """As of which entry the table is (a dry run: would be)."""
    previous_sequence: int = -1
    """As of which it was; -1: there was none, or it was made as a whole."""
    has_changed: bool = False
    """Whether there was anything to do."""
    catch_ups: list[PartitionCatchUp] = field(default_factory=list)
    written: CurrentWriteResult = CurrentWriteResult()

    def records_to_read(self) -> int:
        """How many records are read."""
        return sum(catch.record_count() for catch in self.catch_ups)


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
    """Bring `current` to an entry (the last one, if none is named), or make it again as of there.

    It never goes back by itself: an entry before the one that is published changes nothing.
    """
    target = _target_ledger(stream, store, sequence)
    for _ in range(TRIES_MAX):
        at = _reset_if_unknown(store, current.published_version(), target)
        if rebuild:
            at = PublishedVersion(token=at.token)
        elif at.sequence >= target.sequence:
            return PublishResult(sequence=at.sequence, previous_sequence=at.sequence)
        found, lives = _plan_catch_ups(store, at, target)
        done = PublishResult(
            sequence=target.sequence,
            previous_sequence=at.sequence,
            has_changed=True,
            catch_ups=found,
        )
        if dry_run:
            return done
        try:
            done.written = current.put_rows(
                at,
                target,
                lives,
                found,
                partial(progress or _ignore_progress, total=done.records_to_read()),
            )
        except CommitConflictError as conflict:  # another one publishes, or the disk is full
            trouble = conflict
            continue
        crash_point("current-published")
        return done
    raise PlatformError(
        f"{stream}: the table current could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room, then publish again",
    )


def changes_since(
    stream: str, store: LedgerStore, since: int, result: PublishResult
) -> PublishResult:
    """What was done, as it looks to somebody who last saw an earlier entry: the one who told of a
    later one died.
    """
    if since > result.sequence:
        raise ConfigError(
            f"{stream}: there is no entry {since} up to which anything is published",
            next=f"current is as of entry {result.sequence}: who saw a later one saw another ledger, and reads all anew",
        )
    found, _ = _plan_catch_ups(
        store, PublishedVersion(sequence=since), _target_ledger(stream, store, result.sequence)
    )
    return PublishResult(
        sequence=result.sequence,
        previous_sequence=since,
        has_changed=since < result.sequence,
        catch_ups=found,
        written=result.written,
    )


def _target_ledger(stream: str, store: LedgerStore, sequence: int | None) -> Ledger:
    """The ledger as of the entry that is asked for."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run", next=f"seriatim run {stream}")
    last = head.ledger.sequence
    if sequence is None or sequence == last:
        return head.ledger
    if not 0 <= sequence < last:
        raise ConfigError(
            f"{stream}: there is no entry {sequence}", next=f"give one from 0 to {last}"
        )
    return store.ledger_at(stream, sequence)


def _reset_if_unknown(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> PublishedVersion:
    """How far the table is, by this ledger: one that has seen entries that are not in it begins
    anew.
    """
    known = published.sequence >= 0 and (
        published.sha256 == target.sha256
        or store.has_manifest(published.sha256, published.sequence - 1)
    )
    return published if known else replace(published, sequence=-1, lives={})


def _plan_catch_ups(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> tuple[list[PartitionCatchUp], Lives]:
    """What is to be read from there to the target, and the lives of topics that had several."""
    before = store.ledger_at(target.stream, published.sequence) if published.sequence >= 0 else None
    replaced, lives = set[str](), dict(published.lives)
    if must_read_entries(before, target):
        replaced, lives = find_replaced_partitions(
            before, _manifests_between(store, published, target), lives
        )
    files = store.files_at(target.stream, target.sequence)
    return plan_catch_ups(before, target, replaced, lives, files), lives


def _manifests_between(
    store: LedgerStore, published: PublishedVersion, target: Ledger
) -> Iterator[Manifest]:
    """Entries past the one that is published, up to the target; one at a time: each carries a whole
    ledger.
    """
    later = store.entries(target.stream, published.sequence)
    return takewhile(lambda manifest: manifest.ledger.sequence <= target.sequence, later)
