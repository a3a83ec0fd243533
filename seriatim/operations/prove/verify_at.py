"""`verify --at`: messages are judged in a raw capture, in Kafka and in the output, and the first
offset is found where these views differ.

One partition at a time is held in memory, in as many views as were asked for.

Next: operations/prove/message_validator.py judges; operations/prove/verify.py looks at files
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate
from seriatim.engine.machine import Runner
from seriatim.engine.messages import (
    CapturedMessage,
    Poison,
    session_name_of_key,
    session_name_of_partition,
)
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.records import MESSAGE_COLUMNS
from seriatim.ledger.gaps import Gap, GapsFold
from seriatim.ledger.model import Account
from seriatim.operations.prove.chain import AddedFile, Commit, replay_active_files
from seriatim.operations.prove.message_validator import (
    FirstDifference,
    ObservedMessage,
    PartitionView,
    ValidationFault,
    Validator,
    first_difference,
)
from seriatim.operations.prove.verify import Verification
from seriatim.ports import Audit, PastMessageReader
from seriatim.stream import Stream

MESSAGES_AT_ONCE = 5_000
OFFSET_MAX = 2**63 - 1
HARMLESS_CAUSES = ("marker", "aborted", "compacted")
"""Causes of missing offsets that are no loss."""
READ_COLUMNS = (*MESSAGE_COLUMNS, "op")
ProgressCallback = Callable[[int, int], None]


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
    validators = {name: _view_validator(name, runner, is_explained) for name in views}
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
            partition_views.append(_read_view(name, source, validators[name], partition))
            offsets_read += len(source.offset_range)
            if progress is not None:
                progress(offsets_read, offsets_total)
        difference = first_difference(
            partition, partition_views, must_give_records=must_give_records
        )
        if difference is not None:
            result.first_differences.append(difference)
    for name, validator in validators.items():
        result.messages[name] = validator.messages
        result.faults[name] = list(validator.faults.values())
    if len(views) > 1 and "output" in views and not must_give_records:
        result.notes.append(
            "messages without a record are not judged: this machine or tier may give none"
        )
    return result


def _view_validator(
    view: str, runner: Runner, is_explained: Callable[[Partition, OffsetRange], bool]
) -> Validator:
    return Validator(
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
    name: str, source: MessageSource, validator: Validator, partition: Partition
) -> PartitionView:
    view = PartitionView(
        name=name,
        offset_range=source.offset_range,
        messages={},
        quarantined_offsets=source.quarantined_offsets,
        headless_ranges=source.headless_ranges,
        is_complete=name != "output",
    )
    shows_snapshots = name != "output" or validator.has_snapshots
    for validated_message, has_effect in validator.validate(partition, source.read()):
        message = validated_message
        if not shows_snapshots:
            message = replace(message, is_snapshot=None)
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
    bounds: Mapping[Partition, Bounds],
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
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
) -> Iterator[ObservedMessage]:
    """Messages as the validator takes them, decoded a batch at a time."""
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
                partition_offsets.update(row["offset"] for row in audit.rows(file.path, ["offset"]))
    active_files = _active_files(verification.commits)
    sources: dict[Partition, MessageSource] = {}
    for partition_name, account in accounts.items():
        partition = Partition.parse(partition_name)
        paths = _paths_of_partition(active_files, partition_name)
        start = min(account.initial_frontier, account.frontier)
        sources[partition] = MessageSource(
            offset_range=OffsetRange(start, account.frontier),
            read=_record_reader(audit, paths, account.topic_id),
            quarantined_offsets=quarantined_offsets.get(partition, set()),
            headless_ranges=_headless_ranges(gaps_fold.gaps, partition, account.topic_id),
        )
    return sources, certificates


def _active_files(commits: Iterable[Commit]) -> list[AddedFile]:
    """The files that are in the table now, as their commits added them."""
    commits = list(commits)
    active_paths = replay_active_files(commits)
    files: dict[str, AddedFile] = {}
    for commit in commits:
        for added in commit.adds:
            if added.path in active_paths:
                files[added.path] = added
    return list(files.values())


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

    def record_rows() -> Iterator[dict[str, Any]]:
        for path in paths:
            for row in audit.rows(path, READ_COLUMNS):
                if row["topic_id"] == topic_id:
                    yield row

    def message_of_row(row: dict[str, Any]) -> tuple[int, str]:
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
