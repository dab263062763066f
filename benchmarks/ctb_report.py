"""What all runs of `bench_ctb` come to: the goals, and a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ctb_figures import RunFigures
from ctb_plan import CTB, MAIN, SEEDS, UNLIMITED
from rich.table import Table

GOAL = 1.0
HIT_RATE_GOAL = 0.8
PREFILL_GOAL = 1.2
UNLIMITED_GOAL = 1.4
OTHER_CELLS_GOAL = 0.9


def result_of(runs: Sequence[RunFigures], wall_s: float) -> dict[str, Any]:
    """The benchmark's result: {"name", "value", "unit", "goal", "holds", "details"}."""
    main = [run for run in runs if run.cell == MAIN]
    strongest = strongest_fixed(main)
    compared = [run for run in main if run.seed in SEEDS] or main
    ratios = _ratios(compared, strongest)
    value = statistics.median(ratios.values()) if ratios else None
    goals = _main_goals(compared, value) if value is not None else {}
    others = {cell: _other(runs, cell) for cell in dict.fromkeys(run.cell for run in runs) if cell != MAIN}
    goals |= {f"cell {cell}": found["holds"] for cell, found in others.items() if found}
    return {
        "name": "ctb",
        "value": value,
        "unit": f"tasks per minute, CTB / {strongest or 'the strongest fixed concurrency'}, median of paired runs",
        "goal": GOAL,
        "holds": all(goals.values()) if goals else None,
        "details": {
            "goals": goals,
            "strongest_fixed": strongest,
            "ratio_by_seed": ratios,
            "ratio_to_unlimited_by_seed": _ratios(compared, f"fixed-{UNLIMITED}"),
            "ratio_to_strongest_by_policy": _medians(compared, strongest),
            "other_cells": others,
            "wall_s": wall_s,
            "runs": [asdict(run) for run in runs],
        },
    }


def strongest_fixed(main: Sequence[RunFigures]) -> str | None:
    """The fixed concurrency with the most tasks per minute on the tuning seeds; on all seeds where none was played."""
    tuned = [run for run in main if run.seed not in SEEDS] or main
    fixed = [run for run in tuned if run.policy.startswith("fixed-")]
    speeds = {policy: _speed(run for run in fixed if run.policy == policy) for policy in _policies(fixed)}
    return max(speeds, key=lambda policy: speeds[policy]) if speeds else None


def table(runs: Sequence[RunFigures]) -> Table:
    """One row for each cell and policy, medians over seeds."""
    shown = Table(title="medians over seeds")
    for heading in (
        "cell", "policy", "tasks/min", "hit (ideal)", "worst 10 s", "prefill / ideal", "preempted", "pauses",
        "engine CPU s/task", "driver", "policy ms/turn",
    ):  # fmt: skip
        shown.add_column(heading, justify="left" if heading in ("cell", "policy") else "right")
    compared = [run for run in runs if run.cell != MAIN or run.seed in SEEDS] or list(runs)
    for cell in dict.fromkeys(run.cell for run in compared):
        for policy in _policies(run for run in compared if run.cell == cell):
            some = [run for run in compared if (run.cell, run.policy) == (cell, policy)]
            middle = {name: statistics.median(getattr(run, name) for run in some) for name in _SHOWN}
            shown.add_row(
                cell,
                policy,
                f"{middle['tasks_per_minute']:.1f}",
                f"{middle['hit_rate']:.3f} ({middle['ideal_hit_rate']:.3f})",
                f"{middle['worst_window']:.2f}",
                f"{middle['prefill_over_ideal']:.2f}",
                f"{middle['preemptions']:g}",
                f"{middle['pauses']:g}",
                f"{middle['engine_cpu_s_per_task']:.3f}",
                f"{middle['driver_cpu_s_per_task']:.4f}",
                f"{middle['policy_cpu_ms_per_turn']:.3f}",
            )
    return shown


_SHOWN = (
    "tasks_per_minute", "hit_rate", "ideal_hit_rate", "worst_window", "prefill_over_ideal", "preemptions", "pauses",
    "engine_cpu_s_per_task", "driver_cpu_s_per_task", "policy_cpu_ms_per_turn",
)  # fmt: skip


def _main_goals(compared: Sequence[RunFigures], value: float) -> dict[str, bool]:
    ours = [run for run in compared if run.policy == CTB]
    unlimited = _ratios(compared, f"fixed-{UNLIMITED}")
    goals = {
        f"tasks per minute at least {GOAL} of the strongest fixed": value >= GOAL,
        f"hit rate at least {HIT_RATE_GOAL}": statistics.median(run.hit_rate for run in ours) >= HIT_RATE_GOAL,
        f"prefill at most {PREFILL_GOAL} of a perfect cache's": (
            statistics.median(run.prefill_over_ideal for run in ours) <= PREFILL_GOAL
        ),
        "no preemption": not any(run.preemptions for run in ours),
    }
    if unlimited:
        goals[f"at least {UNLIMITED_GOAL} times unlimited"] = statistics.median(unlimited.values()) >= UNLIMITED_GOAL
    return goals


def _other(runs: Sequence[RunFigures], cell: str) -> dict[str, Any] | None:
    """CTB against the best of the fixed ones on the same seeds: chosen with hindsight, which is hard on CTB."""
    some = [run for run in runs if run.cell == cell]
    ours = [run for run in some if run.policy == CTB]
    fixed = [run for run in some if run.policy.startswith("fixed-")]
    if not ours or not fixed:
        return None
    speeds = {policy: _speed(run for run in fixed if run.policy == policy) for policy in _policies(fixed)}
    best = max(speeds, key=lambda policy: speeds[policy])
    ratio, preempted = _speed(ours) / speeds[best], sum(run.preemptions for run in ours)
    return {
        "strongest_fixed": best,
        "ratio": ratio,
        "preemptions": preempted,
        "holds": ratio >= OTHER_CELLS_GOAL and preempted == 0,
    }


def _ratios(runs: Sequence[RunFigures], other: str | None, policy: str = CTB) -> dict[int, float]:
    """Seed -> tasks per minute of a policy over those of another one, where both were played."""
    speed = {(run.policy, run.seed): run.tasks_per_minute for run in runs}
    return {
        seed: speed[policy, seed] / speed[other, seed]
        for name, seed in speed
        if other is not None and name == policy and (other, seed) in speed
    }


def _medians(runs: Sequence[RunFigures], strongest: str | None) -> dict[str, float]:
    ratios = {policy: _ratios(runs, strongest, policy) for policy in _policies(runs)}
    return {policy: statistics.median(found.values()) for policy, found in ratios.items() if found}


def _policies(runs: Iterable[RunFigures]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))


def _speed(runs: Iterable[RunFigures]) -> float:
    return statistics.mean(run.tasks_per_minute for run in runs)
