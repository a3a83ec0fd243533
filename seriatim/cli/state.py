"""`seriatim state`: what the machine holds for a session, now or at any point of its past.

Next room: steps/retrace.py folds to a point; steps/status.py reads what an entry saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim import config
from seriatim.cli import Options, app, say
from seriatim.cli.looking import (
    InPartition,
    SessionName,
    Topic,
    lookback,
    plain,
    print_json,
    shortened,
    time_ms,
)
from seriatim.cli.run import Json, StreamName
from seriatim.core.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.cli.looking import Lookback
    from seriatim.steps.retrace import Way


@app.command()
def state(
    stream: StreamName,
    session: SessionName,
    topic: Topic = None,
    partition: InPartition = None,
    version: Annotated[int | None, typer.Option(min=0, help="As of this ledger entry. Default: the last.")] = None,
    at_offset: Annotated[int | None, typer.Option(min=0, help="After the message at this offset.")] = None,
    at_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Before the first message at or after it: 2026-11-16T08:00:00Z.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="N M", help="What differs between two points: offsets, or times in UTC."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what the machine holds for a session: now, as of an entry, after any offset, or at any time.

    An offset is reached by folding on from the nearest saved state with the messages that Kafka has. Offsets are
    inclusive: --at-offset 41337 is the state after that message.

    Example: seriatim state demo session-00007 --at-offset 41337
    Example: seriatim state demo session-00007 --diff 41000 41337
    """
    points = {"--version": version, "--at-offset": at_offset, "--at-time": at_time, "--diff": diff}
    given = [name for name, value in points.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are two answers", next="give one of them")
    if at_time is not None:
        time_ms(at_time)
    if at_offset is None and at_time is None and diff is None:
        if partition is not None:
            raise ConfigError("--partition is for a point of the past", next="give --at-offset with it, or use --topic")
        _saved(stream, session, topic, version, json=json)
        return
    with lookback(stream, json=json) as opened:
        place, _ = opened.find(session, topic, partition)
        way = opened.way(place, session)
        if diff is not None:
            _diff(opened, way, diff, json=json)
            return
        end = at_offset + 1 if at_offset is not None else opened.point(way, at_time or "")
        found = _at(opened, way, end)
        opened.quiet()
        print_json(found) if json else _show_state(found)


def _saved(stream: str, session: str, topic: str | None, version: int | None, *, json: bool) -> None:
    """As an entry saved it."""
    from seriatim import streams, wiring
    from seriatim.steps.commit import read_head
    from seriatim.steps.status import session_state
    from seriatim.steps.sweep import refuse_swept

    Options.json = json
    file = streams.load(stream, config.load().streams)
    name, store = file.stream.name, wiring.ledger(file)
    head = read_head(store, name)
    if head is None:
        raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
    ledger = head.ledger if version is None else store.at(name, version)
    wiring.refuse_code(file, ledger)
    try:
        found = session_state(file.stream, streams.runner(file), ledger, wiring.state(file), session, topic)
    except IntegrityError:
        refuse_swept(store, wiring.files(file), head.ledger, ledger.sequence, "state")
        raise
    if len(found) > 1:
        places = ", ".join(f"{one['topic']}/{one['partition']}" for one in found)
        raise ConfigError(f"{name}: session {session!r} lives in {places}", next="choose one with --topic")
    print_json(found[0]) if json else _show_state(found[0])


def _reach(opened: Lookback, way: Way, end: int) -> None:
    """Fold to a point: all messages before `end`."""
    if end > max(way.end, way.seen.log_end):
        raise ConfigError(
            f"{opened.name}: {way.partition} has no offset {end - 1}: Kafka ends before {way.seen.log_end}",
            next=f"give an offset up to {way.seen.log_end - 1}",
        )
    way.begin(end)
    way.to(end)
    if end > way.end:
        say(f"{opened.name}: {way.partition} is committed up to offset {way.end}; beyond it is what a run would make")


def _at(opened: Lookback, way: Way, end: int) -> dict[str, Any]:
    from seriatim.core.looks import shown

    _reach(opened, way, end)
    session = way.retrace.session
    return {
        "session": way.name,
        "topic": way.partition.topic,
        "partition": way.partition.number,
        "offset": session.last_offset,
        "state_version": opened.runner.state_version,
        "state": shown(opened.runner, way.retrace.state()),
        "status": "live" if session.finding is None else "quarantined",
        "sequence": session.sequence,
        "finding": session.finding,
        "at_offset": end - 1,
        "committed": end <= way.end,
    }


def _diff(opened: Lookback, way: Way, points: tuple[str, str], *, json: bool) -> None:
    """What differs between two points."""
    from seriatim.core.looks import changes

    ends = [opened.point(way, text) for text in points]
    states = []
    for end in ends:
        _reach(opened, way, end)
        states.append(way.retrace.state())
    found = [{"what": one.what, "before": one.before, "after": one.after} for one in changes(opened.runner, *states)]
    if json:
        place = {"session": way.name, "topic": way.partition.topic, "partition": way.partition.number}
        print_json({**place, "from_offset": ends[0] - 1, "to_offset": ends[1] - 1, "changes": found})
        return
    typer.echo(
        f"{shortened(way.name)} in {way.partition}: {len(found)} differ between offset {ends[0] - 1} and {ends[1] - 1}"
    )
    for one in found:
        typer.echo(f"  {plain(one['what'])}  {plain(one['before'])} → {plain(one['after'])}")


def _show_state(found: dict[str, Any]) -> None:
    import msgspec

    from seriatim.cli import show

    place = f"{found['topic']}/{found['partition']}"
    typer.echo(f"{shortened(found['session'])} in {place}, {found['status']}, as of offset {found['offset']}")
    state = found["state"]
    if isinstance(state, dict) and list(state) == ["rows"] and state["rows"]:
        rows = [{name: _told(value) for name, value in row.items()} for row in state["rows"]]
        show.table(list(rows[0]), rows)
    else:
        typer.echo(msgspec.json.format(msgspec.json.encode(state)).decode())


def _told(value: Any) -> Any:
    """A column's value: false, null and an empty text are three things, and all look like nothing in a table."""
    return plain(value) if value is None or value is False or value is True or value == "" else value
