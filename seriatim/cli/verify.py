"""`seriatim verify`: a stream's output looked at anew, and where raw capture, Kafka and output
part.

Next room: operations/prove/verify.py and operations/prove/compare_kafka.py look;
operations/prove/verify_at.py is `--at`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.config import Settings
    from seriatim.kafka.consumer import KafkaPastMessageReader
    from seriatim.operations.prove.message_validator import FirstDifference
    from seriatim.operations.prove.verify import VerifyResult, VerifyTableSpec
    from seriatim.operations.prove.verify_at import ValidationResult
    from seriatim.stream_files import StreamFile


class MessageView(StrEnum):
    """Where messages are looked at."""

    RAW = "raw"
    KAFKA = "kafka"
    OUTPUT = "output"


@app.command()
def verify(
    stream: StreamName,
    everything: Annotated[
        bool, typer.Option("--all", help="Look at everything, whatever was signed off.")
    ] = False,
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Read again what Kafka still has, and compare.")
    ] = False,
    at: Annotated[
        list[MessageView] | None,
        typer.Option(
            help="Judge the messages there instead; give two or three to see where they part."
        ),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(
            help="For --at raw: JSON lines with topic, partition, offset, key, value, timestamp."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look at a stream's output anew: files, digests, ledger, witness, certificates, records
    against state.

    Names the first thing that differs and ends with exit code 3. A clean pass is signed off in
    verified.json, and the next one goes on from there. With --at it judges messages instead: each
    session begins by a snapshot, its sequence has no hole, repeat or disorder, and no offset is
    missing.

    Example: seriatim verify demo --kafka Example: seriatim verify demo --at raw --at kafka --at
    output --capture capture.jsonl
    """
    from seriatim import stream_files

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    if (MessageView.RAW in (at or ())) != (capture is not None):
        raise ConfigError("--at raw and --capture FILE go together", next="give both, or neither")
    if at and (everything or kafka):
        raise ConfigError(
            "--at judges messages; --all and --kafka are for files", next="give one or the other"
        )
    if at:
        _judge_messages(file, settings, at, capture, json=json)
    else:
        _verify_output(file, settings, everything=everything, kafka=kafka, json=json)


def _verify_output(
    file: StreamFile, settings: Settings, *, everything: bool, kafka: bool, json: bool
) -> None:
    from seriatim import context
    from seriatim.cli.output import RunProgress
    from seriatim.memory import MemoryDigests
    from seriatim.operations.prove.compare_kafka import KafkaComparison
    from seriatim.operations.prove.verify import Verification
    from seriatim.storage.audit import FileAudit

    name, root = file.stream.name, Path(file.stream.output.path)
    read, reread, after = RunProgress(name, "bytes"), None, None
    counted = RunProgress(name)
    if kafka:
        reread = _open_message_reader(file, settings)
        after = KafkaComparison(
            reread, context.log(file, settings).bounds(file.stream.topics), MemoryDigests, counted
        )
    verifying = Verification(
        name,
        FileAudit(root),
        table_spec=verify_table_spec(file),
        from_first_entry=everything,
        progress=read,
    )
    try:
        done = verifying.run(after)
    finally:
        read.close()
        counted.close()
        if reread is not None:
            reread.close()
    _print_result(name, done, json=json)


def verify_table_spec(file: StreamFile) -> VerifyTableSpec | None:
    """How the stream's records fold to state; None: its machine does not say, or cannot be loaded
    here.
    """
    from seriatim import stream_files
    from seriatim.operations.prove.verify import foldable

    try:
        return foldable(stream_files.load_runner(file))
    except ConfigError as error:
        # Files can be looked at without the machine, which may be on another computer.
        print_notice(f"{file.stream.name}: {error.message}")
        return None


def _open_message_reader(file: StreamFile, settings: Settings) -> KafkaPastMessageReader:
    from seriatim import context
    from seriatim.kafka.consumer import KafkaPastMessageReader

    return KafkaPastMessageReader(context.kafka_client(settings), file.stream.isolation)


def _print_result(stream: str, result: VerifyResult, *, json: bool) -> None:
    """Warnings and notes on stderr, the summary on stdout; a difference raises."""
    for warning in result.warnings:
        facts = warning.facts(stream)
        told = ". ".join(str(facts[name]) for name in ("file", "next") if name in facts)
        print_notice(
            f"{stream}: warning: {warning.description}: {told}",
            warning=warning.description,
            **facts,
        )
    for note in result.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        typer.echo(msgspec.json.encode(_result_values(stream, result)).decode())
    if result.difference is not None:
        raise result.difference.to_error(stream)
    if not json:
        typer.echo(_describe_result(stream, result))


