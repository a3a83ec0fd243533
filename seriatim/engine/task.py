"""The task: folds one partition's range on a worker. Step 4 of a slice.

A task proves that no offset is missing without a reason, folds the messages, writes record, state
and quarantine files, and returns a small result. The names of the files contain partition, epoch,
start and attempt. Nothing that a task writes counts until a commit names it. Failures are returned
as values, because a stack trace from another process helps nobody.

Next: engine/fold.py folds; operations/run.py plans the work and commits the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct, field

from seriatim.engine.crash_points import crash_point
from seriatim.engine.failure import Failure, as_worker_error
from seriatim.engine.files import (
    Certificate,
    Digests,
    Explain,
    Files,
    FilesByTable,
    RecordWriter,
    SourceFailedError,
    StateStore,
    TaskRecords,
    UnfitRecordsError,
    finish_files,
    save_state,
)
from seriatim.engine.findings import Finding, GapMark, OnPoison, Tier
from seriatim.engine.fold import NO_LIMITS, Fold, Limits
from seriatim.engine.holes import HolePassage
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import MAIN_TABLE, rows_by_table, select_end_records, select_records
from seriatim.engine.session import (
    Counts,
    FoldOutput,
    RefoldScope,
    SessionEndRecords,
    SessionsByName,
)
from seriatim.engine.undo import EACH_MESSAGE
from seriatim.errors import ensure


class PartitionWork(Struct, frozen=True, kw_only=True):
    """What one task has to do: the range [start, end) of a partition."""

    partition: Partition
    start: int
    end: int
    epoch: int
    topic_id: str
    state: Files = ()
    attempt: str
    undoable: dict[str, int] = field(default_factory=dict)
    """Sessions in which the machine raised in an earlier try, and the offset from which on their
    messages must be undoable.
    """
    moved_sessions: dict[str, str] = field(default_factory=dict)
    """Sessions that belong to another partition of the topic, and the name of that partition."""
    message_time_ms: int = -1
    """The largest timestamp of a message of the partition so far; sessions expire by it. -1: none."""
    headless_since: int = -1
    """Messages before this offset were lost and passed over. -1: none were."""
    scope: RefoldScope | None = None
    """Of a refold: which sessions are folded again."""
    file_name_offset: int = -1
    """Of a refold: the offset in the names of its files, which is the partition's frontier."""
    share: float = 0.0
    """The partition's share of all messages of the slice, if its sessions may be spread over helper
    processes. In a second try they never are.
    """

    def __post_init__(self) -> None:
        ensure(
            self.headless_since <= self.start,
            "what was lost is before what is read",
            partition=str(self.partition),
        )


class TaskResult(Struct, kw_only=True):
    """What one task did, up to the offset where it stopped."""

    certificate: Certificate | None = None
    records: Files = ()
    other_record_files: FilesByTable = field(default_factory=dict)
    """Record files of the machine's other tables, by table."""
    quarantine_files: Files = ()
    state: Files | None = None
    halt: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    needs_headers_and_one_process: bool = False
    """Whether the task must be folded again, with headers and in one process: messages were
    quarantined without their headers, or helper processes met something unusual.
    """
    sessions_without_state: dict[str, int] = field(default_factory=dict)
    """Sessions that came without a snapshot and have no state here, and their first offset."""
    marks: tuple[GapMark, ...] = ()
    met_sessions: tuple[str, ...] = ()
    """Of a refold: sessions of its scope that had a message."""
    half_changed_sessions: dict[str, int] = field(default_factory=dict)
    """Sessions that may be half changed, and from which offset on. If there are any, nothing of this
    result counts, and the task must be folded again with these sessions undoable.
    """
    peak_memory_bytes: int = 0
    partition: Partition | None = None
    failure: Failure | None = None
    """Why the task failed."""


