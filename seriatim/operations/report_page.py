"""Report page: render a report as one HTML file that needs nothing else: no script, no font, no link
to anywhere. All functions are pure.

Everything that came from outside (names of topics and sessions, texts of findings) is escaped here
and nowhere else: `safe_text` makes text safe, and a page consists only of what `html_tag` and
`safe_text` returned.

Next: operations/report.py gathers what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Literal

from msgspec import Struct, field

from seriatim.engine.findings import shorten

PAGE_TEXT_MAX = 500
PAGE_ROWS_MAX = 500
FINDING_LINES_MAX = 40
BAR_WIDTH = 420
BAR_HEIGHT = 14
BAR_SEGMENT_WIDTH_MIN = 1.5
"""Narrower segments of a bar could not be seen."""
LIGHT = """color-scheme: light; --ink: #1c2733; --soft: #5d6b7a; --line: #d7dee6; --page: #ffffff; --card: #f5f7fa;
  --good: #2c7a4b; --bad: #b3261e; --warn: #9a6700; --done: #3b6ea8; --wait: #e3a13b;"""
DARK = """color-scheme: dark; --ink: #e4e9ef; --soft: #9aa7b5; --line: #35414e; --page: #12181f; --card: #1b232c;
  --good: #5fc98a; --bad: #ff8a80; --warn: #e8b949; --done: #6aa5e8; --wait: #e3a13b;"""
COLOURS = f"""
:root {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
:root[data-theme="light"] {{ {LIGHT} }}
:root[data-theme="dark"] {{ {DARK} }}
"""
"""Light or dark as the system prefers, or as the page around the report is set to."""
PAGE_STYLE = """
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.soft, td.soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: .5rem; padding: .6rem 1rem; min-width: 8rem; }
.card b { display: block; font-size: 1.15rem; } .card span { color: var(--soft); font-size: .85rem; }
pre { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; border-left: .3rem solid var(--line); }
pre.error { border-color: var(--bad); } pre.warning { border-color: var(--warn); }
.good { color: var(--good); } .bad { color: var(--bad); }
svg { display: block; } svg .back { fill: var(--line); } svg .done { fill: var(--done); }
svg .new { fill: var(--good); } svg .wait { fill: var(--wait); } svg .halt { fill: var(--bad); }
"""


class Card(Struct, frozen=True):
    """A figure at the top of the page."""

    label: str
    value: str
    tone: Literal["", "good", "bad"] = ""


class PageFinding(Struct, frozen=True):
    """A finding as a text for people."""

    text: str
    level: str = "error"


class PartitionBar(Struct, frozen=True, kw_only=True):
    """A partition as a bar: what was folded before, what is new, what waits, and where it halted."""

    label: str
    start: int
    before: int
    frontier: int
    end: int
    halt: int = -1
    note: str = ""


class PageTable(Struct, frozen=True, kw_only=True):
    """A table under a headline."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    empty: str = "None."


class ReportPage(Struct, frozen=True, kw_only=True):
    """The content of a report."""

    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    findings: Sequence[PageFinding] = ()
    bars: Sequence[PartitionBar] = ()
    tables: Sequence[PageTable] = field(default_factory=list)
    footer: str = ""


def render_page(page: ReportPage) -> str:
    """The page as the text of one HTML file."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += CONTENT_SECURITY_POLICY
    head += html_tag("title", safe_text(page.title))
    head += f"<style>{COLOURS}{PAGE_STYLE}</style>"
    body_lines = [
        html_tag("h1", safe_text(page.title)),
        html_tag("p", safe_text(page.subtitle), css="soft"),
        *render_sections(page),
        html_tag("p", safe_text(page.footer), css="soft"),
    ]
    body = "\n".join(body_lines)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def render_sections(page: ReportPage) -> list[str]:
    """The parts of the page between its title and its last line."""
    cards = [_render_card(card) for card in page.cards]
    sections = [html_tag("div", *cards, css="cards")]
    sections += _render_findings(page.findings)
    if page.bars:
        sections.append(html_tag("h2", safe_text("Partitions")))
        sections.append(_render_bars(page.bars))
    for table in page.tables:
        sections += _render_table(table)
    return sections


CONTENT_SECURITY_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
"""A second line of defence: should unsafe content get into a page, no browser runs or loads it."""


def safe_text(value: Any) -> str:
    """A value as escaped text, shortened to a length that fits on a page."""
    return escape(shorten(str(value), PAGE_TEXT_MAX), quote=True)


