"""CTB beside fixed concurrencies, AIMD and the TideRL paper's Algorithm 1, on a modelled engine and a virtual clock.

Presets A, B, C of `tide_trainer.simulation.workload` (WebShop on slow, fast and middling environments), each with 1,056
tasks (32 groups of 8 and an evaluation of 200 x 4) and 1,312 (64 groups of 8), over ten seeds that nothing was tuned
on. All policies play the very same tasks. The value is CTB's generated tokens per second over the best fixed
concurrency's, in the preset where that is lowest.

`--sensitivity` varies the watermarks and the priority weights instead, on the seeds of tuning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctb_sim_chart import bars, curves
from rich.progress import Progress

from tide_trainer.scheduling.settings import CtbSettings, PriorityWeights
from tide_trainer.simulation import policies
from tide_trainer.simulation.figures import Figures
from tide_trainer.simulation.policies import PolicyFactory
from tide_trainer.simulation.run import Play
from tide_trainer.simulation.workload import PRESETS, make_workload

NAME = "ctb-sim"
RESULTS = Path(__file__).parents[1] / "docs" / "results"
SEEDS = tuple(range(10))
TUNING_SEEDS = (1000, 1001, 1002)
TRAIN_GROUPS = {1056: 32, 1312: 64}
FIXED = (1024, 512, 384, 256)
GOALS = {"hit_rate_over_fixed_1024": 1.58, "throughput_over_fixed_1024": 1.15, "throughput_over_best_fixed": 0.99}
POLICIES: Mapping[str, PolicyFactory] = {
    "CTB": policies.ctb(),
    "CTB unlent": policies.ctb(CtbSettings(idle_lending=0.0)),
    **{f"fixed {number}": policies.fixed(number) for number in FIXED},
    "AIMD": policies.aimd(),
    "Algorithm 1": policies.algorithm_one(),
}
KEPT = (
    "time_s",
    "generated_tokens_per_s",
    "tasks_per_minute",
    "hit_rate",
    "ideal_hit_rate",
    "hit_rate_worst_window",
    "prefill_over_ideal",
    "num_prefilled_tokens",
    "num_preemptions",
    "num_pauses",
    "longest_pause_s",
    "busy_fraction",
)
"""What is told of each cell, as means over the seeds."""


@dataclass(frozen=True)
class Job:
    """One play: `policy` names an entry of `variants()`."""

    preset: str
    num_tasks: int
    seed: int
    policy: str


def variants() -> dict[str, PolicyFactory]:
    """All policies by name, those of the sensitivity included."""
    made = dict(POLICIES)
    for name, settings in sensitivity().items():
        made[name] = policies.ctb(settings)
    return made


def sensitivity() -> dict[str, CtbSettings]:
    """Settings by `parameter=value`, one changed at a time."""
    found: dict[str, CtbSettings] = {}
    for value in (0.7, 0.8, 0.9, 0.95, 1.0):
        found[f"budget_fraction={value:g}"] = CtbSettings(budget_fraction=value)
    for value in (0.0, 0.15, 0.3, 0.5, 0.75, 1.0):
        found[f"growth_fraction={value:g}"] = CtbSettings(growth_fraction=value)
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        found[f"idle_lending={value:g}"] = CtbSettings(idle_lending=value)
    for value in (3.0, 10.0, 30.0, 100.0, 300.0):
        found[f"max_wait_s={value:g}"] = CtbSettings(max_wait_s=value)
    for weight in ("evaluation", "group_completion", "active", "context"):
        for value in (0.0, 1.0, 4.0, 16.0):
            weights = PriorityWeights.model_validate({weight: value})
            found[f"{weight}={value:g}"] = CtbSettings(priority="weighted", weights=weights)
    return found


def play(job: Job) -> tuple[Job, Figures]:
    """Plays one; pure, so that it may run in any process."""
    rng = random.Random(job.seed)  # noqa: S311 - a workload, no secret
    tasks = make_workload(PRESETS[job.preset], rng, train=(TRAIN_GROUPS[job.num_tasks], 8), evaluation=(200, 4))
    return job, Play(tasks, variants()[job.policy]).run()


def play_all(jobs: Sequence[Job], num_processes: int) -> dict[Job, Figures]:
    """Plays all of them, with a bar on the terminal."""
    found: dict[Job, Figures] = {}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool, Progress(transient=True) as progress:
        bar = progress.add_task(f"bench-{NAME}", total=len(jobs))
        for job, figures in pool.imap_unordered(play, jobs):
            found[job] = figures
            progress.advance(bar)
    return found


def means(found: Mapping[Job, Figures], preset: str, num_tasks: int, policy: str) -> dict[str, float]:
    """A cell's figures, means over its seeds."""
    ones = [of for job, of in found.items() if (job.preset, job.num_tasks, job.policy) == (preset, num_tasks, policy)]
    return {name: sum(getattr(one, name) for one in ones) / len(ones) for name in KEPT}


