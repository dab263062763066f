"""What one run of `bench_ctb` comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctb_driver import Driver, PlayedTurn
from ctb_workload import BenchTask, ideal_prefill_tokens

from tide_trainer.types import EngineStats

WINDOW_S = 10.0
_LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One policy, cell and seed.

    Attributes:
        tasks_per_minute: of wall time, from the first submission to the last end.
        hit_rate: cached prompt tokens / prompt tokens, each summed first.
        worst_window: the lowest hit rate of 10 s that hold at least 2% of the run's prompt tokens.
        prefilled_tokens: prompt tokens that did not come from the cache; `ideal_prefilled_tokens`: of a perfect cache.
        preemptions: of the engine; what they made it compute again is not among the prefilled tokens.
        engine_cpu_s: CPU seconds of the engine's server process; `driver_cpu_s`, of this process.
        policy_cpu_ms_per_turn: CPU of all calls of the policy.
        turn_p50_s: median time of a call from its grant to its answer; `held_s`: mean wait of a call for its grant.
        mean_engine_share: mean share of the cache that running requests held; `mean_usage_share`: of the scheduler's
            usage, idle tasks included (0 for policies that count none).
    """

    cell: str
    policy: str
    seed: int
    wall_s: float
    tasks_per_minute: float
    hit_rate: float
    ideal_hit_rate: float
    worst_window: float
    prefilled_tokens: int
    ideal_prefilled_tokens: int
    prefill_over_ideal: float
    preemptions: int
    pauses: int
    engine_cpu_s: float
    engine_cpu_s_per_task: float
    driver_cpu_s: float
    driver_cpu_s_per_task: float
    policy_cpu_ms_per_turn: float
    turn_p50_s: float
    held_s: float
    mean_engine_share: float
    mean_usage_share: float
    mean_acting: float


def figures_of(
    name: tuple[str, str, int],
    driver: Driver,
    tasks: Sequence[BenchTask],
    kv: tuple[int, int],
    counters: tuple[EngineStats, EngineStats],
    cpu_s: tuple[float, float],
) -> RunFigures:
    """The figures of a run that has ended, checked against the engine's own counters.

    Args:
        name: cell, policy, seed.
        driver: the run.
        tasks: what it played.
        kv: tokens of the engine's cache and of a block.
        counters: the engine's, after the reset and after the run.
        cpu_s: of the engine and of this process.

    Raises:
        RuntimeError: blocks from before the reset were used, or the engine counted other tokens than the answers say.
    """
    turns, (before, after) = driver.turns, counters
    prompt = sum(turn.prompt_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    stale = [turn for turn in turns if turn.first and turn.cached_tokens]
    if stale:
        raise RuntimeError(f"{len(stale)} groups found their prompt in the cache at their first call: no reset")
    counted = (after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens)
    if counted != (prompt, cached):
        raise RuntimeError(f"the engine counted {counted} prompt and cached tokens, the answers say {prompt, cached}")
    ideal = ideal_prefill_tokens(tasks, kv[1])
    samples = driver.samples or [None]
    known = [sample for sample in samples if sample is not None]
    count, num_tasks = max(1, len(known)), len(tasks)
    lasted = sorted(turn.ended_s - turn.granted_s for turn in turns)
    return RunFigures(
        *name,
        wall_s=driver.wall_s,
        tasks_per_minute=num_tasks / driver.wall_s * 60.0,
        hit_rate=cached / prompt,
        ideal_hit_rate=1.0 - ideal / prompt,
        worst_window=worst_window(turns),
        prefilled_tokens=prompt - cached,
        ideal_prefilled_tokens=ideal,
        prefill_over_ideal=(prompt - cached) / ideal,
        preemptions=after.num_preemptions - before.num_preemptions,
        pauses=driver.num_pauses,
        engine_cpu_s=cpu_s[0],
        engine_cpu_s_per_task=cpu_s[0] / num_tasks,
        driver_cpu_s=cpu_s[1],
        driver_cpu_s_per_task=cpu_s[1] / num_tasks,
        policy_cpu_ms_per_turn=driver.policy_cpu_s / len(turns) * 1000.0,
        turn_p50_s=lasted[len(lasted) // 2],
        held_s=sum(turn.granted_s - turn.called_s for turn in turns) / len(turns),
        mean_engine_share=sum(sample.engine_tokens for sample in known) / count / kv[0],
        mean_usage_share=sum(sample.usage_tokens for sample in known) / count / kv[0],
        mean_acting=sum(sample.num_acting for sample in known) / count,
    )


def worst_window(turns: Sequence[PlayedTurn]) -> float:
    """The lowest token-weighted hit rate of the 10 s from any call's grant on; 1.0 where no window holds enough."""
    ordered = sorted(turns, key=lambda turn: turn.granted_s)
    least = _LEAST_SHARE * sum(turn.prompt_tokens for turn in ordered)
    worst, end, prompt, cached = 1.0, 0, 0, 0
    for begin, first in enumerate(ordered):
        while end < len(ordered) and ordered[end].granted_s < first.granted_s + WINDOW_S:
            prompt += ordered[end].prompt_tokens
            cached += ordered[end].cached_tokens
            end += 1
        if prompt >= least:
            worst = min(worst, cached / prompt)
        prompt -= ordered[begin].prompt_tokens
        cached -= ordered[begin].cached_tokens
    return worst
