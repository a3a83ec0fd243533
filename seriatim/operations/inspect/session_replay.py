"""Session replay: fold one session of one partition again, from the nearest saved state on.

It reads and changes nothing. The commands that show the state at an offset, a trace, a break
point, the first wrong offset, or what touched a row are all built on it.

1. Choose the last ledger entry at or before the offset whose state no later repair took back and
   whose state files can be loaded.
2. Fold the session's messages from there on, as Kafka still has them.
3. Repeat between the messages what happened then without a message: a person released the session,
   or a loss was passed over by `seriatim forward`.

Where Kafka no longer has the messages, a ConfigError says so and names what can be looked at
instead.

Next: operations/inspect/tracing.py folds the messages; ledger/history.py knows the past entries;
operations/inspect/bisect.py is built on this module, as are the commands in cli/.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import shell_quote
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger import history
from seriatim.ledger.history import CommitPoint, PartitionHistory
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account
from seriatim.operations.inspect.trace_step import TraceStep
from seriatim.operations.inspect.tracing import FoldSnapshot, SessionMessage, TracingFold
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.operations.repair.lost_messages import LossDetector, MessageLoss
from seriatim.operations.repair.refold_rules import same_session
from seriatim.ports import OpenStream

ENTRIES_READ_FIRST = 64
"""How many of the newest ledger entries are read before all of them are."""
ProgressCallback = Callable[[int, int], None]
"""Called with the offsets that are read so far, and the offsets of the range."""


class ReplayPosition(Struct, frozen=True, kw_only=True):
    """A position of a session replay that `go_back` can return to, any number of times."""

    offset: int
    snapshot: FoldSnapshot
    headless_since: int


class CachedMessages(Struct, frozen=True, kw_only=True):
    """All messages of the session in a range, read once."""

    offset_range: OffsetRange
    messages: list[SessionMessage]
    offsets: list[int]

    def covers(self, offset_range: OffsetRange) -> bool:
        """Whether every message of `offset_range` would be in here."""
        starts_inside = self.offset_range.start <= offset_range.start
        ends_inside = offset_range.end <= self.offset_range.end
        return starts_inside and ends_inside

    def messages_in(self, offset_range: OffsetRange) -> list[SessionMessage]:
        """The session's messages of a range that is covered."""
        start = bisect_left(self.offsets, offset_range.start)
        end = bisect_left(self.offsets, offset_range.end)
        return self.messages[start:end]


class PastIntervention(Struct, frozen=True, kw_only=True):
    """Something that changed the session between two messages, and is repeated by a replay.

    Either a person released the session from quarantine, or messages were lost and passed over.
    """

    start: int
    """Messages before this offset are folded before it."""
    resume_offset: int
    """Messages from this offset on are folded after it. What lies between is left out."""
    is_release: bool = False


