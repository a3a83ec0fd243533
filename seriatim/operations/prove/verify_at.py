"""Validate: `verify --at`: messages judged where they are, and the first place where raw, Kafka and
output part.

One partition at a time is held in memory, in as many views as were asked for.

Next room: operations/prove/message_validator.py judges; operations/prove/verify.py looks at files
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.machine import Runner
from seriatim.engine.messages import CapturedMessage, Poison, session_name_of_key
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.gaps import Gap, GapsFold
from seriatim.ledger.model import Account, Certificate
from seriatim.operations.prove.chain import AddedFile, replay_active_files
from seriatim.operations.prove.message_validator import (
    FirstDifference,
    ObservedMessage,
    PartitionView,
    ValidationFault,
    Validator,
    first_difference,
)
from seriatim.operations.prove.verify import Verification
from seriatim.operations.slicing import Bounds
from seriatim.ports import Audit, PastMessageReader
from seriatim.stream import Stream

MESSAGES_AT_ONCE = 5_000
OFFSET_MAX = 2**63 - 1
HARMLESS_CAUSES = ("marker", "aborted", "compacted")
"""Causes of missing offsets that are no loss."""
RECORD_COLUMNS = ("topic_id", "offset", "index", "source_offset", "session", "sequence", "op")
ProgressCallback = Callable[[int, int], None]


class ValidationResult(Struct, kw_only=True):
    """What was found."""

    messages: dict[str, int] = field(default_factory=dict)
    """By view."""
    faults: dict[str, list[ValidationFault]] = field(default_factory=dict)
    """By view: the first of each kind."""
    first_differences: list[FirstDifference] = field(default_factory=list)
    """The first of each partition."""
    notes: list[str] = field(default_factory=list)


class MessageSource(Struct, kw_only=True):
    """Where a partition's messages are in one view: their range, and how to come by them."""

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
    """Every view by the same validator; then where they part, partition by partition."""
    judges = {
        name: Validator(
            is_contiguous=name != "output",
            has_snapshots=runner.has_snapshots and _shows_snapshots(name, runner),
            is_explained=is_explained,
        )
        for name in views
    }
    done, judged = 0, ValidationResult()
    partitions = sorted({partition for places in views.values() for partition in places})
    total = sum(len(place.offset_range) for places in views.values() for place in places.values())
    for partition in partitions:
        seen: list[PartitionView] = []
        for name, places in views.items():
            if partition in places:
                seen.append(_read_view(name, places[partition], judges[name], partition))
                done += len(places[partition].offset_range)
                if progress:
                    progress(done, total)
        first = first_difference(
            partition, seen, must_give_records=_must_give_records(stream, runner)
        )
        judged.first_differences += [first] if first else []
    judged.messages = {name: judge.messages for name, judge in judges.items()}
    judged.faults = {name: list(judge.faults.values()) for name, judge in judges.items()}
    if len(views) > 1 and "output" in views and not _must_give_records(stream, runner):
        judged.notes.append(
            "messages without a record are not judged: this machine or tier may give none"
        )
    return judged


def _shows_snapshots(view: str, runner: Runner) -> bool:
    """Whether snapshots can be told there: in the output only by the stock machine's op."""
    return view != "output" or not runner.may_half_change


def _must_give_records(stream: Stream, runner: Runner) -> bool:
    """Whether each message without fault leaves a record: not of users' machines, nor while
    messages may wait.
    """
    return (
        not runner.may_half_change and stream.tier != "window" and not stream.session_timeout_hours
    )


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
    for sighting, counts in validator.validate(partition, source.read()):
        view.messages.setdefault(sighting.offset, sighting)
        if counts:
            view.effective_offsets.add(sighting.offset)
    return view


def capture_sources(
    captured: Iterable[CapturedMessage], stream: Stream, runner: Runner
) -> dict[Partition, MessageSource]:
    """What a capture has."""
    by_partition: dict[Partition, list[CapturedMessage]] = {}
    for message in captured:
        by_partition.setdefault(message.partition, []).append(message)

    def place(messages: list[CapturedMessage]) -> MessageSource:
        offsets = [message.offset for message in messages]
        keys, values = (
            [message.key for message in messages],
            [message.value for message in messages],
        )
        span = OffsetRange(min(offsets), max(offsets) + 1)
        return MessageSource(
            offset_range=span, read=lambda: observe_messages(stream, runner, offsets, keys, values)
        )

    return {partition: place(messages) for partition, messages in by_partition.items()}


def kafka_sources(
    past_reader: PastMessageReader,
    bounds: Mapping[Partition, Bounds],
    stream: Stream,
    runner: Runner,
) -> dict[Partition, MessageSource]:
    """What Kafka has now."""

    def read(partition: Partition, whole: OffsetRange) -> Iterator[ObservedMessage]:
        for stretch in past_reader.read(partition, whole):
            offsets = range(stretch.start, stretch.start + len(stretch))
            yield from observe_messages(stream, runner, offsets, stretch.keys, stretch.values)

    def place(partition: Partition, seen: Bounds) -> MessageSource:
        whole = OffsetRange(seen.log_start, seen.log_end)
        return MessageSource(offset_range=whole, read=lambda: read(partition, whole))

    return {partition: place(partition, seen) for partition, seen in bounds.items()}


