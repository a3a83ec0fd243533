"""Streams: all of them at a glance, what needs a person first. Pure: values in, HTML out.

Next room: stream.py shows one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.core.page import text
from seriatim.core.status import Glance, Tone, time_tone, urgent_first
from seriatim.page.address import at
from seriatim.page.draw import STALE_SECONDS, ago, card, cell, chip, element, is_ahead, link, need, shell, strip, table
from seriatim.page.draw import time_left as left_said

COLUMNS = [
    *(("stream", ""), ("verdict", ""), ("partitions", ""), ("lag", "number"), ("time left", "number")),
    *(("last run", "number"), ("messages/s", "number"), ("quarantined", "number"), ("open gaps", "number")),
    ("circuit", ""),
]
NEEDS_SHOWN = 2
PARTITIONS_DRAWN = 400


def page(base: str, glances: Sequence[Glance], now_seconds: float) -> str:
    """All streams that this person may see."""
    if not glances:
        body = [element("p", text("There is no stream that you may see. A file in streams/ makes one."), css="soft")]
        return shell(base, "Streams", (), "", body)
    body = [cards(glances), table(COLUMNS, (row(base, one, now_seconds) for one in urgent_first(glances)), stack=True)]
    oldest = min((one.as_of_seconds for one in glances if one.as_of_seconds), default=None)
    newest = max((one.as_of_seconds for one in glances if one.as_of_seconds), default=None)
    when = f"Kafka as of {ago(newest, now_seconds)}" if newest else "Kafka was not asked yet"
    if oldest and newest and newest - oldest > STALE_SECONDS:
        when += f", the oldest look {ago(oldest, now_seconds)}"
    return shell(base, "Streams", (), when, body)


def cards(glances: Sequence[Glance]) -> str:
    """All streams in a few numbers."""
    bad, warn = (sum(one.tone == tone for one in glances) for tone in ("bad", "warn"))
    places = [place for one in glances for place in one.partitions]
    halted = sum(place.halted is not None for place in places)
    quarantined = sum(max(one.quarantined, 0) for one in glances)
    return element(
        "div",
        card("streams", f"{len(glances):,}"),
        card("need a person", f"{bad:,}", "bad" if bad else "good"),
        card("to look at", f"{warn:,}", "warn" if warn else ""),
        card("partitions", f"{len(places):,}"),
        card("halted partitions", f"{halted:,}", "bad" if halted else "good"),
        card("sessions in quarantine", f"{quarantined:,}", "bad" if quarantined else "good"),
        card("messages that wait", f"{sum(one.lag or 0 for one in glances):,}"),
        css="cards",
    )


def row(base: str, one: Glance, now_seconds: float) -> str:
    """A stream in a line, and below it what needs a person."""
    nearest, circuit = one.nearest, one.circuit
    left: Tone = time_tone(nearest) if nearest else ""
    topics = len({place.topic for place in one.partitions})
    facts = f"tier {one.tier} · {topics} topic{'s' * (topics != 1)}, {len(one.partitions)} partitions"
    named = link(base, at("stream", one.stream), one.stream)
    cells = [
        cell(named + element("small", text(facts)) + _seen(one, now_seconds), css="name"),
        cell(chip(one.verdict, one.tone), "verdict"),
        cell(strip(one.partitions[:PARTITIONS_DRAWN]) if one.partitions else "", "partitions"),
        cell(text("–" if one.lag is None else f"{one.lag:,}"), "lag", "number"),
        cell(
            element("span", text(left_said(nearest.time_left_seconds if nearest else None)), css=left),
            "time left",
            "number",
        ),
        cell(text(ago(one.ran_seconds, now_seconds)), "last run", "number"),
        cell(text("–" if one.rate is None else f"{one.rate:,.0f}"), "messages/s", "number"),
        cell(_count(one.quarantined), "quarantined", "number"),
        cell(_count(one.gaps_open), "open gaps", "number"),
        cell(element("span", text(circuit), css="bad" if circuit == "open" else ""), "circuit"),
    ]
    more = _more(one)
    return element("tr", *cells, css="has-more" if more else "") + more


def _seen(one: Glance, now_seconds: float) -> str:
    """That the last look at Kafka is old, or that there is none: its lag is that of the last entry then."""
    at_seconds = one.as_of_seconds
    if at_seconds is None:
        return element("small", text("Kafka was not asked yet"), css="warn") if one.partitions else ""
    stale = now_seconds - at_seconds > STALE_SECONDS or is_ahead(at_seconds, now_seconds)
    return element("small", text(f"Kafka as of {ago(at_seconds, now_seconds)}"), css="warn") if stale else ""


def _count(number: int | None) -> str:
    if number is None or number < 0:
        return text("–")
    return element("span", text(f"{number:,}"), css="bad" if number else "soft")


def _more(one: Glance) -> str:
    """What needs a person, as far as a line or two can say it."""
    if one.trouble:
        said = [
            element("div", element("b", text("cannot be shown"), css="bad"), text(one.trouble), css="need bad-edge")
        ]
    else:
        said = [need(concern) for concern in one.concerns[:NEEDS_SHOWN]]
        if len(one.concerns) > NEEDS_SHOWN:
            more = f"… and {len(one.concerns) - NEEDS_SHOWN} more on the stream's page"
            said.append(element("div", text(more), css="soft small"))
    if not said:
        return ""
    return element("tr", element("td", *said, colspan=str(len(COLUMNS))), css="more")
