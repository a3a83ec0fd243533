"""Break points of a replay: fold a session up to a message, then look into it in pdb or by steps.

pdb is only used for a person at a terminal. In any other case the first stop is printed. The
stepper accepts a few letters, and never runs its input as code.

Next: cli/replay.py has the command; operations/inspect/condition.py says what a condition may
contain.
"""

from __future__ import annotations

import bdb
import dis
import pdb  # noqa: T100  # a break point needs a debugger
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from types import CodeType
from typing import IO, Any

import msgspec
import typer
from msgspec import Struct

from seriatim.cli import print_json, print_notice
from seriatim.cli.lookback import print_step, render_time, render_value, step_values
from seriatim.engine.machine import Runner, UserMachine
from seriatim.operations.inspect.condition import Condition
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import (
    NAMES_AFTER_FOLD,
    SessionMessage,
    TraceStep,
    TracingMachine,
    condition_names_after,
)
from seriatim.operations.inspect.views import plain_view_of_message, state_to_plain

HELP = (
    "n next message · c on to the next break · s state · m message"
    " · r records and findings of the last · q quit"
)
STATE_NAMES = frozenset({"state", "damaged", "quarantined"})
"""Names of a condition that depend on the session's state before the message."""


class BreakPoint(Struct, kw_only=True):
    """Where a replay stops."""

    condition: Condition | None = None
    """Stop at messages for which this condition is true."""
    on_finding: bool = False
    """Stop at messages that have a finding."""
    at_every_message: bool = False
    """Stop at each message."""

    def condition_names(self) -> frozenset[str]:
        """The names that the condition uses."""
        if self.condition is None:
            return frozenset()
        return self.condition.names

    def needs_folding(self) -> bool:
        """Whether only folding a message tells if it is a stop."""
        uses_names_after = bool(self.condition_names() & set(NAMES_AFTER_FOLD))
        return self.on_finding or uses_names_after

    def needs_state(self) -> bool:
        """Whether the session's state must be known at each message."""
        uses_state = bool(self.condition_names() & STATE_NAMES)
        return self.at_every_message or self.needs_folding() or uses_state


def find_stops(
    replay: SessionReplay, until: int, break_point: BreakPoint
) -> Iterator[SessionMessage]:
    """The messages to stop at, each before it is folded. The caller folds it by `step`."""
    condition = break_point.condition
    if break_point.needs_state():
        yield from _find_stops_one_by_one(
            replay, until, break_point, after_folding=break_point.needs_folding()
        )
    elif condition is not None:

        def is_chosen(message: SessionMessage) -> bool:
            return condition.is_true(replay.tracing_fold.condition_names_before(message.as_batch))

        # The condition needs the message alone, so all messages between two stops are folded at
        # once, which is much faster.
        yield from replay.next_messages(until, is_chosen)


def _find_stops_one_by_one(
    replay: SessionReplay, until: int, break_point: BreakPoint, *, after_folding: bool
) -> Iterator[SessionMessage]:
    """Go message by message, for a condition that depends on the state.

    With `after_folding` each message is folded to see what it does. If it is a stop, the replay
    goes back to before it.
    """
    for message in replay.next_messages(until):
        if break_point.at_every_message:
            yield message
        elif not after_folding:
            if _is_stop_before(replay, message, break_point):
                yield message
            else:
                replay.step(message)
        else:
            position = replay.current_position()
            step = replay.step(message)
            if _is_stop_after(replay, step, break_point):
                replay.go_back(position)
                yield message


def _is_stop_before(
    replay: SessionReplay, message: SessionMessage, break_point: BreakPoint
) -> bool:
    condition = break_point.condition
    if condition is None:
        return False
    return condition.is_true(replay.tracing_fold.condition_names_before(message.as_batch))


def _is_stop_after(replay: SessionReplay, step: TraceStep, break_point: BreakPoint) -> bool:
    if break_point.on_finding and step.findings:
        return True
    condition = break_point.condition
    if condition is None:
        return False
    return condition.is_true(condition_names_after(replay.open_stream.runner, step))


