"""Pictures of figures, as SVG and without a library: bars for contenders, lines for curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

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
        parts.append(f'<rect x="{LEFT}" y="{y + 2}" width="{best * scale:.1f}" height="18" fill="{colour}"/>')
        end = LEFT + median * scale
        parts.append(f'<line x1="{LEFT}" x2="{end:.1f}" y1="{y + 11}" y2="{y + 11}" stroke="{INK}" stroke-width="2"/>')
        parts.append(_text(end + 8, y + 15, f"{best:.1f}"))
    return _page(title, TOP + len(figures) * ROW + 10, parts)


def lines(title: str, across: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves over a logarithmic axis, from nought upward."""
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    highest = max(y for curve in curves.values() for _, y in curve) * 1.1
    low, high = log10(xs[0]), log10(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        return 80 + (log10(x) - low) / (high - low or 1) * (WIDTH - 140), 320 - y / highest * 260

    parts = [f'<line x1="80" x2="{WIDTH - 60}" y1="320" y2="320" stroke="{INK}"/>']
    parts += [_text(at(x, 0)[0], 340, f"{x:,.0f}" if x >= 10 else f"{x:g}", anchor="middle") for x in xs]
    for part in range(1, 5):
        y = highest * part / 4
        parts.append(f'<line x1="80" x2="{WIDTH - 60}" y1="{at(1, y)[1]:.0f}" y2="{at(1, y)[1]:.0f}" stroke="{PALE}"/>')
        parts.append(_text(72, at(1, y)[1] + 4, f"{y:.3g}", anchor="end"))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (at(*point) for point in curve):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<rect x="{90 + number * 220}" y="378" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(108 + number * 220, 389, name))
    parts.append(_text(WIDTH / 2, 362, across, anchor="middle"))
    return _page(title, 400, parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def _page(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join([f'<text x="20" y="28" font-size="16" fill="{INK}">{escape(title)}</text>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
