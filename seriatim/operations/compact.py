"""Compact: small record files become few, state files one, what is dead or replaced long ago goes.
No record changes.

Per partition and piece of work, and what a crash after each leaves:

1. choose: neighbours that are small, state files that are many; held partitions are left out      nothing
2. write the intent: what is about to be replaced                                                  an intent
3. prove each input by its digest, copy                                                            orphans
4. commit, compare-and-set: the very inputs are there still, no hold, no new epoch                 it is done
5. sweep the dead; sweep what was replaced longer ago than `keep_versions_days`                    goes on next time

It runs beside folds and repairs and stops neither: whoever was faster fences a piece, which is
dropped and told. A damaged input is refused by name and stays as it is.

Next room: operations/compaction_rules.py chooses; storage/rewrite.py copies; operations/sweep.py
sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from msgspec import Struct, field

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.errors import (
    ConfigError,
    DamagedFileError,
    FencedError,
    IntegrityError,
    PlatformError,
    raise_broken_promise,
)
from seriatim.ledger.commit import commit, read_head
from seriatim.ledger.model import Account, Change, Entry, File, Ledger
from seriatim.operations.compaction_rules import (
    Intent,
    TopicRecordFile,
    compacted_file_stem,
    group_small_files,
    is_small,
    is_worth_merging_state,
)
from seriatim.operations.derived_tables import catch_up_after_run
from seriatim.operations.sweep import find_outdated, sweep_dead, sweep_replaced
from seriatim.ports import (
    Clock,
    DerivedStore,
    LedgerHead,
    LedgerStore,
    RecordStore,
    Rewriter,
    StateStore,
)

GROUPS_MAX = 8
"""New files in one entry: what a crash can cost."""
ENTRIES_READ_FIRST = 64
"""So many entries are asked first for what they say of a file; then more."""
DAY_SECONDS = 86_400
ProgressCallback = Callable[[int, int], None]


class CompactContext(Struct, frozen=True, kw_only=True):
    """What a compaction works with."""

    stream: str
    bytes_target: int
    keep_versions_days: int
    ledger: LedgerStore
    records: RecordStore
    rewriter: Rewriter
    open_state: Callable[[], StateStore]
    """Made anew for each look: it keeps files open."""
    derived: DerivedStore
    clock: Clock
    new_attempt: Callable[[], str]


class CompactionPiece(Struct, kw_only=True):
    """What becomes of some files of one partition, by one entry."""

    partition: Partition
    topic_id: str
    account: Account
    groups: Sequence[tuple[File, ...]] = ()
    """Record files: each group becomes one."""
    state: tuple[File, ...] = ()
    """State files: they become one. A piece has either."""
    files_after: int = 0
    bytes_after: int = 0
    sequence: int = -1
    """The entry that did it; -1: none was made."""
    drop_reason: str = ""
    """Who was faster."""
    damaged_inputs: dict[str, str] = field(default_factory=dict)
    """Damaged inputs, and what is wrong with them: their groups stay as they are."""

    @property
    def inputs(self) -> list[File]:
        """What it replaces."""
        return [file for group in self.groups for file in group] or list(self.state)

    @property
    def bytes_before(self) -> int:
        """How much is to be copied."""
        return sum(file.size_bytes for file in self.inputs)


class CompactResult(Struct, kw_only=True):
    """What a compaction did, or would do."""

    pieces: list[CompactionPiece] = field(default_factory=list)
    held_partitions: list[Partition] = field(default_factory=list)
    """Left out: a repair works there."""
    sequence: int = -1
    swept_replaced_files: int = 0
    """Files that entries replaced longer ago than `keep_versions_days`: they went, or would go."""
    swept_orphans: int = 0
    """Files that nobody ever named: they went."""
    derived_error: str = ""
    """Why the derived tables are behind the ledger; empty: they are not."""


def compact_stream(
    context: CompactContext,
    only_partition: Partition | None = None,
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> CompactResult:
    """Compact a stream, or one partition of it."""
    head = read_head(context.ledger, context.stream)
    if head is None:
        raise ConfigError(
            f"{context.stream}: it was never run", next=f"seriatim run {context.stream}"
        )
    _refuse_unknown(head.ledger, only_partition)
    held = [
        place
        for place in _chosen_partitions(head.ledger, only_partition)
        if head.ledger.partitions[str(place)].hold is not None
    ]
    done = CompactResult(
        pieces=list(_plan_pieces(context, head, only_partition)),
        held_partitions=held,
        sequence=head.ledger.sequence,
    )
    until = context.clock.now_seconds() - context.keep_versions_days * DAY_SECONDS
    if dry_run:
        done.swept_replaced_files = len(
            find_outdated(context.ledger, context.records, head, until).paths
        )
        return done
    copied, total = 0, sum(piece.bytes_before for piece in done.pieces)
    for piece in done.pieces:
        _PieceCompaction(context, piece).run()
        copied += piece.bytes_before
        if progress is not None:
            progress(copied, total)
    head = read_head(context.ledger, context.stream) or raise_broken_promise(
        "the ledger vanished while it was compacted"
    )
    done.swept_replaced_files = len(sweep_replaced(context.ledger, context.records, head, until))
    done.swept_orphans = len(sweep_dead(context.ledger, context.records, head))
    done.derived_error = catch_up_after_run(context.ledger, context.derived, head.ledger)
    done.sequence = head.ledger.sequence
    return done


def _chosen_partitions(ledger: Ledger, only_partition: Partition | None) -> list[Partition]:
    return [place for place in ledger.known_partitions() if only_partition in (None, place)]


def _refuse_unknown(ledger: Ledger, only_partition: Partition | None) -> None:
    if only_partition is not None and ledger.account(only_partition) is None:
        raise ConfigError(
            f"{ledger.stream}: partition {only_partition} was never read, so there is nothing to compact",
            next=f"name one as TOPIC/NUMBER; `seriatim status {ledger.stream}` lists them",
        )


def _plan_pieces(
    context: CompactContext, head: LedgerHead, only_partition: Partition | None
) -> Iterator[CompactionPiece]:
    """Step 1: all there is to do, partition by partition. Files that others wrote are none of ours."""
    active: dict[str, list[File]] = {}
    for file in context.ledger.active_files(head):
        active.setdefault(file.path.removeprefix("records/").rpartition("/")[0], []).append(file)
    free = {
        p: head.ledger.partitions[str(p)] for p in _chosen_partitions(head.ledger, only_partition)
    }
    free = {partition: account for partition, account in free.items() if account.hold is None}
    small = [
        file.path
        for p in free
        for file in active.get(str(p), [])
        if is_small(file, context.bytes_target)
    ]
    placed = _find_committed_files(context.ledger, head.ledger, set(small))
    for partition, account in free.items():
        mine = active.get(str(partition), [])
        ours = [placed[file.path] for file in mine if file.path in placed]
        large = [file for file in mine if file.path not in placed]
        for topic_id, chosen in group_small_files(ours, large, context.bytes_target).items():
            for begin in range(0, len(chosen), GROUPS_MAX):
                part = chosen[begin : begin + GROUPS_MAX]
                yield CompactionPiece(
                    partition=partition, topic_id=topic_id, account=account, groups=part
                )
        if is_worth_merging_state(account.state):
            yield CompactionPiece(
                partition=partition, topic_id=account.topic_id, account=account, state=account.state
            )


def _find_committed_files(
    store: LedgerStore, ledger: Ledger, paths: set[str]
) -> dict[str, TopicRecordFile]:
    """What entries say of these files, digest and life; the newest entries are asked first."""
    found: dict[str, TopicRecordFile] = {}
    last, step = ledger.sequence, ENTRIES_READ_FIRST
    while last >= 0 and len(found) < len(paths):
        after = max(-1, last - step)
        for manifest in islice(store.entries(ledger.stream, after), last - after):
            for change in manifest.entry.changes:
                mine = [file for file in change.records if file.path in paths]
                if mine:
                    life = _topic_id_of_records(store, ledger.stream, manifest.entry, change)
                    found |= {file.path: TopicRecordFile(file, life) for file in mine}
        last, step = after, step * 4
    return found


def _topic_id_of_records(store: LedgerStore, stream: str, entry: Entry, change: Change) -> str:
    """The topic id of an entry's records: those of an accept end the life before."""
    if entry.kind != "accept":
        return change.topic_id
    return store.ledger_at(stream, entry.sequence - 1).partitions[str(change.partition)].topic_id


