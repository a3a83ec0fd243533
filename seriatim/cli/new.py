"""`seriatim new`: the files of a new stream, from a sample of its messages if there are some.

Next: operations/sample.py guesses; operations/scaffold.py has the texts.
"""

from __future__ import annotations

import keyword
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from seriatim import config, context, stream_files, testing
from seriatim.cli import CommandResult, print_notice
from seriatim.cli.options import Json, require_regex
from seriatim.config import Settings
from seriatim.engine.findings import count_of
from seriatim.engine.offsets import TOPIC_NAME, OffsetRange
from seriatim.errors import ConfigError, SeriatimError
from seriatim.kafka import past_messages
from seriatim.operations import scaffold as scaffolding
from seriatim.operations.prove.suite import STOCK_SUITES
from seriatim.operations.sample import (
    SAMPLE_MESSAGES_MAX,
    Guess,
    SampledMessage,
    StreamSample,
    study_sample,
)
from seriatim.operations.scaffold import EXAMPLE_SAMPLE, Scaffold
from seriatim.stream import RESERVED_NAMES, STREAM_NAME

KAFKA_TIMEOUT_SECONDS = 5.0


class NewStream(CommandResult):
    """The files that were written, and what was guessed."""

    stream: str
    files: list[str]
    topics: str
    sampled: int
    """Messages that were looked at. 0: the fields are an example."""
    guesses: list[Guess]
    left_out: dict[str, str]
    """Fields of the messages that have no column, with the reason."""
    next: list[str]
    """The commands to type next."""

    def render(self) -> str:
        """Files, guesses, and what to type next."""
        lines = [f"wrote {path}" for path in self.files]
        if self.guesses:
            lines.append(
                f"guessed from {count_of(self.sampled, 'message')} of {self.topics}; check each:"
            )
        for guess in self.guesses:
            lines.append(f"  {guess.about:<9} {guess.value}  ({guess.because})")
        for name, reason in self.left_out.items():
            lines.append(f"  left out  {name}  ({reason})")
        if not self.sampled:
            lines.append("the fields are an example: there were no messages to look at")
        lines.append("next:")
        lines += [f"  {command}" for command in self.next]
        return "\n".join(lines)


def new(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The name of the new stream.")],
    topic: Annotated[
        str,
        typer.Option(
            metavar="REGEX",
            help="Its topics: a regular expression for whole names. Default: the stream's name.",
        ),
    ] = "",
    sample: Annotated[
        bool, typer.Option(help="Look at messages of the topics that are there already.")
    ] = True,
    _json: Json = False,
) -> NewStream:
    """Make a new stream: stream file, machine, test and expectations.

    The files are written to the folder of stream files, and to expectations/ beside it. No file is
    overwritten. Up to 1,000 messages of the topics are looked at, from the oldest on. Columns,
    types, key, session and sequence are guessed from them, and said as guesses. Messages of the
    table machine (snapshot, insert, update, delete) get a stream file for it; all others a machine
    of their own. The test passes as it is, and holds up to three of these messages.

    Example: seriatim new orders --topic 'orders-.*'
    """
    _refuse_name(name)
    settings = config.load_settings()
    topics = topic or name
    require_regex(topics, "--topic")
    scaffold = Scaffold(
        stream=name,
        module=_module_name(name),
        topics=topics,
        sample=_sample_topics(topics, settings) if sample else EXAMPLE_SAMPLE,
    )
    _trim_examples(scaffold.sample)
    texts = _render_files(scaffold, settings)
    _write_files(texts)
    _refuse_broken_scaffold(name, settings, list(texts))
    test_path = _test_path(scaffold, settings)
    commands = [f"pytest {_shown_path(test_path)}", f"seriatim run {name}"]
    if not scaffold.sample.messages and TOPIC_NAME.fullmatch(topics):
        # Without its topic a run has nothing to do.
        commands.insert(1, f"seriatim produce FILE --topic {topics} --key id --create")
    return NewStream(
        stream=name,
        files=[_shown_path(path) for path in texts],
        topics=topics,
        sampled=scaffold.sample.messages,
        guesses=scaffold.sample.guesses,
        left_out=scaffold.sample.left_out,
        next=commands,
    )


def _refuse_name(name: str) -> None:
    if not STREAM_NAME.fullmatch(name) or name in (*RESERVED_NAMES, *STOCK_SUITES):
        raise ConfigError(
            f"{name!r} cannot name a new stream",
            allowed="a letter or a digit, then letters, digits, - and _, together at most 64;"
            f" not {', '.join((*RESERVED_NAMES, *STOCK_SUITES))}",
            next="choose another name",
        )


