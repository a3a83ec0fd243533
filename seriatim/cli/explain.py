"""`seriatim explain`: one row of the output, back to the messages that made it.

Next room: steps/explain.py finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim.cli import app, say
from seriatim.cli.looking import Topic, lookback, plain, print_json, session_name, shortened, shown_time
from seriatim.cli.run import Json, StreamName
from seriatim.core.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.cli.looking import Lookback
    from seriatim.steps.explain import Explained, Touch

SESSIONS_SHOWN_MAX = 20
OWN = ("topic", "topic_id", "partition", "offset", "timestamp", "session", "sequence")


@app.command()
def explain(
    stream: StreamName,
    row: Annotated[str, typer.Option(metavar="KEY", help="The row's key; of several columns 'a,2' or '[\"a\", 2]'.")],
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this session's row.", callback=session_name)
    ] = None,
    topic: Topic = None,
    json: Json = False,
) -> None:
    """Show every message that touched a row, the record each gave, and what the row is now.

    From the committed records back to Kafka's offsets. Of the stock machine also messages that named the row and left
    no record: set aside, dropped, headless, or contradicted by the rows. Where several sessions have such a row, they
    are listed: choose one with --session.

    Example: seriatim explain demo --row b --session session-00007
    """
    from seriatim.adapters.lookup import DeltaLookup
    from seriatim.steps.explain import Explaining, key_of, sessions_of

    with lookback(stream, json=json) as opened:
        key = key_of(opened.runner, row)
        root = Path(opened.file.stream.output.path)
        lookup = DeltaLookup(root, opened.name, version=opened.head.token.version())
        found = sessions_of(lookup, key, session, topic)
        if not found:
            found = _without_records(opened, session, topic)
        if len({place[3] for place in found}) > 1:
            _list(opened, found, json=json)
            return
        explaining = Explaining(opened.tools, opened.head, key)
        done = [explaining.run(place, rows) for place, rows in found.items()]
        opened.quiet()
        for one in done:
            if json:
                print_json(_values(opened.name, row, one))
            else:
                _show(one, row)


def _without_records(opened: Lookback, session: str | None, topic: str | None) -> dict[Any, list[Any]]:
    """A row without a record: messages of the session that was named may have tried."""
    if session is None:
        raise ConfigError(
            f"{opened.name}: no record has this row",
            next="check the key; with --session its messages are searched, too",
        )
    place, _ = opened.find(session, topic, None)
    account = opened.head.ledger.partitions[str(place)]
    return {(place.topic, place.number, account.topic_id, session): []}


def _list(opened: Lookback, found: dict[Any, list[Any]], *, json: bool) -> None:
    from seriatim.cli import show

    rows = [
        {
            "session": shortened(place[3], 100),
            "topic": place[0],
            "partition": place[1],
            "records": len(records),
            "first": records[0]["offset"],
            "last": records[-1]["offset"],
            "now": "gone" if _is_gone(opened, records[-1]) else "there",
        }
        for place, records in found.items()
    ]
    if json:
        print_json({"stream": opened.name, "sessions": rows})
        return
    show.table(list(rows[0]), rows[:SESSIONS_SHOWN_MAX])
    say(f"{opened.name}: {len(rows)} sessions have this row; choose one with --session")


def _is_gone(opened: Lookback, last: dict[str, Any]) -> bool:
    gone = {} if opened.runner.keyed is None else opened.runner.keyed.gone
    return bool(gone) and all(last[name] == value for name, value in gone.items())


def _values(stream: str, row: str, done: Explained) -> dict[str, Any]:
    return {
        "stream": stream,
        "row": row,
        "session": done.session,
        "topic": done.partition.topic,
        "partition": done.partition.number,
        "topic_id": done.topic_id,
        "value": done.value,
        "touches": [
            {
                "offset": touch.offset,
                "time": None if touch.timestamp is None else shown_time(touch.timestamp),
                "sequence": touch.sequence,
                "outcome": touch.outcome,
                "message": touch.message,
                "records": [_own(record) for record in touch.records],
                "findings": touch.findings,
            }
            for touch in done.touches
        ],
        "notes": done.notes,
    }


def _own(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what its message says already."""
    same = record.get("source_offset") == record["offset"]
    return {k: v for k, v in record.items() if k not in OWN and not (same and k == "source_offset")}


def _show(done: Explained, row: str) -> None:
    place = f"{done.partition}, session {shortened(done.session)}"
    typer.secho(f"Row {shortened(row)} in {place}: touched by {len(done.touches)} messages", bold=True)
    for touch in done.touches:
        _show_touch(touch)
    typer.echo(f"now: {'it is not there' if done.value is None else plain(done.value)}")
    for note in done.notes:
        say(note)


def _show_touch(touch: Touch) -> None:
    when = "" if touch.timestamp is None else f"  {shown_time(touch.timestamp)}"
    counted = "" if touch.sequence is None else f"  seq {touch.sequence}"
    color = typer.colors.RED if touch.findings or not touch.records else None
    typer.secho(f"  {touch.offset}{when}{counted}  {touch.outcome}{'' if touch.records else ', no record'}", fg=color)
    if touch.message is not None:
        typer.echo(f"      message  {plain(touch.message)}")
    for record in touch.records:
        told = {k: v for k, v in _own(record).items() if not k.startswith("before_")}
        typer.echo(f"      record   {plain(told)}")
    for found in touch.findings:
        cause = f": {shortened(found['cause'])}" if found["cause"] else ""
        typer.secho(f"      finding  {found['finding']} ({found['level']}){cause}", fg=color)
