"""Retrace: a session's way through its partition, from the nearest saved state on. Reads, and
changes nothing.

Whoever asks for the state at an offset, a trace, a break point, the first wrong offset or what
touched a row goes this way. It begins at the last entry at or before the offset whose state no
later repair took back and whose files are there, and folds on with the messages that Kafka still
has: over what a forward passed over, with whom a person released released again. Where Kafka has
them no longer, that is said, with what can be looked at instead.

Next room: operations/inspect/tracing.py folds; ledger/history.py knows the past;
operations/inspect/bisect.py and the commands go this way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.findings import shell_quote
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger import history
from seriatim.ledger.history import CommitPoint, PartitionHistory
from seriatim.ledger.model import Account
from seriatim.operations.inspect.trace_step import TraceStep
from seriatim.operations.inspect.tracing import Bookmark, SessionMessage, TracingFold
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.operations.repair.lost_messages import LossDetector, MessageLoss
from seriatim.operations.repair.refold_rules import same_session
from seriatim.operations.slicing import Bounds
from seriatim.ports import LedgerHead, LedgerStore, Log, PastMessageReader, StateStore
from seriatim.stream import Stream

ENTRIES_READ_FIRST = 64
"""How many of the last entries are read before all of them are."""


class ReplayContext(Struct, kw_only=True):
    """What a look back is made with."""

    stream: Stream
    runner: Runner
    ledger: LedgerStore
    state: StateStore
    log: Log
    past_reader: PastMessageReader
    on_progress: Callable[[int, int], None] | None = None
    """Hears how much of a range is read."""


class ReplayPosition(Struct, frozen=True, kw_only=True):
    """A mark on a session's way."""

    offset: int
    bookmark: Bookmark
    headless_since: int


