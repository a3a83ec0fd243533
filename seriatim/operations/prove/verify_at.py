"""`verify --at`: messages are judged in a raw capture, in Kafka and in the output, and the first
offset is found where these views differ.

A session begins by a snapshot, its sequence has no hole, repeat or disorder, and no offset is
missing. `MessageJudge` finds the first place where each of these is wrong, by a replay of the
messages through the fold at tier none; `first_difference` finds the first offset at which two views
differ. One partition at a time is held in memory, in as many views as were asked for.

Next: engine/fold.py has the rules; operations/prove/verify.py looks at files instead;
tests/sim/message_rules.py has the same rules written independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate
from seriatim.engine.fold import Fold
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.engine.messages import (
    CapturedMessage,
    KeysOrValues,
    MessageBatch,
    Poison,
    SequenceNumbers,
    session_name_of_key,
    session_name_of_partition,
)
from seriatim.engine.offsets import Bounds, BoundsByPartition, OffsetRange, Partition
from seriatim.engine.records import MESSAGE_COLUMNS, Record
from seriatim.engine.session import Session
from seriatim.ledger.gaps import Gap, GapsFold
from seriatim.ledger.model import Account
from seriatim.operations.prove.stream_rules import replay_active_files
from seriatim.operations.prove.verify import Verification
from seriatim.ports import AddedFile, Audit, PastMessageReader, ProgressCallback
from seriatim.stream import Stream

MESSAGES_AT_ONCE = 5_000
OFFSET_MAX = 2**63 - 1
HARMLESS_CAUSES = ("marker", "aborted", "compacted")
"""Causes of missing offsets that are no loss."""
READ_COLUMNS = (*MESSAGE_COLUMNS, "op")
IsExplained = Callable[[Partition, OffsetRange], bool]
"""Whether certificates say why the offsets of a hole are missing."""
FaultLevel = Literal["error", "warning"]


class ObservedMessage(Struct, frozen=True, kw_only=True, gc=False):
    """One message as a view shows it."""

    offset: int
    session: str | None = None
    sequence: int | None = None
    is_snapshot: bool | None = False
    """None: the view does not show it."""
    poison: str = ""
    """Why it cannot be read; empty: it can."""
    has_no_effect: bool = False
    """Whether it concerns no session, as a tombstone that the decoder passes over."""
    content_hash: int | None = None
    """A hash of key and value, if the view has them."""
    must_give_record: bool = True
    """Whether it must have left a record, if nothing was wrong with it."""
    is_session_end: bool = False
    """Records that delete rows: the end of a session, or a snapshot without rows."""


class ValidationFault(Struct, kw_only=True):
    """The first place where something is wrong, and how often it is."""

    kind: str
    partition: Partition
    offset: int
    session: str | None = None
    expected: str = ""
    found: str = ""
    level: FaultLevel = "error"
    count: int = 1


# Judging the messages of one view.


class NoState(Struct):
    """The state of a session in a replay: the rules of the fold need none."""


class NoRecord(Struct):
    """A replay gives no records."""


class NoMachine(Machine[NoState, ObservedMessage, NoRecord]):
    """Takes every message and does nothing, so that only the rules of the fold speak."""

    def start(self, session: str) -> NoState:  # noqa: ARG002  # all sessions are alike
        """Nothing."""
        return NoState()

    def apply(self, state: NoState, message: ObservedMessage) -> Iterable[NoRecord]:  # noqa: ARG002
        """Nothing."""
        return ()

    def is_snapshot(self, message: ObservedMessage) -> bool:
        """As the view shows it."""
        return bool(message.is_snapshot)


class ReplayRunner(UserMachine):
    """Gives the fold messages that were decoded before: those of a view."""

    def __init__(self) -> None:
        super().__init__("replay", NoMachine)
        # The sequences of a session that begins without a snapshot are judged, too.
        self.has_snapshots = False
        self.message: Any = None
        """The message that is folded now."""

    def decode(self, values: KeysOrValues) -> list[Any]:
        """The message that is folded now."""
        return [self.message] * len(values)

    def sequences(self, messages: Sequence[Any]) -> SequenceNumbers:
        """The producer's own counter of each message; None of poison."""
        return [message.sequence for message in messages]

    def session(self, message: Any) -> str:
        """The session of a message."""
        return str(message.session)


