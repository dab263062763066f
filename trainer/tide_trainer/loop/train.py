"""The train loop.

                    +--------------------------- rollout (background tasks) --------------------------+
                    |                                                                                 |
    prompts -> staleness buffers -> scheduler (admit, pause, resume) -> agent, engine, environment -> groups
                    |                                                                                 |
                    +--> next_batch() --> backend.train() --> roles --> sync --> evaluate, record ----+
                         waits for a      waits for the       who       waits for
                         Ready buffer;    Actor ranks;        does      calls in flight;
                         unblocked by     unblocked by        what      unblocked by
                         finished groups  their report        next      the engine

Back-pressure: rollout stops at the staleness bound (`V_traj + eta >= V_buf`) and goes on after the sync; the trainer
stops at an empty buffer and goes on when groups finish. Every wait has a deadline, or ends with the run's failure.
Source: TideRL section 3.2; one iteration is one train step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tide_trainer.loop.batches import BatchFigures, batch_figures, train_batch
from tide_trainer.loop.evaluation import Evaluation, RunningEvaluation
from tide_trainer.loop.prompts import held_out
from tide_trainer.loop.rollout import Rollout
from tide_trainer.loop.shell import SchedulerShell
from tide_trainer.loop.shell_task import ShellFigures
from tide_trainer.loop.sync import SyncReport, WeightSync
from tide_trainer.persistence.repository import RunRepository
from tide_trainer.protocols import TrainingBackend
from tide_trainer.scheduling.modes import ModeView, choose_mode
from tide_trainer.scheduling.roles import RoleView, plan_roles
from tide_trainer.settings import TrainerSettings
from tide_trainer.types import TrainReport

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What wiring hands to the loop."""

    backend: TrainingBackend
    shell: SchedulerShell
    rollout: Rollout
    sync: WeightSync
    repository: RunRepository
    record: Callable[..., None]
    save: Callable[[int], Any]
    keep_samples: Callable[[str, Evaluation], None]
    roles: Callable[[], RoleView]
    cpu_s: Callable[[], dict[str, float]]
    placeholder_id: int | None = None
    prune_images: Callable[[], Awaitable[object]] | None = None