class TaskContext(Struct, frozen=True, kw_only=True):
    """What all tasks of a slice work with."""

    runner: Runner
    make_fold: Callable[..., Fold] = Fold
    tier: Tier
    on_poison: OnPoison
    limits: Limits = NO_LIMITS
    has_session_field: bool
    records: TaskRecords
    state: StateStore
    explain: Explain
    digests: Callable[[], Digests]
    peak_memory_bytes: Callable[[], int]


def stem_prefix(epoch: int, start: int) -> str:
    """How the names of all files of one partition, epoch and start offset begin."""
    return f"{epoch}-{start}-"


def find_work(
    works: Mapping[Partition, PartitionWork], partition: Partition, offset_range: OffsetRange
) -> PartitionWork:
    """The work for a range that a reader hands out.

    The state of a work is the one at its start. Any other range is refused: folded on this state it
    would give wrong records, and the offsets between would look like a hole.
    """
    work = works.get(partition)
    work_range = None if work is None else OffsetRange(work.start, work.end)
    ensure(
        work_range == offset_range,
        "a task folds the range that its state belongs to",
        partition=str(partition),
        range=str(offset_range),
        work=str(work_range),
    )
    return works[partition]


def run_task(work: PartitionWork, batches: Iterable[MessageBatch], context: TaskContext) -> bytes:
    """Fold one partition's range and return the encoded `TaskResult`. A failure is in the result.
    Only a failure to read is raised.
    """
    try:
        result = PartitionTask(work, context).fold(batches)
    except SourceFailedError:
        # Reading failed, not the fold. Discovery finds out what that means.
        raise
    except Exception as error:  # noqa: BLE001  # the driver reports it once
        failure = Failure.of(as_worker_error(str(work.partition), error))
        result = TaskResult(failure=failure)
    # The driver knows a result by its partition alone: Spark gives results in any order.
    result.partition = work.partition
    return msgspec.msgpack.encode(result)


def read_result(content: bytes) -> TaskResult:
    """Decode a task's result in the driver. The failure of a task is raised here."""
    result = msgspec.msgpack.decode(content, type=TaskResult)
    if result.failure is not None:
        raise result.failure.to_error()
    return result