class PartitionReplay:
    """The messages of one partition of a view, one after the other through the fold at tier none."""

    def __init__(self, partition: Partition) -> None:
        self.runner = ReplayRunner()
        self.fold = Fold(
            partition, self.runner, "none", "skip", lambda _names: {}, has_session_field=True
        )

    def session(self, message: ObservedMessage) -> Session | None:
        """The session of a message up to now; None: this is its first message."""
        return self.fold.sessions.get(message.session or "")

    def fold_message(self, message: ObservedMessage) -> tuple[str, str]:
        """The kind of what the fold finds in a message, and the cause; empty: nothing."""
        self.runner.message = message
        if message.poison or message.session is None:
            self.runner.message = Poison(message.poison or "no readable key")
        is_first = self.session(message) is None
        counts_before = self.fold.counts.findings
        self.fold.fold_batch(MessageBatch(message.offset, [0], [None], [b""]))
        session = self.session(message)
        if session is not None and is_first:
            # The count of a session begins with its first message: what comes again later is a
            # repeat also if no snapshot was seen.
            session.snapshot_sequence = message.sequence
        for kind, count in self.fold.counts.findings.items():
            if count > counts_before.get(kind, 0):
                return kind, self.runner.message.cause if kind == "poison" else ""
        return "", ""


class MessageJudge:
    """Judges the messages of one view, partition by partition, in the order of the view.

    Poison and sequences are judged by the fold at tier none. Two rules are of the view itself: no
    offset is missing or comes again, and a session begins with a snapshot.
    """

    def __init__(
        self,
        *,
        is_contiguous: bool,
        has_snapshots: bool = True,
        is_explained: IsExplained | None = None,
    ) -> None:
        self.is_contiguous = is_contiguous
        self.has_snapshots = has_snapshots
        self.is_explained = is_explained or (lambda _partition, _hole: False)
        self.faults: dict[tuple[str, FaultLevel], ValidationFault] = {}
        self.messages = 0

    def validate(
        self, partition: Partition, messages: Iterable[ObservedMessage]
    ) -> Iterator[tuple[ObservedMessage, bool]]:
        """Each message, and whether it should have an effect: no fault takes it away."""
        replay = PartitionReplay(partition)
        expected_offset: int | None = None
        from_birth = False
        for message in messages:
            self.messages += 1
            next_offset = message.offset + 1
            if expected_offset is None:
                from_birth = message.offset == 0
                expected_offset = next_offset
            elif self.is_contiguous and message.offset != expected_offset:
                self._check_offset(partition, expected_offset, message)
            expected_offset = max(expected_offset, next_offset)
            if message.has_no_effect:
                yield message, False
                continue
            yield message, self._judge_message(replay, partition, message, from_birth=from_birth)

    def _check_offset(self, partition: Partition, expected: int, message: ObservedMessage) -> None:
        """Record an offset that comes again, or a hole before it."""
        expected_text = f"offset {expected}"
        actual = f"offset {message.offset}"
        if message.offset < expected:
            self._record_fault("offset again", partition, message, expected_text, actual)
            return
        level: FaultLevel = "error"
        if self.is_explained(partition, OffsetRange(expected, message.offset)):
            level = "warning"
            actual += " (explained when it was folded)"
        self._record_fault("gap", partition, message, expected_text, actual, level)

    def _judge_message(
        self,
        replay: PartitionReplay,
        partition: Partition,
        message: ObservedMessage,
        *,
        from_birth: bool,
    ) -> bool:
        """Judge a message by its session. Returns whether it should have an effect.

        `from_birth`: the view has the partition from its first offset on, so no snapshot can be
        missing legitimately.
        """
        session = replay.session(message)
        last_sequence = session.sequence if session is not None else None
        is_readable = not message.poison and message.session is not None
        needs_snapshot = self.has_snapshots and message.is_snapshot is False
        if is_readable and session is None and needs_snapshot and not message.is_session_end:
            level: FaultLevel = "error" if from_birth else "warning"
            self._record_fault(
                "headless",
                partition,
                message,
                "a snapshot first",
                "another message",
                level,
            )
        has_seen_snapshot = session is not None and session.snapshot_offset >= 0
        has_state = not needs_snapshot or has_seen_snapshot
        if _has_sequence_of_its_own(message, last_sequence):
            return has_state
        kind, cause = replay.fold_message(message)
        if kind == "poison":
            self._record_fault(kind, partition, message, "a message that can be read", cause)
            return False
        if kind:
            self._record_sequence_fault(kind, partition, message, last_sequence)
        is_dropped = kind in ("repeat", "disorder") and not message.is_snapshot
        return has_state and not is_dropped

    def _record_sequence_fault(
        self, kind: str, partition: Partition, message: ObservedMessage, last_sequence: int | None
    ) -> None:
        expected = f"sequence {(last_sequence or 0) + 1}"
        actual = f"sequence {message.sequence}"
        # Where snapshots do not show, a snapshot may have closed the hole.
        level: FaultLevel = "warning" if message.is_snapshot is None else "error"
        if message.is_snapshot and kind == "sequence gap":
            level = "warning"
            actual += ", closed by this snapshot"
        self._record_fault(kind, partition, message, expected, actual, level)

    def _record_fault(
        self,
        kind: str,
        partition: Partition,
        message: ObservedMessage,
        expected: str,
        actual: str,
        level: FaultLevel = "error",
    ) -> None:
        """Record the first fault of a kind, and count the others."""
        fault = self.faults.get((kind, level))
        if fault is not None:
            fault.count += 1
            return
        self.faults[kind, level] = ValidationFault(
            kind=kind,
            partition=partition,
            offset=message.offset,
            session=message.session,
            expected=expected,
            found=actual,
            level=level,
        )


