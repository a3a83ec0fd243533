"""Compact: join small record files, merge state files, delete orphans and old versions. No record
changes.

The steps for each piece, and what a crash after each of them leaves behind:

1. choose neighbours that are small, and state files that are many; leave out held partitions      nothing
2. write the intent: what is about to be replaced                                                  an intent
3. check each input by its digest, and copy it                                                     orphans
4. commit by compare-and-set, if all inputs are still in use, without a hold or a new epoch        it is done
5. sweep orphans, and files that were replaced longer ago than `keep_versions_days`                goes on next time

Copies are made by workers: in this process a piece is copied when the one before it is committed; on
a cluster many are copied at the same time, and their intents are written before.

It runs beside folds and repairs and stops neither. If another run was faster, the piece is fenced;
it is dropped and reported. A damaged input is reported by name and stays as it is.

The rules by which files are chosen are at the end of the module.

Next: storage/record_files.py copies; operations/sweep.py sweeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.failure import Failure
from seriatim.engine.files import File, Files, StateStore, file_paths, group_by_partition
from seriatim.engine.offsets import Partition
from seriatim.errors import (
    ConfigError,
    DamagedFileError,
    FencedError,
    IntegrityError,
    PlatformError,
    ensure,
)
from seriatim.ledger.commit import commit, read_head_again, require_head
from seriatim.ledger.entries import AcceptEntry, CompactEntry, Entry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Change, Ledger, unmoved_change
from seriatim.ledger.replaced_files import Intent, compacted_file_stem
from seriatim.operations.followers import catch_up_after_run
from seriatim.operations.sweep import find_outdated, sweep_attempts, sweep_dead, sweep_replaced
from seriatim.ports import LedgerStore, OpenStream, ProgressCallback, Rewriter
from seriatim.workers import ChooseWorkers, this_process

GROUPS_MAX = 8
"""The most new files in one entry, and so the most work that a crash can cost in this process. On a
cluster it is that of one Spark job.
"""
ENTRIES_READ_FIRST = 64
"""How many of the newest entries are searched for a file first. Each further step is larger."""
DAY_SECONDS = 86_400
RECORD_FILES_MERGE_MIN = 16
"""A group of so many files is worth copying, whatever their sizes."""


STATE_FILES_MERGE_MIN = 8
"""So many state files are worth merging whatever their sizes."""


class CompactionPiece(Struct, kw_only=True):
    """Files of one partition that one entry replaces. A piece has either record or state files."""

    partition: Partition
    topic_id: str
    account: Account
    groups: Sequence[Files] = ()
    """Groups of record files. Each group becomes one file."""
    state: Files = ()
    """State files that become one file."""
    files_after: int = 0
    bytes_after: int = 0
    sequence: int = -1
    """The entry of the piece; -1 if nothing was committed."""
    drop_reason: str = ""
    """Why the piece was dropped: what another run did to it. Empty if it was not dropped."""
    damaged_inputs: dict[str, str] = field(default_factory=dict)
    """What is wrong with damaged inputs, by path. Their groups stay as they are."""

    @property
    def rows(self) -> int:
        """How many records or sessions have to be copied."""
        return sum(file.rows for file in self.inputs)

    @property
    def inputs(self) -> list[File]:
        """The files that it replaces."""
        if self.groups:
            return self.record_inputs
        return list(self.state)

    @property
    def record_inputs(self) -> list[File]:
        """The record files of all groups."""
        return [file for group in self.groups for file in group]

    @property
    def bytes_before(self) -> int:
        """How many bytes have to be copied."""
        return sum(file.size_bytes for file in self.inputs)


class CompactResult(Struct, kw_only=True):
    """What a compaction did; after a dry run, what it would do."""

    pieces: list[CompactionPiece] = field(default_factory=list)
    held_partitions: list[Partition] = field(default_factory=list)
    """Partitions that were left out, because a repair holds them."""
    sequence: int = -1
    swept_replaced_files: int = 0
    """How many files were deleted, or would be, because an entry replaced them longer ago than
    `keep_versions_days`.
    """
    swept_orphans: int = 0
    """How many files were deleted that no entry ever named."""
    derived_error: str = ""
    """Why the derived tables are behind the ledger, as a text for people; empty if they are not."""


def compact_stream(
    open_stream: OpenStream,
    only_partition: Partition | None = None,
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
    choose_workers: ChooseWorkers = this_process,
) -> CompactResult:
    """Compact a stream, or one partition of it. With `dry_run` nothing is written. `choose_workers`
    chooses where files are copied.
    """
    ledger_store = open_stream.ledger
    name = open_stream.stream.name
    head = require_head(ledger_store, name)
    _refuse_unknown(head.ledger, only_partition)
    # Step 1.
    result = CompactResult(
        pieces=list(_plan_pieces(open_stream, head, only_partition)),
        held_partitions=_held_partitions(head.ledger, only_partition),
        sequence=head.ledger.sequence,
    )
    keep_seconds = open_stream.stream.output.keep_versions_days * DAY_SECONDS
    until_seconds = open_stream.clock.now_seconds() - keep_seconds
    if dry_run:
        outdated = find_outdated(ledger_store, head, until_seconds)
        result.swept_replaced_files = len(outdated.paths)
        return result
    # Steps 2 to 4.
    if result.pieces:
        _compact_pieces(open_stream, result.pieces, progress, choose_workers)
    # Step 5.
    head = read_head_again(ledger_store, name)
    replaced = sweep_replaced(ledger_store, open_stream.records, head, until_seconds)
    orphans = sweep_dead(ledger_store, open_stream.records, head)
    result.swept_replaced_files = len(replaced)
    result.swept_orphans = len(orphans)
    result.derived_error = catch_up_after_run(ledger_store, open_stream.derived, head.ledger)
    result.sequence = head.ledger.sequence
    return result


def _refuse_unknown(ledger: Ledger, only_partition: Partition | None) -> None:
    if only_partition is not None and ledger.account(only_partition) is None:
        raise ConfigError(
            f"{ledger.stream}: partition {only_partition} was never read, so there is nothing to compact",
            next=f"name one as TOPIC/NUMBER; `seriatim status {ledger.stream}` lists them",
        )


def _chosen_accounts(
    ledger: Ledger, only_partition: Partition | None
) -> Iterator[tuple[Partition, Account]]:
    for partition in ledger.known_partitions():
        if only_partition in (None, partition):
            yield partition, ledger.partitions[str(partition)]


def _held_partitions(ledger: Ledger, only_partition: Partition | None) -> list[Partition]:
    return [
        partition
        for partition, account in _chosen_accounts(ledger, only_partition)
        if account.hold is not None
    ]


def _plan_pieces(
    open_stream: OpenStream, head: LedgerHead, only_partition: Partition | None
) -> Iterator[CompactionPiece]:
    """Step 1. All the work there is, partition by partition. Files that no entry names, because
    others wrote them, are left alone.
    """
    active_files = open_stream.ledger.active_files(head)
    files_by_partition, _ = group_by_partition(active_files, head.ledger.partitions)
    free_accounts = {}
    small_paths = set()
    for partition, account in _chosen_accounts(head.ledger, only_partition):
        if account.hold is not None:
            continue
        free_accounts[partition] = account
        files = files_by_partition.get(str(partition), [])
        small_paths |= {
            file.path
            for file in files
            if is_small(file, open_stream.stream.output.file_bytes_target)
        }
    committed_files = _find_committed_files(open_stream.ledger, head.ledger, small_paths)
    for partition, account in free_accounts.items():
        files = files_by_partition.get(str(partition), [])
        small_files = [committed_files[file.path] for file in files if file.path in committed_files]
        large_files = [file for file in files if file.path not in committed_files]
        groups_by_topic_id = group_small_files(
            small_files, large_files, open_stream.stream.output.file_bytes_target
        )
        for topic_id, groups in groups_by_topic_id.items():
            for begin in range(0, len(groups), GROUPS_MAX):
                yield CompactionPiece(
                    partition=partition,
                    topic_id=topic_id,
                    account=account,
                    groups=groups[begin : begin + GROUPS_MAX],
                )
        if is_worth_merging_state(account.state, open_stream.stream.output.file_bytes_target):
            yield CompactionPiece(
                partition=partition, topic_id=account.topic_id, account=account, state=account.state
            )


def _find_committed_files(
    store: LedgerStore, ledger: Ledger, paths: set[str]
) -> dict[str, TopicRecordFile]:
    """The files as the entries have them, with digest and topic id. The newest entries are searched
    first, because files to compact are mostly new.
    """
    committed_files: dict[str, TopicRecordFile] = {}
    newest_sequence = ledger.sequence
    # Each step back is four times as long: few reads for new files, and all entries in the end.
    step = ENTRIES_READ_FIRST
    while newest_sequence >= 0 and len(committed_files) < len(paths):
        after = max(-1, newest_sequence - step)
        manifests = islice(store.entries(ledger.stream, after), newest_sequence - after)
        for manifest in manifests:
            for change in manifest.entry.changes:
                files = [file for file in change.records if file.path in paths]
                if not files:
                    continue
                topic_id = _topic_id_of_records(store, ledger.stream, manifest.entry, change)
                for file in files:
                    committed_files[file.path] = TopicRecordFile(file, topic_id)
        newest_sequence = after
        step *= 4
    return committed_files


def _topic_id_of_records(store: LedgerStore, stream: str, entry: Entry, change: Change) -> str:
    """The topic id of the records of a change. Records of an accept belong to the topic before it,
    whose sessions they end.
    """
    if not isinstance(entry, AcceptEntry):
        return change.topic_id
    ledger_before = store.ledger_at(stream, entry.sequence - 1)
    return ledger_before.partitions[str(change.partition)].topic_id


class CopyWork(Struct, frozen=True, kw_only=True):
    """A piece of work: files of one partition that are copied into one, or for state into as few as
    their size allows.
    """

    partition: Partition
    topic_id: str
    stem: str
    files: Files
    is_state: bool

    def __str__(self) -> str:
        return f"{self.partition} {self.files[0].path}"


class FileCopier(Struct, frozen=True):
    """Copies files. It can be sent to other processes; whoever copies the same files a second time
    writes the same bytes.
    """

    rewriter: Rewriter
    state: StateStore

    def __call__(self, work: CopyWork) -> Files:
        """The new files."""
        if work.is_state:
            # Each session as the newest of the files has it.
            return self.state.save(work.partition, work.stem, {}, work.files)
        new_file = self.rewriter.concatenate(work.partition, work.topic_id, work.stem, work.files)
        return (new_file,)


def _compact_pieces(
    open_stream: OpenStream,
    pieces: Sequence[CompactionPiece],
    progress: ProgressCallback | None,
    choose_workers: ChooseWorkers,
) -> None:
    """Steps 2 to 4 for all pieces, in their order."""
    compactions = [_PieceCompaction(open_stream, piece) for piece in pieces]
    copier = FileCopier(open_stream.rewriter, open_stream.open_state())
    workers = choose_workers(sum(piece.rows for piece in pieces))
    # The intent of a piece is written when its first work is taken.
    works = (work for compaction in compactions for work in compaction.begin())
    answers = workers.map(copier, works)
    copied_bytes = 0
    total_bytes = sum(piece.bytes_before for piece in pieces)
    for compaction in compactions:
        compaction.finish(answers)
        copied_bytes += compaction.piece.bytes_before
        if progress is not None:
            progress(copied_bytes, total_bytes)


class _PieceCompaction:
    """The compaction of one piece."""

    def __init__(self, open_stream: OpenStream, piece: CompactionPiece) -> None:
        self.open_stream = open_stream
        self.piece = piece
        self.attempt = open_stream.new_attempt()
        self.works = self._plan_works()
        self.intent: Intent | None = None
        self.removed_paths: list[str] = []
        """The record files that were copied into new ones."""

    def _plan_works(self) -> list[CopyWork]:
        """What is copied: each group becomes one file, all state files as few as possible."""
        piece = self.piece
        return [
            CopyWork(
                partition=piece.partition,
                topic_id=piece.topic_id,
                stem=compacted_file_stem(self.attempt, number),
                files=tuple(files),
                is_state=not piece.groups,
            )
            for number, files in enumerate(piece.groups or [piece.state])
        ]

    def begin(self) -> Iterator[CopyWork]:
        """Step 2, and the works of step 3."""
        # Before the first file: a sweep beside us must find the intent of every file that it lists.
        self.intent = self._write_intent()
        yield from self.works

    def finish(self, answers: Iterator[Files | Failure]) -> None:
        """Steps 3 and 4. If another run was faster, or if every input is damaged, nothing is
        committed, and what was written is deleted.
        """
        # All answers of this piece are taken, whatever is in them: the next ones are of other pieces.
        own_answers = list(islice(answers, len(self.works)))
        try:
            change = self._build_change(own_answers)
            crash_point("compact-written")
            if change is not None:
                self._commit(change)
                crash_point("compact-committed")
                return
        except (FencedError, IntegrityError, PlatformError, OSError) as error:
            self.piece.drop_reason = self._overtaken_reason(error)
            if not self.piece.drop_reason:
                raise
            self.piece.files_after = 0
            self.piece.bytes_after = 0
        sweep_attempts(self.open_stream.records, self.piece.partition, f"compact-{self.attempt}-")
        if self.intent is not None:
            self.open_stream.records.drop_intent(self.intent)

    def _read_head(self) -> LedgerHead:
        return read_head_again(self.open_stream.ledger, self.open_stream.stream.name)

    def _write_intent(self) -> Intent:
        """Step 2."""
        piece = self.piece
        intent = Intent(
            partition=piece.partition,
            attempt=self.attempt,
            epoch=piece.account.epoch,
            sequence=self._read_head().ledger.sequence,
            records=file_paths(piece.record_inputs),
            state=file_paths(piece.state),
        )
        self.open_stream.records.put_intent(intent)
        crash_point("compact-intended")
        return intent

    def _build_change(self, answers: Sequence[Files | Failure]) -> Change | None:
        """Step 3. Returns None if every input was damaged."""
        piece = self.piece
        new_files = tuple(self._copied_files(answers))
        if not new_files:
            return None
        change = replace(
            unmoved_change(piece.partition, piece.account),
            topic_id=piece.topic_id,
            merged_state_paths=file_paths(piece.state),
        )
        piece.files_after = len(new_files)
        piece.bytes_after = sum(file.size_bytes for file in new_files)
        if piece.groups:
            return replace(change, records=new_files)
        return replace(change, state=new_files)

    def _copied_files(self, answers: Sequence[Files | Failure]) -> Iterator[File]:
        """The new files. A group with a damaged input stays as it is."""
        for work, answer in zip(self.works, answers, strict=True):
            if not isinstance(answer, Failure):
                if not work.is_state:
                    self.removed_paths += file_paths(work.files)
                yield from answer
                continue
            error = answer.to_error()
            if not isinstance(error, IntegrityError):
                raise error
            self._note_damaged_input(error, work.files)
            if not work.is_state:
                sweep_attempts(self.open_stream.records, self.piece.partition, work.stem)

    def _note_damaged_input(self, error: IntegrityError, files: Sequence[File]) -> None:
        """Note a damaged input. The error is raised again if the file is only gone because another
        run replaced it.
        """
        if self._inputs_replaced_reason():
            raise error
        path = error.path if isinstance(error, DamagedFileError) else files[0].path
        self.piece.damaged_inputs[path] = error.message

    def _commit(self, change: Change) -> None:
        """Step 4."""
        entry = CompactEntry(
            attempt=self.attempt,
            product_version=__version__,
            changes=(change,),
            removed_paths=tuple(sorted(self.removed_paths)),
        )
        head = self._read_head()
        _, committed = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)
        self.piece.sequence = committed.sequence

    def _overtaken_reason(self, error: Exception) -> str:
        """What another run did so that the piece cannot be committed; empty if it failed for another
        reason.
        """
        if isinstance(error, FencedError):
            return str(error.fields.get("found") or error.message)
        return self._inputs_replaced_reason()

    def _inputs_replaced_reason(self) -> str:
        """What another run did to the inputs, as a text for people; empty if nothing."""
        piece = self.piece
        head = self._read_head()
        account = head.ledger.partitions[str(piece.partition)]
        if account.hold is not None:
            return f"{piece.partition} is held by {account.hold}"
        if account.epoch != piece.account.epoch:
            return f"{piece.partition} was repaired"
        active_paths = self.open_stream.ledger.active_paths(head)
        replaced = set(file_paths(piece.record_inputs)) - active_paths
        if replaced:
            return f"{min(replaced)} was replaced by another run"
        if not account.has_oldest_state(file_paths(piece.state)):
            return f"{piece.state[0].path} was replaced by another run"
        return ""


# Which small files become one.
#
# Record files of one partition and one life of its topic follow each other by offset. Small
# neighbours become one file near the target size. A larger file between two small ones stays as it
# is and separates them, because files must never overlap. A group is only taken if it is worth
# copying, so that a file is copied a few times in its life, and not by every compaction.


class TopicRecordFile(Struct, frozen=True):
    """A committed record file, and the id of the topic that its records come from."""

    file: File
    topic_id: str


def is_small(file: File, bytes_target: int) -> bool:
    """Whether a record file is at most half as large as the target, and may be joined with others."""
    return 2 * file.size_bytes <= bytes_target


def group_small_files(
    small_files: Iterable[TopicRecordFile], large_files: Iterable[File], bytes_target: int
) -> dict[str, list[Files]]:
    """Groups of neighbouring files of one partition, by topic id and in order. Each group is to
    become one file.
    """
    files_by_topic_id: dict[str, list[File]] = {}
    for topic_file in small_files:
        files_by_topic_id.setdefault(topic_file.topic_id, []).append(topic_file.file)
    large_file_starts = sorted(file.first_offset for file in large_files)
    chosen_groups = {}
    for topic_id, files in files_by_topic_id.items():
        groups = _neighbour_groups(files, large_file_starts, bytes_target)
        chosen = [group for group in groups if is_worth_compacting(group, bytes_target)]
        if chosen:
            chosen_groups[topic_id] = chosen
    return chosen_groups


def _neighbour_groups(
    files: list[File], large_file_starts: Sequence[int], bytes_target: int
) -> list[Files]:
    """All files, in groups of neighbours that together are not larger than the target."""
    groups: list[list[File]] = []
    group_bytes = 0
    previous: File | None = None
    for file in sorted(files, key=lambda file: file.first_offset):
        begins_group = True
        if previous is not None:
            ensure(
                previous.last_offset < file.first_offset,
                "record files of one life do not overlap",
                one=previous.path,
                other=file.path,
            )
            is_too_large = group_bytes + file.size_bytes > bytes_target
            is_separated = _has_large_file_between(previous, file, large_file_starts)
            begins_group = is_too_large or is_separated
        if begins_group:
            groups.append([])
            group_bytes = 0
        groups[-1].append(file)
        group_bytes += file.size_bytes
        previous = file
    return [tuple(group) for group in groups]


def _has_large_file_between(earlier: File, later: File, large_file_starts: Sequence[int]) -> bool:
    """Whether a larger file lies between two small ones."""
    index = bisect_right(large_file_starts, earlier.last_offset)
    return index < len(large_file_starts) and large_file_starts[index] < later.first_offset


def is_worth_compacting(group: Sequence[File], bytes_target: int) -> bool:
    """Whether a group is worth copying: it has many files, or no file that is more than twice as
    large as the others together, or nearly fills a file of the target size.
    """
    if len(group) < 2:
        return False
    if len(group) >= RECORD_FILES_MERGE_MIN:
        return True
    total_bytes = sum(file.size_bytes for file in group)
    largest_bytes = max(file.size_bytes for file in group)
    return 3 * largest_bytes <= 2 * total_bytes or 4 * total_bytes >= 3 * bytes_target


def is_worth_merging_state(state_files: Sequence[File], bytes_target: int) -> bool:
    """Whether state files should become one, or as few as their size allows: there are many of them, or
    the later ones have at least half as many rows as the first.
    """
    total_bytes = sum(file.size_bytes for file in state_files)
    fewest_files = max(1, -(-total_bytes // bytes_target))
    if len(state_files) <= fewest_files:
        return False
    if len(state_files) >= STATE_FILES_MERGE_MIN:
        return True
    later_rows = sum(file.rows for file in state_files[1:])
    return 2 * later_rows >= state_files[0].rows
