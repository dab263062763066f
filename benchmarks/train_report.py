"""The tables that bench_train.py prints, and what differs between the systems."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from train_curve import TimedRun

PARTS = ("environment", "gateway", "agents", "router", "scheduler", "main", "engine", "training", "all")
"""CPU parts in the order of a turn; `agents` is the SDK's agent loops, `main` the loop without the scheduler."""


def table(runs: Sequence[TimedRun]) -> str:
    """The medians over a system's runs, as lines of text."""
    figures = [run.figures() for run in runs]

    def middle(name: str) -> float:
        return statistics.median(one[name] for one in figures)

    def parts(name: str) -> dict[str, float]:
        found = {part: statistics.median(one[name].get(part, 0.0) for one in figures) for part in figures[0][name]}
        return dict(sorted(found.items(), key=lambda item: PARTS.index(item[0]) if item[0] in PARTS else len(PARTS)))

    times = ", ".join("never" if run.time_to_target_s is None else f"{run.time_to_target_s:.1f} s" for run in runs)
    lines = [
        "",
        f"{runs[0].system} ({len(runs)} runs of {len(runs[0].steps)} train steps; time to the target: {times})",
        f"  a train step: {middle('wall_s_per_train_step'):.2f} s wall, {middle('cpu_s_per_train_step'):.2f} s CPU; "
        f"{middle('trained_turns_per_train_step'):.0f} turns and {middle('episode_tokens_per_train_step'):.0f} episode "
        f"tokens trained, {middle('sampled_tokens_per_train_step'):.0f} of them sampled",
        f"  an episode token: {middle('wall_us_per_episode_token'):.0f} us wall, "
        f"{middle('cpu_us_per_episode_token'):.0f} us CPU",
        f"  {'part':<14}{'CPU s/train step':>18}{'CPU us/ep. token':>18}{'CPU ms/turn':>14}{'peak MB':>10}",
    ]
    tokens, turns, memory = (
        parts(name) for name in ("part_cpu_us_per_episode_token", "part_cpu_ms_per_turn", "peak_rss_mb")
    )
    for part, cpu_s in parts("part_cpu_s_per_train_step").items():
        peak = f"{memory[part]:>10.0f}" if part in memory else f"{'in main':>10}"
        lines.append(f"  {part:<14}{cpu_s:>18.3f}{tokens[part]:>18.1f}{turns[part]:>14.3f}{peak}")
    walls = ", ".join(f"{part} {value:.2f}" for part, value in parts("part_wall_s_per_train_step").items())
    lines.append(f"  wall s of a train step by part: {walls}")
    if "gateway" in tokens:
        lines.append(
            "  (environment, gateway, agents, router, scheduler and engine share the rollout's wall time, beside the "
            "training's; the CPU of a sync is the engine's and the training's)"
        )
    return "\n".join(lines)


def differences(settings: Mapping[str, Any]) -> list[str]:
    """What is not the same in the two systems, for the reader of the figures."""
    loss = settings["algorithm"]["loss"]
    return [
        f"TideRL trains on episodes up to {settings['algorithm']['eta']} versions old, with the behaviour weight "
        f"{loss['behaviour']!r}; TRL on its present model's only, which needs none.",
        "TideRL plays through processes with HTTP between them and stores every turn; TRL plays in its own process and "
        "stores nothing.",
        "TideRL generates with vLLM and its prefix cache; TRL with transformers, each turn from an empty cache: its "
        "vLLM modes do not run on CPU.",
        "TideRL saves a checkpoint after each train step inside the measured time; the weights that TRL's side writes "
        "for the same purpose are outside it.",
        "Same in both: model, warm start, token ids of an episode, seeds and their order, groups, reward, temperature, "
        "tokens a turn, AdamW with its warm-up, gradient clip, advantages, clip range, entropy weight and aggregation.",
    ]
