"""Break points: a session's messages folded up to one that is wanted, then looked into, in pdb or
step by step.

pdb is for a person at a terminal, and only there: whatever else asks gets the place printed. The
stepper knows a few letters, and never takes what it is given for code.

Next room: cli/replay.py has the command; operations/inspect/expression.py says what a condition may
be.
"""

from __future__ import annotations

import bdb
import dis
import pdb  # noqa: T100  # it is what a break point is for
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import unwrap
from typing import IO, TYPE_CHECKING, Any

import typer
from msgspec import Struct

from seriatim.cli import print_notice
from seriatim.cli.lookback import print_json, print_step, render_time, render_value, step_values
from seriatim.engine.machine import Runner, UserMachine
from seriatim.operations.inspect.expression import Expression
from seriatim.operations.inspect.trace_step import (
    NAMES_AFTER_FOLD,
    TraceStep,
    expression_names_after,
)
from seriatim.operations.inspect.tracing import SessionMessage, TracingMachine
from seriatim.operations.inspect.views import state_to_plain, view_of_message

if TYPE_CHECKING:
    from seriatim.operations.inspect.session_replay import SessionReplay

HELP = "n next message · c on to the next break · s state · m message · r records and findings of the last · q quit"
STATE_NAMES = frozenset({"state", "damaged", "quarantined"})


class BreakPoint(Struct, kw_only=True):
    """Where to stop."""

    expression: Expression | None = None
    on_finding: bool = False
    at_every_message: bool = False
    """At each message."""

    def expression_names(self) -> frozenset[str]:
        """What the condition asks for."""
        return frozenset() if self.expression is None else self.expression.names


def find_stops(
    replay: SessionReplay, until: int, break_point: BreakPoint
) -> Iterator[SessionMessage]:
    """The messages to stop at, each before it is folded: whoever asks folds it by `step`."""
    asks, names = break_point.expression, break_point.expression_names()
    if (
        break_point.at_every_message
        or break_point.on_finding
        or names & (STATE_NAMES | set(NAMES_AFTER_FOLD))
    ):
        yield from _find_stops_one_by_one(
            replay,
            until,
            break_point,
            after_folding=break_point.on_finding or bool(names & set(NAMES_AFTER_FOLD)),
        )
    elif asks is not None:
        yield from replay.chosen_messages(
            until,
            lambda one: asks.is_true(replay.tracing_fold.expression_names_before(one.as_batch)),
        )


def _find_stops_one_by_one(
    replay: SessionReplay, until: int, break_point: BreakPoint, *, after_folding: bool
) -> Iterator[SessionMessage]:
    """What depends on the state is asked message by message; what only folding tells, by folding
    and going back.
    """
    for one in replay.next_messages(until):
        if break_point.at_every_message:
            yield one
        elif not after_folding:
            if break_point.expression is not None and break_point.expression.is_true(
                replay.tracing_fold.expression_names_before(one.as_batch)
            ):
                yield one
            else:
                replay.step(one)
        else:
            place = replay.current_position()
            step = replay.step(one)
            if _is_stop(replay, step, break_point):
                replay.go_back(place)
                yield one


def _is_stop(replay: SessionReplay, step: TraceStep, break_point: BreakPoint) -> bool:
    asks = break_point.expression
    return bool(break_point.on_finding and step.findings) or (
        asks is not None and asks.is_true(expression_names_after(replay.context.runner, step))
    )


