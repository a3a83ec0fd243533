"""Tracing: one session folded message by message, by the same fold that a run uses. It does no I/O.

A `TracingFold` begins with a session as it was saved. The caller hands it the messages:

1. `session_messages` picks the session's messages out of a batch of the partition.
2. `trace_message` folds one of them and returns what it did: the state before and after, records,
   findings, outcome.
3. `fold_untraced` folds many of them fast, without returning anything about them.

All decisions are those of engine/fold.py, so a trace cannot show something else than a run did.

Next: operations/inspect/session_replay.py chooses where to begin, and reads the messages;
operations/inspect/condition.py evaluates questions about a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import tier_action
from seriatim.engine.fold import Fold
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch, Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.records import MAIN_TABLE, Record, table_of_record
from seriatim.engine.rules import tier_doubts_after_loss
from seriatim.engine.session import FoldOutput, RefoldScope, Row, Session, SwappedRanges
from seriatim.engine.table import normalize_values
from seriatim.engine.undo import EACH_MESSAGE
from seriatim.operations.inspect.views import copy_state, view_of_message, view_of_state
from seriatim.stream import Stream

ApplyFunction = Callable[[Any, Any], Sequence[Row]]
ApplyHook = Callable[[ApplyFunction, Any, Any], Sequence[Row]]
RUN_MESSAGES_MAX = 5_000
"""How many neighbouring messages are folded as one batch, at most."""
CHUNK_MESSAGES = 500
"""After how many untraced messages a snapshot is taken, if the machine needs snapshots."""
STALE_COPY: Any = object()
"""Stands for a copy of the state that has to be made again. None cannot: it means "no state"."""


NAMES_BEFORE_FOLD = (
    "offset",
    "time",
    "session",
    "sequence",
    "message",
    "state",
    "damaged",
    "quarantined",
)
"""The names that a condition about a message has before the message is folded."""
NAMES_AFTER_FOLD = ("records", "findings", "after", "outcome")
"""The names that it has only after the message is folded."""


class TraceFinding(Struct, frozen=True, omit_defaults=True):
    """A finding at one message."""

    finding: str
    level: str
    """error, warning, or counted: the tier only counts it."""
    cause: str = ""


class TraceStep(Struct, kw_only=True):
    """One message of a session, and what it did to the session."""

    offset: int
    timestamp: int
    session: str
    sequence: int | None
    message: Any
    """The message as the machine takes it; `Poison` if it cannot be decoded."""
    raw: bytes | None
    outcome: str
    """applied; ended, applied; waits; dropped; headless; set aside; skipped; halts."""
    before: Any
    """The machine's state before the message; None: there was none."""
    after: Any
    records: list[Record] = field(default_factory=list)
    findings: list[TraceFinding] = field(default_factory=list)
    damaged: bool = False
    """Whether the session is damaged after the message."""
    quarantined: bool = False
    """Whether the session is in quarantine after the message."""
    was_damaged: bool = False
    was_quarantined: bool = False
    ended: bool = False


class FoldSnapshot(Struct, frozen=True):
    """A copy of everything that folding changes, for `TracingFold.restore_snapshot`."""

    session: Session
    message_time_ms: int
    headless_since: int


