"""Validate: `verify --at`: messages judged where they are, and the first place where raw, Kafka and output part.

One partition at a time is held in memory, in as many views as were asked for.

Next room: core/validator.py judges; steps/verify.py looks at files instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.chain import Added, active_files
from seriatim.core.gaps import Gap, GapsFold
from seriatim.core.ledger import Account, Certificate
from seriatim.core.machine import Runner
from seriatim.core.message import Captured, Poison, session_name
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Bounds
from seriatim.core.stream import Stream
from seriatim.core.validator import Parting, Sighting, Validator, View, Wrong, parting
from seriatim.ports import Audit, Reread
from seriatim.steps.verify import Verifying

MESSAGES_MAX = 5_000
OFFSET_MAX = 2**63 - 1
HARMLESS = ("marker", "aborted", "compacted")
"""Causes of missing offsets that are no loss."""
RECORD_COLUMNS = ("topic_id", "offset", "index", "source_offset", "session", "sequence", "op")
Progress = Callable[[int, int], None]


class Judged(Struct, kw_only=True):
    """What was found."""

    messages: dict[str, int] = field(default_factory=dict)
    """By view."""
    wrongs: dict[str, list[Wrong]] = field(default_factory=dict)
    """By view: the first of each kind."""
    partings: list[Parting] = field(default_factory=list)
    """The first of each partition."""
    notes: list[str] = field(default_factory=list)


class Place(Struct, kw_only=True):
    """Where a partition's messages are in one view: their range, and how to come by them."""

    span: OffsetRange
    read: Callable[[], Iterable[Sighting]]
    kept: set[int] = field(default_factory=set)
    headless: dict[str, list[OffsetRange]] = field(default_factory=dict)


Places = Mapping[Partition, Place]


def judge(
    stream: Stream,
    runner: Runner,
    views: Mapping[str, Places],
    explained: Callable[[Partition, OffsetRange], bool],
    progress: Progress | None = None,
) -> Judged:
    """Every view by the same validator; then where they part, partition by partition."""
    judges = {
        name: Validator(
            contiguous=name != "output",
            has_snapshots=runner.has_snapshots and _tells(name, runner),
            explained=explained,
        )
        for name in views
    }
    done, judged = 0, Judged()
    partitions = sorted({partition for places in views.values() for partition in places})
    total = sum(len(place.span) for places in views.values() for place in places.values())
    for partition in partitions:
        seen: list[View] = []
        for name, places in views.items():
            if partition in places:
                seen.append(_view(name, places[partition], judges[name], partition))
                done += len(places[partition].span)
                if progress:
                    progress(done, total)
        first = parting(partition, seen, must_give=_must_give(stream, runner))
        judged.partings += [first] if first else []
    judged.messages = {name: judge.messages for name, judge in judges.items()}
    judged.wrongs = {name: list(judge.wrongs.values()) for name, judge in judges.items()}
    if len(views) > 1 and "output" in views and not _must_give(stream, runner):
        judged.notes.append("messages without a record are not judged: this machine or tier may give none")
    return judged


def _tells(view: str, runner: Runner) -> bool:
    """Whether snapshots can be told there: in the output only by the stock machine's op."""
    return view != "output" or not runner.may_half_change


def _must_give(stream: Stream, runner: Runner) -> bool:
    """Whether each message without fault leaves a record: not of users' machines, nor while messages may wait."""
    return not runner.may_half_change and stream.tier != "window" and not stream.session_timeout_hours


def _view(name: str, place: Place, judge: Validator, partition: Partition) -> View:
    view = View(name=name, span=place.span, seen={}, kept=place.kept, headless=place.headless, whole=name != "output")
    for sighting, counts in judge.walk(partition, place.read()):
        view.seen.setdefault(sighting.offset, sighting)
        if counts:
            view.clean.add(sighting.offset)
    return view


def raw_places(captured: Iterable[Captured], stream: Stream, runner: Runner) -> dict[Partition, Place]:
    """What a capture has."""
    by_partition: dict[Partition, list[Captured]] = {}
    for message in captured:
        by_partition.setdefault(message.partition, []).append(message)

    def place(messages: list[Captured]) -> Place:
        offsets = [message.offset for message in messages]
        keys, values = [message.key for message in messages], [message.value for message in messages]
        span = OffsetRange(min(offsets), max(offsets) + 1)
        return Place(span=span, read=lambda: sightings(stream, runner, offsets, keys, values))

    return {partition: place(messages) for partition, messages in by_partition.items()}


def kafka_places(
    reread: Reread, bounds: Mapping[Partition, Bounds], stream: Stream, runner: Runner
) -> dict[Partition, Place]:
    """What Kafka has now."""

    def read(partition: Partition, whole: OffsetRange) -> Iterator[Sighting]:
        for stretch in reread.read(partition, whole):
            offsets = range(stretch.start, stretch.start + len(stretch))
            yield from sightings(stream, runner, offsets, stretch.keys, stretch.values)

    def place(partition: Partition, seen: Bounds) -> Place:
        whole = OffsetRange(seen.log_start, seen.log_end)
        return Place(span=whole, read=lambda: read(partition, whole))

    return {partition: place(partition, seen) for partition, seen in bounds.items()}


