"""Draws traces of `paceline bench --trace` as one SVG, one run below the other on one time scale.

usage: python docs/draw_trace.py OUT.svg "run-ahead 0=sync.json" "run-ahead 1=ahead.json"

Shows a few typical steps of each run. The SVG is plain text, so changes show in a diff. Needs only
Paceline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median

from paceline.observe.plots import document, nice_step
from paceline.observe.trace import LANES, Span

WIDTH, LEFT, RIGHT = 960, 84, 16
LANE_HEIGHT, BAR_HEIGHT = 22, 16
HEADER, AXIS, GAP = 30, 26, 22
# Steps alternate between two colours, to show which stages belong together.
COLOURS = {"host": ("#8ecae6", "#219ebc"), "device": ("#ffb703", "#fb8500")}
WAIT, IDLE = "#e9ecef", "#d00000"
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1d3557}.title{font-weight:600;font-size:13px}"
    ".lane{text-anchor:end}.bar{text-anchor:middle;font-size:10px}"
    f".idle{{text-anchor:middle;font-size:10px;fill:{IDLE}}}.tick{{text-anchor:middle}}"
)


def read_chrome_trace(path: Path) -> list[Span]:
    """The spans of a file that `write_chrome_trace` wrote, in its order."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Span(
            e["cat"],
            e["args"]["step"],
            e["ts"] / 1e6,
            (e["ts"] + e["dur"]) / 1e6,
            (e["pid"] - 1) // 2,  # two processes of the trace for each replica
        )
        for e in events
        if e["ph"] == "X"
    ]


@dataclass(frozen=True)
class Run:
    """A few steady steps; times in seconds since the first one."""

    title: str
    spans: list[Span]

    @property
    def device(self) -> list[Span]:
        return [span for span in self.spans if span.lane == "device"]

    @property
    def length_s(self) -> float:
        return max(span.end_s for span in self.spans)

    @property
    def lanes(self) -> list[str]:
        used = {span.lane for span in self.spans}
        return [lane for lane in LANES if lane in used]

    @property
    def height(self) -> int:
        return HEADER + LANE_HEIGHT * len(self.lanes)


def cut(title: str, spans: Sequence[Span], num_steps: int) -> Run:
    """The `num_steps` steps whose length and idle share are closest to those of the whole run."""
    device = [span for span in spans if span.lane == "device"]
    if len(device) < num_steps + 2:
        raise SystemExit(f"{title}: {len(device)} steps are too few to show {num_steps}")
    periods = [b.start_s - a.start_s for a, b in pairwise(device)]
    idle = [max(b.start_s - a.end_s, 0.0) for a, b in pairwise(device)]
    usual_s = median(periods) * num_steps
    # Without the pauses between two batches.
    steps = [i for i, period_s in enumerate(periods) if period_s < 3 * median(periods)]
    usual_idle = sum(idle[i] for i in steps) / sum(periods[i] for i in steps)

    def strangeness(first: int) -> float:
        length_s = sum(periods[first : first + num_steps])
        idle_share = sum(idle[first : first + num_steps]) / length_s
        return abs(length_s / usual_s - 1) + abs(idle_share - usual_idle)

    first = min(range(len(periods) - num_steps), key=strangeness)
    start_s = device[first].start_s
    end_s = device[first + num_steps].start_s
    kept = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    shifted = [
        Span(s.lane, s.step, max(s.start_s, start_s) - start_s, min(s.end_s, end_s) - start_s)
        for s in kept
    ]
    return Run(title, shifted)


def draw(runs: Sequence[Run]) -> str:
    length_s = max(run.length_s for run in runs)
    scale = (WIDTH - LEFT - RIGHT) / length_s
    height = sum(run.height + GAP for run in runs) + AXIS
    parts: list[str] = []
    top = 0
    for run in runs:
        parts += _draw_run(run, top, scale)
        top += run.height + GAP
    parts += _draw_axis(length_s, top, scale)
    return document(WIDTH, height, parts, STYLE)


def _draw_run(run: Run, top: int, scale: float) -> list[str]:
    caption = escape(f"{run.title}: {summary(run)}")
    parts = [f'<text class="title" x="{LEFT}" y="{top + 20}">{caption}</text>']
    for row, lane in enumerate(run.lanes):
        y = top + HEADER + row * LANE_HEIGHT
        parts.append(f'<text class="lane" x="{LEFT - 8}" y="{y + 12}">{lane}</text>')
        spans = [span for span in run.spans if span.lane == lane]
        parts += [part for span in spans for part in _draw_span(span, y, scale)]
        if lane == "device":
            parts += [part for a, b in pairwise(spans) for part in _draw_idle(a, b, y, scale)]
    return parts


def _draw_span(span: Span, y: int, scale: float) -> list[str]:
    x, width = LEFT + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.6)
    shades = COLOURS["device" if span.lane == "device" else "host"]
    colour = WAIT if span.lane == "wait" else shades[span.step % 2]
    parts = [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}">'
        f"<title>{span.lane} {span.step}: {(span.end_s - span.start_s) * 1e6:.0f} µs</title></rect>"
    ]
    if width > 24:
        parts.append(f'<text class="bar" x="{x + width / 2:.1f}" y="{y + 12}">{span.step}</text>')
    return parts


def _draw_idle(before: Span, after: Span, y: int, scale: float) -> list[str]:
    idle_s = after.start_s - before.end_s
    x, width = LEFT + before.end_s * scale, idle_s * scale
    if width < 1.0:
        return []
    line = y + BAR_HEIGHT / 2
    parts = [
        f'<line x1="{x:.1f}" y1="{line}" x2="{x + width:.1f}" y2="{line}" stroke="{IDLE}" '
        'stroke-width="2"/>'
    ]
    if width > 6.0:
        below = y + BAR_HEIGHT + 11
        text = f'<text class="idle" x="{x + width / 2:.1f}" y="{below}">{_time(idle_s)}</text>'
        parts.append(text)
    return parts


def _draw_axis(length_s: float, top: int, scale: float) -> list[str]:
    step_s = nice_step(length_s / 8)
    parts = []
    for number in range(int(length_s / step_s) + 1):
        x = LEFT + number * step_s * scale
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{top + 10}">{_time(number * step_s)}</text>'
        )
        parts.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{top - 6}" stroke="#1d3557" '
            'stroke-opacity="0.08"/>'
        )
    return parts


def summary(run: Run) -> str:
    """Of the steps that are shown; the last one's successor is not."""
    idle_s = [max(b.start_s - a.end_s, 0.0) for a, b in pairwise(run.device)]
    step_s = [b.start_s - a.start_s for a, b in pairwise(run.device)]
    share = sum(idle_s) / sum(step_s)
    return (
        f"a step every {_time(median(step_s))}, the device idles {_time(median(idle_s))} "
        f"before each ({share:.1%})"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="TITLE=TRACE")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    named = [text.rpartition("=") for text in args.runs]
    runs = [cut(title, read_chrome_trace(Path(path)), args.steps) for title, _, path in named]
    args.out.write_text(draw(runs), encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
