"""`seriatim trace`, and what all commands share that look back at a session: opening the stream,
common options, printing a step.

Next: operations/inspect/session_replay.py folds the session; cli/state.py, cli/bisect.py,
cli/explain.py and cli/replay.py are the other commands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import typer
from msgspec import Struct

from seriatim import config, context, stream_files
from seriatim.cli import JsonObject, Options, print_json, print_notice
from seriatim.cli.options import Json, StreamName, load_stream
from seriatim.cli.output import RunProgress
from seriatim.context import ConnectedStream
from seriatim.engine.findings import count_of, shorten
from seriatim.engine.machine import Runner
from seriatim.engine.messages import Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.records import Record
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.ledger.commit import require_head
from seriatim.ledger.manifests import LedgerHead
from seriatim.operations.inspect.session_replay import SessionReplay, find_session
from seriatim.operations.inspect.tracing import TraceStep
from seriatim.operations.inspect.views import diff_states, plain_view_of_message
from seriatim.stream_files import StreamFile


def check_session_name(name: str | None) -> str | None:
    """Return the session's name as it was typed; refuse one that is not UTF-8.

    Messages whose key is not UTF-8 belong to no session, so no session has such a name.
    """
    if name is None:
        return None
    try:
        return name.encode().decode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the session's name {name!r} is not UTF-8: messages with such a key belong to no session",
            next="give the name as status, quarantine or the records show it",
        ) from None


SessionName = Annotated[
    str,
    typer.Argument(
        metavar="SESSION", help="The session's name: its Kafka key.", callback=check_session_name
    ),
]
Topic = Annotated[
    str | None, typer.Option(help="The topic, if several topics have a session of this name.")
]
InPartition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="TOPIC/NUMBER",
        help="Look in this partition. Needed if no saved state has the session.",
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="EDGE", help="Begin at this offset, or at this time in UTC."),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="EDGE", help="Stop before this offset, or this time in UTC."),
]
EDGE_FORMAT = "an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z"
TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,6})?)?Z")
LINE_WIDTH_MAX = 300
PROGRESS_DELAY_SECONDS = 2.0
LINES_SHOWN_MAX = 5
"""How many changed rows, and how many records, are shown of one message."""


class LookbackCommand(Struct, frozen=True):
    """A stream that is opened to look back at its sessions."""

    file: StreamFile
    open_stream: ConnectedStream
    head: LedgerHead
    progress: RunProgress | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.file.stream.name

    @property
    def runner(self) -> Runner:
        """The stream's machine, as the code is now."""
        return self.open_stream.runner

    def stop_progress(self) -> None:
        """Show no more progress, because the result is printed from here on."""
        if self.progress is not None:
            self.progress.close()

    def find_session(
        self, session: str, topic: str | None, partition: str | None
    ) -> tuple[Partition, int]:
        """The session's partition, and the first offset known to be the session's own, or -1."""
        chosen_partition = None
        if partition is not None:
            chosen_partition = Partition.parse(partition)
        location = find_session(self.open_stream, self.head, session, topic, chosen_partition)
        print_other_partitions(self.name, session, location.partition, location.other_sessions)
        return location.partition, location.session.first_offset

    def session_replay(self, partition: Partition, session: str) -> SessionReplay:
        """A replay of one session; it has not begun yet."""
        return SessionReplay(self.open_stream, self.head, partition, session, self.progress)

    def open_session(
        self,
        session: str,
        topic: str | None,
        partition: str | None,
        start: str | None,
        until: str | None,
    ) -> tuple[SessionReplay, int, int]:
        """Begin the replay of a session; also the offsets where the look begins and ends.

        Without `until` it ends at the frontier. It never ends beyond the last message of Kafka.
        """
        session_partition, first_offset = self.find_session(session, topic, partition)
        replay = self.session_replay(session_partition, session)
        begin = self.begin_replay(replay, start, first_offset)
        requested_end = self.resolve_offset(replay, until, replay.committed_end)
        readable_end = max(replay.committed_end, replay.bounds.log_end)
        return replay, begin, min(requested_end, readable_end)

    def begin_replay(self, replay: SessionReplay, start: str | None, first_offset: int) -> int:
        """Begin a replay, and return the offset where the look begins.

        That is `--from`, or else the session's first message that can still be reached.
        """
        if start is not None:
            begin = self.resolve_offset(replay, start, 0)
            replay.begin_at(begin)
            return begin
        begin = replay.first_message_offset(first_offset)
        replay.begin_at_or_after(begin)
        if replay.next_offset > begin:
            print_notice(
                f"{self.name}: {replay.partition} can be folded again from offset"
                f" {replay.next_offset} on, not from {begin};"
                f" Kafka has it from offset {replay.bounds.log_start} on"
            )
        return max(begin, replay.next_offset)

    def resolve_point(self, replay: SessionReplay, text: str) -> int:
        """The end of the messages that make the state at an offset or a time; it is exclusive.

        A time is refused if Kafka has no message before it any more: the first message after that
        time may be gone as well, and then the state of a later time would be shown for it.
        """
        offset = parse_offset(text)
        if offset is not None:
            return offset + 1
        end = self.resolve_offset(replay, text, 0)
        log_start = replay.bounds.log_start
        if end == log_start > replay.account.initial_frontier:
            raise ConfigError(
                f"{self.name}: {replay.partition}: which message came first at {text} or after it"
                f" is not known: Kafka has messages from offset {log_start} on, and none of before"
                " that time",
                next="give an offset: the column `timestamp` of the records tells which came when",
            )
        return end

    def resolve_offset(self, replay: SessionReplay, text: str | None, default: int) -> int:
        """The offset of an edge as a person writes it; of a time, the first message at or after it.

        A time after the last message gives the log end. None gives `default`.
        """
        if text is None:
            return default
        return self.resolve_edge(replay.partition, text, replay.bounds.log_end)

    def resolve_edge(self, partition: Partition, text: str, after_last: int) -> int:
        """The offset of an edge; of a time after the last message, `after_last`."""
        offset = parse_offset(text)
        if offset is not None:
            return offset
        offsets = self.open_stream.log.offsets_for_time([partition], parse_time_ms(text))
        first_offset_at_time = offsets.get(partition, -1)
        return after_last if first_offset_at_time < 0 else first_offset_at_time


