"""The evaluations of a run, and the ranks that keep a version for them while the others go on.

    start(v) -> tasks anchored to v -> all ended, or timeout_s -> recorded under v -> sync.join(the rank that kept v)
                     |
    spare() ---------+--> still running: the rank with most of its tasks keeps v; their calls move there
                     +--> no rank can be spared: waits grace_s, aborts the rest (partial, n of N)

Waits for: evaluation tasks (before a sync without a rank to spare, and at the run's end), each with a deadline.
Consumes: finished tasks. Unblocked by: their ends.
Source: TideRL section 3.2, table 1. Deviation: where several ranks serve, a sync does not wait for an evaluation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tide_trainer.errors import RunFailed
from tide_trainer.loop.evaluation import Evaluation, RunningEvaluation
from tide_trainer.loop.rank_versions import RankVersions
from tide_trainer.loop.rollout import TaskRunner
from tide_trainer.settings import EvaluationSettings
from tide_trainer.types import Prompt, RankId

_LOG = logging.getLogger(__name__)


class Joiner(Protocol):
    """What is asked of the weight sync."""

    async def join(self, rank: RankId) -> None:
        """Brings a rank that kept its version to the newest one."""
        ...


class AnchoredEvaluations:
    """Starts evaluations, records each once, and spares ranks for them at a sync.

    Attributes:
        success: of the newest version whose sampled evaluation is recorded; None before the first.

    Args:
        runner: runs tasks.
        ranks: which version each living rollout rank serves.
        joiner: the weight sync.
        record: gets each result once, with the label given to `start`.
        fail: ends the run with an error.
        settings: deadlines.
        max_attempts: attempts of a task that fails for infrastructure reasons.
    """

    def __init__(
        self,
        runner: TaskRunner,
        ranks: RankVersions,
        joiner: Joiner,
        record: Callable[[Evaluation, str], None],
        fail: Callable[[RunFailed], None],
        settings: EvaluationSettings,
        max_attempts: int,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self._joiner = joiner
        self._record = record
        self._fail = fail
        self._settings = settings
        self._max_attempts = max_attempts
        self._running: dict[RunningEvaluation, asyncio.Task[None]] = {}
        self._kept: dict[int, RankId] = {}
        self._keepers: dict[int, RankId] = {}
        self._measured = -1
        self.success: float | None = None

    @property
    def kept(self) -> frozenset[RankId]:
        """The ranks that keep an older version now."""
        return frozenset(self._kept.values())

    def start(self, prompts: Sequence[Prompt], version: int, *, greedy: bool, label: str = "") -> None:
        """Starts a measurement of the version that the ranks serve now; it ends by itself.

        Args:
            prompts: held-out prompts.
            version: the model version.
            greedy: temperature 0 if True, else 1.
            label: handed to `record`.
        """
        running = RunningEvaluation(self._runner, prompts, version, greedy=greedy, max_attempts=self._max_attempts)
        task = asyncio.create_task(self._see_to(running, label), name=f"evaluation {version} {running.kind}")
        self._running[running] = task
        versions = {one.version for one in self._running}
        self._keepers = {kept: rank for kept, rank in self._keepers.items() if kept in versions}
        task.add_done_callback(self._seen_to)

    async def spare(self) -> frozenset[RankId]:
        """The ranks that a weight sync must leave at their version now; decided without an await at the end.

        At least one rank is left to take the new version. Where there are more versions with live tasks than ranks to
        spare, the evaluations of the oldest get `grace_s` from now, and are recorded as partial then.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._settings.grace_s
        while True:
            # A version that is left out here has no rank to join: the coming sync takes it along.
            self._kept = self._choose()
            beyond = [one for one in self._running if one.live and one.version not in self._kept]
            if not beyond:
                self._keepers |= self._kept
                return self.kept
            left_s = max(0.0, until_s - loop.time())
            tasks = [self._running[one] for one in beyond]
            # What no rank serves any more cannot go on: there is nothing to wait for.
            limits_s = [0.0 if self._ranks.lost(one.version) else left_s for one in beyond]
            await asyncio.gather(*(one.finished(limit_s) for one, limit_s in zip(beyond, limits_s, strict=True)))
            await asyncio.wait(tasks)

    async def finish(self) -> None:
        """Waits until every evaluation is recorded, and every rank has joined; each has its deadline."""
        while self._running:
            await asyncio.wait(list(self._running.values()))

    async def close(self) -> None:
        """Aborts what runs, unrecorded; safe after a failure and safe to repeat."""
        running = dict(self._running)
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        await asyncio.gather(*(one.cancel() for one in running))

    def _choose(self) -> dict[int, RankId]:
        """Version -> the rank that keeps it: for the newest versions with live tasks, as many as can be spared."""
        living = self._ranks.living()
        kept: dict[int, RankId] = {}
        for version in sorted({one.version for one in self._running if one.live}, reverse=True):
            rank = self._kept.get(version)
            if rank not in living:
                rank = self._ranks.best_keeper(version)
            if rank is not None and len(kept) + 1 < len(living):
                kept[version] = rank
        return kept

    async def _see_to(self, running: RunningEvaluation, label: str) -> None:
        await running.finished(self._settings.timeout_s)
        keeper = self._keepers.get(running.version)
        result = running.evaluation(str(keeper) if keeper is not None else "")
        if result.kind == "sampled" and result.model_version >= self._measured:
            self.success, self._measured = result.success, result.model_version
        self._record(result, label)
        if running.version in (one.version for one in self._running if one is not running and one.live):
            return
        rank = self._kept.pop(running.version, None)
        if rank is not None:
            await self._joiner.join(rank)
            _LOG.info("rollout rank %s kept version %d and has the newest again", rank, running.version)

    def _seen_to(self, task: asyncio.Task[None]) -> None:
        self._running = {one: other for one, other in self._running.items() if other is not task}
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, RunFailed) else RunFailed(f"{task.get_name()}: {error!r}"))