def _module_name(name: str) -> str:
    """The name of the machine's module. One that Python would find elsewhere is not taken."""
    module = name.replace("-", "_")
    is_taken = module in sys.stdlib_module_names or keyword.iskeyword(module)
    if module[0].isdigit() or is_taken or find_spec(module) is not None:
        return f"stream_{module}"
    return module


def _sample_topics(topics: str, settings: Settings) -> StreamSample:
    """What a sample of the topics tells. Without messages, or without Kafka, it is an example."""
    try:
        messages = read_sample(topics, settings)
    except SeriatimError as error:
        print_notice(f"Kafka was not looked at: {error.message}\n  next: {error.next}")
        return EXAMPLE_SAMPLE
    if not messages:
        print_notice(f"there are no messages in topics that match {topics!r}")
        return EXAMPLE_SAMPLE
    sample = study_sample(messages)
    if sample.unreadable == len(messages):
        raise ConfigError(
            f"none of {count_of(len(messages), 'message')} in topics that match {topics!r} is a JSON object",
            next="write a decoder (docs/STREAMS.md, Your own message format);"
            " --no-sample makes the files all the same",
        )
    if sample.unreadable:
        print_notice(
            f"not JSON objects: {sample.unreadable} of {count_of(len(messages), 'message')}"
        )
    return sample


def read_sample(topics: str, settings: Settings) -> list[SampledMessage]:
    """The oldest messages of the topics, about equally many of each partition."""
    log = context.log(None, settings, timeout_seconds=KAFKA_TIMEOUT_SECONDS)
    filled = {
        partition: bounds
        for partition, bounds in sorted(log.bounds(topics).items())
        if bounds.log_end > bounds.log_start
    }
    messages: list[SampledMessage] = []
    if not filled:
        return messages
    share = max(1, SAMPLE_MESSAGES_MAX // len(filled))
    reader = past_messages.KafkaPastMessageReader(context.kafka_client(settings), "read_committed")
    try:
        for partition, bounds in filled.items():
            if len(messages) >= SAMPLE_MESSAGES_MAX:
                break
            end = min(bounds.log_end, bounds.log_start + share)
            for batch in reader.read(partition, OffsetRange(bounds.log_start, end)):
                for key, value in zip(batch.keys, batch.values, strict=True):
                    messages.append(SampledMessage(partition.topic, partition.number, key, value))
    finally:
        reader.close()
    return messages


def _trim_examples(sample: StreamSample) -> None:
    """Keep only those messages for the test of a table that the table machine takes: the topic may
    have faults.
    """
    while sample.is_table and len(sample.examples) > 1:
        columns = {column.name: column.type_name for column in sample.fields}
        folded = testing.fold_table(
            sample.examples, key=sample.key, columns=columns, sequence=sample.sequence
        )
        if not folded.findings:
            return
        sample.examples.pop()


def _render_files(scaffold: Scaffold, settings: Settings) -> dict[Path, str]:
    """The files of the stream. The stream file comes last: only then there is a stream."""
    streams = settings.streams
    expectations = streams.parent / "expectations" / f"{scaffold.stream}.json"
    test_path = _test_path(scaffold, settings)
    texts = {expectations: scaffolding.render_expectations(scaffold)}
    if not scaffold.sample.is_table:
        texts[streams / f"{scaffold.module}.py"] = scaffolding.render_machine(scaffold)
    texts[test_path] = scaffolding.render_test(scaffold, _shown_path(test_path))
    texts[streams / f"{scaffold.stream}.toml"] = scaffolding.render_stream_file(scaffold)
    return texts


def _test_path(scaffold: Scaffold, settings: Settings) -> Path:
    return settings.streams / f"test_{scaffold.module}.py"


def _shown_path(path: Path) -> str:
    """A path as a person would type it."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _write_files(texts: dict[Path, str]) -> None:
    """Write all files, or none. A file that exists is refused."""
    existing = [_shown_path(path) for path in texts if path.exists()]
    if existing:
        raise ConfigError(
            f"{', '.join(existing)}: there already; nothing was written",
            next="choose another name, or remove the files first",
        )
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # `x` refuses a file that somebody else made meanwhile.
            with path.open("x", encoding="utf-8") as stream:
                written.append(path)
                stream.write(text)
    except OSError as error:
        _remove_files(written)
        raise ConfigError(
            f"{error.filename or path}: {error.strerror}; nothing was written",
            next="give this user the right to write there, or set SERIATIM_STREAMS",
        ) from None


def _refuse_broken_scaffold(name: str, settings: Settings, paths: list[Path]) -> None:
    """Load the stream as a run would. One that cannot be loaded is taken back."""
    try:
        stream_files.load_runner(stream_files.load_stream(name, settings.streams))
    except SeriatimError:
        _remove_files(paths)
        raise


def _remove_files(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
