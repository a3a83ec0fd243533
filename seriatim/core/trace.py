"""The trace: one session's way, message by message, by the real fold. Pure: whoever reads feeds it.

A `Retrace` begins with a session as it was saved. `met` finds the session's messages, `step` folds one and tells what
it did: state before and after, records, findings, what became of it. `pass_over` folds without looking.
Everything that judges is the fold itself, so a trace cannot tell another story than a run.

Next room: steps/retrace.py finds where to begin, and reads; expression.py asks questions of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.doubt import doubts
from seriatim.core.fold import Fold
from seriatim.core.integrity import action
from seriatim.core.looks import copied, view_of_message, view_of_state
from seriatim.core.machine import Runner
from seriatim.core.message import Poison, Stretch
from seriatim.core.offsets import Partition
from seriatim.core.outputs import MAIN, table_of
from seriatim.core.session import Folded, Session
from seriatim.core.step import Seen, Step
from seriatim.core.stream import Stream
from seriatim.core.table import settled
from seriatim.core.tally import Tally
from seriatim.core.undo import EACH_MESSAGE

Apply = Callable[[Any, Any], Sequence[tuple[Any, ...]]]
RUN_MAX, CHUNK = 5_000, 500
STALE: Any = object()
"""In place of a copy that is to be made."""


class Mark(Struct, frozen=True):
    """A place to come back to."""

    session: Session
    time: int


class Met(Struct, frozen=True, gc=False):
    """One message of the session, and the largest time of all messages before it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    time: int = -1

    @property
    def part(self) -> Stretch:
        """As a stretch of its own."""
        return Stretch(self.offset, [self.timestamp], [self.key], [self.value])


class Watched:
    """A machine that can be looked into: each message goes through `apply`, by way of `hook` if there is one."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.each = runner, False
        self.hook: Callable[[Apply, Any, Any], Sequence[tuple[Any, ...]]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def apply(self, state: Any, message: Any) -> Sequence[tuple[Any, ...]]:
        """One message's records."""
        return self.hook(self.runner.apply, state, message) if self.hook else self.runner.apply(state, message)

    def unusual(self, *given: Any) -> Any:
        """All positions while each message is looked at."""
        return range(len(given[3])) if self.each else self.runner.unusual(*given)


class Looked(Fold):
    """The fold, with an account of its own for each thing that is looked at."""

    def begin(self) -> None:
        """Nothing was met so far. A run waits at a halt; who looks goes on."""
        self.tally = Tally(self.partition)
        self.counts = self.tally.counts
        self._contradictions = self._known_contradictions = self.runner.contradictions
        self.halt = None
        self.raised.clear()