def sightings(
    stream: Stream,
    runner: Runner,
    offsets: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
) -> Iterator[Sighting]:
    """Messages as sightings."""
    for begin in range(0, len(offsets), MESSAGES_MAX):
        part = slice(begin, begin + MESSAGES_MAX)
        messages = runner.decode(values[part])
        numbers = runner.sequences(messages)
        for offset, key, value, message, number in zip(
            offsets[part], keys[part], values[part], messages, numbers, strict=True
        ):
            seen = _sighting(stream, runner, offset, key, message, number)
            yield replace(seen, content=hash((key, value)))


def _sighting(
    stream: Stream, runner: Runner, offset: int, key: bytes | None, message: Any, number: int | None
) -> Sighting:
    if message.__class__ is Poison:
        return Sighting(offset=offset, session=session_name(key), poison=message.cause)
    try:
        snapshot = runner.has_snapshots and runner.is_snapshot(message)
    except Exception as error:  # noqa: BLE001  # the user's own
        return Sighting(offset=offset, session=session_name(key), poison=f"{type(error).__name__}: {error}")
    name = runner.session(message) if stream.session_field is not None else session_name(key)
    return Sighting(
        offset=offset, session=name, sequence=number, snapshot=snapshot, gives=_gives(stream, message, snapshot)
    )


def _gives(stream: Stream, message: Any, snapshot: bool) -> bool:
    """Of the stock machine: an empty snapshot may give nothing; a delete too, where a missing row is only counted."""
    if snapshot:
        return bool(getattr(message, "rows", None))
    lenient = stream.tier in ("none", "order")
    return not (lenient and type(message).__name__ == "Delete")


def output_places(verifying: Verifying, audit: Audit) -> tuple[dict[Partition, Place], list[Certificate]]:
    """What the output has of each partition's present life, and the certificates of all entries."""
    verifying.open_log()
    active = active_files(verifying.commits)
    adds = {added.path: added for commit in verifying.commits for added in commit.adds if added.path in active}
    certificates: list[Certificate] = []
    kept: dict[Partition, set[int]] = {}
    accounts: dict[str, Account] = {}
    gaps = GapsFold()
    for sequence in sorted(verifying.signs):
        manifest = verifying.manifest(sequence)
        gaps.take(manifest)
        accounts = manifest.ledger.partitions
        for change in manifest.entry.changes:
            certificates += [change.certificate] if change.certificate else []
            for file in change.kept:
                rows = audit.rows(file.path, ["offset"])
                kept.setdefault(change.partition, set()).update(row["offset"] for row in rows)

    def place(name: str, account: Account) -> Place:
        mine = sorted(
            (added for path, added in adds.items() if path.rpartition("/")[0] == f"records/{name}"), key=_by_offset
        )
        span = OffsetRange(min(account.born, account.frontier), account.frontier)
        read = _records_of(audit, [added.path for added in mine], account.topic_id)
        partition = Partition.parse(name)
        headless = _headless(gap for gap in gaps.gaps if (gap.place, gap.topic_id) == (partition, account.topic_id))
        return Place(span=span, read=read, kept=kept.get(partition, set()), headless=headless)

    return {Partition.parse(name): place(name, account) for name, account in accounts.items()}, certificates


def _headless(gaps: Iterable[Gap]) -> dict[str, list[OffsetRange]]:
    """Where sessions waited for a snapshot since messages were lost."""
    found: dict[str, list[OffsetRange]] = {}
    for gap in gaps:
        if gap.session is not None and gap.finding == "gap":
            end = OFFSET_MAX if gap.until is None else gap.until
            found.setdefault(gap.session, []).append(OffsetRange(gap.start, end))
    return found


def _by_offset(added: Added) -> int:
    return added.first


def _records_of(audit: Audit, paths: list[str], topic_id: str) -> Callable[[], Iterator[Sighting]]:
    """Records as sightings: one for each message that left any."""

    def rows() -> Iterator[dict[str, Any]]:
        for path in paths:
            yield from (row for row in audit.rows(path, RECORD_COLUMNS) if row["topic_id"] == topic_id)

    def read() -> Iterator[Sighting]:
        for (offset, session), group in groupby(rows(), key=lambda row: (row["source_offset"], row["session"])):
            records = list(group)
            ops = {record.get("op") for record in records}
            yield Sighting(
                offset=offset,
                session=session,
                sequence=records[0]["sequence"],
                snapshot=None if ops == {None} else "snapshot" in ops,
                ends=ops == {"delete"},
            )

    return read


def explained_by(certificates: Iterable[Certificate]) -> Callable[[Partition, OffsetRange], bool]:
    """Whether certificates name a cause for as many missing offsets as a hole has."""
    by_partition: dict[Partition, list[tuple[int, int, int]]] = {}
    for one in certificates:
        count = sum(many for cause, many in one.holes.items() if cause in HARMLESS)
        if count:
            by_partition.setdefault(one.partition, []).append((one.start, one.until, count))

    def explained(partition: Partition, hole: OffsetRange) -> bool:
        known = sum(n for start, end, n in by_partition.get(partition, ()) if start < hole.end and hole.start < end)
        return known >= len(hole)

    return explained
