"""Pictures of figures, as SVG and without a library: bars for contenders, lines for curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, BAR_STEP, BARS_LEFT, BARS_TOP = 760, 30, 150, 50
PLOT_LEFT, PLOT_RIGHT, PLOT_BOTTOM, PLOT_HEIGHT = 80, WIDTH - 60, 320, 260
LEGEND_STEP = 220
INK, PALE, OURS, THEIRS = "#1f2933", "#d9dee4", "#1b7f5c", "#7a8ba0"
OURS_NAMES = ("table", "machine", "table-spark", "machine-spark")
COLOURS = ("#1b7f5c", "#b4552d", "#3b5ea8", "#7a8ba0")
Point = tuple[float, float]


def bar_chart(title: str, figures: Mapping[str, Point]) -> str:
    """One bar per name: as long as the best figure, with a line up to the median."""
    longest = max(max(pair) for pair in figures.values())
    scale = (WIDTH - BARS_LEFT - 90) / longest
    elements = []
    for number, (name, (best, median)) in enumerate(figures.items()):
        y = BARS_TOP + number * BAR_STEP
        colour = OURS if name in OURS_NAMES else THEIRS
        best_end = BARS_LEFT + best * scale
        median_end = BARS_LEFT + median * scale
        elements.append(_text(BARS_LEFT - 10, y + 15, name, anchor="end"))
        elements.append(
            f'<rect x="{BARS_LEFT}" y="{y + 2}" width="{best * scale:.1f}" height="18" '
            f'fill="{colour}"/>'
        )
        elements.append(
            f'<line x1="{best_end:.1f}" x2="{median_end:.1f}" y1="{y + 11}" y2="{y + 11}" '
            f'stroke="{INK}" stroke-width="2"/>'
        )
        elements.append(_text(median_end + 8, y + 15, f"{best:.1f}"))
    height = BARS_TOP + len(figures) * BAR_STEP + 10
    return _page(title, height, elements)


def line_chart(title: str, x_title: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """Curves over two logarithmic axes: a straight line at 45 degrees is growth in step."""
    axes = _Axes(curves)
    elements = axes.x_labels() + axes.y_lines()
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [axes.position(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for x, y in points:
            elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        legend_x = 90 + number * LEGEND_STEP
        elements.append(f'<rect x="{legend_x}" y="378" width="12" height="12" fill="{colour}"/>')
        elements.append(_text(legend_x + 18, 389, name))
    elements.append(_text(WIDTH / 2, 362, x_title, anchor="middle"))
    return _page(title, 400, elements)


class _Axes:
    """Two logarithmic axes that have room for all points of some curves."""

    def __init__(self, curves: Mapping[str, Sequence[Point]]) -> None:
        points = [point for curve in curves.values() for point in curve]
        self.xs = sorted({x for x, _ in points})
        ys = [y for _, y in points]
        self.x_low = log10(self.xs[0])
        self.x_span = log10(self.xs[-1]) - self.x_low or 1
        self.y_low = floor(log10(min(ys)))
        self.y_high = ceil(log10(max(ys)))
        self.y_span = self.y_high - self.y_low or 1

    def position(self, x: float, y: float) -> Point:
        """Where a point lies in the picture."""
        x_share = (log10(x) - self.x_low) / self.x_span
        y_share = (log10(y) - self.y_low) / self.y_span
        return PLOT_LEFT + x_share * (PLOT_RIGHT - PLOT_LEFT), PLOT_BOTTOM - y_share * PLOT_HEIGHT

    def x_labels(self) -> list[str]:
        """The amounts below the plot."""
        labels = []
        for x in self.xs:
            x_position, _ = self.position(x, 1)
            label = f"{x:,.0f}" if x >= 10 else f"{x:g}"
            labels.append(_text(x_position, 340, label, anchor="middle"))
        return labels

    def y_lines(self) -> list[str]:
        """A line across the plot for every power of ten, with its number."""
        elements = []
        for power in range(self.y_low, self.y_high + 1):
            _, y = self.position(self.xs[0], 10.0**power)
            colour = INK if power == self.y_low else PALE
            elements.append(
                f'<line x1="{PLOT_LEFT}" x2="{PLOT_RIGHT}" y1="{y:.0f}" y2="{y:.0f}" '
                f'stroke="{colour}"/>'
            )
            elements.append(_text(72, y + 4, f"{10.0**power:,g}", anchor="end"))
        return elements


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
    )


def _page(title: str, height: float, elements: Sequence[str]) -> str:
    title_element = f'<text x="20" y="28" font-size="16" fill="{INK}">{escape(title)}</text>'
    body = "\n".join([title_element, *elements])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
