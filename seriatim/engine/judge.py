"""The judge: what becomes of messages that are not usual, as the tier says.

A session begins, is set aside, released or ended here; a partition is halted. Every verdict is one
method, and changes nothing but its session, the tally and what the stretch gives.

Next room: sequence.py, window.py, expiry.py and distance.py have the rules; fold.py walks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from seriatim.engine.after_loss import (
    is_in_doubt,
    needs_snapshot,
    sequence_proves_no_loss,
    tier_doubts_after_loss,
)
from seriatim.engine.findings import Finding, GapMark, Tier, tier_action
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch, Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.sequence import (
    add_missing_sequences,
    fingerprint,
    is_missing_sequence,
    is_same_snapshot,
    remove_missing_sequence,
    sequence_finding,
)
from seriatim.engine.session import FoldOutput, QuarantinedMessage, Session, WaitingMessage
from seriatim.engine.table import PreconditionError
from seriatim.engine.tally import Tally
from seriatim.engine.undo import EACH_MESSAGE, Undo, UndoError

OnPoison = Literal["quarantine", "halt", "skip"]


class Judge:
    """One partition's verdicts on what is not usual."""

    def __init__(
        self,
        partition: Partition,
        runner: Runner,
        tier: Tier,
        on_poison: OnPoison,
        moved_sessions: Mapping[str, str],
        headless_since: int = -1,
    ) -> None:
        self.partition, self.runner, self.tier, self.on_poison = partition, runner, tier, on_poison
        self.moved_sessions = moved_sessions
        """Sessions that live in another partition of the topic, and where."""
        self.headless_since = headless_since if tier_doubts_after_loss(tier) else -1
        """Messages before this offset were lost: sessions last met before it are in doubt."""
        self.sessions: dict[str, Session] = {}
        self.sessions_without_state: dict[str, int] = {}
        """Sessions that came here without a snapshot and without a state, and the offset of their
        first message.
        """
        self.halt: Finding | None = None
        self.half_changed_sessions: dict[str, int] = {}
        """Sessions that a failed `apply` may have left half changed, and the offset: fold again,
        careful with these from there on.
        """
        self.undos: dict[str, Undo] = {}
        """How sessions that raised in an earlier try go back to before a message. A careful session
        that is not here is saved before and after each message.
        """
        self.tally = Tally(partition)
        self.counts = self.tally.counts
        self._batch = MessageBatch(0, (), (), ())
        self._session_names_of_batch: list[str | None] = []
        self._sequences: Sequence[int | None] = ()
        self._snapshot_positions: list[int] = []
        self._ended_positions: list[int] = []
        """Positions at which a session ended."""
        self._skipped_positions: set[int] = set()
        self._contradictions_before = self._known_contradictions = runner.contradictions

    def _admit(
        self,
        session: Session | None,
        name: str | None,
        message: Any,
        position: int,
        output: FoldOutput,
    ) -> bool:
        """Whether an unusual message goes on to the machine. If not, it is counted, kept, or halts
        the partition.
        """
        if message.__class__ is Poison or name is None or session is None:
            self._judge_poison(session, name, message, position, output)
            return False
        return self._activate_session(session, name, message, position, output)

    def _activate_session(
        self,
        session: Session,
        name: str,
        message: Any,
        position: int,
        output: FoldOutput,
        waiting_message: WaitingMessage | None = None,
    ) -> bool:
        """Bring a sleeping session to life, if this message may: by its saved state or a snapshot."""
        offset = self._batch.start + position
        try:
            begins = not self.runner.has_snapshots or self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(
                session,
                name,
                "raised",
                position,
                output,
                cause=describe_error(error),
                waiting_message=waiting_message,
            )
            return False
        if session.finding is not None and not (self.runner.has_snapshots and begins):
            output.quarantined_messages.append(
                QuarantinedMessage(
                    position,
                    name,
                    session.finding,
                    f"waits since offset {session.finding_offset}",
                    waiting_message,
                )
            )
            return False
        if session.waiting_messages and waiting_message is None and self.tier != "window":
            self._quarantine_waiting_messages(session, name, position, output, begins=begins)
            if not begins:
                return False
        if self._must_wait_for_snapshot(session, name, position, output, begins=begins):
            return False
        try:
            self._load_or_start_state(session, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own upgrade or start
            self._quarantine(
                session,
                name,
                "raised",
                position,
                output,
                cause=describe_error(error),
                waiting_message=waiting_message,
            )
            return False
        if session.finding is not None:
            session.finding, session.finding_offset, session.sequence = None, -1, None
            self.counts.released += 1
        session.is_active = True
        if session.first_offset < 0:
            session.first_offset = offset
        return True

    def _quarantine_waiting_messages(
        self, session: Session, name: str, position: int, output: FoldOutput, *, begins: bool
    ) -> None:
        """The stream has left tier window while messages waited: they are kept, and a snapshot
        makes it right.
        """
        cause = f"{len(session.waiting_messages)} messages waited in the window when the stream left tier window"
        if not begins:
            self._quarantine(session, name, "sequence gap", position, output, cause=cause)
            return
        output.quarantined_messages += [
            QuarantinedMessage(position, name, "sequence gap", cause, held)
            for held in session.waiting_messages
        ]
        session.waiting_messages = []
        self.tally.report_warning(
            self.tally.new_finding("sequence gap", name, self._batch.start + position), cause
        )

    def _must_wait_for_snapshot(
        self, session: Session, name: str, position: int, output: FoldOutput, *, begins: bool
    ) -> bool:
        """Whether a session must not go on by this message: it never began, or what was lost may
        have been its own.
        """
        if session.state_bytes is None and session.state is None:
            return self._cannot_begin_here(session, name, position, output, begins=begins)
        return is_in_doubt(session, self.headless_since) and self._waits_in_doubt(
            session, name, position, begins=begins
        )

    def _cannot_begin_here(
        self, session: Session, name: str, position: int, output: FoldOutput, *, begins: bool
    ) -> bool:
        """Whether a session without a state must not begin here: it did not start, or lives in
        another partition.
        """
        if begins and self.runner.has_snapshots:
            return False
        offset = self._batch.start + position
        self.sessions_without_state.setdefault(name, offset)
        if (home := self.moved_sessions.get(name)) is not None:
            if tier_action("moved session", self.tier) == "halt":
                self._quarantine(
                    session, name, "moved session", position, output, cause=f"it lives in {home}"
                )
                return True
            self.tally.count("moved session")
        if not begins:
            self.counts.headless += 1
        return not begins

    def _waits_in_doubt(self, session: Session, name: str, position: int, *, begins: bool) -> bool:
        """Whether a session in doubt must wait for a snapshot. Then this message is headless: no
        finding, no effect.
        """
        since, offset = self.headless_since, self._batch.start + position
        if begins and self.runner.has_snapshots:
            session.sequence, session.missing_sequences = None, []
            return False
        if sequence_proves_no_loss(session, self._sequences[position], since):
            return False
        if not needs_snapshot(session, since):
            cause = f"messages before offset {since} were lost, and nothing proves that none was of this session"
            self.tally.marks.append(
                GapMark(finding="gap", offset=offset, session=name, cause=cause)
            )
            session.damaged_since_offset = offset
        self.counts.headless += 1
        session.is_touched, session.timestamp = True, int(self._batch.timestamps[position])
        return True

    def _load_or_start_state(self, session: Session, name: str) -> None:
        """Decode or begin the state. A careful session's must be fit to be saved before anything is
        applied.
        """
        if session.state_bytes is not None:
            state = self.runner.load(session.state_bytes, session.state_version)
        else:
            state = self.runner.start(name) if session.state is None else session.state
        is_new = session.state is None and (
            session.state_bytes is None or session.state_version != self.runner.state_version
        )
        if session.is_undoable and (is_new or name not in self.undos):
            self.runner.dump(state)
        session.state, session.state_bytes, session.state_version = (
            state,
            None,
            self.runner.state_version,
        )

    def _begin_at_snapshot(
        self,
        session: Session,
        name: str,
        sequence: int | None,
        offset: int,
        position: int,
        value: bytes | None,
    ) -> None:
        """A snapshot begins the session's sequence anew. A jump up to it is a closed gap: told, and
        all is well.
        """
        last, late = (
            session.sequence,
            sequence is not None and is_missing_sequence(session, sequence),
        )
        session.missing_sequences = []
        if sequence is not None and last is not None and sequence > last + 1:
            finding = self.tally.new_finding(
                "sequence gap", name, offset, f"sequence {last + 1}", f"sequence {sequence}"
            )
            many = sequence - last - 1
            closed = f"closed: {many} messages are missing before this snapshot, which makes it right again"
            self.tally.report_warning(finding, closed)
            begin = self._previous_offset(session, name, position) + 1
            self.tally.marks.append(
                GapMark(
                    finding="sequence gap", offset=begin, until=offset, session=name, cause=closed
                )
            )
        self.tally.mark_repaired(session, name, offset, "snapshot")
        if late:
            self.tally.mark_damaged(
                session, name, "disorder", offset, "a snapshot that came late was applied"
            )
        session.sequence = session.snapshot_sequence = sequence
        session.snapshot_fingerprint = fingerprint(value) if sequence is not None else b""
        session.snapshot_offset = offset
        self._snapshot_positions.append(position)
        self.counts.snapshots += 1
        self.counts.last_snapshot = offset
        if self.counts.first_snapshot < 0:
            self.counts.first_snapshot = offset

    def _previous_offset(self, session: Session, name: str, position: int) -> int:
        """The offset of the session's message before this one."""
        before = (
            j
            for j in reversed(range(position))
            if self._session_names_of_batch[j] == name and j not in self._skipped_positions
        )
        return next((self._batch.start + j for j in before), session.last_offset)

    def _judge_sequence(
        self,
        session: Session,
        name: str,
        sequence: int,
        position: int,
        output: FoldOutput,
        *,
        is_snapshot: bool,
    ) -> bool:
        """Whether a message out of sequence is applied all the same.

        A snapshot is, as a closed gap or a producer's new life, unless it comes twice, or late: its
        number was passed over.
        """
        if is_snapshot and not is_missing_sequence(session, sequence):
            twice = is_same_snapshot(session, sequence, self._batch.values[position])
            dropped = twice and tier_action("repeat", self.tier) == "drop"
            if dropped:
                self.tally.count("repeat")
            return not dropped
        kind = sequence_finding(session, sequence)
        doing = tier_action(kind, self.tier)
        expected, found = f"sequence {(session.sequence or 0) + 1}", f"sequence {sequence}"
        if doing == "halt":
            self._quarantine(session, name, kind, position, output, expected=expected, found=found)
            return False
        self.tally.count(kind)
        if kind == "sequence gap":
            add_missing_sequences(session, sequence)
        elif not is_snapshot:
            remove_missing_sequence(session, sequence)
        if doing == "count" and not is_snapshot:
            offset = self._batch.start + position
            self.tally.mark_damaged(
                session, name, kind, offset, f"expected {expected}, found {found}"
            )
        return doing == "count"

    def _record_contradiction(self, session: Session, name: str, offset: int) -> None:
        """The machine took a message that its rows contradict: counted, and the output is not to be
        trusted.
        """
        if self.runner.contradictions != self._known_contradictions:
            self._known_contradictions = self.runner.contradictions
            self.tally.mark_damaged(
                session, name, "precondition", offset, "the rows contradict a message"
            )

    def _end_session(self, session: Session, name: str, position: int, output: FoldOutput) -> None:
        """The session was silent for too long: its output is taken back, and it begins anew with a
        snapshot.
        """
        if session.finding is not None or (session.state_bytes is None and session.state is None):
            return
        try:
            self._load_or_start_state(session, name)
            copy = self.runner.load(self.runner.dump(session.state), self.runner.state_version)
            records = self.runner.end(copy)
            self.runner.check_records(records)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", position, output, cause=describe_error(error))
            return
        output.positions += [position] * len(records)
        output.rows += records
        self.counts.ended += 1
        offset = self._batch.start + position
        self.tally.mark_repaired(session, name, offset, "end")
        fresh = Session(is_undoable=session.is_undoable, is_touched=True, last_offset=offset)
        fresh.timestamp = int(self._batch.timestamps[position])
        for field in Session.__struct_fields__:
            if field not in (
                "messages_since_snapshot",
                "snapshot_timestamp",
                "snapshot_distance_ms",
            ):  # until they are measured
                setattr(session, field, getattr(fresh, field))
        self._ended_positions.append(position)
        if name in self.undos:
            self.undos[name] = Undo(self.runner, self.undos[name].since)

    def _quarantine_refused(
        self,
        session: Session,
        name: str | None,
        error: BaseException,
        position: int,
        output: FoldOutput,
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """The machine would not take a message."""
        kind = "precondition" if isinstance(error, PreconditionError) else "raised"
        cause = str(error) if kind == "precondition" else describe_error(error)
        self._quarantine(
            session,
            name or "",
            kind,
            position,
            output,
            cause=cause,
            waiting_message=waiting_message,
        )
        if kind == "raised" and self.runner.may_half_change:
            self.distrust(name or "", self._batch.start + position)

    def distrust(self, name: str, offset: int) -> None:
        """A message of a session failed at this offset. If it could not be undone, the next try
        takes more care.
        """
        undo = self.undos.get(name)
        if undo is not None:
            if offset < undo.since:
                # In the earlier try this message was fine. From now on all of them can be undone.
                self.half_changed_sessions[name] = 0
        elif not self.sessions[name].is_undoable:
            self.half_changed_sessions[name] = min(
                offset, self.half_changed_sessions.get(name, offset)
            )

    def _carefully(
        self, session: Session, name: str, message: Any, offset: int, value: bytes | None
    ) -> Sequence[tuple[Any, ...]]:
        """Apply a message of a session that raised in an earlier try."""
        undo = self.undos.get(name)
        if undo is None:
            return self._apply_undoable(session, message)
        if offset < undo.since:
            records = self.runner.apply(session.state, message)
            self.runner.check_records(records)
            return records
        try:
            return undo.apply(session, message, value)
        except UndoError:
            self.half_changed_sessions[name] = EACH_MESSAGE
            raise

    def _apply_undoable(self, session: Session, message: Any) -> Sequence[tuple[Any, ...]]:
        """Apply, and if anything is wrong with the outcome, leave the state as it was."""
        good = self.runner.dump(session.state)
        try:
            records = self.runner.apply(session.state, message)
            self.runner.check_records(records)
            self.runner.dump(session.state)
        except BaseException:
            session.state = self.runner.load(good, self.runner.state_version)
            raise
        return records

    def _judge_poison(
        self,
        session: Session | None,
        name: str | None,
        message: Any,
        position: int,
        output: FoldOutput,
    ) -> None:
        """A message that cannot be decoded, or whose session cannot be known."""
        cause = (
            message.cause
            if message.__class__ is Poison
            else "no readable key, so its session is unknown"
        )
        finding = replace(
            self.tally.new_finding("poison", name, self._batch.start + position), cause=cause
        )
        if self.on_poison == "skip":
            self._skipped_positions.add(position)
            self.tally.report_warning(finding, cause)
        elif self.on_poison == "halt" or session is None:
            self.halt = _as_partition_finding(finding)
            self.tally.report(self.halt, always=True)
            output.consumed_messages = position
        else:
            self._quarantine(session, name or "", "poison", position, output, cause=cause)

    def _quarantine(
        self,
        session: Session,
        name: str,
        kind: str,
        position: int,
        output: FoldOutput,
        *,
        cause: str = "",
        expected: str = "",
        found: str = "",
        waiting_message: WaitingMessage | None = None,
    ) -> None:
        """Set the session aside from this message on, with all that waits; its last good state
        stays.
        """
        offset, why = self._batch.start + position, cause or f"expected {expected}, found {found}"
        output.quarantined_messages.append(
            QuarantinedMessage(position, name, kind, why, waiting_message)
        )
        output.quarantined_messages += [
            QuarantinedMessage(position, name, kind, f"waited at offset {offset}", held)
            for held in session.waiting_messages
        ]
        session.waiting_messages = []
        if session.finding is not None:
            return
        session.is_touched = True
        session.finding, session.finding_offset = kind, offset
        session.last_offset, session.timestamp = offset, int(self._batch.timestamps[position])
        if session.first_offset < 0:
            session.first_offset = offset
        session.is_active = False
        self.counts.quarantined += 1
        self.tally.mark_damaged(session, name, kind, offset, why, quarantined=True)
        # A message that waited in the window is told at its own offset, where a person looks for it. Marks and the
        # session keep the releasing message's: that is where its records would have been.
        own_offset = offset if waiting_message is None else waiting_message.offset
        self.tally.report(
            replace(self.tally.new_finding(kind, name, own_offset, expected, found), cause=cause)
        )


def describe_error(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _as_partition_finding(finding: Finding) -> Finding:
    """The same finding, hurting the partition: its session is named in the cause."""
    cause = (
        finding.cause if finding.session is None else f"{finding.cause} (session {finding.session})"
    )
    return replace(finding, session=None, cause=cause)
