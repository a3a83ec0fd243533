"""The fold: one partition's messages, in order, through a machine. The only loop that matters.

`Fold.stretch` takes messages with no hole inside and gives the records; sessions are loaded when
first met and handed back when touched. At a finding it sets the session aside or stops the
partition, as the tier says. It neither reads nor writes anything.

Next room: sequence.py, window.py, expiry.py and distance.py have the rules it follows;
engine/task.py feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.expiry import Expiry
from seriatim.engine.findings import Finding, Tier
from seriatim.engine.judge import Judge, OnPoison, describe_error
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch, Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput, Session, WaitingMessage
from seriatim.engine.session_filter import RefoldScope, SessionFilter
from seriatim.engine.snapshot_distance import SnapshotDistance
from seriatim.engine.undo import EACH_MESSAGE, Undo
from seriatim.engine.window import Window, WindowSize, WindowTurn
from seriatim.errors import ensure

LoadSessions = Callable[[list[str]], dict[str, Session]]


class Limits(Struct, frozen=True, kw_only=True):
    """What a stream allows its sessions."""

    window: WindowSize | None = None
    timeout_ms: int = 0
    """Silence after which a session has expired; 0: never."""
    distance_ms: int = 0
    """The agreed distance between snapshots; 0: none."""


NO_LIMITS = Limits()


class Fold(Judge):
    """One partition's walk through its messages."""

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
        super().__init__(partition, runner, tier, on_poison, moved_sessions or {}, headless_since)
        self.load_sessions, self.has_session_field = load_sessions, has_session_field
        self.undoable = dict(undoable or {})
        """Sessions in which the machine raised in an earlier try, and the offset of the first such
        message.
        """
        self.undos = {
            name: Undo(runner, since)
            for name, since in self.undoable.items()
            if since != EACH_MESSAGE
        }
        self.session_filter = SessionFilter.from_scope(scope)
        self.limits = limits
        self.window = Window(limits.window, runner, self) if limits.window else None
        self.expiry = Expiry(limits.timeout_ms, message_time_ms) if limits.timeout_ms else None
        self._snapshot_distance = SnapshotDistance(
            limits.distance_ms, self._report_snapshot_distance
        )
        self._expired_positions: set[int] = set()

    def read_ahead(self, batches: Iterable[MessageBatch]) -> Iterable[MessageBatch]:
        """The stretches to fold; who folds elsewhere sends them there early."""
        return batches

    def must_fold_again(self, halt: Finding | None) -> bool:  # noqa: ARG002  # for those who fold elsewhere
        """Whether all of it is to be folded again, by this fold: it went further than it may."""
        return False

    def fold_batch(self, batch: MessageBatch) -> FoldOutput:
        """Fold messages in order until the end or a halt; `consumed` says how many."""
        ensure(
            self.halt is None, "a halted partition goes no further", partition=str(self.partition)
        )
        messages = self._decode(batch)
        for i in batch.invalid_timestamp_positions():
            messages[i] = Poison(
                f"its timestamp {batch.timestamps[i]} is no time between the years 1 and 9999"
            )
        ensure(len(messages) == len(batch), "as many messages as values", start=batch.start)
        self._batch, self._session_names_of_batch = batch, self._session_names(batch, messages)
        names = self._session_names_of_batch
        self._load_new_sessions(names)
        self._expired_positions = (
            self.expiry.expired_positions(names, messages, batch.timestamps, self.sessions)
            if self.expiry
            else set()
        )
        self._snapshot_positions.clear()
        self._ended_positions.clear()
        self._skipped_positions.clear()
        out = FoldOutput()
        sequences = self._sequences = self.runner.sequences(messages)
        self._fold_messages(messages, names, sequences, out)
        crash_point("mid-fold")
        out.name_records(names, sequences)
        self._mark_touched(names, out.consumed_messages)
        if self.expiry:
            self.expiry.advance_time(messages[: out.consumed_messages], batch.timestamps)
        self._measure_distance(batch, names, out.consumed_messages)
        self.counts.messages += out.consumed_messages
        self.counts.records += len(out.rows)
        self.tally.update_counts(self.runner.contradictions - self._contradictions_before)
        return out

    def _fold_messages(  # noqa: C901, PLR0912  # the one loop that is paid per message: calls would cost more than branches
        self,
        messages: list[Any],
        names: list[str | None],
        sequences: Sequence[int | None],
        output: FoldOutput,
    ) -> None:
        """The loop over what the machine did not fold by itself, as its usual messages."""
        sessions, start, careful, window = (
            self.sessions,
            self._batch.start,
            bool(self.undoable),
            self.window,
        )
        apply, is_snapshot, snapshot_type = (
            self.runner.apply,
            self.runner.is_snapshot,
            self.runner.snapshot_type,
        )
        add_position, add_row = output.positions.append, output.rows.append
        every, within, values = range(len(messages)), self.session_filter, self._batch.values
        slow = careful or window is not None or bool(self._expired_positions)
        for i in (
            every if slow else self.runner.fold_usual(sessions, names, sequences, messages, output)
        ):
            name, sequence, message = names[i], sequences[i], messages[i]
            if within is not None and within.excludes(name):
                continue
            session = sessions.get(name)  # type: ignore[arg-type]
            if slow and self._handled_by_window(session, name, sequence, message, i, output):
                continue
            if session is None or not session.is_active or message.__class__ is Poison:
                if not self._admit(session, name, message, i, output):
                    if self.halt is not None:
                        return
                    continue
                session = sessions[name]  # type: ignore[index]
            try:
                snapshot = (
                    message.__class__ is snapshot_type if snapshot_type else is_snapshot(message)
                )
                last = session.sequence
                jumps = sequence is not None and last is not None and sequence != last + 1
                if jumps and not self._judge_sequence(
                    session, name or "", sequence or 0, i, output, is_snapshot=snapshot
                ):
                    continue
                if careful and session.is_undoable:
                    records = self._carefully(session, name or "", message, start + i, values[i])
                else:
                    records = apply(session.state, message)
            except (MemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  # the machine's own: it becomes a finding
                self._quarantine_refused(session, name, error, i, output)
                continue
            if snapshot:
                self._begin_at_snapshot(
                    session, name or "", sequence, start + i, i, self._batch.values[i]
                )
            elif not jumps or sequence > last:  # type: ignore[operator]  # a jump is between numbers
                session.sequence = sequence
            if self.runner.contradictions != self._known_contradictions:
                self._record_contradiction(session, name or "", start + i)
            if len(records) == 1:
                add_position(i)
                add_row(records[0])
            else:
                output.positions += [i] * len(records)
                output.rows += records
        output.consumed_messages = len(messages)

    def _handled_by_window(
        self,
        session: Session | None,
        name: str | None,
        sequence: int | None,
        message: Any,
        position: int,
        output: FoldOutput,
    ) -> bool:
        """End the session if it has expired; then whether the window has dealt with the message."""
        if session is None or name is None:
            return False
        if position in self._expired_positions:
            if self.window is not None:
                self.window.flush(
                    session, WindowTurn(name, position, None, -1, is_snapshot=False), output
                )
            self._end_session(session, name, position, output)
        in_order = self.window is None or sequence is None or message.__class__ is Poison
        if in_order or session.finding is not None:
            return False
        try:
            snapshot = self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", position, output, cause=describe_error(error))
            return True
        if name in self.moved_sessions and not (
            session.is_active or session.waiting_messages or snapshot
        ):
            return False
        given = self._batch
        time = int(given.timestamps[position])
        waiting = WaitingMessage(
            sequence,  # type: ignore[arg-type]  # the window has sequences
            given.start + position,
            time,
            given.keys[position],
            given.values[position],
            snapshot,
        )
        turn = WindowTurn(name, position, message, sequence, snapshot)  # type: ignore[arg-type]  # the window has sequences
        self.window.add_message(session, turn, waiting, output)  # type: ignore[union-attr]  # in_order says there is one
        known = session.state_bytes is not None or session.state is not None
        if session.waiting_messages and not known:
            self.sessions_without_state.setdefault(name, waiting.offset)
        if known or session.waiting_messages:
            session.is_touched = True
            session.last_offset, session.timestamp = waiting.offset, time
        return True

    def apply_turn(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """One message at its turn, by way of the window: of this position, or one that waited."""
        i, waited = turn.position, turn.waiting_message
        if turn.message.__class__ is Poison:
            self._quarantine(
                session,
                turn.name,
                "poison",
                i,
                output,
                cause=turn.message.cause,
                waiting_message=waited,
            )
            return
        if not session.is_active and not self._activate_session(
            session, turn.name, turn.message, i, output, waited
        ):
            return
        offset = self._batch.start + i
        value = waited.value if waited else self._batch.values[i]
        try:
            if session.is_undoable:
                records = self._carefully(session, turn.name, turn.message, offset, value)
            else:
                records = self.runner.apply(session.state, turn.message)
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  # the machine's own: it becomes a finding
            self._quarantine_refused(session, turn.name, error, i, output, waited)
            return
        if turn.is_snapshot:
            self._begin_at_snapshot(session, turn.name, turn.sequence, offset, i, value)
        session.sequence = turn.sequence
        self._record_contradiction(session, turn.name, offset)
        if waited is not None:
            rows = range(len(output.rows), len(output.rows) + len(records))
            output.source_messages.update(dict.fromkeys(rows, waited))
        output.positions += [i] * len(records)
        output.rows += records

    def on_message_dropped(self, kind: str, name: str, offset: int, found: str) -> None:
        """A message that the window drops: it came twice, or too late. A late one is told."""
        if kind == "disorder":
            self.tally.report_warning(
                self.tally.new_finding(kind, name, offset, found=found),
                "it came after its window was over",
            )
        else:
            self.tally.count(kind)

    def on_gap_passed(
        self, session: Session, name: str, position: int, offset: int, found: str
    ) -> None:
        """The window was over before what is missing came: counted, and the session goes on,
        damaged.

        Its records carry the releasing message's offset, so that is where the damage is.
        """
        expected = f"sequence {(session.sequence or 0) + 1}"
        finding = self.tally.new_finding("sequence gap", name, offset, expected, found)
        self.tally.report_warning(
            finding, "it did not come within the window; the session goes on without it"
        )
        at = self._batch.start + position
        self.tally.mark_damaged(
            session, name, "sequence gap", at, f"expected {expected}, found {found}"
        )

    def on_quarantined(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """A message whose session was set aside by one before it: a snapshot brings it back, others
        wait.
        """
        if self._activate_session(session, turn.name, turn.message, turn.position, output):
            self.apply_turn(session, turn, output)

    def on_headless(self, name: str, waiting_message: WaitingMessage) -> None:
        """A message from before its session began."""
        self.counts.headless += 1
        self.sessions_without_state.setdefault(name, waiting_message.offset)

    def _report_snapshot_distance(
        self, name: str, session: Session, offset: int, snapshot_offset: int
    ) -> None:
        minutes = self.limits.distance_ms // 60_000
        found = f"none for {session.snapshot_distance_ms / 60_000:.1f} minutes and {session.messages_since_snapshot} messages"
        finding = self.tally.new_finding(
            "snapshot distance", name, offset, f"a snapshot at least every {minutes} minutes", found
        )
        self.tally.report_warning(finding, f"the last one is at offset {snapshot_offset}")

    def _decode(self, batch: MessageBatch) -> list[Any]:
        return self.runner.decode(batch.values)

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

    def _session_names(self, batch: MessageBatch, messages: list[Any]) -> list[str | None]:
        if not self.has_session_field:
            return batch.session_names()
        return [None if m.__class__ is Poison else self.runner.session(m) for m in messages]

    def _load_new_sessions(self, names: list[str | None]) -> None:
        """Load the sessions of this stretch that were not met before."""
        new = [
            name for name in dict.fromkeys(names) if name is not None and name not in self.sessions
        ]
        if new:
            within = self.session_filter
            known = self.load_sessions(
                [name for name in new if within is None or not within.excludes(name)]
            )
            for name in new:
                self.sessions[name] = session = known.get(name) or Session()
                session.is_undoable = name in self.undoable
            if self.limits.distance_ms:
                self._snapshot_distance.add_sessions({name: self.sessions[name] for name in new})
            crash_point("state-loaded")

    def _mark_touched(self, names: list[str | None], consumed: int) -> None:
        """Note where each session was last met by a message that counts."""
        stretch = self._batch
        if self._skipped_positions:
            names = [None if i in self._skipped_positions else name for i, name in enumerate(names)]
        for name, i in dict(zip(names[:consumed], range(consumed), strict=True)).items():
            session = self.sessions.get(name)  # type: ignore[arg-type]
            if session is not None and session.is_active:
                session.is_touched = True
                session.last_offset, session.timestamp = (
                    stretch.start + i,
                    int(stretch.timestamps[i]),
                )

    def sessions_with_messages(self) -> list[str]:
        """Sessions within the scope that had a message."""
        only = self.session_filter.sessions if self.session_filter is not None else None
        return [name for name in self.sessions if only is None or name in only]

    def touched_sessions(self) -> dict[str, Session]:
        """Sessions to be saved, with their state as bytes. A state that cannot be saved counts as
        raised.
        """
        touched = {name: session for name, session in self.sessions.items() if session.is_touched}
        for name, session in touched.items():
            if session.state_bytes is None and session.state is not None:
                try:
                    session.state_bytes = self.runner.dump(session.state)
                except Exception as error:  # noqa: BLE001  # the user's own state; found at its message in the next try
                    is_proven = session.is_undoable and name not in self.undos
                    ensure(
                        not is_proven,
                        "a careful session can be saved",
                        session=name,
                        error=describe_error(error),
                    )
                    # After a raise in this try the state may be half changed, and says nothing: first things first.
                    self.half_changed_sessions.setdefault(name, EACH_MESSAGE)
        return touched
