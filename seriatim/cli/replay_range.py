"""Fold a range again into a new folder: `seriatim replay … --to DIR`.

Next: operations/inspect/replay.py folds; storage/scratch.py writes the folder; cli/diff.py compares
it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from msgspec.structs import replace

from seriatim import __version__, clock, config, context, stream_files
from seriatim.cli import print_json, print_notice
from seriatim.cli.lookback import (
    LookbackCommand,
    open_lookback,
    parse_offset,
    parse_time_ms,
)
from seriatim.cli.output import RunProgress, print_table
from seriatim.engine.files import File
from seriatim.engine.findings import shell_quote
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import TaskContext
from seriatim.errors import ConfigError
from seriatim.ledger.model import refuse_incompatible_machine
from seriatim.memory import MemoryDigests
from seriatim.operations.inspect.replay import ReplayOutput, ReplayRun
from seriatim.storage import scratch
from seriatim.storage.record_files import ParquetRecords, record_schema
from seriatim.storage.scratch import MANIFEST_FILE, LayeredState
from seriatim.storage.state_files import ParquetState
from seriatim.storage.store import LocalStore, open_store
from seriatim.stream_files import StreamFile, describe_url_problem

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
    """Fold a range into a folder of its own, and print what was folded.

    1. Refuse a folder that cannot be used, or that is the output of a stream.
    2. Open the stream, and load the machine to fold with.
    3. Fold the ranges; files go to the folder only.
    4. Write the tables, and last the manifest: a folder without it is incomplete.
    """
    # 1. Refuse.
    folder = resolve_folder(target)
    refuse_unusable_folder(folder)
    _refuse_stream_outputs(folder)
    with open_lookback(stream) as command:
        # 2. Open.
        file, is_same_machine = with_machine(command.file, machine)
        runner = _load_runner(command, file, is_same_machine=is_same_machine)
        # Another machine may use the headers of messages.
        command.open_stream.past_reader.with_headers = True
        without_state = fresh or not is_same_machine
        progress = RunProgress(command.name)
        replay_run = ReplayRun(
            command.open_stream.with_machine(file, runner),
            command.head,
            _task_context_factory(command, file, runner, folder),
            without_state=without_state,
            progress=progress,
        )
        ranges = _ranges_to_replay(command, replay_run, partition, topic, start, until)
        # 3. Fold.
        create_folder(folder)
        try:
            outputs = list(replay_run.run(ranges))
        except ConfigError:
            # Refused before anything was written: the same command must find no folder in its way.
            _remove_if_empty(folder)
            raise
        finally:
            progress.close()
        # 4. Write.
        manifest = _write_tables(
            command, file, runner, folder, outputs, machine=machine, fresh=without_state
        )
        if json:
            print_json(manifest)
        else:
            _print_result(command.name, folder, outputs)


def resolve_folder(target: Path) -> Path:
    """The path with all links resolved. A link that leads nowhere is refused."""
    absolute = config.expand_user(target, f"--to {target}", "give a folder").absolute()
    try:
        broken_link = _find_broken_link(absolute)
        folder = absolute.resolve()
    except (OSError, RuntimeError):
        # Links that lead to each other in a circle.
        broken_link = absolute
    if broken_link is not None:
        raise ConfigError(
            f"--to {target}: {broken_link} is a link that leads nowhere",
            next="give a folder, without this link",
        )
    return folder


def _find_broken_link(path: Path) -> Path | None:
    for candidate in (path, *path.parents):
        if candidate.is_symlink() and not candidate.exists():
            return candidate
    return None


def create_folder(folder: Path) -> None:
    """Create the folder, or refuse it if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--to {folder}: it cannot be made: {error.strerror or error}",
            next="give a folder where you may write",
        ) from None