def _has_sequence_of_its_own(message: ObservedMessage, last_sequence: int | None) -> bool:
    """Whether the sequence of a message says nothing: the records that end a session have that of
    its last message, or an earlier one.
    """
    if not message.is_session_end or message.sequence is None or last_sequence is None:
        return False
    return message.sequence <= last_sequence


# Comparing views.


class PartitionView(Struct, kw_only=True):
    """One partition as one view shows it: its messages by offset, and their range."""

    name: str
    offset_range: OffsetRange
    messages: dict[int, ObservedMessage]
    effective_offsets: set[int] = field(default_factory=set)
    """Offsets whose messages should have an effect."""
    quarantined_offsets: set[int] = field(default_factory=set)
    """Output: offsets of quarantined messages."""
    headless_ranges: dict[str, list[OffsetRange]] = field(default_factory=dict)
    """Output: where sessions waited for a snapshot, because messages were lost that may have been
    theirs.
    """
    is_complete: bool = True
    """Whether every message shows. It is not so in the output, where only those with an effect left
    a record.
    """


class FirstDifference(Struct, frozen=True, kw_only=True):
    """The first offset at which two views differ."""

    partition: Partition
    offset: int
    description: str
    views: Mapping[str, str]
    """What each of them has there."""


def first_difference(
    partition: Partition, views: list[PartitionView], *, must_give_records: bool
) -> FirstDifference | None:
    """The first difference of any two views of a partition; None if there is none.

    `must_give_records`: a message without fault always leaves a record.
    """
    earliest: FirstDifference | None = None
    for left, right in combinations(views, 2):
        difference = _first_difference_of(
            partition, left, right, must_give_records=must_give_records
        )
        if difference is None:
            continue
        if earliest is None or difference.offset < earliest.offset:
            earliest = difference
    return earliest


