"""The statistics of an evaluation: pure functions of rewards, with what each interval stands on.

Tasks are the clusters: repeats of one task resemble each other, so that a thousand plays of ten tasks say little more
about new tasks than ten do. Every interval here is about new tasks of the same kind.

Source: pass@k is the unbiased estimator of Chen et al. 2021 (Evaluating Large Language Models Trained on Code); the
clustered standard error is that of Miller 2024 (Adding Error Bars to Evals), with the usual correction for few
clusters and Student's t; shares have the interval of Wilson 1927 on the effective sample size of Kish 1965.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
_HUGE = 1e100
_MANY = 200
"""Degrees of freedom above which an expansion around the normal quantile is exact to six digits."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and what is known of it.

    Attributes:
        value: the mean.
        low: lower end of the 95% interval, None where nothing is known: one cluster, or a mean of values all alike.
        high: its upper end.
        num: plays that count.
        num_tasks: clusters.
    """

    value: float
    low: float | None
    high: float | None
    num: int
    num_tasks: int


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """The chance that at least one of `k` plays succeeds, from `num` plays of which `num_correct` did.

    It is the share of the `k`-subsets of the plays that hold a success, which is unbiased.

    Raises:
        ValueError: not 1 <= k <= num, or not 0 <= num_correct <= num.
    """
    if not 1 <= k <= num or not 0 <= num_correct <= num:
        raise ValueError(f"pass@{k} of {num_correct} successes in {num} plays is not defined")
    if num - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def clustered_error(clusters: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all values, where values of one cluster may depend on each other.

    With one value in each cluster it is the usual one, s / sqrt(n). None with fewer than two clusters.
    """
    clusters = [cluster for cluster in clusters if cluster]
    if len(clusters) < 2:
        return None
    mean = fmean(value for cluster in clusters for value in cluster)
    num = sum(len(cluster) for cluster in clusters)
    square = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    return math.sqrt(square * len(clusters) / (len(clusters) - 1)) / num


def mean_of(clusters: Sequence[Sequence[float]]) -> Estimate | None:
    """The mean over all values with its interval; None without any value.

    Where no value differs from another there is no interval: a width of 0 would claim too much.

    Args:
        clusters: the values of each task.
    """
    clusters = [cluster for cluster in clusters if cluster]
    if not clusters:
        return None
    num = sum(len(cluster) for cluster in clusters)
    largest = max(abs(value) for cluster in clusters for value in cluster)
    if largest > _HUGE:  # its square, or the sum, would be no float any more
        found = mean_of([[value / largest for value in cluster] for cluster in clusters])
        assert found is not None
        ends = [None if end is None else end * largest for end in (found.low, found.high)]
        low, high = ends if all(end is not None and math.isfinite(end) for end in ends) else (None, None)
        return Estimate(found.value * largest, low, high, num, len(clusters))
    mean = fmean(value for cluster in clusters for value in cluster)
    error = clustered_error(clusters)
    if not error:
        return Estimate(mean, None, None, num, len(clusters))
    half = student_quantile(0.5 + CONFIDENCE / 2, len(clusters) - 1) * error
    return Estimate(mean, mean - half, mean + half, num, len(clusters))


def share_of(clusters: Sequence[Sequence[bool]]) -> Estimate | None:
    """The share of true values with its interval, which never leaves 0 to 1; None without any value.

    The interval is Wilson's on the number of independent plays that would be as uncertain: between the plays there are
    and what is left of them if the repeats of a task all went alike. Where all values agree the latter is taken.
    """
    clusters = [cluster for cluster in clusters if cluster]
    if not clusters:
        return None
    num = sum(len(cluster) for cluster in clusters)
    share = fmean(float(value) for cluster in clusters for value in cluster)
    fewest = num * num / sum(len(cluster) ** 2 for cluster in clusters)
    error = clustered_error([[float(value) for value in cluster] for cluster in clusters])
    effective = min(float(num), max(fewest, share * (1 - share) / error**2)) if error else fewest
    low, high = wilson(share, effective)
    return Estimate(share, low, high, num, len(clusters))


def pass_of(clusters: Sequence[Sequence[bool]], k: int) -> Estimate | None:
    """pass@k averaged over the tasks that have at least `k` plays; None if there is none."""
    values = [pass_at_k(len(cluster), sum(cluster), k) for cluster in clusters if len(cluster) >= k]
    found = mean_of([[value] for value in values])
    if found is None:
        return None
    num = sum(len(cluster) for cluster in clusters if len(cluster) >= k)
    low, high = found.low, found.high
    if all(value in (0.0, 1.0) for value in values):  # each task counts as one trial
        low, high = wilson(found.value, len(values))
    elif low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(found.value, low, high, num, len(values))


def wilson(share: float, num: float) -> tuple[float, float]:
    """The 95% Wilson interval of a share measured on `num` independent trials (above 0, not necessarily whole)."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    square = z * z
    centre = (share + square / (2 * num)) / (1 + square / num)
    half = z / (1 + square / num) * math.sqrt(share * (1 - share) / num + square / (4 * num * num))
    return 0.0 if share <= 0 else max(0.0, centre - half), 1.0 if share >= 1 else min(1.0, centre + half)


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t with a whole number of degrees of freedom.

    Args:
        probability: above one half, below 1.
        degrees: at least 1.
    """
    if degrees > _MANY:
        z = NormalDist().inv_cdf(probability)
        first = (z**3 + z) / (4 * degrees)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        return z + first + second
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, degrees: int) -> float:
    """The probability below `t` >= 0 under Student's t, by its finite series in the angle atan(t / sqrt(degrees))."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for step in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (step - 1) / step
    two_sided = 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total
    return 0.5 + two_sided / 2
