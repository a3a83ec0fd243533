"""The fold: takes the messages of one partition, in order, through a machine.

`Fold.fold_batch` takes a batch of messages without a hole and returns the records they give. It
loads a session when its first message comes, and it hands back the sessions that changed. When
something is wrong with a message, the tier decides: the fold counts it, drops the message, sets the
session aside (quarantine) or halts the partition. The fold reads and writes nothing by itself.

`Tally` collects what the fold reports beside the records: findings, counts, and marks for the gaps
table.

Next: engine/rules.py has the rules that the fold follows; engine/task.py feeds it and writes what it
returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import (
    FINDINGS_REPORTED_MAX,
    Finding,
    GapMark,
    OnPoison,
    Tier,
    tier_action,
)
from seriatim.engine.machine import Runner
from seriatim.engine.messages import (
    MessageBatch,
    Poison,
    SequenceNumbers,
    session_name_of_partition,
)
from seriatim.engine.offsets import Partition
from seriatim.engine.rules import (
    Expiry,
    SnapshotDistance,
    Window,
    WindowSize,
    WindowTurn,
    add_missing_sequences,
    fingerprint,
    is_in_doubt,
    is_missing_sequence,
    is_same_snapshot,
    needs_snapshot,
    remove_missing_sequence,
    sequence_finding,
    sequence_proves_no_loss,
    tier_doubts_after_loss,
)
from seriatim.engine.session import (
    Counts,
    FoldOutput,
    QuarantinedMessage,
    RefoldScope,
    Row,
    Session,
    SessionFilter,
    SessionsByName,
    SwappedRanges,
    WaitingMessage,
)
from seriatim.engine.table import HeadlessError, PreconditionError, RepeatError
from seriatim.engine.undo import EACH_MESSAGE, Undo, UndoError
from seriatim.errors import ensure

LoadSessions = Callable[[list[str]], SessionsByName]

SWAPS_WINDOW = WindowSize(messages=1 << 62, seconds=1 << 40)
"""Where messages are known to be swapped, the missing ones are there: they are waited for."""
DISTANCE_FIELDS = ("messages_since_snapshot", "snapshot_timestamp", "snapshot_distance_ms")
"""Fields of a session that only `SnapshotDistance` changes."""


class Limits(Struct, frozen=True, kw_only=True):
    """What a stream allows its sessions."""

    window: WindowSize | None = None
    timeout_ms: int = 0
    """A session that is silent for longer than this has expired. 0: sessions never expire."""
    distance_ms: int = 0
    """The agreed distance between two snapshots of a session. 0: there is no agreement."""


NO_LIMITS = Limits()


class Tally:
    """Findings, counts and gap marks of one partition in one slice."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.findings: list[Finding] = []
        self.marks: list[GapMark] = []
        self.counts = Counts()
        self._count_by_kind: Counter[str] = Counter()
        self._count_by_level: Counter[str] = Counter()

    def new_finding(
        self, kind: str, session: str | None, offset: int, expected: str = "", found: str = ""
    ) -> Finding:
        """A finding in this partition. It is not reported yet."""
        return Finding.at(
            self.partition,
            kind,
            offset,
            session=session,
            expected=expected,
            found=found,
        )

    def report(self, finding: Finding, *, always: bool = False) -> None:
        """Add a finding to the list. Beyond `FINDINGS_REPORTED_MAX` of its level it is only
        counted, unless `always` is set.
        """
        self._count_by_kind[finding.finding] += 1
        self._count_by_level[finding.level] += 1
        if always or self._count_by_level[finding.level] <= FINDINGS_REPORTED_MAX:
            self.findings.append(finding)

    def report_warning(self, finding: Finding, cause: str) -> None:
        """Report what a person should know but need not act on at once."""
        self.report(replace(finding, level="warning", cause=cause))

    def count(self, kind: str, number: int = 1) -> None:
        """Count findings of a kind that the tier does not report."""
        self._count_by_kind[kind] += number

    def mark_damaged(
        self,
        session: Session,
        name: str,
        kind: str,
        offset: int,
        cause: str,
        *,
        quarantined: bool = False,
    ) -> None:
        """Mark that the session's output is not to be trusted from this offset on."""
        was_damaged = session.damaged_since_offset >= 0
        if quarantined or not was_damaged:
            mark = GapMark(
                finding=kind, offset=offset, session=name, cause=cause, quarantined=quarantined
            )
            self.marks.append(mark)
        if not was_damaged:
            session.damaged_since_offset = offset

    def mark_repaired(self, session: Session, name: str, offset: int, closed_by: str) -> None:
        """Mark that the session's output is right again from this offset on."""
        if session.damaged_since_offset < 0:
            return
        # Wrong records may have come out at this very offset: what waited in the window is
        # released by a later message and carries its offset. Then the next offset is right.
        first_right_offset = max(offset, session.damaged_since_offset + 1)
        mark = GapMark(finding="", offset=first_right_offset, session=name, closed_by=closed_by)
        self.marks.append(mark)
        session.damaged_since_offset = -1

    def update_counts(self, contradictions: int) -> None:
        """Bring `counts.findings` up to date."""
        self.counts.findings = dict(self._count_by_kind)
        if contradictions:
            self.counts.findings["precondition"] = contradictions


