"""The task: one partition's range, folded where its messages are. Step 4 of a slice.

Prove that no offset is missing without a reason, fold, write record, state and quarantine files under
names that say partition, epoch, start and attempt, and return a small result. Nothing it writes counts until
a commit names it. Expected trouble is returned as a value: a stack trace across processes helps nobody.

Next room: steps/fold.py plans the works and commits the results.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from seriatim.core.crash import crash_point
from seriatim.core.errors import BrokenPromiseError, PlatformError, SeriatimError, ensure
from seriatim.core.failure import Failure
from seriatim.core.fold import NO_LIMITS, Fold, Limits
from seriatim.core.holes import Passage
from seriatim.core.integrity import Finding, Mark, Tier
from seriatim.core.judge import OnPoison
from seriatim.core.ledger import Certificate, File
from seriatim.core.machine import Runner
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.scope import Scope
from seriatim.core.state import merge_count
from seriatim.core.undo import EACH_MESSAGE
from seriatim.ports import Digests, Explain, RecordStore, SourceFailed, StateStore, UnfitRecords
from seriatim.steps.split import Outputs

LOOK_AT_WORKERS = "look at the disk, memory and network of the workers, then run again"


class Work(Struct, frozen=True, kw_only=True):
    """What one task has to do."""

    partition: Partition
    start: int
    end: int
    epoch: int
    topic_id: str
    state: tuple[File, ...] = ()
    attempt: str
    careful: dict[str, int] = field(default_factory=dict)
    """Sessions in which the machine raised in an earlier try, and the offset from which on they can be undone."""
    moved: dict[str, str] = field(default_factory=dict)
    """Sessions that live in another partition of the topic, and where."""
    time: int = -1
    """The partition's message time so far."""
    headless_since: int = -1
    """Messages before this offset were lost and passed over; -1: none."""
    scope: Scope | None = None
    """A refold: who is folded again."""
    named: int = -1
    """A refold: the offset in the names of its files, which is the partition's frontier."""
    share: float = 0.0
    """Its part of all messages of the slice, where its sessions may be spread; a second try never is."""

    def __post_init__(self) -> None:
        ensure(self.headless_since <= self.start, "what was lost is before what is read", partition=str(self.partition))


class Result(Struct, kw_only=True):
    """What one task did, up to where it stopped."""

    certificate: Certificate | None = None
    records: tuple[File, ...] = ()
    others: dict[str, tuple[File, ...]] = field(default_factory=dict)
    """Of the machine's other tables."""
    kept: tuple[File, ...] = ()
    state: tuple[File, ...] | None = None
    halt: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    lacks_headers: bool = False
    """Messages were set aside, and their headers had not been asked for; or sessions were spread, and not all was as
    usual: fold again with them, alone."""
    strangers: dict[str, int] = field(default_factory=dict)
    """Sessions that came without a snapshot and are not known here, and their first offset."""
    marks: tuple[Mark, ...] = ()
    met: tuple[str, ...] = ()
    """A refold: sessions of its scope that had a message."""
    raised: dict[str, int] = field(default_factory=dict)
    """Sessions that may be half changed, and from which offset on: nothing of this result counts, fold again with
    care."""
    peak_memory_bytes: int = 0
    partition: Partition | None = None
    failure: Failure | None = None
    """Why the task could not be done."""


class Kit(Struct, frozen=True, kw_only=True):
    """What a task works with."""

    runner: Runner
    fold: Callable[..., Fold] = Fold
    tier: Tier
    on_poison: OnPoison
    limits: Limits = NO_LIMITS
    session_field: bool
    records: RecordStore
    state: StateStore
    explain: Explain
    digests: Callable[[], Digests]
    peak_memory_bytes: Callable[[], int]


def stem_prefix(epoch: int, start: int) -> str:
    """How the names of all files of one partition, epoch and start begin."""
    return f"{epoch}-{start}-"


def run_task(work: Work, stretches: Iterable[Stretch], kit: Kit) -> bytes:
    """Fold one partition's range; failures come back as values."""
    try:
        result = FoldTask(work, kit).fold(stretches)
    except SourceFailed:
        raise  # reading broke, not the fold: discovery decides what it means
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told once, on one screen, by the driver
        result = Result(failure=Failure.of(_known_error(work.partition, error)))
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
    return BrokenPromiseError(message, detail=last_lines, next="report this as a bug, with the lines above")


def read_result(content: bytes) -> Result:
    """A task's result in the driver; a failed task raises here."""
    result = msgspec.msgpack.decode(content, type=Result)
    if result.failure is not None:
        raise result.failure.to_error()
    return result


