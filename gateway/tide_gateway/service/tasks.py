"""The service that the endpoints call: it wires the parts together, opens after a crash, and stops whole."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from tide_gateway.committer import Committer
from tide_gateway.fleet import Fleet
from tide_gateway.members import LEASE_S, Members, this_replica
from tide_gateway.metrics import Metrics
from tide_gateway.repository import Instance, Repository, StorageFailed
from tide_gateway.repository.replicas import Heartbeat
from tide_gateway.repository.slots import Slots, rules_of
from tide_gateway.runtimes import Place, Runtime
from tide_gateway.service import answers, pictures
from tide_gateway.service.closing import close_tasks, destroy_all
from tide_gateway.service.counting import CountingSink
from tide_gateway.service.draining import drain, to_its_end
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Registry
from tide_gateway.service.pauses import Pauses
from tide_gateway.service.readiness import Readiness
from tide_gateway.service.recovery import Recovery
from tide_gateway.service.starts import Starts
from tide_gateway.service.sweeper import Sweeper
from tide_gateway.service.turns import Turns
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import EndRequest, EpochRequest, StartRequest, TaskView

log = logging.getLogger(__name__)

STOP_LIMIT_S = 60.0
"""Each part of a stop: what is in flight or left after that is found by the next gateway."""


class TaskService:
    """Serves tasks of the registered environments.

    Args:
        environments: by name.
        runtimes: by the name that an environment's `runtime` gives.
        repository: the tables.
        time: the one source of time.
        metrics: what this process counts; new ones where none are given.
        sweep_interval_s: seconds between sweeps.
        clock_sweeps: False in tests that sweep by hand on a manual clock.
        lease_s: seconds after which a silent replica is taken for dead.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentSpec],
        runtimes: Mapping[str, Runtime],
        repository: Repository,
        time: Timekeeper,
        *,
        metrics: Metrics | None = None,
        sweep_interval_s: float = 0.1,
        clock_sweeps: bool = True,
        lease_s: float = LEASE_S,
    ) -> None:
        self.replica = secrets.token_hex(4)
        self.environments = environments
        self.fleets: dict[str, Fleet] = {}
        self.metrics = metrics or Metrics(environments)
        self.committer = Committer(CountingSink(repository, self.metrics))
        self.members = Members(this_replica(self.replica, time.now_s()), lease_s)
        self._repository, self._runtimes, self._time = repository, runtimes, time
        self._registry = Registry(repository, self.committer, time, self.members, self.metrics)
        self._endings = Endings(self._registry, self.fleets)
        self._pauses = Pauses(self._registry, self._endings)
        self._turns = Turns(self._registry, self._endings, self._pauses)
        self._starts = Starts(self._registry, self.fleets, self._endings)
        self._recovery = Recovery(self._registry, self._starts, self._turns, self._pauses, self._endings)
        self._sweeper = Sweeper(self._registry, self._endings, self._recovery, self.fleets, runtimes, sweep_interval_s)
        self.readiness = Readiness(repository, self.members, time, runtimes, environments, self._starts)
        self._clock_sweeps = clock_sweeps
        self._loops: list[asyncio.Task[None]] = []
        self._stopped = False
        for name, spec in environments.items():
            runtime = runtimes[spec.runtime]
            self.fleets[name] = Fleet(spec, runtime, repository.instances, self.members, time, self._lost)

    async def open(self) -> None:
        """Join the other replicas, or set right what the last one left; then begin to serve.

        Where no replica was up, that time is taken off all running clocks, caps and heartbeats. Environment servers
        that live are attached to, and what was in flight goes on; tasks whose server is gone end as
        failed(environment_lost), with a null reward. Cancelled at any moment, `stop` leaves all as if it had opened.
        """
        now_s = self._time.now_s()
        # Written after `stop` has removed it, the row would be one of a replica that lives.
        outage_s = await to_its_end(
            self._repository.replicas.enter(
                self.members.now(now_s), lambda row: self._repository.shared and self.members.is_alive(row, now_s)
            )
        )
        if outage_s > 0:
            log.info("no gateway was up for %.1f s, which no clock counts", outage_s)
        if self._clock_sweeps:
            # From here on: a long way to the first heartbeat is an outage too.
            self.members.wrote(asyncio.get_running_loop().time())
        await self._sweeper.beat_once()
        await self._sweeper.reconcile()
        for failure in await self._sweeper.tend():
            log.error("a task that an earlier gateway left could not be taken over yet: %s", failure)
        if self._clock_sweeps:
            self._loops = [
                asyncio.create_task(self._sweeper.run(), name="tide-sweep"),
                asyncio.create_task(self._sweeper.beat(), name="tide-heartbeat"),
            ]

    async def stop(self, drain_s: float = 3.0, *, keep: bool = False) -> None:
        """Take no new starts, let running turns finish, then end all tasks and servers in parallel, or leave them.

        They are left as they are where other replicas live, which take them over, or where `keep` says so, for the
        next gateway. Calls that wait get 503; calls that come later read what is stored. Safe to repeat.

        Args:
            drain_s: seconds that running turns get.
            keep: leave tasks and servers to the next gateway.
        """
        self._starts.stopping = True
        await drain(self._registry, drain_s)
        self._registry.closed = True
        gone = TideError("unavailable", "the gateway is stopping; call again later", retry_after_s=1)
        for live in list(self._registry.lives.values()):
            self._endings.give_up(live, gone)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._break_off()
        except TimeoutError:
            left = ", ".join(self._registry.in_flight()) or "writes"
            log.error("not over within %g s, and left to the next gateway: %s", STOP_LIMIT_S, left)
        if self._stopped:
            return
        self._stopped = True
        now_s = self._time.now_s()
        try:
            last = await self._repository.replicas.leave(
                self.members.now(now_s), lambda row: self._repository.shared and self.members.is_alive(row, now_s)
            )
            ends = last and not keep
            # Read now: what a gateway that opens from here on makes, or takes over, is not ours to end.
            rows = await self._repository.instances.all() if ends else []
            if ends:
                lost = [task for task in await self._repository.open_tasks() if not task.released]
                await close_tasks(self._repository, lost, now_s)
            await asyncio.gather(*(fleet.close(destroy=ends) for fleet in self.fleets.values()))
            if ends:
                await destroy_all(self._repository.instances, rows, self._runtimes, self.fleets)
        except StorageFailed as error:
            log.error("the stop could not be written down, and is left to the next gateway: %s", error)
            # A keeper whose clients are closed below would take its server for dead.
            await asyncio.gather(*(fleet.close(destroy=False) for fleet in self.fleets.values()))
        self._registry.lives.clear()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await asyncio.gather(*(runtime.close() for runtime in self._runtimes.values()))
        except TimeoutError:
            log.error("the runtimes were not closed within %g s", STOP_LIMIT_S)

    @property
    def stopping(self) -> bool:
        """True once a stop has begun: no start is taken any more, and soon no turn."""
        return self._starts.stopping

    async def start(self, owner: str, request: StartRequest, data: dict[str, Any]) -> bytes:
        """Answer `POST /start`; `data` is the body as parsed."""
        return await self._starts.start(owner, request, data)

    def observe(self, owner: str, task_id: str, turn: int, message: dict[str, Any]) -> Coroutine[Any, Any, bytes]:
        """Answer `POST /observation`."""
        return self._turns.observe(owner, task_id, turn, message)

    async def latest(self, owner: str, task_id: str) -> bytes:
        """Answer `GET /observation`."""
        return await self._turns.latest(owner, task_id)

    async def pause(self, owner: str, request: EpochRequest) -> bytes:
        """Answer `POST /pause`."""
        return await self._pauses.change(owner, request, paused=True)

    async def resume(self, owner: str, request: EpochRequest) -> bytes:
        """Answer `POST /resume`."""
        return await self._pauses.change(owner, request, paused=False)

    async def end(self, owner: str | None, request: EndRequest) -> bytes:
        """Answer `POST /end`; owner None ends anyone's task."""
        return await self._endings.end(owner, request)

    async def heartbeat(self, owner: str, prefix: str, timeout_s: float | None) -> int:
        """Write an owner's heartbeat, or withdraw it with None; the number of its open tasks under the prefix."""
        if timeout_s is None:
            await self._repository.replicas.forget_owner_beat(owner, prefix)
        else:
            await self._repository.replicas.owner_beat(Heartbeat(owner, prefix, timeout_s, self._time.now_s()))
        return len(await self._repository.open_of(owner, prefix, limit=100_000))

    async def task(self, owner: str | None, task_id: str) -> TaskView:
        """One task as `GET /tasks/{id}` shows it; owner None shows anyone's."""
        return answers.view((await self._registry.find(owner, task_id)).task, self._time.now_s())

    async def tasks(
        self, owner: str | None, *, limit: int, after: str | None, state: TaskState | None, environment: str | None
    ) -> list[TaskView]:
        """A page of tasks as `GET /tasks` shows them, newest first; owner None shows everyone's."""
        rows = await self._repository.tasks(owner, limit=limit, after=after, state=state, environment=environment)
        now_s = self._time.now_s()
        return [answers.view(row, now_s) for row in rows]

    async def history(self, owner: str | None, task_id: str) -> list[tuple[str, float, str]]:
        """A task's events: kind, moment, detail."""
        await self._registry.find(owner, task_id)
        return await self._repository.events_of(task_id)

    async def image(self, owner: str | None, digest: str) -> bytes:
        """The bytes of an image that some task of the owner shows; owner None reads everyone's.

        Raises:
            TideError: there is none.
        """
        return await pictures.read(self._repository.images, owner, digest)

    async def inlined(self, owner: str | None, answer: bytes) -> bytes:
        """An answer with the images of the owner's tasks in place of their references."""
        return await pictures.put_back(self._repository.images, owner, answer)

    async def slots(self, owner: str) -> dict[str, Slots]:
        """The slots of each environment as an owner sees them."""
        rules = {name: rules_of(fleet.spec, fleet.capacity) for name, fleet in self.fleets.items()}
        return await self._repository.slots.views(rules, owner, self._time.now_s())

    async def servers(self) -> list[tuple[Instance, Place | None, int]]:
        """All environment servers: row, place and number of tasks."""
        rows = await self._repository.instances.all()
        loads = await self._repository.instances.loads()
        return [(row, Place.loads(row.place) if row.place else None, loads[row.name]) for row in rows]

    def forget(self, task_ids: Iterable[str]) -> None:
        """Drop what is cached of tasks whose rows are gone."""
        for task_id in task_ids:
            self._registry.lives.pop(task_id, None)

    async def sweep(self) -> None:
        """One whole sweep now."""
        await self._sweeper.sweep()

    async def _lost(self, instance: str, code: str, why: str) -> None:
        task_ids = await self._repository.held_by(instance)
        words = why if code == "environment_failed" else f"instance {instance}: {why}"
        outcomes = await asyncio.gather(
            *(self._endings.lose(task_id, code, words) for task_id in task_ids), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures:
            # The keeper keeps the row, and tries again: without it nobody would know that the tasks are lost.
            words = f"{len(failures)} tasks of instance {instance} could not be ended: {failures[0]!r}"
            raise StorageFailed(words) from failures[0]

    async def _break_off(self) -> None:
        """Cancel what goes on by itself, and wait for what must be written."""
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        await self._registry.drain()
        await self._starts.settle()
        await self.committer.close()