class Retrace:
    """One session of one partition, folded on from a saved state."""

    def __init__(
        self,
        stream: Stream,
        runner: Runner,
        partition: Partition,
        name: str,
        session: Session | None,
        *,
        time: int = -1,
        headless_since: int = -1,
        moved: Mapping[str, str] | None = None,
    ) -> None:
        self.stream, self.plain, self.name = stream, runner, name
        self.watched = Watched(runner)
        self._key, self._fields = name.encode(), stream.session_field is not None
        self.fold = Looked(
            partition,
            cast("Runner", self.watched),
            stream.tier,
            stream.on_poison,
            lambda _: {},
            session_field=self._fields,
            careful={name: EACH_MESSAGE} if runner.may_half_change else {},
            moved=moved,
            limits=stream.limits,
            time=time,
            headless_since=headless_since,
        )
        self.session, self._now = session or Session(), time
        self.folded = 0
        """Messages of the session so far."""

    @property
    def session(self) -> Session:
        """The session as it is."""
        return self.fold.sessions[self.name]

    @session.setter
    def session(self, session: Session) -> None:
        session.careful = self.plain.may_half_change
        session.awake &= session.state is not None
        self.fold.sessions[self.name] = session
        self._copy = STALE

    @property
    def _state(self) -> Any:
        """The state as it is, in a copy that is made when somebody looks."""
        if self._copy is STALE:
            self._copy = self._copy_of(self.session)
        return self._copy

    def mark(self) -> Mark:
        """Where it is, to come back to."""
        now = self.session
        held = replace(now, state=copied(self.plain, now.state), missing=list(now.missing), waiting=list(now.waiting))
        return Mark(held, self.fold.expiry.time if self.fold.expiry else -1)

    def back(self, mark: Mark) -> None:
        """As it was at the mark, which can be used again."""
        held = mark.session
        self.session = replace(
            held, state=copied(self.plain, held.state), missing=list(held.missing), waiting=list(held.waiting)
        )
        self.fold.raised.pop(self.name, None)
        if self.fold.expiry:
            self.fold.expiry.time = mark.time

    def state(self) -> Any:
        """The machine's state as of now, in a copy; None: there is none."""
        return self._copy_of(self.session)

    def saved(self) -> Session:
        """The session as it would be saved now."""
        now = self.session
        return now if now.state is None else replace(now, state=None, saved=self.plain.dump(now.state))

    def met(self, stretch: Stretch) -> Iterator[Met]:
        """The session's messages of a stretch, each with the time of all before it: by that it may have expired."""
        own, times = self._own(stretch), self._times(stretch) if self.fold.expiry else None
        for i in own:
            time = -1 if times is None else times[i]
            yield Met(stretch.start + i, int(stretch.timestamps[i]), stretch.keys[i], stretch.values[i], time)

    def pass_over(self, messages: Iterable[Met]) -> int:
        """Fold messages without looking; how many they were."""
        count = 0
        for many in chunks(runs(messages)):
            self._fold_quickly(many)
            count += sum(map(len, many))
        self.folded += count
        return count

    def lose(self, headless_since: int) -> None:
        """Messages before this offset were lost and passed over: from here on the session is in doubt."""
        self.fold.headless_since = headless_since if doubts(self.stream.tier) else -1
        self.session.awake = False  # it is judged when it wakes

    def _own(self, stretch: Stretch) -> list[int]:
        """Positions of the session's messages."""
        if not self._fields:
            return [i for i, key in enumerate(stretch.keys) if key == self._key]
        messages = self.plain.decode(stretch.values)
        named = [None if m.__class__ is Poison else self.plain.session(m) for m in messages]
        return [i for i, name in enumerate(named) if name == self.name]

    def _times(self, stretch: Stretch) -> list[int]:
        """The largest time before each message, of those that count: what cannot be decoded does not."""
        untimely, now, times = set(stretch.untimely()), self._now, []
        for i, message in enumerate(self.plain.decode(stretch.values)):
            times.append(now)
            if message.__class__ is not Poison and i not in untimely:
                now = max(now, int(stretch.timestamps[i]))
        self._now = now
        return times

    def _elapse(self, time: int) -> None:
        """Let the time of messages of others go by."""
        if self.fold.expiry:
            self.fold.expiry.time = max(self.fold.expiry.time, time)

    def step(self, one: Met) -> Step:
        """Fold one message, and tell what it did."""
        fold, part, before = self.fold, one.part, self._state
        was_damaged, was_quarantined = self.session.damaged >= 0, self.session.finding is not None
        self._elapse(one.time)
        fold.begin()
        self.watched.each = True
        try:
            folded = fold.stretch(part)
        finally:
            self.watched.each = False
        self.folded += 1
        self._copy = STALE
        message, findings = self.decoded(part), self._findings()
        return Step(
            offset=part.start,
            timestamp=int(part.timestamps[0]),
            session=self.name,
            sequence=None if message.__class__ is Poison else self.plain.sequences([message])[0],
            message=message,
            raw=part.values[0],
            outcome=self._outcome(folded, part.start, findings),
            before=before,
            after=self._state,
            records=self._records(folded),
            findings=findings,
            damaged=self.session.damaged >= 0,
            quarantined=self.session.finding is not None,
            was_damaged=was_damaged,
            was_quarantined=was_quarantined,
            ended=fold.counts.ended > 0,
        )

    def decoded(self, part: Stretch) -> Any:
        """The one message of a stretch, as the machine takes it."""
        if part.untimely():
            return Poison(f"its timestamp {part.timestamps[0]} is no time between the years 1 and 9999")
        return self.plain.decode(part.values)[0]

    def asked(self, part: Stretch) -> dict[str, Any]:
        """What an expression may ask of the one message of a stretch, before it is folded."""
        message, session = self.decoded(part), self.session
        poison = message.__class__ is Poison
        return {
            "offset": part.start,
            "time": int(part.timestamps[0]),
            "session": self.name,
            "sequence": None if poison else self.plain.sequences([message])[0],
            "message": view_of_message(self.plain, message, part.values[0]),
            "state": view_of_state(self.plain, self._state),
            "damaged": session.damaged >= 0,
            "quarantined": session.finding is not None,
        }

    def _fold_quickly(self, many: Sequence[Sequence[Met]]) -> None:
        """As a run does it: without care first, and with care where the machine raised."""
        careful = self.plain.may_half_change
        mark = self.mark() if careful else None
        unfit = any(self._fold_run(run, careful=False) for run in many)
        if mark is not None and (unfit or not self._is_savable()):
            self.back(mark)
            for run in many:
                self._fold_run(run, careful=True)
        self.session.careful, self._copy = careful, STALE

    def _fold_run(self, run: Sequence[Met], *, careful: bool) -> bool:
        """Fold neighbours, over halts; whether that must be done again with care."""
        self._elapse(run[0].time)
        stretch, unfit = joined(run), False
        while len(stretch) and not unfit:
            self.session.careful = careful
            self.fold.begin()
            folded = self.fold.stretch(stretch)
            unfit = self.plain.may_half_change and not careful and (bool(self.fold.raised) or not self._fit(folded))
            after = folded.consumed + 1 if self.fold.halt is not None else len(stretch)
            stretch = part_of(stretch, after, len(stretch))
        return unfit

    def _fit(self, folded: Folded) -> bool:
        """Whether records fit their columns."""
        try:
            self.plain.check(folded.rows)
        except Exception:  # noqa: BLE001  # whatever it is, the careful fold finds it at its message
            return False
        return True

    def _is_savable(self) -> bool:
        """Whether the state can be saved."""
        try:
            self.plain.dump(self.session.state)
        except Exception:  # noqa: BLE001  # whatever it is, the careful fold finds it at its message
            return False
        return True

    def _copy_of(self, session: Session) -> Any:
        if session.state is not None:
            return copied(self.plain, session.state)
        if session.saved is None:
            return None
        try:
            return self.plain.load(session.saved, session.version)
        except Exception:  # noqa: BLE001  # the user's own `upgrade`: the fold tells it as a finding
            return None

    def _records(self, folded: Folded) -> list[dict[str, Any]]:
        made = []
        for row, (record, index) in enumerate(zip(folded.rows, folded.indexes, strict=True)):
            table, source = table_of(record), folded.sources.get(row)
            columns = self.plain.others.get(table, self.plain.columns)
            beside = {} if table == MAIN else {"table": table}
            waited = {} if source is None else {"source_offset": source.offset}
            made.append(
                {"index": index, **beside, **waited, **settled(columns, dict(zip(columns, record, strict=True)))}
            )
        return made

    def _findings(self) -> list[Seen]:
        """What was found at the last message, with what the tier only counts."""
        tally = self.fold.tally
        causes = {mark.finding: mark.cause for mark in reversed(tally.marks)}
        found = [Seen(one.finding, one.level, one.cause or _wanted(one)) for one in tally.findings]
        met = {one.finding for one in found}
        return found + [
            Seen(kind, "counted", causes.get(kind, "")) for kind in tally.counts.findings if kind not in met
        ]

    def _outcome(self, folded: Folded, offset: int, findings: list[Seen]) -> str:  # noqa: PLR0911  # one per outcome
        kinds, counts = {one.finding for one in findings}, self.fold.counts
        if self.fold.halt is not None:
            return "halts"
        if any(held.offset == offset for held in self.session.waiting):
            return "waits"
        if folded.kept:
            return "set aside"
        if counts.headless:
            return "headless"
        if "poison" in kinds:
            return "skipped"
        if any(action(kind, self.stream.tier) in ("drop", "heal") for kind in kinds & {"repeat", "disorder"}):
            return "dropped"
        return "ended, applied" if counts.ended else "applied"