class Fold:
    """The fold over one partition.

    Its methods come in this order: folding a batch; the loop over messages; what the window calls;
    how a session begins or goes on; sequences; the end of a session; errors of the machine; poison
    and quarantine; the sessions to be saved.
    """

    def __init__(
        self,
        partition: Partition,
        runner: Runner,
        tier: Tier,
        on_poison: OnPoison,
        load_sessions: LoadSessions,
        *,
        has_session_field: bool = False,
        undoable: Mapping[str, int] | None = None,
        moved_sessions: Mapping[str, str] | None = None,
        limits: Limits = NO_LIMITS,
        message_time_ms: int = -1,
        scope: RefoldScope | None = None,
        headless_since: int = -1,
    ) -> None:
        self.partition = partition
        self.runner = runner
        self.tier = tier
        self.on_poison = on_poison
        self.load_sessions = load_sessions
        self.has_session_field = has_session_field
        self.limits = limits
        self.undoable = dict(undoable or {})
        """Sessions in which the machine raised in an earlier try, and the offset of the first such
        message.
        """
        self.undos = {
            name: Undo(runner, since)
            for name, since in self.undoable.items()
            if since != EACH_MESSAGE
        }
        """How an undoable session goes back to its state before a message. An undoable session that
        is not in here is saved before and after each message.
        """
        self.moved_sessions: Mapping[str, str] = moved_sessions or {}
        """Sessions that belong to another partition of the topic, and the name of that partition."""
        self.headless_since = headless_since if tier_doubts_after_loss(tier) else -1
        """Messages before this offset were lost: a session last met before it is in doubt."""
        self.session_filter = SessionFilter.from_scope(scope)
        self.swapped_ranges: SwappedRanges = {} if scope is None else scope.swapped_ranges
        """Where a refold applies the messages of a session in the order of their sequences."""
        window_size = limits.window
        if window_size is None and self.swapped_ranges:
            window_size = SWAPS_WINDOW
        self.window = Window(window_size, runner, self) if window_size else None
        self.expiry = Expiry(limits.timeout_ms, message_time_ms) if limits.timeout_ms else None

        self.sessions: SessionsByName = {}
        self._has_stored_rows = False
        """Whether a session was met that is stored row by row."""
        self.sessions_without_state: dict[str, int] = {}
        """Sessions that came here without a snapshot and without a state, and the offset of their
        first message.
        """
        self._snapshot_distance = SnapshotDistance(
            limits.distance_ms, self._report_snapshot_distance
        )
        self.begin_tally()
        self._begin_batch(MessageBatch(0, (), (), ()), [])

    def begin_tally(self) -> None:
        """Begin with no findings, counts and halts. A run stops at a halt and does this once; a trace
        goes on behind it, and does it before each message.
        """
        self.halt: Finding | None = None
        self.half_changed_sessions: dict[str, int] = {}
        """Sessions that a failed `apply` may have left half changed, and an offset: the next try
        must be able to undo the messages of the session from that offset on.
        """
        self.tally = Tally(self.partition)
        self.counts = self.tally.counts
        self._contradictions_before = self.runner.contradictions
        self._known_contradictions = self.runner.contradictions

    def _begin_batch(self, batch: MessageBatch, names: list[str | None]) -> None:
        """Set what belongs to one batch only."""
        self._batch = batch
        self._output = FoldOutput()
        """What the batch gives. It belongs to whoever called `fold_batch` afterwards."""
        self._session_names_of_batch = names
        self._sequences: SequenceNumbers = ()
        self._expired_positions: set[int] = set()
        """Positions of messages before which their session has expired."""
        self._snapshot_positions: list[int] = []
        self._ended_positions: list[int] = []
        """Positions of messages before which their session was ended."""
        self._skipped_positions: set[int] = set()
        """Positions of poison that was passed over, as `on_poison` says."""

    # Folding a batch.

    def read_ahead(self, batches: Iterable[MessageBatch]) -> Iterable[MessageBatch]:
        """The batches to fold. A fold that uses other processes sends batches to them early."""
        return batches

    def must_fold_again(self, halt: Finding | None) -> bool:  # noqa: ARG002  # subclasses use it
        """Whether everything must be folded again by this plain fold. Only a fold that uses other
        processes may have gone further than a halt allows.
        """
        return False

    def fold_batch(self, batch: MessageBatch) -> FoldOutput:
        """Fold messages in order until the end of the batch or a halt.

        `consumed_messages` of the output says how many messages were folded. The steps:
        1. Decode the messages. A message with an impossible timestamp becomes poison.
        2. Load the sessions that were not met before, and read the rows that the messages name, of
           sessions that are stored row by row.
        3. Find the messages before which their session has expired.
        4. Take each message through the machine.
        5. Give the records their session, sequence and index.
        6. Note in the sessions that they were met; advance the message time; measure distances.
        7. Bring the counts up to date.
        """
        ensure(
            self.halt is None, "a halted partition goes no further", partition=str(self.partition)
        )
        # 1. Decode.
        messages = self._decode(batch)
        for i in batch.invalid_timestamp_positions():
            messages[i] = Poison(
                f"its timestamp {batch.timestamps[i]} is no time between the years 1 and 9999"
            )
        ensure(len(messages) == len(batch), "as many messages as values", start=batch.start)
        # 2. Load sessions.
        names = self._session_names(batch, messages)
        self._begin_batch(batch, names)
        self._load_new_sessions(names)
        if self._has_stored_rows:
            self._read_stored_rows(names, messages)
        # 3. Find expired sessions.
        if self.expiry:
            self._expired_positions = self.expiry.expired_positions(
                names, messages, batch.timestamps, self.sessions
            )
        # 4. Fold the messages.
        output = self._output
        output.consumed_messages = len(messages)
        self._sequences = self.runner.sequences(messages)
        self._fold_messages(messages)
        crash_point("mid-fold")
        # 5. Name the records.
        output.name_records(names, self._sequences)
        # 6. Sessions, time and distances.
        consumed = output.consumed_messages
        self._mark_touched(names, consumed)
        if self.expiry:
            self.expiry.advance_time(messages[:consumed], batch.timestamps)
        self._measure_distance(batch, names, consumed)
        # 7. Counts.
        self.counts.messages += consumed
        self.counts.records += len(output.rows)
        self.tally.update_counts(self.runner.contradictions - self._contradictions_before)
        return output

    def _decode(self, batch: MessageBatch) -> list[Any]:
        return self.runner.decode(batch.values)

    def _session_names(self, batch: MessageBatch, messages: list[Any]) -> list[str | None]:
        if self.runner.has_session_per_partition:
            return [session_name_of_partition(self.partition)] * len(batch)
        if not self.has_session_field:
            return batch.session_names()
        name_of = self.runner.session
        return [None if m.__class__ is Poison else name_of(m) for m in messages]

    def _load_new_sessions(self, names: list[str | None]) -> None:
        """Load the sessions of this batch that were not met before."""
        distinct_names = dict.fromkeys(names)
        new_names = [
            name for name in distinct_names if name is not None and name not in self.sessions
        ]
        if not new_names:
            return
        names_to_load = new_names
        session_filter = self.session_filter
        if session_filter is not None:
            names_to_load = [name for name in new_names if not session_filter.excludes(name)]
        loaded = self.load_sessions(names_to_load)
        for name in new_names:
            session = loaded.get(name) or Session()
            session.is_undoable = name in self.undoable
            self.sessions[name] = session
            if session.stored_rows is not None:
                self._has_stored_rows = True
        if self.limits.distance_ms:
            self._snapshot_distance.add_sessions({name: self.sessions[name] for name in new_names})
        crash_point("state-loaded")

    def _read_stored_rows(self, names: list[str | None], messages: list[Any]) -> None:
        """Read the stored rows that the messages of a batch name, all at once."""
        self.runner.read_stored_rows(self.sessions, names, messages)

    def _mark_touched(self, names: list[str | None], consumed: int) -> None:
        """Note where each session was last met by a message that counts."""
        batch = self._batch
        skipped = self._skipped_positions
        if skipped:
            names = [None if i in skipped else name for i, name in enumerate(names)]
        # A dict keeps the last position of each name.
        last_positions = dict(zip(names[:consumed], range(consumed), strict=True))
        for name, i in last_positions.items():
            session = self.sessions.get(name)  # type: ignore[arg-type]
            if session is not None and session.is_active:
                session.is_touched = True
                session.last_offset = batch.start + i
                session.timestamp = int(batch.timestamps[i])

    def _measure_distance(
        self, batch: MessageBatch, names: list[str | None], consumed: int
    ) -> None:
        self._snapshot_distance.measure(
            batch,
            names[:consumed],
            self._snapshot_positions,
            self._ended_positions,
            self.sessions,
            self.counts,
        )

    def _report_snapshot_distance(
        self, name: str, session: Session, offset: int, snapshot_offset: int
    ) -> None:
        agreed_minutes = self.limits.distance_ms // 60_000
        actual_minutes = session.snapshot_distance_ms / 60_000
        finding = self.tally.new_finding(
            "snapshot distance",
            name,
            offset,
            expected=f"a snapshot at least every {agreed_minutes} minutes",
            found=(
                f"none for {actual_minutes:.1f} minutes"
                f" and {session.messages_since_snapshot} messages"
            ),
        )
        self.tally.report_warning(finding, f"the last one is at offset {snapshot_offset}")

    # The loop over messages.

    def _fold_messages(self, messages: list[Any]) -> None:  # noqa: C901, PLR0912  # see below
        """Take the messages through the machine, one after the other, until the end or a halt."""
        # This body runs once per message. A function call would cost more than a branch here, so
        # the usual path stays in one piece and uses local names. What is rare has its own method.
        names = self._session_names_of_batch
        sequences = self._sequences
        sessions = self.sessions
        runner = self.runner
        apply = runner.apply
        is_snapshot_message = runner.is_snapshot
        snapshot_type = runner.snapshot_type
        output = self._output
        add_position = output.positions.append
        add_row = output.rows.append
        is_slow = self._is_slow_batch()
        for i in self._positions_to_fold(messages):
            name = names[i]
            sequence = sequences[i]
            message = messages[i]
            session = sessions.get(name)  # type: ignore[arg-type]
            if is_slow and self._handled_by_window(session, name, sequence, message, i):
                continue
            if session is None or not session.is_active or message.__class__ is Poison:
                session = self._admit(session, name, message, i)
                if session is None:
                    if self.halt:
                        return
                    continue
            try:
                is_snapshot = (
                    message.__class__ is snapshot_type
                    if snapshot_type
                    else is_snapshot_message(message)
                )
                previous = session.sequence
                # Without a sequence, or before the first one, nothing can be said about order.
                jumps = sequence is not None and previous is not None and sequence != previous + 1
                if jumps and not self._judge_jump(session, name, sequence, i, is_snapshot):
                    continue
                if session.is_undoable:
                    records = self._apply_carefully(session, name, message, i)
                else:
                    records = apply(session.state, message)
            except BaseException as error:  # noqa: BLE001  # the machine's error becomes a finding
                self._quarantine_refused(session, name, error, i)
                continue
            # Only after `apply` succeeded: a message that raised must leave the session as it was.
            if is_snapshot:
                self._begin_at_snapshot(session, name, sequence, i)
            elif not jumps or sequence > previous:  # type: ignore[operator]  # a jump is between numbers
                session.sequence = sequence
            if runner.contradictions != self._known_contradictions:
                self._record_contradiction(session, name, i)
            if len(records) == 1:
                add_position(i)
                add_row(records[0])
            elif records:
                output.add_records(i, records)

    def _is_slow_batch(self) -> bool:
        """Whether each message must be looked at before the machine gets it."""
        has_window = self.window is not None
        return has_window or bool(self.undoable) or bool(self._expired_positions)

    def _positions_to_fold(self, messages: list[Any]) -> Iterable[int]:
        """Positions of the messages that the loop must fold, each when it is its turn."""
        names = self._session_names_of_batch
        if self._is_slow_batch():
            positions: Iterable[int] = range(len(messages))
        else:
            # The machine folds its usual messages by itself and yields the positions of the rest.
            positions = self.runner.fold_usual(
                self.sessions, names, self._sequences, messages, self._output
            )
        session_filter = self.session_filter
        if session_filter is None:
            return positions
        # A generator: the machine goes on only after the loop has folded the position before.
        return (i for i in positions if not session_filter.excludes(names[i]))

    def _handled_by_window(
        self,
        session: Session | None,
        name: str | None,
        sequence: int | None,
        message: Any,
        position: int,
    ) -> bool:
        """Whether the window has dealt with the message. Before that, end a session that has
        expired.
        """
        if session is None or name is None:
            return False
        if position in self._expired_positions:
            self._end_expired_session(session, name, position)
        window = self._window_at(name, position)
        if window is None or sequence is None or message.__class__ is Poison:
            return False
        if session.finding is not None:
            return False
        try:
            is_snapshot = self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            self._quarantine_raised(session, name, error, position)
            return True
        if name in self.moved_sessions:
            may_begin = session.is_active or session.waiting_messages or is_snapshot
            if not may_begin:
                return False
        batch = self._batch
        waiting = WaitingMessage(
            sequence,
            batch.start + position,
            int(batch.timestamps[position]),
            batch.keys[position],
            batch.values[position],
            is_snapshot,
        )
        turn = WindowTurn(name, position, message, sequence, is_snapshot)
        window.add_message(session, turn, waiting)
        has_state = session.has_state
        if session.waiting_messages and not has_state:
            self.sessions_without_state.setdefault(name, waiting.offset)
        if has_state or session.waiting_messages:
            session.is_touched = True
            session.last_offset = waiting.offset
            session.timestamp = waiting.timestamp
        return True

    def _window_at(self, name: str, position: int) -> Window | None:
        """The window in which a message may wait. Without tier window that is only the case where
        messages of its session are known to be swapped.
        """
        if self.limits.window is None and not self._is_in_swapped_range(name, position):
            return None
        return self.window

    def _is_in_swapped_range(self, name: str, position: int) -> bool:
        """Whether a message lies where messages of its session are known to be swapped."""
        offset = self._batch.start + position
        ranges = self.swapped_ranges.get(name, ())
        return any(start <= offset < end for start, end in ranges)

    # What the window calls (see `WindowFold` in engine/rules.py).

    def apply_turn(self, session: Session, turn: WindowTurn) -> None:
        """Apply a message whose turn it is: the one at this position, or one that waited."""
        position = turn.position
        waited = turn.waiting_message
        if turn.message.__class__ is Poison:
            cause = turn.message.cause
            self._quarantine(
                session, turn.name, "poison", position, cause=cause, waiting_message=waited
            )
            return
        if not session.is_active and not self._activate_session(
            session, turn.name, turn.message, position, waited
        ):
            return
        try:
            if session.is_undoable:
                records = self._apply_carefully(session, turn.name, turn.message, position, waited)
            else:
                records = self.runner.apply(session.state, turn.message)
        except BaseException as error:  # noqa: BLE001  # the machine's error becomes a finding
            self._quarantine_refused(session, turn.name, error, position, waited)
            return
        if turn.is_snapshot:
            self._begin_at_snapshot(session, turn.name, turn.sequence, position, waited)
        session.sequence = turn.sequence
        self._record_contradiction(session, turn.name, position)
        self._output.add_records(position, records, waited)

    def on_message_dropped(self, kind: str, name: str, offset: int, found: str) -> None:
        """The window drops a message. One that came twice is counted, a late one is reported."""
        if kind != "disorder":
            self.tally.count(kind)
            return
        finding = self.tally.new_finding(kind, name, offset, found=found)
        self.tally.report_warning(finding, "it came after its window was over")

    def on_gap_passed(
        self, session: Session, name: str, position: int, offset: int, found: str
    ) -> None:
        """The window was over before the missing messages came: the session goes on, damaged."""
        expected = f"sequence {(session.sequence or 0) + 1}"
        finding = self.tally.new_finding("sequence gap", name, offset, expected, found)
        self.tally.report_warning(
            finding, "it did not come within the window; the session goes on without it"
        )
        # The records carry the offset of the message that released them, so the damage is there.
        releasing_offset = self._batch.start + position
        cause = f"expected {expected}, found {found}"
        self.tally.mark_damaged(session, name, "sequence gap", releasing_offset, cause)

    def on_quarantined(self, session: Session, turn: WindowTurn) -> None:
        """A message before this one sent the session into quarantine. A snapshot brings the session
        back; any other message is quarantined, too.
        """
        if self._activate_session(session, turn.name, turn.message, turn.position):
            self.apply_turn(session, turn)

    def on_headless(self, name: str, waiting_message: WaitingMessage) -> None:
        """A message from before its session began."""
        self.counts.headless += 1
        self.sessions_without_state.setdefault(name, waiting_message.offset)

    # How a session begins or goes on.

    def _admit(
        self,
        session: Session | None,
        name: str | None,
        message: Any,
        position: int,
    ) -> Session | None:
        """The active session of an unusual message; None if the message has no effect. Then it was
        counted or quarantined, or it halted the partition.
        """
        if message.__class__ is Poison or name is None or session is None:
            self._judge_poison(session, name, message, position)
            return None
        if not self._activate_session(session, name, message, position):
            return None
        return session

    def _activate_session(
        self,
        session: Session,
        name: str,
        message: Any,
        position: int,
        waiting_message: WaitingMessage | None = None,
    ) -> bool:
        """Make a session active if this message allows it. Returns whether it did.

        1. A session in quarantine needs a snapshot.
        2. Messages that waited in a window that the stream no longer has need a snapshot.
        3. A session without a state, or one that may have lost messages, may need a snapshot.
        4. The state is decoded or started. If the user's code raises, the session is quarantined.
        """
        try:
            can_begin = not self.runner.has_snapshots or self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            self._quarantine_raised(session, name, error, position, waiting_message)
            return False
        # 1. Quarantine.
        is_snapshot = self.runner.has_snapshots and can_begin
        if session.finding is not None and not is_snapshot:
            cause = f"waits since offset {session.finding_offset}"
            self._output.quarantined_messages.append(
                QuarantinedMessage(position, name, session.finding, cause, waiting_message)
            )
            return False
        # 2. A window that is no more.
        may_wait = self.tier == "window" or self._is_in_swapped_range(name, position)
        if session.waiting_messages and waiting_message is None and not may_wait:
            self._quarantine_waiting_messages(session, name, position, can_begin=can_begin)
            if not can_begin:
                return False
        # 3. No state, or doubt.
        if self._must_wait_for_snapshot(session, name, position, can_begin=can_begin):
            return False
        # 4. The state.
        was_in_doubt = is_in_doubt(session, self.headless_since)
        try:
            self._load_or_start_state(session, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's `upgrade` or `start`
            self._quarantine_raised(session, name, error, position, waiting_message)
            return False
        if was_in_doubt or session.finding is not None:
            self.runner.begin_anew(session.state)
        if session.finding is not None:
            # The snapshot ends the quarantine. What came before it does not count: the sequence
            # begins anew, and is not compared with the one at which the session was damaged.
            session.finding = None
            session.finding_offset = -1
            session.sequence = None
            self.counts.released += 1
        session.is_active = True
        if session.first_offset < 0:
            session.first_offset = self._batch.start + position
        return True

    def _quarantine_waiting_messages(
        self, session: Session, name: str, position: int, *, can_begin: bool
    ) -> None:
        """Quarantine messages that waited when the stream left tier window. The session itself
        follows them, unless it begins anew with this message.
        """
        count = len(session.waiting_messages)
        cause = f"{count} messages waited in the window when the stream left tier window"
        if not can_begin:
            self._quarantine(session, name, "sequence gap", position, cause=cause)
            return
        for waiting in session.waiting_messages:
            self._output.quarantined_messages.append(
                QuarantinedMessage(position, name, "sequence gap", cause, waiting)
            )
        session.waiting_messages = []
        finding = self.tally.new_finding("sequence gap", name, self._batch.start + position)
        self.tally.report_warning(finding, cause)

    def _must_wait_for_snapshot(
        self, session: Session, name: str, position: int, *, can_begin: bool
    ) -> bool:
        """Whether a session must not go on with this message: it never began, or lost messages may
        have been its own.
        """
        if not session.has_state:
            return self._cannot_begin_here(session, name, position, can_begin=can_begin)
        if not is_in_doubt(session, self.headless_since):
            return False
        return self._waits_in_doubt(session, name, position, can_begin=can_begin)

    def _cannot_begin_here(
        self, session: Session, name: str, position: int, *, can_begin: bool
    ) -> bool:
        """Whether a session without a state must not begin with this message: the message cannot
        begin a session, or the session belongs to another partition.
        """
        if can_begin and self.runner.has_snapshots:
            return False
        self.sessions_without_state.setdefault(name, self._batch.start + position)
        home_partition = self.moved_sessions.get(name)
        if home_partition is not None:
            if tier_action("moved session", self.tier) == "halt":
                cause = f"it lives in {home_partition}"
                self._quarantine(session, name, "moved session", position, cause=cause)
                return True
            self.tally.count("moved session")
        if not can_begin:
            self.counts.headless += 1
        return not can_begin

    def _waits_in_doubt(
        self, session: Session, name: str, position: int, *, can_begin: bool
    ) -> bool:
        """Whether a session in doubt must wait for a snapshot. If so, this message is headless: it
        has no effect and is no finding.
        """
        since = self.headless_since
        offset = self._batch.start + position
        if can_begin and self.runner.has_snapshots:
            session.sequence = None
            session.missing_sequences = []
            return False
        if sequence_proves_no_loss(session, self._sequences[position], since):
            return False
        if not needs_snapshot(session, since):
            cause = (
                f"messages before offset {since} were lost,"
                " and nothing proves that none was of this session"
            )
            self.tally.marks.append(
                GapMark(finding="gap", offset=offset, session=name, cause=cause)
            )
            session.damaged_since_offset = offset
        self.counts.headless += 1
        # The session is saved, so that the next slice knows that it waits. Its last offset stays:
        # by that it is in doubt.
        session.is_touched = True
        session.timestamp = int(self._batch.timestamps[position])
        return True

    def _load_or_start_state(self, session: Session, name: str) -> None:
        """Decode the state, or start a new one."""
        runner = self.runner
        is_new = not session.has_state
        if session.stored_rows is not None:
            state = runner.load_stored_rows(session.stored_rows)
        elif session.state_bytes is not None:
            state = runner.load(session.state_bytes, session.state_version)
            is_new = session.state is None and session.state_version != runner.state_version
        elif session.state is None:
            state = runner.start(name)
        else:
            state = session.state
        if session.is_undoable and (is_new or name not in self.undos):
            # Undoing a message goes through a saved state. So a state that cannot be saved must
            # raise here, before any message was applied to it.
            runner.dump(state)
        session.set_decoded_state(state)
        session.state_version = runner.state_version

    # Sequences.

    def _begin_at_snapshot(
        self,
        session: Session,
        name: str | None,
        sequence: int | None,
        position: int,
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """Begin the session's sequence anew at a snapshot. Messages that are missing just before it
        are a closed gap: it is reported, and the output is right from here on.
        """
        name = name or ""
        offset = self._batch.start + position
        previous = session.sequence
        # Asked before the missing sequences are forgotten.
        is_late = sequence is not None and is_missing_sequence(session, sequence)
        session.missing_sequences = []
        if sequence is not None and previous is not None and sequence > previous + 1:
            self._report_closed_gap(session, name, previous, sequence, position)
        self.tally.mark_repaired(session, name, offset, "snapshot")
        if is_late:
            cause = "a snapshot that came late was applied"
            self.tally.mark_damaged(session, name, "disorder", offset, cause)
        session.sequence = sequence
        session.snapshot_sequence = sequence
        session.snapshot_fingerprint = b""
        if sequence is not None:
            value = self._value_of(position, waiting_message)
            session.snapshot_fingerprint = fingerprint(value)
        session.snapshot_offset = offset
        self._snapshot_positions.append(position)
        self.counts.add_snapshot(offset)

    def _report_closed_gap(
        self,
        session: Session,
        name: str,
        previous: int,
        sequence: int,
        position: int,
    ) -> None:
        """Report the messages that are missing between sequence `previous` and a snapshot."""
        offset = self._batch.start + position
        finding = self.tally.new_finding(
            "sequence gap", name, offset, f"sequence {previous + 1}", f"sequence {sequence}"
        )
        missing_count = sequence - previous - 1
        cause = (
            f"closed: {missing_count} messages are missing before this snapshot,"
            " which makes it right again"
        )
        self.tally.report_warning(finding, cause)
        start = self._previous_offset(session, name, position) + 1
        mark = GapMark(
            finding="sequence gap", offset=start, until=offset, session=name, cause=cause
        )
        self.tally.marks.append(mark)

    def _previous_offset(self, session: Session, name: str, position: int) -> int:
        """The offset of the session's message before this one."""
        for i in reversed(range(position)):
            if self._session_names_of_batch[i] == name and i not in self._skipped_positions:
                return self._batch.start + i
        return session.last_offset

    def _judge_jump(
        self,
        session: Session,
        name: str | None,
        sequence: int | None,
        position: int,
        is_snapshot: bool,
    ) -> bool:
        """Whether a message whose sequence does not follow is applied all the same.

        A snapshot usually is: it closes the gap, or the producer has begun anew. It is judged as
        any other message if its sequence is one that is missing, so it came late.
        """
        name = name or ""
        sequence = sequence or 0
        if is_snapshot and not is_missing_sequence(session, sequence):
            return not self._drops_repeated_snapshot(session, sequence, position)
        kind = sequence_finding(session, sequence)
        action = tier_action(kind, self.tier)
        expected = f"sequence {(session.sequence or 0) + 1}"
        found = f"sequence {sequence}"
        if action == "halt":
            self._quarantine(session, name, kind, position, expected=expected, found=found)
            return False
        self.tally.count(kind)
        if kind == "sequence gap":
            add_missing_sequences(session, sequence)
        elif not is_snapshot:
            remove_missing_sequence(session, sequence)
        is_applied = action == "count"
        if is_applied and not is_snapshot:
            offset = self._batch.start + position
            cause = f"expected {expected}, found {found}"
            self.tally.mark_damaged(session, name, kind, offset, cause)
        return is_applied

    def _drops_repeated_snapshot(self, session: Session, sequence: int, position: int) -> bool:
        """Whether a snapshot is dropped because it comes twice. Then it is counted."""
        if tier_action("repeat", self.tier) != "drop":
            return False
        if not is_same_snapshot(session, sequence, self._batch.values[position]):
            return False
        self.tally.count("repeat")
        return True

    def _record_contradiction(self, session: Session, name: str | None, position: int) -> None:
        """If the machine took a message that its rows contradict, mark the session's output."""
        if self.runner.contradictions == self._known_contradictions:
            return
        self._known_contradictions = self.runner.contradictions
        offset = self._batch.start + position
        cause = "the rows contradict a message"
        self.tally.mark_damaged(session, name or "", "precondition", offset, cause)

    # The end of a session.

    def _end_expired_session(self, session: Session, name: str, position: int) -> None:
        """Let through what waits in the window, then end the session."""
        if self.window is not None:
            turn = WindowTurn(name, position, None, -1, is_snapshot=False)
            self.window.flush(session, turn)
        self._end_session(session, name, position)

    def _end_session(self, session: Session, name: str, position: int) -> None:
        """End a session that was silent for too long: its output is taken back, and it begins anew
        with a snapshot. A session in quarantine, or without a state, has nothing to take back.
        """
        if session.finding is not None or not session.has_state:
            return
        try:
            records = self._end_records(session, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            self._quarantine_raised(session, name, error, position)
            return
        self._output.add_records(position, records)
        self.counts.ended += 1
        offset = self._batch.start + position
        self.tally.mark_repaired(session, name, offset, "end")
        timestamp = int(self._batch.timestamps[position])
        _forget_session(session, offset, timestamp)
        self._ended_positions.append(position)
        if name in self.undos:
            since = self.undos[name].since
            self.undos[name] = Undo(self.runner, since)

    def _end_records(self, session: Session, name: str) -> Sequence[Row]:
        """The records that take a session's output back."""
        runner = self.runner
        self._load_or_start_state(session, name)
        # The user's `end` gets a copy: if it raises, the state must be as it was.
        state_copy = runner.load(runner.dump(session.state), runner.state_version)
        records = runner.end(state_copy)
        runner.check_records(records)
        return records

    # Errors of the machine.

    def _quarantine_refused(
        self,
        session: Session,
        name: str | None,
        error: BaseException,
        position: int,
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """Quarantine a session because the machine raised at this message.

        An error that is not about the message, such as a lack of memory, is raised again.
        """
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise error
        name = name or ""
        if isinstance(error, RepeatError):
            self.tally.count("repeat")
            return
        if isinstance(error, HeadlessError):
            self.counts.headless += 1
            self._mark_missing_value(session, name, str(error), position)
            return
        if isinstance(error, PreconditionError):
            self._quarantine(
                session,
                name,
                "precondition",
                position,
                cause=str(error),
                waiting_message=waiting_message,
            )
            return
        self._quarantine_raised(session, name, error, position, waiting_message)
        if self.runner.may_half_change:
            self.distrust(name, self._batch.start + position)

    def _mark_missing_value(self, session: Session, name: str, cause: str, position: int) -> None:
        """Mark the output of a session that lacks what a message needed. It is reported once: further
        messages may lack the same.
        """
        offset = self._batch.start + position
        if session.damaged_since_offset >= 0:
            return
        if tier_action("precondition", self.tier) == "halt":
            finding = self.tally.new_finding("precondition", name, offset)
            self.tally.report_warning(finding, cause)
        self.tally.mark_damaged(session, name, "precondition", offset, cause)

    def _quarantine_raised(
        self,
        session: Session,
        name: str,
        error: BaseException,
        position: int,
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """Quarantine a session because the user's code raised."""
        self._quarantine(
            session,
            name,
            "raised",
            position,
            cause=describe_error(error),
            waiting_message=waiting_message,
        )

    def distrust(self, name: str, offset: int) -> None:
        """Note that a message of a session failed at this offset. If it could not be undone, the
        next try must be able to.
        """
        undo = self.undos.get(name)
        if undo is None:
            if not self.sessions[name].is_undoable:
                earliest = self.half_changed_sessions.get(name, offset)
                self.half_changed_sessions[name] = min(offset, earliest)
        elif offset < undo.since:
            # In the earlier try this message did not fail, so the machine depends on more than its
            # state and message. In the next try all messages can be undone.
            self.half_changed_sessions[name] = 0

    def _apply_carefully(
        self,
        session: Session,
        name: str | None,
        message: Any,
        position: int,
        waiting_message: WaitingMessage | None = None,
    ) -> Sequence[Row]:
        """Apply a message of a session that raised in an earlier try. The records are checked, and
        if anything raises, the state is as before the message.
        """
        name = name or ""
        undo = self.undos.get(name)
        if undo is None:
            return self._apply_and_save_each(session, message)
        if self._batch.start + position < undo.since:
            # This message did not raise in the earlier try, so that it need not be undone.
            records = self.runner.apply(session.state, message)
            self.runner.check_records(records)
            return records
        try:
            return undo.apply(session, message, self._value_of(position, waiting_message))
        except UndoError:
            self.half_changed_sessions[name] = EACH_MESSAGE
            raise

    def _value_of(self, position: int, waiting_message: WaitingMessage | None) -> bytes | None:
        """The bytes of the message at this position, or of the one that waited."""
        if waiting_message is not None:
            return waiting_message.value
        return self._batch.values[position]

    def _apply_and_save_each(self, session: Session, message: Any) -> Sequence[Row]:
        """Apply a message, with the state saved before and after it."""
        runner = self.runner
        state_before = runner.dump(session.state)
        try:
            records = runner.apply(session.state, message)
            runner.check_records(records)
            runner.dump(session.state)
        except BaseException:
            session.state = runner.load(state_before, runner.state_version)
            raise
        return records

    # Poison and quarantine.

    def _judge_poison(
        self,
        session: Session | None,
        name: str | None,
        message: Any,
        position: int,
    ) -> None:
        """Skip, quarantine or halt at a message that cannot be decoded or has no readable key. Pass
        over one that has no effect.
        """
        cause = "no readable key, so its session is unknown"
        if message.__class__ is Poison:
            if message.has_no_effect:
                self._skipped_positions.add(position)
                return
            cause = message.cause
        finding = self.tally.new_finding("poison", name, self._batch.start + position)
        finding = replace(finding, cause=cause)
        if self.on_poison == "skip":
            self._skipped_positions.add(position)
            self.tally.report_warning(finding, cause)
        elif self.on_poison == "halt" or session is None:
            # Without a session there is nothing to quarantine, so the partition must halt.
            self.halt = _as_partition_finding(finding)
            self.tally.report(self.halt, always=True)
            self._output.consumed_messages = position
        else:
            self._quarantine(session, name or "", "poison", position, cause=cause)

    def _quarantine(
        self,
        session: Session,
        name: str,
        kind: str,
        position: int,
        *,
        cause: str = "",
        expected: str = "",
        found: str = "",
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """Quarantine the session from this message on, with all messages that wait. Its last good
        state stays.
        """
        offset = self._batch.start + position
        reason = cause or f"expected {expected}, found {found}"
        message = QuarantinedMessage(position, name, kind, reason, waiting_message)
        self._output.quarantined_messages.append(message)
        cause_of_waiting = f"waited at offset {offset}"
        for waiting in session.waiting_messages:
            message = QuarantinedMessage(position, name, kind, cause_of_waiting, waiting)
            self._output.quarantined_messages.append(message)
        session.waiting_messages = []
        if session.finding is not None:
            return
        session.quarantine(kind, offset, int(self._batch.timestamps[position]))
        self.counts.quarantined += 1
        self.tally.mark_damaged(session, name, kind, offset, reason, quarantined=True)
        # A message that waited in the window is reported at its own offset, where a person looks
        # for it. Marks and the session have the offset of the message that released it: that is
        # where its records would have been.
        own_offset = offset if waiting_message is None else waiting_message.offset
        finding = self.tally.new_finding(kind, name, own_offset, expected, found)
        self.tally.report(replace(finding, cause=cause))

    # The sessions to be saved.

    def sessions_with_messages(self) -> list[str]:
        """Sessions within the scope of the refold that had a message."""
        if self.session_filter is None or self.session_filter.sessions is None:
            return list(self.sessions)
        scope = self.session_filter.sessions
        return [name for name in self.sessions if name in scope]

    def touched_sessions(self) -> SessionsByName:
        """Sessions to be saved, with their state as bytes or what changed of their rows. A state that
        cannot be saved counts as if the machine had raised.
        """
        touched = {name: session for name, session in self.sessions.items() if session.is_touched}
        for name, session in touched.items():
            if session.state_bytes is not None or session.state is None:
                continue
            try:
                self._dump_state(session)
            except Exception as error:  # noqa: BLE001  # the user's state; the next try finds the message
                was_saved_each_time = session.is_undoable and name not in self.undos
                ensure(
                    not was_saved_each_time,
                    "a careful session can be saved",
                    session=name,
                    error=describe_error(error),
                )
                # If a message raised in this try, the state may be half changed, and that it
                # cannot be saved proves nothing. So an offset that is noted already stays.
                self.half_changed_sessions.setdefault(name, EACH_MESSAGE)
        return touched

    def _dump_state(self, session: Session) -> None:
        """Set what is saved of a state: its bytes, or what changed of its rows."""
        changes = self.runner.row_changes(session.state)
        if changes is None:
            session.store_as_one_value(self.runner.dump(session.state))
        else:
            session.row_changes = changes
            session.rows_summary = changes.summary


def _forget_session(session: Session, offset: int, timestamp: int) -> None:
    """Make a session as new, last met at this offset."""
    new_session = Session(
        is_undoable=session.is_undoable, is_touched=True, last_offset=offset, timestamp=timestamp
    )
    for field in Session.__struct_fields__:
        # Distances are measured after the batch. Until then they are those of the old session.
        if field not in DISTANCE_FIELDS:
            setattr(session, field, getattr(new_session, field))


def describe_error(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip()
    class_name = type(error).__name__
    return f"{class_name}: {text}" if text else class_name


def _as_partition_finding(finding: Finding) -> Finding:
    """The same finding about the whole partition. The cause names the session."""
    cause = finding.cause
    if finding.session is not None:
        cause = f"{cause} (session {finding.session})"
    return replace(finding, session=None, cause=cause)