def _remove_if_empty(folder: Path) -> None:
    """Delete the folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def refuse_unusable_folder(folder: Path) -> None:
    """Refuse a folder that is not empty, is inside an output or a file, or cannot hold a Delta
    table.
    """
    problem = describe_url_problem(folder)
    if problem:
        raise ConfigError(f"--to {folder}: {problem}", next="give a folder with a plainer name")
    for parent in (folder, *folder.parents):
        has_ledger = (parent / "head.json").exists()
        if not has_ledger and not (parent / "records" / "_delta_log").is_dir():
            continue
        problem = f"{parent} is an output"
        if (parent / MANIFEST_FILE).exists():
            problem = "a replay is in it already"
        raise ConfigError(
            f"--to {folder}: {problem}",
            next="give a folder of its own, that does not exist yet",
        )
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(
                f"--to {folder}: {parent} is a file", next="give a folder, below folders"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "it is not empty" if folder.is_dir() else "it is a file"
        raise ConfigError(
            f"--to {folder}: {problem}", next="give a folder that does not exist yet, or is empty"
        )


def _refuse_stream_outputs(folder: Path) -> None:
    """Refuse a folder that a stream file names as its output, even if it does not exist yet."""
    streams_folder = config.load_settings().streams
    for name in stream_files.list_streams(streams_folder):
        try:
            file = stream_files.load_stream(name, streams_folder)
        except ConfigError:  # a stream file that is wrong has no output to protect
            continue
        output = Path(file.stream.output.path).resolve()
        if folder == output or output in folder.parents or folder in output.parents:
            raise ConfigError(
                f"--to {folder}: the output of stream {name} is {output}",
                next="give a folder elsewhere",
            )


def with_machine(file: StreamFile, machine: str | None) -> tuple[StreamFile, bool]:
    """The stream with another machine, and whether that is a version of the stream's own machine.

    The class of a file is the stream's own if the names of module and class are the same:
    `fixed/orderbook.py:OrderBook` is a version of `orderbook:OrderBook`.
    """
    if machine is None or machine == file.stream.machine:
        return file, True
    match = FILE_MACHINE.fullmatch(machine)
    if match:
        path = config.expand_user(
            Path(match["path"]), f"--machine {machine}", "give the path of a Python file"
        ).absolute()
        class_name = match["name"]
        # A name of its own, since the stream's module of the same name may be imported already.
        module_name = f"replayed_{path.stem}"
        _import_file(path, module_name)
        is_own = f"{path.stem}:{class_name}" == file.stream.machine
        return _replace_machine(file, f"{module_name}:{class_name}"), is_own
    is_table_without_settings = machine == "table" and file.stream.table is None
    if not NAMED_MACHINE.fullmatch(machine) or is_table_without_settings:
        raise ConfigError(
            f"--machine {machine!r} is no machine",
            next="write module:Class, of a module beside the stream file, or path/to/file.py:Class",
        )
    return _replace_machine(file, machine), False


def _replace_machine(file: StreamFile, machine: str) -> StreamFile:
    return replace(file, stream=replace(file.stream, machine=machine))


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

    runner = stream_files.load_runner(file)
    if is_same_machine:
        ledger = command.head.ledger
        refuse_incompatible_machine(
            ledger, ledger.machine, runner.state_version, runner.can_upgrade, runner.shape
        )
    return runner


def _task_context_factory(
    command: LookbackCommand, file: StreamFile, runner: Runner, folder: Path
) -> Callable[[tuple[File, ...]], TaskContext]:
    """Make contexts for fold tasks: they read from the stream, and write to the folder."""
    stream = file.stream
    compression = stream.output.compression
    explain = context.hole_explainer(file, context.kafka_client(config.load_settings()))

    def new_task_context(base: tuple[File, ...]) -> TaskContext:
        store = LocalStore(folder)
        records = ParquetRecords(
            store, runner.columns, compression, (), other_tables=runner.other_columns
        )
        new_state = ParquetState(store, stream.name, compression)
        return TaskContext(
            runner=runner,
            tier=stream.tier,
            on_poison=stream.on_poison,
            limits=stream.limits,
            has_session_field=stream.session_field is not None,
            records=records,
            state=LayeredState(new_state, command.open_stream.state, base),
            explain=explain,
            digests=MemoryDigests,
            peak_memory_bytes=lambda: 0,
        )

    return new_task_context


def _ranges_to_replay(
    command: LookbackCommand,
    replay_run: ReplayRun,
    partition: str | None,
    topic: str | None,
    start: str | None,
    until: str | None,
) -> dict[Partition, OffsetRange]:
    """The range of each chosen partition: from `--from` or its earliest start, to `--until` or its
    frontier.
    """
    partitions = _chosen_partitions(command, partition, topic)
    edges = [edge for edge in (start, until) if edge is not None]
    has_offset = any(parse_offset(edge) is not None for edge in edges)
    if len(partitions) > 1 and has_offset:
        raise ConfigError(
            "an offset is of one partition", next="name it with --partition, or give times"
        )
    ranges = {}
    for chosen in partitions:
        begin = _first_offset(command, replay_run, chosen, start)
        end = _resolve_edge(command, chosen, until)
        if begin < end:
            ranges[chosen] = OffsetRange(begin, end)
    if not ranges:
        raise ConfigError(
            f"{command.name}: there is nothing in this range", next="choose --from before --until"
        )
    return ranges


def _first_offset(
    command: LookbackCommand, replay_run: ReplayRun, partition: Partition, start: str | None
) -> int:
    """The offset of `--from`, or the earliest from which the partition can be folded."""
    if start is not None:
        return _resolve_edge(command, partition, start)
    # This reads the whole history of the partition, so only where it is needed.
    return replay_run.earliest_start(partition)


def _chosen_partitions(
    command: LookbackCommand, partition: str | None, topic: str | None
) -> list[Partition]:
    """The partitions of `--partition` or `--topic`, or all; retired ones are left out."""
    ledger = command.head.ledger
    only_partition = None if partition is None else Partition.parse(partition)
    chosen = []
    for candidate in ledger.known_partitions():
        if topic is not None and candidate.topic != topic:
            continue
        if only_partition is not None and candidate != only_partition:
            continue
        if not ledger.partitions[str(candidate)].retired:
            chosen.append(candidate)
    if not chosen:
        raise ConfigError(
            f"{command.name}: it never read {partition or topic}",
            next=f"seriatim status {command.name}",
        )
    return chosen


def _resolve_edge(command: LookbackCommand, partition: Partition, text: str | None) -> int:
    """An edge as an offset. None, and a time after the last message, give the frontier."""
    frontier = command.head.ledger.partitions[str(partition)].frontier
    if text is None:
        return frontier
    offset = parse_offset(text)
    if offset is not None:
        return offset
    offsets = command.open_stream.log.offsets_for_time([partition], parse_time_ms(text))
    first_offset_at_time = offsets.get(partition, -1)
    return frontier if first_offset_at_time < 0 else first_offset_at_time


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
    """Write the tables, and then the manifest that says what the folder has; return the manifest."""
    record_files = []
    for output in outputs:
        record_files += output.records
    store = open_store(str(folder))
    scratch.create_table(store, "", record_schema(runner.columns), record_files)
    for table, columns in runner.other_columns.items():
        table_files = []
        for output in outputs:
            table_files += output.other_record_files.get(table, [])
        scratch.create_table(store, table, record_schema(columns), table_files)
    manifest = {
        "replay": command.name,
        "machine": machine or file.stream.machine,
        "tier": file.stream.tier,
        "product": __version__,
        "at_seconds": clock.WallClock().now_seconds(),
        "sequence": command.head.ledger.sequence,
        "fresh": fresh,
        "partitions": [_output_values(output) for output in outputs],
    }
    scratch.write_manifest(store, manifest)
    return manifest


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

    print_table(
        ["topic", "partition", "from", "until", "messages", "records", "headless", "halted"],
        [_output_values(output) for output in outputs],
    )
    for output in outputs:
        if output.findings:
            findings = ", ".join(f"{kind} {count}" for kind, count in output.findings.items())
            print_notice(f"{output.partition}: {findings}")
        if output.missing_messages:
            print_notice(
                f"{output.partition}: {output.missing_messages} messages that were folded when this"
                " was committed are not in Kafka any more (compacted away, or deleted): these"
                " records are of the rest"
            )
    typer.echo(
        f"written to {folder}; nothing was committed."
        f" Compare: seriatim diff {stream} {shell_quote(str(folder))}"
    )
