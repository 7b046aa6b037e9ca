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
from paceline.commands.verify_checks import Check, Result, Status
from paceline.commands.verify_target import About
from paceline.observe.plots import bars

_NAME_COLUMNS, _STATUS_COLUMNS, _COLUMNS = 14, 16, 110
_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # not needed in HTML
_STYLE = """
:root { color-scheme: light dark; --holds: #1a7f37; --fails: #cf222e; --other: #777 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0;
  border-bottom: 1px solid #8884 }
td { overflow-wrap: anywhere } td:first-child { white-space: nowrap }
.holds { color: var(--holds) } .fails { color: var(--fails) } .other { color: var(--other) }
svg { max-width: 100%; height: auto; margin: 1rem 1rem 0 0 }
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
    plots = "".join(
        bars(plot.title, plot.x_label, plot.y_label, plot.series).replace(_NAMESPACE, "")
        for line in report.lines
        for plot in line.result.plots
    )
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
