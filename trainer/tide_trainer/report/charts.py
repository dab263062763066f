"""Charts as SVG: lines and stacked bars, with legends and hover texts. Pure; escapes all text that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

from tide_trainer.report.axes import Format, Frame, label_width, padded
from tide_trainer.report.elements import element, joined, svg
from tide_trainer.report.formats import quantity

MAX_POINTS = 240
MAX_BARS = 40
MAX_MARKERS = 40
TONES = 8

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one part of a bar.

    Attributes:
        label: name in the legend.
        points: (x, y); a y of None leaves a gap.
        tone: colour, 1 to 8.
        style: line, dashed, or faint (thin and pale).
        markers: draws each point as a dot.
    """

    label: str
    points: Sequence[Point]
    tone: int = 1
    style: Literal["line", "dashed", "faint"] = "line"
    markers: bool = False

    @property
    def values(self) -> list[float]:
        """All values that are there."""
        return [y for _, y in self.points if y is not None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words, ready for the page.

    Attributes:
        svg: the drawing; empty if there is nothing to draw.
        narrow: a second drawing for small screens, where the text of the first would be too small.
    """

    title: str
    unit: str
    legend: Sequence[Series]
    svg: Markup
    narrow: Markup = field(default_factory=Markup)
    note: str = ""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    x_label: str = "train step",
    zero: bool = True,
    text: Format | None = None,
    y_domain: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
    size: tuple[float, float] = (372, 232),
    note: str = "",
) -> Figure:
    """Lines over train steps.

    Args:
        title: what is shown.
        series: the lines; those without a value are left out.
        unit: unit of the vertical axis.
        x_label: name of the horizontal axis.
        zero: the vertical axis holds 0.
        text: writes a value, for ticks and hover texts.
        y_domain: fixed vertical domain.
        reference: a horizontal line and its label.
        size: width and height in SVG units.
        note: one sentence under the title.
    """
    drawn = [thinned(one) for one in series if one.values]
    if not drawn:
        return Figure(title, unit, [], Markup(), note=note)
    values = [value for one in drawn for value in one.values] + ([reference[0] * 1.15] if reference else [])
    domain = y_domain or padded(values, zero=zero)
    xs = sorted({x for one in drawn for x, _ in one.points})
    frame = Frame(label_width(domain, text), 12, size[0] - 14, size[1] - 42, _spread(xs), domain)
    parts = [frame.y_axis(text), frame.x_axis(x_label)]
    if reference:
        parts.append(reference_line(frame, *reference))
    parts += [line(frame, one) for one in drawn]
    parts.append(hover(frame, xs, drawn, x_label, text or quantity))
    return Figure(title, unit, drawn, svg(*size, _aria(title, drawn, text or quantity), joined(parts)), note=note)


def stacked_bars(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    x_label: str = "train step",
    text: Format | None = None,
    size: tuple[float, float] = (372, 232),
    note: str = "",
) -> Figure:
    """Bars over train steps, one part on the other; neighbouring train steps are averaged where there are many."""
    drawn = [one for one in series if any(one.values)]
    bars = _binned(drawn)
    if not drawn or not bars:
        return Figure(title, unit, [], Markup(), note=note)
    domain = padded([sum(parts.values()) for _, parts in bars], zero=True)
    xs = [x for x, _ in bars]
    gap = min((b - a for a, b in pairwise(xs)), default=1.0)
    frame = Frame(
        label_width(domain, text), 12, size[0] - 14, size[1] - 42, (xs[0] - gap / 2, xs[-1] + gap / 2), domain
    )
    body = [frame.y_axis(text), frame.x_axis(x_label)]
    width = max(1.0, (frame.x(xs[0] + gap) - frame.x(xs[0])) * 0.74) if len(xs) > 1 else 36.0
    width = min(width, 36.0)
    for x, parts in bars:
        base = 0.0
        for one in drawn:
            amount = parts[one.label]
            y, bottom = frame.y(base + amount), frame.y(base)
            if bottom - y > 0.05:
                left = frame.x(x) - width / 2
                fill = f"t{one.tone} fill"
                body.append(element("rect", class_=fill, x=left, y=y, width=width, height=bottom - y))
            base += amount
    totals = [Series(one.label, [(x, parts[one.label]) for x, parts in bars], one.tone) for one in drawn]
    body.append(hover(frame, xs, totals, x_label, text or quantity))
    return Figure(title, unit, drawn, svg(*size, _aria(title, totals, text or quantity), joined(body)), note=note)


def line(frame: Frame, series: Series) -> Markup:
    """One series as a line with gaps, and dots where points stand alone or markers are wanted."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((frame.x(x), frame.y(y)))
    markers = series.markers and len(series.points) <= MAX_MARKERS
    parts: list[Markup] = []
    for run in runs:
        if len(run) > 1:
            path = " ".join(f"{x:g},{y:g}" for x, y in run)
            parts.append(element("polyline", class_=f"t{series.tone} {series.style}", points=path))
        if markers or len(run) == 1:
            radius = 3.4 if markers else 2.2
            parts += [element("circle", class_=f"t{series.tone} dot", cx=x, cy=y, r=radius) for x, y in run]
    return joined(parts)


def reference_line(frame: Frame, value: float, label: str) -> Markup:
    """A dashed horizontal line with its label above its left end."""
    y = frame.y(value)
    label_y = y + 13 if y - frame.top < 14 else y - 5
    return joined(
        [
            element("line", class_="reference", x1=frame.left, x2=frame.right, y1=y, y2=y),
            element("text", label, class_="mark", x=frame.left + 5, y=label_y),
        ]
    )


def hover(frame: Frame, xs: Sequence[float], series: Sequence[Series], x_label: str, text: Format) -> Markup:
    """Invisible columns, one for each x, whose titles list the values there."""
    by_x: list[Mapping[float, float | None]] = [dict(one.points) for one in series]
    edges = [frame.x(x) for x in xs]
    height = frame.bottom - frame.top
    parts: list[Markup] = []
    for index, (x, centre) in enumerate(zip(xs, edges, strict=True)):
        left = (edges[index - 1] + centre) / 2 if index else min(frame.left, centre - 6)
        right = (edges[index + 1] + centre) / 2 if index + 1 < len(edges) else max(frame.right, centre + 6)
        rows = [f"{x_label} {x:g}"]
        for one, values in zip(series, by_x, strict=True):
            value = values.get(x)
            if value is not None:
                rows.append(f"{one.label}: {text(value)}")
        parts.append(
            element(
                "g",
                element("rect", x=left, y=frame.top, width=max(1.0, right - left), height=height),
                element("line", x1=centre, x2=centre, y1=frame.top, y2=frame.bottom),
                element("title", "\n".join(rows)),
                class_="hit",
            )
        )
    return joined(parts)


def thinned(series: Series) -> Series:
    """The same line with at most 240 points: neighbours are averaged, gaps that fill a whole stretch stay."""
    points = list(series.points)
    if len(points) <= MAX_POINTS:
        return series
    size = -(-len(points) // MAX_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        values = [y for _, y in stretch if y is not None]
        kept.append((stretch[-1][0], sum(values) / len(values) if values else None))
    return Series(series.label, kept, series.tone, series.style, series.markers)


def _spread(xs: Sequence[float]) -> tuple[float, float]:
    return (xs[0], xs[-1]) if xs[-1] > xs[0] else (xs[0] - 1, xs[0] + 1)


def _binned(series: Sequence[Series]) -> list[tuple[float, dict[str, float]]]:
    xs = sorted({x for one in series for x, _ in one.points})
    by_x = {one.label: dict(one.points) for one in series}
    size = max(1, -(-len(xs) // MAX_BARS))
    bars: list[tuple[float, dict[str, float]]] = []
    for start in range(0, len(xs), size):
        stretch = xs[start : start + size]
        parts = {label: sum(values.get(x) or 0.0 for x in stretch) / len(stretch) for label, values in by_x.items()}
        bars.append((stretch[-1], parts))
    return bars


def _aria(title: str, series: Sequence[Series], text: Format) -> str:
    words = [f"{one.label} from {text(one.values[0])} to {text(one.values[-1])}" for one in series if one.values]
    return f"{title}: {'; '.join(words)}"
