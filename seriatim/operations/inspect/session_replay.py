"""Session replay: fold one session of one partition again, from the nearest saved state on.

It reads and changes nothing. The commands that show the state at an offset, a trace, a break
point, the first wrong offset, or what touched a row are all built on it.

1. Find the session: the partition that has its saved state.
2. Choose the last ledger entry at or before the offset whose state no later repair took back and
   whose state files can be loaded.
3. Fold the session's messages from there on, as Kafka still has them.
4. Repeat between the messages what happened then without a message: a person released the session,
   or a loss was passed over by `seriatim repair --forward`.

Where Kafka no longer has the messages, a ConfigError says so and names what can be looked at
instead.

Next: operations/rewind.py chooses the state and knows what is repeated;
operations/inspect/tracing.py folds the messages; operations/inspect/bisect.py is built on this
module, as are the commands in cli/.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import shell_quote
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Ledger
from seriatim.operations.inspect.tracing import FoldSnapshot, SessionMessage, TraceStep, TracingFold
from seriatim.operations.locate_session import locate_session, split_off_newest
from seriatim.operations.rewind import (
    BaseSearch,
    CommitPoint,
    LedgerHistory,
    LossDetector,
    MessageLoss,
    PartitionHistory,
    RefoldRequest,
    Rewind,
    RewindChooser,
    find_readable_bounds,
    released_again,
    same_session,
)
from seriatim.ports import OpenStream, ProgressCallback

ENTRIES_READ_FIRST = 64
"""How many of the newest ledger entries are read before all of them are."""

FIND_BY_PARTITION = (
    ";\na session whose messages never had an effect is found by --partition TOPIC/NUMBER"
)


class SessionLocation(Struct, kw_only=True):
    """The partition of a session, and the session as it was saved there."""

    partition: Partition
    session: Session
    other_sessions: dict[Partition, Session] = field(default_factory=dict)
    """The session in other partitions of the topic, where it may be in quarantine."""


def find_session(
    open_stream: OpenStream,
    head: LedgerHead,
    name: str,
    topic: str | None = None,
    partition: Partition | None = None,
) -> SessionLocation:
    """The partition that has the session's state: of several, where its last message came.

    A ConfigError is raised if no partition has it, or if partitions of several topics have it and
    `topic` names none of them. A `partition` that is given is taken, whether it has state or not.
    """
    if partition is not None:
        return _location_in_partition(open_stream, head.ledger, name, partition)
    stream_name = open_stream.stream.name
    sessions: dict[Partition, Session] = {}
    candidates = locate_session(
        open_stream.state, head.ledger, name, topic, further_advice=FIND_BY_PARTITION
    )
    for candidate in candidates:
        account = head.ledger.partitions[str(candidate)]
        sessions[candidate] = open_stream.state.load(account.state, [name])[name]
    topics = sorted({session_partition.topic for session_partition in sessions})
    if len(topics) > 1:
        raise ConfigError(
            f"{stream_name}: session {name!r} lives in {', '.join(topics)}",
            next="choose one with --topic",
        )
    newest, other_sessions = split_off_newest(sessions)
    return SessionLocation(
        partition=newest, session=sessions[newest], other_sessions=other_sessions
    )


def _location_in_partition(
    open_stream: OpenStream, ledger: Ledger, name: str, partition: Partition
) -> SessionLocation:
    account = ledger.account(partition)
    if account is None:
        partition_names = ", ".join(list(ledger.partitions)[:8])
        raise ConfigError(
            f"{open_stream.stream.name}: it has no partition {partition}",
            next=f"it has {partition_names}",
        )
    session = open_stream.state.load(account.state, [name]).get(name)
    return SessionLocation(partition=partition, session=session or Session())


IsChosen = Callable[[SessionMessage], bool]


def _choose_all(_: SessionMessage) -> bool:
    return True


class ReplayPosition(Struct, frozen=True, kw_only=True):
    """A position of a session replay that `go_back` can return to, any number of times."""

    offset: int
    snapshot: FoldSnapshot


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
        """The past as far as it was read."""
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
        self._rewind: Rewind | None = None
        self._loss_detector: LossDetector | None = None
        self._loaded_session: Session | None = None
        """The session in the saved state that was looked at last."""

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
        base = self._find_base(offset)
        if base.point is None:
            raise self._unreachable_error(offset, base)
        self._begin_fold(base.point)

    def begin_at_or_after(self, offset: int) -> None:
        """Begin at or before an offset, or else at the first saved state after it that will do.

        A ConfigError is raised if there is neither.
        """
        try:
            self.begin_at(offset)
        except ConfigError:
            self._read_history(all_entries=True)
            later_point = self._chooser().first_base_from(offset + 1)
            if later_point is None:
                raise
            self._begin_fold(later_point)

    def _find_base(self, offset: int) -> BaseSearch:
        """The nearest saved state at or before an offset.

        Older ledger entries are only read if the newest ones are not enough.
        """
        self._read_history(all_entries=False)
        base = self._chooser().find_base(offset)
        if base.point is None and not self._has_read_all_entries:
            self._read_history(all_entries=True)
            base = self._chooser().find_base(offset)
        return base

    def _chooser(self) -> RewindChooser:
        return RewindChooser(
            self.account, self.bounds.log_start, self.history, self._load_and_describe_damage
        )

    def _load_and_describe_damage(self, account: Account) -> str:
        """Load the session as it was saved. The text says why that cannot be, if it cannot."""
        try:
            self._loaded_session = self._load_session(account)
        except IntegrityError as error:
            return error.message
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
        for _ in self.next_messages(offset, is_chosen=lambda _: False):
            raise_broken_promise("no message was chosen")

    def steps(self, until: int, is_chosen: IsChosen = _choose_all) -> Iterator[TraceStep]:
        """Fold on up to an offset, and trace the messages that are chosen: one whenever the caller
        takes the next step.
        """
        for message in self.next_messages(until, is_chosen):
            yield self.step(message)

    def next_messages(
        self, until: int, is_chosen: IsChosen = _choose_all
    ) -> Iterator[SessionMessage]:
        """The chosen messages up to an offset, each when all messages before it are folded.

        The caller must fold the message by `step` before taking the next.
        """
        if self.next_offset < until:
            self.folds_begun += 1
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
        )

    def go_back(self, position: ReplayPosition) -> None:
        """Return to a position from before. It can be used again."""
        self.next_offset = position.offset
        self.tracing_fold.restore_snapshot(position.snapshot)

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

    def _load_session(self, account: Account) -> Session | None:
        """The session as it was saved; None: it was not. An IntegrityError tells of damaged files."""
        saved_sessions = self.open_stream.state.load(account.state, [self.session_name])
        return saved_sessions.get(self.session_name)

    def _checked_bounds(self) -> Bounds:
        """What Kafka has of the partition; a ConfigError if it is another topic by now."""
        all_bounds = self.open_stream.log.bounds(self.open_stream.stream.topics)
        bounds, problem = find_readable_bounds(all_bounds, self.partition, self.account)
        if bounds is not None:
            return bounds
        stream_name = self.open_stream.stream.name
        raise ConfigError(
            f"{stream_name}: topic {self.partition.topic} {problem}",
            next=f"seriatim state {stream_name} SESSION --version N shows what was saved by entry N;"
            f" last is {self.head.ledger.sequence}",
        )

    # The history of the partition.

    def _read_history(self, *, all_entries: bool) -> None:
        """Read the newest ledger entries, or all, unless that was done already."""
        has_read_enough = bool(self.history.points) and not all_entries
        if self._has_read_all_entries or has_read_enough:
            return
        ledger = self.head.ledger
        after_sequence = -1
        if not all_entries:
            after_sequence = max(-1, ledger.sequence - ENTRIES_READ_FIRST)
        stream_history = LedgerHistory(
            self.open_stream.ledger, ledger.stream, (self.partition,), after_sequence
        )
        # Entries after the head that this replay looks at were committed in the meantime.
        stream_history.read_on(ledger.sequence)
        self.history = stream_history.of_partition(self.partition)
        # It was built from the proofs of the old history.
        self._loss_detector = None
        self._has_read_all_entries = after_sequence < 0
        if not self.history.points:
            self._read_history(all_entries=True)

    def _begin_fold(self, point: CommitPoint) -> None:
        """Begin with the state that was looked at last."""
        account = point.account
        frontier = self.committed_end
        request = RefoldRequest(
            partition=self.partition,
            start=account.frontier,
            until=frontier,
            sessions=(self.session_name,),
        )
        self.point = point
        self.next_offset = account.frontier
        rewind = self._chooser().rewind(request, account, point.sequence, frontier)
        # Releases of other sessions change nothing here, and each would end a reading of Kafka.
        own_releases = {
            offset: names
            for offset, names in rewind.releases_by_hand.items()
            if self.session_name in names
        }
        self._rewind = replace(rewind, releases_by_hand=own_releases)
        moved_sessions = {}
        if self.session_name in self.history.moved_sessions():
            moved_sessions[self.session_name] = self._home_partition()
        self._tracing_fold = TracingFold(
            self.open_stream.stream,
            self.open_stream.runner,
            self.partition,
            self.session_name,
            self._loaded_session,
            message_time_ms=account.message_time_ms,
            headless_since=account.headless_since,
            moved_sessions=moved_sessions,
            swapped_ranges=rewind.swapped_ranges,
        )
        # The base may be from before a release at the same frontier, whose own state is damaged.
        self._release_again(self._rewind, account.frontier)

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
        rewind = self._rewind or raise_broken_promise("a session replay was never begun")
        offset = self._repeat_interventions(rewind, self.next_offset, until, is_begin=True)
        while offset < until:
            end = rewind.next_intervention(offset, until)
            yield from self._messages_in(OffsetRange(offset, end))
            offset = self._repeat_interventions(rewind, end, until)
        self.next_offset = max(self.next_offset, until)

    def _repeat_interventions(
        self, rewind: Rewind, offset: int, until: int, *, is_begin: bool = False
    ) -> int:
        """Repeat what happened at an offset and at the ends of the losses that begin there, up to
        `until`. Returns the offset where messages are folded on.

        At the begin nothing happens at the offset itself: the session has it behind it already.
        """
        resume_offset = offset
        for end_offset in rewind.stage_end_offsets(offset):
            if end_offset > until:
                break
            resume_offset = end_offset
            if is_begin and end_offset == offset:
                continue
            # The loss comes first: the release frees a session that is in doubt.
            if rewind.headless_since(end_offset) == end_offset:
                self.tracing_fold.begin_doubt_after_loss(end_offset)
            self._release_again(rewind, end_offset)
        return resume_offset

    def _release_again(self, rewind: Rewind, offset: int) -> None:
        """Release the session again, if a person released it at this offset."""
        if self.session_name not in rewind.releases_by_hand.get(offset, ()):
            return
        session = self.tracing_fold.session_to_save()
        tier = self.open_stream.stream.tier
        released = released_again({self.session_name: session}, rewind, offset, tier)
        self.tracing_fold.session = released.get(self.session_name, session)

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

    def _unreachable_error(self, offset: int, base: BaseSearch) -> ConfigError:
        """The error for an offset that no saved state leads to."""
        stream_name = self.open_stream.stream.name
        initial_frontier = self.account.initial_frontier
        if not base.damage and offset < initial_frontier:
            return ConfigError(
                f"{stream_name}: {self.partition} is folded from offset {initial_frontier} on,"
                f" {offset} is before it",
                next=f"give an offset from {initial_frontier} to {self.committed_end - 1}",
            )
        reason = base.damage or "no state before it is saved"
        if not base.damage and base.expired_offset >= 0:
            reason = (
                f"the messages from {base.expired_offset} on, where the last state before it"
                " was saved, are not in Kafka any more"
            )
        return ConfigError(
            f"{stream_name}: {self.partition} cannot be folded to offset {offset} again: {reason}",
            kafka=self._describe_kafka_bounds(),
            next=self._describe_alternatives(offset),
        )

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
        chooser = self._chooser()
        # A saved state can be shown as it is, also where Kafka has nothing since.
        point_before = replace(chooser, log_start=0).find_base(offset).point
        point_after = chooser.first_base_from(offset + 1)
        lines: list[str] = []
        for point in (point_before, point_after):
            if point is not None and self._has_state_of_session(point):
                lines.append(self._describe_saved_state(point))
        if point_after is not None:
            start = point_after.account.frontier
            if is_certain:
                lines.append(f"every offset from {start} on can be looked at")
            else:
                lines.append(f"begin at offset {start}: --from {start}")
        return "\n".join(lines) or "nothing of it is left to look at"

    def _has_state_of_session(self, point: CommitPoint) -> bool:
        return bool(self.open_stream.state.find_names(point.account.state, [self.session_name]))

    def _describe_saved_state(self, point: CommitPoint) -> str:
        return (
            f"seriatim state {self.open_stream.stream.name} {shell_quote(self.session_name)}"
            f" --topic {self.partition.topic} --version {point.sequence}"
            f" shows it as saved at offset {point.account.frontier}"
        )
