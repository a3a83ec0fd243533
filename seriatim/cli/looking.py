"""What the commands that look back have in common: how they begin, which options they take, how a step is shown.

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
from seriatim.cli import Options, say
from seriatim.core.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.core.machine import Runner
    from seriatim.core.offsets import Partition
    from seriatim.core.step import Step
    from seriatim.ports import Head
    from seriatim.steps.retrace import Looking, Way
    from seriatim.streams import StreamFile


def session_name(name: str | None) -> str | None:
    """A session's name as typed. A key that is not UTF-8 belongs to no session, so there is none of such a name."""
    try:
        return name if name is None else name.encode().decode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the session's name {name!r} is not UTF-8: messages with such a key belong to no session",
            next="give the name as status, quarantine or the records show it",
        ) from None


SessionName = Annotated[
    str, typer.Argument(metavar="SESSION", help="The session's name: its Kafka key.", callback=session_name)
]
Topic = Annotated[str | None, typer.Option(help="Where a key lives in several topics.")]
InPartition = Annotated[
    str | None, typer.Option("--partition", metavar="TOPIC/NUMBER", help="Where to look, if its state does not tell.")
]
From = Annotated[str | None, typer.Option("--from", metavar="EDGE", help="An offset, or a time in UTC.")]
Until = Annotated[str | None, typer.Option("--until", metavar="EDGE", help="Up to, and without, this offset or time.")]
EDGE = "an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,6})?)?Z")
WIDTH = 300
PATIENCE_SECONDS = 2.0
LINES = 5
"""Rows and records that are shown of one message."""


class Lookback(Struct, frozen=True):
    """A stream that is looked back at."""

    file: StreamFile
    tools: Looking
    head: Head

    @property
    def name(self) -> str:
        """The stream's."""
        return self.file.stream.name

    @property
    def runner(self) -> Runner:
        """The machine of now."""
        return self.tools.runner

    def quiet(self) -> None:
        """No more progress: what was asked for is printed now."""
        if isinstance(self.tools.told, Patient):
            self.tools.told.close()
        self.tools.told = None

    def find(self, session: str, topic: str | None, partition: str | None) -> tuple[Partition, int]:
        """Where a session lives, and the first offset that is known to be its own; -1: none is."""
        from seriatim.core.offsets import Partition
        from seriatim.steps.find import find

        wanted = None if partition is None else Partition.parse(partition)
        found = find(self.tools, self.head, session, topic, wanted)
        if found.others:
            told = ", ".join(map(str, found.others))
            say(f"{self.name}: session {session!r} was in {told} as well; this is {found.partition}")
        return found.partition, found.session.first_offset

    def way(self, partition: Partition, session: str) -> Way:
        """A session's way."""
        from seriatim.steps.retrace import Way

        return Way(self.tools, self.head, partition, session)

    def begin(self, way: Way, start: str | None, first: int) -> int:
        """Set out for where a look begins: at `--from`, or at the session's first message that can be reached."""
        if start is not None:
            begin = self.offset(way, start, 0)
            way.begin(begin)
            return begin
        begin = way.since(first)
        way.begin_early(begin)
        if way.at > begin:
            kafka = f"Kafka has it from offset {way.seen.log_start} on"
            say(f"{self.name}: {way.partition} can be folded again from offset {way.at} on, not from {begin}; {kafka}")
        return max(begin, way.at)

    def point(self, way: Way, text: str) -> int:
        """The end of what a state is of, by an offset or a time: all messages before it.

        A time of which Kafka has no message before it any more is refused: what came first after it may be gone, too,
        and the state of a later time would be shown for it.
        """
        if (offset := offset_of(text)) is not None:
            return offset + 1
        end, seen = self.offset(way, text, 0), way.seen
        if end == seen.log_start > way.account.born:
            raise ConfigError(
                f"{self.name}: {way.partition}: which message came first at {text} or after it is not known:"
                f" Kafka has messages from offset {seen.log_start} on, and none of before that time",
                next="give an offset: the column `timestamp` of the records tells which came when",
            )
        return end

    def offset(self, way: Way, text: str | None, otherwise: int) -> int:
        """An edge as a person writes it, as an offset: of a time, the first message at or after it."""
        if text is None:
            return otherwise
        if (offset := offset_of(text)) is not None:
            return offset
        found = self.tools.log.offsets_for_time([way.partition], time_ms(text)).get(way.partition, -1)
        return way.seen.log_end if found < 0 else found


class Patient:
    """Progress of what takes more than two seconds."""

    def __init__(self, stream: str) -> None:
        from seriatim.cli.show import Progress

        self.began, self.progress = time.monotonic(), Progress(stream, "offsets")

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.began > PATIENCE_SECONDS:
            self.progress(done, total)

    def close(self) -> None:
        """Leave the living line."""
        self.progress.close()