def print_other_partitions(
    stream: str, session: str, partition: Partition, other_sessions: Mapping[Partition, Session]
) -> None:
    """Print in which other partitions a session has state, and where it is in quarantine.

    What a command shows is about `partition`: a live session there says nothing about the others.
    """
    if not other_sessions:
        return
    names = []
    rows = []
    for other_partition, other_session in other_sessions.items():
        name = str(other_partition)
        status = "live"
        if other_session.finding is not None:
            name += " (in quarantine there)"
            status = "quarantined"
        names.append(name)
        rows.append({"partition": str(other_partition), "status": status})
    print_notice(
        f"{stream}: session {session!r} was in {', '.join(names)} as well; this is {partition}",
        other_partitions=rows,
    )


@contextmanager
def open_lookback(stream: str) -> Iterator[LookbackCommand]:
    """Open a stream to look back at it. A stream that was never run is refused."""
    file = load_stream(stream)
    open_stream = context.ConnectedStream(file, config.load_settings())
    open_stream.runner = stream_files.load_runner(file)
    # After the user's machine, so that one that needs pandas has imported it already.
    block_pandas_import()
    name = file.stream.name
    head = require_head(open_stream.ledger, name)
    context.refuse_machine_for_ledger(file, head.ledger)
    progress = RunProgress(name, "offsets", silent_seconds=PROGRESS_DELAY_SECONDS)
    command = LookbackCommand(file, open_stream, head, progress)
    try:
        yield command
    finally:
        command.stop_progress()
        open_stream.past_reader.close()


class _PandasBlocker:
    """An import finder that says pandas is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Refuse pandas; leave every other module to the finders after this one."""
        if name == "pandas":
            raise ModuleNotFoundError(name)


def block_pandas_import() -> None:
    """Keep Arrow from importing pandas, which would take 0.6 s of CPU before the first line.

    Arrow imports pandas with its first array, only to recognize pandas' arrays. If the machine
    uses pandas, it is imported already, and stays. Arrow remembers that there is no pandas, so this
    is only done in a process of our own.
    """
    if "pandas" in sys.modules or not Options.is_own_process:
        return
    finder: Any = _PandasBlocker()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([""])
    finally:
        sys.meta_path.remove(finder)


def parse_offset(text: str) -> int | None:
    """An offset as a person writes it; None if it is something else, or too large for any log."""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return None


def parse_time_ms(text: str) -> int:
    """A time in UTC as a person writes it, in milliseconds since 1970."""
    try:
        if not TIME_PATTERN.fullmatch(text):
            raise ValueError
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither an offset nor a time",
            allowed=EDGE_FORMAT,
            next="write one of these",
        ) from None


