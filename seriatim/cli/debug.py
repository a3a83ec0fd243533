"""Break points: a session's messages folded up to one that is wanted, then looked into, in pdb or step by step.

pdb is for a person at a terminal, and only there: whatever else asks gets the place printed. The stepper knows a few
letters, and never takes what it is given for code.

Next room: cli/replay.py has the command; core/expression.py says what a condition may be.
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

from seriatim.cli import say
from seriatim.cli.looking import plain, print_json, show_step, shown_time, step_values
from seriatim.core.expression import Expression
from seriatim.core.looks import shown, view_of_message
from seriatim.core.machine import Runner, UserMachine
from seriatim.core.step import AFTER, Step, asked_after
from seriatim.core.trace import Met, Watched

if TYPE_CHECKING:
    from seriatim.steps.retrace import Way

HELP = "n next message · c on to the next break · s state · m message · r records and findings of the last · q quit"
ON_STATE = frozenset({"state", "damaged", "quarantined"})


class Wanted(Struct, kw_only=True):
    """Where to stop."""

    expression: Expression | None = None
    on_finding: bool = False
    every: bool = False
    """At each message."""

    def names(self) -> frozenset[str]:
        """What the condition asks for."""
        return frozenset() if self.expression is None else self.expression.names


def stops(way: Way, until: int, wanted: Wanted) -> Iterator[Met]:
    """The messages to stop at, each before it is folded: whoever asks folds it by `step`."""
    asks, names = wanted.expression, wanted.names()
    if wanted.every or wanted.on_finding or names & (ON_STATE | set(AFTER)):
        yield from _looking_at_each(way, until, wanted, late=wanted.on_finding or bool(names & set(AFTER)))
    elif asks is not None:
        yield from way.stops(until, lambda one: asks.holds(way.retrace.asked(one.part)))


def _looking_at_each(way: Way, until: int, wanted: Wanted, *, late: bool) -> Iterator[Met]:
    """What depends on the state is asked message by message; what only folding tells, by folding and going back."""
    for one in way.each(until):
        if wanted.every:
            yield one
        elif not late:
            if wanted.expression is not None and wanted.expression.holds(way.retrace.asked(one.part)):
                yield one
            else:
                way.step(one)
        else:
            place = way.mark()
            step = way.step(one)
            if _is_wanted(way, step, wanted):
                way.back(place)
                yield one


def _is_wanted(way: Way, step: Step, wanted: Wanted) -> bool:
    asks = wanted.expression
    return bool(wanted.on_finding and step.findings) or (
        asks is not None and asks.holds(asked_after(way.looking.runner, step))
    )


class Stepper:
    """A person who goes from message to message."""

    def __init__(
        self,
        way: Way,
        until: int,
        wanted: Wanted,
        *,
        json: bool = False,
        quiet: Callable[[], None] = lambda: None,
    ) -> None:
        self.way, self.until, self.wanted, self.json, self.quiet = way, until, wanted, json, quiet
        self.runner: Runner = way.looking.runner
        self.last: Step | None = None
        self.stopped = 0

    def once(self) -> None:
        """Nobody is there to talk to: print the first stop, and what the message does."""
        for one in stops(self.way, self.until, self.wanted):
            state = self.way.retrace.state()
            step = self.way.step(one)
            if self.json:
                values = step_values(self.runner, step, self.way.end)
                print_json({"stopped": one.offset, **values, "state": shown(self.runner, state)})
            else:
                self._here(one, state)
                show_step(self.runner, step, self.way.end)
            self.stopped += 1
            return

    def talk(self, read: Callable[[], str]) -> None:
        """Stop at each wanted message, and do what is typed."""
        late = self.wanted.on_finding or bool(self.wanted.names() & set(AFTER))
        for one in _looking_at_each(self.way, self.until, self.wanted, late=late):
            self.stopped += 1
            self._here(one, self.way.retrace.state())
            answer = self._asked(one, read)
            if answer == "q":
                return
            self.last = self.way.step(one)
            show_step(self.runner, self.last, self.way.end)
            self.wanted.every = answer == "n"

    def _asked(self, one: Met, read: Callable[[], str]) -> str:
        while True:
            typed = read().strip()
            if typed in ("n", "", "c", "q"):
                return typed or "n"
            if typed == "s":
                typer.echo(plain_state(self.runner, self.way.retrace.state()))
            elif typed == "m":
                typer.echo(plain(view_of_message(self.runner, self.way.retrace.decoded(one.part), one.part.values[0])))
            elif typed == "r" and self.last is not None:
                typer.echo(plain({"records": self.last.records, "findings": [f.finding for f in self.last.findings]}))
            else:
                typer.echo(HELP)

    def debug(self, terminal: tuple[IO[str], IO[str]] | None = None) -> None:
        """Stop inside the machine's own `apply`, in pdb, at each wanted message."""
        for one in stops(self.way, self.until, self.wanted):
            self.stopped += 1
            self._here(one, self.way.retrace.state())
            debugger = Debugger(self.runner, self.last, terminal)
            watched: Watched = self.way.retrace.watched
            watched.hook = debugger.call
            try:
                self.last = self.way.step(one)
            finally:
                watched.hook = None
            if debugger.quitted:
                return
            show_step(self.runner, self.last, self.way.end)

    def _here(self, one: Met, state: Any) -> None:
        self.quiet()
        part = one.part
        typer.secho(f"● before offset {one.offset}  {shown_time(int(part.timestamps[0]))}", bold=True)
        typer.echo(
            f"    message   {plain(view_of_message(self.runner, self.way.retrace.decoded(part), part.values[0]))}"
        )
        typer.echo(f"    state     {plain(shown(self.runner, state))}")


