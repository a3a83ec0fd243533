"""`seriatim state`: show what the machine holds for a session, now or at any point of its past.

Next: operations/inspect/session_replay.py folds to a point; operations/status.py reads the state
that an entry saved.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from seriatim import context, stream_files
from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.lookback import (
    InPartition,
    LookbackCommand,
    SessionName,
    Topic,
    change_values,
    open_lookback,
    parse_time_ms,
    print_other_partitions,
    render_value,
)
from seriatim.cli.options import Json, StreamName, load_stream
from seriatim.cli.output import render_table
from seriatim.engine.findings import count_of, shorten
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import require_head
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.views import state_to_plain
from seriatim.operations.status import SavedSession, session_states
from seriatim.operations.sweep import refuse_swept
from seriatim.stream_files import StreamFile


def state(
    stream: StreamName,
    session: SessionName,
    topic: Topic = None,
    partition: InPartition = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="ENTRY",
            help="The state as of this ledger entry. Default: the last entry.",
        ),
    ] = None,
    at_offset: Annotated[
        int | None,
        typer.Option(min=0, metavar="OFFSET", help="The state after the message at this offset."),
    ] = None,
    at_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="The state before the first message at or after this time in UTC,"
            " like 2026-11-16T08:00:00Z.",
        ),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="N M",
            help="What differs between two points, which are offsets or times in UTC.",
        ),
    ] = None,
    _json: Json = False,
) -> CommandResult:
    """Show what the machine holds for a session, now or earlier.

    Earlier means as of a ledger entry, after an offset, or at a time. To reach an offset, the
    command takes the nearest state that was saved at or before that offset, and folds on it the
    messages that Kafka still has. Offsets are inclusive: --at-offset 41337 is the state after that
    message.

    Example: seriatim state demo session-00007 --at-offset 41337

    Example: seriatim state demo session-00007 --diff 41000 41337
    """
    points = {"--version": version, "--at-offset": at_offset, "--at-time": at_time, "--diff": diff}
    point_options = [name for name, value in points.items() if value is not None]
    if len(point_options) > 1:
        raise ConfigError(
            f"{' and '.join(point_options)} cannot be given together", next="give one of them"
        )
    if at_time is not None:
        parse_time_ms(at_time)  # refuse a wrong time before anything is opened
    if at_offset is None and at_time is None and diff is None:
        if partition is not None:
            raise ConfigError(
                "--partition needs --at-offset, --at-time or --diff",
                next="give one of them with it, or use --topic",
            )
        return _saved_state(stream, session, topic, version)
    with open_lookback(stream) as command:
        session_partition, _ = command.find_session(session, topic, partition)
        replay = command.session_replay(session_partition, session)
        if diff is not None:
            return _compare_states(command, replay, diff)
        end = command.resolve_point(replay, at_time or "") if at_offset is None else at_offset + 1
        values = _state_values_at(command, replay, end)
        return SessionState(values)


def _saved_state(stream: str, session: str, topic: str | None, version: int | None) -> SessionState:
    """The state as a ledger entry saved it. Nothing is folded for that."""
    file = load_stream(stream)
    states = _read_saved_states(file, session, topic, version)
    if len(states) > 1:
        partitions = ", ".join(str(saved.partition) for saved in states)
        raise ConfigError(
            f"{file.stream.name}: session {session!r} lives in {partitions}",
            next="choose one with --topic",
        )
    (saved,) = states
    print_other_partitions(file.stream.name, session, saved.partition, saved.other_sessions)
    return SessionState(saved.values)


def _read_saved_states(
    file: StreamFile, session: str, topic: str | None, version: int | None
) -> list[SavedSession]:
    """The session's state in each topic that has one, as of an entry.

    Of several partitions of a topic, the one with the session's newest message counts.
    """
    name = file.stream.name
    ledger_store = context.ledger(file)
    head = require_head(ledger_store, name)
    # An old entry is read with the machine of now, which may not understand its state any more.
    ledger = head.ledger if version is None else ledger_store.ledger_at(name, version)
    context.refuse_machine_for_ledger(file, ledger)
    runner = stream_files.load_runner(file)
    try:
        return session_states(runner, ledger, context.state(file), session, topic)
    except IntegrityError:
        # The files of an old entry may have been deleted on purpose. Then this error says so.
        refuse_swept(ledger_store, head.ledger, ledger.sequence, "state")
        raise


def _fold_to_offset(command: LookbackCommand, replay: SessionReplay, end: int) -> None:
    """Fold all messages before `end`. An offset that Kafka does not have yet is refused."""
    log_end = replay.bounds.log_end
    if end > max(replay.committed_end, log_end):
        raise ConfigError(
            f"{command.name}: {replay.partition} has no offset {end - 1}:"
            f" Kafka ends before {log_end}",
            next=f"give an offset up to {log_end - 1}",
        )
    replay.begin_at(end)
    replay.fold_to(end)
    if end > replay.committed_end:
        print_notice(
            f"{command.name}: {replay.partition} is committed before offset {replay.committed_end};"
            " what follows is shown as the next run would fold it"
        )


def _state_values_at(command: LookbackCommand, replay: SessionReplay, end: int) -> JsonObject:
    """The session's state after all messages before `end`, as plain values."""
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


def _compare_states(
    command: LookbackCommand, replay: SessionReplay, points: tuple[str, str]
) -> StateDifference:
    """What differs between the states at two points."""
    # Both are resolved first, so that a wrong second one is refused before anything is folded.
    ends = [command.resolve_point(replay, text) for text in points]
    states = []
    for end in ends:
        _fold_to_offset(command, replay, end)
        states.append(replay.tracing_fold.copy_of_state())
    return StateDifference(
        session=replay.session_name,
        topic=replay.partition.topic,
        partition=replay.partition.number,
        from_offset=ends[0] - 1,
        to_offset=ends[1] - 1,
        changes=change_values(command.runner, states[0], states[1]),
    )


class StateDifference(CommandResult, kw_only=True):
    """What differs between two states of a session."""

    session: str
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    changes: list[JsonObject]

    def render(self) -> str:
        """A line for each change."""
        lines = [
            (
                f"{shorten(self.session)} in {self.topic}/{self.partition}:"
                f" {count_of(len(self.changes), 'difference')} between offset {self.from_offset}"
                f" and {self.to_offset}"
            )
        ]
        for change in self.changes:
            before = render_value(change["before"])
            after = render_value(change["after"])
            lines.append(f"  {render_value(change['what'])}  {before} → {after}")
        return "\n".join(lines)


class SessionState(CommandResult):
    """What the machine holds for a session."""

    values: JsonObject

    def to_json(self) -> JsonObject:
        """The state, and as of when it is."""
        return self.values

    def render(self) -> str:
        """Rows as a table, anything else as JSON."""
        values = self.values
        headline = (
            f"{shorten(values['session'])} in {values['topic']}/{values['partition']},"
            f" {values['status']}, last message at offset {values['offset']}"
        )
        state = values["state"]
        has_rows = isinstance(state, dict) and list(state) == ["rows"] and bool(state["rows"])
        if not has_rows:
            return f"{headline}\n{msgspec.json.format(msgspec.json.encode(state)).decode()}"
        rows = []
        for row in state["rows"]:
            rows.append({column: _render_cell(value) for column, value in row.items()})
        return f"{headline}\n{render_table(rows)}"


def _render_cell(value: Any) -> Any:
    """Render null, false, true and an empty text, which would all look alike in a table."""
    if value is None or value is False or value is True or value == "":
        return render_value(value)
    return value
