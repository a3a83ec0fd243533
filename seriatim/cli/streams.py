"""`seriatim streams`: the stream files that were found, with the state of each in one line.

Next: cli/new.py makes a stream file; cli/status.py shows one stream in full.
"""

from __future__ import annotations

import time

from msgspec import Struct
from msgspec.structs import asdict

from seriatim import config, stream_files
from seriatim.cli import CommandResult, options
from seriatim.cli.options import Json
from seriatim.cli.output import render_table
from seriatim.engine.findings import count_of
from seriatim.errors import ConfigError, SeriatimError
from seriatim.operations.status import StreamStatus, render_verdict
from seriatim.stream_files import StreamFile
from seriatim.web.read import PageReader

COLUMNS = ["stream", "state", "topics", "machine", "text"]


class StreamSummary(Struct, frozen=True, kw_only=True):
    """A stream file at a glance."""

    stream: str
    file: str
    state: str
    """broken: the stream file or its machine cannot be used. Otherwise the verdict of `status`."""
    topics: str | None = None
    machine: str | None = None
    output: str | None = None
    sequence: int | None = None
    """The newest ledger entry; None if it was never run."""
    text: str = ""
    """For people: what was done so far, or why the stream is broken."""
    next: str = ""
    """For people: how a broken stream is fixed."""


class StreamList(CommandResult):
    """The stream files of the folder."""

    folder: str
    streams: list[StreamSummary]

    def render(self) -> str:
        """A table."""
        rows = [asdict(stream) | {"state": render_verdict(stream.state)} for stream in self.streams]
        return f"{count_of(len(rows), 'stream file')} in {self.folder}\n" + render_table(
            rows, COLUMNS
        )

    def error(self) -> SeriatimError | None:
        """Broken stream files. They do not hide the others."""
        broken = [stream for stream in self.streams if stream.state == "broken"]
        if not broken:
            return None
        names = ", ".join(stream.stream for stream in broken)
        advice = "\n".join(f"{stream.stream}: {stream.next}" for stream in broken)
        return ConfigError(f"broken: {names}", next=advice)


def streams(_json: Json = False) -> StreamList:
    """List the stream files with the state of each in one line.

    Kafka is not asked: the state is that of the ledger. A stream file that is wrong, or whose machine
    cannot be loaded, is shown as broken, with the reason; then the exit code is 2.

    Example: seriatim streams --json
    """
    settings = config.load_settings()
    names = options.stream_names(None)
    reader = PageReader(settings.streams, time.time)
    summaries = []
    for name in names:
        path = str(settings.streams / f"{name}.toml")
        try:
            file = stream_files.load_stream(name, settings.streams)
            stream_files.load_runner(file)
        except ConfigError as error:
            summaries.append(
                StreamSummary(
                    stream=name, file=path, state="broken", text=error.message, next=error.next
                )
            )
        else:
            summaries.append(_summarize(file, path, reader.stream_status(name)))
    return StreamList(str(settings.streams), summaries)


def _summarize(file: StreamFile, path: str, status: StreamStatus) -> StreamSummary:
    stream = file.stream
    return StreamSummary(
        stream=stream.name,
        file=path,
        state=status.verdict,
        topics=stream.topics,
        machine=stream.machine,
        output=stream.output.path,
        sequence=None if status.sequence < 0 else status.sequence,
        text=status.trouble or _describe(status),
    )


def _describe(status: StreamStatus) -> str:
    """What was done so far, in a few words."""
    if status.sequence < 0:
        return f"never run: seriatim run {status.stream}"
    words = [f"entry {status.sequence}", count_of(len(status.partitions), "partition")]
    waiting = [partition for partition in status.partitions if partition.halt or partition.hold]
    if waiting:
        words.append(f"{count_of(len(waiting), 'partition')} waiting")
    if status.quarantined_count:
        words.append(f"{count_of(status.quarantined_count, 'session')} in quarantine")
    if status.circuit == "open":
        words.append("circuit open")
    return ", ".join(words)