def plain_state(runner: Runner, state: Any) -> str:
    """A whole state, laid out."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(shown(runner, state), enc_hook=str)).decode()


class Debugger(pdb.Pdb):
    """pdb, from the first line of the machine's `apply` on, with `state`, `message` and `records` at hand."""

    def __init__(self, runner: Runner, last: Step | None, terminal: tuple[IO[str], IO[str]] | None) -> None:
        stdin, stdout = terminal or (None, None)
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        if terminal is not None:
            self.use_rawinput = False
        method: Any = runner.machine.apply if isinstance(runner, UserMachine) else runner.apply
        self.code = getattr(unwrap(getattr(method, "__func__", method)), "__code__", None)
        """Where it stops; None: `apply` is no function with a source."""
        self.at_hand: dict[str, Any] = {"records": [] if last is None else last.records}
        self.quitted = False

    def call(
        self, apply: Callable[[Any, Any], Sequence[tuple[Any, ...]]], state: Any, message: Any
    ) -> Sequence[tuple[Any, ...]]:
        """One `apply` under the debugger."""
        if self.code is None:
            say("the machine's apply is no plain function: it cannot be stopped in")
            return apply(state, message)
        self.at_hand |= {"state": state, "message": message}
        self.reset()
        self.botframe = sys._getframe()
        lines = [line for _, line in dis.findlinestarts(self.code) if line > self.code.co_firstlineno]
        self.set_break(self.code.co_filename, min(lines, default=self.code.co_firstlineno), temporary=True)
        self.set_continue()
        sys.settrace(self.trace_dispatch)
        try:
            made: Sequence[tuple[Any, ...]] = apply(state, message)
        except bdb.BdbQuit:
            self.quitted = True
            raise
        finally:
            sys.settrace(None)
        return made

    def setup(self, f: Any, tb: Any) -> None:
        """Where it stopped; with names that are always there."""
        super().setup(f, tb)
        names: Any = self.curframe_locals
        for name, value in self.at_hand.items():
            names.setdefault(name, value)


def is_terminal() -> bool:
    """Whether a person sits there."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_line() -> str:
    """What is typed; nothing more means quit."""
    typer.echo("(seriatim) ", nl=False)
    line = sys.stdin.readline()
    return line or "q"


def unseen(stream: str, wanted: Wanted) -> None:
    """Fields that nothing ever had are probably misspelled."""
    if wanted.expression is not None and wanted.expression.unseen:
        fields = ", ".join(sorted(wanted.expression.unseen))
        say(f"{stream}: no message or state had {fields}: is it spelled right?")