class SessionReplay:
    """One session's way through one partition."""

    def __init__(
        self, context: ReplayContext, head: LedgerHead, partition: Partition, session_name: str
    ) -> None:
        self.context, self.head, self.partition, self.session_name = (
            context,
            head,
            partition,
            session_name,
        )
        self.account: Account = head.ledger.account(partition) or raise_broken_promise(
            "a way leads through a known partition"
        )
        self.bounds = self._checked_bounds()
        self.history, self._has_read_all_entries = PartitionHistory(), False
        self.point: CommitPoint | None = None
        self.next_offset = 0
        """The next offset to be folded."""
        self.folds_begun, self.messages_folded = 0, 0
        """How often a fold was begun, and how many messages of the session it took in all."""
        self._cached_messages: tuple[OffsetRange, list[SessionMessage]] | None = None
        self._tracing_fold: TracingFold | None = None
        self._headless_since = -1
        self._loss_detector: LossDetector | None = None

    @property
    def tracing_fold(self) -> TracingFold:
        """The session, folded up to here."""
        return self._tracing_fold or raise_broken_promise("a way is gone from its beginning on")

    @property
    def committed_end(self) -> int:
        """Where what is committed ends."""
        return self.account.frontier

    def begin_at(self, offset: int) -> None:
        """Go to the nearest saved state at or before an offset."""
        hurt = ""
        for point in self._usable_points(offset):
            if point.account.frontier < self.bounds.log_start:
                break
            trouble = self._try_begin(point)
            if not trouble:
                return
            hurt = hurt or trouble
        raise self._unreachable_error(offset, hurt)

    def begin_at_or_after(self, offset: int) -> None:
        """The same, or later where what Kafka and the saved states still have begins later."""
        try:
            self.begin_at(offset)
        except ConfigError:
            self._read_history(all_entries=True)
            usable = [
                one
                for one in self.history.usable_points(self.committed_end)
                if one.account.frontier >= self.bounds.log_start
            ]
            later = sorted(usable, key=lambda one: one.account.frontier)
            if all(self._try_begin(point) for point in later if point.account.frontier > offset):
                raise

    def first_message_offset(self, first_effect_offset: int) -> int:
        """Where a session's messages begin, by its first with an effect (-1: none): headless ones
        may lie before it.
        """
        known = first_effect_offset if first_effect_offset >= 0 else self.account.initial_frontier
        if not self.account.headless:
            return known
        self._read_history(all_entries=True)
        return min(
            [known, *(proof.start for proof in self.history.slice_proofs() if proof.headless)]
        )

    def _try_begin(self, point: CommitPoint) -> str:
        """Set out from a saved state; why not, if its files are gone or damaged."""
        try:
            held = self.context.state.load(point.account.state, [self.session_name]).get(
                self.session_name
            )
        except IntegrityError as error:
            return error.message
        self._begin_fold(point, held)
        return ""

    def saved_points(self) -> list[CommitPoint]:
        """Where committed state can be met, by rising offset: all of the topic's present life."""
        self._read_history(all_entries=True)
        return self.history.commit_points(0, self.committed_end)

    def fold_to(self, offset: int) -> None:
        """Fold on without looking, up to but without an offset."""
        self.folds_begun += self.next_offset < offset
        for part in self._message_lists(offset):
            self.messages_folded += self.tracing_fold.fold_untraced(part)

    def steps(self, until: int) -> Iterator[TraceStep]:
        """Fold on by one message whenever the next is asked for."""
        for one in self.next_messages(until):
            yield self.step(one)

    def chosen_steps(
        self, until: int, is_chosen: Callable[[SessionMessage], bool]
    ) -> Iterator[TraceStep]:
        """Fold on, and look at those messages alone that are wanted."""
        for one in self.chosen_messages(until, is_chosen):
            yield self.step(one)

    def chosen_messages(
        self, until: int, is_chosen: Callable[[SessionMessage], bool]
    ) -> Iterator[SessionMessage]:
        """Messages that are wanted, each when all before it is folded; whoever asks folds it by
        `step`.
        """
        self.folds_begun += self.next_offset < until
        for part in self._message_lists(until):
            passed: list[SessionMessage] = []
            for one in part:
                if not is_chosen(one):
                    passed.append(one)
                    continue
                self.messages_folded += self.tracing_fold.fold_untraced(passed)
                passed = []
                yield one
            self.messages_folded += self.tracing_fold.fold_untraced(passed)

    def next_messages(self, until: int) -> Iterator[SessionMessage]:
        """The session's next messages, for whoever folds each by `step` before asking for the next."""
        self.folds_begun += self.next_offset < until
        for part in self._message_lists(until):
            yield from part

    def step(self, message: SessionMessage) -> TraceStep:
        """Fold one message."""
        self.messages_folded += 1
        self.next_offset = message.offset + 1
        return self.tracing_fold.trace_message(message)

    def differs_from_saved(self) -> bool:
        """Whether state was saved right here, and is another one: the machine, or the stream's
        file, changed since.
        """
        committed = next(
            (
                point.account
                for point in self.history.commit_points(self.next_offset, self.next_offset)
            ),
            None,
        )
        if committed is None:
            return False
        try:
            held = self.context.state.load(committed.state, [self.session_name]).get(
                self.session_name
            )
        except IntegrityError:  # swept, or damaged: there is nothing to compare with
            return False
        return not same_session(self.tracing_fold.session_to_save(), held, self.context.runner)

    def current_position(self) -> ReplayPosition:
        """This place, to come back to."""
        return ReplayPosition(
            offset=self.next_offset,
            bookmark=self.tracing_fold.bookmark(),
            headless_since=self._headless_since,
        )

    def go_back(self, position: ReplayPosition) -> None:
        """Back to a place."""
        self.next_offset, self._headless_since = position.offset, position.headless_since
        self.tracing_fold.go_back(position.bookmark)
        self.tracing_fold.begin_doubt(position.headless_since)

    def cache_messages(self, until: int) -> list[int]:
        """Read up to an offset once and for all; the offsets of the session's messages there. Go no
        further then.
        """
        whole = OffsetRange(self.next_offset, until)
        held = [
            one
            for stretch in self._batches_in(whole)
            for one in self.tracing_fold.session_messages(stretch)
        ]
        self._cached_messages = whole, held
        return [one.offset for one in held]

    def _checked_bounds(self) -> Bounds:
        stream, topic = self.context.stream.name, self.partition.topic
        seen = self.context.log.bounds(self.context.stream.topics).get(self.partition)
        if seen is None or seen.topic_id != self.account.topic_id:
            what = (
                "is not in Kafka any more"
                if seen is None
                else "was made again: its messages of before are gone"
            )
            raise ConfigError(
                f"{stream}: topic {topic} {what}",
                next=f"seriatim state {stream} SESSION --version N shows what was saved by entry N; last is "
                f"{self.head.ledger.sequence}",
            )
        return seen

    def _usable_points(self, offset: int) -> Iterator[CommitPoint]:
        """Points at or before an offset, newest first; of the past no more is read than is needed."""
        yielded = -1
        for everything in (False, True):
            self._read_history(all_entries=everything)
            for number, point in enumerate(self.history.usable_points(offset)):
                if number > yielded:
                    yielded = number
                    yield point

    def _read_history(self, *, all_entries: bool) -> None:
        if self._has_read_all_entries or (self.history.points and not all_entries):
            return
        last, stream = self.head.ledger.sequence, self.head.ledger.stream
        after = -1 if all_entries else max(-1, last - ENTRIES_READ_FIRST)
        entries = (
            one for one in self.context.ledger.entries(stream, after) if one.entry.sequence <= last
        )
        self.history, self._loss_detector = (
            history.read_histories(entries, [self.partition])[self.partition],
            None,
        )
        self._has_read_all_entries = after < 0
        if not self.history.points:
            self._read_history(all_entries=True)

    def _begin_fold(self, point: CommitPoint, saved_session: Session | None) -> None:
        self.point, self.next_offset = point, point.account.frontier
        self._headless_since = point.account.headless_since
        told = {
            session
            for finding, _, session in self.history.reported_findings
            if finding == "moved session"
        }
        self._tracing_fold = TracingFold(
            self.context.stream,
            self.context.runner,
            self.partition,
            self.session_name,
            saved_session,
            message_time_ms=point.account.message_time_ms,
            headless_since=self._headless_since,
            moved_sessions={self.session_name: self._home_partition()}
            if self.session_name in told
            else {},
        )

    def _home_partition(self) -> str:
        """Where a session lives that came here from elsewhere."""
        for place, account in self.head.ledger.partitions.items():
            other = Partition.parse(place)
            sibling = other.topic == self.partition.topic and other != self.partition
            if sibling and self.context.state.find_names(account.state, [self.session_name]):
                return place
        return "another partition"

    def _message_lists(self, until: int) -> Iterator[list[SessionMessage]]:
        """The session's messages up to an offset, in lists; between two of them it may be released,
        or in doubt.
        """
        ahead = sorted(
            self._turns_ahead(until), key=lambda turn: (turn.resume_offset, turn.is_release)
        )
        whole = OffsetRange(self.next_offset, max(self.next_offset, until))
        for many in self._messages_in(whole):
            left = many
            while ahead and left and left[-1].offset >= ahead[0].resume_offset:
                turn = ahead.pop(0)
                cut = bisect_left([one.offset for one in left], turn.start)
                yield left[:cut]
                self._apply_turn(turn)
                left = left[bisect_left([one.offset for one in left], turn.resume_offset) :]
            yield left
        for turn in ahead:
            self._apply_turn(turn)
        self.next_offset = whole.end

    def _turns_ahead(self, until: int) -> Iterator[ReplayTurn]:
        for at, names in self.history.releases_by_hand().items():
            if self.session_name in names and self.next_offset < at <= until:
                yield ReplayTurn(start=at, resume_offset=at, is_release=True)
        for lost in self.history.passed_ranges():
            if self.next_offset < lost.end <= until:
                yield ReplayTurn(start=lost.start, resume_offset=lost.end)

    def _apply_turn(self, turn: ReplayTurn) -> None:
        retrace = self.tracing_fold
        if not turn.is_release:
            self._headless_since = turn.resume_offset
            retrace.begin_doubt(turn.resume_offset)
            return
        account = replace(self.account, headless_since=self._headless_since)
        session = retrace.session_to_save()
        if can_be_released(session, account):
            retrace.session = clear_finding(session, account, self.context.stream.tier)

    def _messages_in(self, offset_range: OffsetRange) -> Iterator[list[SessionMessage]]:
        """The session's messages of a range, as they come, or as they were kept."""
        if (
            self._cached_messages is not None
            and self._cached_messages[0].start <= offset_range.start
            and offset_range.end <= self._cached_messages[0].end
        ):
            held = self._cached_messages[1]
            offsets = [one.offset for one in held]
            yield held[
                bisect_left(offsets, offset_range.start) : bisect_left(offsets, offset_range.end)
            ]
            return
        for stretch in self._batches_in(offset_range):
            yield list(self.tracing_fold.session_messages(stretch))

    def _batches_in(self, offset_range: OffsetRange) -> Iterator[Any]:
        """What Kafka has of a range. A slice of which messages are gone by now would be folded to
        something else.
        """
        if len(offset_range):
            self._refuse_cut_log(min(offset_range.end, self.committed_end))
        offset_range = OffsetRange(
            offset_range.start, max(offset_range.start, min(offset_range.end, self.bounds.log_end))
        )
        if self._loss_detector is None:
            self._loss_detector = LossDetector(
                self.partition, self.history.slice_proofs(), self.context.past_reader
            )
        for stretch in self._loss_detector.read_and_detect(offset_range, self._refuse_loss):
            if self.context.on_progress is not None:
                self.context.on_progress(stretch.start - offset_range.start, len(offset_range))
            yield stretch

    def _refuse_cut_log(self, end: int) -> None:
        if self.bounds.log_end < end:
            raise ConfigError(
                f"{self.context.stream.name}: {self.partition}: its log was cut at offset {self.bounds.log_end}:"
                f" the messages from there to {end} that were folded are not in Kafka any more",
                next=self._describe_alternatives(self.bounds.log_end),
            )

    def _refuse_loss(self, loss: MessageLoss) -> None:
        raise ConfigError(
            f"{self.context.stream.name}: {self.partition}: {loss}: folding the rest would tell something else than"
            " what was",
            next=self._describe_alternatives(loss.offset_range.end, is_certain=False),
        )

    def _unreachable_error(self, offset: int, damage: str) -> ConfigError:
        stream = self.context.stream.name
        if not damage and offset < self.account.initial_frontier:
            return ConfigError(
                f"{stream}: {self.partition} is folded from offset {self.account.initial_frontier} on, {offset} is before it",
                next=f"give an offset from {self.account.initial_frontier} to {self.committed_end - 1}",
            )
        nearest = next(
            (point.account.frontier for point in self.history.usable_points(offset)), None
        )
        what = f"the messages from {nearest} on, where the last state before it was saved, are not in Kafka any more"
        return ConfigError(
            f"{stream}: {self.partition} cannot be folded to offset {offset} again:"
            f" {damage or (what if nearest is not None else 'no state before it is saved')}",
            kafka=self._describe_kafka_bounds(),
            next=self._describe_alternatives(offset),
        )

    def _describe_kafka_bounds(self) -> str:
        start, end = self.bounds.log_start, self.bounds.log_end
        return (
            f"it has offsets {start} to {end - 1}"
            if start < end
            else f"it has no message; the next is offset {end}"
        )

    def _describe_alternatives(self, offset: int, *, is_certain: bool = True) -> str:
        """What can be looked at where an offset cannot: saved states around it, and where one can
        go on from.
        """
        self._read_history(all_entries=True)
        points = self.history.commit_points(0, self.committed_end)
        before = next(
            (
                one
                for one in reversed(points)
                if one.account.frontier <= offset and self._can_load(one)
            ),
            None,
        )
        least = max(offset + 1, self.bounds.log_start)
        after = next(
            (one for one in points if one.account.frontier >= least and self._can_load(one)), None
        )
        stream = self.context.stream.name
        said = [
            f"seriatim state {stream} {shell_quote(self.session_name)} --topic {self.partition.topic} --version {point.sequence}"
            f" shows it as saved at offset {point.account.frontier}"
            for point in (before, after)
            if point is not None
            and self.context.state.find_names(point.account.state, [self.session_name])
        ]
        if after is not None:
            at = after.account.frontier
            on = (
                f"every offset from {at} on can be looked at"
                if is_certain
                else f"begin at offset {at}: --from {at}"
            )
            said.append(on)
        return "\n".join(said) or "nothing of it is left to look at"

    def _can_load(self, point: CommitPoint) -> bool:
        try:
            self.context.state.load(point.account.state, [self.session_name])
        except IntegrityError:
            return False
        return True


class ReplayTurn(Struct, frozen=True, kw_only=True):
    """Where a session's way turns without a message of its own: a person's release, or a loss that
    was passed over.
    """

    start: int
    resume_offset: int
    is_release: bool = False