@contextmanager
def lookback(stream: str, *, json: bool) -> Iterator[Lookback]:
    """Open a stream to look back at it."""
    from seriatim import streams, wiring
    from seriatim.adapters.consumer import KafkaReread
    from seriatim.steps.commit import read_head
    from seriatim.steps.retrace import Looking

    Options.json = json
    settings = config.load()
    file = streams.load(stream, settings.streams)
    runner = streams.runner(file)
    leave_pandas_out()
    name, store = file.stream.name, wiring.ledger(file)
    head = read_head(store, name)
    if head is None:
        raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
    wiring.refuse_code(file, head.ledger)
    reread = KafkaReread(wiring.kafka_client(settings), file.stream.isolation)
    tools = Looking(
        stream=file.stream,
        runner=runner,
        ledger=store,
        state=wiring.state(file),
        log=wiring.log(file, settings),
        reread=reread,
        told=Patient(name),
    )
    opened = Lookback(file, tools, head)
    try:
        yield opened
    finally:
        opened.quiet()
        reread.close()


class _NoPandas:
    """Finds that there is no pandas."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Only this one is looked for here."""
        if name == "pandas":
            raise ModuleNotFoundError(name)


def leave_pandas_out() -> None:
    """Arrow loads pandas with its first array, to know its arrays: 0.6 s of CPU before the first line, for nothing.

    A machine that uses pandas has loaded it by now; then it stays. Arrow remembers that there is none, so this is for
    a process of our own.
    """
    if "pandas" in sys.modules or not Options.own_process:
        return
    finder: Any = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([""])
    finally:
        sys.meta_path.remove(finder)


def offset_of(text: str) -> int | None:
    """An offset as a person writes it; None: it is something else, and so is what no log can have."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def time_ms(text: str) -> int:
    """A time in UTC, in milliseconds since 1970."""
    try:
        if not TIME.fullmatch(text):
            raise ValueError
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ConfigError(
            f"{text!r} is neither an offset nor a time", allowed=EDGE, next="write one of these"
        ) from None


def shown_time(ms: int) -> str:
    """A message's time as people write it, and can paste."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def print_json(value: Any) -> None:
    """One JSON object on a line of its own, at once."""
    typer.echo(msgspec.json.encode(value, enc_hook=str).decode())


def shortened(text: str | None, length: int = 400) -> str:
    """A text without what a terminal would act on, and not too long. What it takes is loaded with the first."""
    from seriatim.core.integrity import shortened as cut

    return cut(text, length)


def plain(value: Any) -> str:
    """Any value on one line, short enough for people, without what a terminal would act on."""
    return shortened(msgspec.json.encode(value, enc_hook=str).decode(), WIDTH)


def step_values(runner: Runner, step: Step, frontier: int) -> dict[str, Any]:
    """A step for scripts."""
    from seriatim.core.looks import changes

    return {
        "offset": step.offset,
        "time": shown_time(step.timestamp),
        "sequence": step.sequence,
        "outcome": step.outcome,
        "committed": step.offset < frontier,
        "message": message_of(runner, step),
        "changes": [
            {"what": one.what, "before": one.before, "after": one.after}
            for one in changes(runner, step.before, step.after)
        ],
        "records": step.records,
        "findings": [{"finding": one.finding, "level": one.level, "cause": one.cause} for one in step.findings],
        "damaged": step.damaged,
        "quarantined": step.quarantined,
    }


def message_of(runner: Runner, step: Step) -> Any:
    """A message as plain values; one that cannot be decoded, as text."""
    from seriatim.core.looks import view_of_message
    from seriatim.core.message import plain_values

    seen = plain_values(view_of_message(runner, step.message, step.raw))
    if isinstance(seen, dict) and list(seen) == ["poison"]:
        return {**seen, "raw": None if step.raw is None else step.raw[:2_000].decode(errors="backslashreplace")}
    return seen


def show_step(runner: Runner, step: Step, frontier: int, *, mark: str = "") -> None:
    """A step for people."""
    values = step_values(runner, step, frontier)
    counted = "" if step.sequence is None else f"  seq {step.sequence}"
    ahead = "" if values["committed"] else ", not committed yet"
    headline = f"{mark}{step.offset}  {values['time']}{counted}  {step.outcome}{ahead}"
    color = typer.colors.RED if step.findings else None
    typer.secho(headline, bold=True, fg=color)
    typer.echo(f"    message   {plain(values['message'])}")
    for one in values["changes"][:LINES]:
        typer.echo(f"    {shortened(one['what'], 40):<8}  {plain(one['before'])} → {plain(one['after'])}")
    if (more := len(values["changes"]) - LINES) > 0:
        typer.echo(f"    … and {more} more; --json has them all")
    for record in values["records"][:LINES]:
        told = {k: v for k, v in record.items() if k != "index" and not k.startswith("before_")}
        typer.echo(f"    record {record['index']:<3}{plain(told)}")
    if (more := len(values["records"]) - LINES) > 0:
        typer.echo(f"    … and {more} more records")
    for found in step.findings:
        text = (
            f"    finding   {found.finding} ({found.level}){': ' if found.cause else ''}{shortened(found.cause, WIDTH)}"
        )
        typer.secho(text, fg=color)