def _describe_result(stream: str, result: VerifyResult) -> str:
    since = f" since entry {result.since}" if result.since >= 0 else ""
    parts = [
        f"{result.entries} entries{since}",
        f"{result.files} files",
        f"{result.records} records",
    ]
    parts.append(f"{result.sessions} sessions")
    if result.compared_messages:
        parts.append(f"{result.compared_messages} messages as Kafka has them")
    folded = "; the records fold to the state" if result.has_folded_records else ""
    return f"{stream}: good up to entry {result.sequence}: {', '.join(parts)}{folded}"


def _result_values(stream: str, result: VerifyResult) -> dict[str, Any]:
    difference = result.difference
    return {
        "stream": stream,
        "verdict": "good" if difference is None else "differs",
        "sequence": result.sequence,
        "since": result.since,
        "entries": result.entries,
        "files": result.files,
        "bytes": result.bytes,
        "records": result.records,
        "sessions": result.sessions,
        "gone": result.deleted_files,
        "orphans": result.orphans,
        "compared": result.compared_messages,
        "folded": result.has_folded_records,
        "notes": result.notes,
        "warnings": [
            {"what": warning.description, **warning.facts(stream)} for warning in result.warnings
        ],
        "difference": None
        if difference is None
        else {"what": difference.description, **difference.facts(stream)},
    }


def _judge_messages(
    file: StreamFile,
    settings: Settings,
    message_views: list[MessageView],
    capture: Path | None,
    *,
    json: bool,
) -> None:
    from seriatim import context, stream_files
    from seriatim.cli.output import RunProgress
    from seriatim.kafka.raw_capture import read_capture
    from seriatim.operations.prove import verify_at
    from seriatim.operations.prove.difference import DifferenceError
    from seriatim.operations.prove.verify import Verification
    from seriatim.storage.audit import FileAudit

    stream, runner, views = file.stream, stream_files.load_runner(file), dict[str, Any]()
    audit, progress = FileAudit(Path(stream.output.path)), RunProgress(stream.name)
    reread = _open_message_reader(file, settings) if MessageView.KAFKA in message_views else None
    certificates: list[Any] = []
    try:
        if capture is not None:
            views["raw"] = verify_at.capture_sources(read_capture(capture), stream, runner)
        if reread is not None:
            bounds = context.log(file, settings).bounds(stream.topics)
            views["kafka"] = verify_at.kafka_sources(reread, bounds, stream, runner)
        if MessageView.OUTPUT in message_views:
            views["output"], certificates = verify_at.output_sources(
                Verification(stream.name, audit), audit
            )
        judged = verify_at.validate_views(
            stream, runner, views, verify_at.holes_explained_by(certificates), progress
        )
    except DifferenceError as differs:
        raise differs.difference.to_error(stream.name) from None
    finally:
        progress.close()
        if reread is not None:
            reread.close()
    report_judged(stream.name, judged, json=json)


def report_judged(stream: str, judged: ValidationResult, *, json: bool) -> None:
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
        for view, wrongs in judged.faults.items()
        for wrong in wrongs
    ]
    partings = [
        {
            "partition": str(one.partition),
            "offset": one.offset,
            "what": one.description,
            "views": dict(one.views),
        }
        for one in judged.first_differences
    ]
    for note in judged.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        values = {
            "stream": stream,
            "messages": judged.messages,
            "wrong": rows,
            "partings": partings,
        }
        typer.echo(msgspec.json.encode(values).decode())
    else:
        _print_judged(stream, judged, rows)
    _raise_for_judged(stream, rows, judged.first_differences)


def _print_judged(stream: str, judged: ValidationResult, rows: list[dict[str, Any]]) -> None:
    from seriatim.cli import output

    for view, messages in judged.messages.items():
        typer.echo(f"{stream}: {messages} messages at {view}")
    if rows:
        typer.echo("First place where each is wrong:")
        output.print_table(list(rows[0]), rows)
    for one in judged.first_differences:
        sides = "; ".join(f"{view}: {what}" for view, what in one.views.items())
        typer.echo(f"{one.partition}: parts at offset {one.offset}: {one.description} ({sides})")
    if len(judged.messages) > 1 and not judged.first_differences:
        typer.echo(f"{stream}: {', '.join(judged.messages)} do not part")


def _raise_for_judged(
    stream: str, rows: list[dict[str, Any]], partings: list[FirstDifference]
) -> None:
    errors = [row for row in rows if row["level"] == "error"]
    if partings:
        first = partings[0]
        raise IntegrityError(
            f"{stream}: {' and '.join(first.views)} part at {first.partition}, offset {first.offset}: {first.description}",
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