def render_time(ms: int) -> str:
    """A message's time in the form that `--from` and `--until` take."""
    try:
        moment = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a producer may write any number as the time
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def render_value(value: Any) -> str:
    """Any value as JSON on one short line, without characters that a terminal would act on."""
    return shorten(msgspec.json.encode(value, enc_hook=str).decode(), LINE_WIDTH_MAX)


def step_values(runner: Runner, step: TraceStep, frontier: int) -> JsonObject:
    """A step as plain values, for scripts."""
    findings = [
        {"finding": finding.finding, "level": finding.level, "cause": finding.cause}
        for finding in step.findings
    ]
    return {
        "offset": step.offset,
        "time": render_time(step.timestamp),
        "sequence": step.sequence,
        "outcome": step.outcome,
        "committed": step.offset < frontier,
        "message": message_values(runner, step),
        "changes": change_values(runner, step.before, step.after),
        "records": step.records,
        "findings": findings,
        "damaged": step.damaged,
        "quarantined": step.quarantined,
    }


def change_values(runner: Runner, before: Any, after: Any) -> list[JsonObject]:
    """What differs between two states of a session, as plain values."""
    return [
        {"what": change.what, "before": change.before, "after": change.after}
        for change in diff_states(runner, before, after)
    ]


def message_values(runner: Runner, step: TraceStep) -> Any:
    """A message as plain values; one that cannot be decoded, also as raw text."""
    values = plain_view_of_message(runner, step.message, step.raw)
    # A message of a user may have a field `poison`, so the type decides.
    if not isinstance(step.message, Poison):
        return values
    raw_text = None
    if step.raw is not None:
        raw_text = step.raw[:2_000].decode(errors="backslashreplace")
    return {**values, "raw": raw_text}


def print_step(runner: Runner, step: TraceStep, frontier: int, *, mark: str = "") -> None:
    """Print a step for people: headline, message, changes, records, findings."""
    values = step_values(runner, step, frontier)
    headline = f"{mark}{step.offset}  {values['time']}"
    if step.sequence is not None:
        headline += f"  seq {step.sequence}"
    headline += f"  {step.outcome}"
    if not values["committed"]:
        headline += ", not committed yet"
    color = typer.colors.RED if step.findings else None
    typer.secho(headline, bold=True, fg=color)
    typer.echo(f"    message   {render_value(values['message'])}")
    _print_changes(values["changes"])
    _print_records(values["records"])
    for finding in step.findings:
        separator = ": " if finding.cause else ""
        cause = shorten(finding.cause, LINE_WIDTH_MAX)
        typer.secho(
            f"    finding   {finding.finding} ({finding.level}){separator}{cause}", fg=color
        )


def _print_changes(changes: list[JsonObject]) -> None:
    for change in changes[:LINES_SHOWN_MAX]:
        row = shorten(change["what"], 40)
        before = render_value(change["before"])
        after = render_value(change["after"])
        typer.echo(f"    {row:<8}  {before} → {after}")
    hidden_count = len(changes) - LINES_SHOWN_MAX
    if hidden_count > 0:
        typer.echo(f"    … and {hidden_count} more; --json has them all")


def without_values_before(record: Record) -> Record:
    """A record without the values before the change: the lines above it have shown them."""
    values = {}
    for column, value in record.items():
        # A column of the table may begin so, too: only one beside the column that it is named after is
        # a before-image.
        is_before_image = column.startswith("before_") and column.removeprefix("before_") in record
        if not is_before_image:
            values[column] = value
    return values


def _print_records(records: list[Record]) -> None:
    for record in records[:LINES_SHOWN_MAX]:
        values = without_values_before(record)
        values.pop("index")
        typer.echo(f"    record {record['index']:<3}{render_value(values)}")
    hidden_count = len(records) - LINES_SHOWN_MAX
    if hidden_count > 0:
        typer.echo(f"    … and {count_of(hidden_count, 'more record')}")


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
    _json: Json = False,
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
            if Options.json:
                print_json(step_values(command.runner, step, replay.committed_end))
            else:
                print_step(command.runner, step, replay.committed_end)
            shown_count += 1
            if shown_count == limit:
                # The end was not reached, so nothing can be said about the state there.
                return
        if replay.differs_from_saved():
            offset = replay.next_offset
            print_notice(
                f"{command.name}: at offset {offset} this is not the state that was committed:"
                " the machine or the stream's file changed since;"
                f" --from {offset} begins with the committed one",
                parted=offset,
            )
        if not shown_count:
            subject = "findings" if findings else "messages"
            print_notice(
                f"{command.name}: session {session!r} has no {subject}"
                f" in {replay.partition} [{begin}, {end})"
            )
