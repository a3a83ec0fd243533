"""The fold: one partition's messages, in order, through a machine. The only loop that matters.

`Fold.stretch` takes messages with no hole inside and gives the records; sessions are loaded when
first met and handed back when touched. At a finding it sets the session aside or stops the partition,
as the tier says. It neither reads nor writes anything.

Next room: sequence.py, window.py, expiry.py and distance.py have the rules it follows; steps/task.py feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from seriatim.core.crash import crash_point
from seriatim.core.distance import Distance
from seriatim.core.errors import ensure
from seriatim.core.expiry import Expiry
from seriatim.core.integrity import Finding, Tier
from seriatim.core.judge import Judge, OnPoison, told
from seriatim.core.machine import Runner
from seriatim.core.message import Poison, Stretch
from seriatim.core.offsets import Partition
from seriatim.core.scope import Scope, Within
from seriatim.core.session import Folded, Session, Waiting
from seriatim.core.undo import EACH_MESSAGE, Undo
from seriatim.core.window import Turn, Window, WindowSize

Load = Callable[[list[str]], dict[str, Session]]


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
        load: Load,
        *,
        session_field: bool = False,
        careful: Mapping[str, int] | None = None,
        moved: Mapping[str, str] | None = None,
        limits: Limits = NO_LIMITS,
        time: int = -1,
        scope: Scope | None = None,
        headless_since: int = -1,
    ) -> None:
        super().__init__(partition, runner, tier, on_poison, moved or {}, headless_since)
        self.load, self.session_field = load, session_field
        self.careful = dict(careful or {})
        """Sessions in which the machine raised in an earlier try, and the offset of the first such message."""
        self.undos = {name: Undo(runner, since) for name, since in self.careful.items() if since != EACH_MESSAGE}
        self.within = Within.of(scope)
        self.limits = limits
        self.window = Window(limits.window, runner, self) if limits.window else None
        self.expiry = Expiry(limits.timeout_ms, time) if limits.timeout_ms else None
        self._distance = Distance(limits.distance_ms, self._too_far)
        self._ended: set[int] = set()

    def ahead(self, stretches: Iterable[Stretch]) -> Iterable[Stretch]:
        """The stretches to fold; who folds elsewhere sends them there early."""
        return stretches

    def must_repeat(self, halt: Finding | None) -> bool:  # noqa: ARG002  # for those who fold elsewhere
        """Whether all of it is to be folded again, by this fold: it went further than it may."""
        return False

    def stretch(self, stretch: Stretch) -> Folded:
        """Fold messages in order until the end or a halt; `consumed` says how many."""
        ensure(self.halt is None, "a halted partition goes no further", partition=str(self.partition))
        messages = self._decoded(stretch)
        for i in stretch.untimely():
            messages[i] = Poison(f"its timestamp {stretch.timestamps[i]} is no time between the years 1 and 9999")
        ensure(len(messages) == len(stretch), "as many messages as values", start=stretch.start)
        self._stretch, self._names = stretch, self._named(stretch, messages)
        names = self._names
        self._meet(names)
        self._ended = self.expiry.ended(names, messages, stretch.timestamps, self.sessions) if self.expiry else set()
        self._anchored.clear()
        self._gone.clear()
        self._skipped.clear()
        out = Folded()
        sequences = self._sequences = self.runner.sequences(messages)
        self._walk(messages, names, sequences, out)
        crash_point("mid-fold")
        out.name_records(names, sequences)
        self._touch(names, out.consumed)
        if self.expiry:
            self.expiry.pass_by(messages[: out.consumed], stretch.timestamps)
        self._measure(stretch, names, out.consumed)
        self.counts.messages += out.consumed
        self.counts.records += len(out.rows)
        self.tally.settle(self.runner.contradictions - self._contradictions)
        return out

    def _walk(  # noqa: C901, PLR0912  # the one loop that is paid per message: calls would cost more than branches
        self, messages: list[Any], names: list[str | None], sequences: Sequence[int | None], out: Folded
    ) -> None:
        """The loop over what the machine did not fold by itself, as its usual messages."""
        sessions, start, careful, window = self.sessions, self._stretch.start, bool(self.careful), self.window
        apply, is_snapshot, snapshot_kind = self.runner.apply, self.runner.is_snapshot, self.runner.snapshot_kind
        add_position, add_row = out.positions.append, out.rows.append
        every, within, values = range(len(messages)), self.within, self._stretch.values
        slow = careful or window is not None or bool(self._ended)
        for i in every if slow else self.runner.unusual(sessions, names, sequences, messages, out):
            name, sequence, message = names[i], sequences[i], messages[i]
            if within is not None and within.passes(name):
                continue
            session = sessions.get(name)  # type: ignore[arg-type]
            if slow and self._is_settled(session, name, sequence, message, i, out):
                continue
            if session is None or not session.awake or message.__class__ is Poison:
                if not self._admit(session, name, message, i, out):
                    if self.halt is not None:
                        return
                    continue
                session = sessions[name]  # type: ignore[index]
            try:
                snapshot = message.__class__ is snapshot_kind if snapshot_kind else is_snapshot(message)
                last = session.sequence
                jumps = sequence is not None and last is not None and sequence != last + 1
                if jumps and not self._judge_sequence(session, name or "", sequence or 0, i, out, snapshot=snapshot):
                    continue
                if careful and session.careful:
                    records = self._carefully(session, name or "", message, start + i, values[i])
                else:
                    records = apply(session.state, message)
            except (MemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  # the machine's own: it becomes a finding
                self._refused(session, name, error, i, out)
                continue
            if snapshot:
                self._anchor(session, name or "", sequence, start + i, i, self._stretch.values[i])
            elif not jumps or sequence > last:  # type: ignore[operator]  # a jump is between numbers
                session.sequence = sequence
            if self.runner.contradictions != self._known_contradictions:
                self._contradicted(session, name or "", start + i)
            if len(records) == 1:
                add_position(i)
                add_row(records[0])
            else:
                out.positions += [i] * len(records)
                out.rows += records
        out.consumed = len(messages)

    def _is_settled(
        self, session: Session | None, name: str | None, sequence: int | None, message: Any, i: int, out: Folded
    ) -> bool:
        """End the session if it has expired; then whether the window has dealt with the message."""
        if session is None or name is None:
            return False
        if i in self._ended:
            if self.window is not None:
                self.window.flush(session, Turn(name, i, None, -1, snapshot=False), out)
            self._end(session, name, i, out)
        in_order = self.window is None or sequence is None or message.__class__ is Poison
        if in_order or session.finding is not None:
            return False
        try:
            snapshot = self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", i, out, cause=told(error))
            return True
        if name in self.moved and not (session.awake or session.waiting or snapshot):
            return False
        given = self._stretch
        time = int(given.timestamps[i])
        waiting = Waiting(sequence, given.start + i, time, given.keys[i], given.values[i], snapshot)  # type: ignore[arg-type]
        turn = Turn(name, i, message, sequence, snapshot)  # type: ignore[arg-type]  # the window has sequences
        self.window.meet(session, turn, waiting, out)  # type: ignore[union-attr]  # in_order says there is one
        known = session.saved is not None or session.state is not None
        if session.waiting and not known:
            self.strangers.setdefault(name, waiting.offset)
        if known or session.waiting:
            session.touched = True
            session.last_offset, session.timestamp = waiting.offset, time
        return True

    def take(self, session: Session, turn: Turn, out: Folded) -> None:
        """One message at its turn, by way of the window: of this position, or one that waited."""
        i, waited = turn.position, turn.waited
        if turn.message.__class__ is Poison:
            self._quarantine(session, turn.name, "poison", i, out, cause=turn.message.cause, waited=waited)
            return
        if not session.awake and not self._wake(session, turn.name, turn.message, i, out, waited):
            return
        offset = self._stretch.start + i
        value = waited.value if waited else self._stretch.values[i]
        try:
            if session.careful:
                records = self._carefully(session, turn.name, turn.message, offset, value)
            else:
                records = self.runner.apply(session.state, turn.message)
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  # the machine's own: it becomes a finding
            self._refused(session, turn.name, error, i, out, waited)
            return
        if turn.snapshot:
            self._anchor(session, turn.name, turn.sequence, offset, i, value)
        session.sequence = turn.sequence
        self._contradicted(session, turn.name, offset)
        if waited is not None:
            rows = range(len(out.rows), len(out.rows) + len(records))
            out.sources.update(dict.fromkeys(rows, waited))
        out.positions += [i] * len(records)
        out.rows += records

    def dropped(self, kind: str, name: str, offset: int, found: str) -> None:
        """A message that the window drops: it came twice, or too late. A late one is told."""
        if kind == "disorder":
            self.tally.warn(self.tally.finding(kind, name, offset, found=found), "it came after its window was over")
        else:
            self.tally.count(kind)

    def passed(self, session: Session, name: str, position: int, offset: int, found: str) -> None:
        """The window was over before what is missing came: counted, and the session goes on, damaged.

        Its records carry the releasing message's offset, so that is where the damage is.
        """
        expected = f"sequence {(session.sequence or 0) + 1}"
        finding = self.tally.finding("sequence gap", name, offset, expected, found)
        self.tally.warn(finding, "it did not come within the window; the session goes on without it")
        at = self._stretch.start + position
        self.tally.damage(session, name, "sequence gap", at, f"expected {expected}, found {found}")

    def aside(self, session: Session, turn: Turn, out: Folded) -> None:
        """A message whose session was set aside by one before it: a snapshot brings it back, others wait."""
        if self._wake(session, turn.name, turn.message, turn.position, out):
            self.take(session, turn, out)

    def headless(self, name: str, waiting: Waiting) -> None:
        """A message from before its session began."""
        self.counts.headless += 1
        self.strangers.setdefault(name, waiting.offset)

    def _too_far(self, name: str, session: Session, offset: int, snapshot: int) -> None:
        minutes = self.limits.distance_ms // 60_000
        found = f"none for {session.reach_ms / 60_000:.1f} minutes and {session.since_snapshot} messages"
        finding = self.tally.finding(
            "snapshot distance", name, offset, f"a snapshot at least every {minutes} minutes", found
        )
        self.tally.warn(finding, f"the last one is at offset {snapshot}")

    def _decoded(self, stretch: Stretch) -> list[Any]:
        return self.runner.decode(stretch.values)

    def _measure(self, stretch: Stretch, names: list[str | None], consumed: int) -> None:
        self._distance.measure(stretch, names[:consumed], self._anchored, self._gone, self.sessions, self.counts)

    def _named(self, stretch: Stretch, messages: list[Any]) -> list[str | None]:
        if not self.session_field:
            return stretch.names()
        return [None if m.__class__ is Poison else self.runner.session(m) for m in messages]

    def _meet(self, names: list[str | None]) -> None:
        """Load the sessions of this stretch that were not met before."""
        new = [name for name in dict.fromkeys(names) if name is not None and name not in self.sessions]
        if new:
            within = self.within
            known = self.load([name for name in new if within is None or not within.passes(name)])
            for name in new:
                self.sessions[name] = session = known.get(name) or Session()
                session.careful = name in self.careful
            if self.limits.distance_ms:
                self._distance.meet({name: self.sessions[name] for name in new})
            crash_point("state-loaded")

    def _touch(self, names: list[str | None], consumed: int) -> None:
        """Note where each session was last met by a message that counts."""
        stretch = self._stretch
        if self._skipped:
            names = [None if i in self._skipped else name for i, name in enumerate(names)]
        for name, i in dict(zip(names[:consumed], range(consumed), strict=True)).items():
            session = self.sessions.get(name)  # type: ignore[arg-type]
            if session is not None and session.awake:
                session.touched = True
                session.last_offset, session.timestamp = stretch.start + i, int(stretch.timestamps[i])

    def met(self) -> list[str]:
        """Sessions within the scope that had a message."""
        only = self.within.sessions if self.within is not None else None
        return [name for name in self.sessions if only is None or name in only]

    def touched(self) -> dict[str, Session]:
        """Sessions to be saved, with their state as bytes. A state that cannot be saved counts as raised."""
        touched = {name: session for name, session in self.sessions.items() if session.touched}
        for name, session in touched.items():
            if session.saved is None and session.state is not None:
                try:
                    session.saved = self.runner.dump(session.state)
                except Exception as error:  # noqa: BLE001  # the user's own state; found at its message in the next try
                    is_proven = session.careful and name not in self.undos
                    ensure(not is_proven, "a careful session can be saved", session=name, error=told(error))
                    # After a raise in this try the state may be half changed, and says nothing: first things first.
                    self.raised.setdefault(name, EACH_MESSAGE)
        return touched
