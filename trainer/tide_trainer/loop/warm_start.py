"""The warm start: supervised train steps on demonstrations, until the measured success lies in the wanted band.

    demonstrator -> gateway -> conversations -> ids -> backend.train -> (every k steps) publish, measure -> stop?

It stops on success, not on a count of steps: supervised training overshoots. Its versions are negative; the version 0
that reinforcement learning starts from is its result.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tide_trainer.errors import RunFailed
from tide_trainer.loop.evaluation import Evaluation, RunningEvaluation
from tide_trainer.loop.ports import WorkerPool
from tide_trainer.loop.prompts import demonstrations, held_out
from tide_trainer.loop.rollout import TaskRunner
from tide_trainer.loop.sync import WeightSync
from tide_trainer.protocols import TrainingBackend
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import Prompt, Sequence, TrainBatch

_LOG = logging.getLogger(__name__)
FIRST_VERSION = -1_000
"""Version of the untrained weights when a warm start follows; its measurements count up from here."""
MAX_PUBLISHES = -FIRST_VERSION - 1


async def record_demonstrations(
    workers: WorkerPool, router_url: str, settings: TrainerSettings, run: str
) -> list[list[Any]]:
    """Plays the demonstrator through the gateway; returns the conversations of the episodes that succeeded.

    Raises:
        RunFailed: fewer than a tenth of the episodes succeeded.
    """
    wanted = settings.warm_start.num_episodes
    gate = asyncio.Semaphore(settings.agent.max_tasks_per_worker)

    async def one(index: int, prompt: Prompt) -> Mapping[str, Any]:
        async with gate:
            spec = {
                "environment": prompt.environment,
                "key": f"{run}/{prompt.uid}",
                "task": dict(prompt.task),
                "seed": prompt.seed,
                "split": prompt.split,
                "kind": "train",
            }
            return await workers.run(f"demo.{index}", spec, "", router_url)

    accounts = await asyncio.gather(*(one(i, p) for i, p in enumerate(demonstrations(settings.tasks, wanted))))
    good = [list(account["messages"]) for account in accounts if (account.get("reward") or 0.0) > 0]
    if len(good) * 10 < wanted:
        errors = sorted({str(account.get("error") or account["outcome"]) for account in accounts})
        raise RunFailed(f"only {len(good)} of {wanted} demonstrations succeeded: {'; '.join(errors[:3])}")
    return good


class WarmStart:
    """Supervised train steps with measurements between them.

    Args:
        backend: takes the batches.
        sync: brings measured weights to the rollout ranks.
        runner: runs the measurement's tasks.
        settings: the whole configuration.
        record: writes a record, by event name.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        sync: WeightSync,
        runner: TaskRunner,
        settings: TrainerSettings,
        record: Callable[..., Any],
    ) -> None:
        self._backend = backend
        self._sync = sync
        self._runner = runner
        self._settings = settings
        self._record = record
        self._version = FIRST_VERSION

    async def run(self, sequences: Seq[Sequence]) -> None:
        """Trains until success is in the band; the rollout ranks then hold the result as version 0.

        Raises:
            RunFailed: `max_steps` were not enough.
        """
        settings = self._settings.warm_start
        order = random.Random(self._settings.run.seed)  # noqa: S311 - the data order, not a secret
        step = 0
        while step < settings.max_steps:
            batch = [
                sequences[i] for i in order.sample(range(len(sequences)), min(settings.batch_episodes, len(sequences)))
            ]
            report = await self._backend.train(TrainBatch("supervised", tuple(batch), settings.learning_rate))
            step += 1
            past = step - settings.first_evaluation
            measured = None
            if past >= 0 and past % settings.steps_between_evaluations == 0:
                measured = await self._measure(greedy=False, num=settings.num_eval)
            success = measured.success if measured else None
            done = success is not None and success >= settings.min_success
            if not done:
                self._record(
                    "warm_start",
                    supervised_step=step,
                    loss=report.metrics.get("loss"),
                    sampled_success=success,
                    greedy_success=None,
                )
                continue
            greedy = await self._measure(greedy=True, num=settings.num_eval, publish=False)
            self._record(
                "warm_start",
                supervised_step=step,
                loss=report.metrics.get("loss"),
                sampled_success=success,
                greedy_success=greedy.success,
            )
            self._warn(success or 0.0, greedy.success)
            await self._sync.to_version(0)
            return
        raise RunFailed(
            f"the warm start did not reach a success of {settings.min_success:g} in {settings.max_steps} steps; "
            "raise warm_start.max_steps or warm_start.learning_rate"
        )

    async def _measure(self, *, greedy: bool, num: int, publish: bool = True) -> Evaluation:
        if publish:
            if self._version >= FIRST_VERSION + MAX_PUBLISHES:
                raise RunFailed("the warm start was measured too often; raise warm_start.steps_between_evaluations")
            self._version += 1
            await self._sync.to_version(self._version)
        running = RunningEvaluation(
            self._runner,
            held_out(self._settings.tasks, num),
            self._version,
            greedy=greedy,
            max_attempts=self._settings.agent.max_attempts,
        )
        try:
            return await running.result(self._settings.evaluation.grace_s)
        finally:
            await running.cancel()

    def _warn(self, sampled: float, greedy: float) -> None:
        settings = self._settings.warm_start
        if sampled > settings.max_success:
            _LOG.warning("the warm start overshot: sampled success %.2f is above %.2f", sampled, settings.max_success)
        if greedy > settings.max_greedy_success:
            _LOG.warning("the warm start's greedy success %.2f is above %.2f", greedy, settings.max_greedy_success)
