"""The fold: one partition's messages, in order, through a machine. The only loop that matters.

`Fold.stretch` takes messages with no hole inside and gives the records; sessions are loaded when
first met and handed back when touched. At a finding it sets the session aside or stops the partition,
as the tier says. It neither reads nor writes anything.

Next room: steps/fold.py feeds it and writes what it gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from seriatim.core.crash import crash_point
from seriatim.core.errors import ensure
from seriatim.core.integrity import FINDINGS_TOLD_MAX, Finding, Tier, action
from seriatim.core.machine import Runner
from seriatim.core.message import Poison, Stretch
from seriatim.core.offsets import Partition
from seriatim.core.session import Counts, Folded, Kept, Session
from seriatim.core.table import Precondition

OnPoison = Literal["quarantine", "halt", "skip"]
Load = Callable[[list[str]], dict[str, Session]]


class Fold:
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
        careful: Iterable[str] = (),
    ) -> None:
        self.partition, self.runner, self.tier, self.on_poison = partition, runner, tier, on_poison
        self.load, self.session_field = load, session_field
        self.careful = frozenset(careful)
        self.sessions: dict[str, Session] = {}
        self.findings: list[Finding] = []
        self.halt: Finding | None = None
        self.raised: set[str] = set()
        """Sessions that a failed `apply` may have left half changed: fold again, careful with these."""
        self.counts = Counts()
        self._by_kind: Counter[str] = Counter()
        self._by_level: Counter[str] = Counter()
        self._skipped: set[int] = set()
        self._timestamps: Sequence[int] = ()
        self._contradictions = runner.contradictions

    def stretch(self, stretch: Stretch) -> Folded:
        """Fold messages in order until the end or a halt; `consumed` says how many."""
        ensure(self.halt is None, "a halted partition goes no further", partition=str(self.partition))
        messages = self.runner.decode(stretch.values)
        ensure(len(messages) == len(stretch), "as many messages as values", start=stretch.start)
        names = self._names(stretch, messages)
        self._meet(names)
        self._timestamps = stretch.timestamps
        self._skipped.clear()
        out = Folded()
        sequences = self.runner.sequences(messages)
        self._walk(stretch, messages, names, sequences, out)
        crash_point("mid-fold")
        out.name_records(names, sequences)
        self._touch(stretch, names, out.consumed)
        self.counts.messages += out.consumed
        self.counts.records += len(out.rows)
        self.counts.findings = dict(self._by_kind)
        if contradictions := self.runner.contradictions - self._contradictions:
            self.counts.findings["precondition"] = contradictions
        return out

    def _walk(  # noqa: C901, PLR0912  # the one loop that is paid per message: calls would cost more than branches
        self,
        stretch: Stretch,
        messages: list[Any],
        names: list[str | None],
        sequences: Sequence[int | None],
        out: Folded,
    ) -> None:
        """The loop over what the machine did not fold by itself, as its usual messages."""
        sessions, start, careful = self.sessions, stretch.start, bool(self.careful)
        apply, is_snapshot, snapshot_kind = self.runner.apply, self.runner.is_snapshot, self.runner.snapshot_kind
        add_position, add_row = out.positions.append, out.rows.append
        every = range(len(messages))
        for i in every if careful else self.runner.unusual(sessions, names, sequences, messages, out):
            name, sequence, message = names[i], sequences[i], messages[i]
            session = sessions.get(name)  # type: ignore[arg-type]
            if session is None or not session.awake or message.__class__ is Poison:
                if not self._admit(session, name, message, stretch, i, out):
                    if self.halt is not None:
                        return
                    continue
                session = sessions[name]  # type: ignore[index]
            try:
                snapshot = message.__class__ is snapshot_kind if snapshot_kind else is_snapshot(message)
                last = session.sequence
                jumps = sequence is not None and last is not None and sequence != last + 1 and not snapshot
                if jumps and not self._judge_sequence(session, name, sequence, start + i, i, out):
                    continue
                if careful and session.careful:
                    records = self._undoably(session, message)
                else:
                    records = apply(session.state, message)
            except (MemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001  # the machine's own: it becomes a finding
                self._refused(session, name, error, start + i, i, out)
                continue
            if snapshot:
                self._anchor(session, name, sequence, start + i)
            elif not jumps or sequence > last:  # type: ignore[operator]  # a jump is between numbers
                session.sequence = sequence
            if len(records) == 1:
                add_position(i)
                add_row(records[0])
            else:
                out.positions += [i] * len(records)
                out.rows += records
        out.consumed = len(messages)

    def _names(self, stretch: Stretch, messages: list[Any]) -> list[str | None]:
        if not self.session_field:
            return stretch.names()
        return [None if m.__class__ is Poison else self.runner.session(m) for m in messages]

    def _meet(self, names: list[str | None]) -> None:
        """Load the sessions of this stretch that were not met before."""
        new = [name for name in dict.fromkeys(names) if name is not None and name not in self.sessions]
        if new:
            known = self.load(new)
            for name in new:
                self.sessions[name] = session = known.get(name) or Session()
                session.careful = name in self.careful
            crash_point("state-loaded")

    def _admit(
        self, session: Session | None, name: str | None, message: Any, stretch: Stretch, i: int, out: Folded
    ) -> bool:
        """Whether an unusual message goes on to the machine. If not, it is counted, kept, or halts the partition."""
        offset = stretch.start + i
        if message.__class__ is Poison or name is None or session is None:
            self._poisoned(session, name, message, offset, i, out)
            return False
        return self._wake(session, name, message, offset, i, out)

    def _wake(self, session: Session, name: str, message: Any, offset: int, i: int, out: Folded) -> bool:
        """Bring a sleeping session to life, if this message may: by its saved state or a snapshot."""
        try:
            begins = not self.runner.has_snapshots or self.runner.is_snapshot(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own
            self._quarantine(session, name, "raised", offset, i, out, cause=told(error))
            return False
        if session.finding is not None and not (self.runner.has_snapshots and begins):
            out.kept.append(Kept(i, name, session.finding, f"waits since offset {session.finding_offset}"))
            return False
        if session.saved is None and session.state is None and not begins:
            self.counts.headless += 1
            return False
        try:
            self._awaken(session, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's own upgrade or start
            self._quarantine(session, name, "raised", offset, i, out, cause=told(error))
            return False
        if session.finding is not None:
            session.finding, session.finding_offset, session.sequence = None, -1, None
            self.counts.released += 1
        session.version = self.runner.state_version
        session.awake = True
        if session.first_offset < 0:
            session.first_offset = offset
        return True

    def _awaken(self, session: Session, name: str) -> None:
        """Decode or begin the state. A careful session's must be fit to be saved before anything is applied."""
        if session.saved is not None:
            state = self.runner.load(session.saved, session.version)
        else:
            state = self.runner.start(name) if session.state is None else session.state
        if session.careful:
            self.runner.dump(state)
        session.state, session.saved = state, None

    def _anchor(self, session: Session, name: str | None, sequence: int | None, offset: int) -> None:
        """A snapshot begins the session's sequence anew. A jump up to it is a closed gap: told, and all is well."""
        last = session.sequence
        if sequence is not None and last is not None and sequence > last + 1:
            finding = self._finding("sequence gap", name, offset, f"sequence {last + 1}", f"sequence {sequence}")
            closed = (
                f"closed: {sequence - last - 1} messages are missing before this snapshot, which makes it right again"
            )
            self._tell(replace(finding, level="warning", cause=closed))
        session.sequence = session.anchor = sequence
        session.snapshot_offset = offset
        self.counts.snapshots += 1
        self.counts.last_snapshot = offset
        if self.counts.first_snapshot < 0:
            self.counts.first_snapshot = offset

    def _judge_sequence(
        self, session: Session, name: str | None, sequence: int | None, offset: int, i: int, out: Folded
    ) -> bool:
        """Whether a message out of sequence is applied all the same."""
        last = session.sequence
        if last is None or sequence is None:
            return True
        anchor = session.anchor if session.anchor is not None else last
        kind = "sequence gap" if sequence > last else "repeat" if sequence >= anchor else "disorder"
        if action(kind, self.tier) == "halt":
            expected, found = f"sequence {last + 1}", f"sequence {sequence}"
            self._quarantine(session, name or "", kind, offset, i, out, expected=expected, found=found)
            return False
        self._by_kind[kind] += 1
        return True

    def _refused(
        self, session: Session, name: str | None, error: BaseException, offset: int, i: int, out: Folded
    ) -> None:
        """The machine would not take a message."""
        kind = "precondition" if isinstance(error, Precondition) else "raised"
        cause = str(error) if kind == "precondition" else told(error)
        self._quarantine(session, name or "", kind, offset, i, out, cause=cause)
        if kind == "raised" and self.runner.may_half_change and not session.careful:
            self.raised.add(name or "")

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

    def _poisoned(
        self, session: Session | None, name: str | None, message: Any, offset: int, i: int, out: Folded
    ) -> None:
        """A message that cannot be decoded, or whose session cannot be known."""
        cause = message.cause if message.__class__ is Poison else "no readable key, so its session is unknown"
        finding = replace(self._finding("poison", name, offset), cause=cause)
        if self.on_poison == "skip":
            self._skipped.add(i)
            self._tell(replace(finding, level="warning"))
        elif self.on_poison == "halt" or session is None:
            self.halt = _of_partition(finding)
            self._tell(self.halt)
            out.consumed = i
        else:
            self._quarantine(session, name or "", "poison", offset, i, out, cause=cause)

    def _quarantine(
        self,
        session: Session,
        name: str,
        kind: str,
        offset: int,
        i: int,
        out: Folded,
        *,
        cause: str = "",
        expected: str = "",
        found: str = "",
    ) -> None:
        """Set the session aside from this message on; its last good state stays."""
        out.kept.append(Kept(i, name, kind, cause or f"expected {expected}, found {found}"))
        if session.finding is not None:
            return
        session.touched = True
        session.finding, session.finding_offset = kind, offset
        session.last_offset, session.timestamp = offset, int(self._timestamps[i])
        if session.first_offset < 0:
            session.first_offset = offset
        session.awake = False
        self.counts.quarantined += 1
        self._tell(replace(self._finding(kind, name, offset, expected, found), cause=cause))

    def _finding(self, kind: str, session: str | None, offset: int, expected: str = "", found: str = "") -> Finding:
        return Finding(
            finding=kind,
            topic=self.partition.topic,
            partition=self.partition.number,
            offset=offset,
            session=session,
            expected=expected,
            found=found,
        )

    def _tell(self, finding: Finding) -> None:
        """Keep a finding to be told; beyond a bound it is only counted."""
        self._by_kind[finding.finding] += 1
        self._by_level[finding.level] += 1
        if self._by_level[finding.level] <= FINDINGS_TOLD_MAX or finding is self.halt:
            self.findings.append(finding)

    def _touch(self, stretch: Stretch, names: list[str | None], consumed: int) -> None:
        """Note where each session was last met by a message that counts."""
        if self._skipped:
            names = [None if i in self._skipped else name for i, name in enumerate(names)]
        for name, i in dict(zip(names[:consumed], range(consumed), strict=True)).items():
            session = self.sessions.get(name)  # type: ignore[arg-type]
            if session is not None and session.awake:
                session.touched = True
                session.last_offset, session.timestamp = stretch.start + i, int(stretch.timestamps[i])

    def touched(self) -> dict[str, Session]:
        """Sessions to be saved, with their state as bytes. A state that cannot be saved counts as raised."""
        touched = {name: session for name, session in self.sessions.items() if session.touched}
        for name, session in touched.items():
            if session.saved is None and session.state is not None:
                try:
                    session.saved = self.runner.dump(session.state)
                except Exception as error:  # noqa: BLE001  # the user's own state; found at its message in the next try
                    ensure(not session.careful, "a careful session can be saved", session=name, error=told(error))
                    self.raised.add(name)
        return touched


def told(error: BaseException) -> str:
    """An exception as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _of_partition(finding: Finding) -> Finding:
    """The same finding, hurting the partition: its session is named in the cause."""
    cause = finding.cause if finding.session is None else f"{finding.cause} (session {finding.session})"
    return replace(finding, session=None, cause=cause)
