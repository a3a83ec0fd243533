"""Stream: one stream's page: what needs a person, its partitions, its last slices, its findings. Pure.

Next room: entry.py shows one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seriatim.core.ledger import Account, Ledger, Manifest
from seriatim.core.page import text
from seriatim.core.retention import duration
from seriatim.core.status import Glance, PartitionStatus, Tone, time_tone
from seriatim.page import draw, history
from seriatim.page.draw import ago, card, cell, element, shell, table
from seriatim.page.read import History

PARTITIONS_SHOWN, FINDINGS_SHOWN, SESSIONS_SHOWN = 500, 20, 100
PARTITION_COLUMNS = [
    *(("partition", ""), ("log", ""), ("frontier", "number"), ("log start", "number"), ("log end", "number")),
    *(("lag", "number"), ("time left", "number"), ("snapshot distance", "number"), ("state", "")),
]
SESSION_COLUMNS = [("session", ""), ("partition", ""), ("since offset", "number"), ("finding", "")]


def page(base: str, found: History, now_seconds: float) -> str:
    """One stream."""
    now, rows = found.now, [history.row(one) for one in found.manifests]
    body = [
        cards(now, found.ledger, now_seconds),
        *needs(now),
        *partitions(now, found.ledger),
        *_slices(base, now.stream, rows),
        *([element("div", element("pre", _lines(found.trouble)), css="need bad-edge")] if found.trouble else []),
        *findings(now.stream, found.manifests),
        *_sessions(now),
        element(
            "p", text(f"machine {found.file.stream.machine} · topics {found.file.stream.topics}"), css="soft small"
        ),
    ]
    return shell(base, now.stream, [("Streams", "/")], draw.as_of(now.as_of_seconds, now_seconds), body)


def cards(now: Glance, ledger: Ledger | None, now_seconds: float) -> str:
    """The stream in a few numbers."""
    nearest = now.nearest
    left: Tone = time_tone(nearest) if nearest else ""
    aside, open_gaps = max(now.quarantined, 0), now.gaps_open
    return element(
        "div",
        card("verdict", now.verdict, now.tone),
        card("circuit", now.circuit, "bad" if now.circuit == "open" else "good"),
        card("tier", now.tier),
        card("messages that wait", "–" if now.lag is None else f"{now.lag:,}"),
        card("time left", draw.time_left(nearest.time_left_seconds if nearest else None), left),
        card("messages a second", "–" if now.rate is None else f"{now.rate:,.0f}"),
        card("last run", ago(now.ran_seconds, now_seconds)),
        card("in quarantine", f"{aside:,}", "bad" if aside else ""),
        card("open gaps", "–" if open_gaps is None else f"{open_gaps:,}", "bad" if open_gaps else ""),
        card("last entry", str(now.sequence) if ledger else "–"),
        card("checked up to", str(now.checked) if ledger else "–"),
        css="cards",
    )


def needs(now: Glance) -> Iterable[str]:
    """What needs a person, and what to type."""
    if now.sequence < 0:
        yield element("p", text(f"It was never run. Next: seriatim run {now.stream}"), css="soft")
        return
    if now.concerns:
        yield element("h2", text("What needs a person"))
        yield from map(draw.need, now.concerns)


def partitions(now: Glance, ledger: Ledger | None) -> Iterable[str]:
    """Each partition: its log as a bar, what waits, how long there is."""
    if not now.partitions:
        return
    yield element("h2", text("Partitions"))
    keys = [("done", "folded"), ("wait", "waits"), ("halt", "halted there")]
    said = [part for css, word in keys for part in (element("span", css=f"key {css}"), text(word))]
    yield element("p", text("From log start to log end:"), *said, css="soft small")
    known = ledger.partitions if ledger else {}
    worst = sorted(now.partitions, key=lambda one: (one.tone != "bad", one.tone != "warn"))
    shown = worst[:PARTITIONS_SHOWN]
    yield table(PARTITION_COLUMNS, (_partition(one, known.get(one.place)) for one in shown), stack=True)
    if len(worst) > len(shown):
        yield element("p", text(f"… and {len(worst) - len(shown)} more partitions, all of them well"), css="soft")


def _partition(one: PartitionStatus, account: Account | None) -> str:
    halt = one.halted
    state = (
        element("span", text(f"{halt.finding} at {halt.offset}"), css="bad")
        if halt
        else element("span", text(f"held by {one.held}"), css="warn")
        if one.held
        else text(one.topic_state)
    )
    epoch = element("small", text(f"epoch {one.epoch}")) if one.epoch else ""
    far = account.distance_messages if account else 0
    distance = f"{far:,} · {duration((account.distance_ms if account else 0) / 1000)}" if far else "–"
    return element(
        "tr",
        cell(element("span", text(one.place), css="bad" if halt else "") + epoch, css="name"),
        cell(draw.bar(one), "log"),
        cell(_number(one.frontier), "frontier", "number"),
        cell(_number(one.log_start), "log start", "number"),
        cell(_number(one.log_end), "log end", "number"),
        cell(text("–" if one.lag is None else f"{one.lag:,}"), "lag", "number"),
        cell(element("span", text(draw.time_left(one.time_left_seconds)), css=time_tone(one)), "time left", "number"),
        cell(text(distance), "snapshot distance", "number"),
        cell(state, "state", "cause"),
    )


def _number(offset: int | None) -> str:
    """An offset: without separators, people paste it."""
    return text("–" if offset is None else offset)


def _slices(base: str, stream: str, rows: Sequence[history.Row]) -> Iterable[str]:
    if rows:
        yield element("h2", text("The last slices"))
        yield history.chart(rows[::-1])
        yield history.entries(base, stream, rows)


def findings(stream: str, manifests: Sequence[Manifest]) -> Iterable[str]:
    """Findings of the last entries, newest first, each with its cause and command."""
    found = [(one.entry.sequence, finding) for one in manifests for finding in one.entry.findings]
    yield element("h2", text("Findings"))
    if not found:
        yield element("p", text("None in the last entries."), css="soft")
    for sequence, finding in found[:FINDINGS_SHOWN]:
        said = "\n".join(finding.render(stream).splitlines()[:40])
        css = finding.level
        yield element(
            "div", element("small", text(f"entry {sequence}"), css="soft"), element("pre", _lines(said), css=css)
        )
    if len(found) > FINDINGS_SHOWN:
        yield element("p", text(f"… and {len(found) - FINDINGS_SHOWN} more, on the pages of their entries"), css="soft")


def _lines(said: str) -> str:
    return "\n".join(text(line) for line in said.splitlines())


def _sessions(now: Glance) -> Iterable[str]:
    """Sessions in quarantine, as of the last look."""
    if not now.sessions:
        return
    yield element("h2", text("Sessions in quarantine"))
    yield element("p", text("Until their next snapshot, as of the last look."), css="soft")
    rows = (
        element(
            "tr",
            cell(element("code", text(one.session or "(empty)")), css="name"),
            cell(text(f"{one.topic}/{one.partition}"), "partition"),
            cell(_number(one.offset), "since offset", "number"),
            cell(text(one.finding or ""), "finding"),
        )
        for one in now.sessions[:SESSIONS_SHOWN]
    )
    yield table(SESSION_COLUMNS, rows, stack=True)
    if (more := now.quarantined - SESSIONS_SHOWN) > 0:
        yield element("p", text(f"… and {more} more: seriatim status {now.stream}"), css="soft")
