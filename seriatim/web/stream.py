"""The page of one stream: what needs a person, its partitions, its last slices, its findings. Pure:
values in, HTML out.

Next: web/entry.py shows one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seriatim.engine.findings import Finding, format_duration
from seriatim.ledger.model import Account, Ledger, Manifest
from seriatim.operations.report_page import safe_text
from seriatim.operations.stream_status import PartitionStatus, StreamStatus, Tone, time_tone
from seriatim.web import draw, history
from seriatim.web.draw import (
    card,
    cell,
    element,
    number_cell,
    page_shell,
    render_age,
    render_number,
    render_time_left,
    table,
    text_element,
)
from seriatim.web.read import StreamHistory

PARTITIONS_SHOWN = 500
FINDINGS_SHOWN = 20
FINDING_LINES_MAX = 40
SESSIONS_SHOWN = 100
PARTITION_COLUMNS = [
    ("partition", ""),
    ("log", ""),
    ("frontier", "number"),
    ("log start", "number"),
    ("log end", "number"),
    ("lag", "number"),
    ("time left", "number"),
    ("snapshot distance", "number"),
    ("state", ""),
]
SESSION_COLUMNS = [("session", ""), ("partition", ""), ("since offset", "number"), ("finding", "")]


def render_stream_page(base: str, stream_history: StreamHistory, now_seconds: float) -> str:
    """The page of one stream."""
    status = stream_history.stream_status
    ledger = stream_history.ledger
    stream = stream_history.file.stream
    rows = [history.entry_row(manifest) for manifest in stream_history.manifests]
    body = [stream_cards(status, ledger, now_seconds)]
    body += concern_boxes(status)
    body += partitions_section(status, ledger)
    body += _slices_section(base, status.stream, rows)
    if stream_history.trouble:
        trouble = element("pre", _escape_lines(stream_history.trouble))
        body.append(element("div", trouble, css="need bad-edge"))
    body += findings_section(status.stream, stream_history.manifests)
    body += _quarantine_section(status)
    facts = f"machine {stream.machine} · topics {stream.topics}"
    body.append(text_element("p", facts, css="soft small"))
    subtitle = draw.describe_kafka_age(status.as_of_seconds, now_seconds)
    return page_shell(base, status.stream, [("Streams", "/")], subtitle, body)


def stream_cards(stream_status: StreamStatus, ledger: Ledger | None, now_seconds: float) -> str:
    """The stream in a few numbers."""
    quarantined = max(stream_status.quarantined, 0)
    gaps_open = stream_status.gaps_open
    rate = None if stream_status.rate is None else round(stream_status.rate)
    last_entry = "–"
    checked = "–"
    if ledger:
        last_entry = str(stream_status.sequence)
        checked = str(stream_status.checked)
    circuit_tone: Tone = "bad" if stream_status.circuit == "open" else "good"
    return element(
        "div",
        card("verdict", stream_status.verdict, stream_status.tone),
        card("circuit", stream_status.circuit, circuit_tone),
        card("tier", stream_status.tier),
        card("messages that wait", render_number(stream_status.lag)),
        _time_left_card(stream_status.nearest),
        card("messages a second", render_number(rate)),
        card("last run", render_age(stream_status.last_run_seconds, now_seconds)),
        card("in quarantine", f"{quarantined:,}", "bad" if quarantined else ""),
        card("open gaps", render_number(gaps_open), "bad" if gaps_open else ""),
        card("last entry", last_entry),
        card("checked up to", checked),
        css="cards",
    )


def _time_left_card(nearest: PartitionStatus | None) -> str:
    """The time that is left for the partition that has the least."""
    if nearest is None:
        return card("time left", render_time_left(None))
    return card("time left", render_time_left(nearest.time_left_seconds), time_tone(nearest))


def concern_boxes(stream_status: StreamStatus) -> Iterable[str]:
    """The problems that need a person, each with the command for it."""
    if stream_status.sequence < 0:
        text = f"It was never run. Next: seriatim run {stream_status.stream}"
        yield text_element("p", text, css="soft")
        return
    if stream_status.concerns:
        yield text_element("h2", "What needs a person")
        for concern in stream_status.concerns:
            yield draw.concern_box(concern)


def partitions_section(stream_status: StreamStatus, ledger: Ledger | None) -> Iterable[str]:
    """All partitions: the log as a bar, what waits, how much time is left. The worst come first."""
    if not stream_status.partitions:
        return
    yield text_element("h2", "Partitions")
    yield _partition_legend()
    accounts = ledger.partitions if ledger else {}
    worst_first = sorted(
        stream_status.partitions,
        key=lambda partition: (partition.tone != "bad", partition.tone != "warn"),
    )
    rows = [
        _partition_row(partition, accounts.get(partition.partition_name))
        for partition in worst_first[:PARTITIONS_SHOWN]
    ]
    yield table(PARTITION_COLUMNS, rows, stack=True)
    not_shown = len(worst_first) - len(rows)
    if not_shown > 0:
        text = f"… and {not_shown} more partitions, all of them well"
        yield text_element("p", text, css="soft")


def _partition_legend() -> str:
    legend = []
    for css, label in (("done", "folded"), ("wait", "waits"), ("halt", "halted there")):
        legend += [element("span", css=f"key {css}"), safe_text(label)]
    return element("p", safe_text("From log start to log end:"), *legend, css="soft small")


def _partition_row(partition: PartitionStatus, account: Account | None) -> str:
    name = text_element("span", partition.partition_name, css="bad" if partition.halt else "")
    if partition.epoch:
        name += text_element("small", f"epoch {partition.epoch}")
    time_left = text_element(
        "span", render_time_left(partition.time_left_seconds), css=time_tone(partition)
    )
    return element(
        "tr",
        cell(name, css="name"),
        cell(draw.log_bar(partition), "log"),
        number_cell(_render_offset(partition.frontier), "frontier"),
        number_cell(_render_offset(partition.log_start), "log start"),
        number_cell(_render_offset(partition.log_end), "log end"),
        number_cell(render_number(partition.lag), "lag"),
        cell(time_left, "time left", "number"),
        number_cell(_snapshot_distance(account), "snapshot distance"),
        cell(_partition_state_html(partition), "state", "cause"),
    )


def _partition_state_html(partition: PartitionStatus) -> str:
    """Why a partition does not go on, or else the state of its topic."""
    halt = partition.halt
    if halt is not None:
        return text_element("span", f"{halt.finding} at {halt.offset}", css="bad")
    if partition.hold:
        return text_element("span", f"held by {partition.hold}", css="warn")
    return safe_text(partition.topic_state)


def _snapshot_distance(account: Account | None) -> str:
    """The longest distance between two snapshots, in messages and in time."""
    if account is None or not account.distance_messages:
        return "–"
    duration = format_duration(account.distance_ms / 1000)
    return f"{account.distance_messages:,} · {duration}"


def _render_offset(offset: int | None) -> str:
    """An offset, without separators, since people paste it into commands."""
    if offset is None:
        return "–"
    return str(offset)


def _slices_section(base: str, stream: str, rows: Sequence[history.EntryRow]) -> Iterable[str]:
    if rows:
        yield text_element("h2", "The last slices")
        yield history.rate_chart(rows[::-1])
        yield history.entries_table(base, stream, rows)


def findings_section(stream: str, manifests: Sequence[Manifest]) -> Iterable[str]:
    """The findings of the last entries, newest first, each with its cause and command."""
    yield text_element("h2", "Findings")
    findings: list[tuple[int, Finding]] = []
    for manifest in manifests:
        sequence = manifest.entry.sequence
        findings += [(sequence, finding) for finding in manifest.entry.findings]
    if not findings:
        yield text_element("p", "None in the last entries.", css="soft")
    for sequence, finding in findings[:FINDINGS_SHOWN]:
        lines = finding.render(stream).splitlines()[:FINDING_LINES_MAX]
        headline = text_element("small", f"entry {sequence}", css="soft")
        content = element("pre", _escape_lines("\n".join(lines)), css=finding.level)
        yield element("div", headline, content)
    not_shown = len(findings) - FINDINGS_SHOWN
    if not_shown > 0:
        text = f"… and {not_shown} more, on the pages of their entries"
        yield text_element("p", text, css="soft")


def _escape_lines(content: str) -> str:
    # Line by line: `safe_text` cuts what is too long for one line.
    return "\n".join(safe_text(line) for line in content.splitlines())


def _quarantine_section(stream_status: StreamStatus) -> Iterable[str]:
    """The sessions in quarantine, as of the last observation."""
    if not stream_status.sessions:
        return
    yield text_element("h2", "Sessions in quarantine")
    yield text_element("p", "Until their next snapshot, as of the last look.", css="soft")
    rows = []
    for quarantined in stream_status.sessions[:SESSIONS_SHOWN]:
        row = element(
            "tr",
            cell(text_element("code", quarantined.session or "(empty)"), css="name"),
            cell(safe_text(f"{quarantined.topic}/{quarantined.partition}"), "partition"),
            number_cell(_render_offset(quarantined.offset), "since offset"),
            cell(safe_text(quarantined.finding or ""), "finding"),
        )
        rows.append(row)
    yield table(SESSION_COLUMNS, rows, stack=True)
    not_shown = stream_status.quarantined - SESSIONS_SHOWN
    if not_shown > 0:
        text = f"… and {not_shown} more: seriatim status {stream_status.stream}"
        yield text_element("p", text, css="soft")
