"""`seriatim verify`: check a stream's output independently of what runs remember.

With `--at` it judges messages instead, and finds where raw capture, Kafka and output first differ.

Next: operations/prove/verify.py checks the output; operations/prove/verify_at.py does `--at`.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from seriatim import config, context, stream_files
from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.options import Json, StreamName, load_stream
from seriatim.cli.output import RunProgress, render_table
from seriatim.context import ConnectedStream
from seriatim.engine.findings import count_of
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.kafka.past_messages import read_capture
from seriatim.memory import MemoryDigests
from seriatim.operations.prove import verify_at
from seriatim.operations.prove.partition_rules import (
    DifferenceError,
    StateRowReader,
    state_row_reader,
)
from seriatim.operations.prove.verify import KafkaComparison, Verification, VerifyResult
from seriatim.operations.prove.verify_at import ValidationResult
from seriatim.spark_settings import has_cluster
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
            metavar="raw|kafka|output",
            help="Judge the messages instead of the files: those of --capture (raw), of Kafka, or of"
            " the output. Give the option two or three times to see where they differ.",
        ),
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(
            help="For --at raw: a file of JSON lines with topic, partition, offset, key, value,"
            " timestamp."
        ),
    ] = None,
    _json: Json = False,
) -> CommandResult:
    """Check a stream's output independently of its runs.

    The command checks files, digests, the ledger, the witness and the certificates. It also folds
    the records and compares the result with the saved state. The first difference is named, and the
    exit code is 3. A clean pass is signed off in verified.json, and the next pass continues from
    there. With --at messages are judged instead: each session begins with a snapshot, its sequence
    has no hole, repeat or disorder, and no offset is missing.

    Example: seriatim verify demo --kafka

    Example: seriatim verify demo --at raw --at kafka --at output --capture capture.jsonl
    """
    file = load_stream(stream)
    needs_capture = MessageView.RAW in (at or ())
    if needs_capture != (capture is not None):
        raise ConfigError("--at raw and --capture FILE go together", next="give both, or neither")
    if at and (everything or kafka):
        raise ConfigError(
            "--all and --kafka cannot be given with --at", next="leave them out, or leave --at out"
        )
    open_stream = context.ConnectedStream(file, config.load_settings())
    if at:
        return _judge_messages(open_stream, at, capture)
    return _verify_output(open_stream, everything=everything, kafka=kafka)


def _verify_output(
    open_stream: ConnectedStream, *, everything: bool, kafka: bool
) -> VerifiedOutput:
    file = open_stream.file

    name = file.stream.name
    with RunProgress(name, "bytes") as bytes_progress, RunProgress(name) as messages_progress:
        comparison = None
        if kafka:
            comparison = KafkaComparison(
                open_stream.past_reader,
                open_stream.log.bounds(file.stream.topics),
                MemoryDigests,
                messages_progress,
            )
        try:
            with context.choose_workers(file, open_stream.settings, print_notice) as choose:
                audit = FileAudit(context.output_store(file), choose(_record_count(open_stream)))
                verification = Verification(
                    name,
                    audit,
                    row_reader=row_reader_or_none(file),
                    from_first_entry=everything,
                    progress=bytes_progress,
                )
                result = verification.run(comparison)
        finally:
            if kafka:
                open_stream.past_reader.close()
    for warning in result.warnings:
        facts = warning.facts(name)
        details: list[str] = []
        for key in ("file", "next"):
            if key in facts:
                details.append(str(facts[key]))
        print_notice(
            f"{name}: warning: {warning.description}: {': '.join(details)}",
            warning=warning.description,
            **facts,
        )
    for note in result.notes:
        print_notice(f"{name}: {note}", note=note)
    return VerifiedOutput(name, result)


def _record_count(open_stream: ConnectedStream) -> int:
    """How many records the stream has, if that decides where they are read; a ledger that cannot be
    read is reported by verify itself.
    """
    if not has_cluster(open_stream.settings):
        return 0
    try:
        head = open_stream.ledger.head(open_stream.stream.name)
    except SeriatimError:
        return 0
    return sum(account.records for account in head.ledger.partitions.values()) if head else 0


def row_reader_or_none(file: StreamFile) -> StateRowReader | None:
    """Reads the rows in the saved state of the stream.

    None if the machine does not say it, or if the machine cannot be loaded here.
    """
    try:
        return state_row_reader(
            stream_files.load_runner(file), partial(stream_files.load_runner, file)
        )
    except ConfigError as error:
        # Files can be checked without the machine, which may be on another computer.
        print_notice(f"{file.stream.name}: {error.message}")
        return None


class VerifiedOutput(CommandResult):
    """What a pass over the output checked, and the first difference."""

    stream: str
    result: VerifyResult

    def to_json(self) -> JsonObject:
        """The verdict, the counts, and the difference."""
        result = self.result
        warnings = [
            {"what": warning.description, **warning.facts(self.stream)}
            for warning in result.warnings
        ]
        verdict = "good"
        difference = None
        if result.difference is not None:
            verdict = "differs"
            facts = result.difference.facts(self.stream)
            difference = {"what": result.difference.description, **facts}
        return {
            "stream": self.stream,
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

    def render(self) -> str:
        """The counts on one line if all is good. A difference is said by the error."""
        result = self.result
        if result.difference is not None:
            return ""
        entries = count_of(result.entries, "entry")
        if result.since >= 0:
            entries += f" since entry {result.since}"
        counts = [
            entries,
            count_of(result.files, "file"),
            count_of(result.records, "record"),
            count_of(result.sessions, "session"),
        ]
        if result.compared_messages:
            counts.append(f"{count_of(result.compared_messages, 'message')} as Kafka has them")
        text = f"{self.stream}: good up to entry {result.sequence}: {', '.join(counts)}"
        if result.has_folded_records:
            text += "; folding the records gives the saved state"
        return text

    def error(self) -> SeriatimError | None:
        """The first difference."""
        difference = self.result.difference
        return None if difference is None else difference.to_error(self.stream)


def _judge_messages(
    open_stream: ConnectedStream, message_views: list[MessageView], capture: Path | None
) -> JudgedMessages:
    """Judge the messages of each view, and compare the views with each other."""
    stream = open_stream.stream
    runner = stream_files.load_runner(open_stream.file)
    reads_kafka = MessageView.KAFKA in message_views
    views: JsonObject = {}
    certificates: list[Any] = []
    try:
        with RunProgress(stream.name) as progress:
            if capture is not None:
                views["raw"] = verify_at.capture_sources(read_capture(capture), stream, runner)
            if reads_kafka:
                bounds = open_stream.log.bounds(stream.topics)
                views["kafka"] = verify_at.kafka_sources(
                    open_stream.past_reader, bounds, stream, runner
                )
            if MessageView.OUTPUT in message_views:
                views["output"], certificates = _open_output_view(stream)
            explained_holes = verify_at.holes_explained_by(certificates)
            result = verify_at.validate_views(stream, runner, views, explained_holes, progress)
    except DifferenceError as error:
        raise error.difference.to_error(stream.name) from None
    finally:
        if reads_kafka:
            open_stream.past_reader.close()
    for note in result.notes:
        print_notice(f"{stream.name}: {note}", note=note)
    return JudgedMessages(stream.name, result)


def _open_output_view(stream: Stream) -> tuple[Any, list[Any]]:

    audit = FileAudit(open_store(stream.output.path))
    return verify_at.output_sources(Verification(stream.name, audit), audit)


class JudgedMessages(CommandResult):
    """The faults of each view of the messages, and where the views first differ."""

    stream: str
    validation: ValidationResult

    def _fault_rows(self) -> list[JsonObject]:
        return [
            {
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
            for view, faults in self.validation.faults.items()
            for fault in faults
        ]

    def to_json(self) -> JsonObject:
        """The messages counted by view, the faults, and the differences."""
        differences = [
            {
                "partition": str(difference.partition),
                "offset": difference.offset,
                "what": difference.description,
                "views": dict(difference.views),
            }
            for difference in self.validation.first_differences
        ]
        return {
            "stream": self.stream,
            "messages": self.validation.messages,
            "wrong": self._fault_rows(),
            "partings": differences,
        }

    def render(self) -> str:
        """The counts, a table of the faults, and where the views differ."""
        validation = self.validation
        fault_rows = self._fault_rows()
        lines: list[str] = []
        for view, message_count in validation.messages.items():
            messages = count_of(message_count, "message")
            lines.append(f"{self.stream}: {messages} at {view}")
        if fault_rows:
            lines += ["First place where each is wrong:", render_table(fault_rows)]
        for difference in validation.first_differences:
            sides = "; ".join(f"{view}: {text}" for view, text in difference.views.items())
            lines.append(
                f"{difference.partition}: differs at offset {difference.offset}:"
                f" {difference.description} ({sides})"
            )
        if len(validation.messages) > 1 and not validation.first_differences:
            lines.append(f"{self.stream}: {_describe_agreement(list(validation.messages))}")
        return "\n".join(lines)

    def error(self) -> SeriatimError | None:
        """The first difference of the views; else the first fault that is an error."""
        if self.validation.first_differences:
            difference = self.validation.first_differences[0]
            return IntegrityError(
                f"{self.stream}: {' and '.join(difference.views)} differ at"
                f" {difference.partition}, offset {difference.offset}: {difference.description}",
                **dict(difference.views),
                next="before this offset they agree:"
                " look at what happened to this message between the two",
            )
        for row in self._fault_rows():
            if row["level"] == "error":
                return self._fault_error(row)
        return None

    def _fault_error(self, row: JsonObject) -> IntegrityError:
        views = list(self.validation.messages)
        advice = (
            "give --at once more, with another of raw, kafka and output:"
            " that shows whether it came in before or after this place"
        )
        if len(views) > 1:
            advice = (
                f"{' and '.join(views)} agree, so nothing between them changed it:"
                " look at the producer"
            )
        return IntegrityError(
            f"{self.stream}: {row['wrong']} at {row['at']}, {row['partition']},"
            f" offset {row['offset']}",
            session=row["session"],
            expected=row["expected"],
            found=row["found"],
            next=advice,
        )


def _describe_agreement(views: list[str]) -> str:
    """What was compared, for views that do not differ although their counts may."""
    text = f"{' and '.join(views)} agree at every offset of the range that they share"
    if "output" in views:
        text += (
            "; a message without a record counts as agreeing if it is in quarantine, or needs none"
        )
    return text
