"""HTML from templates: the only place that makes HTML, for pages, reports, mails and the demo.

Templates are in web/templates, styles and scripts in web/static. Jinja2 escapes everything that a
template prints, and a template that prints a name which it was not given fails. Texts that came from
outside may be long, so everything that is printed is also shortened, unless the template says
`|whole`.

Next: web/views.py says what the pages show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from msgspec import Struct

from seriatim import __version__
from seriatim.engine.findings import Concern, count_of, format_duration, runbook_row, shorten
from seriatim.ledger.model import Account
from seriatim.operations.report import PageTable, PartitionBar
from seriatim.operations.status import (
    PartitionStatus,
    StreamStatus,
    Tone,
    describe_hold,
    repair_values_of_concern,
    time_tone,
)
from seriatim.web.address import MOUNT, page_path

FOLDER = Path(__file__).parent
RUNBOOK_FILE = FOLDER.parent.parent / "docs" / "RUNBOOK.md"
PAGE_TEXT_MAX = 500
"""Characters of one text on a page, at most."""
PAGE_ROWS_MAX = 500
"""Rows of a table in a report, at most."""
CLOCK_SKEW_SECONDS = 60.0
"""How far two clocks may differ."""
STALE_SECONDS = 900.0
"""An older observation of Kafka is pointed out: nothing runs or watches the stream."""
URGENT_CONCERNS = ("halted", "circuit", "time left", "run")
STRIP_CELL_WIDTH = 10
STRIP_HEIGHT = 16
STRIP_CELLS_MIN = 8
"""A strip is at least so many cells wide: one partition should not fill it."""
STRIP_CELLS_MAX = 400
BAR_HEIGHT = 14
BAR_WIDTH = 1000
REPORT_BAR_WIDTH = 420
SEGMENT_WIDTH_MIN = 2.0
"""A segment is at least so wide, to be visible at all."""
HALT_WIDTH_MIN = 12.0


def render_template(name: str, **values: Any) -> str:
    """The text of a template with these values."""
    return _environment().get_template(name).render(values)


def static_file(name: str) -> bytes:
    """A style sheet, a script or an icon."""
    return (FOLDER / "static" / name).read_bytes()


def runbook_text() -> str:
    """The runbook of the project; empty if it is not on this host."""
    try:
        return RUNBOOK_FILE.read_text()
    except OSError:
        return ""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([FOLDER / "templates", FOLDER / "static"]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shorten_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        page_path=page_path,
        rows_max=PAGE_ROWS_MAX,
        urgent_concerns=URGENT_CONCERNS,
        version=__version__,
    )
    environment.filters.update(
        age=render_age,
        column_styles=_column_styles,
        count=count_of,
        airflow_path=_airflow_path,
        facts=_stream_facts,
        concern_form_values=_concern_form_values,
        form_values=_form_values,
        hold=describe_hold,
        kafka_note=_kafka_note,
        lines=_shorten_lines,
        linked=_with_links,
        log_bar=log_bar,
        moment=render_moment,
        number=render_number,
        offset=_render_offset,
        report_bar=report_bar,
        row_id=runbook_row,
        snapshot_distance=_snapshot_distance,
        strip=partition_strip,
        time_left=_time_left_of,
        time_tone=_time_tone_of,
        took=_render_took,
        whole=Whole,
    )
    return environment


class Whole(str):
    """A text that is printed in full. It is escaped like any other."""

    __slots__ = ()


def _shorten_printed(value: Any) -> Any:
    """What a template prints instead of a value: a short text; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, Markup | Whole):
        return value
    return shorten(str(value), PAGE_TEXT_MAX)


def _shorten_lines(text: str, lines_max: int) -> Whole:
    """The first lines of a text, each of them shortened by itself."""
    lines = text.splitlines()[:lines_max]
    return Whole("\n".join(shorten(line, PAGE_TEXT_MAX) for line in lines))


