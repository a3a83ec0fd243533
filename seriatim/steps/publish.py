"""Publish: the table `current`, brought to an entry of the ledger. One commit, which names that entry.

1. read the ledger, and how far the table is; a table that this ledger does not know begins anew        nothing
2. say what is to be read: per partition the records past what is in, or all where they were made again  nothing
3. read them, and write the rows of the touched partitions anew                                          files unnamed
4. commit, compare-and-set: removes the old files, adds the new ones                                     done
5. delete files that left the table long ago                                                             later

Next room: core/current.py says what is read; adapters/current.py has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.crash import crash_point
from seriatim.core.current import Catch, Lives, Standing, Written, catches, needs_walk, walked
from seriatim.core.errors import ConfigError, PlatformError
from seriatim.core.ledger import Ledger, Manifest
from seriatim.ports import Conflict, CurrentStore, LedgerStore
from seriatim.steps.commit import TRIES_MAX, read_head


class Progress(Protocol):
    """Told how many records were read, of how many."""

    def __call__(self, done: int, total: int) -> None: ...


def _silent(done: int, total: int) -> None:
    """Nobody watches."""


class Published(Struct, kw_only=True):
    """What publishing did, or would do."""

    sequence: int
    """As of which entry the table is (a dry run: would be)."""
    before: int = -1
    """As of which it was; -1: there was none, or it was made as a whole."""
    changed: bool = False
    """Whether there was anything to do."""
    catches: list[Catch] = field(default_factory=list)
    written: Written = Written()

    def reads(self) -> int:
        """How many records are read."""
        return sum(catch.reads() for catch in self.catches)


def publish(
    stream: str,
    store: LedgerStore,
    current: CurrentStore,
    *,
    sequence: int | None = None,
    rebuild: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Published:
    """Bring `current` to an entry (the last one, if none is named), or make it again as of there.

    It never goes back by itself: an entry before the one that is published changes nothing.
    """
    target = _target(stream, store, sequence)
    for _ in range(TRIES_MAX):
        at = _trusted(store, current.reached(), target)
        if rebuild:
            at = Standing(token=at.token)
        elif at.sequence >= target.sequence:
            return Published(sequence=at.sequence, before=at.sequence)
        found, lives = _to_read(store, at, target)
        done = Published(sequence=target.sequence, before=at.sequence, changed=True, catches=found)
        if dry_run:
            return done
        try:
            done.written = current.put(at, target, lives, found, partial(progress or _silent, total=done.reads()))
        except Conflict as conflict:  # another one publishes, or the disk is full
            trouble = conflict
            continue
        crash_point("current-published")
        return done
    raise PlatformError(
        f"{stream}: the table current could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room, then publish again",
    )


def counted_from(stream: str, store: LedgerStore, since: int, done: Published) -> Published:
    """What was done, as it looks to somebody who last saw an earlier entry: the one who told of a later one died."""
    if since > done.sequence:
        raise ConfigError(
            f"{stream}: there is no entry {since} up to which anything is published",
            next=f"current is as of entry {done.sequence}: who saw a later one saw another ledger, and reads all anew",
        )
    found, _ = _to_read(store, Standing(sequence=since), _target(stream, store, done.sequence))
    return Published(
        sequence=done.sequence, before=since, changed=since < done.sequence, catches=found, written=done.written
    )


def _target(stream: str, store: LedgerStore, sequence: int | None) -> Ledger:
    """The ledger as of the entry that is asked for."""
    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run", next=f"seriatim run {stream}")
    last = head.ledger.sequence
    if sequence is None or sequence == last:
        return head.ledger
    if not 0 <= sequence < last:
        raise ConfigError(f"{stream}: there is no entry {sequence}", next=f"give one from 0 to {last}")
    return store.at(stream, sequence)


def _trusted(store: LedgerStore, at: Standing, target: Ledger) -> Standing:
    """How far the table is, by this ledger: one that has seen entries that are not in it begins anew."""
    known = at.sequence >= 0 and (at.sha256 == target.sha256 or store.has(at.sha256, at.sequence - 1))
    return at if known else replace(at, sequence=-1, lives={})


def _to_read(store: LedgerStore, at: Standing, target: Ledger) -> tuple[list[Catch], Lives]:
    """What is to be read from there to the target, and the lives of topics that had several."""
    before = store.at(target.stream, at.sequence) if at.sequence >= 0 else None
    replaced, lives = set[str](), dict(at.lives)
    if needs_walk(before, target):
        replaced, lives = walked(before, _between(store, at, target), lives)
    files = store.files_at(target.stream, target.sequence)
    return catches(before, target, replaced, lives, files), lives


def _between(store: LedgerStore, at: Standing, target: Ledger) -> Iterator[Manifest]:
    """Entries past the one that is published, up to the target; one at a time: each carries a whole ledger."""
    later = store.entries(target.stream, at.sequence)
    return takewhile(lambda manifest: manifest.ledger.sequence <= target.sequence, later)
