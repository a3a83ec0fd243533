"""The page of all streams, those that need a person first. Pure: values in, HTML out.

Next: web/stream.py shows one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.operations.report_page import safe_text
from seriatim.operations.stream_status import StreamStatus, Tone, time_tone, urgent_first
from seriatim.web.address import page_path
from seriatim.web.draw import (
    STALE_SECONDS,
    card,
    cell,
    chip,
    concern_box,
    element,
    is_in_future,
    link,
    number_cell,
    page_shell,
    partition_strip,
    render_age,
    render_number,
    render_time_left,
    table,
    text_element,
)

COLUMNS = [
    ("stream", ""),
    ("verdict", ""),
    ("partitions", ""),
    ("lag", "number"),
    ("time left", "number"),
    ("last run", "number"),
    ("messages/s", "number"),
    ("quarantined", "number"),
    ("open gaps", "number"),
    ("circuit", ""),
]
CONCERNS_SHOWN = 2
"""Concerns of a stream that its row shows."""
PARTITIONS_DRAWN = 400


def render_streams_page(
    base: str, stream_statuses: Sequence[StreamStatus], now_seconds: float
) -> str:
    """The page of all streams that the visitor may see."""
    if not stream_statuses:
        text = "There is no stream that you may see. A file in streams/ makes one."
        return page_shell(base, "Streams", (), "", [text_element("p", text, css="soft")])
    rows = [stream_row(base, status, now_seconds) for status in urgent_first(stream_statuses)]
    body = [streams_cards(stream_statuses), table(COLUMNS, rows, stack=True)]
    subtitle = _describe_kafka_ages(stream_statuses, now_seconds)
    return page_shell(base, "Streams", (), subtitle, body)


def _describe_kafka_ages(stream_statuses: Sequence[StreamStatus], now_seconds: float) -> str:
    """When Kafka was last asked, and also the oldest time if that is much older."""
    times = [status.as_of_seconds for status in stream_statuses if status.as_of_seconds]
    if not times:
        return "Kafka was not asked yet"
    oldest = min(times)
    newest = max(times)
    text = f"Kafka as of {render_age(newest, now_seconds)}"
    if newest - oldest > STALE_SECONDS:
        text += f", the oldest look {render_age(oldest, now_seconds)}"
    return text


def streams_cards(stream_statuses: Sequence[StreamStatus]) -> str:
    """All streams in a few numbers."""
    tones = [status.tone for status in stream_statuses]
    bad = tones.count("bad")
    warn = tones.count("warn")
    partitions = 0
    halted = 0
    quarantined = 0
    lag = 0
    for status in stream_statuses:
        partitions += len(status.partitions)
        halted += sum(partition.halt is not None for partition in status.partitions)
        # -1 stands for a number that is not known.
        quarantined += max(status.quarantined, 0)
        lag += status.lag or 0
    return element(
        "div",
        card("streams", f"{len(stream_statuses):,}"),
        card("need a person", f"{bad:,}", _tone_of_count(bad)),
        card("to look at", f"{warn:,}", "warn" if warn else ""),
        card("partitions", f"{partitions:,}"),
        card("halted partitions", f"{halted:,}", _tone_of_count(halted)),
        card("sessions in quarantine", f"{quarantined:,}", _tone_of_count(quarantined)),
        card("messages that wait", f"{lag:,}"),
        css="cards",
    )


def _tone_of_count(count: int) -> Tone:
    """The tone of a number that should be 0."""
    return "bad" if count else "good"


def stream_row(base: str, stream_status: StreamStatus, now_seconds: float) -> str:
    """A stream in a row, and below it what needs a person."""
    rate = None if stream_status.rate is None else round(stream_status.rate)
    circuit = stream_status.circuit
    circuit_html = text_element("span", circuit, css="bad" if circuit == "open" else "")
    strip = ""
    if stream_status.partitions:
        strip = partition_strip(stream_status.partitions[:PARTITIONS_DRAWN])
    cells = [
        cell(_name_html(base, stream_status, now_seconds), css="name"),
        cell(chip(stream_status.verdict, stream_status.tone), "verdict"),
        cell(strip, "partitions"),
        number_cell(render_number(stream_status.lag), "lag"),
        cell(_time_left_html(stream_status), "time left", "number"),
        number_cell(render_age(stream_status.last_run_seconds, now_seconds), "last run"),
        number_cell(render_number(rate), "messages/s"),
        cell(_render_count(stream_status.quarantined), "quarantined", "number"),
        cell(_render_count(stream_status.gaps_open), "open gaps", "number"),
        cell(circuit_html, "circuit"),
    ]
    concerns_row = _concerns_row(stream_status)
    return element("tr", *cells, css="has-more" if concerns_row else "") + concerns_row


def _name_html(base: str, stream_status: StreamStatus, now_seconds: float) -> str:
    """The stream's name as a link, its facts, and a note if the last look at Kafka is old."""
    partitions = len(stream_status.partitions)
    topics = len({partition.topic for partition in stream_status.partitions})
    topic_word = "topic" if topics == 1 else "topics"
    facts = f"tier {stream_status.tier} · {topics} {topic_word}, {partitions} partitions"
    name = link(base, page_path("stream", stream_status.stream), stream_status.stream)
    return name + text_element("small", facts) + _kafka_age_note(stream_status, now_seconds)


def _time_left_html(stream_status: StreamStatus) -> str:
    """The time that is left for the partition that has the least."""
    nearest = stream_status.nearest
    if nearest is None:
        return text_element("span", render_time_left(None))
    return text_element("span", render_time_left(nearest.time_left_seconds), css=time_tone(nearest))


def _kafka_age_note(stream_status: StreamStatus, now_seconds: float) -> str:
    """A note if the last look at Kafka is old, or if there is none: the lag is old as well then."""
    at_seconds = stream_status.as_of_seconds
    if at_seconds is None:
        if not stream_status.partitions:
            return ""
        return text_element("small", "Kafka was not asked yet", css="warn")
    is_stale = now_seconds - at_seconds > STALE_SECONDS
    if not is_stale and not is_in_future(at_seconds, now_seconds):
        return ""
    return text_element("small", f"Kafka as of {render_age(at_seconds, now_seconds)}", css="warn")


def _render_count(count: int | None) -> str:
    """A number that should be 0; a dash for one that is not known."""
    if count is None or count < 0:
        return safe_text("–")
    return text_element("span", f"{count:,}", css="bad" if count else "soft")


def _concerns_row(stream_status: StreamStatus) -> str:
    """A row with the first concerns of a stream; "" if it has none."""
    boxes = []
    if stream_status.trouble:
        headline = text_element("b", "cannot be shown", css="bad")
        trouble = safe_text(stream_status.trouble)
        boxes.append(element("div", headline, trouble, css="need bad-edge"))
    else:
        boxes += [concern_box(concern) for concern in stream_status.concerns[:CONCERNS_SHOWN]]
        not_shown = len(stream_status.concerns) - CONCERNS_SHOWN
        if not_shown > 0:
            text = f"… and {not_shown} more on the stream's page"
            boxes.append(text_element("div", text, css="soft small"))
    if not boxes:
        return ""
    return element("tr", element("td", *boxes, colspan=str(len(COLUMNS))), css="more")
