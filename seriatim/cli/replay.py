"""`seriatim replay`: fold a session again up to a break point, or a range into a new folder.

A replay never commits anything to the stream. A break point stops before a message, in pdb or in a
stepper. pdb is only used for a person at a terminal. In any other case the first stop is printed. The
stepper accepts a few letters, and never runs its input as code.

Next: operations/inspect/session_replay.py folds a session; operations/inspect/replay.py folds a range;
storage/scratch.py writes the folder; cli/diff.py compares it.
"""

from __future__ import annotations

import bdb
import dis
import importlib.util
import pdb  # noqa: T100  # a break point needs a debugger
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import IO, Annotated, Any

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from seriatim import __version__, clock, config, context, stream_files
from seriatim.cli import CommandResult, JsonObject, Options, print_json, print_notice
from seriatim.cli.lookback import (
    From,
    InPartition,
    LookbackCommand,
    Topic,
    Until,
    check_session_name,
    open_lookback,
    parse_offset,
    print_step,
    render_time,
    render_value,
    step_values,
)
from seriatim.cli.options import Json, StreamName
from seriatim.cli.output import RunProgress, render_table
from seriatim.engine.files import Files
from seriatim.engine.findings import count_of, shell_quote
from seriatim.engine.machine import Runner, UserMachine
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.engine.session import Row
from seriatim.engine.task import TaskContext
from seriatim.errors import ConfigError
from seriatim.ledger.model import refuse_incompatible_machine
from seriatim.memory import MemoryDigests
from seriatim.operations.inspect.condition import Condition, parse_condition
from seriatim.operations.inspect.replay import ReplayOutput, ReplayRun
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import (
    NAMES_AFTER_FOLD,
    NAMES_BEFORE_FOLD,
    SessionMessage,
    TraceStep,
    TracingMachine,
    condition_names_after,
)
from seriatim.operations.inspect.views import plain_view_of_message, state_to_plain
from seriatim.storage import scratch
from seriatim.storage.record_files import ParquetRecords, record_schema
from seriatim.storage.scratch import MANIFEST_FILE, LayeredState
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import BUCKET_SCHEME, open_store
from seriatim.stream import BUCKET_ADDRESS, MISTYPED_ADDRESS
from seriatim.stream_files import StreamFile, describe_url_problem

FILE_MACHINE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
NAMED_MACHINE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|table")
HELP = (
    "n next message · c on to the next break · s state · m message"
    " · r records and findings of the last · q quit"
)
STATE_NAMES = frozenset({"state", "damaged", "quarantined"})
"""Names of a condition that depend on the session's state before the message."""
BreakOption = Annotated[
    str | None,
    typer.Option(
        "--break",
        metavar="EXPRESSION",
        help="Stop where this is true, for example 'message.price < 0'.",
    ),
]


def replay(
    stream: StreamName,
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]",
            help="Stop at messages of this session.",
            callback=check_session_name,
        ),
    ] = None,
    condition: BreakOption = None,
    on_finding: Annotated[
        bool, typer.Option("--break-on-finding", help="Stop at every finding.")
    ] = False,
    step: Annotated[
        bool, typer.Option("--step", help="Use a simple stepper instead of pdb.")
    ] = False,
    topic: Topic = None,
    partition: InPartition = None,
    start: From = None,
    until: Until = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="With --to: fold by another machine. It may also be path/to/file.py:Class.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="With --to: begin without saved states, as another machine does."
        ),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Fold a range into this new folder, or s3://BUCKET/PREFIX."
        ),
    ] = None,
    _json: Json = False,
) -> ReplayedRanges | None:
    """Fold messages again without a commit, to look into them.

    With SESSION the replay stops before each message for which the condition is true. On a terminal
    it stops in pdb, inside the machine's own `apply`, with the names `state`, `message` and
    `records`. With --step a few letters are the commands. Without a terminal the first stop is
    printed. A condition may use offset, time, session, sequence, message, state, damaged and
    quarantined; and what the message does: records, findings, after and outcome.

    With --to DIR a range of all partitions, or of --partition, is folded into DIR, by the stream's
    machine or by another. DIR may be an address in a bucket. `seriatim diff` compares it with the committed output.

    Example: seriatim replay demo session-00007 --break 'offset == 41337'

    Example: seriatim replay demo --from 41000 --partition demo-a/3 --machine fixed:OrderBook --to
    /tmp/again
    """
    if to is not None:
        if session is not None or condition is not None or on_finding or step:
            raise ConfigError(
                "--to folds all sessions, a break point is for one", next="give one or the other"
            )

        return replay_into_folder(
            stream,
            to,
            machine=machine,
            partition=partition,
            topic=topic,
            start=start,
            until=until,
            fresh=fresh,
        )
    if session is None or machine is not None or fresh:
        raise ConfigError(
            "a replay stops in one session, or goes into a folder",
            next=f"seriatim replay {shell_quote(stream)} SESSION --break 'offset == 41337',"
            " or --to DIR",
        )
    if condition is None and not on_finding and not step:
        raise ConfigError(
            "a replay must know where to stop", next="give --break, --break-on-finding or --step"
        )
    _stop_at_break_points(
        stream,
        session,
        condition,
        topic,
        partition,
        start,
        until,
        on_finding=on_finding,
        step=step,
    )
    return None


