"""The page: a report as one HTML file that needs nothing else: no script, no font, no link to
anywhere. Pure.

Everything that came from outside (names of topics and sessions, texts of findings) is escaped, here
and nowhere else: `text` makes text safe, and only what `tag` and `text` made is put into a page.

Next room: operations/report.py gathers what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Literal

from msgspec import Struct, field

from seriatim.engine.findings import shorten

PAGE_TEXT_MAX = 500
PAGE_ROWS_MAX = 500
BAR_WIDTH, BAR_HEIGHT = 420, 14
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
"""By the system's wish, or by the one that a page around it was given."""
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
    """A number at the top."""

    label: str
    value: str
    tone: Literal["", "good", "bad"] = ""


class PageFinding(Struct, frozen=True):
    """A finding, as a person reads it."""

    text: str
    level: str = "error"


class PartitionBar(Struct, frozen=True, kw_only=True):
    """A partition as a picture: what was folded before, what is new, what waits, where it halted."""

    label: str
    start: int
    before: int
    frontier: int
    end: int
    halt: int = -1
    note: str = ""


class PageTable(Struct, frozen=True, kw_only=True):
    """Rows under a headline."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    empty: str = "None."


class ReportPage(Struct, frozen=True, kw_only=True):
    """A whole report."""

    title: str
    subtitle: str
    cards: Sequence[Card] = ()
    findings: Sequence[PageFinding] = ()
    bars: Sequence[PartitionBar] = ()
    tables: Sequence[PageTable] = field(default_factory=list)
    footer: str = ""


def render_page(page: ReportPage) -> str:
    """The page as one file."""
    head_line = [
        html_tag("h1", safe_text(page.title)),
        html_tag("p", safe_text(page.subtitle), css="soft"),
    ]
    body = [*head_line, *render_sections(page), html_tag("p", safe_text(page.footer), css="soft")]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{CONTENT_SECURITY_POLICY}'
    head += f"{html_tag('title', safe_text(page.title))}<style>{COLOURS}{PAGE_STYLE}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def render_sections(page: ReportPage) -> list[str]:
    """What is between a page's title and its last line."""
    return [
        html_tag("div", *map(_render_card, page.cards), css="cards"),
        *(_render_findings(page.findings)),
        *([html_tag("h2", safe_text("Partitions")), _render_bars(page.bars)] if page.bars else []),
        *(part for table in page.tables for part in _render_table(table)),
    ]


CONTENT_SECURITY_POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
"""Were anything to slip in all the same, no browser would run or load it."""


def safe_text(value: Any) -> str:
    """Anything as safe text, of a length that a page can bear."""
    return escape(shorten(str(value), PAGE_TEXT_MAX), quote=True)


def html_tag(name: str, *children: str, css: str = "") -> str:
    """An element around what is safe already."""
    return f"<{name}{f' class={chr(34)}{css}{chr(34)}' if css else ''}>{''.join(children)}</{name}>"


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
    for one in findings[:PAGE_ROWS_MAX]:
        screen = escape(
            "\n".join(shorten(line, PAGE_TEXT_MAX) for line in one.text.splitlines()[:40])
        )
        yield html_tag("pre", screen, css=one.level if one.level in ("error", "warning") else "")
    if len(findings) > PAGE_ROWS_MAX:
        yield html_tag("p", safe_text(f"… and {len(findings) - PAGE_ROWS_MAX} more"), css="soft")


def _render_table(table: PageTable) -> Iterable[str]:
    yield html_tag("h2", safe_text(table.title))
    if not table.rows:
        yield html_tag("p", safe_text(table.empty), css="soft")
        return
    numbers = [
        all(isinstance(row[i], int | float) for row in table.rows)
        for i in range(len(table.columns))
    ]
    css = ["number" if number else "" for number in numbers]
    head = html_tag(
        "tr",
        *(
            html_tag("th", safe_text(name), css=kind)
            for name, kind in zip(table.columns, css, strict=True)
        ),
    )
    rows = [
        html_tag("tr", *(_render_cell(value, kind) for value, kind in zip(row, css, strict=True)))
        for row in table.rows[:PAGE_ROWS_MAX]
    ]
    yield html_tag("table", head, *rows)
    if len(table.rows) > PAGE_ROWS_MAX:
        yield html_tag(
            "p", safe_text(f"… and {len(table.rows) - PAGE_ROWS_MAX} more rows"), css="soft"
        )


def _render_cell(value: Any, css: str) -> str:
    tone = value if value in ("good", "bad") else css
    return html_tag("td", safe_text("" if value is None else value), css=tone)


def _render_bars(bars: Sequence[PartitionBar]) -> str:
    rows = [
        html_tag(
            "tr",
            html_tag("td", safe_text(bar.label)),
            html_tag("td", _render_bar(bar)),
            html_tag("td", safe_text(bar.note), css="soft"),
        )
        for bar in bars[:PAGE_ROWS_MAX]
    ]
    return html_tag("table", *rows)


def _render_bar(bar: PartitionBar) -> str:
    """From the first offset to the log end, to scale; each part at least a hair wide."""
    length = max(bar.end - bar.start, 1)

    def part(css: str, begin: int, end: int) -> str:
        if end <= begin:
            return ""
        x, width = (
            (begin - bar.start) / length * BAR_WIDTH,
            max((end - begin) / length * BAR_WIDTH, 1.5),
        )
        return f'<rect class="{css}" x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"></rect>'

    before, frontier = min(max(bar.before, bar.start), bar.frontier), max(bar.frontier, bar.start)
    parts = [
        f'<rect class="back" x="0" y="0" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"></rect>',
        part("done", bar.start, before),
        part("new", before, frontier),
        part("wait", frontier, bar.end),
        part("halt", bar.halt, bar.halt + max(1, length // 150)) if bar.halt >= bar.start else "",
    ]
    said = safe_text(f"{bar.label}: folded {bar.start} to {bar.frontier}, log end {bar.end}")
    size = f'width="{BAR_WIDTH}" height="{BAR_HEIGHT}" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{said}">{"".join(parts)}</svg>'
