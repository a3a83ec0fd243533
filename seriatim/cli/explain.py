"""`seriatim explain`: from one row of the output back to the messages that touched it.

Next: operations/inspect/explain.py finds them.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from seriatim.cli import CommandResult, JsonObject, print_notice, print_result
from seriatim.cli.lookback import (
    LookbackCommand,
    Topic,
    check_session_name,
    open_lookback,
    render_time,
    render_value,
    without_values_before,
)
from seriatim.cli.options import Json, StreamName
from seriatim.cli.output import render_table
from seriatim.engine.findings import count_of, shorten
from seriatim.engine.records import LAST_RECORD_COLUMNS, Record
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
    _json: Json = False,
) -> SessionsWithRow | None:
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
            return SessionsWithRow(command.name, _session_rows(command, sessions))
        explainer = RowExplainer(command.open_stream, command.head, row_key, command.progress)
        explanations = [explainer.run(location, records) for location, records in sessions.items()]
        command.stop_progress()
        # A session that moved to another partition has one explanation for each.
        for explanation in explanations:
            print_result(ExplainedRow(command.name, row, explanation))
    return None


def _session_without_records(
    command: LookbackCommand, session: str | None, topic: str | None
) -> dict[Any, list[Any]]:
    """The session that was named, though no record has the row: its messages may have named it."""
    if session is None:
        raise ConfigError(
            f"{command.name}: no record has this row",
            next="check the key; with --session NAME the messages of that session are searched, too",
        )
    partition, _ = command.find_session(session, topic, None)
    account = command.head.ledger.partitions[str(partition)]
    return {(partition.topic, partition.number, account.topic_id, session): []}


def _session_rows(command: LookbackCommand, sessions: dict[Any, list[Any]]) -> list[JsonObject]:
    rows = []
    for (topic, number, _, session), records in sessions.items():
        first_record = records[0]
        last_record = records[-1]
        is_gone = _is_deleted(command, last_record)
        row = {
            "session": shorten(session, 100),
            "topic": topic,
            "partition": number,
            "records": len(records),
            "first": first_record["offset"],
            "last": last_record["offset"],
            "now": "gone" if is_gone else "there",
        }
        rows.append(row)
    return rows


class SessionsWithRow(CommandResult):
    """The sessions that have a row, so that the person can choose one."""

    stream: str
    sessions: list[JsonObject]

    def render(self) -> str:
        """A table of the first sessions."""
        print_notice(
            f"{self.stream}: {count_of(len(self.sessions), 'session')} have this row; choose one with --session"
        )
        rows = [_session_row_for_people(row) for row in self.sessions[:SESSIONS_SHOWN_MAX]]
        return render_table(rows)


def _is_deleted(command: LookbackCommand, record: Record) -> bool:
    """Whether a record deletes its row."""
    row_key_spec = command.runner.row_key_spec
    return row_key_spec is not None and row_key_spec.deletes_row(record)


class ExplainedRow(CommandResult):
    """The messages that touched a row of one session."""

    stream: str
    row: str
    explanation: RowExplanation

    def to_json(self) -> JsonObject:
        """The row, with one object for each message."""
        explanation = self.explanation
        return {
            "stream": self.stream,
            "row": self.row,
            "session": explanation.session,
            "topic": explanation.partition.topic,
            "partition": explanation.partition.number,
            "topic_id": explanation.topic_id,
            "value": explanation.value,
            "touches": [_touch_values(touch) for touch in explanation.touches],
            "notes": explanation.notes,
        }

    def render(self) -> str:
        """Each message with what it did, and what the row is now."""
        explanation = self.explanation
        for note in explanation.notes:
            print_notice(note)
        headline = (
            f"Row {shorten(self.row)} in {explanation.partition},"
            f" session {shorten(explanation.session)}:"
            f" touched by {count_of(len(explanation.touches), 'message')}"
        )
        lines = [typer.style(headline, bold=True)]
        for touch in explanation.touches:
            lines += _touch_lines(touch)
        value = "it does not exist"
        if explanation.value is not None:
            value = render_value(explanation.value)
        return "\n".join([*lines, f"row now: {value}"])


def _session_row_for_people(row: JsonObject) -> JsonObject:
    """A session that has the row, with headings that say what the numbers are."""
    return {
        "session": row["session"],
        "topic": row["topic"],
        "partition": row["partition"],
        "records": row["records"],
        "first offset": row["first"],
        "last offset": row["last"],
        "row now": "deleted" if row["now"] == "gone" else "exists",
    }


def _touch_values(touch: RowTouch) -> JsonObject:
    return {
        "offset": touch.offset,
        "time": None if touch.timestamp is None else render_time(touch.timestamp),
        "sequence": touch.sequence,
        "outcome": touch.outcome,
        "message": touch.message,
        "records": [_machine_values(record) for record in touch.records],
        "findings": touch.findings,
    }


def _machine_values(record: Record) -> Record:
    """A record without the columns that its message shows already."""
    hidden_columns = set(LAST_RECORD_COLUMNS)
    if record.get("source_offset") == record["offset"]:
        hidden_columns.add("source_offset")
    return {column: value for column, value in record.items() if column not in hidden_columns}


def _touch_lines(touch: RowTouch) -> list[str]:
    headline = f"  offset {touch.offset}"
    if touch.timestamp is not None:
        headline += f"  {render_time(touch.timestamp)}"
    if touch.sequence is not None:
        headline += f"  sequence {touch.sequence}"
    headline += f"  {touch.outcome}"
    if not touch.records:
        headline += ", no record"
    color = typer.colors.RED if touch.findings or not touch.records else None
    lines = [typer.style(headline, fg=color)]
    if touch.message is not None:
        lines.append(f"      message  {render_value(touch.message)}")
    for record in touch.records:
        values = without_values_before(_machine_values(record))
        lines.append(f"      record   {render_value(values)}")
    for finding in touch.findings:
        cause = f": {shorten(finding['cause'])}" if finding["cause"] else ""
        text = f"      finding  {finding['finding']} ({finding['level']}){cause}"
        lines.append(typer.style(text, fg=color))
    return lines
