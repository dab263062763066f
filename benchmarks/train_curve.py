"""What a timed training run comes to, in the same terms for every system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One train step of a timed run.

    Attributes:
        number: from 1.
        ended_s: wall seconds from the start of training (model warm-started, engine up) to the step's end.
        wall_s: wall seconds of the step.
        cpu_s: CPU seconds by part.
        part_wall_s: wall seconds by part, where a part has the step's wall time for itself.
        num_tokens: of the trained episodes, prompts and observations included.
        num_sampled_tokens: of these, what the policy sampled.
        num_trained_turns: turns of the trained episodes.
        num_turns: turns that were played during the step.
    """

    number: int
    ended_s: float
    wall_s: float
    cpu_s: Mapping[str, float]
    part_wall_s: Mapping[str, float]
    num_tokens: int
    num_sampled_tokens: int
    num_trained_turns: int
    num_turns: int


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A whole timed run.

    Attributes:
        system: which system, and how it was run.
        seed: of the run.
        steps: its train steps.
        peak_rss_bytes: by part.
        snapshots: train step -> file with its weights.
        success: train step -> sampled success on the held-out seeds, as far as it was measured.
        reached_step: the first train step whose model reached the target; None: none did.
    """

    system: str
    seed: int
    steps: Sequence[TrainStep]
    peak_rss_bytes: Mapping[str, int]
    snapshots: Mapping[int, Path]
    success: Mapping[int, float] = field(default_factory=dict[int, float])
    reached_step: int | None = None

    @property
    def time_to_target_s(self) -> float | None:
        """Wall seconds from the start of training to the end of the train step that reached the target."""
        return None if self.reached_step is None else self.steps[self.reached_step - 1].ended_s

    def figures(self) -> dict[str, Any]:
        """Means per train step, per episode token and per turn."""
        steps = [asdict(step) for step in self.steps]
        count = len(steps)
        tokens = sum(step["num_tokens"] for step in steps)
        turns = sum(step["num_turns"] for step in steps)
        cpu_s = _summed(step["cpu_s"] for step in steps)
        wall_s = _summed(step["part_wall_s"] for step in steps)
        total_cpu_s, total_wall_s = sum(cpu_s.values()), sum(step["wall_s"] for step in steps)
        return {
            "num_train_steps": count,
            "wall_s_per_train_step": total_wall_s / count,
            "cpu_s_per_train_step": total_cpu_s / count,
            "part_cpu_s_per_train_step": {name: value / count for name, value in cpu_s.items()},
            "part_wall_s_per_train_step": {name: value / count for name, value in wall_s.items()},
            "wall_us_per_episode_token": total_wall_s / tokens * 1e6,
            "cpu_us_per_episode_token": total_cpu_s / tokens * 1e6,
            "part_cpu_us_per_episode_token": {name: value / tokens * 1e6 for name, value in cpu_s.items()},
            "part_cpu_ms_per_turn": {name: value / turns * 1e3 for name, value in cpu_s.items()},
            "episode_tokens_per_train_step": tokens / count,
            "sampled_tokens_per_train_step": sum(step["num_sampled_tokens"] for step in steps) / count,
            "trained_turns_per_train_step": sum(step["num_trained_turns"] for step in steps) / count,
            "turns_per_train_step": turns / count,
            "peak_rss_mb": {name: value / 2**20 for name, value in self.peak_rss_bytes.items()},
        }

    def record(self) -> dict[str, Any]:
        """The run for the JSON result."""
        return {
            "system": self.system,
            "seed": self.seed,
            "time_to_target_s": self.time_to_target_s,
            "train_steps_to_target": self.reached_step,
            "success_by_train_step": self.success,
            "ended_s_by_train_step": [round(step.ended_s, 3) for step in self.steps],
            **self.figures(),
        }


def measured(run: TimedRun, success: Mapping[int, float], target: float) -> TimedRun:
    """The run with what its models, measured in order, came to."""
    reached = next((number for number, value in sorted(success.items()) if value >= target), None)
    return replace(run, success=dict(success), reached_step=reached)


def _summed(parts: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in parts:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
