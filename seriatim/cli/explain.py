"""`seriatim explain`: from one row of the output back to the messages that touched it.

Next: operations/inspect/explain.py finds them.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from seriatim.cli import output, print_json, print_notice
from seriatim.cli.lookback import (
    LookbackCommand,
    Topic,
    check_session_name,
    open_lookback,
    render_time,
    render_value,
    shorten_text,
)
from seriatim.cli.options import Json, StreamName
from seriatim.engine.records import LAST_RECORD_COLUMNS
from seriatim.errors import ConfigError
from seriatim.operations.inspect.explain import (
    RowExplainer,
    RowExplanation,
    RowTouch,
    parse_row_key,
    records_by_session,
)
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.store import open_store

SESSIONS_SHOWN_MAX = 20


def explain(
    stream: StreamName,
    row: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="The row's key. A key of several columns is 'a,2' or '[\"a\", 2]'.",
        ),
    ],
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Explain the row of this session only.",
            callback=check_session_name,
        ),
    ] = None,
    topic: Topic = None,
    json: Json = False,
) -> None:
    """Show every message that touched a row of the output.

    Each message is shown with the records it gave. The last line is what the row is now. The
    command goes from the committed records back to the offsets of Kafka. For the table machine it
    also shows messages that named the row and left no record: quarantined, dropped, headless, or
    contradicted by the rows. If several sessions have such a row, they are listed; choose one with
    --session.

    Example: seriatim explain demo --row b --session session-00007
    """
    with open_lookback(stream) as command:
        row_key = parse_row_key(command.runner, row)
        store = open_store(command.file.stream.output.path)
        query = RecordQuery(store, command.name, version=command.head.token.version())
        sessions = records_by_session(query, row_key, session, topic)
        if not sessions:
            sessions = _session_without_records(command, session, topic)
        session_names = {location[3] for location in sessions}
        if len(session_names) > 1:
            _print_sessions(command, sessions, json=json)
            return
        explainer = RowExplainer(command.open_stream, command.head, row_key, command.progress)
        explanations = [explainer.run(location, records) for location, records in sessions.items()]
        command.stop_progress()
        for explanation in explanations:
            if json:
                print_json(_result_values(command.name, row, explanation))
            else:
                _print_result(explanation, row)


def _session_without_records(
    command: LookbackCommand, session: str | None, topic: str | None
) -> dict[Any, list[Any]]:
    """The session that was named, though no record has the row: its messages may have named it."""
    if session is None:
        raise ConfigError(
            f"{command.name}: no record has this row",
            next="check the key; with --session its messages are searched, too",
        )
    partition, _ = command.find_session(session, topic, None)
    account = command.head.ledger.partitions[str(partition)]
    return {(partition.topic, partition.number, account.topic_id, session): []}


def _print_sessions(
    command: LookbackCommand, records_by_session: dict[Any, list[Any]], *, json: bool
) -> None:
    """List the sessions that have the row, so that the person can choose one."""
    rows = []
    for (topic, number, _, session), records in records_by_session.items():
        rows.append(
            {
                "session": shorten_text(session, 100),
                "topic": topic,
                "partition": number,
                "records": len(records),
                "first": records[0]["offset"],
                "last": records[-1]["offset"],
                "now": "gone" if _is_deleted(command, records[-1]) else "there",
            }
        )
    if json:
        print_json({"stream": command.name, "sessions": rows})
        return
    output.print_table(list(rows[0]), rows[:SESSIONS_SHOWN_MAX])
    print_notice(f"{command.name}: {len(rows)} sessions have this row; choose one with --session")


def _is_deleted(command: LookbackCommand, record: dict[str, Any]) -> bool:
    """Whether a record deletes its row."""
    row_key_spec = command.runner.row_key_spec
    return row_key_spec is not None and row_key_spec.deletes_row(record)


def _result_values(stream: str, row: str, result: RowExplanation) -> dict[str, Any]:
    return {
        "stream": stream,
        "row": row,
        "session": result.session,
        "topic": result.partition.topic,
        "partition": result.partition.number,
        "topic_id": result.topic_id,
        "value": result.value,
        "touches": [_touch_values(touch) for touch in result.touches],
        "notes": result.notes,
    }


def _touch_values(touch: RowTouch) -> dict[str, Any]:
    return {
        "offset": touch.offset,
        "time": None if touch.timestamp is None else render_time(touch.timestamp),
        "sequence": touch.sequence,
        "outcome": touch.outcome,
        "message": touch.message,
        "records": [_machine_values(record) for record in touch.records],
        "findings": touch.findings,
    }


def _machine_values(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the columns that its message shows already."""
    hidden_columns = set(LAST_RECORD_COLUMNS)
    if record.get("source_offset") == record["offset"]:
        hidden_columns.add("source_offset")
    return {column: value for column, value in record.items() if column not in hidden_columns}


def _print_result(result: RowExplanation, row: str) -> None:
    typer.secho(
        f"Row {shorten_text(row)} in {result.partition}, session {shorten_text(result.session)}:"
        f" touched by {len(result.touches)} messages",
        bold=True,
    )
    for touch in result.touches:
        _print_touch(touch)
    value = "it is not there"
    if result.value is not None:
        value = render_value(result.value)
    typer.echo(f"now: {value}")
    for note in result.notes:
        print_notice(note)


def _print_touch(touch: RowTouch) -> None:
    time = "" if touch.timestamp is None else f"  {render_time(touch.timestamp)}"
    sequence = "" if touch.sequence is None else f"  seq {touch.sequence}"
    no_record = "" if touch.records else ", no record"
    color = typer.colors.RED if touch.findings or not touch.records else None
    typer.secho(f"  {touch.offset}{time}{sequence}  {touch.outcome}{no_record}", fg=color)
    if touch.message is not None:
        typer.echo(f"      message  {render_value(touch.message)}")
    for record in touch.records:
        _print_record(record)
    for finding in touch.findings:
        cause = f": {shorten_text(finding['cause'])}" if finding["cause"] else ""
        typer.secho(f"      finding  {finding['finding']} ({finding['level']}){cause}", fg=color)


def _print_record(record: dict[str, Any]) -> None:
    """Print a record without the values before the change: the record before has them."""
    values = {
        column: value
        for column, value in _machine_values(record).items()
        if not column.startswith("before_")
    }
    typer.echo(f"      record   {render_value(values)}")