def _stop_at_break_points(
    stream: str,
    session: str,
    condition: str | None,
    topic: str | None,
    partition: str | None,
    start: str | None,
    until: str | None,
    *,
    on_finding: bool,
    step: bool,
) -> None:
    """Replay one session, and stop: in the stepper, in pdb, or by printing the first stop."""
    parsed_condition = None
    if condition is not None:
        parsed_condition = parse_condition(condition, (*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD))
    with open_lookback(stream) as command:
        session_replay, begin, end = command.open_session(session, topic, partition, start, until)
        session_replay.fold_to(begin)
        break_point = BreakPoint(
            condition=parsed_condition,
            on_finding=on_finding,
            at_every_message=step and condition is None and not on_finding,
        )
        stepper = Stepper(session_replay, end, break_point, command.stop_progress)
        if step and not Options.json:
            stepper.run_interactive(read_line)
        elif is_terminal() and not Options.json:
            stepper.run_debugger()
        else:
            stepper.print_first_stop()
        if not stepper.stop_count:
            warn_unseen_fields(command.name, break_point)
            print_notice(
                f"{command.name}: session {session!r}: nothing stopped it"
                f" in {session_replay.partition} [{begin}, {end})",
                stopped=None,
            )


def replay_into_folder(
    stream: str,
    target: str,
    *,
    machine: str | None,
    partition: str | None,
    topic: str | None,
    start: str | None,
    until: str | None,
    fresh: bool,
) -> ReplayedRanges:
    """Fold a range into a folder of its own, or a place of its own in a bucket.

    1. Refuse a place that cannot be used, or that is the output of a stream.
    2. Open the stream, and load the machine to fold with.
    3. Fold the ranges; files go to the place only.
    4. Write the tables, and last the manifest: a place without it is incomplete.
    """
    # 1. Refuse.
    is_folder = "://" not in target
    if MISTYPED_ADDRESS.match(target):
        raise ConfigError(
            f"--to {target}: neither a folder nor an address in a bucket",
            next="give an address like s3://BUCKET/PREFIX, or ./ and a folder",
        )
    if is_folder:
        folder = resolve_folder(Path(target))
        refuse_unusable_folder(folder)
        address = str(folder)
    else:
        address = target.rstrip("/")
        refuse_unusable_address(address)
    _refuse_stream_outputs(address)
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
            _task_context_factory(command, file, runner, address),
            without_state=without_state,
            progress=progress,
        )
        ranges = _ranges_to_replay(command, replay_run, partition, topic, start, until)
        # 3. Fold.
        if is_folder:
            create_folder(folder)
        try:
            outputs = list(replay_run.run(ranges))
        except ConfigError:
            # Refused before anything was written: the same command must find no folder in its way.
            if is_folder:
                _remove_if_empty(folder)
            raise
        finally:
            progress.close()
        # 4. Write.
        manifest = _write_tables(
            command, file, runner, address, outputs, machine=machine, fresh=without_state
        )
        return ReplayedRanges(command.name, address, outputs, manifest)


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


def refuse_unusable_address(address: str) -> None:
    """Refuse an address in a bucket below which something is, or that is inside an output."""
    store = open_store(address)
    if not BUCKET_ADDRESS.fullmatch(_without_store_name(address)):
        raise ConfigError(
            f"--to {address}: other characters than letters, digits and . _ = - are in it",
            next="give an address like s3://BUCKET/PREFIX",
        )
    problem = ""
    if store.size(MANIFEST_FILE) is not None:
        problem = "a replay is in it already"
    elif store.folders("") or store.stamps(""):
        problem = "it is not empty"
    parent = address
    while not problem and "/" in parent.partition("://")[2]:
        parent = parent.rpartition("/")[0]
        # Whoever may not look there has no output of theirs there.
        with suppress(ConfigError):
            if open_store(parent).size("head.json") is not None:
                problem = f"{parent} is an output"
    if problem:
        raise ConfigError(
            f"--to {address}: {problem}", next="give a place where nothing is, outside of outputs"
        )