def _with_links(text: str, base_url: str) -> Markup:
    """The whole text, in which addresses below `base_url` are links. Texts that came from messages
    cannot make a link to anywhere else. Without `base_url` there are no links.
    """
    if not base_url:
        return escape(text)
    address = re.compile(rf"{re.escape(base_url.rstrip('/'))}(?:/[\w/%.?=&#-]*\w|(?![\w.:@-]))")
    html = Markup()
    end = 0
    for match in address.finditer(text):
        html += escape(text[end : match.start()])
        html += Markup('<a href="{0}">{0}</a>').format(match.group())
        end = match.end()
    return html + escape(text[end:])


def _column_styles(table: PageTable) -> list[str]:
    """The CSS class of each column: columns of numbers are aligned as such."""
    styles = []
    for i in range(len(table.columns)):
        has_numbers_only = all(isinstance(row[i], int | float) for row in table.rows)
        styles.append("number" if has_numbers_only else "")
    return styles


def render_number(value: float | None) -> str:
    """A number with separators; a dash for one that is not known."""
    if value is None:
        return "–"
    return f"{round(value):,}"


def _render_offset(offset: int | None) -> str:
    """An offset, without separators, since people paste it into commands."""
    if offset is None:
        return "–"
    return str(offset)


def _render_took(seconds: float) -> str:
    if seconds <= 0:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return format_duration(seconds)


def render_moment(seconds: float) -> str:
    """A date and time for people; a dash for one that is not known."""
    if seconds <= 0:
        return "–"
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%m-%d %H:%M:%S} UTC"


def render_age(then_seconds: float | None, now_seconds: float) -> str:  # noqa: PLR0911  # one per unit
    """How long ago something was, in words for people."""
    if not then_seconds:
        return "never"
    if is_in_future(then_seconds, now_seconds):
        return "the future: a clock is wrong"
    age_seconds = now_seconds - then_seconds
    if age_seconds < 10:
        return "just now"
    if age_seconds < 90:
        return f"{age_seconds:.0f} s ago"
    if age_seconds < 5400:
        return f"{age_seconds / 60:.0f} min ago"
    if age_seconds < 172_800:
        return f"{age_seconds / 3600:.0f} h ago"
    return f"{age_seconds / 86_400:.0f} days ago"


def is_in_future(then_seconds: float | None, now_seconds: float) -> bool:
    """Whether a time lies later than now. Then a clock is wrong, on this host or on another."""
    return (then_seconds or 0.0) > now_seconds + CLOCK_SKEW_SECONDS


def render_time_left(seconds: int | None) -> str:
    """The time that is left; a dash if there is no limit."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "over"
    return format_duration(seconds)


def _time_left_of(partition: PartitionStatus | None) -> str:
    return render_time_left(None if partition is None else partition.time_left_seconds)


def _time_tone_of(partition: PartitionStatus | None) -> Tone:
    return "" if partition is None else time_tone(partition)


def _stream_facts(status: StreamStatus) -> str:
    """What a stream is, in a line below its name."""
    if status.trouble and not status.partitions:
        # Nothing is known of a stream whose file cannot be read.
        return ""
    if not status.partitions:
        # Only a run writes down which topics there are, and none has found one.
        return f"tier {status.tier} · waiting for topics, or for its first run"
    topics = len({partition.topic for partition in status.partitions})
    topic_count = count_of(topics, "topic")
    partition_count = count_of(len(status.partitions), "partition")
    return f"tier {status.tier} · {topic_count}, {partition_count}"


def _airflow_path(base: str) -> str:
    """The path of Airflow, below which the app is mounted."""
    return base.removesuffix(MOUNT)


def _form_values(stream: str, values: Mapping[str, str | bool]) -> str:
    """What to put into the form of the repair DAG, as JSON."""
    return msgspec.json.encode({"stream": stream, **values}).decode()


def _concern_form_values(concern: Concern, status: StreamStatus) -> str:
    """What to put into the form of the repair DAG for a concern; empty if a repair does not help."""
    values = repair_values_of_concern(concern, status.partitions)
    return _form_values(status.stream, values) if values else ""


def _kafka_note(status: StreamStatus, now_seconds: float) -> str:
    """A note if the last look at Kafka is old, or if there is none: the lag is old as well then."""
    at_seconds = status.at_seconds
    if at_seconds is None:
        return "Kafka was not asked yet" if status.partitions else ""
    is_stale = now_seconds - at_seconds > STALE_SECONDS
    if not is_stale and not is_in_future(at_seconds, now_seconds):
        return ""
    return f"Kafka as of {render_age(at_seconds, now_seconds)}"


def _snapshot_distance(account: Account | None) -> str:
    """The longest distance between two snapshots, in messages and in time."""
    if account is None or not account.distance_messages:
        return "–"
    duration = format_duration(account.distance_ms / 1000)
    return f"{account.distance_messages:,} · {duration}"


class Strip(Struct, frozen=True):
    """All partitions of a stream in a line, as a picture."""

    description: str
    width: int
    height: int
    paths: list[tuple[str, str]]
    """For each tone a path through its cells."""


def partition_strip(status: StreamStatus) -> Strip:
    """The partitions of a stream in a line, each a cell in its colour."""
    partitions = status.partitions[:STRIP_CELLS_MAX]
    path_by_tone: dict[str, str] = {}
    cell_width = STRIP_CELL_WIDTH - 1
    for i, partition in enumerate(partitions):
        tone = partition.tone or "none"
        rectangle = f"M{i * STRIP_CELL_WIDTH} 0h{cell_width}v{STRIP_HEIGHT}h-{cell_width}z"
        path_by_tone[tone] = path_by_tone.get(tone, "") + rectangle
    halted = sum(partition.halt is not None for partition in partitions)
    return Strip(
        description=f"{count_of(len(partitions), 'partition')}, {halted} halted",
        width=max(len(partitions), STRIP_CELLS_MIN) * STRIP_CELL_WIDTH,
        height=STRIP_HEIGHT,
        paths=sorted(path_by_tone.items()),
    )


class BarSegment(Struct, frozen=True):
    """A coloured part of a bar."""

    css: str
    x: str
    width: str


class LogBar(Struct, frozen=True):
    """A partition's log as a picture, to scale."""

    description: str
    segments: list[BarSegment]
    width: int = BAR_WIDTH
    height: int = BAR_HEIGHT
    fixed_size: bool = False


