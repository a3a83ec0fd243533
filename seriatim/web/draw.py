"""Draw: the parts of which pages are made. Pure: values in, safe HTML out.

Everything that came from outside goes through `safe_text` (operations/report_page.py) or an
attribute of `element`, which escape it; nothing else makes HTML. There is no style and no script in
a page itself, so that the strictest content policy holds (web/app.py).

Next: web/streams.py, web/stream.py and web/entry.py put these together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from seriatim import __version__
from seriatim.alerts.incidents import Concern
from seriatim.engine.findings import format_duration, shorten
from seriatim.operations.report_page import PAGE_TEXT_MAX, safe_text
from seriatim.operations.stream_status import PartitionStatus, Tone

STRIP_CELL_WIDTH = 10
STRIP_HEIGHT = 16
STRIP_CELLS_MIN = 8
"""A strip is at least so many cells wide: one partition should not fill it."""
BAR_WIDTH = 1000
BAR_HEIGHT = 14
BAR_SEGMENT_WIDTH_MIN = 2.0
"""A segment is at least so wide, to be visible at all."""
BAR_HALT_WIDTH_MIN = 12.0
CLOCK_SKEW_SECONDS = 60.0
"""How far two clocks may differ."""
STALE_SECONDS = 900.0
"""An older observation of Kafka is pointed out: nothing runs or watches the stream."""
NEXT_LINES_MAX = 12
"""Lines of advice that a concern shows, at most."""
URGENT_CONCERNS = ("halted", "circuit", "time left", "run")


def element(name: str, *children: str, css: str = "", **attributes: str) -> str:
    """An HTML element around children that are safe already. Attributes are escaped here.

    The attribute `data_label` becomes data-label. Empty attributes are left out.
    """
    text = f"<{name}"
    if css:
        text += f' class="{escape(css, quote=True)}"'
    for key, value in attributes.items():
        # `d`, the line of an SVG path, is needed even if it is empty.
        if value or key == "d":
            attribute = key.rstrip("_").replace("_", "-")
            text += f' {attribute}="{escape(value, quote=True)}"'
    return f"{text}>{''.join(children)}</{name}>"


def text_element(name: str, content: object, css: str = "") -> str:
    """An HTML element around text, which is escaped here."""
    return element(name, safe_text(content), css=css)


def page_shell(
    base: str, title: str, crumbs: Sequence[tuple[str, str]], subtitle: str, body: Iterable[str]
) -> str:
    """A complete page.

    `base` is where the app is mounted. `crumbs` are labels and paths of the pages above this one.
    """
    static = f"{escape(base)}/static"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe_text(title)} · Seriatim</title>"
        f'<link rel="stylesheet" href="{static}/look.css?{__version__}">'
        f'<link rel="icon" href="{static}/mark.svg">'
        f'<script src="{static}/refresh.js?{__version__}"></script>'
    )
    main = element(
        "main",
        _page_header(base, title, crumbs, subtitle),
        *body,
        text_element("footer", f"Seriatim {__version__}"),
        data_fresh="yes",
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{main}\n</body></html>\n'


def _page_header(base: str, title: str, crumbs: Sequence[tuple[str, str]], subtitle: str) -> str:
    crumb_links = []
    for label, path in crumbs:
        crumb_links.append(link(base, path, label) if path else safe_text(label))
    navigation = ""
    if crumb_links:
        navigation = element("nav", " › ".join(crumb_links), css="crumbs")
    stale_note = '<span id="stale" role="status"></span>'
    return element(
        "header",
        navigation,
        text_element("h1", title),
        element("span", safe_text(subtitle), stale_note, css="when"),
    )


def link(base: str, path: str, label: str) -> str:
    """A link to a page of this app. `path` comes from `address.page_path`."""
    return element("a", safe_text(label), href=f"{base}{path}")


def chip(label: str, tone: Tone) -> str:
    """A word on a coloured background."""
    return text_element("span", label, css=f"chip {tone}".strip())


def card(label: str, value: str, tone: Tone = "") -> str:
    """A number with its label, for the top of a page."""
    number = text_element("b", value, css=tone)
    return element("div", number, text_element("span", label), css="card")


def table(columns: Sequence[tuple[str, str]], rows: Iterable[str], *, stack: bool = False) -> str:
    """A table that scrolls sideways where it is too wide. `columns` are names and CSS classes.

    With `stack`, each row is shown as a card on a phone.
    """
    headings = [text_element("th", name, css=css) for name, css in columns]
    head = element("thead", element("tr", *headings))
    body = element("tbody", *rows)
    return element("div", element("table", head, body, css="stack" if stack else ""), css="wide")


def cell(content: str, label: str = "", css: str = "") -> str:
    """A table cell around content that is safe already. Its label is shown on phones."""
    return element("td", content, css=css, data_label=label)


def number_cell(content: object, label: str) -> str:
    """A table cell with a number, or with text that is aligned like one."""
    return cell(safe_text(content), label, "number")


def render_number(value: int | None) -> str:
    """A number with separators; a dash for one that is not known."""
    if value is None:
        return "–"
    return f"{value:,}"


def concern_box(concern: Concern, stream: str = "") -> str:
    """A problem that needs a person, and the command for it."""
    is_urgent = concern.kind in URGENT_CONCERNS
    headline = text_element(
        "b", f"{stream} {concern.key}".strip(), css="bad" if is_urgent else "warn"
    )
    advice_lines = concern.next.splitlines()[:NEXT_LINES_MAX]
    advice = "\n".join(shorten(line, PAGE_TEXT_MAX) for line in advice_lines)
    return element(
        "div",
        headline,
        safe_text(concern.text),
        # Not `safe_text`, which would cut the advice as if it were one line.
        element("pre", escape(advice)),
        css="need bad-edge" if is_urgent else "need",
    )


def partition_strip(partitions: Sequence[PartitionStatus]) -> str:
    """All partitions in a line, each a cell in its colour."""
    # One path for each colour: thousands of elements would make the page slow.
    path_by_tone: dict[str, str] = {}
    cell_width = STRIP_CELL_WIDTH - 1
    for i, partition in enumerate(partitions):
        tone = partition.tone or "none"
        rectangle = f"M{i * STRIP_CELL_WIDTH} 0h{cell_width}v{STRIP_HEIGHT}h-{cell_width}z"
        path_by_tone[tone] = path_by_tone.get(tone, "") + rectangle
    halted = sum(partition.halt is not None for partition in partitions)
    description = f"{len(partitions)} partitions, {halted} halted"
    width = max(len(partitions), STRIP_CELLS_MIN) * STRIP_CELL_WIDTH
    paths = [element("path", css=tone, d=path) for tone, path in sorted(path_by_tone.items())]
    return element(
        "svg",
        text_element("title", description),
        *paths,
        css="strip",
        viewBox=f"0 0 {width} {STRIP_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )


def log_bar(partition: PartitionStatus) -> str:
    """A partition's log from start to end, to scale: what is folded, what waits, where it halted."""
    start = partition.log_start or 0
    frontier = partition.frontier or 0
    log_end = start if partition.log_end is None else partition.log_end
    end = max(frontier, log_end)
    folded_end = max(start, min(frontier, end))
    description = f"{partition.partition_name}: log {start} to {end}, folded up to {frontier}"
    segments = [
        f'<rect class="back" x="0" y="0" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"></rect>',
        _bar_segment("done", (start, folded_end), (start, end), BAR_SEGMENT_WIDTH_MIN),
        _bar_segment("wait", (max(frontier, start), end), (start, end), BAR_SEGMENT_WIDTH_MIN),
    ]
    if partition.halt is not None and partition.halt.offset >= 0:
        halt = partition.halt.offset
        description += f", halted at {halt}"
        segments.append(_bar_segment("halt", (halt, halt + 1), (start, end), BAR_HALT_WIDTH_MIN))
    return element(
        "svg",
        text_element("title", description),
        *segments,
        css="bar",
        viewBox=f"0 0 {BAR_WIDTH} {BAR_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )


def _bar_segment(
    css: str, offsets: tuple[int, int], log_offsets: tuple[int, int], width_min: float
) -> str:
    """A range of offsets of a log as a rectangle, at least `width_min` wide; "" if it is empty."""
    start, end = offsets
    log_start, log_end = log_offsets
    if end <= start:
        return ""
    scale = BAR_WIDTH / max(log_end - log_start, 1)
    width = max((end - start) * scale, width_min)
    # A segment that was widened at the end of the bar must not stick out of it.
    x = max(0.0, min((start - log_start) * scale, BAR_WIDTH - width))
    return (
        f'<rect class="{css}" x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR_HEIGHT}"></rect>'
    )


def render_age(then_seconds: float | None, now_seconds: float) -> str:  # noqa: PLR0911  # one per unit
    """How long ago something was, in words for people."""
    if not then_seconds:
        return "never"
    if is_in_future(then_seconds, now_seconds):
        return "the future: a clock is wrong"
    age_seconds = now_seconds - then_seconds
    if age_seconds < 10:
        return "just now"
    if age_seconds < 90:
        return f"{age_seconds:.0f} s ago"
    if age_seconds < 5400:
        return f"{age_seconds / 60:.0f} min ago"
    if age_seconds < 172_800:
        return f"{age_seconds / 3600:.0f} h ago"
    return f"{age_seconds / 86_400:.0f} days ago"


def is_in_future(then_seconds: float | None, now_seconds: float) -> bool:
    """Whether a time lies later than now. Then a clock is wrong, on this host or on another."""
    return (then_seconds or 0.0) > now_seconds + CLOCK_SKEW_SECONDS


def describe_kafka_age(then_seconds: float | None, now_seconds: float) -> str:
    """When Kafka was last asked."""
    if then_seconds is None:
        return "Kafka was not asked yet: run or watch the stream"
    return f"Kafka as of {render_age(then_seconds, now_seconds)}"


def render_time_left(seconds: int | None) -> str:
    """The time that is left; a dash if there is no limit."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "over"
    return format_duration(seconds)