class _PieceCompaction:
    """One piece being worked on."""

    def __init__(self, context: CompactContext, piece: CompactionPiece) -> None:
        self.context, self.piece, self.attempt = context, piece, context.new_attempt()
        self.removed_paths: list[str] = []

    def run(self) -> None:
        """Steps 2 to 4."""
        intent = self._write_intent()
        try:
            change = self._build_change()
            crash_point("compact-written")
            if change is not None:
                self._commit(change)
                crash_point("compact-committed")
                return
        except (FencedError, IntegrityError, PlatformError, OSError) as error:
            self.piece.drop_reason = self._overtaken_reason(error)
            if not self.piece.drop_reason:
                raise
            self.piece.files_after = self.piece.bytes_after = 0
        self.context.records.sweep(self.piece.partition, f"compact-{self.attempt}-", set())
        self.context.records.drop_intent(intent)

    def _write_intent(self) -> Intent:
        """Step 2."""
        piece = self.piece
        intent = Intent(
            partition=piece.partition,
            attempt=self.attempt,
            epoch=piece.account.epoch,
            sequence=self._read_head().ledger.sequence,
            records=tuple(file.path for group in piece.groups for file in group),
            state=tuple(file.path for file in piece.state),
        )
        self.context.records.put_intent(intent)
        crash_point("compact-intended")
        return intent

    def _build_change(self) -> Change | None:
        """Step 3. None: every input was refused."""
        piece, account = self.piece, self.piece.account
        change = Change(
            partition=piece.partition,
            epoch=account.epoch,
            frontier=account.frontier,
            until=account.frontier,
            topic_id=piece.topic_id,
            initial_frontier=account.initial_frontier,
            records=tuple(self._concatenate_groups()),
            state=self._merge_state_files(),
            merged_state_paths=tuple(file.path for file in piece.state),
        )
        made = [*change.records, *(change.state or ())]
        piece.files_after, piece.bytes_after = len(made), sum(file.size_bytes for file in made)
        return change if made else None

    def _concatenate_groups(self) -> Iterator[File]:
        """Each group as one file. One with a damaged input stays as it is, and so do its neighbours
        in it.
        """
        for number, group in enumerate(self.piece.groups):
            stem = compacted_file_stem(self.attempt, number)
            try:
                made = self.context.rewriter.concatenate(
                    self.piece.partition, self.piece.topic_id, stem, group
                )
            except IntegrityError as damage:
                self._note_damaged_input(damage, [file.path for file in group])
                self.context.records.sweep(self.piece.partition, stem, set())
            else:
                self.removed_paths += [file.path for file in group]
                yield made

    def _merge_state_files(self) -> tuple[File, ...] | None:
        """All state files as one, each session as the newest of them has it."""
        if not self.piece.state:
            return None
        try:
            store, stem = self.context.open_state(), compacted_file_stem(self.attempt, 0)
            return (store.save(self.piece.partition, stem, {}, self.piece.state),)
        except IntegrityError as damage:
            self._note_damaged_input(damage, [file.path for file in self.piece.state])
            return None

    def _note_damaged_input(self, error: IntegrityError, paths: list[str]) -> None:
        """Note a damaged input, unless it is gone because another run replaced it."""
        if self._inputs_replaced_reason(self._read_head()):
            raise error
        path = error.path if isinstance(error, DamagedFileError) else paths[0]
        self.piece.damaged_inputs[path] = error.message

    def _commit(self, change: Change) -> None:
        """Step 4."""
        entry = Entry(
            kind="compact",
            attempt=self.attempt,
            product_version=__version__,
            changes=(change,),
            removed_paths=tuple(sorted(self.removed_paths)),
        )
        self.piece.sequence = commit(
            self.context.ledger, self.context.clock, self._read_head(), entry
        )[1].sequence

    def _read_head(self) -> LedgerHead:
        return read_head(self.context.ledger, self.context.stream) or raise_broken_promise(
            "the ledger vanished while it was compacted"
        )

    def _overtaken_reason(self, error: Exception) -> str:
        """Why the piece cannot be committed any more; empty: that is not why it failed."""
        if isinstance(error, FencedError):
            return str(error.fields.get("found") or error.message)
        return self._inputs_replaced_reason(self._read_head())

    def _inputs_replaced_reason(self, head: LedgerHead) -> str:
        """What another run did to the inputs; empty: nothing."""
        piece, account = self.piece, head.ledger.partitions[str(self.piece.partition)]
        if account.epoch != piece.account.epoch or account.hold is not None:
            return (
                f"{piece.partition} is held by {account.hold}"
                if account.hold
                else f"{piece.partition} was repaired"
            )
        active, state = (
            self.context.ledger.active_paths(head),
            [file.path for file in account.state],
        )
        gone = {file.path for group in piece.groups for file in group} - active
        merged = [file.path for file in piece.state]
        if gone or merged != state[: len(merged)]:
            return f"{min(gone, default=merged[0] if merged else '')} was replaced by another run"
        return ""
