"""Counters and histograms of one event loop, for what is counted in every turn.

prometheus-client writes them out, but does not count in them: its own instruments take a lock for each value, and cost
six times as much. Nothing here may be touched by another thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of latencies, in seconds."""


class Counter:
    """A number that only grows, for each combination of its labels' values.

    Args:
        name: with its unit, ending in `_total`.
        words: what is counted, in a line.
        labels: their names; values must come from a small set.
    """

    def __init__(self, name: str, words: str, *labels: str) -> None:
        self._name = name
        self._words = words
        self._labels = labels
        self._values: defaultdict[tuple[str | int, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0

    def add(self, *values: str | int, by: float = 1.0) -> None:
        """Add to the number of these labels' values."""
        self._values[values] += by

    def collect(self) -> Iterator[Metric]:
        """The counter as it is written out."""
        family = CounterMetricFamily(self._name, self._words, labels=self._labels)
        for values, number in self._values.items():
            family.add_metric([str(value) for value in values], number)
        yield family


class Series:
    """The values of a histogram for one combination of its labels' values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram:
    """How often values fell between bounds, for each combination of its labels' values.

    Args:
        name: with its unit.
        words: what is measured, in a line.
        labels: their names; values must come from a small set.
        bounds: upper bounds, ascending; what is above the last one is counted too.
    """

    def __init__(self, name: str, words: str, *labels: str, bounds: Sequence[float] = SECONDS) -> None:
        self._name = name
        self._words = words
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Series] = {} if labels else {(): Series(bounds)}

    def of(self, *values: str) -> Series:
        """The series of these labels' values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        """The histogram as it is written out."""
        family = HistogramMetricFamily(self._name, self._words, labels=self._labels)
        for values, series in self._series.items():
            buckets: list[tuple[str, float]] = []
            number = 0
            for bound, count in zip((*series.bounds, float("inf")), series.counts, strict=True):
                number += count
                buckets.append((floatToGoString(bound), number))
            family.add_metric(values, buckets, series.total)
        yield family
