"""What the commands that look back have in common: how they begin, which options they take, how a
step is shown.

Next room: cli/trace.py, cli/state.py, cli/bisect.py, cli/explain.py and cli/replay.py.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from msgspec import Struct

from seriatim import config
from seriatim.cli import Options, print_notice
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.engine.machine import Runner
    from seriatim.engine.offsets import Partition
    from seriatim.operations.inspect.session_replay import ReplayContext, SessionReplay
    from seriatim.operations.inspect.trace_step import TraceStep
    from seriatim.ports import LedgerHead
    from seriatim.stream_files import StreamFile


def check_session_name(name: str | None) -> str | None:
    """A session's name as typed. A key that is not UTF-8 belongs to no session, so there is none of
    such a name.
    """
    try:
        return name if name is None else name.encode().decode()
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
Topic = Annotated[str | None, typer.Option(help="Where a key lives in several topics.")]
InPartition = Annotated[
    str | None,
    typer.Option(
        "--partition", metavar="TOPIC/NUMBER", help="Where to look, if its state does not tell."
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar="EDGE", help="An offset, or a time in UTC.")
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="EDGE", help="Up to, and without, this offset or time."),
]
EDGE_FORMAT = "an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z"
TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,6})?)?Z")
LINE_WIDTH_MAX = 300
PROGRESS_DELAY_SECONDS = 2.0
LINES_SHOWN_MAX = 5
"""Rows and records that are shown of one message."""


class LookbackCommand(Struct, frozen=True):
    """A stream that is looked back at."""

    file: StreamFile
    context: ReplayContext
    head: LedgerHead

    @property
    def name(self) -> str:
        """The stream's."""
        return self.file.stream.name

    @property
    def runner(self) -> Runner:
        """The machine of now."""
        return self.context.runner

    def stop_progress(self) -> None:
        """No more progress: what was asked for is printed now."""
        if isinstance(self.context.on_progress, DelayedProgress):
            self.context.on_progress.close()
        self.context.on_progress = None

    def find_session(
        self, session: str, topic: str | None, partition: str | None
    ) -> tuple[Partition, int]:
        """Where a session lives, and the first offset that is known to be its own; -1: none is."""
        from seriatim.engine.offsets import Partition
        from seriatim.operations.inspect.find_session import find_session

        wanted = None if partition is None else Partition.parse(partition)
        found = find_session(self.context, self.head, session, topic, wanted)
        if found.other_partitions:
            told = ", ".join(map(str, found.other_partitions))
            print_notice(
                f"{self.name}: session {session!r} was in {told} as well; this is {found.partition}"
            )
        return found.partition, found.session.first_offset

    def session_replay(self, partition: Partition, session: str) -> SessionReplay:
        """A session's way."""
        from seriatim.operations.inspect.session_replay import SessionReplay

        return SessionReplay(self.context, self.head, partition, session)

    def begin_replay(self, replay: SessionReplay, start: str | None, first_offset: int) -> int:
        """Set out for where a look begins: at `--from`, or at the session's first message that can
        be reached.
        """
        if start is not None:
            begin = self.resolve_offset(replay, start, 0)
            replay.begin_at(begin)
            return begin
        begin = replay.first_message_offset(first_offset)
        replay.begin_at_or_after(begin)
        if replay.next_offset > begin:
            kafka = f"Kafka has it from offset {replay.bounds.log_start} on"
            print_notice(
                f"{self.name}: {replay.partition} can be folded again from offset {replay.next_offset} on, not from {begin}; {kafka}"
            )
        return max(begin, replay.next_offset)

    def resolve_point(self, replay: SessionReplay, text: str) -> int:
        """The end of what a state is of, by an offset or a time: all messages before it.

        A time of which Kafka has no message before it any more is refused: what came first after it
        may be gone, too, and the state of a later time would be shown for it.
        """
        if (offset := parse_offset(text)) is not None:
            return offset + 1
        end, seen = self.resolve_offset(replay, text, 0), replay.bounds
        if end == seen.log_start > replay.account.initial_frontier:
            raise ConfigError(
                f"{self.name}: {replay.partition}: which message came first at {text} or after it is not known:"
                f" Kafka has messages from offset {seen.log_start} on, and none of before that time",
                next="give an offset: the column `timestamp` of the records tells which came when",
            )
        return end

    def resolve_offset(self, replay: SessionReplay, text: str | None, default: int) -> int:
        """An edge as a person writes it, as an offset: of a time, the first message at or after it."""
        if text is None:
            return default
        if (offset := parse_offset(text)) is not None:
            return offset
        found = self.context.log.offsets_for_time([replay.partition], parse_time_ms(text)).get(
            replay.partition, -1
        )
        return replay.bounds.log_end if found < 0 else found


class DelayedProgress:
    """Progress of what takes more than two seconds."""

    def __init__(self, stream: str) -> None:
        from seriatim.cli.output import RunProgress

        self.began_seconds, self.progress = time.monotonic(), RunProgress(stream, "offsets")

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.began_seconds > PROGRESS_DELAY_SECONDS:
            self.progress(done, total)

    def close(self) -> None:
        """Leave the living line."""
        self.progress.close()


