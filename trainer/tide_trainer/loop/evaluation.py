"""Success on held-out prompts at one model version, run beside the training rollout.

Source: TideRL section 3.2 (evaluation of version v runs with the next step's rollout), table 1 (anchored weights).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tide_trainer.loop.rollout import TaskRunner, with_attempts
from tide_trainer.types import Prompt, Trajectory

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measurement: `num` of `num_total` tasks count; `success` is the share of these with a reward above 0.

    A task counts if it has a reward and all that was sampled for it is of `model_version`.

    Attributes:
        num_mixed: tasks with a reward that do not count because other versions sampled some of them; never right.
        kept_rank: the rank that kept the version across a weight sync, empty where none had to.
    """

    model_version: int
    kind: str
    success: float
    num: int
    num_total: int
    mean_reward: float
    mean_turns: float
    num_mixed: int = 0
    kept_rank: str = ""
    trajectories: tuple[Trajectory, ...] = field(repr=False, default=())

    @property
    def partial(self) -> bool:
        """True if some tasks do not count: they were aborted or failed, or are of mixed versions."""
        return self.num < self.num_total

    def record(self) -> dict[str, object]:
        """The measurement for metrics.jsonl."""
        names = ("model_version", "kind", "success", "num", "num_total", "mean_reward", "mean_turns", "partial")
        return {name: getattr(self, name) for name in (*names, "num_mixed", "kept_rank")}


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

    @property
    def live(self) -> bool:
        """Whether a task has not ended."""
        return not all(task.done() for task in self._tasks)

    async def finished(self, limit_s: float) -> None:
        """Returns when every task has ended, or after `limit_s`: the others are aborted then. Safe to repeat.

        Cancelling aborts nothing.
        """
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_s)
            if late:
                _LOG.warning("%s: %d tasks are aborted, %g s are over", self._group, len(late), limit_s)
                await self.cancel()

    def evaluation(self, kept_rank: str = "") -> Evaluation:
        """Aggregates what has ended, tagged partial, n of N."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        trajectories = [task.result() for task in ended]
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        counting = [trajectory for trajectory in rewarded if self._is_whole(trajectory)]
        rewards = [trajectory.reward for trajectory in counting if trajectory.reward is not None]
        return Evaluation(
            model_version=self.version,
            kind=self.kind,
            success=fmean(reward > 0 for reward in rewards) if rewards else 0.0,
            num=len(counting),
            num_total=len(self._tasks),
            mean_reward=fmean(rewards) if rewards else 0.0,
            mean_turns=fmean(trajectory.turns for trajectory in counting) if counting else 0.0,
            num_mixed=len(rewarded) - len(counting),
            kept_rank=kept_rank,
            trajectories=tuple(counting),
        )

    async def result(self, limit_s: float) -> Evaluation:
        """`finished`, then `evaluation`."""
        await self.finished(limit_s)
        return self.evaluation()

    async def cancel(self) -> None:
        """Aborts every task that has not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_whole(self, trajectory: Trajectory) -> bool:
        sampled = sampled_versions(trajectory)
        if sampled <= {self.version}:
            return True
        _LOG.error(
            "evaluation task %s of version %d was sampled at versions %s and does not count: report this as a bug",
            *(trajectory.uid, self.version, sorted(sampled)),
        )
        return False

    async def _run(self, prompt: Prompt, member: int) -> Trajectory:
        return await with_attempts(
            lambda attempt: self._runner.run(
                prompt, self._group, member, attempt, "eval", temperature=self._temperature, version=self.version
            ),
            self._max_attempts,
        )


def sampled_versions(trajectory: Trajectory) -> set[int]:
    """The model versions that sampled any of it; empty for a loop that has its own engine."""
    return {
        version
        for segment in trajectory.segments
        for version, sampled in zip(segment.versions, segment.sampled, strict=True)
        if sampled
    }
