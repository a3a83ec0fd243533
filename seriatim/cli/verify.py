"""`seriatim verify`: check a stream's output independently of what runs remember.

With `--at` it judges messages instead, and finds where raw capture, Kafka and output first differ.

Next: operations/prove/verify.py and operations/prove/compare_kafka.py check the output;
operations/prove/verify_at.py does `--at`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from seriatim import config, context, stream_files
from seriatim.cli import output, print_json, print_notice
from seriatim.cli.options import Json, StreamName
from seriatim.cli.output import RunProgress
from seriatim.config import Settings
from seriatim.engine.machine import Runner
from seriatim.errors import ConfigError, IntegrityError
from seriatim.kafka.past_messages import KafkaPastMessageReader, read_capture
from seriatim.memory import MemoryDigests
from seriatim.operations.prove import verify_at
from seriatim.operations.prove.partition_rules import (
    DifferenceError,
    StateRowReader,
    state_row_reader,
)
from seriatim.operations.prove.verify import KafkaComparison, Verification, VerifyResult
from seriatim.operations.prove.verify_at import FirstDifference, ValidationFault, ValidationResult
from seriatim.storage.audit import FileAudit
from seriatim.storage.store import open_store
from seriatim.stream import Stream
from seriatim.stream_files import StreamFile


class MessageView(StrEnum):
    """Where the messages are taken from that `--at` judges."""

    RAW = "raw"
    KAFKA = "kafka"
    OUTPUT = "output"


def verify(
    stream: StreamName,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Check everything, also what an earlier pass signed off."),
    ] = False,
    kafka: Annotated[
        bool,
        typer.Option("--kafka", help="Also read again the messages that Kafka has, and compare."),
    ] = False,
    at: Annotated[
        list[MessageView] | None,
        typer.Option(
            help="Judge the messages there instead. Give two or three to see where they differ."
        ),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(
            help="For --at raw: a file of JSON lines with topic, partition, offset, key, value,"
            " timestamp."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a stream's output independently of its runs.

    Files, digests, ledger, witness and certificates are checked, and that the records fold to the
    state. The first difference is named, and the exit code is 3. A clean pass is signed off in
    verified.json, and the next pass continues from there. With --at messages are judged instead:
    each session begins with a snapshot, its sequence has no hole, repeat or disorder, and no offset
    is missing.

    Example: seriatim verify demo --kafka

    Example: seriatim verify demo --at raw --at kafka --at output --capture capture.jsonl
    """
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    needs_capture = MessageView.RAW in (at or ())
    if needs_capture != (capture is not None):
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

    name = file.stream.name
    bytes_progress = RunProgress(name, "bytes")
    messages_progress = RunProgress(name)
    past_reader = None
    comparison = None
    if kafka:
        past_reader = context.ConnectedStream(file, settings).past_reader
        bounds = context.log(file, settings).bounds(file.stream.topics)
        comparison = KafkaComparison(past_reader, bounds, MemoryDigests, messages_progress)
    verification = Verification(
        name,
        FileAudit(open_store(file.stream.output.path)),
        row_reader=row_reader_or_none(file),
        from_first_entry=everything,
        progress=bytes_progress,
    )
    try:
        result = verification.run(comparison)
    finally:
        bytes_progress.close()
        messages_progress.close()
        if past_reader is not None:
            past_reader.close()
    _print_result(name, result, json=json)


def row_reader_or_none(file: StreamFile) -> StateRowReader | None:
    """Reads the rows in the saved state of the stream.

    None if the machine does not say it, or if the machine cannot be loaded here.
    """
    try:
        return state_row_reader(stream_files.load_runner(file))
    except ConfigError as error:
        # Files can be checked without the machine, which may be on another computer.
        print_notice(f"{file.stream.name}: {error.message}")
        return None


def _print_result(stream: str, result: VerifyResult, *, json: bool) -> None:
    """Print warnings and notes on stderr, and the summary on stdout. A difference is raised."""
    for warning in result.warnings:
        facts = warning.facts(stream)
        details = ". ".join(str(facts[name]) for name in ("file", "next") if name in facts)
        print_notice(
            f"{stream}: warning: {warning.description}: {details}",
            warning=warning.description,
            **facts,
        )
    for note in result.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        print_json(_result_values(stream, result))
    if result.difference is not None:
        raise result.difference.to_error(stream)
    if not json:
        typer.echo(_describe_result(stream, result))


def _describe_result(stream: str, result: VerifyResult) -> str:
    entries = f"{result.entries} entries"
    if result.since >= 0:
        entries += f" since entry {result.since}"
    counts = [
        entries,
        f"{result.files} files",
        f"{result.records} records",
        f"{result.sessions} sessions",
    ]
    if result.compared_messages:
        counts.append(f"{result.compared_messages} messages as Kafka has them")
    text = f"{stream}: good up to entry {result.sequence}: {', '.join(counts)}"
    if result.has_folded_records:
        text += "; the records fold to the state"
    return text


def _result_values(stream: str, result: VerifyResult) -> dict[str, Any]:
    warnings = [
        {"what": warning.description, **warning.facts(stream)} for warning in result.warnings
    ]
    verdict = "good"
    difference = None
    if result.difference is not None:
        verdict = "differs"
        difference = {"what": result.difference.description, **result.difference.facts(stream)}
    return {
        "stream": stream,
        "verdict": verdict,
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
        "warnings": warnings,
        "difference": difference,
    }


