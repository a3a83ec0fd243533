"""History: the last ledger entries as table rows and as a small chart. Pure: values in, HTML out.

Next: web/stream.py puts them on a stream's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct

from seriatim.engine.findings import format_duration
from seriatim.ledger.model import Manifest
from seriatim.operations.report_page import safe_text
from seriatim.web.address import page_path
from seriatim.web.draw import (
    cell,
    chip,
    element,
    link,
    number_cell,
    render_number,
    table,
    text_element,
)

CHART_WIDTH = 960
CHART_HEIGHT = 190
CHART_TOP = 24
CHART_LEFT = 8
CHART_BOTTOM = 4
SLICES_MIN = 12
"""The chart has space for at least so many slices: two of them should not fill it."""
COLUMNS = [
    ("entry", "number"),
    ("kind", ""),
    ("when", ""),
    ("messages", "number"),
    ("records", "number"),
    ("took", "number"),
    ("a second", "number"),
    ("lag after", "number"),
    ("missing offsets", "number"),
    ("findings", "number"),
    ("certificate", ""),
]


class EntryRow(Struct, frozen=True, kw_only=True):
    """One ledger entry, in numbers."""

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
    """Of a verdict: how many partitions are bad."""

    @property
    def rate(self) -> float | None:
        """Messages a second; None: it folded none."""
        if self.messages and self.took_seconds > 0:
            return self.messages / self.took_seconds
        return None

    @property
    def findings_tone(self) -> str:
        """The CSS class of the number of findings."""
        if self.errors:
            return "bad"
        if self.warnings:
            return "warn"
        return "soft"


def entry_row(manifest: Manifest) -> EntryRow:
    """A ledger entry in numbers."""
    entry = manifest.entry
    certificates = [change.certificate for change in entry.changes if change.certificate]
    lag = 0
    for account in manifest.ledger.partitions.values():
        if not account.retired:
            lag += max(0, account.log_end - account.frontier)
    finding_levels = [finding.level for finding in entry.findings]
    return EntryRow(
        sequence=entry.sequence,
        kind=entry.kind,
        at_seconds=entry.at_seconds,
        messages=sum(certificate.counts.messages for certificate in certificates),
        records=sum(certificate.counts.records for certificate in certificates),
        took_seconds=entry.took_seconds,
        lag=lag,
        holes=sum(sum(certificate.holes.values()) for certificate in certificates),
        errors=finding_levels.count("error"),
        warnings=finding_levels.count("warning"),
        partitions=len(certificates) or len(entry.changes) or len(entry.verdict),
        reason=entry.reason,
        bad_partitions=list(entry.verdict.values()).count("bad"),
    )


def entries_table(base: str, stream: str, rows: Sequence[EntryRow]) -> str:
    """Entries as a table, newest first."""
    return table(COLUMNS, [_entry_html(base, stream, row) for row in rows], stack=True)


def _entry_html(base: str, stream: str, row: EntryRow) -> str:
    entry_path = page_path("stream", stream, "entry", row.sequence)
    holes = text_element("span", f"{row.holes:,}", css="warn" if row.holes else "soft")
    findings = text_element("span", f"{row.errors + row.warnings:,}", css=row.findings_tone)
    rate = None if row.rate is None else round(row.rate)
    return element(
        "tr",
        cell(link(base, entry_path, str(row.sequence)), "entry", "number"),
        cell(safe_text(row.kind), "kind"),
        cell(safe_text(render_moment(row.at_seconds)), "when"),
        number_cell(f"{row.messages:,}", "messages"),
        number_cell(f"{row.records:,}", "records"),
        number_cell(_render_duration(row.took_seconds), "took"),
        number_cell(render_number(rate), "a second"),
        number_cell(f"{row.lag:,}", "lag after"),
        cell(holes, "missing offsets", "number"),
        cell(findings, "findings", "number"),
        cell(_certificate_html(base, entry_path, row), "certificate"),
    )


def _certificate_html(base: str, entry_path: str, row: EntryRow) -> str:
    """A verdict's result, a link to the certificates of a slice, or the reason of another entry."""
    if row.kind == "verdict":
        if row.bad_partitions:
            return chip(f"{row.bad_partitions} bad", "bad")
        return chip("good", "good")
    partitions = f"{row.partitions} partition"
    if row.partitions != 1:
        partitions += "s"
    if row.messages:
        return link(base, entry_path, partitions)
    return text_element("span", row.reason or partitions, css="soft")


def _render_duration(seconds: float) -> str:
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


def rate_chart(rows: Sequence[EntryRow]) -> str:
    """Messages a second as columns and lag as a line over the slices, oldest first.

    Fewer than two slices make no chart: "" comes back.
    """
    slices = [row for row in rows if row.rate is not None]
    if len(slices) < 2:
        return ""
    highest_rate = max(row.rate or 0.0 for row in slices)
    highest_lag = max(row.lag for row in slices)
    step = (CHART_WIDTH - 2 * CHART_LEFT) / max(len(slices), SLICES_MIN)
    plot_height = CHART_HEIGHT - CHART_TOP - CHART_BOTTOM
    columns = []
    lag_points = []
    for i, row in enumerate(slices):
        # Columns grow from the bottom, each with a space to its neighbours.
        column_height = plot_height * (row.rate or 0.0) / highest_rate
        columns.append(
            _chart_column(row, CHART_LEFT + (i + 0.14) * step, step * 0.72, column_height)
        )
        lag_share = row.lag / max(highest_lag, 1)
        lag_points.append(
            (CHART_LEFT + (i + 0.5) * step, CHART_TOP + plot_height * (1 - lag_share))
        )
    chart = element(
        "svg",
        *columns,
        *_lag_line(lag_points),
        css="chart",
        viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
        role="img",
        aria_label=f"the last {len(slices)} slices: messages a second and lag",
    )
    return chart + _chart_legend(highest_rate, highest_lag)


def _chart_column(row: EntryRow, x: float, width: float, height: float) -> str:
    title = safe_text(
        f"entry {row.sequence}: {row.rate or 0:,.0f} messages a second, {row.lag:,} wait after it"
    )
    y = CHART_HEIGHT - CHART_BOTTOM - height
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="rate" {size}><title>{title}</title></rect>'


def _lag_line(points: Sequence[tuple[float, float]]) -> list[str]:
    """A line through the points, and a dot at each."""
    corners = [f"{x:.1f} {y:.1f}" for x, y in points]
    line = element("path", css="lag", d="M" + " L".join(corners))
    dots = [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"></circle>' for x, y in points]
    return [line, *dots]


def _chart_legend(highest_rate: float, highest_lag: int) -> str:
    return element(
        "p",
        element("span", css="key rate"),
        safe_text(f"messages a second, at most {highest_rate:,.0f}"),
        element("span", css="key lag"),
        safe_text(f"messages that wait after each, at most {highest_lag:,}"),
        css="soft small",
    )
