"""`seriatim bisect`: the first message after which a session's state breaks an invariant.

Next room: operations/inspect/bisect.py hunts; operations/inspect/expression.py is what an invariant
may say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim.cli import app, print_notice
from seriatim.cli.lookback import (
    From,
    InPartition,
    SessionName,
    Topic,
    Until,
    open_lookback,
    print_json,
    print_step,
    step_values,
)
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.cli.lookback import LookbackCommand
    from seriatim.operations.inspect.bisect import BisectResult, Invariant
    from seriatim.operations.inspect.expression import Expression
    from seriatim.operations.inspect.session_replay import SessionReplay
    from seriatim.operations.inspect.trace_step import TraceStep

FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
STEPS_AROUND = 3


@app.command()
def bisect(
    stream: StreamName,
    session: SessionName,
    invariant: Annotated[
        str,
        typer.Option(
            help="What must hold after every message: 'len(state.rows) < 500', or module:function."
        ),
    ],
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    every: Annotated[
        bool,
        typer.Option("--every", help="Look after each message: for what heals again by itself."),
    ] = False,
    json: Json = False,
) -> None:
    """Find the first message of a session after which an invariant does not hold, and show what is
    around it.

    Looks at saved states first, then folds by halves between two of them. Names: state, offset,
    time, session, sequence, damaged, quarantined. A function gets the state and says True or False;
    its module must lie beside the stream file, others are refused (exit code 2). Exit code 3 where
    it breaks, 0 where it holds at the end.

    Example: seriatim bisect demo session-00007 --invariant 'all(row.price >= 0 for row in
    state.rows)'
    """
    from seriatim.operations.inspect.bisect import Bisection

    with open_lookback(stream, json=json) as opened:
        asked, expression = _parse_invariant(opened, invariant)
        place, first = opened.find_session(session, topic, partition)
        way = opened.session_replay(place, session)
        begin = opened.begin_replay(way, start, first)
        end = min(
            opened.resolve_offset(way, until, way.committed_end),
            max(way.committed_end, way.bounds.log_end),
        )
        of_state = expression is None or "state" in expression.names
        done = Bisection(way, asked, uses_state=of_state).run(begin, end, check_every_message=every)
        opened.stop_progress()
        if expression is not None and expression.unseen_fields:
            print_notice(
                f"{opened.name}: nothing ever had {', '.join(sorted(expression.unseen_fields))}: is it spelled right?"
            )
        _print_result(opened, way, done, invariant, json=json)


def _parse_invariant(command: LookbackCommand, text: str) -> tuple[Invariant, Expression | None]:
    """What a person typed, as something to be asked."""
    from seriatim.operations.inspect.bisect import INVARIANT_NAMES
    from seriatim.operations.inspect.expression import parse_expression

    if not FUNCTION_NAME.fullmatch(text):
        expression = parse_expression(text, INVARIANT_NAMES)
        return expression.is_true, expression
    function = load_function(command.file.folder, text)

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
    """A function that the user wrote, by `module:name`. A module that is not beside the stream file
    is not imported.
    """
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
        raise ConfigError(
            f"--invariant {text}: {module} has no function {name!r}",
            next=f"write def {name}(state): …",
        )
    return found


def _is_beside(folder: str, module: str) -> bool:
    """Whether Python would take a module from this folder itself. Asking imports nothing; nobody
    has it: true.
    """
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


def _print_result(
    command: LookbackCommand,
    replay: SessionReplay,
    result: BisectResult,
    invariant: str,
    *,
    json: bool,
) -> None:
    """The place and what is around it; a broken invariant ends with exit code 3."""
    from seriatim.engine.findings import shell_quote, shorten

    cost = f"{result.folds} folds over {result.messages} messages, {result.saved_states_checked} saved states looked at"
    around = _steps_around(replay, result) if result.first_broken_offset >= 0 else []
    if json:
        values = {
            "good": result.last_good_offset,
            "base": result.start_offset,
            "end": result.end_offset,
            "folds": result.folds,
            "messages": result.messages,
            "looked": result.saved_states_checked,
            "parted": result.saved_state_differs,
        }
        steps = [step_values(command.runner, step, replay.committed_end) for step in around]
        broken = result.first_broken_offset if result.first_broken_offset >= 0 else None
        place = {
            "stream": command.name,
            "session": replay.session_name,
            "partition": str(replay.partition),
        }
        print_json({**place, "broken": broken, **values, "around": steps})
    elif result.first_broken_offset < 0 and not result.saved_state_differs:
        typer.echo(
            f"{command.name}: it holds after offset {result.end_offset - 1} ({cost}); --every looks after each message"
        )
    elif result.first_broken_offset >= 0:
        for step in around:
            print_step(
                command.runner,
                step,
                replay.committed_end,
                mark="→ " if step.offset == result.first_broken_offset else "  ",
            )
        typer.echo(cost)
    if result.saved_state_differs:
        raise IntegrityError(
            f"{command.name}: {replay.partition}: the state saved at offset {result.end_offset} breaks {shorten(invariant, 100)},"
            " and what is folded there today does not: the machine, or the stream's file, changed since",
            session=shorten(replay.session_name),
            next=f"compare: seriatim replay {command.name} --to DIR, then seriatim diff {command.name} DIR;"
            f" seriatim repair {command.name} makes it so",
        )
    if result.first_broken_offset >= 0:
        told = f"after offset {result.first_broken_offset} {shorten(invariant, 100)} does not hold any more"
        raise IntegrityError(
            f"{command.name}: {replay.partition}: {told}",
            session=shorten(replay.session_name),
            good=f"after offset {result.last_good_offset} it did"
            if result.last_good_offset >= 0
            else "",
            next=f"look at what touched the row: seriatim explain {command.name} --row KEY --session {shell_quote(replay.session_name)}"
            f" --topic {replay.partition.topic}",
        )


def _steps_around(replay: SessionReplay, result: BisectResult) -> list[TraceStep]:
    """The messages before and after the place."""
    replay.begin_at(result.start_offset)
    offsets = replay.cache_messages(min(result.end_offset, replay.bounds.log_end))
    at = offsets.index(result.first_broken_offset)
    near = offsets[max(0, at - STEPS_AROUND) : at + STEPS_AROUND + 1]
    replay.fold_to(near[0])
    return list(replay.steps(near[-1] + 1))
