"""History: the last entries of a ledger as rows and as a small chart. Pure: values in, HTML out.

Next room: stream.py puts it on a stream's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct

from seriatim.engine.findings import format_duration
from seriatim.ledger.model import Manifest
from seriatim.operations.report_page import safe_text
from seriatim.web.address import page_path
from seriatim.web.draw import cell, chip, element, link, table

CHART_WIDTH, CHART_HEIGHT, CHART_TOP, CHART_LEFT = 960, 190, 24, 8
SLICES_MIN = 12
"""There is room for so many at least: two slices are no wall."""
COLUMNS = [
    *(
        ("entry", "number"),
        ("kind", ""),
        ("when", ""),
        ("messages", "number"),
        ("records", "number"),
    ),
    *(
        ("took", "number"),
        ("a second", "number"),
        ("lag after", "number"),
        ("missing offsets", "number"),
    ),
    *(("findings", "number"), ("certificate", "")),
]


class EntryRow(Struct, frozen=True, kw_only=True):
    """One entry, in numbers."""

    sequence: int
    kind: str
    at_seconds: float
    messages: int
    records: int
    took_seconds: float
    lag: int
    holes: int
    errors: int
    warnings: int
    partitions: int
    reason: str
    bad_partitions: int
    """Verdict: partitions that were found bad."""

    @property
    def rate(self) -> float | None:
        """Messages a second."""
        return (
            self.messages / self.took_seconds if self.messages and self.took_seconds > 0 else None
        )


def entry_row(manifest: Manifest) -> EntryRow:
    """An entry in numbers."""
    entry, made = (
        manifest.entry,
        [one.certificate for one in manifest.entry.changes if one.certificate],
    )
    accounts = manifest.ledger.partitions.values()
    return EntryRow(
        sequence=entry.sequence,
        kind=entry.kind,
        at_seconds=entry.at_seconds,
        messages=sum(one.counts.messages for one in made),
        records=sum(one.counts.records for one in made),
        took_seconds=entry.took_seconds,
        lag=sum(max(0, one.log_end - one.frontier) for one in accounts if not one.retired),
        holes=sum(sum(one.holes.values()) for one in made),
        errors=sum(one.level == "error" for one in entry.findings),
        warnings=sum(one.level == "warning" for one in entry.findings),
        partitions=len(made) or len(entry.changes) or len(entry.verdict),
        reason=entry.reason,
        bad_partitions=sum(result == "bad" for result in entry.verdict.values()),
    )


def entries_table(base: str, stream: str, rows: Sequence[EntryRow]) -> str:
    """Entries as a table, newest first."""
    return table(COLUMNS, (_entry_html(base, stream, one) for one in rows), stack=True)


def _entry_html(base: str, stream: str, row: EntryRow) -> str:
    proof = f"{row.partitions} partition{'s' * (row.partitions != 1)}"
    if row.kind == "verdict":
        said = (
            chip(f"{row.bad_partitions} bad", "bad") if row.bad_partitions else chip("good", "good")
        )
    elif row.messages:
        said = link(base, page_path("stream", stream, "entry", row.sequence), proof)
    else:
        said = element("span", safe_text(row.reason or proof), css="soft")
    holes = element("span", safe_text(f"{row.holes:,}"), css="warn" if row.holes else "soft")
    found = element("span", safe_text(f"{row.errors + row.warnings:,}"), css=_tone(row))
    return element(
        "tr",
        cell(
            link(base, page_path("stream", stream, "entry", row.sequence), str(row.sequence)),
            "entry",
            "number",
        ),
        cell(safe_text(row.kind), "kind"),
        cell(safe_text(render_moment(row.at_seconds)), "when"),
        cell(safe_text(f"{row.messages:,}"), "messages", "number"),
        cell(safe_text(f"{row.records:,}"), "records", "number"),
        cell(safe_text(_render_duration(row.took_seconds)), "took", "number"),
        cell(safe_text("–" if row.rate is None else f"{row.rate:,.0f}"), "a second", "number"),
        cell(safe_text(f"{row.lag:,}"), "lag after", "number"),
        cell(holes, "missing offsets", "number"),
        cell(found, "findings", "number"),
        cell(said, "certificate"),
    )


def _render_duration(seconds: float) -> str:
    return "–" if seconds <= 0 else f"{seconds:.1f} s" if seconds < 10 else format_duration(seconds)


def _tone(row: EntryRow) -> str:
    return "bad" if row.errors else "warn" if row.warnings else "soft"


def render_moment(seconds: float) -> str:
    """A moment, for people."""
    return "–" if seconds <= 0 else f"{datetime.fromtimestamp(seconds, UTC):%m-%d %H:%M:%S} UTC"


def rate_chart(rows: Sequence[EntryRow]) -> str:
    """Messages a second as columns, lag as a line, over the slices, oldest first. Nothing of fewer
    than two.
    """
    slices = [one for one in rows if one.rate is not None]
    if len(slices) < 2:
        return ""
    rates, lags = [one.rate or 0.0 for one in slices], [one.lag for one in slices]
    fastest, longest = max(rates), max(*lags, 1)
    step, room = (
        (CHART_WIDTH - 2 * CHART_LEFT) / max(len(slices), SLICES_MIN),
        CHART_HEIGHT - CHART_TOP - 4,
    )
    points = [
        (CHART_LEFT + (i + 0.5) * step, CHART_TOP + room * (1 - lag / longest))
        for i, lag in enumerate(lags)
    ]
    columns = [
        _chart_column(one, CHART_LEFT + (i + 0.14) * step, step * 0.72, room * rate / fastest)
        for i, (one, rate) in enumerate(zip(slices, rates, strict=True))
    ]
    line = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    keys = element(
        "p",
        element("span", css="key rate"),
        safe_text(f"messages a second, at most {fastest:,.0f}"),
        element("span", css="key lag"),
        safe_text(f"messages that wait after each, at most {max(lags):,}"),
        css="soft small",
    )
    said = f"the last {len(slices)} slices: messages a second and lag"
    drawn = element(
        "svg",
        *columns,
        element("path", css="lag", d=line),
        *(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"></circle>' for x, y in points),
        css="chart",
        viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
        role="img",
        aria_label=said,
    )
    return drawn + keys


def _chart_column(row: EntryRow, x: float, width: float, height: float) -> str:
    said = safe_text(
        f"entry {row.sequence}: {row.rate or 0:,.0f} messages a second, {row.lag:,} wait after it"
    )
    size = (
        f'x="{x:.1f}" y="{CHART_HEIGHT - 4 - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
    )
    return f'<rect class="rate" {size}><title>{said}</title></rect>'
