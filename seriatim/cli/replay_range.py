"""A range folded again into a folder of its own: `seriatim replay … --to DIR`.

Next room: operations/inspect/replay.py folds; storage/scratch.py is the folder; cli/diff.py
compares it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import replace

from seriatim import __version__, config
from seriatim.cli import print_notice
from seriatim.cli.lookback import open_lookback, parse_offset, parse_time_ms, print_json
from seriatim.engine.findings import shell_quote
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from seriatim.cli.lookback import LookbackCommand
    from seriatim.engine.machine import Runner
    from seriatim.engine.task import TaskContext
    from seriatim.ledger.model import File
    from seriatim.operations.inspect.replay import ReplayOutput, ReplayRun
    from seriatim.stream_files import StreamFile

FILE_MACHINE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
NAMED_MACHINE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|table")


def replay_into_folder(
    stream: str,
    target: Path,
    *,
    machine: str | None,
    partition: str | None,
    topic: str | None,
    start: str | None,
    until: str | None,
    fresh: bool,
    json: bool,
) -> None:
    """Fold a range into a folder."""
    from seriatim.cli.output import RunProgress
    from seriatim.kafka.consumer import KafkaPastMessageReader
    from seriatim.operations.inspect.replay import ReplayRun
    from seriatim.storage import scratch

    folder = scratch.resolve_path(target)
    scratch.refuse_unusable_folder(folder)
    _refuse_stream_outputs(folder)
    with open_lookback(stream, json=json) as opened:
        file, same = with_machine(opened.file, machine)
        runner = _load_runner(opened, file, is_same_machine=same)
        reread: Any = opened.context.past_reader
        if isinstance(reread, KafkaPastMessageReader):
            reread.with_headers = True
        tools, progress = (
            replace(opened.context, stream=file.stream, runner=runner, on_progress=None),
            RunProgress(opened.name),
        )
        kit = _kit_factory(opened, file, runner, folder)
        replaying = ReplayRun(
            tools, opened.head, kit, without_state=fresh or not same, progress=progress
        )
        wanted = _ranges_to_replay(opened, replaying, partition, topic, start, until)
        scratch.create_folder(folder)
        try:
            made = list(replaying.run(wanted))
        except ConfigError:
            scratch.remove_if_empty(folder)
            raise
        finally:
            progress.close()
        values = _write_tables(
            opened, file, runner, folder, made, machine=machine, fresh=fresh or not same
        )
        print_json(values) if json else _print_result(opened.name, folder, made)


def _refuse_stream_outputs(folder: Path) -> None:
    """Refuse what some stream's file names as its output, though nothing is there yet."""
    from seriatim import stream_files

    home = config.load_settings().streams
    for name in stream_files.list_streams(home):
        try:
            output = Path(stream_files.load_stream(name, home).stream.output.path).resolve()
        except ConfigError:  # a stream file that is wrong has no output to protect
            continue
        if folder == output or output in folder.parents or folder in output.parents:
            raise ConfigError(
                f"--to {folder}: the output of stream {name} is {output}",
                next="give a folder elsewhere",
            )


def with_machine(file: StreamFile, machine: str | None) -> tuple[StreamFile, bool]:
    """The stream with another machine, and whether it is the stream's own, in whichever version.

    A file's class is the stream's own if both names are: `fixed/orderbook.py:OrderBook` of
    `orderbook:OrderBook`.
    """
    if machine is None or machine == file.stream.machine:
        return file, True
    if match := FILE_MACHINE.fullmatch(machine):
        path = config.expand_user(
            Path(match["path"]), f"--machine {machine}", "give the path of a Python file"
        ).absolute()
        named = f"replayed_{path.stem}"
        _import_file(path, named)
        own = f"{path.stem}:{match['name']}" == file.stream.machine
        return replace(file, stream=replace(file.stream, machine=f"{named}:{match['name']}")), own
    if not NAMED_MACHINE.fullmatch(machine) or (machine == "table" and file.stream.table is None):
        raise ConfigError(
            f"--machine {machine!r} is no machine",
            next="write module:Class, of a module beside the stream file, or path/to/file.py:Class",
        )
    return replace(file, stream=replace(file.stream, machine=machine)), False


