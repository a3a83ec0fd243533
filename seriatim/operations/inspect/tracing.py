"""The trace: one session's way, message by message, by the real fold. Pure: whoever reads feeds it.

A `TracingFold` begins with a session as it was saved. `met` finds the session's messages, `step`
folds one and tells what it did: state before and after, records, findings, what became of it.
`pass_over` folds without looking. Everything that judges is the fold itself, so a trace cannot tell
another story than a run.

Next room: operations/inspect/session_replay.py finds where to begin, and reads; expression.py asks
questions of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.after_loss import tier_doubts_after_loss
from seriatim.engine.findings import tier_action
from seriatim.engine.fold import Fold
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch, Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import MAIN_TABLE, table_of_record
from seriatim.engine.session import FoldOutput, Session
from seriatim.engine.table import normalize_values
from seriatim.engine.tally import Tally
from seriatim.engine.undo import EACH_MESSAGE
from seriatim.operations.inspect.trace_step import TraceFinding, TraceStep
from seriatim.operations.inspect.views import copy_state, view_of_message, view_of_state
from seriatim.stream import Stream

ApplyFunction = Callable[[Any, Any], Sequence[tuple[Any, ...]]]
RUN_MESSAGES_MAX, CHUNK_MESSAGES = 5_000, 500
STALE_COPY: Any = object()
"""In place of a copy that is to be made."""


class Bookmark(Struct, frozen=True):
    """A place to come back to."""

    session: Session
    message_time_ms: int


class SessionMessage(Struct, frozen=True, gc=False):
    """One message of the session, and the largest time of all messages before it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    time_before_ms: int = -1

    @property
    def as_batch(self) -> MessageBatch:
        """As a stretch of its own."""
        return MessageBatch(self.offset, [self.timestamp], [self.key], [self.value])


class TracingMachine:
    """A machine that can be looked into: each message goes through `apply`, by way of `hook` if
    there is one.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.is_tracing = runner, False
        self.apply_hook: Callable[[ApplyFunction, Any, Any], Sequence[tuple[Any, ...]]] | None = (
            None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def apply(self, state: Any, message: Any) -> Sequence[tuple[Any, ...]]:
        """One message's records."""
        return (
            self.apply_hook(self.runner.apply, state, message)
            if self.apply_hook
            else self.runner.apply(state, message)
        )

    def fold_usual(self, *arguments: Any) -> Any:
        """All positions while each message is looked at."""
        return range(len(arguments[3])) if self.is_tracing else self.runner.fold_usual(*arguments)


class ResettableFold(Fold):
    """The fold, with an account of its own for each thing that is looked at."""

    def reset(self) -> None:
        """Nothing was met so far. A run waits at a halt; who looks goes on."""
        self.tally = Tally(self.partition)
        self.counts = self.tally.counts
        self._contradictions_before = self._known_contradictions = self.runner.contradictions
        self.halt = None
        self.half_changed_sessions.clear()


