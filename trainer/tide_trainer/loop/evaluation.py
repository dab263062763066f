"""Success on held-out prompts at one model version, run beside the training rollout.

Source: TideRL section 3.2 (evaluation of version v runs with the next step's rollout, aggregated before the next sync).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tide_trainer.loop.rollout import TaskRunner, with_attempts
from tide_trainer.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measurement: `num` of `num_total` tasks have a reward; `success` is the share with a reward above 0."""

    model_version: int
    kind: str
    success: float
    num: int
    num_total: int
    mean_reward: float
    mean_turns: float
    trajectories: tuple[Trajectory, ...] = field(repr=False, default=())

    @property
    def partial(self) -> bool:
        """True if some tasks were aborted or failed."""
        return self.num < self.num_total

    def record(self) -> dict[str, object]:
        """The measurement for metrics.jsonl."""
        names = ("model_version", "kind", "success", "num", "num_total", "mean_reward", "mean_turns", "partial")
        return {name: getattr(self, name) for name in names}


class RunningEvaluation:
    """Evaluation tasks in flight.

    Args:
        runner: runs tasks; evaluation tasks go first there.
        prompts: held-out prompts.
        version: the model version that every token is sampled from.
        greedy: temperature 0 if True, else 1.
        max_attempts: attempts of a task that fails for infrastructure reasons.
    """

    def __init__(
        self, runner: TaskRunner, prompts: Sequence[Prompt], version: int, *, greedy: bool, max_attempts: int
    ) -> None:
        self.version = version
        self.kind = "greedy" if greedy else "sampled"
        self._group = f"eval/{version}/{self.kind}"
        self._runner = runner
        self._temperature = 0.0 if greedy else 1.0
        self._max_attempts = max_attempts
        self._tasks = [
            asyncio.create_task(self._run(prompt, member), name=f"{self._group}/{member}")
            for member, prompt in enumerate(prompts)
        ]

    async def result(self, grace_s: float) -> Evaluation:
        """Waits at most `grace_s`, aborts the rest, and aggregates what is there (tagged partial, n of N)."""
        done, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        trajectories = [task.result() for task in self._tasks if task in done]
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        rewards = [trajectory.reward for trajectory in rewarded if trajectory.reward is not None]
        return Evaluation(
            model_version=self.version,
            kind=self.kind,
            success=fmean(reward > 0 for reward in rewards) if rewards else 0.0,
            num=len(rewarded),
            num_total=len(self._tasks),
            mean_reward=fmean(rewards) if rewards else 0.0,
            mean_turns=fmean(trajectory.turns for trajectory in rewarded) if rewarded else 0.0,
            trajectories=tuple(rewarded),
        )

    async def cancel(self) -> None:
        """Aborts every task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, prompt: Prompt, member: int) -> Trajectory:
        return await with_attempts(
            lambda attempt: self._runner.run(
                prompt, self._group, member, attempt, "eval", temperature=self._temperature
            ),
            self._max_attempts,
        )
