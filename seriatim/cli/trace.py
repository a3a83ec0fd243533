"""`seriatim trace`: one session, message by message, with what each did.

Next room: operations/inspect/session_replay.py goes the session's way; cli/lookback.py shows a
step.
"""

from __future__ import annotations

from typing import Annotated

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


@app.command()
def trace(
    stream: StreamName,
    session: SessionName,
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    findings: Annotated[
        bool, typer.Option("--findings", help="Only messages with findings.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many messages.")] = None,
    json: Json = False,
) -> None:
    """Show each message of a session: offset, time, message, rows before → after, records,
    findings.

    Folds in this process, from the nearest saved state on, with the stream's own machine and tier;
    no Spark, and nothing is changed. From the session's first message to the frontier; --until may
    lie beyond it: that shows what the next run would do. With --json one object a line.

    Example: seriatim trace demo session-00007 --from 41000 --until 41020
    """
    with open_lookback(stream, json=json) as opened:
        place, first = opened.find_session(session, topic, partition)
        way = opened.session_replay(place, session)
        begin = opened.begin_replay(way, start, first)
        end = min(
            opened.resolve_offset(way, until, way.committed_end),
            max(way.committed_end, way.bounds.log_end),
        )
        way.fold_to(begin)
        opened.stop_progress()
        shown = 0
        for step in way.steps(end):
            if findings and not step.findings:
                continue
            if json:
                print_json(step_values(opened.runner, step, way.committed_end))
            else:
                print_step(opened.runner, step, way.committed_end)
            shown += 1
            if shown == limit:
                return
        if way.differs_from_saved():
            told = f"{opened.name}: at offset {way.next_offset} this is not the state that was committed: the machine or the"
            print_notice(
                f"{told} stream's file changed since; --from {way.next_offset} begins with the committed one",
                parted=way.next_offset,
            )
        if not shown:
            what = "findings" if findings else "messages"
            print_notice(
                f"{opened.name}: session {session!r} has no {what} in {place} [{begin}, {end})"
            )
