"""Rewind: back to a saved state, and on from there with the messages as they were. Repair, backfill,
replay and session replay (trace, state, bisect, explain, break points) share this one way back.

1. `LedgerHistory` reads the manifests, each of them once: which state was saved at which offset, and
   what happened between two messages.
2. `RewindChooser` chooses the nearest saved state at or before an offset: no later repair took it
   back, its files are as committed, and Kafka has every message since.
3. `LossDetector` reads the messages since then again, and reports those that are gone.
4. `Rewind` knows what has to be repeated between the messages: a person released sessions, or a
   forward passed over messages that were lost.

What this module refuses or misses, it says by values; each command has its own advice. Nothing is
changed here.

Next: operations/repair/refold.py folds a rewind and commits; operations/inspect/replay.py folds it
into a folder, operations/inspect/session_replay.py one session of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import File, Files, StateStore
from seriatim.engine.findings import Tier, list_some
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Bounds, BoundsByPartition, OffsetRange, Partition
from seriatim.engine.row_parts import summarize_state_bytes
from seriatim.engine.session import STORED_FIELDS, Session, SessionsByName, SwappedRanges
from seriatim.errors import ConfigError, IntegrityError, ensure
from seriatim.ledger.entries import (
    AcceptEntry,
    Entry,
    HoldEntry,
    RepairEntry,
    SliceEntry,
    StartEntry,
)
from seriatim.ledger.gaps import Gap, GapsFold
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.ports import Joiner, LedgerStore, PastMessageReader

END_OFFSET = 1 << 62
"""An offset after every offset of a log."""
DAMAGES_NAMED_MAX = 5
"""Damages that a reason names. It goes into the ledger, and a stream may have thousands of files."""
COUNTED_OFFSETS_MAX = 50_000
"""How many offsets are counted at a time: several small slices are counted in one reading."""
NOT_COMPARED_FIELDS = ("state_bytes", "state_version", "first_offset")
"""States are compared after upgrade, and no later output depends on where a session began."""
COMPARED_FIELDS = [name for name in STORED_FIELDS if name not in NOT_COMPARED_FIELDS]
"""The fields of a session, besides its state, on which everything that comes later depends."""


# The past of a partition


class CommitPoint(Struct, frozen=True):
    """A partition after one entry that changed it."""

    sequence: int
    entry_type: type[Entry]
    account: Account
    change: Change

    @property
    def is_repair(self) -> bool:
        """Whether a repair made it."""
        return self.entry_type is RepairEntry

    @property
    def is_cut(self) -> bool:
        """Whether this is a repair that followed a truncated log back.

        What was folded behind its end is void, and new messages take those offsets again.
        """
        return self.is_repair and self.change.until < self.change.frontier


class FileOrigin(Struct, frozen=True):
    """A record file, and the entry range from which it came."""

    file: File
    topic_id: str
    start: int
    """Where a refold of this file begins."""
    until: int


class SliceProof(Struct, frozen=True):
    """How many messages a slice folded of its range. A refold of the range must find as many."""

    start: int
    until: int
    messages: int
    headless: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether no offset was missing. A hole that is there now is then a loss."""
        return self.messages == self.until - self.start


