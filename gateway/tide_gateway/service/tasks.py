"""The service that the endpoints call: it wires the parts together, opens after a crash, and stops whole."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from tide_gateway import lifecycle
from tide_gateway.committer import Committer
from tide_gateway.fleet import Fleet
from tide_gateway.lifecycle import Task
from tide_gateway.repository import Repository, StorageFailed
from tide_gateway.rows import Change, Event
from tide_gateway.runtimes import Runtime
from tide_gateway.service import answers
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Registry
from tide_gateway.service.pauses import Pauses
from tide_gateway.service.starts import Starts
from tide_gateway.service.sweeper import Sweeper
from tide_gateway.service.turns import Turns
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import EndRequest, EpochRequest, Outcome, StartRequest, TaskView

log = logging.getLogger(__name__)


class TaskService:
    """Serves tasks of the registered environments.

    Args:
        environments: by name.
        runtimes: by the name that an environment's `runtime` gives.
        repository: the tables.
        time: the one source of time.
        sweep_interval_s: seconds between sweeps.
        clock_sweeps: False in tests that sweep by hand on a manual clock.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentSpec],
        runtimes: Mapping[str, Runtime],
        repository: Repository,
        time: Timekeeper,
        *,
        sweep_interval_s: float = 0.1,
        clock_sweeps: bool = True,
    ) -> None:
        self.replica = secrets.token_hex(4)
        self.environments = environments
        self.fleets: dict[str, Fleet] = {}
        self.committer = Committer(repository)
        self._repository = repository
        self._runtimes = runtimes
        self._time = time
        self._registry = Registry(repository, self.committer, time)
        self._endings = Endings(self._registry, self.fleets)
        self._pauses = Pauses(self._registry, self._endings)
        self._turns = Turns(self._registry, self._endings, self._pauses)
        self._starts = Starts(self._registry, self.fleets, self._endings)
        self._sweeper = Sweeper(self._registry, self._endings, self.replica, sweep_interval_s)
        self._clock_sweeps = clock_sweeps
        self._sweeping: asyncio.Task[None] | None = None
        for name, spec in environments.items():
            runtime = runtimes[spec.runtime]
            self.fleets[name] = Fleet(spec, runtime, repository, self.replica, time, self._lost)

    async def open(self) -> None:
        """Set right what an earlier gateway left, then begin to serve.

        The outage is taken off all running clocks. Environment servers die with their gateway: processes that are
        left are killed, and the tasks that they held end as failed(environment_lost), with a null reward.
        """
        now_s = self._time.now_s()
        seen_s = await self._repository.last_seen_s()
        if seen_s is not None and now_s > seen_s:
            await self._repository.forgive(now_s - seen_s)
        leftovers = await self._repository.instances()
        for kind, runtime in self._runtimes.items():
            killed = await runtime.remove_leftovers([row.name for row in leftovers if row.runtime == kind])
            if killed:
                log.warning("killed %d processes that an earlier gateway left", killed)
        for row in leftovers:
            await self._repository.forget_instance(row.name)
        lost = [task for task in await self._repository.open_tasks() if not task.released]
        await self._close_tasks(lost, "the gateway was restarted, and the environment server with it")
        await self._repository.enter_replica(self.replica, now_s)
        if self._clock_sweeps:
            self._sweeping = asyncio.create_task(self._sweeper.run(), name="tide-sweep")

    async def stop(self, drain_s: float = 3.0) -> None:
        """Take no new starts, let running turns finish, end the rest, stop all servers in parallel. Safe to repeat.

        Calls that wait get 503; calls that come later read what is stored.

        Args:
            drain_s: seconds that running turns get.
        """
        self._starts.stopping = True
        await self._drain(drain_s)
        self._registry.closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
        gone = TideError("unavailable", "the gateway is stopping; call again later", retry_after_s=5)
        for live in list(self._registry.lives.values()):
            if live.started is not None and not live.started.done():
                live.started.set_exception(gone)
                live.started.exception()
            if live.running is not None:
                live.running.fail(gone)
        await self._registry.drain()
        await self.committer.close()
        tasks = [task for task in await self._repository.open_tasks() if not task.released]
        await self._close_tasks(tasks, "the gateway was stopped, and the environment server with it")
        self._registry.lives.clear()
        await asyncio.gather(*(fleet.close() for fleet in self.fleets.values()))
        await asyncio.gather(*(runtime.close() for runtime in self._runtimes.values()))
        try:
            await self._repository.heartbeat(self.replica, self._time.now_s())
        except StorageFailed as error:
            log.error("the stop could not be written down, and is left to the next gateway: %s", error)

    async def start(self, owner: str, request: StartRequest, data: dict[str, Any]) -> bytes:
        """Answer `POST /start`; `data` is the body as parsed."""
        return await self._starts.start(owner, request, data)

    async def observe(self, owner: str, task_id: str, turn: int, message: dict[str, Any]) -> bytes:
        """Answer `POST /observation`."""
        return await self._turns.observe(owner, task_id, turn, message)

    async def latest(self, owner: str, task_id: str) -> bytes:
        """Answer `GET /observation`."""
        return await self._turns.latest(owner, task_id)

    async def pause(self, owner: str, request: EpochRequest) -> bytes:
        """Answer `POST /pause`."""
        return await self._pauses.change(owner, request, paused=True)

    async def resume(self, owner: str, request: EpochRequest) -> bytes:
        """Answer `POST /resume`."""
        return await self._pauses.change(owner, request, paused=False)

    async def end(self, owner: str, request: EndRequest) -> bytes:
        """Answer `POST /end`."""
        return await self._endings.end(owner, request)

    async def task(self, owner: str, task_id: str) -> TaskView:
        """One task as `GET /tasks/{id}` shows it."""
        return answers.view((await self._registry.find(owner, task_id)).task, self._time.now_s())

    async def tasks(
        self, owner: str, *, limit: int, after: str | None, state: TaskState | None, environment: str | None
    ) -> list[TaskView]:
        """A page of tasks as `GET /tasks` shows them, newest first."""
        rows = await self._repository.tasks(owner, limit=limit, after=after, state=state, environment=environment)
        now_s = self._time.now_s()
        return [answers.view(row, now_s) for row in rows]

    async def history(self, owner: str, task_id: str) -> list[tuple[str, float, str]]:
        """A task's events: kind, moment, detail."""
        await self._registry.find(owner, task_id)
        return await self._repository.events_of(task_id)

    async def sweep(self) -> None:
        """One sweep now."""
        await self._sweeper.sweep()

    async def _lost(self, instance: str, task_ids: list[str]) -> None:
        lives = [self._registry.lives[task_id] for task_id in task_ids if task_id in self._registry.lives]
        await asyncio.gather(*(self._endings.lost(live, f"instance {instance} is gone") for live in lives))

    async def _drain(self, drain_s: float) -> None:
        busy = [live.running.answer for live in self._registry.lives.values() if live.running is not None]
        releasing = [live.releasing for live in self._registry.lives.values() if live.releasing is not None]
        pending = [future for future in (*busy, *releasing) if not future.done()]
        if pending:
            await asyncio.wait(pending, timeout=drain_s)

    async def _close_tasks(self, tasks: list[Task], detail: str) -> None:
        """End tasks whose environment is gone, without asking it; one transaction for all."""
        now_s = self._time.now_s()
        changes: list[Change] = []
        for task in tasks:
            after = task
            if lifecycle.is_open(task):
                after = lifecycle.ending(task, Outcome(kind="failed", reason="environment_lost"), now_s, detail=detail)
            after = lifecycle.released(after, None, now_s, detail)
            kind = "ended" if after.state is TaskState.ENDED else "released"
            changes.append(Change(lifecycle.bumped(after), events=(Event(kind, now_s, detail),)))
        for failure in await self._repository.apply(changes) if changes else []:
            if failure is not None:
                log.error("a task could not be ended", exc_info=failure)
