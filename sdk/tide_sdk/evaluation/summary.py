"""The figures of an evaluation, from its results: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from tide_sdk.evaluation.records import Record
from tide_sdk.statistics import Estimate, mean_of, pass_of, share_of

MAX_REASONS = 12
NUM_BINS = 20
MAX_EVERY_K = 64
"""pass@k is told for each k up to this."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What some plays say.

    Attributes:
        num: plays with a reward.
        num_played: plays with a result.
        num_planned: plays that belong here; None where that is not known.
        reward: mean reward.
        success: share of the plays whose reward is above the threshold.
        success_bounds: the share if every play without a reward had failed, and if every one had succeeded.
        pass_at: pass@k for each k up to `MAX_EVERY_K`, above it for powers of two and the repeats.
        turns: mean turns of the plays with a reward.
    """

    num: int
    num_played: int
    num_planned: int | None
    reward: Estimate | None
    success: Estimate | None
    success_bounds: tuple[float, float] | None
    pass_at: Mapping[int, Estimate]
    turns: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole evaluation.

    Attributes:
        threshold: a play succeeded if its reward is above it.
        num_tasks: tasks of the evaluation.
        repeats: plays of each.
        overall: all plays.
        splits: by data split, where there is more than one.
        groups: by kind of task, where the tasks name any.
        outcomes: plays by outcome, and `not played`.
        reasons: what the plays without a reward died of: outcome, error, how many.
        rewards: histogram of the rewards: lower edge, upper edge, how many.
        turns: histogram of the turns.
        median_turns: of the plays with a reward.
        wall_s: seconds that the plays took, added up.
    """

    threshold: float
    num_tasks: int
    repeats: int
    overall: Figures
    splits: Mapping[str, Figures]
    groups: Mapping[str, Figures]
    outcomes: Mapping[str, int]
    reasons: Sequence[tuple[str, str, int]]
    rewards: Sequence[tuple[float, float, int]]
    turns: Sequence[tuple[float, float, int]]
    median_turns: float | None
    wall_s: float

    @property
    def complete(self) -> bool:
        """True if every planned play has a reward."""
        return self.overall.num == self.overall.num_planned

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"complete": self.complete, **asdict(self)}


def summarise(records: Iterable[Record], *, num_tasks: int, repeats: int, threshold: float = 0.0) -> Summary:
    """The figures of an evaluation.

    A play without a reward counts nowhere as a failure: all figures are about the others, and say how many.

    Args:
        records: results, one for each play at most.
        num_tasks: tasks of the evaluation.
        repeats: plays of each.
        threshold: a play succeeded if its reward is above it.
    """
    played = list(records)
    rewarded = [record for record in played if record.reward is not None]
    planned = num_tasks * repeats
    outcomes = Counter(record.outcome for record in played)
    if planned > len(played):
        outcomes["not played"] = planned - len(played)
    reasons = Counter((record.outcome, _first_line(record.error)) for record in played if record.reward is None)
    splits = sorted({record.split for record in played if record.split is not None})
    groups = sorted({record.group for record in played if record.group is not None})

    def of(name: str, value: str) -> Figures:
        return figures([one for one in played if getattr(one, name) == value], repeats, threshold)

    return Summary(
        threshold=threshold,
        num_tasks=num_tasks,
        repeats=repeats,
        overall=figures(played, repeats, threshold, planned),
        splits={split: of("split", split) for split in splits} if len(splits) > 1 else {},
        groups={group: of("group", group) for group in groups},
        outcomes=dict(outcomes.most_common()),
        reasons=[(outcome, error, num) for (outcome, error), num in reasons.most_common(MAX_REASONS)],
        rewards=histogram([record.reward for record in rewarded if record.reward is not None]),
        turns=histogram([float(record.turns) for record in rewarded], whole=True),
        median_turns=median(record.turns for record in rewarded) if rewarded else None,
        wall_s=round(sum(record.wall_s for record in played), 3),
    )


def figures(played: Sequence[Record], repeats: int, threshold: float, planned: int | None = None) -> Figures:
    """What these plays say; those of one task are one cluster."""
    rewards: dict[str, list[float]] = {}
    for record in played:
        if record.reward is not None:
            rewards.setdefault(record.id, []).append(record.reward)
    clusters = list(rewards.values())
    hits = [[reward > threshold for reward in cluster] for cluster in clusters]
    num, num_hits = sum(map(len, clusters)), sum(map(sum, hits))
    whole = planned if planned is not None else len(played)
    passes = {k: pass_of(hits, k) for k in _ks(repeats)}
    turns = [record.turns for record in played if record.reward is not None]
    return Figures(
        num=num,
        num_played=len(played),
        num_planned=planned,
        reward=mean_of(clusters),
        success=share_of(hits),
        success_bounds=(num_hits / whole, (num_hits + whole - num) / whole) if whole else None,
        pass_at={k: found for k, found in passes.items() if found is not None},
        turns=fmean(turns) if turns else None,
    )


def _ks(repeats: int) -> list[int]:
    """The k of pass@k: each while they are few."""
    powers = (2**n for n in range(repeats.bit_length()))
    return sorted({*range(1, min(repeats, MAX_EVERY_K) + 1), *powers, repeats})


def histogram(values: Sequence[float], *, whole: bool = False) -> list[tuple[float, float, int]]:
    """How many values lie in each of at most `NUM_BINS` bins of one width; the last holds its upper edge.

    Few different values get a bin each, of no width.

    Args:
        values: finite numbers.
        whole: the edges are whole numbers.
    """
    counts = Counter(values)
    if len(counts) <= NUM_BINS // 2 or min(counts) == max(counts):
        return [(value, value, counts[value]) for value in sorted(counts)]
    low, high = min(counts), max(counts)
    if not math.isfinite(high - low):
        quarters = histogram([value / 4 for value in values])
        return [(4 * first, min(4 * last, high), count) for first, last, count in quarters]
    width = (high - low) / NUM_BINS
    if whole:
        width = max(1.0, -(-(high - low + 1) // NUM_BINS))
    num = NUM_BINS if not whole else int((high - low) // width) + 1
    bins = [0] * num
    for value, count in counts.items():
        bins[min(num - 1, int((value - low) / width))] += count
    return [(low + index * width, low + (index + 1) * width, count) for index, count in enumerate(bins)]


def _first_line(text: str | None) -> str:
    lines = (text or "no reason was told").strip().splitlines()
    return lines[0][:300] if lines else "no reason was told"
