"""Line charts and bar charts as SVG text, without a library. A change of one shows in a diff.

Each chart is a complete SVG document. It may also stand in an HTML page, or in `grid`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 58, 46
COLOURS = ("#219ebc", "#fb8500", "#2a9d8f", "#d00000", "#6a4c93", "#8d99ae", "#b5651d", "#1d3557")
STYLE = (
    ".plot text{font:11px system-ui,sans-serif;fill:#1d3557}"
    ".plot .title{font-weight:600;font-size:13px}.plot .x{text-anchor:middle}"
    ".plot .y{text-anchor:end}.plot .grid{stroke:#e9ecef}"
)


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """One line through the (x, y) points of each name. The y axis begins at 0 unless log_y."""
    lines = {name: sorted(p for p in points if isfinite(p[1])) for name, points in series.items()}
    found = [point for points in lines.values() for point in points]
    shown = sorted({x for x, _ in found})
    across = _Scale(shown or [0.0], LEFT, WIDTH - RIGHT, log_x)
    up = _Scale(_ticks([y for _, y in found], log_y), HEIGHT - BOTTOM, TOP, log_y)
    parts = [*_frame(title, x_label, y_label, up), *_legend(list(lines))]
    parts += _x_labels({across.at(x): f"{x:.3g}" for x in shown})
    for (name, points), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        path = " ".join(f"{across.at(x)},{up.at(y)}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            parts.append(f'<circle cx="{across.at(x)}" cy="{up.at(y)}" r="3" fill="{colour}">')
            parts.append(f"<title>{escape(name)}: {x:.3g}, {y:.3g}</title></circle>")
    return document(WIDTH, HEIGHT, parts)


def bars(title: str, x_label: str, y_label: str, series: Mapping[str, Mapping[str, float]]) -> str:
    """One group of bars for each x, one bar for each name: {name: {x: height}}, none below 0."""
    places = list(dict.fromkeys(x for heights in series.values() for x in heights))
    up = _Scale(_ticks([v for h in series.values() for v in h.values()]), HEIGHT - BOTTOM, TOP)
    group = (WIDTH - LEFT - RIGHT) / max(len(places), 1)
    width = group * 0.8 / max(len(series), 1)
    parts = [*_frame(title, x_label, y_label, up), *_legend(list(series))]
    parts += _x_labels({round(LEFT + (i + 0.5) * group, 1): x for i, x in enumerate(places)})
    for number, (name, heights) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        for x, height in heights.items():
            left = LEFT + (places.index(x) + 0.1) * group + number * width
            top, note = up.at(height), escape(f"{name}, {x}: {height:.3g}")
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{up.at(0.0) - top:.1f}" fill="{colour}"><title>{note}</title></rect>'
            )
    return document(WIDTH, HEIGHT, parts)


def grid(charts: Sequence[str], columns: int = 2) -> str:
    """Charts of this module in one document, row by row."""
    parts = [
        chart.replace("<svg ", f'<svg x="{i % columns * WIDTH}" y="{i // columns * HEIGHT}" ', 1)
        for i, chart in enumerate(charts)
    ]
    return document(columns * WIDTH, ceil(len(charts) / columns) * HEIGHT, parts)


def document(width: int, height: int, parts: Sequence[str], style: str = STYLE) -> str:
    """A complete SVG with a white background."""
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width} {height}"'
    opening = f'{head} {size} role="img"><style>{style}</style>'
    return "\n".join([opening, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>", ""])


def nice_step(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(max(value, 1e-12)))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to pixels. The first and the last of `ticks` are at `start` and `end`."""

    ticks: Sequence[float]
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self.is_log and low > 0:
            low, high, at = log10(low), log10(high), log10(max(value, low))
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def _ticks(values: Sequence[float], is_log: bool = False) -> list[float]:
    """Values of the y axis, the lowest and the highest included."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if is_log and low > 0:
        first = floor(log10(low))
        return [10.0**e for e in range(first, max(ceil(log10(high)), first + 1) + 1)]
    step = nice_step(max(high, -low, 1e-9) / 5)
    return [step * i for i in range(min(floor(low / step), 0), max(ceil(high / step), 1) + 1)]


def _frame(title: str, x_label: str, y_label: str, up: _Scale) -> list[str]:
    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>']
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4}">{tick:g}</text>')
    x, y = (LEFT + WIDTH - RIGHT) // 2, (TOP + HEIGHT - BOTTOM) // 2
    turned = f'x="14" y="{y}" transform="rotate(-90 14 {y})"'
    parts.append(f'<text class="x" x="{x}" y="{HEIGHT - 10}">{escape(x_label)}</text>')
    return [*parts, f'<text class="x" {turned}>{escape(y_label)}</text>']


def _x_labels(texts: Mapping[float, str]) -> list[str]:
    """The texts at these x; at most ten of them."""
    y, each = HEIGHT - BOTTOM + 16, ceil(len(texts) / 10) or 1
    shown = list(texts.items())[::each]
    return [f'<text class="x" x="{x}" y="{y}">{escape(text)}</text>' for x, text in shown]


def _legend(names: Sequence[str]) -> list[str]:
    """One key after the other below the title, with a second row if they are many."""
    parts, x, y = [], LEFT, 30
    for name, colour in zip(names, cycle(COLOURS), strict=False):
        width = 30 + 6 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 13
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 6}">{escape(name)}</text>')
        x += width
    return parts