@contextmanager
def open_lookback(stream: str, *, json: bool) -> Iterator[LookbackCommand]:
    """Open a stream to look back at it."""
    from seriatim import context as wiring
    from seriatim import stream_files
    from seriatim.kafka.consumer import KafkaPastMessageReader
    from seriatim.ledger.commit import read_head
    from seriatim.operations.inspect.session_replay import ReplayContext

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    runner = stream_files.load_runner(file)
    block_pandas_import()
    name, store = file.stream.name, wiring.ledger(file)
    head = read_head(store, name)
    if head is None:
        raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
    wiring.refuse_machine_for_ledger(file, head.ledger)
    reread = KafkaPastMessageReader(wiring.kafka_client(settings), file.stream.isolation)
    tools = ReplayContext(
        stream=file.stream,
        runner=runner,
        ledger=store,
        state=wiring.state(file),
        log=wiring.log(file, settings),
        past_reader=reread,
        on_progress=DelayedProgress(name),
    )
    opened = LookbackCommand(file, tools, head)
    try:
        yield opened
    finally:
        opened.stop_progress()
        reread.close()


class _PandasBlocker:
    """Finds that there is no pandas."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Only this one is looked for here."""
        if name == "pandas":
            raise ModuleNotFoundError(name)


def block_pandas_import() -> None:
    """Arrow loads pandas with its first array, to know its arrays: 0.6 s of CPU before the first
    line, for nothing.

    A machine that uses pandas has loaded it by now; then it stays. Arrow remembers that there is
    none, so this is for a process of our own.
    """
    if "pandas" in sys.modules or not Options.is_own_process:
        return
    finder: Any = _PandasBlocker()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([""])
    finally:
        sys.meta_path.remove(finder)


def parse_offset(text: str) -> int | None:
    """An offset as a person writes it; None: it is something else, and so is what no log can have."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def parse_time_ms(text: str) -> int:
    """A time in UTC, in milliseconds since 1970."""
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
    """A message's time as people write it, and can paste."""
    try:
        return (
            datetime.fromtimestamp(ms / 1000, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def print_json(value: Any) -> None:
    """One JSON object on a line of its own, at once."""
    typer.echo(msgspec.json.encode(value, enc_hook=str).decode())


def shorten_text(text: str | None, length: int = 400) -> str:
    """A text without what a terminal would act on, and not too long. What it takes is loaded with
    the first.
    """
    from seriatim.engine.findings import shorten as cut

    return cut(text, length)


def render_value(value: Any) -> str:
    """Any value on one line, short enough for people, without what a terminal would act on."""
    return shorten_text(msgspec.json.encode(value, enc_hook=str).decode(), LINE_WIDTH_MAX)


def step_values(runner: Runner, step: TraceStep, frontier: int) -> dict[str, Any]:
    """A step for scripts."""
    from seriatim.operations.inspect.views import diff_states

    return {
        "offset": step.offset,
        "time": render_time(step.timestamp),
        "sequence": step.sequence,
        "outcome": step.outcome,
        "committed": step.offset < frontier,
        "message": message_values(runner, step),
        "changes": [
            {"what": one.what, "before": one.before, "after": one.after}
            for one in diff_states(runner, step.before, step.after)
        ],
        "records": step.records,
        "findings": [
            {"finding": one.finding, "level": one.level, "cause": one.cause}
            for one in step.findings
        ],
        "damaged": step.damaged,
        "quarantined": step.quarantined,
    }


def message_values(runner: Runner, step: TraceStep) -> Any:
    """A message as plain values; one that cannot be decoded, as text."""
    from seriatim.engine.messages import plain_values
    from seriatim.operations.inspect.views import view_of_message

    seen = plain_values(view_of_message(runner, step.message, step.raw))
    if isinstance(seen, dict) and list(seen) == ["poison"]:
        return {
            **seen,
            "raw": None if step.raw is None else step.raw[:2_000].decode(errors="backslashreplace"),
        }
    return seen


def print_step(runner: Runner, step: TraceStep, frontier: int, *, mark: str = "") -> None:
    """A step for people."""
    values = step_values(runner, step, frontier)
    counted = "" if step.sequence is None else f"  seq {step.sequence}"
    ahead = "" if values["committed"] else ", not committed yet"
    headline = f"{mark}{step.offset}  {values['time']}{counted}  {step.outcome}{ahead}"
    color = typer.colors.RED if step.findings else None
    typer.secho(headline, bold=True, fg=color)
    typer.echo(f"    message   {render_value(values['message'])}")
    for one in values["changes"][:LINES_SHOWN_MAX]:
        typer.echo(
            f"    {shorten_text(one['what'], 40):<8}  {render_value(one['before'])} → {render_value(one['after'])}"
        )
    if (more := len(values["changes"]) - LINES_SHOWN_MAX) > 0:
        typer.echo(f"    … and {more} more; --json has them all")
    for record in values["records"][:LINES_SHOWN_MAX]:
        told = {k: v for k, v in record.items() if k != "index" and not k.startswith("before_")}
        typer.echo(f"    record {record['index']:<3}{render_value(told)}")
    if (more := len(values["records"]) - LINES_SHOWN_MAX) > 0:
        typer.echo(f"    … and {more} more records")
    for found in step.findings:
        text = f"    finding   {found.finding} ({found.level}){': ' if found.cause else ''}{shorten_text(found.cause, LINE_WIDTH_MAX)}"
        typer.secho(text, fg=color)