class PartitionTask:
    """One partition's range while it is folded."""

    def __init__(self, work: PartitionWork, context: TaskContext) -> None:
        self.work = work
        self.context = context
        name_offset = work.start if work.file_name_offset < 0 else work.file_name_offset
        self.stem = f"{stem_prefix(work.epoch, name_offset)}{work.attempt}"
        self.next_offset = work.start
        self.needs_headers_and_one_process = False
        self.halt: Finding | None = None
        self.first_timestamp: int | None = None
        self.last_timestamp: int | None = None
        self.digests = context.digests()
        self.core_fold = context.make_fold(
            work.partition,
            context.runner,
            context.tier,
            context.on_poison,
            lambda names: context.state.open_sessions(work.state, names),
            has_session_field=context.has_session_field,
            undoable=work.undoable,
            moved_sessions=work.moved_sessions,
            limits=context.limits,
            message_time_ms=work.message_time_ms,
            headless_since=work.headless_since,
            scope=work.scope,
        )
        # Holes and messages share one list of marks, so that marks are in the order of offsets.
        marks = self.core_fold.tally.marks
        self.passage = HolePassage(work.partition, context.tier, work.start, marks=marks)
        self.writer = OutputWriters(
            context.records, work.partition, work.topic_id, self.stem, context.runner.other_columns
        )
        self.quarantine_writer = context.records.quarantine_writer(
            work.partition, work.topic_id, self.stem
        )

    def fold(self, batches: Iterable[MessageBatch]) -> TaskResult:
        """Fold all messages in order, until the end, a loss or a halt.

        1. Before each batch: prove that nothing is missing before it, or pass over the hole.
        2. Fold the batch and write its records.
        3. At the end: pass over the hole up to the end of the range, and close the files.
        """
        for batch in self.core_fold.read_ahead(batches):
            crash_point("first-fetch")
            # 1. The hole before the batch.
            if not self._passes_hole_before(batch.start):
                break
            # 2. The batch.
            self._fold_batch(batch)
            crash_point("mid-fetch")
            if self.halt:
                break
        # 3. The end.
        if not self.halt:
            self._passes_hole_before(self.work.end)
        return self._finish()

    def _passes_hole_before(self, start: int) -> bool:
        """Whether the message at offset `start` may be folded: no message is missing before it, or
        the missing ones may be passed over.
        """
        partition = self.work.partition
        ensure(
            start >= self.next_offset,
            "offsets come in order",
            partition=str(partition),
            offset=start,
        )
        if start == self.next_offset:
            return True
        hole = OffsetRange(self.next_offset, start)
        explained_ranges = self.context.explain(partition, hole)
        is_passed = self.passage.pass_hole(hole, explained_ranges)
        self.next_offset = self.passage.until
        self.halt = self.passage.halt
        return is_passed

    def _fold_batch(self, batch: MessageBatch) -> None:
        """Fold a batch and write what it gives: records and quarantined messages."""
        fold = self.core_fold
        output = fold.fold_batch(batch)
        consumed = output.consumed_messages
        folded_batch = batch if consumed == len(batch) else batch.first_messages(consumed)
        self.digests.update(folded_batch)
        fold.counts.message_bytes += folded_batch.size_bytes()
        if consumed:
            if self.first_timestamp is None:
                self.first_timestamp = int(batch.timestamps[0])
            self.last_timestamp = int(batch.timestamps[consumed - 1])
        self._write_output(batch, folded_batch, output)
        self.next_offset = batch.start + consumed
        self.halt = fold.halt

    def _write_output(
        self, batch: MessageBatch, folded_batch: MessageBatch, output: FoldOutput
    ) -> None:
        """Write records and quarantined messages. If values of records do not fit their columns, the
        sessions of these records are noted, and the task must be folded again.
        """
        fold = self.core_fold
        try:
            self.writer.write(folded_batch, output, fold.counts)
        except UnfitRecordsError as unfit:
            for row in unfit.rows:
                name = output.sessions[row]
                fold.distrust(name, batch.start + output.positions[row])
                # The records were not written, so this try must never count, even if the session
                # was undoable and `distrust` had nothing to note.
                fold.half_changed_sessions.setdefault(name, EACH_MESSAGE)
        if output.quarantined_messages:
            if batch.headers is None:
                self.needs_headers_and_one_process = True
            self.quarantine_writer.write(batch, output.quarantined_messages)

    def _finish(self) -> TaskResult:
        """Close the files and save the state. If the task must be folded again, nothing is saved,
        and the result says only why.
        """
        fold = self.core_fold
        # This comes first: if a state cannot be packed, the task must be folded again.
        touched = fold.touched_sessions()
        if fold.must_fold_again(self.halt):
            self.needs_headers_and_one_process = True
        record_files, other_record_files = self.writer.close()
        quarantine_files = finish_files(self.quarantine_writer)
        if fold.half_changed_sessions or self.needs_headers_and_one_process:
            # The files that were written stay orphans: no entry will ever name them.
            return TaskResult(
                half_changed_sessions=fold.half_changed_sessions,
                needs_headers_and_one_process=self.needs_headers_and_one_process,
            )
        crash_point("record-file-written")
        state = self._save_state(touched)
        crash_point("state-file-written")
        met_sessions: tuple[str, ...] = ()
        if self.work.scope is not None:
            met_sessions = tuple(fold.sessions_with_messages())
        return TaskResult(
            certificate=self._certificate(len(touched)),
            records=record_files,
            other_record_files=other_record_files,
            quarantine_files=quarantine_files,
            state=state,
            halt=self.halt,
            findings=self._all_findings(),
            sessions_without_state=fold.sessions_without_state,
            marks=tuple(fold.tally.marks),
            peak_memory_bytes=self.context.peak_memory_bytes(),
            met_sessions=met_sessions,
        )

    def _all_findings(self) -> list[Finding]:
        """The findings of the fold, and that of a hole which halted the task."""
        findings = self.core_fold.tally.findings
        halt = self.halt
        if halt is None or halt is self.core_fold.halt:
            return findings
        return [*findings, halt]

    def _save_state(self, touched: SessionsByName) -> Files | None:
        """Save the sessions that changed and return all state files; None if none changed."""
        if not touched:
            return None
        work = self.work
        return save_state(self.context.state, work.partition, self.stem, touched, work.state)

    def _certificate(self, sessions: int) -> Certificate:
        """The proof of what was folded: range, counts, holes and digests."""
        expiry = self.core_fold.expiry
        return Certificate(
            partition=self.work.partition,
            epoch=self.work.epoch,
            start=self.work.start,
            until=self.next_offset,
            counts=self.core_fold.counts,
            holes=self.passage.counts,
            digests=self.digests.finish(),
            first_timestamp=self.first_timestamp,
            last_timestamp=self.last_timestamp,
            sessions=sessions,
            message_time_ms=expiry.message_time_ms if expiry else -1,
        )


