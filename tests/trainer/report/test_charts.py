from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_trainer.report.axes import FONT_WIDTH, padded, tick_text, ticks
from tide_trainer.report.charts import MAX_BARS, MAX_POINTS, Series, line_chart, stacked_bars, thinned

finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(finite, finite, st.integers(1, 10))
def test_ticks_are_few_rise_and_lie_inside(one: float, other: float, num_wanted: int) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, num_wanted)
    slack = (high - low) * 1e-6 + 1e-9
    assert all(low - slack <= value <= high + slack for value in found)
    assert found == sorted(found)
    assert len(found) <= 2 * num_wanted + 2


def test_ticks_are_round() -> None:
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(1, 30, 6, whole=True) == [5, 10, 15, 20, 25, 30]
    assert ticks(1, 3, 10, whole=True) == [1, 2, 3]


@given(st.lists(finite, max_size=20), st.booleans())
def test_a_padded_domain_holds_every_value(values: list[float], zero: bool) -> None:
    low, high = padded(values, zero=zero)
    assert low < high
    slack = (high - low) * 1e-6
    assert all(low - slack <= value <= high + slack for value in values)


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(2.5, 2.5, "2.5"), (0.0, 0.25, "0.00"), (20_000, 10_000, "20k"), (2_000, 1_000, "2,000"), (3e6, 1e6, "3M")],
)
def test_tick_texts(value: float, step: float, text: str) -> None:
    assert tick_text(value, step) == text


@pytest.mark.parametrize("num_steps", [1, 2, 7, 30, 400, 9_000, 12_345])
def test_labels_of_the_horizontal_axis_never_touch(num_steps: int) -> None:
    series = Series("a", [(float(x), float(x % 7)) for x in range(1, num_steps + 1)])
    small = (190.0, 150.0)
    drawn = (line_chart("t", [series]), stacked_bars("t", [series]), line_chart("t", [series], size=small))
    for figure in drawn:
        labels = re.findall(r'<text class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]*)<', figure.svg)
        edges = [(float(x), len(text) * FONT_WIDTH / 2) for x, text in labels]
        assert edges
        for (left, left_half), (right, right_half) in pairwise(edges):
            assert left + left_half < right - right_half


def test_charts_are_well_formed_and_escape_their_words() -> None:
    evil = '<script>alert("x")</script>&'
    series = [Series(evil, [(1, 1.0), (2, None), (3, 2.0)]), Series("b", [(1, 3.0)], 2, markers=True)]
    for figure in (line_chart(evil, series, reference=(2.0, evil)), stacked_bars(evil, series)):
        root = ET.fromstring(figure.svg)
        assert root.get("viewBox")
        assert "<script" not in figure.svg
        assert evil in "".join(root.itertext())


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot() -> None:
    svg = line_chart("t", [Series("a", [(1, 1.0), (2, 2.0), (3, None), (4, 1.0)])]).svg
    assert svg.count("<polyline") == 1
    assert svg.count("<circle") == 1


def test_nothing_to_draw_gives_an_empty_drawing() -> None:
    assert line_chart("t", [Series("a", [(1, None)])]).svg == ""
    assert line_chart("t", []).svg == ""
    assert stacked_bars("t", [Series("a", [(1, 0.0), (2, None)])]).svg == ""


def test_long_runs_are_thinned() -> None:
    series = Series("a", [(float(x), 1.0 if x % 2 else 3.0) for x in range(10_000)])
    assert len(thinned(series).points) <= MAX_POINTS
    assert sum(thinned(series).values) / len(thinned(series).values) == pytest.approx(2.0, abs=0.05)
    assert stacked_bars("t", [series]).svg.count('class="t1 fill"') <= MAX_BARS


def test_stacked_parts_add_up_to_the_axis() -> None:
    svg = stacked_bars("t", [Series("a", [(1, 2.0)], 1), Series("b", [(1, 3.0)], 2)]).svg
    heights = {
        tone: float(height)
        for tone, height in re.findall(r'class="t(\d) fill" x="[^"]*" y="[^"]*" width="[^"]*" height="([\d.]+)"', svg)
    }
    assert heights["2"] / heights["1"] == pytest.approx(1.5, rel=0.01)