def _without_store_name(address: str) -> str:
    """An address without the name of the store in front; a folder as it is."""
    match = BUCKET_SCHEME.match(address)
    return address if match is None else address[match.start("scheme") :]


def _refuse_stream_outputs(address: str) -> None:
    """Refuse a place that a stream file names as its output, even if it does not exist yet."""
    place = f"{_without_store_name(address)}/"
    streams_folder = config.load_settings().streams
    for name in stream_files.list_streams(streams_folder):
        try:
            file = stream_files.load_stream(name, streams_folder)
        except ConfigError:  # a stream file that is wrong has no output to protect
            continue
        output = _without_store_name(file.stream.output.path)
        if not stream_files.is_in_bucket(file.stream):
            output = str(Path(output).resolve())
        output_place = f"{output}/"
        if place.startswith(output_place) or output_place.startswith(place):
            raise ConfigError(
                f"--to {address}: the output of stream {name} is {output}",
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
        refuse_incompatible_machine(ledger, runner, may_be_another=True)
    return runner


def _task_context_factory(
    command: LookbackCommand, file: StreamFile, runner: Runner, address: str
) -> Callable[[Files], TaskContext]:
    """Make contexts for fold tasks: they read from the stream, and write to the replay's place."""
    stream = file.stream
    compression = stream.output.compression
    explain = context.hole_explainer(
        file, context.kafka_client(config.load_settings(), file.stream.kafka)
    )

    def new_task_context(base: Files) -> TaskContext:
        store = open_store(address)
        records = ParquetRecords(
            store, runner.columns, compression, (), other_tables=runner.other_columns
        )
        new_state = StateFiles(store, stream.name, compression)
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
) -> Ranges:
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
    return command.resolve_edge(partition, text, frontier)


def _write_tables(
    command: LookbackCommand,
    file: StreamFile,
    runner: Runner,
    address: str,
    outputs: list[ReplayOutput],
    *,
    machine: str | None,
    fresh: bool,
) -> JsonObject:
    """Write the tables, and then the manifest that says what was folded; return the manifest."""
    record_files = []
    for output in outputs:
        record_files += output.records
    store = open_store(address)
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


def _output_values(output: ReplayOutput) -> JsonObject:
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


class ReplayedRanges(CommandResult):
    """The ranges that were folded into a folder, or a place in a bucket."""

    stream: str
    address: str
    outputs: list[ReplayOutput]
    manifest: JsonObject
    """What the manifest there says."""

    def to_json(self) -> JsonObject:
        """The manifest."""
        return self.manifest

    def render(self) -> str:
        """A table of the ranges, and how to compare them."""
        # Findings and lost messages are in the manifest, so only people get these notices.
        for output in self.outputs:
            self._print_notices(output)
        rows = [_output_values(output) for output in self.outputs]
        table = render_table(
            rows,
            ["topic", "partition", "from", "until", "messages", "records", "headless", "halted"],
        )
        return (
            f"{table}\nwritten to {self.address}; nothing was committed."
            f" Compare: seriatim diff {self.stream} {shell_quote(self.address)}"
        )

    def _print_notices(self, output: ReplayOutput) -> None:
        if output.findings:
            counts = [f"{kind} {count}" for kind, count in output.findings.items()]
            print_notice(f"{output.partition}: {', '.join(counts)}")
        if output.missing_messages:
            messages = count_of(output.missing_messages, "message")
            print_notice(
                f"{output.partition}: {messages} that were folded when this was committed are not in Kafka"
                " any more (compacted away, or deleted): these"
                " records are of the rest"
            )


class BreakPoint(Struct, kw_only=True):
    """Where a replay stops."""

    condition: Condition | None = None
    """Stop at messages for which this condition is true."""
    on_finding: bool = False
    """Stop at messages that have a finding."""
    at_every_message: bool = False
    """Stop at each message."""

    def condition_names(self) -> frozenset[str]:
        """The names that the condition uses."""
        if self.condition is None:
            return frozenset()
        return self.condition.names

    def needs_folding(self) -> bool:
        """Whether only folding a message tells if it is a stop."""
        uses_names_after = bool(self.condition_names() & set(NAMES_AFTER_FOLD))
        return self.on_finding or uses_names_after

    def needs_state(self) -> bool:
        """Whether the session's state must be known at each message."""
        uses_state = bool(self.condition_names() & STATE_NAMES)
        return self.at_every_message or self.needs_folding() or uses_state