class PartitionHistory(Struct):
    """The points of one partition, oldest first, and its record files by path."""

    points: list[CommitPoint] = field(default_factory=list)
    record_files: dict[str, FileOrigin] = field(default_factory=dict)
    reported_findings: set[tuple[str, int, str | None]] = field(default_factory=set)
    """Findings that entries reported about the present log: finding, offset and session of each."""
    other_record_files: dict[str, FileOrigin] = field(default_factory=dict)
    """Record files that are now in the machine's other tables."""

    def add_entry(self, manifest: Manifest, change: Change) -> None:
        """Add one more entry, by what it changed in this partition."""
        entry = manifest.entry
        account = manifest.ledger.partitions[str(change.partition)]
        # An accept may begin a new topic id, but the files that it writes belong to the old one.
        topic_id = change.topic_id
        if self.points and isinstance(entry, AcceptEntry):
            topic_id = self.points[-1].account.topic_id
        self._add_files(entry, change, topic_id)
        point = CommitPoint(entry.sequence, type(entry), account, change)
        self._update_findings(entry, point)
        self.points.append(point)

    def _add_files(
        self,
        entry: Entry,
        change: Change,
        topic_id: str,
    ) -> None:
        for file in change.records:
            if isinstance(entry, SliceEntry | StartEntry):
                origin = FileOrigin(file, topic_id, change.frontier, change.until)
            else:
                origin = _origin_by_own_offsets(file, topic_id)
            self.record_files[file.path] = origin
        for path in entry.removed_paths:
            self.other_record_files.pop(path, None)
        for files in change.other_records.values():
            for file in files:
                self.other_record_files[file.path] = _origin_by_own_offsets(file, topic_id)

    def _update_findings(self, entry: Entry, point: CommitPoint) -> None:
        """Drop the findings that a cut or a new topic made void, and add those of the entry."""
        if point.is_cut:
            cut_offset = point.change.until
            still_valid = {
                reported for reported in self.reported_findings if reported[1] < cut_offset
            }
            self.reported_findings = still_valid
        elif self.points and self.points[-1].account.topic_id != point.account.topic_id:
            self.reported_findings = set()
        partition_name = str(point.change.partition)
        for finding in entry.findings:
            if finding.partition_name == partition_name:
                self.reported_findings.add((finding.finding, finding.offset, finding.session))

    @property
    def all_record_files(self) -> dict[str, FileOrigin]:
        """The record files of all tables."""
        return self.record_files | self.other_record_files

    def files_of_topic(self, topic_id: str, paths: Collection[str]) -> list[File]:
        """The files of these paths in the table of records, if they are of this topic."""
        files: list[File] = []
        for path, origin in self.record_files.items():
            if path in paths and origin.topic_id == topic_id:
                files.append(origin.file)
        return files

    def points_of_current_log(self) -> list[CommitPoint]:
        """The points of the present topic and of its log as it is: none from behind a cut."""
        points: list[CommitPoint] = []
        for point in self._points_of_current_topic():
            if point.is_cut:
                cut_offset = point.change.until
                points = [earlier for earlier in points if earlier.account.frontier <= cut_offset]
            points.append(point)
        return points

    def _points_of_current_topic(self) -> list[CommitPoint]:
        topic_id = self.points[-1].account.topic_id
        return [point for point in self.points if point.account.topic_id == topic_id]

    def usable_points(self, offset: int) -> Iterator[CommitPoint]:
        """The points at or before `offset` whose state no later repair replaced, newest first."""
        replaced_ranges: list[tuple[int, int]] = []
        for point in reversed(self.points_of_current_log()):
            frontier = point.account.frontier
            is_replaced = any(start < frontier < end for start, end in replaced_ranges)
            if frontier <= offset and not is_replaced:
                yield point
            # The repair itself is usable, so its range counts only for the points before it.
            change = point.change
            if point.is_repair and change.replaced_from >= 0:
                replaced_ranges.append((change.replaced_from, change.replaced_until))

    def passed_ranges(self) -> list[OffsetRange]:
        """The ranges that forwards passed over, in order. Their messages are lost for good."""
        ranges = []
        for point in self.points_of_current_log():
            change = point.change
            if point.is_repair and change.headless_since >= 0:
                ranges.append(OffsetRange(change.frontier, change.until))
        return ranges

    def releases_by_hand(self, after_sequence: int) -> dict[int, tuple[str, ...]]:
        """The sessions that a person released by hand after an entry, by the frontier at which it
        was done.
        """
        releases: dict[int, tuple[str, ...]] = {}
        for point in self.points_of_current_log():
            if point.entry_type is not AcceptEntry or point.sequence <= after_sequence:
                continue
            frontier = point.change.frontier
            for mark in point.change.marks:
                if mark.closed_by == "hand" and mark.session is not None:
                    releases[frontier] = (*releases.get(frontier, ()), mark.session)
        return releases

    def swapped_ranges(self, after_sequence: int) -> SwappedRanges:
        """Where repairs after an entry applied the messages of a session in the order of their
        sequences. Whoever folds these ranges again does the same.
        """
        swapped: SwappedRanges = {}
        for point in self.points_of_current_log():
            if point.sequence <= after_sequence:
                continue
            for mark in point.change.marks:
                if mark.sorted_until >= 0 and mark.session is not None:
                    offsets = (mark.offset, mark.sorted_until)
                    swapped[mark.session] = (*swapped.get(mark.session, ()), offsets)
        return swapped

    def moved_sessions(self) -> set[str]:
        """The sessions that were reported as belonging to another partition."""
        names: set[str] = set()
        for finding, _offset, session in self.reported_findings:
            if finding == "moved session" and session is not None:
                names.add(session)
        return names

    def count_messages(self, start: int, end: int) -> int | None:
        """How many messages were folded from `start` to `end`. None if no slices begin and end
        exactly there.
        """
        # A forward may pass over nothing: only its halt was lifted. To follow it would never end.
        passed = {range_.start: range_.end for range_ in self.passed_ranges() if len(range_)}
        proofs = {proof.start: proof for proof in self.slice_proofs()}
        offset = start
        count = 0
        while offset < end:
            if offset in passed:
                offset = passed[offset]
                continue
            proof = proofs.get(offset)
            if proof is None or proof.until == offset:
                return None
            offset = proof.until
            count += proof.messages
        return count if offset == end else None

    def slice_proofs(self) -> list[SliceProof]:
        """The slices of the present topic, in rising order.

        A slice in which the log was cut counts up to the cut, and only if it was dense.
        """
        proofs: dict[int, SliceProof] = {}
        for point in self._points_of_current_topic():
            change = point.change
            certificate = change.certificate
            if certificate is not None and certificate.until > certificate.start:
                proofs[certificate.start] = SliceProof(
                    certificate.start,
                    certificate.until,
                    certificate.counts.messages,
                    certificate.counts.headless,
                )
            elif change.until < change.frontier:
                proofs = _proofs_before_cut(proofs.values(), change.until)
        return sorted(proofs.values(), key=lambda proof: proof.start)

    def commit_points(self, offset: int, end: int) -> list[CommitPoint]:
        """The points from `offset` to `end` whose state is as committed, in rising order. A refold
        may meet the committed state there.
        """
        newest: dict[int, CommitPoint] = {}
        for point in self.usable_points(end):
            frontier = point.account.frontier
            if frontier >= offset:
                newest.setdefault(frontier, point)
        return [newest[frontier] for frontier in sorted(newest)]


