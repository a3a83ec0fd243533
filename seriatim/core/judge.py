"""The judge: what becomes of messages that are not usual, as the tier says.

A session begins, is set aside, released or ended here; a partition is halted. Every verdict is one
method, and changes nothing but its session, the tally and what the stretch gives.

Next room: sequence.py, window.py, expiry.py and distance.py have the rules; fold.py walks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from seriatim.core.doubt import doubts, is_in_doubt, is_proven, is_put_off
from seriatim.core.integrity import Finding, Mark, Tier, action
from seriatim.core.machine import Runner
from seriatim.core.message import Poison, Stretch
from seriatim.core.offsets import Partition
from seriatim.core.sequence import fingerprint, found_again, is_missing, is_same_snapshot, kind_of, pass_over
from seriatim.core.session import Folded, Kept, Session, Waiting
from seriatim.core.table import Precondition
from seriatim.core.tally import Tally
from seriatim.core.undo import EACH_MESSAGE, Undo, UndoError

OnPoison = Literal["quarantine", "halt", "skip"]


class Judge:
    """One partition's verdicts on what is not usual."""

    def __init__(
        self,
        partition: Partition,
        runner: Runner,
        tier: Tier,
        on_poison: OnPoison,
        moved: Mapping[str, str],
        headless_since: int = -1,
    ) -> None:
        self.partition, self.runner, self.tier, self.on_poison = partition, runner, tier, on_poison
        self.moved = moved
        """Sessions that live in another partition of the topic, and where."""
        self.headless_since = headless_since if doubts(tier) else -1
        """Messages before this offset were lost: sessions last met before it are in doubt."""
        self.sessions: dict[str, Session] = {}
        self.strangers: dict[str, int] = {}
        """Sessions that came here without a snapshot and without a state, and the offset of their first message."""
        self.halt: Finding | None = None
        self.raised: dict[str, int] = {}
        """Sessions that a failed `apply` may have left half changed, and the offset: fold again, careful with these
        from there on."""
        self.undos: dict[str, Undo] = {}
        """How sessions that raised in an earlier try go back to before a message. A careful session that is not
        here is saved before and after each message."""
        self.tally = Tally(partition)
        self.counts = self.tally.counts
        self._stretch = Stretch(0, (), (), ())
        self._names: list[str | None] = []
        self._sequences: Sequence[int | None] = ()
        self._anchored: list[int] = []
        self._gone: list[int] = []
        """Positions at which a session ended."""
        self._skipped: set[int] = set()
        self._contradictions = self._known_contradictions = runner.contradictions

    def _admit(self, session: Session | None, name: str | None, message: Any, i: int, out: Folded) -> bool:
        """Whether an unusual message goes on to the machine. If not, it is counted, kept, or halts the partition."""
        if message.__class__ is Poison or name is None or session is None:
            self._poisoned(session, name, message, i, out)
            return False
        return self._wake(session, name, message, i, out)

    def _wake(
        self, session: Session, name: str, message: Any, i: int, out: Folded, waited: Waiting | None = None
    ) -> bool:
        """Bring a sleeping session to life, if this message may: by its saved state or a snapshot."""
        offset = self._stretch.start + i
        try:
            begins = not self.runner.has_snapshots or self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", i, out, cause=told(error), waited=waited)
            return False
        if session.finding is not None and not (self.runner.has_snapshots and begins):
            out.kept.append(Kept(i, name, session.finding, f"waits since offset {session.finding_offset}", waited))
            return False
        if session.waiting and waited is None and self.tier != "window":
            self._set_aside_waiting(session, name, i, out, begins=begins)
            if not begins:
                return False
        if self._must_wait(session, name, i, out, begins=begins):
            return False
        try:
            self._awaken(session, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own upgrade or start
            self._quarantine(session, name, "raised", i, out, cause=told(error), waited=waited)
            return False
        if session.finding is not None:
            session.finding, session.finding_offset, session.sequence = None, -1, None
            self.counts.released += 1
        session.awake = True
        if session.first_offset < 0:
            session.first_offset = offset
        return True

    def _set_aside_waiting(self, session: Session, name: str, i: int, out: Folded, *, begins: bool) -> None:
        """The stream has left tier window while messages waited: they are kept, and a snapshot makes it right."""
        cause = f"{len(session.waiting)} messages waited in the window when the stream left tier window"
        if not begins:
            self._quarantine(session, name, "sequence gap", i, out, cause=cause)
            return
        out.kept += [Kept(i, name, "sequence gap", cause, held) for held in session.waiting]
        session.waiting = []
        self.tally.warn(self.tally.finding("sequence gap", name, self._stretch.start + i), cause)

    def _must_wait(self, session: Session, name: str, i: int, out: Folded, *, begins: bool) -> bool:
        """Whether a session must not go on by this message: it never began, or what was lost may have been its own."""
        if session.saved is None and session.state is None:
            return self._is_stranger(session, name, i, out, begins=begins)
        return is_in_doubt(session, self.headless_since) and self._is_put_off(session, name, i, begins=begins)

    def _is_stranger(self, session: Session, name: str, i: int, out: Folded, *, begins: bool) -> bool:
        """Whether a session without a state must not begin here: it did not start, or lives in another partition."""
        if begins and self.runner.has_snapshots:
            return False
        offset = self._stretch.start + i
        self.strangers.setdefault(name, offset)
        if (home := self.moved.get(name)) is not None:
            if action("moved session", self.tier) == "halt":
                self._quarantine(session, name, "moved session", i, out, cause=f"it lives in {home}")
                return True
            self.tally.count("moved session")
        if not begins:
            self.counts.headless += 1
        return not begins

    def _is_put_off(self, session: Session, name: str, i: int, *, begins: bool) -> bool:
        """Whether a session in doubt must wait for a snapshot. Then this message is headless: no finding, no effect."""
        since, offset = self.headless_since, self._stretch.start + i
        if begins and self.runner.has_snapshots:
            session.sequence, session.missing = None, []
            return False
        if is_proven(session, self._sequences[i], since):
            return False
        if not is_put_off(session, since):
            cause = f"messages before offset {since} were lost, and nothing proves that none was of this session"
            self.tally.marks.append(Mark(finding="gap", offset=offset, session=name, cause=cause))
            session.damaged = offset
        self.counts.headless += 1
        session.touched, session.timestamp = True, int(self._stretch.timestamps[i])
        return True

    def _awaken(self, session: Session, name: str) -> None:
        """Decode or begin the state. A careful session's must be fit to be saved before anything is applied."""
        if session.saved is not None:
            state = self.runner.load(session.saved, session.version)
        else:
            state = self.runner.start(name) if session.state is None else session.state
        is_new = session.state is None and (session.saved is None or session.version != self.runner.state_version)
        if session.careful and (is_new or name not in self.undos):
            self.runner.dump(state)
        session.state, session.saved, session.version = state, None, self.runner.state_version

    def _anchor(
        self, session: Session, name: str, sequence: int | None, offset: int, i: int, value: bytes | None
    ) -> None:
        """A snapshot begins the session's sequence anew. A jump up to it is a closed gap: told, and all is well."""
        last, late = session.sequence, sequence is not None and is_missing(session, sequence)
        session.missing = []
        if sequence is not None and last is not None and sequence > last + 1:
            finding = self.tally.finding("sequence gap", name, offset, f"sequence {last + 1}", f"sequence {sequence}")
            many = sequence - last - 1
            closed = f"closed: {many} messages are missing before this snapshot, which makes it right again"
            self.tally.warn(finding, closed)
            begin = self._last_met(session, name, i) + 1
            self.tally.marks.append(
                Mark(finding="sequence gap", offset=begin, until=offset, session=name, cause=closed)
            )
        self.tally.heal(session, name, offset, "snapshot")
        if late:
            self.tally.damage(session, name, "disorder", offset, "a snapshot that came late was applied")
        session.sequence = session.anchor = sequence
        session.fingerprint = fingerprint(value) if sequence is not None else b""
        session.snapshot_offset = offset
        self._anchored.append(i)
        self.counts.snapshots += 1
        self.counts.last_snapshot = offset
        if self.counts.first_snapshot < 0:
            self.counts.first_snapshot = offset

    def _last_met(self, session: Session, name: str, i: int) -> int:
        """The offset of the session's message before this one."""
        before = (j for j in reversed(range(i)) if self._names[j] == name and j not in self._skipped)
        return next((self._stretch.start + j for j in before), session.last_offset)

    def _judge_sequence(
        self, session: Session, name: str, sequence: int, i: int, out: Folded, *, snapshot: bool
    ) -> bool:
        """Whether a message out of sequence is applied all the same.

        A snapshot is, as a closed gap or a producer's new life, unless it comes twice, or late: its number was
        passed over.
        """
        if snapshot and not is_missing(session, sequence):
            twice = is_same_snapshot(session, sequence, self._stretch.values[i])
            dropped = twice and action("repeat", self.tier) == "drop"
            if dropped:
                self.tally.count("repeat")
            return not dropped
        kind = kind_of(session, sequence)
        doing = action(kind, self.tier)
        expected, found = f"sequence {(session.sequence or 0) + 1}", f"sequence {sequence}"
        if doing == "halt":
            self._quarantine(session, name, kind, i, out, expected=expected, found=found)
            return False
        self.tally.count(kind)
        if kind == "sequence gap":
            pass_over(session, sequence)
        elif not snapshot:
            found_again(session, sequence)
        if doing == "count" and not snapshot:
            offset = self._stretch.start + i
            self.tally.damage(session, name, kind, offset, f"expected {expected}, found {found}")
        return doing == "count"

    def _contradicted(self, session: Session, name: str, offset: int) -> None:
        """The machine took a message that its rows contradict: counted, and the output is not to be trusted."""
        if self.runner.contradictions != self._known_contradictions:
            self._known_contradictions = self.runner.contradictions
            self.tally.damage(session, name, "precondition", offset, "the rows contradict a message")

    def _end(self, session: Session, name: str, i: int, out: Folded) -> None:
        """The session was silent for too long: its output is taken back, and it begins anew with a snapshot."""
        if session.finding is not None or (session.saved is None and session.state is None):
            return
        try:
            self._awaken(session, name)
            copy = self.runner.load(self.runner.dump(session.state), self.runner.state_version)
            records = self.runner.end(copy)
            self.runner.check(records)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", i, out, cause=told(error))
            return
        out.positions += [i] * len(records)
        out.rows += records
        self.counts.ended += 1
        offset = self._stretch.start + i
        self.tally.heal(session, name, offset, "end")
        fresh = Session(careful=session.careful, touched=True, last_offset=offset)
        fresh.timestamp = int(self._stretch.timestamps[i])
        for field in Session.__struct_fields__:
            if field not in ("since_snapshot", "snapshot_timestamp", "reach_ms"):  # until they are measured
                setattr(session, field, getattr(fresh, field))
        self._gone.append(i)
        if name in self.undos:
            self.undos[name] = Undo(self.runner, self.undos[name].since)

    def _refused(
        self,
        session: Session,
        name: str | None,
        error: BaseException,
        i: int,
        out: Folded,
        waited: Waiting | None = None,
    ) -> None:
        """The machine would not take a message."""
        kind = "precondition" if isinstance(error, Precondition) else "raised"
        cause = str(error) if kind == "precondition" else told(error)
        self._quarantine(session, name or "", kind, i, out, cause=cause, waited=waited)
        if kind == "raised" and self.runner.may_half_change:
            self.distrust(name or "", self._stretch.start + i)

    def distrust(self, name: str, offset: int) -> None:
        """A message of a session failed at this offset. If it could not be undone, the next try takes more care."""
        undo = self.undos.get(name)
        if undo is not None:
            if offset < undo.since:
                # In the earlier try this message was fine. From now on all of them can be undone.
                self.raised[name] = 0
        elif not self.sessions[name].careful:
            self.raised[name] = min(offset, self.raised.get(name, offset))

    def _carefully(
        self, session: Session, name: str, message: Any, offset: int, value: bytes | None
    ) -> Sequence[tuple[Any, ...]]:
        """Apply a message of a session that raised in an earlier try."""
        undo = self.undos.get(name)
        if undo is None:
            return self._undoably(session, message)
        if offset < undo.since:
            records = self.runner.apply(session.state, message)
            self.runner.check(records)
            return records
        try:
            return undo.apply(session, message, value)
        except UndoError:
            self.raised[name] = EACH_MESSAGE
            raise

    def _undoably(self, session: Session, message: Any) -> Sequence[tuple[Any, ...]]:
        """Apply, and if anything is wrong with the outcome, leave the state as it was."""
        good = self.runner.dump(session.state)
        try:
            records = self.runner.apply(session.state, message)
            self.runner.check(records)
            self.runner.dump(session.state)
        except BaseException:
            session.state = self.runner.load(good, self.runner.state_version)
            raise
        return records

    def _poisoned(self, session: Session | None, name: str | None, message: Any, i: int, out: Folded) -> None:
        """A message that cannot be decoded, or whose session cannot be known."""
        cause = message.cause if message.__class__ is Poison else "no readable key, so its session is unknown"
        finding = replace(self.tally.finding("poison", name, self._stretch.start + i), cause=cause)
        if self.on_poison == "skip":
            self._skipped.add(i)
            self.tally.warn(finding, cause)
        elif self.on_poison == "halt" or session is None:
            self.halt = _of_partition(finding)
            self.tally.tell(self.halt, always=True)
            out.consumed = i
        else:
            self._quarantine(session, name or "", "poison", i, out, cause=cause)

    def _quarantine(
        self,
        session: Session,
        name: str,
        kind: str,
        i: int,
        out: Folded,
        *,
        cause: str = "",
        expected: str = "",
        found: str = "",
        waited: Waiting | None = None,
    ) -> None:
        """Set the session aside from this message on, with all that waits; its last good state stays."""
        offset, why = self._stretch.start + i, cause or f"expected {expected}, found {found}"
        out.kept.append(Kept(i, name, kind, why, waited))
        out.kept += [Kept(i, name, kind, f"waited at offset {offset}", held) for held in session.waiting]
        session.waiting = []
        if session.finding is not None:
            return
        session.touched = True
        session.finding, session.finding_offset = kind, offset
        session.last_offset, session.timestamp = offset, int(self._stretch.timestamps[i])
        if session.first_offset < 0:
            session.first_offset = offset
        session.awake = False
        self.counts.quarantined += 1
        self.tally.damage(session, name, kind, offset, why, aside=True)
        # A message that waited in the window is told at its own offset, where a person looks for it. Marks and the
        # session keep the releasing message's: that is where its records would have been.
        own_offset = offset if waited is None else waited.offset
        self.tally.tell(replace(self.tally.finding(kind, name, own_offset, expected, found), cause=cause))


def told(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _of_partition(finding: Finding) -> Finding:
    """The same finding, hurting the partition: its session is named in the cause."""
    cause = finding.cause if finding.session is None else f"{finding.cause} (session {finding.session})"
    return replace(finding, session=None, cause=cause)