class SessionMessage(Struct, frozen=True, gc=False):
    """One message of the session, and the largest time of all messages before it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    time_before_ms: int = -1

    @property
    def as_batch(self) -> MessageBatch:
        """A batch with this message alone."""
        return MessageBatch(self.offset, [self.timestamp], [self.key], [self.value])


class TracingMachine:
    """The machine as the tracing fold sees it.

    While `is_tracing`, every message goes through `apply`. If there is an `apply_hook`, `apply`
    calls it instead of the machine; a break point in the machine's code is set that way.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.is_tracing = False
        self.apply_hook: ApplyHook | None = None

    def __getattr__(self, name: str) -> Any:
        # Everything that is not defined here is the machine's own.
        return getattr(self.runner, name)

    def apply(self, state: Any, message: Any) -> Sequence[Row]:
        """Fold one message into the state, and return its records."""
        if self.apply_hook is not None:
            return self.apply_hook(self.runner.apply, state, message)
        return self.runner.apply(state, message)

    def fold_usual(self, *arguments: Any) -> Any:
        """The positions that the machine's fast fold leaves to `apply`: all of them while tracing."""
        if not self.is_tracing:
            return self.runner.fold_usual(*arguments)
        messages = arguments[3]
        return range(len(messages))


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
        swapped_ranges: SwappedRanges | None = None,
    ) -> None:
        self.stream = stream
        self.runner = runner
        self.name = name
        self.tracing_machine = TracingMachine(runner)
        self._row_key = name.encode()
        self._has_session_field = stream.session_field is not None
        self.fold = Fold(
            partition,
            cast("Runner", self.tracing_machine),
            stream.tier,
            stream.on_poison,
            # No session is ever loaded by the fold: the only one is set below.
            lambda _: {},
            has_session_field=self._has_session_field,
            undoable={name: EACH_MESSAGE} if runner.may_half_change else {},
            moved_sessions=moved_sessions,
            limits=stream.limits,
            message_time_ms=message_time_ms,
            headless_since=headless_since,
            scope=RefoldScope(swapped_ranges=swapped_ranges) if swapped_ranges else None,
        )
        self.session = session or Session()
        self._message_time_ms = message_time_ms
        """The largest time of all messages of the partition that `session_messages` has read."""
        self.folded_messages = 0
        """How many messages of the session were folded so far."""

    @property
    def session(self) -> Session:
        """The session as it is after the messages so far."""
        return self.fold.sessions[self.name]

    @session.setter
    def session(self, session: Session) -> None:
        session.is_undoable = self.runner.may_half_change
        # The fold decodes a saved state when it makes the session active.
        session.is_active &= session.state is not None
        self.fold.sessions[self.name] = session
        self._state_copy = STALE_COPY

    @property
    def _current_state(self) -> Any:
        """A copy of the state as it is, made only when it is asked for."""
        if self._state_copy is STALE_COPY:
            self._state_copy = self._copy_state_of(self.session)
        return self._state_copy

    def take_snapshot(self) -> FoldSnapshot:
        """A copy of the session and its clock, for `restore_snapshot`."""
        message_time_ms = -1
        if self.fold.expiry:
            message_time_ms = self.fold.expiry.message_time_ms
        return FoldSnapshot(
            self._copy_session(self.session), message_time_ms, self.fold.headless_since
        )

    def restore_snapshot(self, snapshot: FoldSnapshot) -> None:
        """Be as when the snapshot was taken. It can be used again."""
        self.session = self._copy_session(snapshot.session)
        # A message that failed halfway was folded after the snapshot was taken.
        self.fold.half_changed_sessions.pop(self.name, None)
        self.fold.headless_since = snapshot.headless_since
        if self.fold.expiry:
            self.fold.expiry.message_time_ms = snapshot.message_time_ms

    def _copy_session(self, session: Session) -> Session:
        """A copy that shares nothing with `session` which folding changes in place."""
        return replace(
            session,
            state=copy_state(self.runner, session.state),
            missing_sequences=list(session.missing_sequences),
            waiting_messages=list(session.waiting_messages),
        )

    def copy_of_state(self) -> Any:
        """A copy of the machine's state after the messages so far; None: there is none."""
        return self._copy_state_of(self.session)

    def session_to_save(self) -> Session:
        """The session as it would be saved now."""
        session = self.session
        if session.state is None:
            return session
        return replace(session, state=None, state_bytes=self.runner.dump(session.state))

    def session_messages(self, batch: MessageBatch) -> Iterator[SessionMessage]:
        """The session's messages in a batch of the partition.

        Batches must come in order, since messages of other sessions let time pass as well: each
        message carries the largest time before it, by which the session may have expired.
        """
        positions = self._own_positions(batch)
        times_before = None
        if self.fold.expiry:
            times_before = self._times_before(batch)
        for i in positions:
            yield SessionMessage(
                offset=batch.start + i,
                timestamp=int(batch.timestamps[i]),
                key=batch.keys[i],
                value=batch.values[i],
                time_before_ms=-1 if times_before is None else times_before[i],
            )

    def fold_untraced(self, messages: Iterable[SessionMessage]) -> int:
        """Fold messages without tracing them, and return how many they were."""
        count = 0
        for runs in chunk_runs(neighbour_runs(messages)):
            self._fold_runs(runs)
            for run in runs:
                count += len(run)
        self.folded_messages += count
        return count

    def begin_doubt_after_loss(self, headless_since: int) -> None:
        """Messages before this offset were lost and passed over: the session is in doubt from here.

        Tiers that do not doubt after a loss ignore it.
        """
        if not tier_doubts_after_loss(self.stream.tier):
            headless_since = -1
        self.fold.headless_since = headless_since
        # The fold judges a session when it becomes active.
        self.session.is_active = False

    def _own_positions(self, batch: MessageBatch) -> list[int]:
        """Positions of the session's messages."""
        if self.runner.has_session_per_partition:
            return list(range(len(batch)))
        if not self._has_session_field:
            return [i for i, key in enumerate(batch.keys) if key == self._row_key]
        positions = []
        for i, message in enumerate(self.runner.decode(batch.values)):
            if message.__class__ is Poison:
                continue
            if self.runner.session(message) == self.name:
                positions.append(i)
        return positions

    def _times_before(self, batch: MessageBatch) -> list[int]:
        """The largest time before each message. Messages that cannot be decoded do not count."""
        invalid_positions = set(batch.invalid_timestamp_positions())
        largest_time = self._message_time_ms
        times = []
        for i, message in enumerate(self.runner.decode(batch.values)):
            times.append(largest_time)
            if message.__class__ is not Poison and i not in invalid_positions:
                largest_time = max(largest_time, int(batch.timestamps[i]))
        self._message_time_ms = largest_time
        return times

    def _advance_time(self, message_time_ms: int) -> None:
        """Let the time pass that messages of other sessions bring."""
        expiry = self.fold.expiry
        if expiry:
            expiry.message_time_ms = max(expiry.message_time_ms, message_time_ms)

    def trace_message(self, session_message: SessionMessage) -> TraceStep:
        """Fold one message, and return what it did."""
        batch = session_message.as_batch
        # What is shown as "before" is copied first: machines change the state in place.
        state_before = self._current_state
        was_damaged = self._is_damaged()
        was_quarantined = self._is_quarantined()
        output = self._fold_traced(session_message)
        message = self.decode_message(batch)
        findings = self._trace_findings()
        outcome = self._outcome(output, session_message.offset, findings)
        if message.__class__ is Poison and message.has_no_effect:
            outcome = "skipped"
        return TraceStep(
            offset=session_message.offset,
            timestamp=session_message.timestamp,
            session=self.name,
            sequence=self._sequence_of(message),
            message=message,
            raw=session_message.value,
            outcome=outcome,
            before=state_before,
            after=self._current_state,
            records=self._records_by_column(output),
            findings=findings,
            damaged=self._is_damaged(),
            quarantined=self._is_quarantined(),
            was_damaged=was_damaged,
            was_quarantined=was_quarantined,
            ended=self.fold.counts.ended > 0,
        )

    def _fold_traced(self, session_message: SessionMessage) -> FoldOutput:
        """Fold one message through `apply`, with findings and counts of its own."""
        self._advance_time(session_message.time_before_ms)
        self.fold.begin_tally()
        self.tracing_machine.is_tracing = True
        try:
            output = self.fold.fold_batch(session_message.as_batch)
        finally:
            self.tracing_machine.is_tracing = False
        self.folded_messages += 1
        self._state_copy = STALE_COPY
        return output

    def _is_damaged(self) -> bool:
        return self.session.damaged_since_offset >= 0

    def _is_quarantined(self) -> bool:
        return self.session.finding is not None

    def _sequence_of(self, message: Any) -> int | None:
        if message.__class__ is Poison:
            return None
        return self.runner.sequences([message])[0]

    def decode_message(self, batch: MessageBatch) -> Any:
        """The one message of a batch, as the machine takes it; `Poison` if it is none."""
        if batch.invalid_timestamp_positions():
            return Poison(
                f"its timestamp {batch.timestamps[0]} is no time between the years 1 and 9999"
            )
        return self.runner.decode(batch.values)[0]

    def condition_names_before(self, batch: MessageBatch) -> dict[str, Any]:
        """The names of a condition about the one message of a batch, before it is folded."""
        message = self.decode_message(batch)
        return {
            "offset": batch.start,
            "time": int(batch.timestamps[0]),
            "session": self.name,
            "sequence": self._sequence_of(message),
            "message": view_of_message(self.runner, message, batch.values[0]),
            "state": view_of_state(self.runner, self._current_state),
            "damaged": self._is_damaged(),
            "quarantined": self._is_quarantined(),
        }

    def _fold_runs(self, runs: Sequence[Sequence[SessionMessage]]) -> None:
        """Fold runs of neighbouring messages the way that a run of the stream does.

        1. Fold them fast, without a copy of the state at each message.
        2. If the machine raised halfway through a message, or made records or a state that cannot
           be written, go back and fold them again so that each message can be undone.
        """
        snapshot = None
        if self.runner.may_half_change:
            snapshot = self.take_snapshot()

        # 1. fast
        must_repeat = any(self._fold_run(run, undoable=False) for run in runs)

        # 2. again, with undo at each message
        if snapshot is not None and (must_repeat or not self._is_savable()):
            self.restore_snapshot(snapshot)
            for run in runs:
                self._fold_run(run, undoable=True)
        self.session.is_undoable = self.runner.may_half_change
        self._state_copy = STALE_COPY

    def _fold_run(self, run: Sequence[SessionMessage], *, undoable: bool) -> bool:
        """Fold neighbouring messages, also behind a halt; return whether that must be repeated."""
        self._advance_time(run[0].time_before_ms)
        batch = batch_of_run(run)
        while len(batch):
            self.session.is_undoable = undoable
            self.fold.begin_tally()
            output = self.fold.fold_batch(batch)
            if self._needs_undo(output, undoable=undoable):
                return True
            if self.fold.halt is None:
                return False
            # The fold stopped at a message at which a run halts. A replay goes on behind it.
            batch = slice_batch(batch, output.consumed_messages + 1, len(batch))
        return False

    def _needs_undo(self, output: FoldOutput, *, undoable: bool) -> bool:
        """Whether a fast fold left something that only a fold with undo handles."""
        if undoable or not self.runner.may_half_change:
            return False
        return bool(self.fold.half_changed_sessions) or not self._records_fit(output)

    def _records_fit(self, output: FoldOutput) -> bool:
        """Whether records fit their columns."""
        try:
            self.runner.check_records(output.rows)
        except Exception:  # noqa: BLE001  # the fold with undo finds the error at its message
            return False
        return True

    def _is_savable(self) -> bool:
        """Whether the state can be saved."""
        try:
            self.runner.dump(self.session.state)
        except Exception:  # noqa: BLE001  # the fold with undo finds the error at its message
            return False
        return True

    def _copy_state_of(self, session: Session) -> Any:
        if session.state is not None:
            return copy_state(self.runner, session.state)
        if session.state_bytes is None:
            return None
        try:
            return self.runner.load(session.state_bytes, session.state_version)
        except Exception:  # noqa: BLE001  # the user's `upgrade` raised: the fold reports a finding
            return None

    def _records_by_column(self, output: FoldOutput) -> list[Record]:
        """The records of a message, by column names, with their index, table and source."""
        records = []
        for row, values in enumerate(output.rows):
            record: Record = {"index": output.indexes[row]}
            table = table_of_record(values)
            if table != MAIN_TABLE:
                record["table"] = table
            source = output.source_messages.get(row)
            if source is not None:
                record["source_offset"] = source.offset
            columns = self.runner.other_columns.get(table, self.runner.columns)
            values_by_column = dict(zip(columns, values, strict=True))
            record.update(normalize_values(columns, values_by_column))
            records.append(record)
        return records

    def _trace_findings(self) -> list[TraceFinding]:
        """The findings at the last message, including those that the tier only counts."""
        tally = self.fold.tally
        findings = []
        reported_kinds = set()
        for finding in tally.findings:
            cause = finding.cause or _describe_expectation(finding)
            findings.append(TraceFinding(finding.finding, finding.level, cause))
            reported_kinds.add(finding.finding)
        # Reversed: of several marks of one kind, the first one's cause is shown.
        causes = {mark.finding: mark.cause for mark in reversed(tally.marks)}
        counted_findings = [
            TraceFinding(kind, "counted", causes.get(kind, ""))
            for kind in tally.counts.findings
            if kind not in reported_kinds
        ]
        return findings + counted_findings

    def _outcome(self, output: FoldOutput, offset: int, findings: list[TraceFinding]) -> str:  # noqa: PLR0911  # one per outcome
        """What became of the message, in one of the words that `TraceStep.outcome` lists."""
        counts = self.fold.counts
        kinds = {finding.finding for finding in findings}
        if self.fold.halt is not None:
            return "halts"
        if any(waiting.offset == offset for waiting in self.session.waiting_messages):
            return "waits"
        if output.quarantined_messages:
            return "set aside"
        if counts.headless:
            return "headless"
        if "poison" in kinds:
            return "skipped"
        for kind in kinds & {"repeat", "disorder"}:
            if tier_action(kind, self.stream.tier) in ("drop", "heal"):
                return "dropped"
        if counts.ended:
            return "ended, applied"
        return "applied"