def _origin_by_own_offsets(file: File, topic_id: str) -> FileOrigin:
    return FileOrigin(file, topic_id, file.first_offset, file.last_offset + 1)


def _proofs_before_cut(proofs: Iterable[SliceProof], cut_offset: int) -> dict[int, SliceProof]:
    """What remains proved after the log was cut at `cut_offset`, by start."""
    remaining: dict[int, SliceProof] = {}
    for proof in proofs:
        if proof.until <= cut_offset:
            remaining[proof.start] = proof
        elif proof.start < cut_offset and proof.is_dense:
            # Of a slice with holes nobody knows on which side of the cut they were.
            messages = cut_offset - proof.start
            remaining[proof.start] = SliceProof(proof.start, cut_offset, messages, proof.headless)
    return remaining


class LedgerHistory:
    """The past of a stream's partitions, up to one entry of its ledger.

    Each manifest is read once: `read_on` reads only the entries that came since.
    """

    def __init__(
        self,
        store: LedgerStore,
        stream: str,
        only: Collection[Partition] | None = None,
        after_sequence: int = -1,
    ) -> None:
        self.store = store
        self.stream = stream
        self.only = only
        """The partitions of interest; None: all of them."""
        self.sequence = after_sequence
        """The last entry that was read."""
        self.partitions: dict[Partition, PartitionHistory] = {}
        self.requests_by_hold: dict[str, str] = {}
        """What each hold was placed for."""
        self._gaps_fold = GapsFold()

    @property
    def gaps(self) -> list[Gap]:
        """The gaps as of the last entry, if all entries of all partitions were read."""
        return self._gaps_fold.gaps

    def of_partition(self, partition: Partition) -> PartitionHistory:
        """The history of one partition."""
        return self.partitions.setdefault(partition, PartitionHistory())

    def read_on(self, until_sequence: int | None = None) -> None:
        """Read the entries that came since, up to one of them, or all."""
        if until_sequence is not None and self.sequence >= until_sequence:
            return
        for manifest in self.store.entries(self.stream, self.sequence):
            if until_sequence is not None and manifest.entry.sequence > until_sequence:
                return
            self.add_entry(manifest)

    def add_entry(self, manifest: Manifest) -> None:
        """Add the next entry. What this process committed itself need not be read again."""
        entry = manifest.entry
        self.sequence = entry.sequence
        if isinstance(entry, HoldEntry) and entry.hold is not None:
            self.requests_by_hold[entry.hold] = entry.request
        if self.only is None:
            self._gaps_fold.add_entry(manifest)
        for change in entry.changes:
            if self.only is None or change.partition in self.only:
                self.of_partition(change.partition).add_entry(manifest, change)


