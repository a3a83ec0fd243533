"""`seriatim state`: what the machine holds for a session, now or at any point of its past.

Next room: operations/inspect/session_replay.py folds to a point; operations/status.py reads what an
entry saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.lookback import (
    InPartition,
    SessionName,
    Topic,
    open_lookback,
    parse_time_ms,
    print_json,
    render_value,
    shorten_text,
)
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.cli.lookback import LookbackCommand
    from seriatim.operations.inspect.session_replay import SessionReplay


@app.command()
def state(
    stream: StreamName,
    session: SessionName,
    topic: Topic = None,
    partition: InPartition = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="As of this ledger entry. Default: the last.")
    ] = None,
    at_offset: Annotated[
        int | None, typer.Option(min=0, help="After the message at this offset.")
    ] = None,
    at_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Before the first message at or after it: 2026-11-16T08:00:00Z."
        ),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="N M", help="What differs between two points: offsets, or times in UTC."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what the machine holds for a session: now, as of an entry, after any offset, or at any
    time.

    An offset is reached by folding on from the nearest saved state with the messages that Kafka
    has. Offsets are inclusive: --at-offset 41337 is the state after that message.

    Example: seriatim state demo session-00007 --at-offset 41337 Example: seriatim state demo
    session-00007 --diff 41000 41337
    """
    points = {"--version": version, "--at-offset": at_offset, "--at-time": at_time, "--diff": diff}
    given = [name for name, value in points.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are two answers", next="give one of them")
    if at_time is not None:
        parse_time_ms(at_time)
    if at_offset is None and at_time is None and diff is None:
        if partition is not None:
            raise ConfigError(
                "--partition is for a point of the past",
                next="give --at-offset with it, or use --topic",
            )
        _print_saved_state(stream, session, topic, version, json=json)
        return
    with open_lookback(stream, json=json) as opened:
        place, _ = opened.find_session(session, topic, partition)
        way = opened.session_replay(place, session)
        if diff is not None:
            _print_difference(opened, way, diff, json=json)
            return
        end = at_offset + 1 if at_offset is not None else opened.resolve_point(way, at_time or "")
        found = _state_values_at(opened, way, end)
        opened.stop_progress()
        print_json(found) if json else _print_state(found)


def _print_saved_state(
    stream: str, session: str, topic: str | None, version: int | None, *, json: bool
) -> None:
    """As an entry saved it."""
    from seriatim import context, stream_files
    from seriatim.ledger.commit import read_head
    from seriatim.operations.status import session_states
    from seriatim.operations.sweep import refuse_swept

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name, store = file.stream.name, context.ledger(file)
    head = read_head(store, name)
    if head is None:
        raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
    ledger = head.ledger if version is None else store.ledger_at(name, version)
    context.refuse_machine_for_ledger(file, ledger)
    try:
        found = session_states(
            file.stream, stream_files.load_runner(file), ledger, context.state(file), session, topic
        )
    except IntegrityError:
        refuse_swept(store, context.record_files(file), head.ledger, ledger.sequence, "state")
        raise
    if len(found) > 1:
        places = ", ".join(f"{one['topic']}/{one['partition']}" for one in found)
        raise ConfigError(
            f"{name}: session {session!r} lives in {places}", next="choose one with --topic"
        )
    print_json(found[0]) if json else _print_state(found[0])


def _fold_to_offset(command: LookbackCommand, replay: SessionReplay, end: int) -> None:
    """Fold to a point: all messages before `end`."""
    if end > max(replay.committed_end, replay.bounds.log_end):
        raise ConfigError(
            f"{command.name}: {replay.partition} has no offset {end - 1}: Kafka ends before {replay.bounds.log_end}",
            next=f"give an offset up to {replay.bounds.log_end - 1}",
        )
    replay.begin_at(end)
    replay.fold_to(end)
    if end > replay.committed_end:
        print_notice(
            f"{command.name}: {replay.partition} is committed up to offset {replay.committed_end}; beyond it is what a run would make"
        )


def _state_values_at(command: LookbackCommand, replay: SessionReplay, end: int) -> dict[str, Any]:
    from seriatim.operations.inspect.views import state_to_plain

    _fold_to_offset(command, replay, end)
    session = replay.tracing_fold.session
    return {
        "session": replay.session_name,
        "topic": replay.partition.topic,
        "partition": replay.partition.number,
        "offset": session.last_offset,
        "state_version": command.runner.state_version,
        "state": state_to_plain(command.runner, replay.tracing_fold.copy_of_state()),
        "status": "live" if session.finding is None else "quarantined",
        "sequence": session.sequence,
        "finding": session.finding,
        "at_offset": end - 1,
        "committed": end <= replay.committed_end,
    }


def _print_difference(
    command: LookbackCommand, replay: SessionReplay, points: tuple[str, str], *, json: bool
) -> None:
    """What differs between two points."""
    from seriatim.operations.inspect.views import diff_states

    ends = [command.resolve_point(replay, text) for text in points]
    states = []
    for end in ends:
        _fold_to_offset(command, replay, end)
        states.append(replay.tracing_fold.copy_of_state())
    found = [
        {"what": one.what, "before": one.before, "after": one.after}
        for one in diff_states(command.runner, *states)
    ]
    if json:
        place = {
            "session": replay.session_name,
            "topic": replay.partition.topic,
            "partition": replay.partition.number,
        }
        print_json(
            {**place, "from_offset": ends[0] - 1, "to_offset": ends[1] - 1, "changes": found}
        )
        return
    typer.echo(
        f"{shorten_text(replay.session_name)} in {replay.partition}: {len(found)} differ between offset {ends[0] - 1} and {ends[1] - 1}"
    )
    for one in found:
        typer.echo(
            f"  {render_value(one['what'])}  {render_value(one['before'])} → {render_value(one['after'])}"
        )


def _print_state(values: dict[str, Any]) -> None:
    import msgspec

    from seriatim.cli import output

    place = f"{values['topic']}/{values['partition']}"
    typer.echo(
        f"{shorten_text(values['session'])} in {place}, {values['status']}, as of offset {values['offset']}"
    )
    state = values["state"]
    if isinstance(state, dict) and list(state) == ["rows"] and state["rows"]:
        rows = [{name: _render_cell(value) for name, value in row.items()} for row in state["rows"]]
        output.print_table(list(rows[0]), rows)
    else:
        typer.echo(msgspec.json.format(msgspec.json.encode(state)).decode())


def _render_cell(value: Any) -> Any:
    """A column's value: false, null and an empty text are three things, and all look like nothing
    in a table.
    """
    return (
        render_value(value)
        if value is None or value is False or value is True or value == ""
        else value
    )
