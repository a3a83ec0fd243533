"""`seriatim replay`: a session folded again up to a break point, or a range folded again into a
folder of its own.

Nothing of a replay is ever committed to the stream.

Next room: cli/break_points.py is the break point; operations/inspect/replay.py folds into a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seriatim.cli import app, print_notice
from seriatim.cli.lookback import From, InPartition, Topic, Until, check_session_name, open_lookback
from seriatim.cli.run import Json, StreamName
from seriatim.engine.findings import shell_quote
from seriatim.errors import ConfigError

BreakOption = Annotated[
    str | None,
    typer.Option(
        "--break", metavar="EXPRESSION", help="Stop where it is true: 'message.price < 0'."
    ),
]


@app.command()
def replay(
    stream: StreamName,
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]", help="To stop at its messages.", callback=check_session_name
        ),
    ] = None,
    condition: BreakOption = None,
    on_finding: Annotated[
        bool, typer.Option("--break-on-finding", help="Stop at every finding.")
    ] = False,
    step: Annotated[bool, typer.Option("--step", help="A simple stepper instead of pdb.")] = False,
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS", help="With --to: another machine, or path/to/file.py:Class."
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
    """Fold messages again without committing anything: stop at one and look into it, or write a
    folder to compare.

    With SESSION: stops before each message where the condition is true. On a terminal that is pdb,
    inside the machine's own `apply`, with `state`, `message` and `records`; with --step a few
    letters; elsewhere the first stop is printed. An expression may ask for offset, time, session,
    sequence, message, state, damaged, quarantined, and, of what the message does, records,
    findings, after, outcome.

    With --to DIR: a range of all partitions, or of --partition, is folded into DIR, by this
    stream's machine or another; `seriatim diff` compares it with what is committed.

    Example: seriatim replay demo session-00007 --break 'offset == 41337' Example: seriatim replay
    demo --from 41000 --partition demo-a/3 --machine fixed:OrderBook --to /tmp/again
    """
    if to is not None:
        from seriatim.cli.replay_range import replay_into_folder

        if session is not None or condition is not None or on_finding or step:
            raise ConfigError(
                "--to folds all sessions, a break point is for one", next="give one or the other"
            )
        edges = {"start": start, "until": until}
        replay_into_folder(
            stream,
            to,
            machine=machine,
            partition=partition,
            topic=topic,
            fresh=fresh,
            json=json,
            **edges,
        )
        return
    if session is None or machine is not None or fresh:
        raise ConfigError(
            "a replay stops in one session, or goes into a folder",
            next=f"seriatim replay {shell_quote(stream)} SESSION --break 'offset == 41337', or --to DIR",
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
    from seriatim.cli.break_points import (
        BreakPoint,
        Stepper,
        is_terminal,
        read_line,
        warn_unseen_fields,
    )
    from seriatim.operations.inspect.expression import parse_expression
    from seriatim.operations.inspect.trace_step import NAMES_AFTER_FOLD, NAMES_BEFORE_FOLD

    expression = (
        None
        if condition is None
        else parse_expression(condition, (*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD))
    )
    with open_lookback(stream, json=json) as opened:
        place, first = opened.find_session(session, topic, partition)
        way = opened.session_replay(place, session)
        begin = opened.begin_replay(way, start, first)
        end = min(
            opened.resolve_offset(way, until, way.committed_end),
            max(way.committed_end, way.bounds.log_end),
        )
        way.fold_to(begin)
        wanted = BreakPoint(
            expression=expression,
            on_finding=on_finding,
            at_every_message=step and condition is None and not on_finding,
        )
        stepper = Stepper(way, end, wanted, json=json, stop_progress=opened.stop_progress)
        if step and not json:
            stepper.run_interactive(read_line)
        elif is_terminal() and not json:
            stepper.run_debugger()
        else:
            stepper.print_first_stop()
        if not stepper.stop_count:
            warn_unseen_fields(opened.name, wanted)
            print_notice(
                f"{opened.name}: session {session!r}: nothing stopped it in {place} [{begin}, {end})",
                stopped=None,
            )
