"""Streams: all of them at a glance, what needs a person first. Pure: values in, HTML out.

Next room: stream.py shows one of them.
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
    page_shell,
    partition_strip,
    render_age,
    table,
)
from seriatim.web.draw import render_time_left as left_said

COLUMNS = [
    *(
        ("stream", ""),
        ("verdict", ""),
        ("partitions", ""),
        ("lag", "number"),
        ("time left", "number"),
    ),
    *(
        ("last run", "number"),
        ("messages/s", "number"),
        ("quarantined", "number"),
        ("open gaps", "number"),
    ),
    ("circuit", ""),
]
CONCERNS_SHOWN = 2
PARTITIONS_DRAWN = 400


def render_streams_page(
    base: str, stream_statuses: Sequence[StreamStatus], now_seconds: float
) -> str:
    """All streams that this person may see."""
    if not stream_statuses:
        body = [
            element(
                "p",
                safe_text("There is no stream that you may see. A file in streams/ makes one."),
                css="soft",
            )
        ]
        return page_shell(base, "Streams", (), "", body)
    body = [
        streams_cards(stream_statuses),
        table(
            COLUMNS,
            (stream_row(base, one, now_seconds) for one in urgent_first(stream_statuses)),
            stack=True,
        ),
    ]
    oldest = min((one.as_of_seconds for one in stream_statuses if one.as_of_seconds), default=None)
    newest = max((one.as_of_seconds for one in stream_statuses if one.as_of_seconds), default=None)
    when = f"Kafka as of {render_age(newest, now_seconds)}" if newest else "Kafka was not asked yet"
    if oldest and newest and newest - oldest > STALE_SECONDS:
        when += f", the oldest look {render_age(oldest, now_seconds)}"
    return page_shell(base, "Streams", (), when, body)


def streams_cards(stream_statuses: Sequence[StreamStatus]) -> str:
    """All streams in a few numbers."""
    bad, warn = (sum(one.tone == tone for one in stream_statuses) for tone in ("bad", "warn"))
    places = [place for one in stream_statuses for place in one.partitions]
    halted = sum(place.halt is not None for place in places)
    quarantined = sum(max(one.quarantined, 0) for one in stream_statuses)
    return element(
        "div",
        card("streams", f"{len(stream_statuses):,}"),
        card("need a person", f"{bad:,}", "bad" if bad else "good"),
        card("to look at", f"{warn:,}", "warn" if warn else ""),
        card("partitions", f"{len(places):,}"),
        card("halted partitions", f"{halted:,}", "bad" if halted else "good"),
        card("sessions in quarantine", f"{quarantined:,}", "bad" if quarantined else "good"),
        card("messages that wait", f"{sum(one.lag or 0 for one in stream_statuses):,}"),
        css="cards",
    )


def stream_row(base: str, stream_status: StreamStatus, now_seconds: float) -> str:
    """A stream in a line, and below it what needs a person."""
    nearest, circuit = stream_status.nearest, stream_status.circuit
    left: Tone = time_tone(nearest) if nearest else ""
    topics = len({place.topic for place in stream_status.partitions})
    facts = f"tier {stream_status.tier} · {topics} topic{'s' * (topics != 1)}, {len(stream_status.partitions)} partitions"
    named = link(base, page_path("stream", stream_status.stream), stream_status.stream)
    cells = [
        cell(
            named
            + element("small", safe_text(facts))
            + _kafka_age_note(stream_status, now_seconds),
            css="name",
        ),
        cell(chip(stream_status.verdict, stream_status.tone), "verdict"),
        cell(
            partition_strip(stream_status.partitions[:PARTITIONS_DRAWN])
            if stream_status.partitions
            else "",
            "partitions",
        ),
        cell(
            safe_text("–" if stream_status.lag is None else f"{stream_status.lag:,}"),
            "lag",
            "number",
        ),
        cell(
            element(
                "span",
                safe_text(left_said(nearest.time_left_seconds if nearest else None)),
                css=left,
            ),
            "time left",
            "number",
        ),
        cell(
            safe_text(render_age(stream_status.last_run_seconds, now_seconds)), "last run", "number"
        ),
        cell(
            safe_text("–" if stream_status.rate is None else f"{stream_status.rate:,.0f}"),
            "messages/s",
            "number",
        ),
        cell(_render_count(stream_status.quarantined), "quarantined", "number"),
        cell(_render_count(stream_status.gaps_open), "open gaps", "number"),
        cell(
            element("span", safe_text(circuit), css="bad" if circuit == "open" else ""), "circuit"
        ),
    ]
    more = _concerns_row(stream_status)
    return element("tr", *cells, css="has-more" if more else "") + more


def _kafka_age_note(stream_status: StreamStatus, now_seconds: float) -> str:
    """That the last look at Kafka is old, or that there is none: its lag is that of the last entry
    then.
    """
    at_seconds = stream_status.as_of_seconds
    if at_seconds is None:
        return (
            element("small", safe_text("Kafka was not asked yet"), css="warn")
            if stream_status.partitions
            else ""
        )
    stale = now_seconds - at_seconds > STALE_SECONDS or is_in_future(at_seconds, now_seconds)
    return (
        element(
            "small", safe_text(f"Kafka as of {render_age(at_seconds, now_seconds)}"), css="warn"
        )
        if stale
        else ""
    )


def _render_count(number: int | None) -> str:
    if number is None or number < 0:
        return safe_text("–")
    return element("span", safe_text(f"{number:,}"), css="bad" if number else "soft")


def _concerns_row(stream_status: StreamStatus) -> str:
    """What needs a person, as far as a line or two can say it."""
    if stream_status.trouble:
        said = [
            element(
                "div",
                element("b", safe_text("cannot be shown"), css="bad"),
                safe_text(stream_status.trouble),
                css="need bad-edge",
            )
        ]
    else:
        said = [concern_box(concern) for concern in stream_status.concerns[:CONCERNS_SHOWN]]
        if len(stream_status.concerns) > CONCERNS_SHOWN:
            more = f"… and {len(stream_status.concerns) - CONCERNS_SHOWN} more on the stream's page"
            said.append(element("div", safe_text(more), css="soft small"))
    if not said:
        return ""
    return element("tr", element("td", *said, colspan=str(len(COLUMNS))), css="more")