class TrainLoop:
    """Runs train steps until the configured end.

    Args:
        parts: the wired objects.
        settings: the whole configuration.
        now: a monotonic clock in seconds.
    """

    def __init__(self, parts: Parts, settings: TrainerSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._settings = settings
        self._now = now
        self._started_s = now()
        self._running: list[RunningEvaluation] = []
        self.version = 0
        self.success: float | None = None
        self._cpu_s: dict[str, float] = {}

    async def run(self) -> str:
        """Runs to the end; returns why it ended: max_train_steps, max_time_s or target_success."""
        settings = self._settings
        self._cpu_s = await asyncio.to_thread(self._parts.cpu_s)
        self._evaluate(greedy=settings.evaluation.greedy != "never")
        self._parts.rollout.open()
        reason = "max_train_steps"
        while self.version < settings.run.max_train_steps:
            await self._train_step()
            if settings.run.max_time_s and self._now() - self._started_s >= settings.run.max_time_s:
                reason = "max_time_s"
                break
            if settings.run.target_success and (self.success or 0.0) >= settings.run.target_success:
                reason = "target_success"
                break
        await self._parts.rollout.close()
        await self._collect("")
        self._parts.record("phase", phase="final evaluation")
        self._evaluate(greedy=settings.evaluation.greedy != "never")
        await self._collect("after")
        await self._parts.save(self.version)
        return reason

    async def close(self) -> None:
        """Aborts evaluations and rollouts; safe after a failure and safe to repeat."""
        await asyncio.gather(*(evaluation.cancel() for evaluation in self._running))
        self._running.clear()
        await self._parts.rollout.close()

    async def _train_step(self) -> None:
        parts = self._parts
        started_s = self._now()
        before = parts.shell.figures()
        buffer_version, groups = await parts.rollout.next_batch()
        waited_s = self._now() - started_s
        figures = batch_figures(groups, buffer_version)
        mode = choose_mode(ModeView(len(groups), len(groups), 0))
        learning_rate = self._settings.train.learning_rate_at(buffer_version, self._settings.run.max_train_steps)
        batch = train_batch(groups, self._settings.algorithm.advantage, learning_rate, parts.placeholder_id)
        report = await parts.backend.train(batch)
        plan = plan_roles(parts.roles())
        await self._collect("before" if buffer_version == 0 else "")
        sync = await parts.sync.to_version(buffer_version + 1)
        self.version = buffer_version + 1
        parts.rollout.set_version(self.version)
        wall_s = self._now() - started_s
        record = _step_record(self.version, figures, report, sync, before, parts.shell.figures(), waited_s, wall_s)
        cpu_s = await asyncio.to_thread(parts.cpu_s)
        record["cpu_s"] = {part: value - self._cpu_s.get(part, 0.0) for part, value in cpu_s.items()}
        self._cpu_s = cpu_s
        record |= {"mode": mode.mode, "roles": {str(rank): role.value for rank, role in plan.roles.items()}}
        await parts.repository.add_train_step([group.uid for group in groups], buffer_version, record, time.time())
        parts.record("train_step", **record)
        every = self._settings.evaluation.every_train_steps
        if every and self.version % every == 0 and self.version < self._settings.run.max_train_steps:
            self._evaluate(greedy=self._settings.evaluation.greedy == "always")
        if parts.prune_images is not None:
            await parts.prune_images()
        checkpoint_every = self._settings.train.checkpoint_every
        if checkpoint_every and self.version % checkpoint_every == 0:
            await parts.save(self.version)

    def _evaluate(self, *, greedy: bool) -> None:
        """Starts the measurement of the present version; it is collected before the next sync."""
        prompts = held_out(self._settings.tasks)
        for is_greedy in (False, True) if greedy else (False,):
            self._running.append(
                RunningEvaluation(
                    self._parts.shell,
                    prompts,
                    self.version,
                    greedy=is_greedy,
                    max_attempts=self._settings.agent.max_attempts,
                )
            )

    async def _collect(self, samples: str) -> None:
        """Waits for the measurements in flight; their tasks go first, so the wait is short."""
        running, self._running = self._running, []
        for evaluation in running:
            result = await evaluation.result(self._settings.evaluation.grace_s)
            self._parts.record("evaluation", **result.record())
            if result.kind == "sampled":
                self.success = result.success
                if samples:
                    self._parts.keep_samples(samples, result)


def _step_record(
    version: int,
    figures: BatchFigures,
    report: TrainReport,
    sync: SyncReport,
    before: ShellFigures,
    after: ShellFigures,
    waited_s: float,
    wall_s: float,
) -> dict[str, Any]:
    spent = after.since(before)
    return {
        "model_version": version,
        "mean_reward": figures.mean_reward,
        "success": figures.success,
        "mean_turns": figures.mean_turns,
        "staleness_mean": figures.staleness_mean,
        "staleness_max": figures.staleness_max,
        "num_sequences": report.num_sequences,
        "num_breaks": figures.num_breaks,
        "num_trained_tokens": report.num_trained_tokens,
        "goodput_tokens_per_s": figures.num_sampled_tokens / wall_s if wall_s else 0.0,
        "generated_tokens": spent.completion_tokens,
        "hit_rate": spent.hit_rate,
        "train_wall_s": report.wall_s,
        "train_cpu_s": report.cpu_s,
        "sync_wall_s": sync.wall_s,
        "training_wait_s": waited_s,
        "rollout_wait_s": spent.idle_s,
        "step_wall_s": wall_s,
        "parity_max_abs": sync.parity_max_abs,
        "num_pauses": spent.num_pauses,
        "num_resumes": spent.num_resumes,
        "num_aborts": spent.num_aborts,
        "dropped_tokens": spent.dropped_tokens,
        "num_requeues": spent.num_requeues,
        "num_turns": spent.num_turns,
        "scheduler_cpu_s": spent.scheduler_cpu_s,
        **{name: value for name, value in report.metrics.items() if name not in {"num_sequences"}},
    }
