"""Charts are XML, their points stand where the axis says, and names are escaped."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from paceline.observe.plots import HEIGHT, WIDTH, bars, grid, line_chart, nice_step

SVG = "{http://www.w3.org/2000/svg}"


def elements(picture: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}{kind}"))


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def height_of(picture: str, label: str) -> float:
    """The y of a label of the y axis; the text stands 4 pixels below its line."""
    (found,) = [e for e in elements(picture, "text") if e.text == label and e.get("class") == "y"]
    return number(found, "y") - 4


def test_points_stand_at_the_ticks_of_their_values() -> None:
    picture = line_chart("t", "requests", "ms", {"a": [(4, 20.0), (1, 0.0), (2, 10.0)]})
    points = elements(picture, "circle")
    assert [number(p, "cy") for p in points] == [height_of(picture, t) for t in ("0", "10", "20")]
    x = [number(p, "cx") for p in points]
    assert x[2] - x[1] == pytest.approx(2 * (x[1] - x[0]), abs=0.2)


def test_logarithmic_axes_give_each_factor_the_same_room() -> None:
    points = [(1, 1.0), (2, 10.0), (4, 100.0)]
    picture = line_chart("t", "x", "y", {"a": points}, log_x=True, log_y=True)
    x, y = ([number(p, c) for p in elements(picture, "circle")] for c in ("cx", "cy"))
    assert x[2] - x[1] == pytest.approx(x[1] - x[0], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)


def test_bars_of_twice_the_height_are_twice_as_high() -> None:
    picture = bars("t", "K", "share", {"a": {"1": 0.4, "2": 0.2}, "b": {"2": 0.1}})
    found = {str(r.findtext(f"{SVG}title")): r for r in elements(picture, "rect") if len(r)}
    assert list(found) == ["a, 1: 0.4", "a, 2: 0.2", "b, 2: 0.1"]
    heights = [number(r, "height") for r in found.values()]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[1] == pytest.approx(2 * heights[2], abs=0.2)
    first, second, beside = (number(r, "x") for r in found.values())
    assert first < second < beside


def test_names_of_users_are_text_and_not_markup() -> None:
    picture = line_chart("<b>", "x & y", "z", {"a<script>": [(1, 1.0)]})
    assert "<script>" not in picture
    texts = [e.text for e in elements(picture, "text")]
    assert {"<b>", "x & y", "a<script>"} <= set(texts)


def test_every_key_of_a_long_legend_is_inside_the_picture() -> None:
    names = [f"drafter K={k}" for k in range(8)]
    picture = line_chart("t", "x", "y", {name: [(1, 1.0)] for name in names})
    found = [e for e in elements(picture, "text") if e.text in names]
    assert len(found) == 8
    assert all(number(e, "x") + 6 * len(str(e.text)) <= WIDTH for e in found)
    lowest = max(number(e, "y") for e in found)
    assert lowest < min(number(c, "cy") for c in elements(picture, "circle"))


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1.0, math.nan)]}, {"a": [(0.0, 0.0)]}])
def test_a_chart_without_values_is_still_a_picture(
    series: dict[str, list[tuple[float, float]]],
) -> None:
    for log in (False, True):
        assert elements(line_chart("t", "x", "y", series, log_x=log, log_y=log), "svg")
    assert elements(bars("t", "x", "y", {}), "svg")


def test_a_grid_holds_its_charts_side_by_side() -> None:
    chart = line_chart("t", "x", "y", {"a": [(1, 1.0), (2, 2.0)]})
    whole, *inner = elements(grid([chart, chart, chart]), "svg")
    places = [(number(e, "x"), number(e, "y")) for e in inner]
    assert places == [(0, 0), (WIDTH, 0), (0, HEIGHT)]
    assert (number(whole, "width"), number(whole, "height")) == (2 * WIDTH, 2 * HEIGHT)


def test_steps_of_an_axis_are_round() -> None:
    assert [nice_step(v) for v in (0.7, 1.0, 1.1, 30.0, 0.0004)] == [1, 1, 2, 50, 0.0005]
