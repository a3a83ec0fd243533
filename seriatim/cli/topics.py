"""`seriatim topics`: what Kafka has, and which streams read it.

Next: kafka/log.py asks Kafka; cli/streams.py lists the stream files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct

from seriatim import config, context, stream_files
from seriatim.cli import CommandResult, JsonObject
from seriatim.cli.options import Json, require_regex
from seriatim.cli.output import render_table
from seriatim.engine.findings import format_iso_moment
from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetainedLog

ALL_TOPICS = ".*"


class TopicSummary(Struct, frozen=True, kw_only=True):
    """A topic at a glance."""

    topic: str
    partitions: int
    messages: int
    """Offsets between log start and log end. In transactional and compacted topics some have no
    message.
    """
    first: str | None
    """The time of the message at the log start; None: there is none."""
    last: str | None
    """The latest time of a message."""
    streams: list[str]
    """The streams whose files match this topic."""


class TopicList(CommandResult):
    """The topics that were found."""

    topics: list[TopicSummary]

    def render(self) -> str:
        """A table."""
        rows = []
        for topic in self.topics:
            row: JsonObject = msgspec.to_builtins(topic)
            row["streams"] = ", ".join(topic.streams)
            rows.append(row)
        if not rows:
            return "Kafka has no topic that matches"
        return render_table(rows)


def topics(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[REGEX]", help="Topics whose whole name matches this. Default: all."
        ),
    ] = ALL_TOPICS,
    _json: Json = False,
) -> TopicList:
    """List topics with partitions, messages, first and last time.

    It also says which streams read a topic, by their stream files. Kafka's own topics are left out.

    Example: seriatim topics

    Example: seriatim topics 'orders-.*' --json
    """
    require_regex(pattern, "REGEX")
    settings = config.load_settings()
    log = context.log(None, settings)
    bounds = log.bounds(pattern)
    starts = {
        partition: partition_bounds.log_start for partition, partition_bounds in bounds.items()
    }
    retained_logs = log.read_retention(bounds, starts)
    files, _ = stream_files.load_all_streams(settings.streams)
    patterns = {file.stream.name: file.stream.topics for file in files}
    return TopicList(summarize_topics(retained_logs, patterns))


def summarize_topics(
    retained_logs: Mapping[Partition, RetainedLog], patterns: Mapping[str, str]
) -> list[TopicSummary]:
    """The topics of these partitions. `patterns` has the topics that each stream reads, as a regular
    expression.
    """
    logs_by_topic: dict[str, list[RetainedLog]] = {}
    for partition, retained_log in sorted(retained_logs.items()):
        logs_by_topic.setdefault(partition.topic, []).append(retained_log)
    summaries = []
    for topic, logs in logs_by_topic.items():
        readers = [name for name, pattern in patterns.items() if re.fullmatch(pattern, topic)]
        # Kafka knows no count of messages. Offsets that are missing count as messages here.
        messages = sum(log.log_end - log.log_start for log in logs)
        oldest = _render_time(min, (log.oldest_ms for log in logs))
        newest = _render_time(max, (log.newest_ms for log in logs))
        summary = TopicSummary(
            topic=topic,
            partitions=len(logs),
            messages=messages,
            first=oldest,
            last=newest,
            streams=readers,
        )
        summaries.append(summary)
    return summaries


def _render_time(choose: Any, times_ms: Iterable[int | None]) -> str | None:
    """The smallest or largest of some times, as people write it; None if there is none."""
    known_ms = [time_ms for time_ms in times_ms if time_ms is not None]
    if not known_ms:
        return None
    return format_iso_moment(choose(known_ms) / 1000)
