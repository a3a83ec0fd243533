"""A range folded again into a folder of its own: `seriatim replay … --to DIR`.

Next room: steps/replay.py folds; adapters/scratch.py is the folder; cli/diff.py compares it.
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
from seriatim.cli import say
from seriatim.cli.looking import lookback, offset_of, print_json, time_ms
from seriatim.core.errors import ConfigError
from seriatim.core.integrity import typed
from seriatim.core.offsets import OffsetRange, Partition

if TYPE_CHECKING:
    from collections.abc import Callable

    from seriatim.cli.looking import Lookback
    from seriatim.core.ledger import File
    from seriatim.core.machine import Runner
    from seriatim.steps.replay import Made, Replaying
    from seriatim.steps.task import Kit
    from seriatim.streams import StreamFile

FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")
NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|table")


def into(
    stream: str,
    to: Path,
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
    from seriatim.adapters import scratch
    from seriatim.adapters.consumer import KafkaReread
    from seriatim.cli.show import Progress
    from seriatim.steps.replay import Replaying

    folder = scratch.settled(to)
    scratch.refuse(folder)
    _refuse_meant(folder)
    with lookback(stream, json=json) as opened:
        file, same = with_machine(opened.file, machine)
        runner = _runner(opened, file, same=same)
        reread: Any = opened.tools.reread
        if isinstance(reread, KafkaReread):
            reread.headers = True
        tools, progress = replace(opened.tools, stream=file.stream, runner=runner, told=None), Progress(opened.name)
        kit = _kit(opened, file, runner, folder)
        replaying = Replaying(tools, opened.head, kit, fresh=fresh or not same, progress=progress)
        wanted = _ranges(opened, replaying, partition, topic, start, until)
        scratch.make(folder)
        try:
            made = list(replaying.run(wanted))
        except ConfigError:
            scratch.unmake(folder)
            raise
        finally:
            progress.close()
        values = _write(opened, file, runner, folder, made, machine=machine, fresh=fresh or not same)
        print_json(values) if json else _show(opened.name, folder, made)


def _refuse_meant(folder: Path) -> None:
    """Refuse what some stream's file names as its output, though nothing is there yet."""
    from seriatim import streams

    home = config.load().streams
    for name in streams.names(home):
        try:
            output = Path(streams.load(name, home).stream.output.path).resolve()
        except ConfigError:  # a stream file that is wrong has no output to protect
            continue
        if folder == output or output in folder.parents or folder in output.parents:
            raise ConfigError(f"--to {folder}: the output of stream {name} is {output}", next="give a folder elsewhere")


def with_machine(file: StreamFile, machine: str | None) -> tuple[StreamFile, bool]:
    """The stream with another machine, and whether it is the stream's own, in whichever version.

    A file's class is the stream's own if both names are: `fixed/orderbook.py:OrderBook` of `orderbook:OrderBook`.
    """
    if machine is None or machine == file.stream.machine:
        return file, True
    if match := FILE.fullmatch(machine):
        path = config.expanded(Path(match["path"]), f"--machine {machine}", "give the path of a Python file").absolute()
        named = f"replayed_{path.stem}"
        _import(path, named)
        own = f"{path.stem}:{match['name']}" == file.stream.machine
        return replace(file, stream=replace(file.stream, machine=f"{named}:{match['name']}")), own
    if not NAMED.fullmatch(machine) or (machine == "table" and file.stream.table is None):
        raise ConfigError(
            f"--machine {machine!r} is no machine",
            next="write module:Class, of a module beside the stream file, or path/to/file.py:Class",
        )
    return replace(file, stream=replace(file.stream, machine=machine)), False


def _import(path: Path, named: str) -> None:
    spec = importlib.util.spec_from_file_location(named, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--machine: there is no file {path}", next="give the path of a Python file and its class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[named] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--machine: {path.name} fails: {type(error).__name__}: {error}", next=f"fix {path}"
        ) from error


def _runner(opened: Lookback, file: StreamFile, *, same: bool) -> Runner:
    from seriatim import streams
    from seriatim.core.code import refuse_code

    runner = streams.runner(file)
    if same:
        ledger = opened.head.ledger
        refuse_code(ledger, ledger.machine, runner.state_version, runner.can_upgrade, runner.shape)
    return runner