def find_stops(
    replay: SessionReplay, until: int, break_point: BreakPoint
) -> Iterator[SessionMessage]:
    """The messages to stop at, each before it is folded. The caller folds it by `step`."""
    condition = break_point.condition
    if break_point.needs_state():
        yield from _find_stops_one_by_one(
            replay, until, break_point, after_folding=break_point.needs_folding()
        )
    elif condition is not None:

        def is_chosen(message: SessionMessage) -> bool:
            return condition.is_true(replay.tracing_fold.condition_names_before(message.as_batch))

        # The condition needs the message alone, so all messages between two stops are folded at
        # once, which is much faster.
        yield from replay.next_messages(until, is_chosen)


def _find_stops_one_by_one(
    replay: SessionReplay, until: int, break_point: BreakPoint, *, after_folding: bool
) -> Iterator[SessionMessage]:
    """Go message by message, for a condition that depends on the state.

    With `after_folding` each message is folded to see what it does. If it is a stop, the replay
    goes back to before it.
    """
    for message in replay.next_messages(until):
        if break_point.at_every_message:
            yield message
        elif not after_folding:
            if _is_stop_before(replay, message, break_point):
                yield message
            else:
                replay.step(message)
        else:
            position = replay.current_position()
            step = replay.step(message)
            if _is_stop_after(replay, step, break_point):
                replay.go_back(position)
                yield message


def _is_stop_before(
    replay: SessionReplay, message: SessionMessage, break_point: BreakPoint
) -> bool:
    condition = break_point.condition
    if condition is None:
        return False
    return condition.is_true(replay.tracing_fold.condition_names_before(message.as_batch))


def _is_stop_after(replay: SessionReplay, step: TraceStep, break_point: BreakPoint) -> bool:
    if break_point.on_finding and step.findings:
        return True
    condition = break_point.condition
    if condition is None:
        return False
    return condition.is_true(condition_names_after(replay.open_stream.runner, step))