def _first_difference_of(
    partition: Partition, left: PartitionView, right: PartitionView, *, must_give_records: bool
) -> FirstDifference | None:
    start = max(left.offset_range.start, right.offset_range.start)
    end = min(left.offset_range.end, right.offset_range.end)
    offsets = {
        *left.messages,
        *right.messages,
        *left.quarantined_offsets,
        *right.quarantined_offsets,
    }
    for offset in sorted(offsets):
        if not start <= offset < end:
            continue
        description = _describe_difference(left, right, offset, must_give_records=must_give_records)
        if description:
            views = {view.name: _describe_message(view, offset) for view in (left, right)}
            return FirstDifference(
                partition=partition, offset=offset, description=description, views=views
            )
    return None


def _describe_difference(
    left_view: PartitionView, right_view: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs at an offset; empty if nothing does."""
    if not right_view.is_complete:
        return _describe_output_difference(
            left_view, right_view, offset, must_give_records=must_give_records
        )
    if not left_view.is_complete:
        return _describe_output_difference(
            right_view, left_view, offset, must_give_records=must_give_records
        )
    left = left_view.messages.get(offset)
    right = right_view.messages.get(offset)
    if left is None or right is None:
        return "a message that only one of them has"
    if left.content_hash != right.content_hash:
        return "another key or value"
    return ""


def _describe_output_difference(
    input_view: PartitionView, output: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs between a message and the records that it left; empty if nothing does."""
    message = input_view.messages.get(offset)
    record = output.messages.get(offset)
    description = ""
    if message is None:
        description = f"the output has a message that {input_view.name} has not"
    elif record is None:
        should_have_record = must_give_records and message.must_give_record
        has_effect = offset in input_view.effective_offsets
        if should_have_record and has_effect and not _is_set_aside(output, message):
            description = "the output has no record of a message without fault"
    elif record.session != message.session:
        description = "another session"
    elif record.is_session_end:
        description = ""
    elif record.sequence != message.sequence:
        description = "another sequence"
    elif record.is_snapshot is not None and record.is_snapshot != message.is_snapshot:
        description = "a snapshot only in one"
    return description


def _is_set_aside(output: PartitionView, message: ObservedMessage) -> bool:
    """Whether a message legitimately has no record: in quarantine, or while its session waited."""
    if message.offset in output.quarantined_offsets:
        return True
    headless_ranges = output.headless_ranges.get(message.session or "", ())
    return any(message.offset in headless_range for headless_range in headless_ranges)


def _describe_message(view: PartitionView, offset: int) -> str:
    """What a view has at an offset, for people."""
    message = view.messages.get(offset)
    if message is None:
        return "set aside" if offset in view.quarantined_offsets else "nothing"
    kind = "a message"
    if message.poison:
        kind = "poison"
    elif message.is_snapshot:
        kind = "a snapshot"
    return f"{kind} of session {message.session}, sequence {message.sequence}"


# Reading messages and records as views.


class ValidationResult(Struct, kw_only=True):
    """What was found."""

    messages: dict[str, int] = field(default_factory=dict)
    """How many messages each view has."""
    faults: dict[str, list[ValidationFault]] = field(default_factory=dict)
    """By view: the first fault of each kind."""
    first_differences: list[FirstDifference] = field(default_factory=list)
    """The first difference of each partition."""
    notes: list[str] = field(default_factory=list)


class MessageSource(Struct, kw_only=True):
    """The messages of a partition in one view: their range, and how to read them."""

    offset_range: OffsetRange
    read: Callable[[], Iterable[ObservedMessage]]
    quarantined_offsets: set[int] = field(default_factory=set)
    headless_ranges: dict[str, list[OffsetRange]] = field(default_factory=dict)


MessageSources = Mapping[Partition, MessageSource]


def validate_views(
    stream: Stream,
    runner: Runner,
    views: Mapping[str, MessageSources],
    is_explained: Callable[[Partition, OffsetRange], bool],
    progress: ProgressCallback | None = None,
) -> ValidationResult:
    """Judge every view by the same rules; then find where they differ, partition by partition."""
    judges = {name: _view_judge(name, runner, is_explained) for name in views}
    must_give_records = _must_give_records(stream, runner)
    partitions: set[Partition] = set()
    offsets_total = 0
    for sources in views.values():
        partitions.update(sources)
        offsets_total += sum(len(source.offset_range) for source in sources.values())
    offsets_read = 0
    result = ValidationResult()
    for partition in sorted(partitions):
        partition_views: list[PartitionView] = []
        for name, sources in views.items():
            source = sources.get(partition)
            if source is None:
                continue
            partition_view = _read_view(
                name,
                source,
                judges[name],
                partition,
                shows_snapshots=_shows_snapshots(name, runner),
            )
            partition_views.append(partition_view)
            offsets_read += len(source.offset_range)
            if progress is not None:
                progress(offsets_read, offsets_total)
        difference = first_difference(
            partition, partition_views, must_give_records=must_give_records
        )
        if difference is not None:
            result.first_differences.append(difference)
    for name, judge in judges.items():
        result.messages[name] = judge.messages
        result.faults[name] = list(judge.faults.values())
    if len(views) > 1 and "output" in views and not must_give_records:
        result.notes.append(
            "messages without a record are not judged: this machine or tier may give none"
        )
    return result


def _view_judge(
    view: str, runner: Runner, is_explained: Callable[[Partition, OffsetRange], bool]
) -> MessageJudge:
    return MessageJudge(
        is_contiguous=view != "output",
        has_snapshots=runner.has_snapshots and _shows_snapshots(view, runner),
        is_explained=is_explained,
    )


def _shows_snapshots(view: str, runner: Runner) -> bool:
    """Whether a view shows which messages are snapshots: the output only by the table machine's op."""
    return view != "output" or runner.snapshot_type is not None


def _must_give_records(stream: Stream, runner: Runner) -> bool:
    """Whether every message without fault leaves a record.

    This does not hold for machines of users and for captured changes, of which some change nothing,
    nor while messages may wait in a window, nor where sessions expire.
    """
    if runner.snapshot_type is None or stream.tier == "window":
        return False
    return not stream.session_timeout_hours


def _read_view(
    name: str,
    source: MessageSource,
    judge: MessageJudge,
    partition: Partition,
    *,
    shows_snapshots: bool,
) -> PartitionView:
    view = PartitionView(
        name=name,
        offset_range=source.offset_range,
        messages={},
        quarantined_offsets=source.quarantined_offsets,
        headless_ranges=source.headless_ranges,
        is_complete=name != "output",
    )
    messages = source.read()
    if not shows_snapshots:
        messages = (replace(message, is_snapshot=None) for message in messages)
    for message, has_effect in judge.validate(partition, messages):
        view.messages.setdefault(message.offset, message)
        if has_effect:
            view.effective_offsets.add(message.offset)
    return view


def capture_sources(
    captured: Iterable[CapturedMessage], stream: Stream, runner: Runner
) -> dict[Partition, MessageSource]:
    """The messages of a raw capture, by partition."""
    messages_by_partition: dict[Partition, list[CapturedMessage]] = {}
    for message in captured:
        messages_by_partition.setdefault(message.partition, []).append(message)

    def source_of(partition: Partition, messages: list[CapturedMessage]) -> MessageSource:
        offsets = [message.offset for message in messages]
        keys = [message.key for message in messages]
        values = [message.value for message in messages]
        return MessageSource(
            offset_range=OffsetRange(min(offsets), max(offsets) + 1),
            read=lambda: observe_messages(stream, runner, partition, offsets, keys, values),
        )

    return {
        partition: source_of(partition, messages)
        for partition, messages in messages_by_partition.items()
    }


def kafka_sources(
    past_reader: PastMessageReader,
    bounds: BoundsByPartition,
    stream: Stream,
    runner: Runner,
) -> dict[Partition, MessageSource]:
    """The messages that Kafka has now, by partition."""

    def read(partition: Partition, offset_range: OffsetRange) -> Iterator[ObservedMessage]:
        for batch in past_reader.read(partition, offset_range):
            offsets = range(batch.start, batch.start + len(batch))
            yield from observe_messages(
                stream, runner, partition, offsets, batch.keys, batch.values
            )

    def source_of(partition: Partition, partition_bounds: Bounds) -> MessageSource:
        offset_range = OffsetRange(partition_bounds.log_start, partition_bounds.log_end)
        return MessageSource(offset_range=offset_range, read=lambda: read(partition, offset_range))

    return {
        partition: source_of(partition, partition_bounds)
        for partition, partition_bounds in bounds.items()
    }


def observe_messages(
    stream: Stream,
    runner: Runner,
    partition: Partition,
    offsets: Sequence[int],
    keys: KeysOrValues,
    values: KeysOrValues,
) -> Iterator[ObservedMessage]:
    """Messages as they are judged, decoded a batch at a time."""
    for start in range(0, len(offsets), MESSAGES_AT_ONCE):
        batch = slice(start, start + MESSAGES_AT_ONCE)
        messages = runner.decode(values[batch])
        sequences = runner.sequences(messages)
        rows = zip(offsets[batch], keys[batch], values[batch], messages, sequences, strict=True)
        for offset, key, value, message, sequence in rows:
            name = session_name_of_key(key)
            if runner.has_session_per_partition:
                name = session_name_of_partition(partition)
            observed = _observe_message(stream, runner, offset, name, message, sequence)
            # A hash instead of key and value: all messages of a partition are held in memory.
            yield replace(observed, content_hash=hash((key, value)))


def _observe_message(
    stream: Stream,
    runner: Runner,
    offset: int,
    session: str | None,
    message: Any,
    sequence: int | None,
) -> ObservedMessage:
    if message.__class__ is Poison:
        if message.has_no_effect:
            return ObservedMessage(offset=offset, session=session, has_no_effect=True)
        return ObservedMessage(offset=offset, session=session, poison=message.cause)
    try:
        is_snapshot = runner.has_snapshots and runner.is_snapshot(message)
    except Exception as error:  # noqa: BLE001  # The user's code may raise anything.
        poison = f"{type(error).__name__}: {error}"
        return ObservedMessage(offset=offset, session=session, poison=poison)
    if stream.session_field is not None:
        session = runner.session(message)
    return ObservedMessage(
        offset=offset,
        session=session,
        sequence=sequence,
        is_snapshot=is_snapshot,
        must_give_record=_must_give_record(stream, message, is_snapshot),
    )


def _must_give_record(stream: Stream, message: Any, snapshot: bool) -> bool:
    """Whether a message of the table machine leaves a record.

    An empty snapshot may leave none. A delete may leave none in tiers where a missing row is only
    counted.
    """
    if snapshot:
        return bool(getattr(message, "rows", None))
    is_lenient_tier = stream.tier in ("none", "order")
    return not (is_lenient_tier and type(message).__name__ == "Delete")


def output_sources(
    verification: Verification, audit: Audit
) -> tuple[dict[Partition, MessageSource], list[Certificate]]:
    """What the output has of each partition, as of its topic's present id; and the certificates of
    all entries.
    """
    verification.open_log()
    certificates: list[Certificate] = []
    quarantined_offsets: dict[Partition, set[int]] = {}
    accounts: dict[str, Account] = {}
    gaps_fold = GapsFold()
    for sequence in sorted(verification.signatures):
        manifest = verification.manifest(sequence)
        gaps_fold.add_entry(manifest)
        accounts = manifest.ledger.partitions
        for change in manifest.entry.changes:
            if change.certificate is not None:
                certificates.append(change.certificate)
            for file in change.quarantine_files:
                partition_offsets = quarantined_offsets.setdefault(change.partition, set())
                rows = audit.rows(file.path, ["offset"])
                partition_offsets.update(row["offset"] for row in rows)
    active_files = replay_active_files(verification.commits).values()
    sources: dict[Partition, MessageSource] = {}
    for partition_name, account in accounts.items():
        partition = Partition.parse(partition_name)
        paths = _paths_of_partition(active_files, partition_name)
        # A log that was cut may end before the first offset that was ever read.
        start = min(account.initial_frontier, account.frontier)
        topic_id = account.topic_id
        sources[partition] = MessageSource(
            offset_range=OffsetRange(start, account.frontier),
            read=_record_reader(audit, paths, topic_id),
            quarantined_offsets=quarantined_offsets.get(partition, set()),
            headless_ranges=_headless_ranges(gaps_fold.gaps, partition, topic_id),
        )
    return sources, certificates


def _headless_ranges(
    gaps: Iterable[Gap], partition: Partition, topic_id: str
) -> dict[str, list[OffsetRange]]:
    """By session: where it waited for a snapshot because messages were lost."""
    ranges: dict[str, list[OffsetRange]] = {}
    for gap in gaps:
        if gap.topic_partition != partition or gap.topic_id != topic_id:
            continue
        if gap.session is None or gap.finding != "gap":
            continue
        end = OFFSET_MAX if gap.until is None else gap.until
        ranges.setdefault(gap.session, []).append(OffsetRange(gap.start, end))
    return ranges


def _paths_of_partition(files: Iterable[AddedFile], partition_name: str) -> list[str]:
    """The paths of a partition's own record files, by offset."""
    folder = f"records/{partition_name}"
    partition_files = [added for added in files if added.path.rpartition("/")[0] == folder]
    partition_files.sort(key=lambda added: added.first_offset)
    return [added.path for added in partition_files]


def _record_reader(
    audit: Audit, paths: list[str], topic_id: str
) -> Callable[[], Iterator[ObservedMessage]]:
    """Reads records as the messages that they came from: one for each message that left any."""

    def record_rows() -> Iterator[Record]:
        for path in paths:
            for row in audit.rows(path, READ_COLUMNS):
                if row["topic_id"] == topic_id:
                    yield row

    def message_of_row(row: Record) -> tuple[int, str]:
        return row["source_offset"], row["session"]

    def read() -> Iterator[ObservedMessage]:
        # All records of one message are next to each other in a file.
        for (offset, session), group in groupby(record_rows(), key=message_of_row):
            records = list(group)
            ops = {record.get("op") for record in records}
            is_snapshot = None
            if ops != {None}:
                is_snapshot = "snapshot" in ops
            yield ObservedMessage(
                offset=offset,
                session=session,
                sequence=records[0]["sequence"],
                is_snapshot=is_snapshot,
                is_session_end=ops == {"delete"},
            )

    return read


def holes_explained_by(
    certificates: Iterable[Certificate],
) -> Callable[[Partition, OffsetRange], bool]:
    """A function that says whether certificates explain as many missing offsets as a hole has."""
    explained_by_partition: dict[Partition, list[tuple[OffsetRange, int]]] = {}
    for certificate in certificates:
        explained_count = 0
        for cause, count in certificate.holes.items():
            if cause in HARMLESS_CAUSES:
                explained_count += count
        if explained_count:
            certified_range = OffsetRange(certificate.start, certificate.until)
            ranges = explained_by_partition.setdefault(certificate.partition, [])
            ranges.append((certified_range, explained_count))

    def is_explained(partition: Partition, hole: OffsetRange) -> bool:
        explained_offsets = 0
        for certified_range, explained_count in explained_by_partition.get(partition, ()):
            if certified_range.start < hole.end and hole.start < certified_range.end:
                explained_offsets += explained_count
        return explained_offsets >= len(hole)

    return is_explained