def _judge_messages(
    file: StreamFile,
    settings: Settings,
    message_views: list[MessageView],
    capture: Path | None,
    *,
    json: bool,
) -> None:
    """Judge the messages of each view, and compare the views with each other."""
    stream = file.stream
    runner = stream_files.load_runner(file)
    progress = RunProgress(stream.name)
    past_reader = None
    if MessageView.KAFKA in message_views:
        past_reader = context.ConnectedStream(file, settings).past_reader
    try:
        views, certificates = _open_views(
            file, settings, runner, message_views, past_reader, capture
        )
        explained_holes = verify_at.holes_explained_by(certificates)
        result = verify_at.validate_views(stream, runner, views, explained_holes, progress)
    except DifferenceError as error:
        raise error.difference.to_error(stream.name) from None
    finally:
        progress.close()
        if past_reader is not None:
            past_reader.close()
    report_validation(stream.name, result, json=json)


def _open_views(
    file: StreamFile,
    settings: Settings,
    runner: Runner,
    message_views: list[MessageView],
    past_reader: KafkaPastMessageReader | None,
    capture: Path | None,
) -> tuple[dict[str, Any], list[Any]]:
    """The sources of messages by view, and the certificates of the output if it is one of them."""
    stream = file.stream
    views: dict[str, Any] = {}
    certificates: list[Any] = []
    if capture is not None:
        views["raw"] = verify_at.capture_sources(read_capture(capture), stream, runner)
    if past_reader is not None:
        bounds = context.log(file, settings).bounds(stream.topics)
        views["kafka"] = verify_at.kafka_sources(past_reader, bounds, stream, runner)
    if MessageView.OUTPUT in message_views:
        views["output"], certificates = _open_output_view(stream)
    return views, certificates


def _open_output_view(stream: Stream) -> tuple[Any, list[Any]]:

    audit = FileAudit(open_store(stream.output.path))
    return verify_at.output_sources(Verification(stream.name, audit), audit)


def report_validation(stream: str, validation: ValidationResult, *, json: bool) -> None:
    """Print the faults of each view, and where the views first differ. An error is raised."""
    fault_rows = []
    for view, faults in validation.faults.items():
        fault_rows += [_fault_row(view, fault) for fault in faults]
    for note in validation.notes:
        print_notice(f"{stream}: {note}", note=note)
    if json:
        _print_validation_json(stream, validation, fault_rows)
    else:
        _print_validation(stream, validation, fault_rows)
    _raise_for_validation(
        stream, list(validation.messages), fault_rows, validation.first_differences
    )


def _fault_row(view: str, fault: ValidationFault) -> dict[str, Any]:
    return {
        "at": view,
        "wrong": fault.kind,
        "level": fault.level,
        "count": fault.count,
        "partition": str(fault.partition),
        "offset": fault.offset,
        "session": fault.session,
        "expected": fault.expected,
        "found": fault.found,
    }


def _print_validation_json(
    stream: str, validation: ValidationResult, fault_rows: list[dict[str, Any]]
) -> None:
    differences = [
        {
            "partition": str(difference.partition),
            "offset": difference.offset,
            "what": difference.description,
            "views": dict(difference.views),
        }
        for difference in validation.first_differences
    ]
    values = {
        "stream": stream,
        "messages": validation.messages,
        "wrong": fault_rows,
        "partings": differences,
    }
    print_json(values)


def _print_validation(
    stream: str, validation: ValidationResult, fault_rows: list[dict[str, Any]]
) -> None:

    for view, message_count in validation.messages.items():
        typer.echo(f"{stream}: {message_count} messages at {view}")
    if fault_rows:
        typer.echo("First place where each is wrong:")
        output.print_table(list(fault_rows[0]), fault_rows)
    for difference in validation.first_differences:
        sides = "; ".join(f"{view}: {text}" for view, text in difference.views.items())
        typer.echo(
            f"{difference.partition}: differs at offset {difference.offset}:"
            f" {difference.description} ({sides})"
        )
    if len(validation.messages) > 1 and not validation.first_differences:
        typer.echo(f"{stream}: {_describe_agreement(list(validation.messages))}")


def _describe_agreement(views: list[str]) -> str:
    """What was compared, for views that do not differ although their counts may."""
    text = f"{' and '.join(views)} agree at every offset of the range that they share"
    if "output" in views:
        text += (
            "; a message without a record counts as agreeing if it is in quarantine, or needs none"
        )
    return text


def _raise_for_validation(
    stream: str,
    views: list[str],
    fault_rows: list[dict[str, Any]],
    first_differences: list[FirstDifference],
) -> None:
    if first_differences:
        difference = first_differences[0]
        raise IntegrityError(
            f"{stream}: {' and '.join(difference.views)} differ at {difference.partition},"
            f" offset {difference.offset}: {difference.description}",
            **dict(difference.views),
            next="up to this offset they agree:"
            " look at what happened to this message between the two",
        )
    error_rows = [row for row in fault_rows if row["level"] == "error"]
    if error_rows:
        row = error_rows[0]
        advice = "give a second --at to see whether it came in before or after that place"
        if len(views) > 1:
            advice = (
                f"{' and '.join(views)} agree, so nothing between them changed it:"
                " look at the producer"
            )
        raise IntegrityError(
            f"{stream}: {row['wrong']} at {row['at']}, {row['partition']}, offset {row['offset']}",
            session=row["session"],
            expected=row["expected"],
            found=row["found"],
            next=advice,
        )
