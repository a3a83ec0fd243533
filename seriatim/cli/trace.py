"""`seriatim trace`: show one session message by message, with what each message did.

Next: operations/inspect/session_replay.py folds the session; cli/lookback.py prints a step.
"""

from __future__ import annotations

from typing import Annotated

import typer

from seriatim.cli import print_json, print_notice
from seriatim.cli.lookback import (
    From,
    InPartition,
    SessionName,
    Topic,
    Until,
    open_lookback,
    print_step,
    step_values,
)
from seriatim.cli.options import Json, StreamName
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.operations.inspect.tracing import TraceStep


def trace(
    stream: StreamName,
    session: SessionName,
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    findings: Annotated[
        bool, typer.Option("--findings", help="Show only messages with findings.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show at most this many messages.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a session message by message, with what each did.

    Each message has its offset and time, and the row changes, records and findings that it gave.
    The command folds in this process, from the nearest saved state on, with the stream's own
    machine and tier. It needs no Spark, and changes nothing. It begins at the session's first
    message and ends at the frontier. If --until is beyond the frontier, it shows what the next run
    would do. With --json it prints one object per line.

    Example: seriatim trace demo session-00007 --from 41000 --until 41020
    """
    with open_lookback(stream) as command:
        replay, begin, end = command.open_session(session, topic, partition, start, until)
        replay.fold_to(begin)
        command.stop_progress()
        shown_count = 0
        for step in replay.steps(end):
            if findings and not step.findings:
                continue
            _print_step(command.runner, step, replay.committed_end, json=json)
            shown_count += 1
            if shown_count == limit:
                # The end was not reached, so nothing can be said about the state there.
                return
        if replay.differs_from_saved():
            _warn_of_other_state(command.name, replay.next_offset)
        if not shown_count:
            subject = "findings" if findings else "messages"
            _print_nothing_shown(command.name, session, subject, replay.partition, begin, end)


def _warn_of_other_state(stream: str, offset: int) -> None:
    """Warn that the trace ended with another state than the one that was committed."""
    print_notice(
        f"{stream}: at offset {offset} this is not the state that was committed:"
        " the machine or the stream's file changed since;"
        f" --from {offset} begins with the committed one",
        parted=offset,
    )


def _print_step(runner: Runner, step: TraceStep, frontier: int, *, json: bool) -> None:
    if json:
        print_json(step_values(runner, step, frontier))
    else:
        print_step(runner, step, frontier)


def _print_nothing_shown(
    stream: str, session: str, subject: str, partition: Partition, begin: int, end: int
) -> None:
    print_notice(f"{stream}: session {session!r} has no {subject} in {partition} [{begin}, {end})")
