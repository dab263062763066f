"""One attempt's play: its session at the router, its run on an agent worker, and what came of it.

    router.open -> worker.run (the agent, turn after turn) -> router.close -> captured tokens and the worker's account

Waits for: the worker, whose own deadline bounds the play. A gateway without a place ends it before it has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tide_trainer.loop.ports import RouterPort, WorkerPool
from tide_trainer.loop.shell_task import ShellTask
from tide_trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a play: the router's capture, and the worker's account."""

    captured: Mapping[str, Any]
    done: Mapping[str, Any]

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the gateway may have a place; None where the task was started, or failed."""
        told = self.done.get("retry_after_s")
        return None if told is None else float(told)


class TaskPlay:
    """Plays tasks.

    Args:
        router: where its calls go.
        workers: the agent worker processes.
        settings: the whole configuration.
        run: the run's name, first part of every key at the gateway.
    """

    def __init__(self, router: RouterPort, workers: WorkerPool, settings: TrainerSettings, run: str) -> None:
        self._router = router
        self._workers = workers
        self._settings = settings
        self._run = run
        workers.handle(started=self._on_started)
        self._starting: dict[str, ShellTask] = {}

    async def play(self, task: ShellTask) -> Played:
        """Plays one attempt; cancelling ends it at the worker, the gateway and the router."""
        sampling = task.sampling(self._settings.rollout)
        spec = task.spec(self._run, self._settings.agent.task_timeout_s)
        await self._router.open(task.session, task.api_key, sampling, self._settings.rollout.max_context_tokens)
        self._starting[task.session] = task
        try:
            done = await self._workers.run(task.session, spec, task.api_key, self._router.url)
        finally:
            self._starting.pop(task.session, None)
            captured = await self._router.close(task.session)
        return Played(captured, done)

    def _on_started(self, event: Mapping[str, Any]) -> None:
        task = self._starting.get(event["session"])
        if task is not None and not task.task_id.done():
            task.task_id.set_result(event["task_id"])
