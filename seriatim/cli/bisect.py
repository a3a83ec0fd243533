"""`seriatim bisect`: the first message after which a session's state breaks an invariant.

Next: operations/inspect/bisect.py searches; operations/inspect/condition.py says what an invariant
may contain.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.lookback import (
    From,
    InPartition,
    LookbackCommand,
    SessionName,
    Topic,
    Until,
    open_lookback,
    print_step,
    step_values,
)
from seriatim.cli.options import Json, StreamName
from seriatim.cli.output import sequence_or_none
from seriatim.engine.findings import count_of, shell_quote, shorten
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.operations.inspect.bisect import INVARIANT_NAMES, Bisection, BisectResult, Invariant
from seriatim.operations.inspect.condition import Condition, parse_condition
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import TraceStep

FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
STEPS_AROUND = 3


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
        typer.Option(
            "--every",
            help="Check after each message. It also finds a break that heals again by itself.",
        ),
    ] = False,
    _json: Json = False,
) -> BrokenPlace:
    """Find the first message after which an invariant is broken.

    The messages around it are shown as well. The search checks saved states first, and then folds
    by halves between two of them. An invariant may use the names state, offset, time, session,
    sequence, damaged and quarantined. A function takes the state and returns True or False; its
    module must lie beside the stream file, others are refused (exit code 2). The exit code is 3 if
    the invariant breaks, and 0 if it holds at the end.

    Example: seriatim bisect demo session-00007 --invariant 'all(row.price >= 0 for row in
    state.rows)'
    """
    with open_lookback(stream) as command:
        invariant_check, condition = _parse_invariant(command, invariant)
        replay, begin, end = command.open_session(session, topic, partition, start, until)
        uses_state = condition is None or "state" in condition.names
        bisection = Bisection(replay, invariant_check, uses_state=uses_state)
        result = bisection.run(begin, end, check_every_message=every)
        command.stop_progress()
        if condition is not None and condition.unseen_fields:
            fields = ", ".join(sorted(condition.unseen_fields))
            print_notice(f"{command.name}: nothing ever had {fields}: is it spelled right?")
        return BrokenPlace(command, replay, result, _steps_around(replay, result), invariant)


def _parse_invariant(command: LookbackCommand, text: str) -> tuple[Invariant, Condition | None]:
    """The invariant as a check; and its condition, unless it is a function of the user."""
    if not FUNCTION_NAME.fullmatch(text):
        condition = parse_condition(text, INVARIANT_NAMES)
        return condition.is_true, condition
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
    """Import a function of the user by `module:name`.

    Only a module beside the stream file is imported; any other one is refused.
    """
    module, _, name = text.partition(":")
    # At the end, so that a file beside the stream cannot hide a module of the product.
    if folder not in sys.path:
        sys.path.append(folder)
    if not _is_beside(folder, module):
        raise ConfigError(
            f"--invariant {text}: {module} is not beside the stream file, so it is not imported",
            next=f"write the function in a file of your own in {folder}; it may import what it needs",
        )
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(
            f"--invariant {text}: {module} cannot be imported: {type(error).__name__}: {error}",
            next=f"put {module}.py beside the stream file",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"--invariant {text}: {module} has no function {name!r}",
            next=f"write def {name}(state): …",
        )
    return function


def _is_beside(folder: str, module: str) -> bool:
    """Whether Python would import a module from this folder itself. Asking imports nothing.

    A module that does not exist anywhere counts as beside: importing it fails with a better text.
    """
    top_name = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top_name)
    except ValueError:  # a module of the running program that has no file
        return False
    if spec is None:
        return True
    if spec.submodule_search_locations is not None:
        locations = list(spec.submodule_search_locations)
    elif spec.has_location:
        locations = [spec.origin or ""]
    else:  # it is built into Python, and has no file
        return False
    # Only what lies directly in the folder: a virtual environment may lie deeper in it.
    stream_folder = Path(folder).absolute()
    return all(Path(location).absolute().parent == stream_folder for location in locations)


class BrokenPlace(CommandResult):
    """The first message after which an invariant is broken, with the messages around it."""

    command: LookbackCommand
    replay: SessionReplay
    result: BisectResult
    steps_around: list[TraceStep]
    invariant: str

    def to_json(self) -> JsonObject:
        """The offsets, what the search cost, and the messages around the broken place."""
        result = self.result
        around = [
            step_values(self.command.runner, step, self.replay.committed_end)
            for step in self.steps_around
        ]
        return {
            "stream": self.command.name,
            "session": self.replay.session_name,
            "partition": str(self.replay.partition),
            "broken": sequence_or_none(result.first_broken_offset),
            "good": result.last_good_offset,
            "base": result.start_offset,
            "end": result.end_offset,
            "folds": result.folds,
            "messages": result.messages,
            "looked": result.saved_states_checked,
            "parted": result.saved_state_differs,
            "around": around,
        }

    def render(self) -> str:
        """The messages around the broken place, or that the invariant holds."""
        result = self.result
        cost = (
            f"{count_of(result.folds, 'fold')} over {count_of(result.messages, 'message')},"
            f" {result.saved_states_checked} saved states looked at"
        )
        if result.first_broken_offset >= 0:
            for step in self.steps_around:
                is_broken = step.offset == result.first_broken_offset
                mark = "→ " if is_broken else "  "
                print_step(self.command.runner, step, self.replay.committed_end, mark=mark)
            return cost
        if result.saved_state_differs:
            return ""
        return (
            f"{self.command.name}: it holds after offset {result.end_offset - 1} ({cost});"
            " --every looks after each message"
        )

    def error(self) -> SeriatimError | None:
        """The broken invariant, in the replay or in the saved state."""
        name = self.command.name
        replay = self.replay
        result = self.result
        short_invariant = shorten(self.invariant, 100)
        if result.saved_state_differs:
            return IntegrityError(
                f"{name}: {replay.partition}: the state saved at offset {result.end_offset} breaks"
                f" {short_invariant}, and what is folded there today does not:"
                " the machine, or the stream's file, changed since",
                session=shorten(replay.session_name),
                next=f"compare: seriatim replay {name} --to DIR, then seriatim diff {name} DIR;"
                f" seriatim repair {name} replaces it",
            )
        if result.first_broken_offset < 0:
            return None
        good = ""
        if result.last_good_offset >= 0:
            good = f"after offset {result.last_good_offset} it did"
        return IntegrityError(
            f"{name}: {replay.partition}: after offset {result.first_broken_offset}"
            f" {short_invariant} does not hold any more",
            session=shorten(replay.session_name),
            good=good,
            next=f"look at what touched the row: seriatim explain {name} --row KEY"
            f" --session {shell_quote(replay.session_name)} --topic {replay.partition.topic}",
        )


def _steps_around(replay: SessionReplay, result: BisectResult) -> list[TraceStep]:
    """The messages before and after the first broken one; empty if the invariant holds."""
    if result.first_broken_offset < 0:
        return []
    replay.begin_at(result.start_offset)
    offsets = replay.cache_messages(min(result.end_offset, replay.bounds.log_end))
    broken_index = offsets.index(result.first_broken_offset)
    begin_index = max(0, broken_index - STEPS_AROUND)
    shown_offsets = offsets[begin_index : broken_index + STEPS_AROUND + 1]
    replay.fold_to(shown_offsets[0])
    return list(replay.steps(shown_offsets[-1] + 1))