class Stepper:
    """Stops a replay at messages, and shows them: printed once, step by step, or in pdb."""

    def __init__(
        self,
        replay: SessionReplay,
        until: int,
        break_point: BreakPoint,
        stop_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.replay = replay
        self.until = until
        self.break_point = break_point
        self.stop_progress = stop_progress
        self.runner: Runner = replay.open_stream.runner
        self.last_step: TraceStep | None = None
        self.stop_count = 0

    def print_first_stop(self) -> None:
        """Print the first stop and what its message does. Used where no person can answer."""
        for message in find_stops(self.replay, self.until, self.break_point):
            state = self.replay.tracing_fold.copy_of_state()
            step = self.replay.step(message)
            if Options.json:
                values = step_values(self.runner, step, self.replay.committed_end)
                plain_state = state_to_plain(self.runner, state)
                print_json({"stopped": message.offset, **values, "state": plain_state})
            else:
                self._print_stop(message, state)
                print_step(self.runner, step, self.replay.committed_end)
            self.stop_count += 1
            return

    def run_interactive(self, read_command: Callable[[], str]) -> None:
        """Stop at each message of the break point, and do what the person types."""
        # Always one by one, since the person may change to stopping at every message at any time.
        stops = _find_stops_one_by_one(
            self.replay,
            self.until,
            self.break_point,
            after_folding=self.break_point.needs_folding(),
        )
        for message in stops:
            self.stop_count += 1
            self._print_stop(message, self.replay.tracing_fold.copy_of_state())
            command = self._read_command(message, read_command)
            if command == "q":
                return
            self.last_step = self.replay.step(message)
            print_step(self.runner, self.last_step, self.replay.committed_end)
            self.break_point.at_every_message = command == "n"

    def _read_command(self, message: SessionMessage, read_command: Callable[[], str]) -> str:
        """Answer questions about the stop until the person goes on or quits: `n`, `c` or `q`."""
        while True:
            command = read_command().strip()
            if command in ("n", "", "c", "q"):
                return command or "n"
            if command == "s":
                typer.echo(render_state(self.runner, self.replay.tracing_fold.copy_of_state()))
            elif command == "m":
                typer.echo(self._render_message(message))
            elif command == "r" and self.last_step is not None:
                findings = [finding.finding for finding in self.last_step.findings]
                typer.echo(render_value({"records": self.last_step.records, "findings": findings}))
            else:
                typer.echo(HELP)

    def run_debugger(self, terminal: tuple[IO[str], IO[str]] | None = None) -> None:
        """Stop in pdb, inside the machine's own `apply`, at each message of the break point."""
        for message in find_stops(self.replay, self.until, self.break_point):
            self.stop_count += 1
            self._print_stop(message, self.replay.tracing_fold.copy_of_state())
            debugger = Debugger(self.runner, self.last_step, terminal)
            tracing_machine: TracingMachine = self.replay.tracing_fold.tracing_machine
            tracing_machine.apply_hook = debugger.call_apply
            try:
                self.last_step = self.replay.step(message)
            finally:
                tracing_machine.apply_hook = None
            if debugger.has_quit:
                return
            print_step(self.runner, self.last_step, self.replay.committed_end)

    def _print_stop(self, message: SessionMessage, state: Any) -> None:
        self.stop_progress()
        time_text = render_time(int(message.as_batch.timestamps[0]))
        typer.secho(f"● before offset {message.offset}  {time_text}", bold=True)
        typer.echo(f"    message   {self._render_message(message)}")
        typer.echo(f"    state     {render_value(state_to_plain(self.runner, state))}")

    def _render_message(self, message: SessionMessage) -> str:
        batch = message.as_batch
        decoded = self.replay.tracing_fold.decode_message(batch)
        return render_value(plain_view_of_message(self.runner, decoded, batch.values[0]))


def render_state(runner: Runner, state: Any) -> str:
    """A complete state as indented JSON."""
    encoded = msgspec.json.encode(state_to_plain(runner, state), enc_hook=str)
    return msgspec.json.format(encoded).decode()


class Debugger(pdb.Pdb):
    """pdb that stops at the first line of the machine's `apply`.

    The names `state`, `message` and `records` (of the step before) can be used in it.
    """

    def __init__(
        self, runner: Runner, last_step: TraceStep | None, terminal: tuple[IO[str], IO[str]] | None
    ) -> None:
        stdin, stdout = terminal or (None, None)
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        if terminal is not None:
            self.use_rawinput = False
        method: Any = runner.machine.apply if isinstance(runner, UserMachine) else runner.apply
        function = unwrap(getattr(method, "__func__", method))
        self.apply_code = getattr(function, "__code__", None)
        """The code to stop in; None if `apply` is no function with a source."""
        records = [] if last_step is None else last_step.records
        self.named_values: dict[str, Any] = {"records": records}
        self.has_quit = False

    def call_apply(
        self, apply: Callable[[Any, Any], Sequence[Row]], state: Any, message: Any
    ) -> Sequence[Row]:
        """Call `apply` once under the debugger, and return its records."""
        if self.apply_code is None:
            print_notice("the machine's apply is no plain function: it cannot be stopped in")
            return apply(state, message)
        self.named_values |= {"state": state, "message": message}
        self.reset()
        # The stack that pdb shows ends here: the frames below are ours, not the machine's.
        self.botframe = sys._getframe()
        first_line = _first_body_line(self.apply_code)
        self.set_break(self.apply_code.co_filename, first_line, temporary=True)
        self.set_continue()
        sys.settrace(self.trace_dispatch)
        try:
            records: Sequence[Row] = apply(state, message)
        except bdb.BdbQuit:
            self.has_quit = True
            raise
        finally:
            sys.settrace(None)
        return records

    def setup(self, f: Any, tb: Any) -> None:
        """Prepare a stop; the names of `named_values` are added if the code has no such names."""
        super().setup(f, tb)
        frame_names: Any = self.curframe_locals
        for name, value in self.named_values.items():
            frame_names.setdefault(name, value)


def _first_body_line(code: CodeType) -> int:
    """The first line of a function's body: a break point on its `def` line is never hit."""
    def_line = code.co_firstlineno
    body_lines = [line for _, line in dis.findlinestarts(code) if line > def_line]
    return min(body_lines, default=def_line)


def is_terminal() -> bool:
    """Whether a person can answer: stdin and stdout are both a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_line() -> str:
    """Read one command; the end of the input means quit."""
    typer.echo("(seriatim) ", nl=False)
    line = sys.stdin.readline()
    return line or "q"


def warn_unseen_fields(stream: str, break_point: BreakPoint) -> None:
    """Warn of fields that no message and no state ever had: they are probably misspelled."""
    if break_point.condition is not None and break_point.condition.unseen_fields:
        fields = ", ".join(sorted(break_point.condition.unseen_fields))
        print_notice(f"{stream}: no message or state had {fields}: is it spelled right?")
