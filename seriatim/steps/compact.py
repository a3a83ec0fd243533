"""Compact: small record files become few, state files one, what is dead or replaced long ago goes. No record changes.

Per partition and piece of work, and what a crash after each leaves:

1. choose: neighbours that are small, state files that are many; held partitions are left out      nothing
2. write the intent: what is about to be replaced                                                  an intent
3. prove each input by its digest, copy                                                            orphans
4. commit, compare-and-set: the very inputs are there still, no hold, no new epoch                 it is done
5. sweep the dead; sweep what was replaced longer ago than `keep_versions_days`                    goes on next time

It runs beside folds and repairs and stops neither: whoever was faster fences a piece, which is dropped and told.
A damaged input is refused by name and stays as it is.

Next room: core/compact.py chooses; adapters/rewrite.py copies; steps/sweep.py sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from msgspec import Struct, field

from seriatim import __version__
from seriatim.core.compact import Intent, Placed, groups, is_small, is_worth_merging, stem_of
from seriatim.core.crash import crash_point
from seriatim.core.errors import ConfigError, DamagedFileError, FencedError, IntegrityError, PlatformError, broken
from seriatim.core.ledger import Account, Change, Entry, File, Ledger
from seriatim.core.offsets import Partition
from seriatim.ports import Clock, DerivedStore, Head, LedgerStore, RecordStore, Rewriter, StateStore
from seriatim.steps.commit import commit, read_head
from seriatim.steps.derive import keep_up
from seriatim.steps.sweep import find_outdated, sweep_dead, sweep_replaced

GROUPS_MAX = 8
"""New files in one entry: what a crash can cost."""
ENTRIES_FIRST = 64
"""So many entries are asked first for what they say of a file; then more."""
DAY_SECONDS = 86_400
Progress = Callable[[int, int], None]


class Means(Struct, frozen=True, kw_only=True):
    """What a compaction works with."""

    stream: str
    bytes_target: int
    keep_days: int
    ledger: LedgerStore
    records: RecordStore
    rewriter: Rewriter
    state: Callable[[], StateStore]
    """Made anew for each look: it keeps files open."""
    derived: DerivedStore
    clock: Clock
    new_attempt: Callable[[], str]


class Piece(Struct, kw_only=True):
    """What becomes of some files of one partition, by one entry."""

    partition: Partition
    topic_id: str
    account: Account
    groups: Sequence[tuple[File, ...]] = ()
    """Record files: each group becomes one."""
    state: tuple[File, ...] = ()
    """State files: they become one. A piece has either."""
    into: int = 0
    bytes_after: int = 0
    sequence: int = -1
    """The entry that did it; -1: none was made."""
    dropped: str = ""
    """Who was faster."""
    refused: dict[str, str] = field(default_factory=dict)
    """Damaged inputs, and what is wrong with them: their groups stay as they are."""

    @property
    def inputs(self) -> list[File]:
        """What it replaces."""
        return [file for group in self.groups for file in group] or list(self.state)

    @property
    def bytes(self) -> int:
        """How much is to be copied."""
        return sum(file.bytes for file in self.inputs)


class Compacted(Struct, kw_only=True):
    """What a compaction did, or would do."""

    pieces: list[Piece] = field(default_factory=list)
    held: list[Partition] = field(default_factory=list)
    """Left out: a repair works there."""
    sequence: int = -1
    replaced: int = 0
    """Files that entries replaced longer ago than `keep_versions_days`: they went, or would go."""
    orphans: int = 0
    """Files that nobody ever named: they went."""
    behind: str = ""
    """Why the derived tables are behind the ledger; empty: they are not."""


def compact(
    means: Means, only: Partition | None = None, *, dry_run: bool = False, progress: Progress | None = None
) -> Compacted:
    """Compact a stream, or one partition of it."""
    head = read_head(means.ledger, means.stream)
    if head is None:
        raise ConfigError(f"{means.stream}: it was never run", next=f"seriatim run {means.stream}")
    _refuse_unknown(head.ledger, only)
    held = [place for place in _chosen(head.ledger, only) if head.ledger.partitions[str(place)].hold is not None]
    done = Compacted(pieces=list(_pieces(means, head, only)), held=held, sequence=head.ledger.sequence)
    until = means.clock.now_seconds() - means.keep_days * DAY_SECONDS
    if dry_run:
        done.replaced = len(find_outdated(means.ledger, means.records, head, until).paths)
        return done
    copied, total = 0, sum(piece.bytes for piece in done.pieces)
    for piece in done.pieces:
        _Compacting(means, piece).run()
        copied += piece.bytes
        if progress is not None:
            progress(copied, total)
    head = read_head(means.ledger, means.stream) or broken("the ledger vanished while it was compacted")
    done.replaced = len(sweep_replaced(means.ledger, means.records, head, until))
    done.orphans = len(sweep_dead(means.ledger, means.records, head))
    done.behind = keep_up(means.ledger, means.derived, head.ledger)
    done.sequence = head.ledger.sequence
    return done


def _chosen(ledger: Ledger, only: Partition | None) -> list[Partition]:
    return [place for place in ledger.known() if only in (None, place)]


def _refuse_unknown(ledger: Ledger, only: Partition | None) -> None:
    if only is not None and ledger.account(only) is None:
        raise ConfigError(
            f"{ledger.stream}: partition {only} was never read, so there is nothing to compact",
            next=f"name one as TOPIC/NUMBER; `seriatim status {ledger.stream}` lists them",
        )


def _pieces(means: Means, head: Head, only: Partition | None) -> Iterator[Piece]:
    """Step 1: all there is to do, partition by partition. Files that others wrote are none of ours."""
    active: dict[str, list[File]] = {}
    for file in means.ledger.active_files(head):
        active.setdefault(file.path.removeprefix("records/").rpartition("/")[0], []).append(file)
    free = {p: head.ledger.partitions[str(p)] for p in _chosen(head.ledger, only)}
    free = {partition: account for partition, account in free.items() if account.hold is None}
    small = [file.path for p in free for file in active.get(str(p), []) if is_small(file, means.bytes_target)]
    placed = _placed(means.ledger, head.ledger, set(small))
    for partition, account in free.items():
        mine = active.get(str(partition), [])
        ours = [placed[file.path] for file in mine if file.path in placed]
        large = [file for file in mine if file.path not in placed]
        for topic_id, chosen in groups(ours, large, means.bytes_target).items():
            for begin in range(0, len(chosen), GROUPS_MAX):
                part = chosen[begin : begin + GROUPS_MAX]
                yield Piece(partition=partition, topic_id=topic_id, account=account, groups=part)
        if is_worth_merging(account.state):
            yield Piece(partition=partition, topic_id=account.topic_id, account=account, state=account.state)


def _placed(store: LedgerStore, ledger: Ledger, wanted: set[str]) -> dict[str, Placed]:
    """What entries say of these files, digest and life; the newest entries are asked first."""
    found: dict[str, Placed] = {}
    last, step = ledger.sequence, ENTRIES_FIRST
    while last >= 0 and len(found) < len(wanted):
        after = max(-1, last - step)
        for manifest in islice(store.entries(ledger.stream, after), last - after):
            for change in manifest.entry.changes:
                mine = [file for file in change.records if file.path in wanted]
                if mine:
                    life = _life(store, ledger.stream, manifest.entry, change)
                    found |= {file.path: Placed(file, life) for file in mine}
        last, step = after, step * 4
    return found


def _life(store: LedgerStore, stream: str, entry: Entry, change: Change) -> str:
    """The topic id of an entry's records: those of an accept end the life before."""
    if entry.kind != "accept":
        return change.topic_id
    return store.at(stream, entry.sequence - 1).partitions[str(change.partition)].topic_id