# Where to begin


class RefoldRequest(Struct, frozen=True, kw_only=True):
    """What is to be folded again in one partition."""

    partition: Partition
    start: int
    until: int
    """Output is made again at least from `start` up to here."""
    sessions: tuple[str, ...] | None = None
    """Only these sessions; None: all."""
    swapped_ranges: SwappedRanges = field(default_factory=dict)
    """Where messages of a session were swapped, and are put into order by this refold."""
    reason: str = ""


class BaseSearch(Struct, frozen=True, kw_only=True):
    """The saved state with which to begin, or why there is none."""

    point: CommitPoint | None = None
    damage: str = ""
    """What is wrong with the newest state that is not as committed; empty: nothing."""
    expired_offset: int = -1
    """Where the newest good state was saved since which Kafka has dropped messages; -1: none was
    met.
    """


class StateFileCheck:
    """Whether saved states are as committed. Each file is looked at once."""

    def __init__(self, joiner: Joiner) -> None:
        self.joiner = joiner
        self._damage_by_path: dict[str, str] = {}
        """Of every file that was looked at; empty for one that is as committed. Saved states share
        their oldest files, so the same file comes up again and again.
        """

    def describe_damage(self, account: Account) -> str:
        """What is wrong with the state files of an account; empty: they are as committed."""
        unchecked_files = [file for file in account.state if file.path not in self._damage_by_path]
        damaged = self.joiner.find_damaged_files(unchecked_files)
        for file in unchecked_files:
            self._damage_by_path[file.path] = damaged.get(file.path, "")
        texts: list[str] = []
        for file in account.state:
            damage = self._damage_by_path[file.path]
            if damage:
                texts.append(f"{file.path}: {damage}")
        return list_some(texts, DAMAGES_NAMED_MAX, separator="; ")


