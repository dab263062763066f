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

from tide_trainer.loop.anchors import AnchoredEvaluations
from tide_trainer.loop.batches import BatchFigures, batch_figures, train_batch
from tide_trainer.loop.evaluation import Evaluation
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
        version: the model version that the ranks begin with; above 0 where a run goes on.
    """

    def __init__(
        self, parts: Parts, settings: TrainerSettings, now: Callable[[], float] = time.monotonic, version: int = 0
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._now = now
        self._started_s = now()
        self._evaluations = AnchoredEvaluations(
            parts.shell,
            parts.shell.versions,
            parts.sync,
            self._evaluated,
            parts.shell.fail,
            settings.evaluation,
            settings.agent.max_attempts,
        )
        self.version = version
        self._cpu_s: dict[str, float] = {}

    async def run(self) -> str:
        """Runs to the end; returns why it ended: max_train_steps, max_time_s or target_success."""
        settings = self._settings
        self._cpu_s = await asyncio.to_thread(self._parts.cpu_s)
        if self.version == 0:
            self._evaluate("ends", "before")
        if not self._over():
            self._parts.rollout.open()
        while not (reason := self._over()):
            # The version that the run ends with is measured once, by the final evaluation.
            every = settings.evaluation.every_train_steps
            if every and self.version and self.version % every == 0:
                self._evaluate("between")
            await self._train_step()
        await self._parts.rollout.close()
        await self._evaluations.finish()
        self._parts.record("phase", phase="final evaluation")
        self._evaluate("ends", "after")
        await self._evaluations.finish()
        await self._parts.save(self.version)
        return reason

    async def close(self) -> None:
        """Aborts evaluations and rollouts; safe after a failure and safe to repeat."""
        await self._evaluations.close()
        await self._parts.rollout.close()

    def _over(self) -> str:
        """Why the run ends now, empty while it does not."""
        run = self._settings.run
        if self.version >= run.max_train_steps:
            return "max_train_steps"
        if self.version and run.max_time_s and self._now() - self._started_s >= run.max_time_s:
            return "max_time_s"
        if self.version and run.target_success and (self._evaluations.success or 0.0) >= run.target_success:
            return "target_success"
        return ""

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
        sync = await parts.sync.to_version(buffer_version + 1, self._evaluations.spare)
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
        if parts.prune_images is not None:
            await parts.prune_images()
        checkpoint_every = self._settings.train.checkpoint_every
        if checkpoint_every and self.version % checkpoint_every == 0:
            await parts.save(self.version)

    def _evaluate(self, when: str, label: str = "") -> None:
        """Starts the measurement of the present version; it is recorded when it ends, whatever version is trained."""
        prompts, greedy = held_out(self._settings.tasks), self._settings.evaluation.greedy
        for is_greedy in (False, True) if greedy in ("always", when) else (False,):
            self._evaluations.start(prompts, self.version, greedy=is_greedy, label=label)

    def _evaluated(self, result: Evaluation, label: str) -> None:
        self._parts.record("evaluation", **result.record())
        if label and result.kind == "sampled":
            self._parts.keep_samples(label, result)


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
        "kept_ranks": sorted(map(str, sync.kept)),
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
