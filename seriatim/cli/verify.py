"""`seriatim verify`: a stream's output looked at anew, and where raw capture, Kafka and output part.

Next room: steps/verify.py and steps/compare.py look; steps/validate.py is `--at`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, say
from seriatim.cli.run import Json, StreamName
from seriatim.core.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.adapters.consumer import KafkaReread
    from seriatim.config import Settings
    from seriatim.core.validator import Parting
    from seriatim.steps.validate import Judged
    from seriatim.steps.verify import Table, Verified
    from seriatim.streams import StreamFile


class At(StrEnum):
    """Where messages are looked at."""

    RAW = "raw"
    KAFKA = "kafka"
    OUTPUT = "output"


@app.command()
def verify(
    stream: StreamName,
    everything: Annotated[bool, typer.Option("--all", help="Look at everything, whatever was signed off.")] = False,
    kafka: Annotated[bool, typer.Option("--kafka", help="Read again what Kafka still has, and compare.")] = False,
    at: Annotated[
        list[At] | None,
        typer.Option(help="Judge the messages there instead; give two or three to see where they part."),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(help="For --at raw: JSON lines with topic, partition, offset, key, value, timestamp."),
    ] = None,
    json: Json = False,
) -> None:
    """Look at a stream's output anew: files, digests, ledger, witness, certificates, records against state.

    Names the first thing that differs and ends with exit code 3. A clean pass is signed off in verified.json,
    and the next one goes on from there. With --at it judges messages instead: each session begins by a
    snapshot, its sequence has no hole, repeat or disorder, and no offset is missing.

    Example: seriatim verify demo --kafka
    Example: seriatim verify demo --at raw --at kafka --at output --capture capture.jsonl
    """
    from seriatim import streams

    Options.json = json
    settings = config.load()
    file = streams.load(stream, settings.streams)
    if (At.RAW in (at or ())) != (capture is not None):
        raise ConfigError("--at raw and --capture FILE go together", next="give both, or neither")
    if at and (everything or kafka):
        raise ConfigError("--at judges messages; --all and --kafka are for files", next="give one or the other")
    if at:
        _judge(file, settings, at, capture, json=json)
    else:
        _verify(file, settings, everything=everything, kafka=kafka, json=json)


def _verify(file: StreamFile, settings: Settings, *, everything: bool, kafka: bool, json: bool) -> None:
    from seriatim import wiring
    from seriatim.adapters.audit import FileAudit
    from seriatim.adapters.memory import MemoryDigests
    from seriatim.cli.show import Progress
    from seriatim.steps.compare import Comparing
    from seriatim.steps.verify import Verifying

    name, root = file.stream.name, Path(file.stream.output.path)
    read, reread, after = Progress(name, "bytes"), None, None
    counted = Progress(name)
    if kafka:
        reread = _reread(file, settings)
        after = Comparing(reread, wiring.log(file, settings).bounds(file.stream.topics), MemoryDigests, counted)
    verifying = Verifying(
        name,
        FileAudit(root),
        table=table(file),
        everything=everything,
        progress=read,
    )
    try:
        done = verifying.run(after)
    finally:
        read.close()
        counted.close()
        if reread is not None:
            reread.close()
    _show(name, done, json=json)


def table(file: StreamFile) -> Table | None:
    """How the stream's records fold to state; None: its machine does not say, or cannot be loaded here."""
    from seriatim import streams
    from seriatim.steps.verify import foldable

    try:
        return foldable(streams.runner(file))
    except ConfigError as error:
        # Files can be looked at without the machine, which may be on another computer.
        say(f"{file.stream.name}: {error.message}")
        return None


def _reread(file: StreamFile, settings: Settings) -> KafkaReread:
    from seriatim import wiring
    from seriatim.adapters.consumer import KafkaReread

    return KafkaReread(wiring.kafka_client(settings), file.stream.isolation)


def _show(stream: str, done: Verified, *, json: bool) -> None:
    """Warnings and notes on stderr, the summary on stdout; a difference raises."""
    for warning in done.warnings:
        facts = warning.facts(stream)
        told = ". ".join(str(facts[name]) for name in ("file", "next") if name in facts)
        say(f"{stream}: warning: {warning.what}: {told}", warning=warning.what, **facts)
    for note in done.notes:
        say(f"{stream}: {note}", note=note)
    if json:
        typer.echo(msgspec.json.encode(_values(stream, done)).decode())
    if done.difference is not None:
        raise done.difference.error(stream)
    if not json:
        typer.echo(_summary(stream, done))