class RewindChooser(Struct, frozen=True):
    """Chooses the saved state from which one partition is folded again."""

    account: Account
    """The partition as it is now."""
    log_start: int
    history: PartitionHistory
    describe_damage: Callable[[Account], str]
    """What is wrong with the state files of an account; empty: they are as committed."""

    def find_base(self, offset: int) -> BaseSearch:
        """The nearest state at or before an offset from which Kafka can be folded on."""
        # For the case that no state is usable: the reasons that a person is told.
        first_damage = ""
        first_expired = -1
        for point in self.history.usable_points(offset):
            frontier = point.account.frontier
            is_expired = frontier < self.log_start
            damage = self.describe_damage(point.account)
            if not damage and is_expired:
                return BaseSearch(damage=first_damage, expired_offset=frontier)
            if not damage:
                return BaseSearch(point=point)
            # Not an error yet: an older state may still be good.
            if is_expired:
                first_expired = max(first_expired, frontier)
            else:
                first_damage = first_damage or damage
        return BaseSearch(damage=first_damage, expired_offset=first_expired)

    def first_base_from(self, offset: int) -> CommitPoint | None:
        """The first state at or after an offset from which Kafka can be folded on, if any."""
        earliest = max(offset, self.log_start)
        usable = self.history.usable_points(self.account.frontier)
        for point in sorted(usable, key=lambda point: point.account.frontier):
            if point.account.frontier >= earliest and not self.describe_damage(point.account):
                return point
        return None

    def rewind(self, request: RefoldRequest, base: Account, sequence: int, frontier: int) -> Rewind:
        """The way from a base up to `frontier`, with what has to be repeated on it."""
        passed_ranges = [
            passed
            for passed in self.history.passed_ranges()
            if base.frontier < passed.end <= frontier
        ]
        swapped_ranges = dict(request.swapped_ranges)
        for name, ranges in self.history.swapped_ranges(sequence).items():
            swapped_ranges[name] = (*swapped_ranges.get(name, ()), *ranges)
        return Rewind(
            request=request,
            account=self.account,
            base=base,
            sequence=sequence,
            frontier=frontier,
            commit_offsets=(frontier,),
            releases_by_hand=self.history.releases_by_hand(sequence),
            passed_ranges=tuple(passed_ranges),
            swapped_ranges=swapped_ranges,
        )


def find_readable_bounds(
    bounds: BoundsByPartition, partition: Partition, account: Account
) -> tuple[Bounds | None, str]:
    """What Kafka has of the topic that was folded; None, and why, if that topic is gone."""
    partition_bounds = bounds.get(partition)
    if partition_bounds is None:
        return None, "is not in Kafka any more"
    if partition_bounds.topic_id != account.topic_id:
        return None, "was made again: its messages of before are gone"
    return partition_bounds, ""