class Stepper:
    """A person who goes from message to message."""

    def __init__(
        self,
        replay: SessionReplay,
        until: int,
        break_point: BreakPoint,
        *,
        json: bool = False,
        stop_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.replay, self.until, self.break_point, self.json, self.stop_progress = (
            replay,
            until,
            break_point,
            json,
            stop_progress,
        )
        self.runner: Runner = replay.context.runner
        self.last_step: TraceStep | None = None
        self.stop_count = 0

    def print_first_stop(self) -> None:
        """Nobody is there to talk to: print the first stop, and what the message does."""
        for one in find_stops(self.replay, self.until, self.break_point):
            state = self.replay.tracing_fold.copy_of_state()
            step = self.replay.step(one)
            if self.json:
                values = step_values(self.runner, step, self.replay.committed_end)
                print_json(
                    {"stopped": one.offset, **values, "state": state_to_plain(self.runner, state)}
                )
            else:
                self._print_stop(one, state)
                print_step(self.runner, step, self.replay.committed_end)
            self.stop_count += 1
            return

    def run_interactive(self, read_command: Callable[[], str]) -> None:
        """Stop at each wanted message, and do what is typed."""
        late = self.break_point.on_finding or bool(
            self.break_point.expression_names() & set(NAMES_AFTER_FOLD)
        )
        for one in _find_stops_one_by_one(
            self.replay, self.until, self.break_point, after_folding=late
        ):
            self.stop_count += 1
            self._print_stop(one, self.replay.tracing_fold.copy_of_state())
            answer = self._read_command(one, read_command)
            if answer == "q":
                return
            self.last_step = self.replay.step(one)
            print_step(self.runner, self.last_step, self.replay.committed_end)
            self.break_point.at_every_message = answer == "n"

    def _read_command(self, message: SessionMessage, read_command: Callable[[], str]) -> str:
        while True:
            typed = read_command().strip()
            if typed in ("n", "", "c", "q"):
                return typed or "n"
            if typed == "s":
                typer.echo(render_state(self.runner, self.replay.tracing_fold.copy_of_state()))
            elif typed == "m":
                typer.echo(
                    render_value(
                        view_of_message(
                            self.runner,
                            self.replay.tracing_fold.decode_message(message.as_batch),
                            message.as_batch.values[0],
                        )
                    )
                )
            elif typed == "r" and self.last_step is not None:
                typer.echo(
                    render_value(
                        {
                            "records": self.last_step.records,
                            "findings": [f.finding for f in self.last_step.findings],
                        }
                    )
                )
            else:
                typer.echo(HELP)

    def run_debugger(self, terminal: tuple[IO[str], IO[str]] | None = None) -> None:
        """Stop inside the machine's own `apply`, in pdb, at each wanted message."""
        for one in find_stops(self.replay, self.until, self.break_point):
            self.stop_count += 1
            self._print_stop(one, self.replay.tracing_fold.copy_of_state())
            debugger = Debugger(self.runner, self.last_step, terminal)
            watched: TracingMachine = self.replay.tracing_fold.tracing_machine
            watched.apply_hook = debugger.call_apply
            try:
                self.last_step = self.replay.step(one)
            finally:
                watched.apply_hook = None
            if debugger.has_quit:
                return
            print_step(self.runner, self.last_step, self.replay.committed_end)

    def _print_stop(self, message: SessionMessage, state: Any) -> None:
        self.stop_progress()
        part = message.as_batch
        typer.secho(
            f"● before offset {message.offset}  {render_time(int(part.timestamps[0]))}", bold=True
        )
        typer.echo(
            f"    message   {render_value(view_of_message(self.runner, self.replay.tracing_fold.decode_message(part), part.values[0]))}"
        )
        typer.echo(f"    state     {render_value(state_to_plain(self.runner, state))}")


def render_state(runner: Runner, state: Any) -> str:
    """A whole state, laid out."""
    import msgspec

    return msgspec.json.format(
        msgspec.json.encode(state_to_plain(runner, state), enc_hook=str)
    ).decode()


class Debugger(pdb.Pdb):
    """pdb, from the first line of the machine's `apply` on, with `state`, `message` and `records`
    at hand.
    """

    def __init__(
        self, runner: Runner, last_step: TraceStep | None, terminal: tuple[IO[str], IO[str]] | None
    ) -> None:
        stdin, stdout = terminal or (None, None)
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        if terminal is not None:
            self.use_rawinput = False
        method: Any = runner.machine.apply if isinstance(runner, UserMachine) else runner.apply
        self.apply_code = getattr(unwrap(getattr(method, "__func__", method)), "__code__", None)
        """Where it stops; None: `apply` is no function with a source."""
        self.named_values: dict[str, Any] = {
            "records": [] if last_step is None else last_step.records
        }
        self.has_quit = False

    def call_apply(
        self, apply: Callable[[Any, Any], Sequence[tuple[Any, ...]]], state: Any, message: Any
    ) -> Sequence[tuple[Any, ...]]:
        """One `apply` under the debugger."""
        if self.apply_code is None:
            print_notice("the machine's apply is no plain function: it cannot be stopped in")
            return apply(state, message)
        self.named_values |= {"state": state, "message": message}
        self.reset()
        self.botframe = sys._getframe()
        lines = [
            line
            for _, line in dis.findlinestarts(self.apply_code)
            if line > self.apply_code.co_firstlineno
        ]
        self.set_break(
            self.apply_code.co_filename,
            min(lines, default=self.apply_code.co_firstlineno),
            temporary=True,
        )
        self.set_continue()
        sys.settrace(self.trace_dispatch)
        try:
            made: Sequence[tuple[Any, ...]] = apply(state, message)
        except bdb.BdbQuit:
            self.has_quit = True
            raise
        finally:
            sys.settrace(None)
        return made

    def setup(self, f: Any, tb: Any) -> None:
        """Where it stopped; with names that are always there."""
        super().setup(f, tb)
        names: Any = self.curframe_locals
        for name, value in self.named_values.items():
            names.setdefault(name, value)


def is_terminal() -> bool:
    """Whether a person sits there."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_line() -> str:
    """What is typed; nothing more means quit."""
    typer.echo("(seriatim) ", nl=False)
    line = sys.stdin.readline()
    return line or "q"


def warn_unseen_fields(stream: str, break_point: BreakPoint) -> None:
    """Fields that nothing ever had are probably misspelled."""
    if break_point.expression is not None and break_point.expression.unseen_fields:
        fields = ", ".join(sorted(break_point.expression.unseen_fields))
        print_notice(f"{stream}: no message or state had {fields}: is it spelled right?")
