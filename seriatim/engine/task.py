"""The task: one partition's range, folded where its messages are. Step 4 of a slice.

Prove that no offset is missing without a reason, fold, write record, state and quarantine files
under names that say partition, epoch, start and attempt, and return a small result. Nothing it
writes counts until a commit names it. Expected trouble is returned as a value: a stack trace across
processes helps nobody.

Next room: operations/run.py plans the works and commits the results.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding, GapMark, OnPoison, Tier
from seriatim.engine.fold import NO_LIMITS, Fold, Limits
from seriatim.engine.holes import HolePassage
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_writers import OutputWriters
from seriatim.engine.session_filter import RefoldScope
from seriatim.engine.state_merging import merge_count
from seriatim.engine.undo import EACH_MESSAGE
from seriatim.errors import BrokenPromiseError, PlatformError, SeriatimError, ensure
from seriatim.failure import Failure
from seriatim.ledger.model import Certificate, File
from seriatim.ports import (
    Digests,
    Explain,
    RecordStore,
    SourceFailedError,
    StateStore,
    UnfitRecordsError,
)

LOOK_AT_WORKERS = "look at the disk, memory and network of the workers, then run again"


class PartitionWork(Struct, frozen=True, kw_only=True):
    """What one task has to do."""

    partition: Partition
    start: int
    end: int
    epoch: int
    topic_id: str
    state: tuple[File, ...] = ()
    attempt: str
    undoable: dict[str, int] = field(default_factory=dict)
    """Sessions in which the machine raised in an earlier try, and the offset from which on they can
    be undone.
    """
    moved_sessions: dict[str, str] = field(default_factory=dict)
    """Sessions that live in another partition of the topic, and where."""
    message_time_ms: int = -1
    """The partition's message time so far."""
    headless_since: int = -1
    """Messages before this offset were lost and passed over; -1: none."""
    scope: RefoldScope | None = None
    """A refold: who is folded again."""
    file_name_offset: int = -1
    """A refold: the offset in the names of its files, which is the partition's frontier."""
    share: float = 0.0
    """Its part of all messages of the slice, where its sessions may be spread; a second try never
    is.
    """

    def __post_init__(self) -> None:
        ensure(
            self.headless_since <= self.start,
            "what was lost is before what is read",
            partition=str(self.partition),
        )


class TaskResult(Struct, kw_only=True):
    """What one task did, up to where it stopped."""

    certificate: Certificate | None = None
    records: tuple[File, ...] = ()
    other_record_files: dict[str, tuple[File, ...]] = field(default_factory=dict)
    """Of the machine's other tables."""
    quarantine_files: tuple[File, ...] = ()
    state: tuple[File, ...] | None = None
    halt: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    lacks_headers: bool = False
    """Messages were set aside, and their headers had not been asked for; or sessions were spread,
    and not all was as usual: fold again with them, alone.
    """
    sessions_without_state: dict[str, int] = field(default_factory=dict)
    """Sessions that came without a snapshot and are not known here, and their first offset."""
    marks: tuple[GapMark, ...] = ()
    met_sessions: tuple[str, ...] = ()
    """A refold: sessions of its scope that had a message."""
    raised_sessions: dict[str, int] = field(default_factory=dict)
    """Sessions that may be half changed, and from which offset on: nothing of this result counts,
    fold again with care.
    """
    peak_memory_bytes: int = 0
    partition: Partition | None = None
    failure: Failure | None = None
    """Why the task could not be done."""


class TaskContext(Struct, frozen=True, kw_only=True):
    """What a task works with."""

    runner: Runner
    make_fold: Callable[..., Fold] = Fold
    tier: Tier
    on_poison: OnPoison
    limits: Limits = NO_LIMITS
    has_session_field: bool
    records: RecordStore
    state: StateStore
    explain: Explain
    digests: Callable[[], Digests]
    peak_memory_bytes: Callable[[], int]


def stem_prefix(epoch: int, start: int) -> str:
    """How the names of all files of one partition, epoch and start begin."""
    return f"{epoch}-{start}-"


def run_task(work: PartitionWork, batches: Iterable[MessageBatch], context: TaskContext) -> bytes:
    """Fold one partition's range; failures come back as values."""
    try:
        result = PartitionTask(work, context).fold(batches)
    except SourceFailedError:
        raise  # reading broke, not the fold: discovery decides what it means
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told once, on one screen, by the driver
        result = TaskResult(failure=Failure.of(_known_error(work.partition, error)))
    result.partition = work.partition
    return msgspec.msgpack.encode(result)


def _known_error(partition: Partition, error: Exception) -> SeriatimError:
    """An error of ours as it is, with advice; anything else as the error that it means."""
    if isinstance(error, SeriatimError):
        if isinstance(error, PlatformError) and not error.next:
            error.next = LOOK_AT_WORKERS
        return error
    message = f"{partition}: {type(error).__name__}: {error}"
    if isinstance(error, OSError | MemoryError):
        return PlatformError(message, next=LOOK_AT_WORKERS)
    last_lines = "".join(traceback.format_exception(error)[-6:])
    return BrokenPromiseError(
        message, detail=last_lines, next="report this as a bug, with the lines above"
    )


def read_result(content: bytes) -> TaskResult:
    """A task's result in the driver; a failed task raises here."""
    result = msgspec.msgpack.decode(content, type=TaskResult)
    if result.failure is not None:
        raise result.failure.to_error()
    return result