class OutputWriters:
    """The record files of one partition and slice: one of `records`, and one per other table. Only
    machines with several kinds of records have other tables.
    """

    def __init__(
        self,
        store: TaskRecords,
        partition: Partition,
        topic_id: str,
        stem: str,
        other_tables: Iterable[str],
    ) -> None:
        self.writers: dict[str, RecordWriter] = {}
        self.writers[MAIN_TABLE] = store.record_writer(partition, topic_id, stem)
        for table in other_tables:
            self.writers[table] = store.record_writer(partition, topic_id, stem, table)

    def write(self, batch: MessageBatch, output: FoldOutput, counts: Counts) -> None:
        """Write the records of a batch. The fold has counted them all as records of `records`, so
        those of other tables are moved to their own counts.
        """
        if len(self.writers) == 1:
            self.writers[MAIN_TABLE].write(batch, output)
            return
        rows_of_tables = rows_by_table(output.rows)
        for table, rows in rows_of_tables.items():
            if table != MAIN_TABLE:
                counts.records -= len(rows)
                counts.other_records[table] = counts.other_records.get(table, 0) + len(rows)

        def write_rows(table: str, rows: Sequence[int]) -> None:
            self.writers[table].write(batch, select_records(output, rows))

        self._write_each_table(rows_of_tables, write_rows)

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Write records that end sessions, all at one offset."""
        if len(self.writers) == 1:
            self.writers[MAIN_TABLE].write_end_records(offset, end_records)
            return

        def write_rows(table: str, rows: Sequence[int]) -> None:
            self.writers[table].write_end_records(offset, select_end_records(end_records, rows))

        self._write_each_table(rows_by_table(end_records.rows), write_rows)

    def _write_each_table(
        self, rows_of_tables: dict[str, list[int]], write: Callable[[str, Sequence[int]], None]
    ) -> None:
        """Write the rows of each table. Rows that do not fit are raised all together, by their
        position among the rows of all tables.
        """
        unfit: list[int] = []
        for table, rows in rows_of_tables.items():
            try:
                write(table, rows)
            except UnfitRecordsError as error:
                unfit += [rows[row] for row in error.rows]
        if unfit:
            raise UnfitRecordsError(sorted(unfit))

    def close(self) -> tuple[Files, FilesByTable]:
        """Finish the files: that of `records`, and those of the other tables. A table without
        records has no file.
        """
        main_files: Files = ()
        other_files: FilesByTable = {}
        for table, writer in self.writers.items():
            files = finish_files(writer)
            if table == MAIN_TABLE:
                main_files = files
            elif files:
                other_files[table] = files
        return main_files, other_files
