"""The picture of a trace: representative steps, a gap that is seen, text that is XML."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.draw_trace import Run, cut, draw, summary
from paceline.observe.trace import Span
from tests.architecture.source_tree import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def steady(idle_s: float, num_steps: int = 30) -> list[Span]:
    """Steps of 1 ms with `idle_s` between them; the tenth and eleventh take much longer."""
    spans, now_s = [], 0.0
    for step in range(1, num_steps + 1):
        busy_s = 0.02 if step in (10, 11) else 0.001
        spans.append(Span("plan", step, now_s - 0.0002, now_s - 0.0001))
        spans.append(Span("device", step, now_s, now_s + busy_s))
        now_s += busy_s + idle_s
    return spans


def rectangles(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [str(r.findtext(f"{SVG}title")) for r in root.iter(f"{SVG}rect") if len(r)]


def test_the_steps_that_are_shown_are_like_the_others() -> None:
    run = cut("sync", steady(0.0005), 4)
    assert len(run.device) == 4
    assert not {10, 11} & {span.step for span in run.device}
    assert summary(run) == "a step every 1.5 ms, the device idles 500 µs before each (33.3%)"


def test_every_run_is_drawn_with_its_gaps_on_one_scale() -> None:
    runs = [cut("a < b", steady(0.0005), 4), cut("ahead", steady(0.0), 4)]
    picture = draw(runs)
    found = rectangles(picture)
    assert sum(title.startswith("device") for title in found) == 8
    assert any(title.startswith("plan") for title in found)
    assert picture.count(">500 µs</text>") == 3  # between four steps
    assert "a &lt; b: a step every" in picture


def test_too_short_a_trace_is_refused() -> None:
    with pytest.raises(SystemExit, match="too few"):
        cut("short", steady(0.0, num_steps=5), 4)


def test_the_picture_of_the_tour_is_one() -> None:
    path: Path = ROOT / "docs/images/run_ahead.svg"
    assert len(rectangles(path.read_text(encoding="utf-8"))) > 20


def test_a_run_knows_its_lanes_in_the_order_of_a_turn() -> None:
    run = Run("x", [Span("device", 1, 0, 1), Span("commit", 1, 0, 1), Span("plan", 1, 0, 1)])
    assert run.lanes == ["plan", "commit", "device"]