class PartitionTask:
    """One partition's range being folded."""

    def __init__(self, work: PartitionWork, context: TaskContext) -> None:
        self.work, self.context = work, context
        place = work.start if work.file_name_offset < 0 else work.file_name_offset
        self.stem = f"{stem_prefix(work.epoch, place)}{work.attempt}"
        self.next_offset = work.start
        self.lacks_headers = False
        self.halt: Finding | None = None
        self.first_timestamp: int | None = None
        self.last_timestamp: int | None = None
        self.digests = context.digests()
        self.core_fold = context.make_fold(
            work.partition,
            context.runner,
            context.tier,
            context.on_poison,
            lambda names: context.state.load(work.state, names),
            has_session_field=context.has_session_field,
            undoable=work.undoable,
            moved_sessions=work.moved_sessions,
            limits=context.limits,
            message_time_ms=work.message_time_ms,
            headless_since=work.headless_since,
            scope=work.scope,
        )
        self.passage = HolePassage(
            work.partition, context.tier, work.start, marks=self.core_fold.tally.marks
        )
        self.writer = OutputWriters(
            context.records, work.partition, work.topic_id, self.stem, context.runner.other_columns
        )
        self.quarantine_writer = context.records.quarantine_writer(
            work.partition, work.topic_id, self.stem
        )

    def fold(self, batches: Iterable[MessageBatch]) -> TaskResult:
        """All messages in order, until the end, a hole or a halt."""
        for stretch in self.core_fold.read_ahead(batches):
            crash_point("first-fetch")
            if not self._passes_hole_before(stretch.start):
                break
            self._fold_batch(stretch)
            crash_point("mid-fetch")
            if self.halt:
                break
        if not self.halt:
            self._passes_hole_before(self.work.end)
        return self._finish()

    def _passes_hole_before(self, start: int) -> bool:
        """Whether the next message may be folded: nothing is missing before it, or what is may be
        passed over.
        """
        ensure(
            start >= self.next_offset,
            "offsets come in order",
            partition=str(self.work.partition),
            offset=start,
        )
        if start == self.next_offset:
            return True
        hole = OffsetRange(self.next_offset, start)
        passed = self.passage.pass_hole(hole, self.context.explain(self.work.partition, hole))
        self.next_offset, self.halt = self.passage.until, self.passage.halt
        return passed

    def _fold_batch(self, batch: MessageBatch) -> None:
        folded = self.core_fold.fold_batch(batch)
        done = (
            batch
            if folded.consumed_messages == len(batch)
            else batch.first_messages(folded.consumed_messages)
        )
        self.digests.update(done)
        self.core_fold.counts.message_bytes += done.size_bytes()
        if folded.consumed_messages:
            if self.first_timestamp is None:
                self.first_timestamp = int(batch.timestamps[0])
            self.last_timestamp = int(batch.timestamps[folded.consumed_messages - 1])
        try:
            self.writer.write(done, folded, self.core_fold.counts)
        except UnfitRecordsError as unfit:
            for row in unfit.rows:
                name = folded.sessions[row]
                self.core_fold.distrust(name, batch.start + folded.positions[row])
                # Its records were not written, so this try must never count, whatever was known of the session.
                self.core_fold.half_changed_sessions.setdefault(name, EACH_MESSAGE)
        if folded.quarantined_messages:
            self.lacks_headers |= batch.headers is None
            self.quarantine_writer.write(batch, folded.quarantined_messages)
        self.next_offset = batch.start + folded.consumed_messages
        self.halt = self.core_fold.halt

    def _finish(self) -> TaskResult:
        """Finish the files. After a raise nothing counts but what to set aside in the next try."""
        touched = self.core_fold.touched_sessions()
        self.lacks_headers |= self.core_fold.must_fold_again(self.halt)
        if self.core_fold.half_changed_sessions or self.lacks_headers:
            self.writer.close()
            self.quarantine_writer.close()
            return TaskResult(
                raised_sessions=self.core_fold.half_changed_sessions,
                lacks_headers=self.lacks_headers,
            )
        (records, others), kept = self.writer.close(), _close_file(self.quarantine_writer)
        crash_point("record-file-written")
        state = self._save_state(touched)
        crash_point("state-file-written")
        findings = self.core_fold.tally.findings
        if self.halt and self.halt is not self.core_fold.halt:
            findings = [*findings, self.halt]
        return TaskResult(
            certificate=self._certificate(len(touched)),
            records=records,
            other_record_files=others,
            quarantine_files=kept,
            state=state,
            halt=self.halt,
            findings=findings,
            sessions_without_state=self.core_fold.sessions_without_state,
            marks=tuple(self.core_fold.tally.marks),
            peak_memory_bytes=self.context.peak_memory_bytes(),
            met_sessions=tuple(self.core_fold.sessions_with_messages())
            if self.work.scope is not None
            else (),
        )

    def _save_state(self, touched: dict[str, Any]) -> tuple[File, ...] | None:
        if not touched:
            return None
        files = self.work.state
        merged = merge_count([file.rows for file in files], len(touched))
        kept, merge = files[: len(files) - merged], files[len(files) - merged :]
        return (*kept, self.context.state.save(self.work.partition, self.stem, touched, merge))

    def _certificate(self, sessions: int) -> Certificate:
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
            message_time_ms=self.core_fold.expiry.message_time_ms if self.core_fold.expiry else -1,
        )


def _close_file(writer: Any) -> tuple[File, ...]:
    file = writer.close()
    return () if file is None else (file,)