def _describe_expectation(finding: Any) -> str:
    if finding.expected:
        return f"expected {finding.expected}, found {finding.found}"
    return str(finding.found)


def slice_batch(batch: MessageBatch, start: int, end: int) -> MessageBatch:
    """The messages of a batch from position `start` up to but without `end`."""
    return MessageBatch(
        batch.start + start,
        batch.timestamps[start:end],
        batch.keys[start:end],
        batch.values[start:end],
        None if batch.headers is None else batch.headers[start:end],
    )


def neighbour_runs(messages: Iterable[SessionMessage]) -> Iterator[list[SessionMessage]]:
    """Cut messages into runs of neighbouring offsets, each of RUN_MESSAGES_MAX at most.

    A batch has no holes, and messages of other sessions are holes in this one.
    """
    run: list[SessionMessage] = []
    for message in messages:
        is_full = len(run) >= RUN_MESSAGES_MAX
        if run and (is_full or message.offset != run[-1].offset + 1):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def chunk_runs(runs: Iterable[list[SessionMessage]]) -> Iterator[list[list[SessionMessage]]]:
    """Collect runs until they have CHUNK_MESSAGES messages.

    A snapshot is taken per chunk; one per run would cost more than the folding.
    """
    chunk: list[list[SessionMessage]] = []
    messages_in_chunk = 0
    for run in runs:
        chunk.append(run)
        messages_in_chunk += len(run)
        if messages_in_chunk >= CHUNK_MESSAGES:
            yield chunk
            chunk = []
            messages_in_chunk = 0
    if chunk:
        yield chunk


def batch_of_run(run: Sequence[SessionMessage]) -> MessageBatch:
    """Neighbouring messages as one batch."""
    return MessageBatch(
        run[0].offset,
        [message.timestamp for message in run],
        [message.key for message in run],
        [message.value for message in run],
    )


def condition_names_after(runner: Runner, step: TraceStep) -> dict[str, Any]:
    """The names of a condition about a message that is folded.

    Names that exist before folding as well have the same values here: `state` is the state before
    the message, and `damaged` and `quarantined` say how the session was before it.
    """
    finding_kinds = [finding.finding for finding in step.findings]
    return {
        "offset": step.offset,
        "time": step.timestamp,
        "session": step.session,
        "sequence": step.sequence,
        "message": view_of_message(runner, step.message, step.raw),
        "state": view_of_state(runner, step.before),
        "after": view_of_state(runner, step.after),
        "records": step.records,
        "findings": finding_kinds,
        "outcome": step.outcome,
        "damaged": step.was_damaged,
        "quarantined": step.was_quarantined,
    }