class TracingFold:
    """One session of one partition, folded on from a saved state."""

    def __init__(
        self,
        stream: Stream,
        runner: Runner,
        partition: Partition,
        name: str,
        session: Session | None,
        *,
        message_time_ms: int = -1,
        headless_since: int = -1,
        moved_sessions: Mapping[str, str] | None = None,
    ) -> None:
        self.stream, self.runner, self.name = stream, runner, name
        self.tracing_machine = TracingMachine(runner)
        self._row_key, self._has_session_field = name.encode(), stream.session_field is not None
        self.fold = ResettableFold(
            partition,
            cast("Runner", self.tracing_machine),
            stream.tier,
            stream.on_poison,
            lambda _: {},
            has_session_field=self._has_session_field,
            undoable={name: EACH_MESSAGE} if runner.may_half_change else {},
            moved_sessions=moved_sessions,
            limits=stream.limits,
            message_time_ms=message_time_ms,
            headless_since=headless_since,
        )
        self.session, self._message_time_ms = session or Session(), message_time_ms
        self.folded_messages = 0
        """Messages of the session so far."""

    @property
    def session(self) -> Session:
        """The session as it is."""
        return self.fold.sessions[self.name]

    @session.setter
    def session(self, session: Session) -> None:
        session.is_undoable = self.runner.may_half_change
        session.is_active &= session.state is not None
        self.fold.sessions[self.name] = session
        self._state_copy = STALE_COPY

    @property
    def _current_state(self) -> Any:
        """The state as it is, in a copy that is made when somebody looks."""
        if self._state_copy is STALE_COPY:
            self._state_copy = self._copy_state_of(self.session)
        return self._state_copy

    def bookmark(self) -> Bookmark:
        """Where it is, to come back to."""
        now = self.session
        held = replace(
            now,
            state=copy_state(self.runner, now.state),
            missing_sequences=list(now.missing_sequences),
            waiting_messages=list(now.waiting_messages),
        )
        return Bookmark(held, self.fold.expiry.message_time_ms if self.fold.expiry else -1)

    def go_back(self, bookmark: Bookmark) -> None:
        """As it was at the mark, which can be used again."""
        held = bookmark.session
        self.session = replace(
            held,
            state=copy_state(self.runner, held.state),
            missing_sequences=list(held.missing_sequences),
            waiting_messages=list(held.waiting_messages),
        )
        self.fold.half_changed_sessions.pop(self.name, None)
        if self.fold.expiry:
            self.fold.expiry.message_time_ms = bookmark.message_time_ms

    def copy_of_state(self) -> Any:
        """The machine's state as of now, in a copy; None: there is none."""
        return self._copy_state_of(self.session)

    def session_to_save(self) -> Session:
        """The session as it would be saved now."""
        now = self.session
        return (
            now
            if now.state is None
            else replace(now, state=None, state_bytes=self.runner.dump(now.state))
        )

    def session_messages(self, batch: MessageBatch) -> Iterator[SessionMessage]:
        """The session's messages of a stretch, each with the time of all before it: by that it may
        have expired.
        """
        own, times = (
            self._own_positions(batch),
            self._times_before(batch) if self.fold.expiry else None,
        )
        for i in own:
            time = -1 if times is None else times[i]
            yield SessionMessage(
                batch.start + i, int(batch.timestamps[i]), batch.keys[i], batch.values[i], time
            )

    def fold_untraced(self, messages: Iterable[SessionMessage]) -> int:
        """Fold messages without looking; how many they were."""
        count = 0
        for many in chunk_runs(neighbour_runs(messages)):
            self._fold_runs(many)
            count += sum(map(len, many))
        self.folded_messages += count
        return count

    def begin_doubt(self, headless_since: int) -> None:
        """Messages before this offset were lost and passed over: from here on the session is in
        doubt.
        """
        self.fold.headless_since = (
            headless_since if tier_doubts_after_loss(self.stream.tier) else -1
        )
        self.session.is_active = False  # it is judged when it wakes

    def _own_positions(self, batch: MessageBatch) -> list[int]:
        """Positions of the session's messages."""
        if not self._has_session_field:
            return [i for i, key in enumerate(batch.keys) if key == self._row_key]
        messages = self.runner.decode(batch.values)
        named = [None if m.__class__ is Poison else self.runner.session(m) for m in messages]
        return [i for i, name in enumerate(named) if name == self.name]

    def _times_before(self, batch: MessageBatch) -> list[int]:
        """The largest time before each message, of those that count: what cannot be decoded does
        not.
        """
        untimely, now, times = set(batch.invalid_timestamp_positions()), self._message_time_ms, []
        for i, message in enumerate(self.runner.decode(batch.values)):
            times.append(now)
            if message.__class__ is not Poison and i not in untimely:
                now = max(now, int(batch.timestamps[i]))
        self._message_time_ms = now
        return times

    def _advance_time(self, message_time_ms: int) -> None:
        """Let the time of messages of others go by."""
        if self.fold.expiry:
            self.fold.expiry.message_time_ms = max(
                self.fold.expiry.message_time_ms, message_time_ms
            )

    def trace_message(self, session_message: SessionMessage) -> TraceStep:
        """Fold one message, and tell what it did."""
        fold, part, before = self.fold, session_message.as_batch, self._current_state
        was_damaged, was_quarantined = (
            self.session.damaged_since_offset >= 0,
            self.session.finding is not None,
        )
        self._advance_time(session_message.time_before_ms)
        fold.reset()
        self.tracing_machine.is_tracing = True
        try:
            folded = fold.fold_batch(part)
        finally:
            self.tracing_machine.is_tracing = False
        self.folded_messages += 1
        self._state_copy = STALE_COPY
        message, findings = self.decode_message(part), self._trace_findings()
        return TraceStep(
            offset=part.start,
            timestamp=int(part.timestamps[0]),
            session=self.name,
            sequence=None if message.__class__ is Poison else self.runner.sequences([message])[0],
            message=message,
            raw=part.values[0],
            outcome=self._outcome(folded, part.start, findings),
            before=before,
            after=self._current_state,
            records=self._observe_records(folded),
            findings=findings,
            damaged=self.session.damaged_since_offset >= 0,
            quarantined=self.session.finding is not None,
            was_damaged=was_damaged,
            was_quarantined=was_quarantined,
            ended=fold.counts.ended > 0,
        )

    def decode_message(self, batch: MessageBatch) -> Any:
        """The one message of a stretch, as the machine takes it."""
        if batch.invalid_timestamp_positions():
            return Poison(
                f"its timestamp {batch.timestamps[0]} is no time between the years 1 and 9999"
            )
        return self.runner.decode(batch.values)[0]

    def expression_names_before(self, batch: MessageBatch) -> dict[str, Any]:
        """What an expression may ask of the one message of a stretch, before it is folded."""
        message, session = self.decode_message(batch), self.session
        poison = message.__class__ is Poison
        return {
            "offset": batch.start,
            "time": int(batch.timestamps[0]),
            "session": self.name,
            "sequence": None if poison else self.runner.sequences([message])[0],
            "message": view_of_message(self.runner, message, batch.values[0]),
            "state": view_of_state(self.runner, self._current_state),
            "damaged": session.damaged_since_offset >= 0,
            "quarantined": session.finding is not None,
        }

    def _fold_runs(self, runs: Sequence[Sequence[SessionMessage]]) -> None:
        """As a run does it: without care first, and with care where the machine raised."""
        careful = self.runner.may_half_change
        mark = self.bookmark() if careful else None
        unfit = any(self._fold_run(run, undoable=False) for run in runs)
        if mark is not None and (unfit or not self._is_savable()):
            self.go_back(mark)
            for run in runs:
                self._fold_run(run, undoable=True)
        self.session.is_undoable, self._state_copy = careful, STALE_COPY

    def _fold_run(self, run: Sequence[SessionMessage], *, undoable: bool) -> bool:
        """Fold neighbours, over halts; whether that must be done again with care."""
        self._advance_time(run[0].time_before_ms)
        stretch, unfit = batch_of_run(run), False
        while len(stretch) and not unfit:
            self.session.is_undoable = undoable
            self.fold.reset()
            folded = self.fold.fold_batch(stretch)
            unfit = (
                self.runner.may_half_change
                and not undoable
                and (bool(self.fold.half_changed_sessions) or not self._records_fit(folded))
            )
            after = folded.consumed_messages + 1 if self.fold.halt is not None else len(stretch)
            stretch = slice_batch(stretch, after, len(stretch))
        return unfit

    def _records_fit(self, output: FoldOutput) -> bool:
        """Whether records fit their columns."""
        try:
            self.runner.check_records(output.rows)
        except Exception:  # noqa: BLE001  # whatever it is, the careful fold finds it at its message
            return False
        return True

    def _is_savable(self) -> bool:
        """Whether the state can be saved."""
        try:
            self.runner.dump(self.session.state)
        except Exception:  # noqa: BLE001  # whatever it is, the careful fold finds it at its message
            return False
        return True

    def _copy_state_of(self, session: Session) -> Any:
        if session.state is not None:
            return copy_state(self.runner, session.state)
        if session.state_bytes is None:
            return None
        try:
            return self.runner.load(session.state_bytes, session.state_version)
        except Exception:  # noqa: BLE001  # the user's own `upgrade`: the fold tells it as a finding
            return None

    def _observe_records(self, output: FoldOutput) -> list[dict[str, Any]]:
        made = []
        for row, (record, index) in enumerate(zip(output.rows, output.indexes, strict=True)):
            table, source = table_of_record(record), output.source_messages.get(row)
            columns = self.runner.other_columns.get(table, self.runner.columns)
            beside = {} if table == MAIN_TABLE else {"table": table}
            waited = {} if source is None else {"source_offset": source.offset}
            made.append(
                {
                    "index": index,
                    **beside,
                    **waited,
                    **normalize_values(columns, dict(zip(columns, record, strict=True))),
                }
            )
        return made

    def _trace_findings(self) -> list[TraceFinding]:
        """What was found at the last message, with what the tier only counts."""
        tally = self.fold.tally
        causes = {mark.finding: mark.cause for mark in reversed(tally.marks)}
        found = [
            TraceFinding(one.finding, one.level, one.cause or _describe_expectation(one))
            for one in tally.findings
        ]
        met = {one.finding for one in found}
        return found + [
            TraceFinding(kind, "counted", causes.get(kind, ""))
            for kind in tally.counts.findings
            if kind not in met
        ]

    def _outcome(self, output: FoldOutput, offset: int, findings: list[TraceFinding]) -> str:  # noqa: PLR0911  # one per outcome
        kinds, counts = {one.finding for one in findings}, self.fold.counts
        if self.fold.halt is not None:
            return "halts"
        if any(held.offset == offset for held in self.session.waiting_messages):
            return "waits"
        if output.quarantined_messages:
            return "set aside"
        if counts.headless:
            return "headless"
        if "poison" in kinds:
            return "skipped"
        if any(
            tier_action(kind, self.stream.tier) in ("drop", "heal")
            for kind in kinds & {"repeat", "disorder"}
        ):
            return "dropped"
        return "ended, applied" if counts.ended else "applied"


