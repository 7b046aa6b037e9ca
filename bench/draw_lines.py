"""Line charts as one SVG, side by side. The SVG is plain text, so changes show in a diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
COLOURS = ("#219ebc", "#fb8500", "#2a9d8f", "#d00000", "#6a4c93", "#8d99ae")
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1d3557}.title{font-weight:600;font-size:13px}"
    ".x{text-anchor:middle}.y{text-anchor:end}.grid{stroke:#e9ecef}"
)


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_label: str
    unit: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]  # by name; one value for each x
    log_y: bool = False


def draw(charts: Sequence[Chart]) -> str:
    """Charts two abreast, with one legend: all have the same names of lines."""
    rows = ceil(len(charts) / 2)
    width, height = 2 * WIDTH, rows * HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    ]
    for index, chart in enumerate(charts):
        parts.append(f'<g transform="translate({index % 2 * WIDTH},{index // 2 * HEIGHT})">')
        parts += [*_axes(chart), *_lines(chart), "</g>"]
    at = LEFT
    for name, colour in zip(charts[0].lines, COLOURS, strict=False):
        y = rows * HEIGHT + 14
        parts.append(f'<rect x="{at}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{at + 20}" y="{y}">{escape(name)}</text>')
        at += 40 + 7 * len(name)
    return "\n".join([*parts, "</svg>", ""])


def _ticks(chart: Chart) -> list[float]:
    """Values of the y axis, the lowest and the highest included."""
    values = [v for line in chart.lines.values() for v in line]
    if chart.log_y:
        low, high = floor(log10(max(min(values), 1e-9))), ceil(log10(max(*values, 1e-9)))
        return [10.0**e for e in range(low, max(high, low + 1) + 1)]
    step = 10.0 ** floor(log10(max(*values, 1e-9)))
    while step * 4 > max(values):
        step /= 2
    return [step * i for i in range(ceil(max(values) / step) + 1)]


def _scale(chart: Chart) -> tuple[float, float]:
    ticks = _ticks(chart)
    return (log10(ticks[0]), log10(ticks[-1])) if chart.log_y else (ticks[0], ticks[-1])


def _y(chart: Chart, value: float) -> float:
    low, high = _scale(chart)
    at = log10(max(value, 1e-9)) if chart.log_y else value
    return round(HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def _x(chart: Chart, value: float) -> float:
    low, high = min(chart.x), max(chart.x)
    share = (value - low) / (high - low) if high > low else 0.5
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _axes(chart: Chart) -> list[str]:
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(chart.title)}</text>']
    for tick in _ticks(chart):
        y = _y(chart, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4}">{tick:g} {chart.unit}</text>')
    for value in chart.x:
        x = _x(chart, value)
        parts.append(f'<text class="x" x="{x}" y="{HEIGHT - BOTTOM + 16}">{value:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = escape(chart.x_label)
    parts.append(f'<text class="x" x="{middle}" y="{HEIGHT - BOTTOM + 32}">{label}</text>')
    return parts


def _lines(chart: Chart) -> list[str]:
    parts = []
    for (name, line), colour in zip(chart.lines.items(), COLOURS, strict=False):
        points = [f"{_x(chart, x)},{_y(chart, y)}" for x, y in zip(chart.x, line, strict=True)]
        path = " ".join(points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x, y = point.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">')
            parts.append(f"<title>{escape(name)}</title></circle>")
    return parts