def _summary(stream: str, done: Verified) -> str:
    since = f" since entry {done.since}" if done.since >= 0 else ""
    parts = [f"{done.entries} entries{since}", f"{done.files} files", f"{done.records} records"]
    parts.append(f"{done.sessions} sessions")
    if done.compared:
        parts.append(f"{done.compared} messages as Kafka has them")
    folded = "; the records fold to the state" if done.folded else ""
    return f"{stream}: good up to entry {done.sequence}: {', '.join(parts)}{folded}"


def _values(stream: str, done: Verified) -> dict[str, Any]:
    difference = done.difference
    return {
        "stream": stream,
        "verdict": "good" if difference is None else "differs",
        **{name: getattr(done, name) for name in ("sequence", "since", "entries", "files", "bytes", "records")},
        **{name: getattr(done, name) for name in ("sessions", "gone", "orphans", "compared", "folded", "notes")},
        "warnings": [{"what": warning.what, **warning.facts(stream)} for warning in done.warnings],
        "difference": None if difference is None else {"what": difference.what, **difference.facts(stream)},
    }


def _judge(file: StreamFile, settings: Settings, at: list[At], capture: Path | None, *, json: bool) -> None:
    from seriatim import streams, wiring
    from seriatim.adapters.audit import FileAudit
    from seriatim.adapters.capture import read_capture
    from seriatim.cli.show import Progress
    from seriatim.core.difference import Differs
    from seriatim.steps import validate
    from seriatim.steps.verify import Verifying

    stream, runner, views = file.stream, streams.runner(file), dict[str, Any]()
    audit, progress = FileAudit(Path(stream.output.path)), Progress(stream.name)
    reread = _reread(file, settings) if At.KAFKA in at else None
    certificates: list[Any] = []
    try:
        if capture is not None:
            views["raw"] = validate.raw_places(read_capture(capture), stream, runner)
        if reread is not None:
            bounds = wiring.log(file, settings).bounds(stream.topics)
            views["kafka"] = validate.kafka_places(reread, bounds, stream, runner)
        if At.OUTPUT in at:
            views["output"], certificates = validate.output_places(Verifying(stream.name, audit), audit)
        judged = validate.judge(stream, runner, views, validate.explained_by(certificates), progress)
    except Differs as differs:
        raise differs.difference.error(stream.name) from None
    finally:
        progress.close()
        if reread is not None:
            reread.close()
    show_judged(stream.name, judged, json=json)


def show_judged(stream: str, judged: Judged, *, json: bool) -> None:
    """What is wrong where, and where the views part; either raises if it is an error."""
    rows = [
        {
            "at": view,
            "wrong": wrong.kind,
            "level": wrong.level,
            "count": wrong.count,
            "partition": str(wrong.partition),
            "offset": wrong.offset,
            "session": wrong.session,
            "expected": wrong.expected,
            "found": wrong.found,
        }
        for view, wrongs in judged.wrongs.items()
        for wrong in wrongs
    ]
    partings = [
        {"partition": str(one.partition), "offset": one.offset, "what": one.what, "views": dict(one.views)}
        for one in judged.partings
    ]
    for note in judged.notes:
        say(f"{stream}: {note}", note=note)
    if json:
        values = {"stream": stream, "messages": judged.messages, "wrong": rows, "partings": partings}
        typer.echo(msgspec.json.encode(values).decode())
    else:
        _tell_judged(stream, judged, rows)
    _fail_judged(stream, rows, judged.partings)


def _tell_judged(stream: str, judged: Judged, rows: list[dict[str, Any]]) -> None:
    from seriatim.cli import show

    for view, messages in judged.messages.items():
        typer.echo(f"{stream}: {messages} messages at {view}")
    if rows:
        typer.echo("First place where each is wrong:")
        show.table(list(rows[0]), rows)
    for one in judged.partings:
        sides = "; ".join(f"{view}: {what}" for view, what in one.views.items())
        typer.echo(f"{one.partition}: parts at offset {one.offset}: {one.what} ({sides})")
    if len(judged.messages) > 1 and not judged.partings:
        typer.echo(f"{stream}: {', '.join(judged.messages)} do not part")


def _fail_judged(stream: str, rows: list[dict[str, Any]], partings: list[Parting]) -> None:
    errors = [row for row in rows if row["level"] == "error"]
    if partings:
        first = partings[0]
        raise IntegrityError(
            f"{stream}: {' and '.join(first.views)} part at {first.partition}, offset {first.offset}: {first.what}",
            **dict(first.views),
            next="up to this offset they agree: look at what happened to this message between the two",
        )
    if errors:
        first_wrong = errors[0]
        raise IntegrityError(
            f"{stream}: {first_wrong['wrong']} at {first_wrong['at']}, {first_wrong['partition']}, "
            f"offset {first_wrong['offset']}",
            session=first_wrong["session"],
            expected=first_wrong["expected"],
            found=first_wrong["found"],
            next="give a second --at to see whether it came in before or after that place",
        )