class _Compacting:
    """One piece being worked on."""

    def __init__(self, means: Means, piece: Piece) -> None:
        self.means, self.piece, self.attempt = means, piece, means.new_attempt()
        self.removed: list[str] = []

    def run(self) -> None:
        """Steps 2 to 4."""
        intent = self._intend()
        try:
            change = self._change()
            crash_point("compact-written")
            if change is not None:
                self._commit(change)
                crash_point("compact-committed")
                return
        except (FencedError, IntegrityError, PlatformError, OSError) as error:
            self.piece.dropped = self._overtaken(error)
            if not self.piece.dropped:
                raise
            self.piece.into = self.piece.bytes_after = 0
        self.means.records.sweep(self.piece.partition, f"compact-{self.attempt}-", set())
        self.means.records.drop_intent(intent)

    def _intend(self) -> Intent:
        """Step 2."""
        piece = self.piece
        intent = Intent(
            partition=piece.partition,
            attempt=self.attempt,
            epoch=piece.account.epoch,
            sequence=self._head().ledger.sequence,
            records=tuple(file.path for group in piece.groups for file in group),
            state=tuple(file.path for file in piece.state),
        )
        self.means.records.put_intent(intent)
        crash_point("compact-intended")
        return intent

    def _change(self) -> Change | None:
        """Step 3. None: every input was refused."""
        piece, account = self.piece, self.piece.account
        change = Change(
            partition=piece.partition,
            epoch=account.epoch,
            frontier=account.frontier,
            until=account.frontier,
            topic_id=piece.topic_id,
            born=account.born,
            records=tuple(self._copied()),
            state=self._merged(),
            merged=tuple(file.path for file in piece.state),
        )
        made = [*change.records, *(change.state or ())]
        piece.into, piece.bytes_after = len(made), sum(file.bytes for file in made)
        return change if made else None

    def _copied(self) -> Iterator[File]:
        """Each group as one file. One with a damaged input stays as it is, and so do its neighbours in it."""
        for number, group in enumerate(self.piece.groups):
            stem = stem_of(self.attempt, number)
            try:
                made = self.means.rewriter.concatenate(self.piece.partition, self.piece.topic_id, stem, group)
            except IntegrityError as damage:
                self._refuse(damage, [file.path for file in group])
                self.means.records.sweep(self.piece.partition, stem, set())
            else:
                self.removed += [file.path for file in group]
                yield made

    def _merged(self) -> tuple[File, ...] | None:
        """All state files as one, each session as the newest of them has it."""
        if not self.piece.state:
            return None
        try:
            store, stem = self.means.state(), stem_of(self.attempt, 0)
            return (store.save(self.piece.partition, stem, {}, self.piece.state),)
        except IntegrityError as damage:
            self._refuse(damage, [file.path for file in self.piece.state])
            return None

    def _refuse(self, damage: IntegrityError, paths: list[str]) -> None:
        """Note a damaged input, unless it is gone because another run replaced it."""
        if self._gone(self._head()):
            raise damage
        path = damage.path if isinstance(damage, DamagedFileError) else paths[0]
        self.piece.refused[path] = damage.message

    def _commit(self, change: Change) -> None:
        """Step 4."""
        entry = Entry(
            kind="compact",
            attempt=self.attempt,
            product=__version__,
            changes=(change,),
            removed=tuple(sorted(self.removed)),
        )
        self.piece.sequence = commit(self.means.ledger, self.means.clock, self._head(), entry)[1].sequence

    def _head(self) -> Head:
        return read_head(self.means.ledger, self.means.stream) or broken("the ledger vanished while it was compacted")

    def _overtaken(self, error: Exception) -> str:
        """Why the piece cannot be committed any more; empty: that is not why it failed."""
        if isinstance(error, FencedError):
            return str(error.fields.get("found") or error.message)
        return self._gone(self._head())

    def _gone(self, head: Head) -> str:
        """What another run did to the inputs; empty: nothing."""
        piece, account = self.piece, head.ledger.partitions[str(self.piece.partition)]
        if account.epoch != piece.account.epoch or account.hold is not None:
            return f"{piece.partition} is held by {account.hold}" if account.hold else f"{piece.partition} was repaired"
        active, state = self.means.ledger.active_paths(head), [file.path for file in account.state]
        gone = {file.path for group in piece.groups for file in group} - active
        merged = [file.path for file in piece.state]
        if gone or merged != state[: len(merged)]:
            return f"{min(gone, default=merged[0] if merged else '')} was replaced by another run"
        return ""