class Rewind(Struct, frozen=True, kw_only=True):
    """The refold of one partition, as planned."""

    request: RefoldRequest
    account: Account
    """The partition as it is now."""
    base: Account
    """The partition as it was where the refold begins: its state and its frontier."""
    sequence: int
    """The ledger entry that left it so."""
    frontier: int
    """Where the partition goes on afterwards: its present frontier, or the log end if the log was
    cut.
    """
    commit_offsets: tuple[int, ...] = ()
    """Offsets at and after `until` for which there is committed state to compare with, in order.
    The last one is the frontier.
    """
    releases_by_hand: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Sessions that a person released, by frontier: they are released there again."""
    rebuilds_state: bool = False
    """The present state is not reliable: all of it is made again."""
    passed_ranges: tuple[OffsetRange, ...] = ()
    """Lost ranges that forwards passed over since the base. They are passed over again, and
    sessions are in doubt after them.
    """
    swapped_ranges: SwappedRanges = field(default_factory=dict)
    """Where messages of a session are put into order: by this refold, and by repairs before it."""

    @property
    def partition(self) -> Partition:
        """The partition that is folded again."""
        return self.request.partition

    @property
    def read_range(self) -> OffsetRange:
        """What is read again, at most."""
        return OffsetRange(self.base.frontier, self.frontier)

    @property
    def start(self) -> int:
        """Where output begins to be made again.

        This is the offset of the base, not `request.start`: records and state before it agree with
        each other, also if another version of the machine made them.
        """
        return self.base.frontier

    def headless_since(self, offset: int) -> int:
        """Where the partition went on after the last loss before an offset; -1: nothing was lost."""
        latest = self.base.headless_since
        for passed in self.passed_ranges:
            if passed.end <= offset:
                latest = max(latest, passed.end)
        return latest

    def stage_end_offsets(self, offset: int) -> Iterator[int]:
        """The offset where a stage ends, and the ends of the losses that it lies in.

        Nothing is folded between these offsets, so the state is the same at all of them.
        """
        yield offset
        for passed in self.passed_ranges:
            # A session replay may have been stopped within the loss.
            if passed.start <= offset < passed.end:
                offset = passed.end
                yield offset

    def piece_end(self, start: int, end: int) -> int:
        """The end of a piece that begins at `start`: no release by hand lies inside of it."""
        release_offsets = [offset for offset in self.releases_by_hand if start < offset < end]
        return min([end, *release_offsets])

    def next_intervention(self, start: int, end: int) -> int:
        """The first offset after `start` at which a person released sessions or a loss begins; `end`
        if there is none before it.
        """
        loss_offsets = [passed.start for passed in self.passed_ranges]
        first_offset = end
        for offset in (*self.releases_by_hand, *loss_offsets):
            if start < offset < first_offset:
                first_offset = offset
        return first_offset

    @property
    def first_commit_offset(self) -> int:
        """The first offset at which sessions may be as committed."""
        if self.rebuilds_state or not self.commit_offsets:
            return self.frontier
        return self.commit_offsets[0]


# The messages, stage by stage


class RefoldStage(Struct, frozen=True):
    """A bounded piece of the refold of a partition."""

    offset_range: OffsetRange
    ends_at_commit: bool
    """Whether there is committed state to compare with at its end."""


def plan_stages(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """The stages of a refold, in order, without the losses that were passed over.

    The state is the same before and after a loss. So a stage that is cut off by a loss may be
    compared with the committed state behind the loss.
    """
    for stage in _stages_over_losses(rewind, messages_max):
        start = stage.offset_range.start
        end = stage.offset_range.end
        for passed in rewind.passed_ranges:
            if passed.end <= start or end <= passed.start:
                continue
            if start < passed.start:
                ends_at_commit = stage.ends_at_commit and passed.end >= end
                yield RefoldStage(OffsetRange(start, passed.start), ends_at_commit)
            start = passed.end
        if start < end:
            yield RefoldStage(OffsetRange(start, end), stage.ends_at_commit)


def _stages_over_losses(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """The stages of a refold as if nothing was lost.

    First come the stages up to the first committed offset. Then come larger and larger stages up
    to the frontier: only the sessions that still differ are folded in them.
    """
    ensure(messages_max > 0, "a stage holds at least one message", messages_max=messages_max)
    start = rewind.start
    first_commit_offset = rewind.first_commit_offset
    while start < first_commit_offset:
        end = rewind.piece_end(start, min(first_commit_offset, start + messages_max))
        ends_at_commit = end == first_commit_offset and not rewind.rebuilds_state
        yield RefoldStage(OffsetRange(start, end), ends_at_commit)
        start = end
    size = max(1, first_commit_offset - rewind.start)
    while start < rewind.frontier:
        target = _next_stage_target(rewind, start, start + min(messages_max, size))
        end = rewind.piece_end(start, target)
        yield RefoldStage(OffsetRange(start, end), end in rewind.commit_offsets)
        start = end
        # Most sessions agree soon, so the first comparisons are close to each other. Those that
        # do not agree are compared less and less often.
        size *= 2


def _next_stage_target(rewind: Rewind, start: int, reach: int) -> int:
    """The last committed offset up to `reach`; if there is none, `reach` itself."""
    later_offsets = [offset for offset in rewind.commit_offsets if offset > start]
    offsets_in_reach = [offset for offset in later_offsets if offset <= reach]
    if offsets_in_reach:
        return offsets_in_reach[-1]
    return reach


def released_again(
    sessions: SessionsByName, rewind: Rewind, offset: int, tier: Tier
) -> SessionsByName:
    """Those of the sessions that a person can have released at an offset, without their findings."""
    account = replace(rewind.account, headless_since=rewind.headless_since(offset))
    released: SessionsByName = {}
    for name, session in sessions.items():
        if can_be_released(session, account):
            released[name] = clear_finding(session, account, tier)
    return released


def repeat_releases(
    rewind: Rewind, offset: int, tier: Tier, state: StateStore, files: Files, stem: str
) -> Files:
    """Release again what a person released where a stage ends; the state files after that.

    This may be at the start of the rewind: the state that the release itself saved may be damaged,
    and then the state of the entry before it, at the same frontier, is the base.
    """
    for end_offset in rewind.stage_end_offsets(offset):
        names = rewind.releases_by_hand.get(end_offset)
        if not names:
            continue
        released = released_again(state.load(files, names), rewind, end_offset, tier)
        if released:
            saved = state.save(rewind.partition, f"{stem}f{end_offset}", released, ())
            files = (*files, *saved)
    return files


def same_session(left: Session | None, right: Session | None, runner: Runner) -> bool:
    """Whether two sessions agree in everything on which later output depends, after upgrade."""
    if left is None or right is None or is_empty_session(left) or is_empty_session(right):
        return is_empty_session(left) and is_empty_session(right)
    for name in COMPARED_FIELDS:
        if getattr(left, name) != getattr(right, name):
            return False
    if left.is_head or right.is_head:
        # Which sessions are stored row by row depends on how slices were cut.
        return _count_and_digest(left) == _count_and_digest(right)
    return _current_state_bytes(left, runner) == _current_state_bytes(right, runner)


def is_empty_session(session: Session | None) -> bool:
    """Whether nothing is known of a session."""
    if session is None:
        return True
    has_finding = session.finding is not None
    return not session.has_state and not has_finding and not session.waiting_messages


def _count_and_digest(session: Session) -> tuple[int, bytes] | None:
    """How many rows a session of the table machine has, and their digest. They are known without
    reading the rows if these are stored one by one.
    """
    if session.state_bytes is not None:
        return summarize_state_bytes(session.state_bytes)
    summary = session.rows_summary
    return None if summary is None else (summary.count, summary.digest)


def _current_state_bytes(session: Session, runner: Runner) -> bytes | None:
    """The state as this machine would save it; None if there is none, or if it cannot be upgraded."""
    if session.state_bytes is None or session.state_version == runner.state_version:
        return session.state_bytes
    try:
        return runner.dump(runner.load(session.state_bytes, session.state_version))
    except Exception:  # noqa: BLE001  # The upgrade is the user's code: it may raise anything.
        return None


# Messages that are gone


class MessageLoss(Struct, frozen=True):
    """Messages of a range that are gone."""

    offset_range: OffsetRange
    missing_messages: int

    def __str__(self) -> str:
        amount = "the messages"
        if self.missing_messages < len(self.offset_range):
            amount = f"{self.missing_messages} of the messages"
        return (
            f"{amount} of {self.offset_range} are not in Kafka any more"
            " (compacted away, or deleted)"
        )


class LossDetector:
    """Reads messages of one partition again, and finds those that were folded and that Kafka has
    lost since, by compaction or deletion.

    The certificate of a slice says how many messages the slice had. If it had one at every offset,
    then every hole that is there now is a loss. If the slice had holes when it was folded
    (transaction markers, for example), a hole alone proves nothing. Then all messages of the slice
    are counted before anything behind its first hole is returned: only the count shows whether more
    is missing now.
    """

    def __init__(
        self, partition: Partition, proofs: Sequence[SliceProof], past_reader: PastMessageReader
    ) -> None:
        self.partition = partition
        self.proofs = proofs
        """What each slice folded, by rising offset."""
        self.past_reader = past_reader
        self._starts = [proof.start for proof in proofs]
        self._counted_starts: set[int] = set()
        """Where the slices begin that had holes and were counted."""

    def read_and_detect(
        self, offset_range: OffsetRange, on_loss: Callable[[MessageLoss], None]
    ) -> Iterator[MessageBatch]:
        """The messages of a range that are still there.

        `on_loss` is called with each loss, before the messages behind the loss are returned.
        """
        offset = offset_range.start
        is_complete = False
        while not is_complete:
            is_complete = True
            for batch in self._batches_and_end(OffsetRange(offset, offset_range.end)):
                hole = OffsetRange(offset, batch.start)
                if self._needs_count(hole):
                    is_complete = False
                    break
                for lost in self._lost_ranges(hole):
                    on_loss(MessageLoss(lost, len(lost)))
                if len(batch):
                    yield batch
                offset = batch.start + len(batch)
            if not is_complete:
                # The reader can read only one range at a time. So the reading above is given up
                # for the count, and begins again where it stopped.
                self._count_messages(offset, on_loss)

    def _batches_and_end(self, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range, and an empty batch at its end, so that a last hole shows."""
        if len(offset_range):
            yield from self.past_reader.read(self.partition, offset_range)
        yield MessageBatch(offset_range.end, [], [], [])

    def _proofs_from(self, offset: int) -> Iterator[SliceProof]:
        """The proofs from the one on that may contain an offset."""
        first_index = max(0, bisect_right(self._starts, offset) - 1)
        yield from self.proofs[first_index:]

    def _proofs_of_hole(self, hole: OffsetRange) -> Iterator[SliceProof]:
        """The slices that a hole lies in."""
        if not len(hole):
            return
        for proof in self._proofs_from(hole.start):
            if proof.start >= hole.end:
                return
            if proof.until > hole.start:
                yield proof

    def _has_to_be_counted(self, proof: SliceProof) -> bool:
        return not proof.is_dense and proof.start not in self._counted_starts

    def _needs_count(self, hole: OffsetRange) -> bool:
        """Whether only a count can show what a hole means."""
        return any(self._has_to_be_counted(proof) for proof in self._proofs_of_hole(hole))

    def _lost_ranges(self, hole: OffsetRange) -> Iterator[OffsetRange]:
        """What of a hole was there when it was folded."""
        for proof in self._proofs_of_hole(hole):
            if proof.is_dense:
                start = max(proof.start, hole.start)
                end = min(proof.until, hole.end)
                yield OffsetRange(start, end)

    def _count_messages(self, start: int, on_loss: Callable[[MessageLoss], None]) -> None:
        """Count the messages of the next slices that had holes, and report what is missing."""
        proofs = self._next_proofs_to_count(start)
        counts = [0] * len(proofs)
        counted_range = OffsetRange(proofs[0].start, proofs[-1].until)
        for batch in self.past_reader.read(self.partition, counted_range):
            batch_end = batch.start + len(batch)
            for i, proof in enumerate(proofs):
                overlap = min(batch_end, proof.until) - max(batch.start, proof.start)
                counts[i] += max(0, overlap)
        for proof, count in zip(proofs, counts, strict=True):
            self._counted_starts.add(proof.start)
            if count < proof.messages:
                slice_range = OffsetRange(proof.start, proof.until)
                on_loss(MessageLoss(slice_range, proof.messages - count))

    def _next_proofs_to_count(self, start: int) -> list[SliceProof]:
        """Adjacent slices from an offset on that had holes, as many as are counted at a time."""
        proofs: list[SliceProof] = []
        for proof in self._proofs_from(start):
            if proofs:
                is_adjacent = proof.start == proofs[-1].until
                if not is_adjacent or proof.until - proofs[0].start > COUNTED_OFFSETS_MAX:
                    break
            if proof.until > start and self._has_to_be_counted(proof):
                proofs.append(proof)
        return proofs