def html_tag(name: str, *children: str, css: str = "") -> str:
    """An element around children that are safe already."""
    attribute = f' class="{css}"' if css else ""
    return f"<{name}{attribute}>{''.join(children)}</{name}>"


def _render_card(card: Card) -> str:
    return html_tag(
        "div",
        html_tag("b", safe_text(card.value), css=card.tone),
        html_tag("span", safe_text(card.label)),
        css="card",
    )


def _render_findings(findings: Sequence[PageFinding]) -> Iterable[str]:
    yield html_tag("h2", safe_text("Findings"))
    if not findings:
        yield html_tag("p", safe_text("None."), css="soft")
    for finding in findings[:PAGE_ROWS_MAX]:
        lines = finding.text.splitlines()[:FINDING_LINES_MAX]
        text = "\n".join(shorten(line, PAGE_TEXT_MAX) for line in lines)
        css = finding.level if finding.level in ("error", "warning") else ""
        yield html_tag("pre", escape(text), css=css)
    if len(findings) > PAGE_ROWS_MAX:
        yield html_tag("p", safe_text(f"… and {len(findings) - PAGE_ROWS_MAX} more"), css="soft")


def _render_table(table: PageTable) -> Iterable[str]:
    yield html_tag("h2", safe_text(table.title))
    if not table.rows:
        yield html_tag("p", safe_text(table.empty), css="soft")
        return
    column_css = []
    header_cells = []
    for i, name in enumerate(table.columns):
        is_number_column = all(isinstance(row[i], int | float) for row in table.rows)
        css = "number" if is_number_column else ""
        column_css.append(css)
        header_cells.append(html_tag("th", safe_text(name), css=css))
    lines = [html_tag("tr", *header_cells)]
    for row in table.rows[:PAGE_ROWS_MAX]:
        cells = [_render_cell(value, css) for value, css in zip(row, column_css, strict=True)]
        lines.append(html_tag("tr", *cells))
    yield html_tag("table", *lines)
    if len(table.rows) > PAGE_ROWS_MAX:
        rest = f"… and {len(table.rows) - PAGE_ROWS_MAX} more rows"
        yield html_tag("p", safe_text(rest), css="soft")


def _render_cell(value: Any, css: str) -> str:
    if value in ("good", "bad"):
        css = value
    text = "" if value is None else value
    return html_tag("td", safe_text(text), css=css)


def _render_bars(bars: Sequence[PartitionBar]) -> str:
    rows = []
    for bar in bars[:PAGE_ROWS_MAX]:
        label_cell = html_tag("td", safe_text(bar.label))
        bar_cell = html_tag("td", _render_bar(bar))
        note_cell = html_tag("td", safe_text(bar.note), css="soft")
        rows.append(html_tag("tr", label_cell, bar_cell, note_cell))
    return html_tag("table", *rows)


def _render_bar(bar: PartitionBar) -> str:
    """The bar as a picture, to scale, from the first offset to the log end."""
    frontier = max(bar.frontier, bar.start)
    before = min(max(bar.before, bar.start), bar.frontier)
    segments = [
        f'<rect class="back" x="0" y="0" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"></rect>',
        _render_segment(bar, "done", bar.start, before),
        _render_segment(bar, "new", before, frontier),
        _render_segment(bar, "wait", frontier, bar.end),
    ]
    if bar.halt >= bar.start:
        halt_length = max(1, _bar_length(bar) // 150)
        segments.append(_render_segment(bar, "halt", bar.halt, bar.halt + halt_length))
    label = safe_text(f"{bar.label}: folded {bar.start} to {bar.frontier}, log end {bar.end}")
    size = f'width="{BAR_WIDTH}" height="{BAR_HEIGHT}" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(segments)}</svg>'


def _bar_length(bar: PartitionBar) -> int:
    """How many offsets the bar stands for. At least 1, because lengths are divided by it."""
    return max(bar.end - bar.start, 1)


def _render_segment(bar: PartitionBar, css: str, begin: int, end: int) -> str:
    """One coloured segment, from offset `begin` to `end`; nothing if it is empty."""
    if end <= begin:
        return ""
    length = _bar_length(bar)
    x = (begin - bar.start) / length * BAR_WIDTH
    width = max((end - begin) / length * BAR_WIDTH, BAR_SEGMENT_WIDTH_MIN)
    return (
        f'<rect class="{css}" x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"></rect>'
    )