class FoldTask:
    """One partition's range being folded."""

    def __init__(self, work: Work, kit: Kit) -> None:
        self.work, self.kit = work, kit
        place = work.start if work.named < 0 else work.named
        self.stem = f"{stem_prefix(work.epoch, place)}{work.attempt}"
        self.expected = work.start
        self.lacks_headers = False
        self.halt: Finding | None = None
        self.first_timestamp: int | None = None
        self.last_timestamp: int | None = None
        self.digests = kit.digests()
        self.core = kit.fold(
            work.partition,
            kit.runner,
            kit.tier,
            kit.on_poison,
            lambda names: kit.state.load(work.state, names),
            session_field=kit.session_field,
            careful=work.careful,
            moved=work.moved,
            limits=kit.limits,
            time=work.time,
            headless_since=work.headless_since,
            scope=work.scope,
        )
        self.passage = Passage(work.partition, kit.tier, work.start, marks=self.core.tally.marks)
        self.writer = Outputs(kit.records, work.partition, work.topic_id, self.stem, kit.runner.others)
        self.kept = kit.records.kept(work.partition, work.topic_id, self.stem)

    def fold(self, stretches: Iterable[Stretch]) -> Result:
        """All messages in order, until the end, a hole or a halt."""
        for stretch in self.core.ahead(stretches):
            crash_point("first-fetch")
            if not self._joins(stretch.start):
                break
            self._stretch(stretch)
            crash_point("mid-fetch")
            if self.halt:
                break
        if not self.halt:
            self._joins(self.work.end)
        return self._result()

    def _joins(self, start: int) -> bool:
        """Whether the next message may be folded: nothing is missing before it, or what is may be passed over."""
        ensure(start >= self.expected, "offsets come in order", partition=str(self.work.partition), offset=start)
        if start == self.expected:
            return True
        hole = OffsetRange(self.expected, start)
        passed = self.passage.over(hole, self.kit.explain(self.work.partition, hole))
        self.expected, self.halt = self.passage.until, self.passage.halt
        return passed

    def _stretch(self, stretch: Stretch) -> None:
        folded = self.core.stretch(stretch)
        done = stretch if folded.consumed == len(stretch) else stretch.until(folded.consumed)
        self.digests.update(done)
        self.core.counts.bytes += done.size_bytes()
        if folded.consumed:
            if self.first_timestamp is None:
                self.first_timestamp = int(stretch.timestamps[0])
            self.last_timestamp = int(stretch.timestamps[folded.consumed - 1])
        try:
            self.writer.write(done, folded, self.core.counts)
        except UnfitRecords as unfit:
            for row in unfit.rows:
                name = folded.sessions[row]
                self.core.distrust(name, stretch.start + folded.positions[row])
                # Its records were not written, so this try must never count, whatever was known of the session.
                self.core.raised.setdefault(name, EACH_MESSAGE)
        if folded.kept:
            self.lacks_headers |= stretch.headers is None
            self.kept.write(stretch, folded.kept)
        self.expected = stretch.start + folded.consumed
        self.halt = self.core.halt

    def _result(self) -> Result:
        """Finish the files. After a raise nothing counts but what to set aside in the next try."""
        touched = self.core.touched()
        self.lacks_headers |= self.core.must_repeat(self.halt)
        if self.core.raised or self.lacks_headers:
            self.writer.close()
            self.kept.close()
            return Result(raised=self.core.raised, lacks_headers=self.lacks_headers)
        (records, others), kept = self.writer.close(), _closed(self.kept)
        crash_point("record-file-written")
        state = self._saved(touched)
        crash_point("state-file-written")
        findings = self.core.tally.findings
        if self.halt and self.halt is not self.core.halt:
            findings = [*findings, self.halt]
        return Result(
            certificate=self._certificate(len(touched)),
            records=records,
            others=others,
            kept=kept,
            state=state,
            halt=self.halt,
            findings=findings,
            strangers=self.core.strangers,
            marks=tuple(self.core.tally.marks),
            peak_memory_bytes=self.kit.peak_memory_bytes(),
            met=tuple(self.core.met()) if self.work.scope is not None else (),
        )

    def _saved(self, touched: dict[str, Any]) -> tuple[File, ...] | None:
        if not touched:
            return None
        files = self.work.state
        merged = merge_count([file.rows for file in files], len(touched))
        kept, merge = files[: len(files) - merged], files[len(files) - merged :]
        return (*kept, self.kit.state.save(self.work.partition, self.stem, touched, merge))

    def _certificate(self, sessions: int) -> Certificate:
        return Certificate(
            partition=self.work.partition,
            epoch=self.work.epoch,
            start=self.work.start,
            until=self.expected,
            counts=self.core.counts,
            holes=self.passage.counts,
            digests=self.digests.finish(),
            first_timestamp=self.first_timestamp,
            last_timestamp=self.last_timestamp,
            sessions=sessions,
            time=self.core.expiry.time if self.core.expiry else -1,
        )


def _closed(writer: Any) -> tuple[File, ...]:
    file = writer.close()
    return () if file is None else (file,)