def require_same_topic(
    stream: str, partition: Partition, account: Account, bounds: Bounds | None
) -> Bounds:
    """The bounds of a partition that is folded again. A topic that is gone, or was created again,
    is refused: what can be read now are not the messages that were folded.
    """
    if bounds is None:
        loss = "its topic is not in Kafka, or matches no more"
        raise lost_messages_error(stream, partition, loss)
    if bounds.topic_id != account.topic_id:
        raise recreated_topic_error(stream, partition)
    return bounds


def recreated_topic_error(stream: str, partition: Partition) -> ConfigError:
    """The topic of a partition was created again: nothing of it can be folded again."""
    return ConfigError(
        f"{stream}: topic {partition.topic} was made again: what was folded cannot be read any more",
        next=f'seriatim accept {stream} {partition.topic} --because "…" begins its new life',
    )


def lost_messages_error(
    stream: str, partition: Partition, loss: str, *, is_halted: bool = False
) -> IntegrityError:
    """Kafka no longer has the messages that a refold needs."""
    advice = (
        "nothing was changed. Restore the messages to Kafka if you have them, or what is damaged"
        " from a backup; or choose a later --from."
    )
    if is_halted:
        advice += (
            f"\nTo go on without them: seriatim repair {stream} --partition {partition} --forward"
        )
    return IntegrityError(f"{stream}: {partition} cannot be folded again: {loss}", next=advice)
