"""The report of `paceline verify`: a line per check, JSON, and one HTML file with drawn plots.

The HTML asks for nothing else: its style and its plots are inside.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from paceline.commands.report import machine
from paceline.commands.verify_checks import Check, Plot, Result, Status
from paceline.commands.verify_target import About

_NAME_COLUMNS, _STATUS_COLUMNS, _COLUMNS = 14, 16, 110
_PLOT_WIDTH, _PLOT_HEIGHT, _LEFT, _BOTTOM = 640, 180, 60, 22
_STYLE = """
:root { color-scheme: light dark; --holds: #1a7f37; --fails: #cf222e; --other: #777;
  --bar0: #4c78a8; --bar1: #f58518; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0;
  border-bottom: 1px solid #8884 }
td { overflow-wrap: anywhere } td:first-child { white-space: nowrap }
.holds { color: var(--holds) } .fails { color: var(--fails) } .other { color: var(--other) }
svg { width: 100%; height: auto } svg text { fill: currentColor; font-size: 11px }
pre { overflow: auto; font-size: 12px }
"""


@dataclass(frozen=True)
class Line:
    check: Check
    result: Result


@dataclass
class Report:
    """All lines so far. `holds` is the verdict."""

    lines: list[Line] = field(default_factory=list)
    about: About = field(default_factory=lambda: About(""))
    holds: bool = False
    summary: str = ""

    def as_json(self) -> dict[str, Any]:
        checks = [
            {
                "name": line.check.name,
                "shows": line.check.shows,
                "status": line.result.status.value,
                "text": line.result.text,
                "figures": line.result.figures,
                "plots": [asdict(plot) for plot in line.result.plots],
            }
            for line in self.lines
        ]
        verdict = {"holds": self.holds, "summary": self.summary, "checks": checks}
        return verdict | {"engine": asdict(self.about), "machine": machine()}


def print_line(line: Line) -> None:
    """As soon as a check has ended."""
    head = line.check.name.ljust(_NAME_COLUMNS) + line.result.status.ljust(_STATUS_COLUMNS)
    indent = " " * (_NAME_COLUMNS + _STATUS_COLUMNS)
    print(textwrap.fill(head + line.result.text, _COLUMNS, subsequent_indent=indent), flush=True)


def write_report(report: Report, folder: Path) -> None:
    content = report.as_json()
    (folder / "verify.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "verify.html").write_text(_html(report, content), encoding="utf-8")


def _html(report: Report, content: dict[str, Any]) -> str:
    classes = {Status.HOLDS: "holds", Status.FAILS: "fails"}
    rows = "".join(
        f"<tr><td>{escape(line.check.name)}<td>{escape(line.check.shows)}"
        f'<td class="{classes.get(line.result.status, "other")}">{line.result.status}'
        f"<td>{escape(line.result.text)}\n"
        for line in report.lines
    )
    plots = "".join(_svg(plot) for line in report.lines for plot in line.result.plots)
    about = report.about
    facts = (about.model, about.device, about.dtype, ", ".join(about.drafters) or "no drafter")
    verdict = ("holds", "It holds") if report.holds else ("fails", "It does not hold")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>paceline verify: {escape(about.model)}</title><style>{_STYLE}</style>"
        f'<h1 class="{verdict[0]}">{verdict[1]}</h1>'
        f"<p>{escape(' · '.join(fact for fact in facts if fact))}<p>{escape(report.summary)}"
        f"<table><tr><th>check<th>what it shows<th>result<th>figures\n{rows}</table>{plots}"
        f"<details><summary>All figures</summary><pre>{escape(json.dumps(content, indent=2))}"
        "</pre></details></html>\n"
    )


def _svg(plot: Plot) -> str:
    """Bars in groups, with the largest value at the axis. Each bar names its value."""
    top = max((max(values, default=0.0) for values in plot.series.values()), default=0.0) or 1.0
    room = (_PLOT_WIDTH - _LEFT) / max(1, len(plot.labels))
    width = 0.8 * room / len(plot.series)
    floor = _PLOT_HEIGHT - _BOTTOM
    parts = []
    for number, (name, values) in enumerate(plot.series.items()):
        key = _LEFT + 100 * number
        parts.append(f'<rect x="{key}" y="0" width="9" height="9" fill="var(--bar{number})"/>')
        parts.append(f'<text x="{key + 13}" y="9">{escape(name)}</text>')
        for i, value in enumerate(values):
            height = (floor - 16) * value / top
            parts.append(
                f'<rect x="{_LEFT + i * room + number * width:.1f}" y="{floor - height:.1f}" '
                f'width="{width:.1f}" height="{height:.1f}" fill="var(--bar{number})">'
                f"<title>{escape(plot.labels[i])}: {escape(name)} {value:.4g}</title></rect>"
            )
    every = max(1, len(plot.labels) // 12)
    for i in range(0, len(plot.labels), every):
        x = _LEFT + (i + 0.4) * room
        label = escape(plot.labels[i])
        parts.append(f'<text x="{x:.1f}" y="{floor + 14}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="24" text-anchor="end">{top:,.5g}</text>')
    parts.append(f'<path d="M{_LEFT} {floor}H{_PLOT_WIDTH}" stroke="currentColor"/>')
    title, view = escape(plot.title), f"0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}"
    drawn = "".join(parts)
    return f'<h2>{title}</h2><svg role="img" aria-label="{title}" viewBox="{view}">{drawn}</svg>'