def _kit(opened: Lookback, file: StreamFile, runner: Runner, folder: Path) -> Callable[[tuple[File, ...]], Kit]:
    """What tasks work with: everything is read from the stream, and written to the folder."""
    from seriatim import wiring
    from seriatim.adapters.memory import MemoryDigests
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.adapters.scratch import OverBase
    from seriatim.adapters.state import ParquetState
    from seriatim.steps.task import Kit

    stream, compression = file.stream, file.stream.output.compression
    explain = wiring.explain(file, wiring.kafka_client(config.load()))

    def kit(base: tuple[File, ...]) -> Kit:
        return Kit(
            runner=runner,
            tier=stream.tier,
            on_poison=stream.on_poison,
            limits=stream.limits,
            session_field=stream.session_field is not None,
            records=ParquetRecords(folder, runner.columns, compression, (), others=runner.others),
            state=OverBase(ParquetState(folder, stream.name, compression), opened.tools.state, base),
            explain=explain,
            digests=MemoryDigests,
            peak_memory_bytes=lambda: 0,
        )

    return kit


def _ranges(
    opened: Lookback,
    replaying: Replaying,
    partition: str | None,
    topic: str | None,
    start: str | None,
    until: str | None,
) -> dict[Partition, OffsetRange]:
    """What is folded again, by partition."""
    ledger, wanted = opened.head.ledger, None if partition is None else Partition.parse(partition)
    chosen = [p for p in ledger.known() if topic in (None, p.topic) and wanted in (None, p)]
    chosen = [p for p in chosen if not ledger.partitions[str(p)].retired]
    if not chosen:
        raise ConfigError(f"{opened.name}: it never read {partition or topic}", next=f"seriatim status {opened.name}")
    if len(chosen) > 1 and any(edge is not None and offset_of(edge) is not None for edge in (start, until)):
        raise ConfigError("an offset is of one partition", next="name it with --partition, or give times")
    found = {}
    for place in chosen:
        frontier = ledger.partitions[str(place)].frontier
        begin = replaying.earliest(place) if start is None else _edge(opened, place, start)
        end = frontier if until is None else _edge(opened, place, until)
        if begin < end:
            found[place] = OffsetRange(begin, end)
    if not found:
        raise ConfigError(f"{opened.name}: there is nothing in this range", next="choose --from before --until")
    return found


def _edge(opened: Lookback, place: Partition, text: str) -> int:
    if (offset := offset_of(text)) is not None:
        return offset
    found = opened.tools.log.offsets_for_time([place], time_ms(text)).get(place, -1)
    return opened.head.ledger.partitions[str(place)].frontier if found < 0 else found


def _write(
    opened: Lookback,
    file: StreamFile,
    runner: Runner,
    folder: Path,
    made: list[Made],
    *,
    machine: str | None,
    fresh: bool,
) -> dict[str, Any]:
    """The tables, and last what the folder is."""
    from seriatim.adapters import scratch
    from seriatim.adapters.clock import WallClock
    from seriatim.adapters.parquet import record_schema

    scratch.put_table(folder, "", record_schema(runner.columns), [one for part in made for one in part.records])
    for table, columns in runner.others.items():
        files = [one for part in made for one in part.others.get(table, [])]
        scratch.put_table(folder, table, record_schema(columns), files)
    values = {
        "replay": opened.name,
        "machine": machine or file.stream.machine,
        "tier": file.stream.tier,
        "product": __version__,
        "at_seconds": WallClock().now_seconds(),
        "sequence": opened.head.ledger.sequence,
        "fresh": fresh,
        "partitions": [_told(part) for part in made],
    }
    scratch.put_manifest(folder, values)
    return values


def _told(part: Made) -> dict[str, Any]:
    return {
        "topic": part.partition.topic,
        "topic_id": part.topic_id,
        "partition": part.partition.number,
        "asked": part.asked,
        "from": part.start,
        "until": part.until,
        "base": part.base,
        "messages": part.messages,
        "records": sum(file.rows for file in part.records),
        "headless": part.headless,
        "findings": part.findings,
        "halted": part.halted or None,
        "missing": part.missing,
    }


def _show(stream: str, folder: Path, made: list[Made]) -> None:
    from seriatim.cli import show

    rows = [_told(part) for part in made]
    show.table(["topic", "partition", "from", "until", "messages", "records", "headless", "halted"], rows)
    for part in made:
        if part.findings:
            told = ", ".join(f"{kind} {number}" for kind, number in part.findings.items())
            say(f"{part.partition}: {told}")
        if part.missing:
            say(
                f"{part.partition}: {part.missing} messages that were folded when this was committed are not in Kafka"
                " any more (compacted away, or deleted): these records are of the rest"
            )
    typer.echo(f"written to {folder}; nothing was committed. Compare: seriatim diff {stream} {typed(str(folder))}")