def _describe_expectation(finding: Any) -> str:
    return (
        f"expected {finding.expected}, found {finding.found}" if finding.expected else finding.found
    )


def slice_batch(batch: MessageBatch, start: int, end: int) -> MessageBatch:
    """Messages of a stretch, from one position to another."""
    headers = None if batch.headers is None else batch.headers[start:end]
    times, keys, values = (
        batch.timestamps[start:end],
        batch.keys[start:end],
        batch.values[start:end],
    )
    return MessageBatch(batch.start + start, times, keys, values, headers)


def neighbour_runs(messages: Iterable[SessionMessage]) -> Iterator[list[SessionMessage]]:
    """Messages that follow each other without one of somebody else between, a bounded number at a
    time.
    """
    run: list[SessionMessage] = []
    for one in messages:
        if run and (one.offset != run[-1].offset + 1 or len(run) >= RUN_MESSAGES_MAX):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def chunk_runs(runs: Iterable[list[SessionMessage]]) -> Iterator[list[list[SessionMessage]]]:
    """Runs that are folded before anybody copies a state: copying after each would cost more than
    folding.
    """
    many: list[list[SessionMessage]] = []
    held = 0
    for run in runs:
        many.append(run)
        held += len(run)
        if held >= CHUNK_MESSAGES:
            yield many
            many, held = [], 0
    if many:
        yield many


def batch_of_run(run: Sequence[SessionMessage]) -> MessageBatch:
    """Neighbouring messages as one stretch."""
    return MessageBatch(
        run[0].offset,
        [one.timestamp for one in run],
        [one.key for one in run],
        [one.value for one in run],
    )