class Stepper:
    """Stops a replay at messages, and shows them: printed once, step by step, or in pdb."""

    def __init__(
        self,
        replay: SessionReplay,
        until: int,
        break_point: BreakPoint,
        *,
        json: bool = False,
        stop_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.replay = replay
        self.until = until
        self.break_point = break_point
        self.json = json
        self.stop_progress = stop_progress
        self.runner: Runner = replay.open_stream.runner
        self.last_step: TraceStep | None = None
        self.stop_count = 0

    def print_first_stop(self) -> None:
        """Print the first stop and what its message does. Used where no person can answer."""
        for message in find_stops(self.replay, self.until, self.break_point):
            state = self.replay.tracing_fold.copy_of_state()
            step = self.replay.step(message)
            if self.json:
                values = step_values(self.runner, step, self.replay.committed_end)
                plain_state = state_to_plain(self.runner, state)
                print_json({"stopped": message.offset, **values, "state": plain_state})
            else:
                self._print_stop(message, state)
                print_step(self.runner, step, self.replay.committed_end)
            self.stop_count += 1
            return

    def run_interactive(self, read_command: Callable[[], str]) -> None:
        """Stop at each message of the break point, and do what the person types."""
        # Always one by one, since the person may change to stopping at every message at any time.
        stops = _find_stops_one_by_one(
            self.replay,
            self.until,
            self.break_point,
            after_folding=self.break_point.needs_folding(),
        )
        for message in stops:
            self.stop_count += 1
            self._print_stop(message, self.replay.tracing_fold.copy_of_state())
            command = self._read_command(message, read_command)
            if command == "q":
                return
            self.last_step = self.replay.step(message)
            print_step(self.runner, self.last_step, self.replay.committed_end)
            self.break_point.at_every_message = command == "n"

    def _read_command(self, message: SessionMessage, read_command: Callable[[], str]) -> str:
        """Answer questions about the stop until the person goes on or quits: `n`, `c` or `q`."""
        while True:
            command = read_command().strip()
            if command in ("n", "", "c", "q"):
                return command or "n"
            if command == "s":
                typer.echo(render_state(self.runner, self.replay.tracing_fold.copy_of_state()))
            elif command == "m":
                typer.echo(self._render_message(message))
            elif command == "r" and self.last_step is not None:
                findings = [finding.finding for finding in self.last_step.findings]
                typer.echo(render_value({"records": self.last_step.records, "findings": findings}))
            else:
                typer.echo(HELP)

    def run_debugger(self, terminal: tuple[IO[str], IO[str]] | None = None) -> None:
        """Stop in pdb, inside the machine's own `apply`, at each message of the break point."""
        for message in find_stops(self.replay, self.until, self.break_point):
            self.stop_count += 1
            self._print_stop(message, self.replay.tracing_fold.copy_of_state())
            debugger = Debugger(self.runner, self.last_step, terminal)
            tracing_machine: TracingMachine = self.replay.tracing_fold.tracing_machine
            tracing_machine.apply_hook = debugger.call_apply
            try:
                self.last_step = self.replay.step(message)
            finally:
                tracing_machine.apply_hook = None
            if debugger.has_quit:
                return
            print_step(self.runner, self.last_step, self.replay.committed_end)

    def _print_stop(self, message: SessionMessage, state: Any) -> None:
        self.stop_progress()
        time_text = render_time(int(message.as_batch.timestamps[0]))
        typer.secho(f"● before offset {message.offset}  {time_text}", bold=True)
        typer.echo(f"    message   {self._render_message(message)}")
        typer.echo(f"    state     {render_value(state_to_plain(self.runner, state))}")

    def _render_message(self, message: SessionMessage) -> str:
        batch = message.as_batch
        decoded = self.replay.tracing_fold.decode_message(batch)
        return render_value(plain_view_of_message(self.runner, decoded, batch.values[0]))


def render_state(runner: Runner, state: Any) -> str:
    """A complete state as indented JSON."""
    encoded = msgspec.json.encode(state_to_plain(runner, state), enc_hook=str)
    return msgspec.json.format(encoded).decode()


class Debugger(pdb.Pdb):
    """pdb that stops at the first line of the machine's `apply`.

    The names `state`, `message` and `records` (of the step before) can be used in it.
    """

    def __init__(
        self, runner: Runner, last_step: TraceStep | None, terminal: tuple[IO[str], IO[str]] | None
    ) -> None:
        stdin, stdout = terminal or (None, None)
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        if terminal is not None:
            self.use_rawinput = False
        method: Any = runner.machine.apply if isinstance(runner, UserMachine) else runner.apply
        function = unwrap(getattr(method, "__func__", method))
        self.apply_code = getattr(function, "__code__", None)
        """The code to stop in; None if `apply` is no function with a source."""
        records = [] if last_step is None else last_step.records
        self.named_values: dict[str, Any] = {"records": records}
        self.has_quit = False

    def call_apply(
        self, apply: Callable[[Any, Any], Sequence[tuple[Any, ...]]], state: Any, message: Any
    ) -> Sequence[tuple[Any, ...]]:
        """Call `apply` once under the debugger, and return its records."""
        if self.apply_code is None:
            print_notice("the machine's apply is no plain function: it cannot be stopped in")
            return apply(state, message)
        self.named_values |= {"state": state, "message": message}
        self.reset()
        # The stack that pdb shows ends here: the frames below are ours, not the machine's.
        self.botframe = sys._getframe()
        first_line = _first_body_line(self.apply_code)
        self.set_break(self.apply_code.co_filename, first_line, temporary=True)
        self.set_continue()
        sys.settrace(self.trace_dispatch)
        try:
            records: Sequence[tuple[Any, ...]] = apply(state, message)
        except bdb.BdbQuit:
            self.has_quit = True
            raise
        finally:
            sys.settrace(None)
        return records

    def setup(self, f: Any, tb: Any) -> None:
        """Prepare a stop; the names of `named_values` are added if the code has no such names."""
        super().setup(f, tb)
        frame_names: Any = self.curframe_locals
        for name, value in self.named_values.items():
            frame_names.setdefault(name, value)


def _first_body_line(code: CodeType) -> int:
    """The first line of a function's body: a break point on its `def` line is never hit."""
    def_line = code.co_firstlineno
    body_lines = [line for _, line in dis.findlinestarts(code) if line > def_line]
    return min(body_lines, default=def_line)


def is_terminal() -> bool:
    """Whether a person can answer: stdin and stdout are both a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_line() -> str:
    """Read one command; the end of the input means quit."""
    typer.echo("(seriatim) ", nl=False)
    line = sys.stdin.readline()
    return line or "q"


def warn_unseen_fields(stream: str, break_point: BreakPoint) -> None:
    """Warn of fields that no message and no state ever had: they are probably misspelled."""
    if break_point.condition is not None and break_point.condition.unseen_fields:
        fields = ", ".join(sorted(break_point.condition.unseen_fields))
        print_notice(f"{stream}: no message or state had {fields}: is it spelled right?")
