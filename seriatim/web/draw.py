"""Draw: the parts that pages are made of. Pure: values in, safe HTML out.

Everything that came from outside goes through `text` (operations/report_page.py) or an attribute of
`element`, which escape; nothing else makes HTML. There is no style and no script in a page itself,
so the strictest policy holds (app.py).

Next room: streams.py, stream.py and entry.py put these together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from seriatim import __version__
from seriatim.alerts.incidents import Concern
from seriatim.engine.findings import format_duration, shorten
from seriatim.operations.report_page import PAGE_TEXT_MAX, safe_text
from seriatim.operations.stream_status import PartitionStatus, Tone

STRIP_CELL_WIDTH, STRIP_HEIGHT = 10, 16
BAR_WIDTH, BAR_HEIGHT = 1000, 14
CLOCK_SKEW_SECONDS = 60.0
"""By which two clocks may differ."""
STALE_SECONDS = 900.0
"""A look that is older is pointed out: nobody runs or watches."""
NEXT_LINES_MAX = 12


def element(name: str, *inside: str, css: str = "", **attributes: str) -> str:
    """An element around what is safe already; attributes are made safe here. `data_label` is
    data-label.
    """
    given = {
        "class": css,
        **{key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()},
    }
    said = "".join(
        f' {key}="{escape(value, quote=True)}"'
        for key, value in given.items()
        if value or key == "d"
    )
    return f"<{name}{said}>{''.join(inside)}</{name}>"


def page_shell(
    base: str, title: str, crumbs: Sequence[tuple[str, str]], subtitle: str, body: Iterable[str]
) -> str:
    """A whole page. `base`: where the app is mounted; crumbs: label and path, from the first page
    on.
    """
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe_text(title)} · Seriatim</title>"
        f'<link rel="stylesheet" href="{escape(base)}/static/look.css?{__version__}">'
        f'<link rel="icon" href="{escape(base)}/static/mark.svg">'
        f'<script src="{escape(base)}/static/refresh.js?{__version__}"></script>'
    )
    path = " › ".join(link(base, at, label) if at else safe_text(label) for label, at in crumbs)
    top = element(
        "header",
        element("nav", path, css="crumbs") if path else "",
        element("h1", safe_text(title)),
        element("span", safe_text(subtitle), '<span id="stale" role="status"></span>', css="when"),
    )
    main = element(
        "main",
        top,
        *body,
        element("footer", safe_text(f"Seriatim {__version__}")),
        data_fresh="yes",
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{main}\n</body></html>\n'


def link(base: str, path: str, label: str) -> str:
    """A link to a page of ours. The parts of `path` were made by `at`."""
    return element("a", safe_text(label), href=f"{base}{path}")


def chip(label: str, tone: Tone) -> str:
    """A word in a coloured pill."""
    return element("span", safe_text(label), css=f"chip {tone}".strip())


def card(label: str, value: str, tone: Tone = "") -> str:
    """A number at the top."""
    return element(
        "div",
        element("b", safe_text(value), css=tone),
        element("span", safe_text(label)),
        css="card",
    )


def table(columns: Sequence[tuple[str, str]], rows: Iterable[str], *, stack: bool = False) -> str:
    """A table that scrolls by itself where it is too wide; `stack`: on a phone each row is a card."""
    head = element("tr", *(element("th", safe_text(name), css=css) for name, css in columns))
    whole = element(
        "table", element("thead", head), element("tbody", *rows), css="stack" if stack else ""
    )
    return element("div", whole, css="wide")


def cell(inside: str, label: str = "", css: str = "") -> str:
    """A cell around what is safe already; its label is shown on phones."""
    return element("td", inside, css=css, data_label=label)


def concern_box(concern: Concern, stream: str = "") -> str:
    """What needs a person, and what that person types."""
    edge = "need bad-edge" if concern.kind in ("halted", "circuit", "time left", "run") else "need"
    lines = [shorten(line, PAGE_TEXT_MAX) for line in concern.next.splitlines()[:NEXT_LINES_MAX]]
    headline = element(
        "b", safe_text(f"{stream} {concern.key}".strip()), css="bad" if edge != "need" else "warn"
    )
    return element(
        "div", headline, safe_text(concern.text), element("pre", escape("\n".join(lines))), css=edge
    )


def partition_strip(partitions: Sequence[PartitionStatus]) -> str:
    """All partitions in a line, a cell each, by colour: one path for each colour, however many
    there are.
    """
    cells: dict[str, list[str]] = {}
    for number, one in enumerate(partitions):
        x = number * STRIP_CELL_WIDTH
        cells.setdefault(one.tone or "none", []).append(
            f"M{x} 0h{STRIP_CELL_WIDTH - 1}v{STRIP_HEIGHT}h-{STRIP_CELL_WIDTH - 1}z"
        )
    halted = sum(one.halt is not None for one in partitions)
    said = f"{len(partitions)} partitions, {halted} halted"
    width = max(len(partitions), 8) * STRIP_CELL_WIDTH
    return element(
        "svg",
        element("title", safe_text(said)),
        *(element("path", css=tone, d="".join(parts)) for tone, parts in sorted(cells.items())),
        css="strip",
        viewBox=f"0 0 {width} {STRIP_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
    )


def log_bar(partition: PartitionStatus) -> str:
    """A partition's log from start to end, to scale: what is folded, what waits, where it halted."""
    frontier = partition.frontier or 0
    start = partition.log_start or 0
    end = max(frontier, start if partition.log_end is None else partition.log_end)
    length = max(end - start, 1)
    halt = partition.halt.offset if partition.halt else -1

    def part(css: str, begin: int, until: int, least: float = 2.0) -> str:
        if until <= begin:
            return ""
        x, width = (
            (begin - start) / length * BAR_WIDTH,
            max((until - begin) / length * BAR_WIDTH, least),
        )
        x = max(0.0, min(x, BAR_WIDTH - width))
        return f'<rect class="{css}" x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"></rect>'

    said = f"{partition.partition_name}: log {start} to {end}, folded up to {frontier}" + (
        f", halted at {halt}" if halt >= 0 else ""
    )
    return element(
        "svg",
        element("title", safe_text(said)),
        f'<rect class="back" x="0" y="0" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"></rect>',
        part("done", start, max(start, min(frontier, end))),
        part("wait", max(frontier, start), end),
        part("halt", halt, halt + 1, 12.0) if halt >= 0 else "",
        css="bar",
        viewBox=f"0 0 {BAR_WIDTH} {BAR_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=said,
    )


def render_age(then_seconds: float | None, now_seconds: float) -> str:
    """How long ago, as people say it."""
    if not then_seconds:
        return "never"
    passed = now_seconds - then_seconds
    if is_in_future(then_seconds, now_seconds):
        return "the future: a clock is wrong"
    if passed < 10:
        return "just now"
    if passed < 90:
        return f"{passed:.0f} s ago"
    if passed < 5400:
        return f"{passed / 60:.0f} min ago"
    return f"{passed / 3600:.0f} h ago" if passed < 172_800 else f"{passed / 86_400:.0f} days ago"


def is_in_future(then_seconds: float | None, now_seconds: float) -> bool:
    """Whether something says it was made later than now: by a clock, here or there, that is wrong."""
    return (then_seconds or 0.0) > now_seconds + CLOCK_SKEW_SECONDS


def describe_kafka_age(then_seconds: float | None, now_seconds: float) -> str:
    """When Kafka was last asked."""
    if then_seconds is None:
        return "Kafka was not asked yet: run or watch the stream"
    return f"Kafka as of {render_age(then_seconds, now_seconds)}"


def render_time_left(seconds: int | None) -> str:
    """Time left, or that there is no limit to it."""
    return "–" if seconds is None else format_duration(seconds) if seconds else "over"
