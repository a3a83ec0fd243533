"""`seriatim bisect`: the first message after which a session's state breaks an invariant.

Next room: steps/bisect.py hunts; core/expression.py is what an invariant may say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim.cli import app, say
from seriatim.cli.looking import (
    From,
    InPartition,
    SessionName,
    Topic,
    Until,
    lookback,
    print_json,
    show_step,
    step_values,
)
from seriatim.cli.run import Json, StreamName
from seriatim.core.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.cli.looking import Lookback
    from seriatim.core.expression import Expression
    from seriatim.core.step import Step
    from seriatim.steps.bisect import Bisected, Invariant
    from seriatim.steps.retrace import Way

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
AROUND = 3


@app.command()
def bisect(
    stream: StreamName,
    session: SessionName,
    invariant: Annotated[
        str, typer.Option(help="What must hold after every message: 'len(state.rows) < 500', or module:function.")
    ],
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    every: Annotated[
        bool, typer.Option("--every", help="Look after each message: for what heals again by itself.")
    ] = False,
    json: Json = False,
) -> None:
    """Find the first message of a session after which an invariant does not hold, and show what is around it.

    Looks at saved states first, then folds by halves between two of them. Names: state, offset, time, session,
    sequence, damaged, quarantined. A function, from a module beside the stream file, gets the state and says True or
    False. Exit code 3 where it breaks, 0 where it holds at the end.

    Example: seriatim bisect demo session-00007 --invariant 'all(row.price >= 0 for row in state.rows)'
    """
    from seriatim.steps.bisect import Bisecting

    with lookback(stream, json=json) as opened:
        asked, expression = _invariant(opened, invariant)
        place, first = opened.find(session, topic, partition)
        way = opened.way(place, session)
        begin = opened.begin(way, start, first)
        end = min(opened.offset(way, until, way.end), max(way.end, way.seen.log_end))
        of_state = expression is None or "state" in expression.names
        done = Bisecting(way, asked, of_state=of_state).run(begin, end, every=every)
        opened.quiet()
        if expression is not None and expression.unseen:
            say(f"{opened.name}: nothing ever had {', '.join(sorted(expression.unseen))}: is it spelled right?")
        _tell(opened, way, done, invariant, json=json)


def _invariant(opened: Lookback, text: str) -> tuple[Invariant, Expression | None]:
    """What a person typed, as something to be asked."""
    from seriatim.core.expression import parse
    from seriatim.steps.bisect import ROOTS

    if not FUNCTION.fullmatch(text):
        expression = parse(text, ROOTS)
        return expression.holds, expression
    function = _function(opened, text)

    def holds(names: Any) -> bool:
        try:
            return bool(function(names["state"]))
        except Exception as error:
            raise ConfigError(
                f"--invariant {text} fails at offset {names['offset']}: {type(error).__name__}: {error}",
                next=f"fix {text}: it takes the state",
            ) from error

    return holds, None


def _function(opened: Lookback, text: str) -> Any:
    import importlib
    import sys

    module, _, name = text.partition(":")
    if opened.file.folder not in sys.path:
        sys.path.append(opened.file.folder)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(
            f"--invariant {text}: {module} cannot be imported: {type(error).__name__}: {error}",
            next=f"put {module}.py beside the stream file",
        ) from error
    if not callable(found):
        raise ConfigError(f"--invariant {text}: {module} has no function {name!r}", next=f"write def {name}(state): …")
    return found


def _tell(opened: Lookback, way: Way, done: Bisected, invariant: str, *, json: bool) -> None:
    """The place and what is around it; a broken invariant ends with exit code 3."""
    from seriatim.core.integrity import shortened, typed

    cost = f"{done.folds} folds over {done.messages} messages, {done.looked} saved states looked at"
    around = _around(way, done) if done.broken >= 0 else []
    if json:
        values = {
            name: getattr(done, name) for name in ("good", "base", "end", "folds", "messages", "looked", "parted")
        }
        steps = [step_values(opened.runner, step, way.end) for step in around]
        broken = done.broken if done.broken >= 0 else None
        place = {"stream": opened.name, "session": way.name, "partition": str(way.partition)}
        print_json({**place, "broken": broken, **values, "around": steps})
    elif done.broken < 0 and not done.parted:
        typer.echo(f"{opened.name}: it holds after offset {done.end - 1} ({cost}); --every looks after each message")
    elif done.broken >= 0:
        for step in around:
            show_step(opened.runner, step, way.end, mark="→ " if step.offset == done.broken else "  ")
        typer.echo(cost)
    if done.parted:
        raise IntegrityError(
            f"{opened.name}: {way.partition}: the state saved at offset {done.end} breaks {shortened(invariant, 100)},"
            " and what is folded there today does not: the machine, or the stream's file, changed since",
            session=shortened(way.name),
            next=f"compare: seriatim replay {opened.name} --to DIR, then seriatim diff {opened.name} DIR;"
            f" seriatim repair {opened.name} makes it so",
        )
    if done.broken >= 0:
        told = f"after offset {done.broken} {shortened(invariant, 100)} does not hold any more"
        raise IntegrityError(
            f"{opened.name}: {way.partition}: {told}",
            session=shortened(way.name),
            good=f"after offset {done.good} it did" if done.good >= 0 else "",
            next=f"look at what touched the row: seriatim explain {opened.name} --row KEY --session {typed(way.name)}"
            f" --topic {way.partition.topic}",
        )


def _around(way: Way, done: Bisected) -> list[Step]:
    """The messages before and after the place."""
    way.begin(done.base)
    offsets = way.keep(min(done.end, way.seen.log_end))
    at = offsets.index(done.broken)
    near = offsets[max(0, at - AROUND) : at + AROUND + 1]
    way.to(near[0])
    return list(way.steps(near[-1] + 1))