class SessionReplay:
    """One session of one partition, folded again.

    Call `begin_at` or `begin_at_or_after` first. From then on `next_offset` only grows, except by
    `go_back` and by beginning again.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        partition: Partition,
        session_name: str,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.open_stream = open_stream
        self.head = head
        self.partition = partition
        self.session_name = session_name
        self.on_progress = on_progress
        self.account: Account = head.ledger.account(partition) or raise_broken_promise(
            "a session is only replayed in a partition that the ledger knows"
        )
        self.bounds = self._checked_bounds()
        self.history = PartitionHistory()
        self._has_read_all_entries = False
        self.point: CommitPoint | None = None
        """The saved state with which the replay began."""
        self.next_offset = 0
        """The next offset to be folded."""
        self.folds_begun = 0
        """How often a fold over a range of offsets was begun."""
        self.messages_folded = 0
        """How many messages of the session were folded, in all folds together."""
        self._cached_messages: CachedMessages | None = None
        self._tracing_fold: TracingFold | None = None
        self._headless_since = -1
        self._loss_detector: LossDetector | None = None

    @property
    def tracing_fold(self) -> TracingFold:
        """The session, folded up to `next_offset`."""
        return self._tracing_fold or raise_broken_promise("a session replay was never begun")

    @property
    def committed_end(self) -> int:
        """The offset up to which the partition is committed."""
        return self.account.frontier

    # Where to begin.

    def begin_at(self, offset: int) -> None:
        """Begin at the nearest saved state at or before an offset.

        A ConfigError is raised if there is none that Kafka's messages can be folded on.
        """
        damage = ""
        for point in self._usable_points(offset):
            if point.account.frontier < self.bounds.log_start:
                break
            reason = self._try_begin(point)
            if not reason:
                return
            # An older state may still be intact. The newest damage is reported if none is.
            damage = damage or reason
        raise self._unreachable_error(offset, damage)

    def begin_at_or_after(self, offset: int) -> None:
        """Begin at or before an offset, or else at the first saved state after it that will do.

        A ConfigError is raised if there is neither.
        """
        try:
            self.begin_at(offset)
        except ConfigError:
            if not self._try_begin_after(offset):
                raise

    def _try_begin_after(self, offset: int) -> bool:
        """Begin at the first saved state after an offset; return whether there is one."""
        self._read_history(all_entries=True)
        earliest = max(offset + 1, self.bounds.log_start)
        usable = self.history.usable_points(self.committed_end)
        for point in sorted(usable, key=_offset_of_point):
            if point.account.frontier >= earliest and not self._try_begin(point):
                return True
        return False

    def _try_begin(self, point: CommitPoint) -> str:
        """Begin at a saved state. The text that comes back says why that is impossible, if it is."""
        try:
            saved_session = self._load_session(point.account)
        except IntegrityError as error:
            return error.message
        self._begin_fold(point, saved_session)
        return ""

    def first_message_offset(self, first_effect_offset: int) -> int:
        """The offset at or before which the session's messages begin.

        It is known where its first message with an effect lies (-1: there was none). Headless
        messages have no effect and may lie before it.
        """
        first_offset = first_effect_offset
        if first_offset < 0:
            first_offset = self.account.initial_frontier
        if not self.account.headless:
            return first_offset
        self._read_history(all_entries=True)
        for proof in self.history.slice_proofs():
            if proof.headless:
                first_offset = min(first_offset, proof.start)
        return first_offset

    def saved_points(self) -> list[CommitPoint]:
        """All commits whose state belongs to the topic as it is today, by rising offset."""
        self._read_history(all_entries=True)
        return self.history.commit_points(0, self.committed_end)

    # Folding on.

    def fold_to(self, offset: int) -> None:
        """Fold on up to but without an offset, without tracing."""
        self._count_fold(offset)
        for messages in self._message_lists(offset):
            self.messages_folded += self.tracing_fold.fold_untraced(messages)

    def steps(self, until: int) -> Iterator[TraceStep]:
        """Fold on up to an offset: one message whenever the caller takes the next step."""
        for message in self.next_messages(until):
            yield self.step(message)

    def chosen_steps(
        self, until: int, is_chosen: Callable[[SessionMessage], bool]
    ) -> Iterator[TraceStep]:
        """Fold on up to an offset, and trace only the messages that are chosen."""
        for message in self.chosen_messages(until, is_chosen):
            yield self.step(message)

    def chosen_messages(
        self, until: int, is_chosen: Callable[[SessionMessage], bool]
    ) -> Iterator[SessionMessage]:
        """The chosen messages up to an offset, each when all messages before it are folded.

        The caller must fold the message by `step` before taking the next.
        """
        self._count_fold(until)
        for messages in self._message_lists(until):
            not_folded: list[SessionMessage] = []
            for message in messages:
                if not is_chosen(message):
                    not_folded.append(message)
                    continue
                self.messages_folded += self.tracing_fold.fold_untraced(not_folded)
                not_folded = []
                yield message
            self.messages_folded += self.tracing_fold.fold_untraced(not_folded)

    def next_messages(self, until: int) -> Iterator[SessionMessage]:
        """The session's messages up to an offset.

        The caller must fold each by `step` before taking the next.
        """
        self._count_fold(until)
        for messages in self._message_lists(until):
            yield from messages

    def step(self, message: SessionMessage) -> TraceStep:
        """Fold one message, and return what it did."""
        self.messages_folded += 1
        # The generator that yielded the message sets `next_offset` only at its end, and the
        # caller may stop before.
        self.next_offset = message.offset + 1
        return self.tracing_fold.trace_message(message)

    def differs_from_saved(self) -> bool:
        """Whether state was saved exactly here and differs from the folded state.

        Then the machine or the stream's file changed since it was saved.
        """
        points = self.history.commit_points(self.next_offset, self.next_offset)
        if not points:
            return False
        try:
            saved_session = self._load_session(points[0].account)
        except IntegrityError:
            # The files are deleted or damaged: there is nothing to compare with.
            return False
        folded_session = self.tracing_fold.session_to_save()
        return not same_session(folded_session, saved_session, self.open_stream.runner)

    def current_position(self) -> ReplayPosition:
        """The current position, for `go_back`."""
        return ReplayPosition(
            offset=self.next_offset,
            snapshot=self.tracing_fold.take_snapshot(),
            headless_since=self._headless_since,
        )

    def go_back(self, position: ReplayPosition) -> None:
        """Return to a position from before. It can be used again."""
        self.next_offset = position.offset
        self._headless_since = position.headless_since
        self.tracing_fold.restore_snapshot(position.snapshot)
        self.tracing_fold.begin_doubt_after_loss(position.headless_since)

    def cache_messages(self, until: int) -> list[int]:
        """Read the session's messages up to an offset once, and return their offsets.

        Folds within that range then read nothing more.
        """
        offset_range = OffsetRange(self.next_offset, until)
        messages: list[SessionMessage] = []
        for batch in self._batches_in(offset_range):
            messages.extend(self.tracing_fold.session_messages(batch))
        offsets = [message.offset for message in messages]
        self._cached_messages = CachedMessages(
            offset_range=offset_range, messages=messages, offsets=offsets
        )
        return offsets

    def _count_fold(self, until: int) -> None:
        if self.next_offset < until:
            self.folds_begun += 1

    def _load_session(self, account: Account) -> Session | None:
        """The session as it was saved; None: it was not. An IntegrityError tells of damaged files."""
        saved_sessions = self.open_stream.state.load(account.state, [self.session_name])
        return saved_sessions.get(self.session_name)

    def _checked_bounds(self) -> Bounds:
        """What Kafka has of the partition; a ConfigError if it is another topic by now."""
        bounds = self.open_stream.log.bounds(self.open_stream.stream.topics).get(self.partition)
        if bounds is not None and bounds.topic_id == self.account.topic_id:
            return bounds
        problem = "was made again: its messages of before are gone"
        if bounds is None:
            problem = "is not in Kafka any more"
        stream_name = self.open_stream.stream.name
        raise ConfigError(
            f"{stream_name}: topic {self.partition.topic} {problem}",
            next=f"seriatim state {stream_name} SESSION --version N shows what was saved by entry N;"
            f" last is {self.head.ledger.sequence}",
        )

    # The history of the partition.

    def _usable_points(self, offset: int) -> Iterator[CommitPoint]:
        """Commits with usable state at or before an offset, newest first.

        Older ledger entries are only read if the newest ones are not enough.
        """
        yielded_points = 0
        for all_entries in (False, True):
            self._read_history(all_entries=all_entries)
            # The list of the newest entries is the beginning of the list of all of them, so
            # the second round goes on where the first one ended.
            for point in list(self.history.usable_points(offset))[yielded_points:]:
                yielded_points += 1
                yield point

    def _read_history(self, *, all_entries: bool) -> None:
        """Read the newest ledger entries, or all, unless that was done already."""
        has_read_enough = bool(self.history.points) and not all_entries
        if self._has_read_all_entries or has_read_enough:
            return
        head_sequence = self.head.ledger.sequence
        after_sequence = -1
        if not all_entries:
            after_sequence = max(-1, head_sequence - ENTRIES_READ_FIRST)
        # Entries after the head that this replay looks at were committed in the meantime.
        entries = (
            stored
            for stored in self.open_stream.ledger.entries(self.head.ledger.stream, after_sequence)
            if stored.entry.sequence <= head_sequence
        )
        self.history = history.read_histories(entries, [self.partition])[self.partition]
        # It was built from the proofs of the old history.
        self._loss_detector = None
        self._has_read_all_entries = after_sequence < 0
        if not self.history.points:
            self._read_history(all_entries=True)

    def _begin_fold(self, point: CommitPoint, saved_session: Session | None) -> None:
        self.point = point
        self.next_offset = point.account.frontier
        self._headless_since = point.account.headless_since
        moved_sessions = {}
        if self._is_moved_session():
            moved_sessions[self.session_name] = self._home_partition()
        self._tracing_fold = TracingFold(
            self.open_stream.stream,
            self.open_stream.runner,
            self.partition,
            self.session_name,
            saved_session,
            message_time_ms=point.account.message_time_ms,
            headless_since=self._headless_since,
            moved_sessions=moved_sessions,
        )

    def _is_moved_session(self) -> bool:
        """Whether it was reported that the session belongs to another partition."""
        for finding, _, session_name in self.history.reported_findings:
            if finding == "moved session" and session_name == self.session_name:
                return True
        return False

    def _home_partition(self) -> str:
        """The partition of the topic that has state of the session."""
        for partition_name, account in self.head.ledger.partitions.items():
            partition = Partition.parse(partition_name)
            if partition == self.partition or partition.topic != self.partition.topic:
                continue
            if self.open_stream.state.find_names(account.state, [self.session_name]):
                return partition_name
        return "another partition"

    # The messages, and what happened between them.

    def _message_lists(self, until: int) -> Iterator[list[SessionMessage]]:
        """The session's messages up to an offset, in lists.

        The caller folds a list before it takes the next: between two lists, interventions of the
        past are repeated on the folded session. At the end `next_offset` is `until`.
        """
        interventions = self._interventions_before(until)
        offset_range = OffsetRange(self.next_offset, max(self.next_offset, until))
        for messages in self._messages_in(offset_range):
            rest = messages
            while interventions and rest and rest[-1].offset >= interventions[0].resume_offset:
                intervention = interventions.pop(0)
                offsets = [message.offset for message in rest]
                yield rest[: bisect_left(offsets, intervention.start)]
                self._repeat_intervention(intervention)
                rest = rest[bisect_left(offsets, intervention.resume_offset) :]
            yield rest
        for intervention in interventions:
            self._repeat_intervention(intervention)
        self.next_offset = offset_range.end

    def _interventions_before(self, until: int) -> list[PastIntervention]:
        """What has to be repeated from `next_offset` up to `until`, in order."""
        interventions = []
        for offset, names in self.history.releases_by_hand().items():
            if self.session_name in names and self.next_offset < offset <= until:
                release = PastIntervention(start=offset, resume_offset=offset, is_release=True)
                interventions.append(release)
        for lost_range in self.history.passed_ranges():
            if self.next_offset < lost_range.end <= until:
                loss = PastIntervention(start=lost_range.start, resume_offset=lost_range.end)
                interventions.append(loss)
        # At the same offset the loss comes first: the release frees a session that is in doubt.
        interventions.sort(key=lambda it: (it.resume_offset, it.is_release))
        return interventions

    def _repeat_intervention(self, intervention: PastIntervention) -> None:
        tracing_fold = self.tracing_fold
        if not intervention.is_release:
            self._headless_since = intervention.resume_offset
            tracing_fold.begin_doubt_after_loss(intervention.resume_offset)
            return
        account = replace(self.account, headless_since=self._headless_since)
        session = tracing_fold.session_to_save()
        if can_be_released(session, account):
            tracing_fold.session = clear_finding(session, account, self.open_stream.stream.tier)

    def _messages_in(self, offset_range: OffsetRange) -> Iterator[list[SessionMessage]]:
        """The session's messages of a range: from the cache, or batch by batch from Kafka."""
        cached = self._cached_messages
        if cached is not None and cached.covers(offset_range):
            yield cached.messages_in(offset_range)
            return
        for batch in self._batches_in(offset_range):
            yield list(self.tracing_fold.session_messages(batch))

    def _batches_in(self, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """What Kafka has of a range.

        A ConfigError is raised where messages are gone that were folded when it was committed:
        without them the fold would come to another state.
        """
        if len(offset_range):
            self._refuse_cut_log(min(offset_range.end, self.committed_end))
        end = min(offset_range.end, self.bounds.log_end)
        readable = OffsetRange(offset_range.start, max(offset_range.start, end))
        if self._loss_detector is None:
            self._loss_detector = LossDetector(
                self.partition, self.history.slice_proofs(), self.open_stream.past_reader
            )
        for batch in self._loss_detector.read_and_detect(readable, self._refuse_loss):
            if self.on_progress is not None:
                self.on_progress(batch.start - readable.start, len(readable))
            yield batch

    # Errors.

    def _refuse_cut_log(self, end: int) -> None:
        log_end = self.bounds.log_end
        if log_end < end:
            raise ConfigError(
                f"{self.open_stream.stream.name}: {self.partition}: its log was cut at offset {log_end}:"
                f" the messages from there to {end} that were folded are not in Kafka any more",
                next=self._describe_alternatives(log_end),
            )

    def _refuse_loss(self, loss: MessageLoss) -> None:
        raise ConfigError(
            f"{self.open_stream.stream.name}: {self.partition}: {loss}:"
            " folding the rest would tell something else than what was",
            next=self._describe_alternatives(loss.offset_range.end, is_certain=False),
        )

    def _unreachable_error(self, offset: int, damage: str) -> ConfigError:
        """The error for an offset that no saved state leads to."""
        stream_name = self.open_stream.stream.name
        initial_frontier = self.account.initial_frontier
        if not damage and offset < initial_frontier:
            return ConfigError(
                f"{stream_name}: {self.partition} is folded from offset {initial_frontier} on,"
                f" {offset} is before it",
                next=f"give an offset from {initial_frontier} to {self.committed_end - 1}",
            )
        reason = damage or self._describe_missing_messages(offset)
        return ConfigError(
            f"{stream_name}: {self.partition} cannot be folded to offset {offset} again: {reason}",
            kafka=self._describe_kafka_bounds(),
            next=self._describe_alternatives(offset),
        )

    def _describe_missing_messages(self, offset: int) -> str:
        for point in self.history.usable_points(offset):
            return (
                f"the messages from {point.account.frontier} on, where the last state before it"
                " was saved, are not in Kafka any more"
            )
        return "no state before it is saved"

    def _describe_kafka_bounds(self) -> str:
        start = self.bounds.log_start
        end = self.bounds.log_end
        if start < end:
            return f"it has offsets {start} to {end - 1}"
        return f"it has no message; the next is offset {end}"

    def _describe_alternatives(self, offset: int, *, is_certain: bool = True) -> str:
        """What can be looked at instead of an offset: saved states around it, and later offsets.

        `is_certain` is False where messages after the later state may be missing as well.
        """
        self._read_history(all_entries=True)
        points = self.history.commit_points(0, self.committed_end)
        point_before = self._first_loadable(reversed(points), 0, offset)
        earliest = max(offset + 1, self.bounds.log_start)
        point_after = self._first_loadable(iter(points), earliest, self.committed_end)
        shown_points = [point_before, point_after]
        lines = [
            self._describe_saved_state(point)
            for point in shown_points
            if point is not None and self._has_state_of_session(point)
        ]
        if point_after is not None:
            start = point_after.account.frontier
            if is_certain:
                lines.append(f"every offset from {start} on can be looked at")
            else:
                lines.append(f"begin at offset {start}: --from {start}")
        return "\n".join(lines) or "nothing of it is left to look at"

    def _first_loadable(
        self, points: Iterator[CommitPoint], start: int, end: int
    ) -> CommitPoint | None:
        """The first of `points` from offset `start` to `end`, both included, that can be loaded."""
        for point in points:
            if start <= point.account.frontier <= end and self._can_load(point):
                return point
        return None

    def _has_state_of_session(self, point: CommitPoint) -> bool:
        return bool(self.open_stream.state.find_names(point.account.state, [self.session_name]))

    def _describe_saved_state(self, point: CommitPoint) -> str:
        return (
            f"seriatim state {self.open_stream.stream.name} {shell_quote(self.session_name)}"
            f" --topic {self.partition.topic} --version {point.sequence}"
            f" shows it as saved at offset {point.account.frontier}"
        )

    def _can_load(self, point: CommitPoint) -> bool:
        try:
            self._load_session(point.account)
        except IntegrityError:
            return False
        return True


def _offset_of_point(point: CommitPoint) -> int:
    return point.account.frontier