def ratios(cell: Mapping[str, Mapping[str, float]], policy: str) -> dict[str, Any]:
    """A policy beside the fixed concurrencies in one cell."""
    speed = {name: of["generated_tokens_per_s"] for name, of in cell.items()}
    best = max((f"fixed {number}" for number in FIXED), key=lambda name: speed[name])
    return {
        "best_fixed": best,
        "hit_rate_over_fixed_1024": cell[policy]["hit_rate"] / cell["fixed 1024"]["hit_rate"],
        "throughput_over_fixed_1024": speed[policy] / speed["fixed 1024"],
        "throughput_over_best_fixed": speed[policy] / speed[best],
    }


def table(cells: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """All cells, as lines of text."""
    lines = [f"{'':14}{'time s':>9}{'tok/s':>9}{'hit':>7}{'worst':>7}{'prefill':>9}{'preempt':>9}{'pauses':>8}"]
    for where, cell in cells.items():
        lines.append(where)
        for policy, of in cell.items():
            lines.append(
                f"  {policy:12}{of['time_s']:9.1f}{of['generated_tokens_per_s']:9.0f}{of['hit_rate']:7.3f}"
                f"{of['hit_rate_worst_window']:7.3f}{of['prefill_over_ideal']:9.2f}{of['num_preemptions']:9.1f}"
                f"{of['num_pauses']:8.0f}"
            )
    return "\n".join(lines)


def compare(seeds: Sequence[int], num_processes: int) -> dict[str, Any]:
    """The comparison: every policy in every cell."""
    jobs = [Job(p, n, seed, policy) for seed in seeds for p in PRESETS for n in TRAIN_GROUPS for policy in POLICIES]
    found = play_all(jobs, num_processes)
    cells = {
        f"{preset} {num_tasks}": {policy: means(found, preset, num_tasks, policy) for policy in POLICIES}
        for preset in PRESETS
        for num_tasks in TRAIN_GROUPS
    }
    beside = {where: ratios(cell, "CTB") for where, cell in cells.items()}
    unlent = {where: ratios(cell, "CTB unlent") for where, cell in cells.items()}
    lowest = {goal: min(one[goal] for one in beside.values()) for goal in GOALS}
    print(table(cells), file=sys.stderr)
    (RESULTS / f"bench-{NAME}.svg").write_text(bars(cells), encoding="utf-8")
    return {
        "name": NAME,
        "value": lowest["throughput_over_best_fixed"],
        "unit": "generated tokens/s of CTB over the best fixed concurrency's, in the preset where it is lowest",
        "goal": GOALS["throughput_over_best_fixed"],
        "holds": all(lowest[goal] >= GOALS[goal] for goal in GOALS),
        "details": {
            "lowest": lowest,
            "goals": GOALS,
            "ratios": beside,
            "ratios_unlent": unlent,
            "cells": cells,
            "seeds": list(seeds),
        },
    }


def vary(seeds: Sequence[int], num_processes: int) -> dict[str, Any]:
    """The sensitivity: CTB with one setting changed, against the best fixed concurrency of the preset."""
    names = [*sensitivity(), *(f"fixed {number}" for number in FIXED)]
    found = play_all([Job(p, 1056, seed, name) for name in names for seed in seeds for p in PRESETS], num_processes)
    lines: dict[str, dict[str, list[list[float]]]] = {}
    for preset in PRESETS:
        speeds = {name: means(found, preset, 1056, name)["generated_tokens_per_s"] for name in names}
        best = max(speeds[f"fixed {number}"] for number in FIXED)
        for name in sensitivity():
            parameter, _, value = name.partition("=")
            lines.setdefault(parameter, {}).setdefault(preset, []).append([float(value), speeds[name] / best])
    (RESULTS / f"bench-{NAME}-sensitivity.svg").write_text(curves(lines), encoding="utf-8")
    lowest = min(y for of in lines.values() for points in of.values() for _, y in points)
    return {
        "name": f"{NAME}-sensitivity",
        "value": lowest,
        "unit": "generated tokens/s of CTB over the best fixed concurrency's, at the worst of the settings tried",
        "goal": None,
        "holds": True,
        "details": {"lines": lines, "seeds": list(seeds)},
    }


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, and nothing is written to docs/results")
    parser.add_argument("--sensitivity", action="store_true", help="vary CTB's settings instead")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds, at most ten")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="plays at once")
    arguments = parser.parse_args()
    seeds = TUNING_SEEDS if arguments.sensitivity else SEEDS[: arguments.seeds]
    result = (vary if arguments.sensitivity else compare)(seeds[:2] if arguments.quick else seeds, arguments.processes)
    line = json.dumps(json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 4)))
    if not arguments.quick:
        (RESULTS / f"bench-{result['name']}.json").write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