def _import_file(path: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(
            f"--machine: there is no file {path}",
            next="give the path of a Python file and its class",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--machine: {path.name} fails: {type(error).__name__}: {error}", next=f"fix {path}"
        ) from error


def _load_runner(command: LookbackCommand, file: StreamFile, *, is_same_machine: bool) -> Runner:
    from seriatim import stream_files
    from seriatim.ledger.machine_version import refuse_incompatible_machine

    runner = stream_files.load_runner(file)
    if is_same_machine:
        ledger = command.head.ledger
        refuse_incompatible_machine(
            ledger, ledger.machine, runner.state_version, runner.can_upgrade, runner.shape
        )
    return runner


def _kit_factory(
    command: LookbackCommand, file: StreamFile, runner: Runner, folder: Path
) -> Callable[[tuple[File, ...]], TaskContext]:
    """What tasks work with: everything is read from the stream, and written to the folder."""
    from seriatim import context
    from seriatim.engine.task import TaskContext
    from seriatim.memory import MemoryDigests
    from seriatim.storage.record_files import ParquetRecords
    from seriatim.storage.scratch import LayeredState
    from seriatim.storage.state_files import ParquetState

    stream, compression = file.stream, file.stream.output.compression
    explain = context.hole_explainer(file, context.kafka_client(config.load_settings()))

    def kit(base: tuple[File, ...]) -> TaskContext:
        return TaskContext(
            runner=runner,
            tier=stream.tier,
            on_poison=stream.on_poison,
            limits=stream.limits,
            has_session_field=stream.session_field is not None,
            records=ParquetRecords(
                folder, runner.columns, compression, (), other_tables=runner.other_columns
            ),
            state=LayeredState(
                ParquetState(folder, stream.name, compression), command.context.state, base
            ),
            explain=explain,
            digests=MemoryDigests,
            peak_memory_bytes=lambda: 0,
        )

    return kit


def _ranges_to_replay(
    command: LookbackCommand,
    replaying: ReplayRun,
    partition: str | None,
    topic: str | None,
    start: str | None,
    until: str | None,
) -> dict[Partition, OffsetRange]:
    """What is folded again, by partition."""
    ledger, wanted = command.head.ledger, None if partition is None else Partition.parse(partition)
    chosen = [
        p for p in ledger.known_partitions() if topic in (None, p.topic) and wanted in (None, p)
    ]
    chosen = [p for p in chosen if not ledger.partitions[str(p)].retired]
    if not chosen:
        raise ConfigError(
            f"{command.name}: it never read {partition or topic}",
            next=f"seriatim status {command.name}",
        )
    if len(chosen) > 1 and any(
        edge is not None and parse_offset(edge) is not None for edge in (start, until)
    ):
        raise ConfigError(
            "an offset is of one partition", next="name it with --partition, or give times"
        )
    found = {}
    for place in chosen:
        frontier = ledger.partitions[str(place)].frontier
        begin = (
            replaying.earliest_start(place)
            if start is None
            else _resolve_edge(command, place, start)
        )
        end = frontier if until is None else _resolve_edge(command, place, until)
        if begin < end:
            found[place] = OffsetRange(begin, end)
    if not found:
        raise ConfigError(
            f"{command.name}: there is nothing in this range", next="choose --from before --until"
        )
    return found


def _resolve_edge(command: LookbackCommand, partition: Partition, text: str) -> int:
    if (offset := parse_offset(text)) is not None:
        return offset
    found = command.context.log.offsets_for_time([partition], parse_time_ms(text)).get(
        partition, -1
    )
    return command.head.ledger.partitions[str(partition)].frontier if found < 0 else found


def _write_tables(
    command: LookbackCommand,
    file: StreamFile,
    runner: Runner,
    folder: Path,
    outputs: list[ReplayOutput],
    *,
    machine: str | None,
    fresh: bool,
) -> dict[str, Any]:
    """The tables, and last what the folder is."""
    from seriatim.clock import WallClock
    from seriatim.storage import scratch
    from seriatim.storage.record_files import record_schema

    scratch.create_table(
        folder, "", record_schema(runner.columns), [one for part in outputs for one in part.records]
    )
    for table, columns in runner.other_columns.items():
        files = [one for part in outputs for one in part.other_record_files.get(table, [])]
        scratch.create_table(folder, table, record_schema(columns), files)
    values = {
        "replay": command.name,
        "machine": machine or file.stream.machine,
        "tier": file.stream.tier,
        "product": __version__,
        "at_seconds": WallClock().now_seconds(),
        "sequence": command.head.ledger.sequence,
        "fresh": fresh,
        "partitions": [_output_values(part) for part in outputs],
    }
    scratch.write_manifest(folder, values)
    return values


def _output_values(output: ReplayOutput) -> dict[str, Any]:
    return {
        "topic": output.partition.topic,
        "topic_id": output.topic_id,
        "partition": output.partition.number,
        "asked": output.requested_start,
        "from": output.start,
        "until": output.until,
        "base": output.base_sequence,
        "messages": output.messages,
        "records": sum(file.rows for file in output.records),
        "headless": output.headless,
        "findings": output.findings,
        "halted": output.halt_reason or None,
        "missing": output.missing_messages,
    }


def _print_result(stream: str, folder: Path, outputs: list[ReplayOutput]) -> None:
    from seriatim.cli import output as show

    rows = [_output_values(part) for part in outputs]
    show.print_table(
        ["topic", "partition", "from", "until", "messages", "records", "headless", "halted"], rows
    )
    for part in outputs:
        if part.findings:
            told = ", ".join(f"{kind} {number}" for kind, number in part.findings.items())
            print_notice(f"{part.partition}: {told}")
        if part.missing_messages:
            print_notice(
                f"{part.partition}: {part.missing_messages} messages that were folded when this was committed are not in Kafka"
                " any more (compacted away, or deleted): these records are of the rest"
            )
    typer.echo(
        f"written to {folder}; nothing was committed. Compare: seriatim diff {stream} {shell_quote(str(folder))}"
    )
