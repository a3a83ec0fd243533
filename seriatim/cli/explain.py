"""`seriatim explain`: one row of the output, back to the messages that made it.

Next room: operations/inspect/explain.py finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim.cli import app, print_notice
from seriatim.cli.lookback import (
    Topic,
    check_session_name,
    open_lookback,
    print_json,
    render_time,
    render_value,
    shorten_text,
)
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.cli.lookback import LookbackCommand
    from seriatim.operations.inspect.explain import RowExplanation, RowTouch

SESSIONS_SHOWN_MAX = 20
POSITION_COLUMNS = ("topic", "topic_id", "partition", "offset", "timestamp", "session", "sequence")


@app.command()
def explain(
    stream: StreamName,
    row: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The row's key; of several columns 'a,2' or '[\"a\", 2]'."
        ),
    ],
    session: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this session's row.", callback=check_session_name),
    ] = None,
    topic: Topic = None,
    json: Json = False,
) -> None:
    """Show every message that touched a row, the record each gave, and what the row is now.

    From the committed records back to Kafka's offsets. Of the stock machine also messages that
    named the row and left no record: set aside, dropped, headless, or contradicted by the rows.
    Where several sessions have such a row, they are listed: choose one with --session.

    Example: seriatim explain demo --row b --session session-00007
    """
    from seriatim.operations.inspect.explain import RowExplainer, parse_row_key, records_by_session
    from seriatim.storage.record_query import RecordQuery

    with open_lookback(stream, json=json) as opened:
        key = parse_row_key(opened.runner, row)
        root = Path(opened.file.stream.output.path)
        lookup = RecordQuery(root, opened.name, version=opened.head.token.version())
        found = records_by_session(lookup, key, session, topic)
        if not found:
            found = _sessions_without_records(opened, session, topic)
        if len({place[3] for place in found}) > 1:
            _print_sessions(opened, found, json=json)
            return
        explaining = RowExplainer(opened.context, opened.head, key)
        done = [explaining.run(place, rows) for place, rows in found.items()]
        opened.stop_progress()
        for one in done:
            if json:
                print_json(_result_values(opened.name, row, one))
            else:
                _print_result(one, row)


def _sessions_without_records(
    command: LookbackCommand, session: str | None, topic: str | None
) -> dict[Any, list[Any]]:
    """A row without a record: messages of the session that was named may have tried."""
    if session is None:
        raise ConfigError(
            f"{command.name}: no record has this row",
            next="check the key; with --session its messages are searched, too",
        )
    place, _ = command.find_session(session, topic, None)
    account = command.head.ledger.partitions[str(place)]
    return {(place.topic, place.number, account.topic_id, session): []}


def _print_sessions(
    command: LookbackCommand, records_by_session: dict[Any, list[Any]], *, json: bool
) -> None:
    from seriatim.cli import output

    rows = [
        {
            "session": shorten_text(place[3], 100),
            "topic": place[0],
            "partition": place[1],
            "records": len(records),
            "first": records[0]["offset"],
            "last": records[-1]["offset"],
            "now": "gone" if _is_deleted(command, records[-1]) else "there",
        }
        for place, records in records_by_session.items()
    ]
    if json:
        print_json({"stream": command.name, "sessions": rows})
        return
    output.print_table(list(rows[0]), rows[:SESSIONS_SHOWN_MAX])
    print_notice(f"{command.name}: {len(rows)} sessions have this row; choose one with --session")


def _is_deleted(command: LookbackCommand, record: dict[str, Any]) -> bool:
    gone = {} if command.runner.row_key_spec is None else command.runner.row_key_spec.deleted_when
    return bool(gone) and all(record[name] == value for name, value in gone.items())


def _result_values(stream: str, row: str, result: RowExplanation) -> dict[str, Any]:
    return {
        "stream": stream,
        "row": row,
        "session": result.session,
        "topic": result.partition.topic,
        "partition": result.partition.number,
        "topic_id": result.topic_id,
        "value": result.value,
        "touches": [
            {
                "offset": touch.offset,
                "time": None if touch.timestamp is None else render_time(touch.timestamp),
                "sequence": touch.sequence,
                "outcome": touch.outcome,
                "message": touch.message,
                "records": [_machine_values(record) for record in touch.records],
                "findings": touch.findings,
            }
            for touch in result.touches
        ],
        "notes": result.notes,
    }


def _machine_values(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what its message says already."""
    same = record.get("source_offset") == record["offset"]
    return {
        k: v
        for k, v in record.items()
        if k not in POSITION_COLUMNS and not (same and k == "source_offset")
    }


def _print_result(result: RowExplanation, row: str) -> None:
    place = f"{result.partition}, session {shorten_text(result.session)}"
    typer.secho(
        f"Row {shorten_text(row)} in {place}: touched by {len(result.touches)} messages", bold=True
    )
    for touch in result.touches:
        _print_touch(touch)
    typer.echo(f"now: {'it is not there' if result.value is None else render_value(result.value)}")
    for note in result.notes:
        print_notice(note)


def _print_touch(touch: RowTouch) -> None:
    when = "" if touch.timestamp is None else f"  {render_time(touch.timestamp)}"
    counted = "" if touch.sequence is None else f"  seq {touch.sequence}"
    color = typer.colors.RED if touch.findings or not touch.records else None
    typer.secho(
        f"  {touch.offset}{when}{counted}  {touch.outcome}{'' if touch.records else ', no record'}",
        fg=color,
    )
    if touch.message is not None:
        typer.echo(f"      message  {render_value(touch.message)}")
    for record in touch.records:
        told = {k: v for k, v in _machine_values(record).items() if not k.startswith("before_")}
        typer.echo(f"      record   {render_value(told)}")
    for found in touch.findings:
        cause = f": {shorten_text(found['cause'])}" if found["cause"] else ""
        typer.secho(f"      finding  {found['finding']} ({found['level']}){cause}", fg=color)
