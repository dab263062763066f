"""The frame of a chart: scales, ticks, grid and axis labels, as SVG text. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tide_trainer.report.elements import element, joined

Format = Callable[[float], str]

FONT_WIDTH = 6.6  # an average digit at 11 units, rounded up


def ticks(low: float, high: float, num_wanted: int, *, whole: bool = False) -> list[float]:
    """Round numbers that cover `low` to `high`: 1, 2, 2.5 or 5 times a power of ten apart.

    Args:
        low: smallest value.
        high: largest value; at least `low`.
        num_wanted: about how many ticks; at most twice as many come.
        whole: only whole numbers, for counts.
    """
    span = high - low
    if not math.isfinite(span) or span <= 1e-13 * max(abs(low), abs(high), 1e-200):
        return [low]
    while True:
        raw = span / max(1, num_wanted)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * 0.999)
        if whole:
            step = max(1.0, float(math.ceil(step)))
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last >= first or (whole and step <= 1.0):
            return [float(f"{index * step:.12g}") for index in range(first, last + 1)]
        num_wanted *= 2


def padded(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    """A domain that holds all values and ends on a round number.

    Args:
        values: finite numbers; may be empty.
        zero: True if the domain must hold 0 (amounts); False for values without a natural zero.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 if abs(high) > 1e-9 else 1.0
        low, high = (low if zero and low >= 0 else low - margin), high + margin
    found = ticks(low, high, 4)
    if len(found) < 2:
        return low, high
    step = found[1] - found[0]
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_text(value: float, step: float) -> str:
    """A tick's label with as many decimals as its step needs; thousands as k, millions as M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.6g}{suffix}" if step >= unit / 10 else f"{value:,.0f}"
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9)) if step > 0 else 0
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return f"{value:.1e}" if decimals > 4 else f"{value:,.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot area inside an SVG: maps values to units and draws its grid and axes.

    Attributes:
        left, top, right, bottom: edges of the plot area in SVG units.
        x_domain, y_domain: values at the edges.
    """

    left: float
    top: float
    right: float
    bottom: float
    x_domain: tuple[float, float]
    y_domain: tuple[float, float]

    def x(self, value: float) -> float:
        """The horizontal position of a value."""
        low, high = self.x_domain
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """The vertical position of a value."""
        low, high = self.y_domain
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.bottom - share * (self.bottom - self.top), 1)

    def y_axis(self, text: Format | None = None, *, num_ticks: int = 4, labels: bool = True) -> Markup:
        """Grid lines with their labels at the left; `labels=False` draws the grid alone."""
        found = ticks(*self.y_domain, num_ticks)
        step = found[1] - found[0] if len(found) > 1 else abs(found[0]) or 1.0
        parts: list[Markup] = []
        for value in found:
            y = self.y(value)
            parts.append(element("line", class_="gridline", x1=self.left, x2=self.right, y1=y, y2=y))
            if labels:
                label = text(value) if text else tick_text(value, step)
                parts.append(element("text", label, class_="tick", x=self.left - 7, y=y + 3.8, text_anchor="end"))
        return joined(parts)

    def x_axis(self, label: str, *, whole: bool = True) -> Markup:
        """The base line, ticks as far apart as their labels need, and the label underneath."""
        low, high = self.x_domain
        width = self.right - self.left
        widest = len(tick_text(high, 1.0)) * FONT_WIDTH + 22
        found = ticks(low, high, max(1, min(10, int(width / widest))), whole=whole)
        step = found[1] - found[0] if len(found) > 1 else 1.0
        base = self.bottom
        parts = [element("line", class_="axis", x1=self.left, x2=self.right, y1=base, y2=base)]
        for value in found:
            x = self.x(value)
            parts.append(element("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 4))
            mark = tick_text(value, step)
            parts.append(element("text", mark, class_="tick", x=x, y=base + 16, text_anchor="middle"))
        middle = (self.left + self.right) / 2
        parts.append(element("text", label, class_="name", x=middle, y=base + 33, text_anchor="middle"))
        return joined(parts)


def label_width(domain: tuple[float, float], text: Format | None = None, *, num_ticks: int = 4) -> float:
    """Room that the labels of a vertical axis need, in SVG units."""
    found = ticks(*domain, num_ticks)
    step = found[1] - found[0] if len(found) > 1 else 1.0
    return max(len(text(value) if text else tick_text(value, step)) for value in found) * FONT_WIDTH + 10