def _wanted(finding: Any) -> str:
    return f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found


def part_of(stretch: Stretch, start: int, end: int) -> Stretch:
    """Messages of a stretch, from one position to another."""
    headers = None if stretch.headers is None else stretch.headers[start:end]
    times, keys, values = stretch.timestamps[start:end], stretch.keys[start:end], stretch.values[start:end]
    return Stretch(stretch.start + start, times, keys, values, headers)


def runs(messages: Iterable[Met]) -> Iterator[list[Met]]:
    """Messages that follow each other without one of somebody else between, a bounded number at a time."""
    run: list[Met] = []
    for one in messages:
        if run and (one.offset != run[-1].offset + 1 or len(run) >= RUN_MAX):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def chunks(runs: Iterable[list[Met]]) -> Iterator[list[list[Met]]]:
    """Runs that are folded before anybody copies a state: copying after each would cost more than folding."""
    many: list[list[Met]] = []
    held = 0
    for run in runs:
        many.append(run)
        held += len(run)
        if held >= CHUNK:
            yield many
            many, held = [], 0
    if many:
        yield many


def joined(run: Sequence[Met]) -> Stretch:
    """Neighbouring messages as one stretch."""
    return Stretch(run[0].offset, [one.timestamp for one in run], [one.key for one in run], [one.value for one in run])