def log_bar(partition: PartitionStatus) -> LogBar:
    """A partition's log from start to end: what is folded, what waits, where it halted."""
    start = partition.log_start or 0
    frontier = partition.frontier or 0
    log_end = start if partition.log_end is None else partition.log_end
    end = max(frontier, log_end)
    folded_end = max(start, min(frontier, end))
    description = f"{partition.partition_name}: log {start} to {end}, folded up to {frontier}"
    parts = [("done", start, folded_end), ("wait", max(frontier, start), end)]
    halt = partition.halt
    if halt is not None and halt.offset >= 0:
        description += f", halted at {halt.offset}"
        parts.append(("halt", halt.offset, halt.offset + 1))
    return LogBar(description, _bar_segments(parts, start, end, BAR_WIDTH))


def report_bar(bar: PartitionBar) -> LogBar:
    """The same for a report, which also shows what is new in it."""
    frontier = max(bar.frontier, bar.start)
    before = min(max(bar.before, bar.start), bar.frontier)
    description = f"{bar.label}: folded {bar.start} to {bar.frontier}, log end {bar.end}"
    parts = [("done", bar.start, before), ("new", before, frontier), ("wait", frontier, bar.end)]
    if bar.halt >= bar.start:
        parts.append(("halt", bar.halt, bar.halt + 1))
    segments = _bar_segments(parts, bar.start, bar.end, REPORT_BAR_WIDTH)
    return LogBar(description, segments, REPORT_BAR_WIDTH, fixed_size=True)


def _bar_segments(
    parts: Sequence[tuple[str, int, int]], log_start: int, log_end: int, bar_width: int
) -> list[BarSegment]:
    """Ranges of offsets of a log as segments of a bar. Empty ranges have none."""
    scale = bar_width / max(log_end - log_start, 1)
    segments = []
    for css, start, end in parts:
        if end <= start:
            continue
        width_min = HALT_WIDTH_MIN if css == "halt" else SEGMENT_WIDTH_MIN
        width = max((end - start) * scale, width_min)
        # A segment that was widened at the end of the bar must not stick out of it.
        x = max(0.0, min((start - log_start) * scale, bar_width - width))
        segments.append(BarSegment(css, f"{x:.1f}", f"{width:.1f}"))
    return segments
