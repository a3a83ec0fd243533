"""`seriatim replay`: fold a session again up to a break point, or a range into a new folder.

A replay never commits anything to the stream.

Next: cli/break_points.py stops at messages; cli/replay_range.py folds into a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seriatim.cli import print_notice
from seriatim.cli.break_points import (
    BreakPoint,
    Stepper,
    is_terminal,
    read_line,
    warn_unseen_fields,
)
from seriatim.cli.lookback import From, InPartition, Topic, Until, check_session_name, open_lookback
from seriatim.cli.options import Json, StreamName
from seriatim.cli.replay_range import replay_into_folder
from seriatim.engine.findings import shell_quote
from seriatim.errors import ConfigError
from seriatim.operations.inspect.condition import parse_condition
from seriatim.operations.inspect.tracing import NAMES_AFTER_FOLD, NAMES_BEFORE_FOLD

BreakOption = Annotated[
    str | None,
    typer.Option(
        "--break",
        metavar="EXPRESSION",
        help="Stop where this is true, for example 'message.price < 0'.",
    ),
]


def replay(
    stream: StreamName,
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]",
            help="Stop at messages of this session.",
            callback=check_session_name,
        ),
    ] = None,
    condition: BreakOption = None,
    on_finding: Annotated[
        bool, typer.Option("--break-on-finding", help="Stop at every finding.")
    ] = False,
    step: Annotated[
        bool, typer.Option("--step", help="Use a simple stepper instead of pdb.")
    ] = False,
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="With --to: fold by another machine. It may also be path/to/file.py:Class.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="With --to: begin without saved states, as another machine does."
        ),
    ] = False,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Fold a range into this new folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Fold messages again without a commit, to look into them.

    With SESSION the replay stops before each message for which the condition is true. On a terminal
    it stops in pdb, inside the machine's own `apply`, with the names `state`, `message` and
    `records`. With --step a few letters are the commands. Without a terminal the first stop is
    printed. A condition may use offset, time, session, sequence, message, state, damaged and
    quarantined; and what the message does: records, findings, after and outcome.

    With --to DIR a range of all partitions, or of --partition, is folded into DIR, by the stream's
    machine or by another. `seriatim diff` compares it with the committed output.

    Example: seriatim replay demo session-00007 --break 'offset == 41337'

    Example: seriatim replay demo --from 41000 --partition demo-a/3 --machine fixed:OrderBook --to
    /tmp/again
    """
    if to is not None:
        if session is not None or condition is not None or on_finding or step:
            raise ConfigError(
                "--to folds all sessions, a break point is for one", next="give one or the other"
            )

        replay_into_folder(
            stream,
            to,
            machine=machine,
            partition=partition,
            topic=topic,
            start=start,
            until=until,
            fresh=fresh,
            json=json,
        )
        return
    if session is None or machine is not None or fresh:
        raise ConfigError(
            "a replay stops in one session, or goes into a folder",
            next=f"seriatim replay {shell_quote(stream)} SESSION --break 'offset == 41337',"
            " or --to DIR",
        )
    if condition is None and not on_finding and not step:
        raise ConfigError(
            "a replay must know where to stop", next="give --break, --break-on-finding or --step"
        )
    _stop_at_break_points(
        stream,
        session,
        condition,
        topic,
        partition,
        start,
        until,
        on_finding=on_finding,
        step=step,
        json=json,
    )


def _stop_at_break_points(
    stream: str,
    session: str,
    condition: str | None,
    topic: str | None,
    partition: str | None,
    start: str | None,
    until: str | None,
    *,
    on_finding: bool,
    step: bool,
    json: bool,
) -> None:
    """Replay one session, and stop: in the stepper, in pdb, or by printing the first stop."""
    parsed_condition = None
    if condition is not None:
        parsed_condition = parse_condition(condition, (*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD))
    with open_lookback(stream) as command:
        session_replay, begin, end = command.open_session(session, topic, partition, start, until)
        session_replay.fold_to(begin)
        break_point = BreakPoint(
            condition=parsed_condition,
            on_finding=on_finding,
            at_every_message=step and condition is None and not on_finding,
        )
        stepper = Stepper(
            session_replay, end, break_point, json=json, stop_progress=command.stop_progress
        )
        if step and not json:
            stepper.run_interactive(read_line)
        elif is_terminal() and not json:
            stepper.run_debugger()
        else:
            stepper.print_first_stop()
        if not stepper.stop_count:
            warn_unseen_fields(command.name, break_point)
            print_notice(
                f"{command.name}: session {session!r}: nothing stopped it"
                f" in {session_replay.partition} [{begin}, {end})",
                stopped=None,
            )
