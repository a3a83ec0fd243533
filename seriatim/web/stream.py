"""Stream: one stream's page: what needs a person, its partitions, its last slices, its findings.
Pure.

Next room: entry.py shows one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seriatim.engine.findings import format_duration
from seriatim.ledger.model import Account, Ledger, Manifest
from seriatim.operations.report_page import safe_text
from seriatim.operations.stream_status import PartitionStatus, StreamStatus, Tone, time_tone
from seriatim.web import draw, history
from seriatim.web.draw import card, cell, element, page_shell, render_age, table
from seriatim.web.read import StreamHistory

PARTITIONS_SHOWN, FINDINGS_SHOWN, SESSIONS_SHOWN = 500, 20, 100
PARTITION_COLUMNS = [
    *(
        ("partition", ""),
        ("log", ""),
        ("frontier", "number"),
        ("log start", "number"),
        ("log end", "number"),
    ),
    *(("lag", "number"), ("time left", "number"), ("snapshot distance", "number"), ("state", "")),
]
SESSION_COLUMNS = [("session", ""), ("partition", ""), ("since offset", "number"), ("finding", "")]


def render_stream_page(base: str, stream_history: StreamHistory, now_seconds: float) -> str:
    """One stream."""
    now, rows = (
        stream_history.stream_status,
        [history.entry_row(one) for one in stream_history.manifests],
    )
    body = [
        stream_cards(now, stream_history.ledger, now_seconds),
        *concern_boxes(now),
        *partitions_section(now, stream_history.ledger),
        *_slices_section(base, now.stream, rows),
        *(
            [
                element(
                    "div",
                    element("pre", _escape_lines(stream_history.trouble)),
                    css="need bad-edge",
                )
            ]
            if stream_history.trouble
            else []
        ),
        *findings_section(now.stream, stream_history.manifests),
        *_quarantine_section(now),
        element(
            "p",
            safe_text(
                f"machine {stream_history.file.stream.machine} · topics {stream_history.file.stream.topics}"
            ),
            css="soft small",
        ),
    ]
    return page_shell(
        base,
        now.stream,
        [("Streams", "/")],
        draw.describe_kafka_age(now.as_of_seconds, now_seconds),
        body,
    )


def stream_cards(stream_status: StreamStatus, ledger: Ledger | None, now_seconds: float) -> str:
    """The stream in a few numbers."""
    nearest = stream_status.nearest
    left: Tone = time_tone(nearest) if nearest else ""
    aside, open_gaps = max(stream_status.quarantined, 0), stream_status.gaps_open
    return element(
        "div",
        card("verdict", stream_status.verdict, stream_status.tone),
        card(
            "circuit", stream_status.circuit, "bad" if stream_status.circuit == "open" else "good"
        ),
        card("tier", stream_status.tier),
        card("messages that wait", "–" if stream_status.lag is None else f"{stream_status.lag:,}"),
        card(
            "time left", draw.render_time_left(nearest.time_left_seconds if nearest else None), left
        ),
        card(
            "messages a second", "–" if stream_status.rate is None else f"{stream_status.rate:,.0f}"
        ),
        card("last run", render_age(stream_status.last_run_seconds, now_seconds)),
        card("in quarantine", f"{aside:,}", "bad" if aside else ""),
        card(
            "open gaps", "–" if open_gaps is None else f"{open_gaps:,}", "bad" if open_gaps else ""
        ),
        card("last entry", str(stream_status.sequence) if ledger else "–"),
        card("checked up to", str(stream_status.checked) if ledger else "–"),
        css="cards",
    )


def concern_boxes(stream_status: StreamStatus) -> Iterable[str]:
    """What needs a person, and what to type."""
    if stream_status.sequence < 0:
        yield element(
            "p",
            safe_text(f"It was never run. Next: seriatim run {stream_status.stream}"),
            css="soft",
        )
        return
    if stream_status.concerns:
        yield element("h2", safe_text("What needs a person"))
        yield from map(draw.concern_box, stream_status.concerns)


def partitions_section(stream_status: StreamStatus, ledger: Ledger | None) -> Iterable[str]:
    """Each partition: its log as a bar, what waits, how long there is."""
    if not stream_status.partitions:
        return
    yield element("h2", safe_text("Partitions"))
    keys = [("done", "folded"), ("wait", "waits"), ("halt", "halted there")]
    said = [
        part for css, word in keys for part in (element("span", css=f"key {css}"), safe_text(word))
    ]
    yield element("p", safe_text("From log start to log end:"), *said, css="soft small")
    known = ledger.partitions if ledger else {}
    worst = sorted(
        stream_status.partitions, key=lambda one: (one.tone != "bad", one.tone != "warn")
    )
    shown = worst[:PARTITIONS_SHOWN]
    yield table(
        PARTITION_COLUMNS,
        (_partition_row(one, known.get(one.partition_name)) for one in shown),
        stack=True,
    )
    if len(worst) > len(shown):
        yield element(
            "p",
            safe_text(f"… and {len(worst) - len(shown)} more partitions, all of them well"),
            css="soft",
        )


def _partition_row(partition: PartitionStatus, account: Account | None) -> str:
    halt = partition.halt
    state = (
        element("span", safe_text(f"{halt.finding} at {halt.offset}"), css="bad")
        if halt
        else element("span", safe_text(f"held by {partition.hold}"), css="warn")
        if partition.hold
        else safe_text(partition.topic_state)
    )
    epoch = element("small", safe_text(f"epoch {partition.epoch}")) if partition.epoch else ""
    far = account.distance_messages if account else 0
    distance = (
        f"{far:,} · {format_duration((account.distance_ms if account else 0) / 1000)}"
        if far
        else "–"
    )
    return element(
        "tr",
        cell(
            element("span", safe_text(partition.partition_name), css="bad" if halt else "") + epoch,
            css="name",
        ),
        cell(draw.log_bar(partition), "log"),
        cell(_render_offset(partition.frontier), "frontier", "number"),
        cell(_render_offset(partition.log_start), "log start", "number"),
        cell(_render_offset(partition.log_end), "log end", "number"),
        cell(safe_text("–" if partition.lag is None else f"{partition.lag:,}"), "lag", "number"),
        cell(
            element(
                "span",
                safe_text(draw.render_time_left(partition.time_left_seconds)),
                css=time_tone(partition),
            ),
            "time left",
            "number",
        ),
        cell(safe_text(distance), "snapshot distance", "number"),
        cell(state, "state", "cause"),
    )


def _render_offset(offset: int | None) -> str:
    """An offset: without separators, people paste it."""
    return safe_text("–" if offset is None else offset)


def _slices_section(base: str, stream: str, rows: Sequence[history.EntryRow]) -> Iterable[str]:
    if rows:
        yield element("h2", safe_text("The last slices"))
        yield history.rate_chart(rows[::-1])
        yield history.entries_table(base, stream, rows)


def findings_section(stream: str, manifests: Sequence[Manifest]) -> Iterable[str]:
    """Findings of the last entries, newest first, each with its cause and command."""
    found = [(one.entry.sequence, finding) for one in manifests for finding in one.entry.findings]
    yield element("h2", safe_text("Findings"))
    if not found:
        yield element("p", safe_text("None in the last entries."), css="soft")
    for sequence, finding in found[:FINDINGS_SHOWN]:
        said = "\n".join(finding.render(stream).splitlines()[:40])
        css = finding.level
        yield element(
            "div",
            element("small", safe_text(f"entry {sequence}"), css="soft"),
            element("pre", _escape_lines(said), css=css),
        )
    if len(found) > FINDINGS_SHOWN:
        yield element(
            "p",
            safe_text(f"… and {len(found) - FINDINGS_SHOWN} more, on the pages of their entries"),
            css="soft",
        )


def _escape_lines(content: str) -> str:
    return "\n".join(safe_text(line) for line in content.splitlines())


def _quarantine_section(stream_status: StreamStatus) -> Iterable[str]:
    """Sessions in quarantine, as of the last look."""
    if not stream_status.sessions:
        return
    yield element("h2", safe_text("Sessions in quarantine"))
    yield element("p", safe_text("Until their next snapshot, as of the last look."), css="soft")
    rows = (
        element(
            "tr",
            cell(element("code", safe_text(one.session or "(empty)")), css="name"),
            cell(safe_text(f"{one.topic}/{one.partition}"), "partition"),
            cell(_render_offset(one.offset), "since offset", "number"),
            cell(safe_text(one.finding or ""), "finding"),
        )
        for one in stream_status.sessions[:SESSIONS_SHOWN]
    )
    yield table(SESSION_COLUMNS, rows, stack=True)
    if (more := stream_status.quarantined - SESSIONS_SHOWN) > 0:
        yield element(
            "p", safe_text(f"… and {more} more: seriatim status {stream_status.stream}"), css="soft"
        )