def observe_messages(
    stream: Stream,
    runner: Runner,
    offsets: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
) -> Iterator[ObservedMessage]:
    """Messages as sightings."""
    for begin in range(0, len(offsets), MESSAGES_AT_ONCE):
        part = slice(begin, begin + MESSAGES_AT_ONCE)
        messages = runner.decode(values[part])
        numbers = runner.sequences(messages)
        for offset, key, value, message, number in zip(
            offsets[part], keys[part], values[part], messages, numbers, strict=True
        ):
            seen = _observe_message(stream, runner, offset, key, message, number)
            yield replace(seen, content_hash=hash((key, value)))


def _observe_message(
    stream: Stream, runner: Runner, offset: int, key: bytes | None, message: Any, number: int | None
) -> ObservedMessage:
    if message.__class__ is Poison:
        return ObservedMessage(
            offset=offset, session=session_name_of_key(key), poison=message.cause
        )
    try:
        snapshot = runner.has_snapshots and runner.is_snapshot(message)
    except Exception as error:  # noqa: BLE001  # the user's own
        return ObservedMessage(
            offset=offset,
            session=session_name_of_key(key),
            poison=f"{type(error).__name__}: {error}",
        )
    name = runner.session(message) if stream.session_field is not None else session_name_of_key(key)
    return ObservedMessage(
        offset=offset,
        session=name,
        sequence=number,
        is_snapshot=snapshot,
        must_give_record=_must_give_record(stream, message, snapshot),
    )


def _must_give_record(stream: Stream, message: Any, snapshot: bool) -> bool:
    """Of the stock machine: an empty snapshot may give nothing; a delete too, where a missing row
    is only counted.
    """
    if snapshot:
        return bool(getattr(message, "rows", None))
    lenient = stream.tier in ("none", "order")
    return not (lenient and type(message).__name__ == "Delete")


def output_sources(
    verification: Verification, audit: Audit
) -> tuple[dict[Partition, MessageSource], list[Certificate]]:
    """What the output has of each partition's present life, and the certificates of all entries."""
    verification.open_log()
    active = replay_active_files(verification.commits)
    adds = {
        added.path: added
        for commit in verification.commits
        for added in commit.adds
        if added.path in active
    }
    certificates: list[Certificate] = []
    kept: dict[Partition, set[int]] = {}
    accounts: dict[str, Account] = {}
    gaps = GapsFold()
    for sequence in sorted(verification.signs):
        manifest = verification.manifest(sequence)
        gaps.add_entry(manifest)
        accounts = manifest.ledger.partitions
        for change in manifest.entry.changes:
            certificates += [change.certificate] if change.certificate else []
            for file in change.quarantine_files:
                rows = audit.rows(file.path, ["offset"])
                kept.setdefault(change.partition, set()).update(row["offset"] for row in rows)

    def place(name: str, account: Account) -> MessageSource:
        mine = sorted(
            (added for path, added in adds.items() if path.rpartition("/")[0] == f"records/{name}"),
            key=_first_offset,
        )
        span = OffsetRange(min(account.initial_frontier, account.frontier), account.frontier)
        read = _observe_records(audit, [added.path for added in mine], account.topic_id)
        partition = Partition.parse(name)
        headless = _headless_ranges(
            gap
            for gap in gaps.gaps
            if (gap.topic_partition, gap.topic_id) == (partition, account.topic_id)
        )
        return MessageSource(
            offset_range=span,
            read=read,
            quarantined_offsets=kept.get(partition, set()),
            headless_ranges=headless,
        )

    return {
        Partition.parse(name): place(name, account) for name, account in accounts.items()
    }, certificates


def _headless_ranges(gaps: Iterable[Gap]) -> dict[str, list[OffsetRange]]:
    """Where sessions waited for a snapshot since messages were lost."""
    found: dict[str, list[OffsetRange]] = {}
    for gap in gaps:
        if gap.session is not None and gap.finding == "gap":
            end = OFFSET_MAX if gap.until is None else gap.until
            found.setdefault(gap.session, []).append(OffsetRange(gap.start, end))
    return found


def _first_offset(added: AddedFile) -> int:
    return added.first_offset


def _observe_records(
    audit: Audit, paths: list[str], topic_id: str
) -> Callable[[], Iterator[ObservedMessage]]:
    """Records as sightings: one for each message that left any."""

    def rows() -> Iterator[dict[str, Any]]:
        for path in paths:
            yield from (
                row for row in audit.rows(path, RECORD_COLUMNS) if row["topic_id"] == topic_id
            )

    def read() -> Iterator[ObservedMessage]:
        for (offset, session), group in groupby(
            rows(), key=lambda row: (row["source_offset"], row["session"])
        ):
            records = list(group)
            ops = {record.get("op") for record in records}
            yield ObservedMessage(
                offset=offset,
                session=session,
                sequence=records[0]["sequence"],
                is_snapshot=None if ops == {None} else "snapshot" in ops,
                is_session_end=ops == {"delete"},
            )

    return read


def holes_explained_by(
    certificates: Iterable[Certificate],
) -> Callable[[Partition, OffsetRange], bool]:
    """Whether certificates name a cause for as many missing offsets as a hole has."""
    by_partition: dict[Partition, list[tuple[int, int, int]]] = {}
    for one in certificates:
        count = sum(many for cause, many in one.holes.items() if cause in HARMLESS_CAUSES)
        if count:
            by_partition.setdefault(one.partition, []).append((one.start, one.until, count))

    def explained(partition: Partition, hole: OffsetRange) -> bool:
        known = sum(
            n
            for start, end, n in by_partition.get(partition, ())
            if start < hole.end and hole.start < end
        )
        return known >= len(hole)

    return explained
