"""`seriatim bisect`: the first message after which a session's state breaks an invariant.

Next room: steps/bisect.py hunts; core/expression.py is what an invariant may say.
"""

from __future__ import annotations

import re
from pathlib import Path
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
    sequence, damaged, quarantined. A function gets the state and says True or False; its module must lie beside the
    stream file, others are refused (exit code 2). Exit code 3 where it breaks, 0 where it holds at the end.

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
    function = load_function(opened.file.folder, text)

    def holds(names: Any) -> bool:
        try:
            return bool(function(names["state"]))
        except Exception as error:
            raise ConfigError(
                f"--invariant {text} fails at offset {names['offset']}: {type(error).__name__}: {error}",
                next=f"fix {text}: it takes the state",
            ) from error

    return holds, None


def load_function(folder: str, text: str) -> Any:
    """A function that the user wrote, by `module:name`. A module that is not beside the stream file is not imported."""
    import importlib
    import sys

    module, _, name = text.partition(":")
    if folder not in sys.path:
        sys.path.append(folder)
    if not _is_beside(folder, module):
        raise ConfigError(
            f"--invariant {text}: {module} is not beside the stream file, so it is not imported",
            next=f"write the function in a file of your own in {folder}; it may import what it needs",
        )
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


def _is_beside(folder: str, module: str) -> bool:
    """Whether Python would take a module from this folder itself. Asking imports nothing; nobody has it: true."""
    import importlib.util

    top_name = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top_name)
    except ValueError:  # a module of the running program that has no file
        return False
    if spec is None:
        return True
    if spec.submodule_search_locations is not None:
        places = list(spec.submodule_search_locations)
    elif spec.has_location:
        places = [spec.origin or ""]
    else:  # it is built into Python, and has no file
        return False
    # Only what lies directly in the folder: a virtual environment may lie deeper in it.
    return all(Path(place).absolute().parent == Path(folder).absolute() for place in places)


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
