"""Pictures of figures, as SVG and without a library: bars for contenders, lines for curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, ROW, LEFT, TOP = 760, 30, 150, 50
INK, PALE, OURS, THEIRS = "#1f2933", "#d9dee4", "#1b7f5c", "#7a8ba0"
OURS_NAMES = ("table", "machine", "table-spark", "machine-spark")
COLOURS = ("#1b7f5c", "#b4552d", "#3b5ea8", "#7a8ba0")


def bars(title: str, figures: Mapping[str, tuple[float, float]]) -> str:
    """One bar per name: as long as the best, with a line up to the median."""
    longest = max(max(pair) for pair in figures.values())
    scale = (WIDTH - LEFT - 90) / longest
    parts = []
    for number, (name, (best, median)) in enumerate(figures.items()):
        y, colour = TOP + number * ROW, OURS if name in OURS_NAMES else THEIRS
        parts.append(_text(LEFT - 10, y + 15, name, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y + 2}" width="{best * scale:.1f}" height="18" fill="{colour}"/>'
        )
        begin, end = LEFT + best * scale, LEFT + median * scale
        line = f'x1="{begin:.1f}" x2="{end:.1f}" y1="{y + 11}" y2="{y + 11}"'
        parts.append(f'<line {line} stroke="{INK}" stroke-width="2"/>')
        parts.append(_text(end + 8, y + 15, f"{best:.1f}"))
    return _page(title, TOP + len(figures) * ROW + 10, parts)


def lines(title: str, across: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves over two logarithmic axes: a straight line at 45 degrees is growth in step."""
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    ys = [y for curve in curves.values() for _, y in curve]
    low, high = log10(xs[0]), log10(xs[-1])
    bottom, top = floor(log10(min(ys))), ceil(log10(max(ys)))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - low) / (high - low or 1)
        return 80 + across * (WIDTH - 140), 320 - (log10(y) - bottom) / (top - bottom or 1) * 260

    parts = [
        _text(at(x, 1)[0], 340, f"{x:,.0f}" if x >= 10 else f"{x:g}", anchor="middle") for x in xs
    ]
    for power in range(bottom, top + 1):
        y = at(xs[0], 10.0**power)[1]
        colour = INK if power == bottom else PALE
        parts.append(
            f'<line x1="80" x2="{WIDTH - 60}" y1="{y:.0f}" y2="{y:.0f}" stroke="{colour}"/>'
        )
        parts.append(_text(72, y + 4, f"{10.0**power:,g}", anchor="end"))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for x, y in (at(*point) for point in curve):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(
            f'<rect x="{90 + number * 220}" y="378" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(_text(108 + number * 220, 389, name))
    parts.append(_text(WIDTH / 2, 362, across, anchor="middle"))
    return _page(title, 400, parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
    )


def _page(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(
        [f'<text x="20" y="28" font-size="16" fill="{INK}">{escape(title)}</text>', *parts]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
