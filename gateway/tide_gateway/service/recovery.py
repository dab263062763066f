"""What dead replicas left: tasks with something in flight are taken over, owners that fell silent are ended.

    row with a dead worker -> [commit: ours] -> starting: start again; acting: send again; ending, done: release again;
                                                paused: tell the environment again

Every replica may try; the commit decides which one does it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tide_gateway import lifecycle
from tide_gateway.repository.replicas import Heartbeat
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Live, Registry
from tide_gateway.service.pauses import Pauses
from tide_gateway.service.starts import Starts
from tide_gateway.service.turns import Turns
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
MAX_ENDED_AT_ONCE = 1000
OWNER_LOST = "owner_lost"


class Recovery:
    """Takes over work.

    Args:
        registry: the tasks.
        starts, turns, pauses, endings: go on with what was begun.
    """

    def __init__(self, registry: Registry, starts: Starts, turns: Turns, pauses: Pauses, endings: Endings) -> None:
        self._registry = registry
        self._starts = starts
        self._turns = turns
        self._pauses = pauses
        self._endings = endings
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def take_over_all(self, unfinished: Iterable[tuple[str, str]]) -> list[Exception]:
        """Of tasks that have something in flight (id and worker), take over those whose worker is dead, and those of
        this replica's own that lost their work to a fault; what failed is returned, and is tried again next time."""
        members, left = self._registry.members, []
        for task_id, worker in unfinished:
            live = self._registry.lives.get(task_id)
            held = live is not None and (live.works or live.lock.locked() or live.peer_lock.locked())
            idle = task_id not in self._starts.admitting and not held
            if worker not in members.alive or (worker == members.me.name and idle):
                left.append(task_id)
        return await self._all(left, self.take_over)

    async def take_over(self, task_id: str) -> None:
        """Go on with a task, unless something is in flight for it after all."""
        task = await self._registry.repository.task(task_id)
        if task is None:
            return
        live = self._registry.adopt(task)

        async def take() -> bool:
            now, members = live.task, self._registry.members
            mine = now.worker == members.me.name
            if not now.worker or (now.worker in members.alive and not mine) or (mine and live.works):
                return False
            await self._endings.refuse_elsewhere(now)
            await self._registry.commit(live, lifecycle.taken_over(now, members.me.name))
            await self._go_on(live)
            return True

        if await self._registry.decide(live, take):
            log.info("task %s (%s) is taken over from replica %s", task_id, task.state.value, task.worker)
            if live.task.state is TaskState.PAUSED:
                live.told = (-1, False)
                # A server that does not listen must not hold up the others.
                self._registry.spawn(self._pauses.settle(live), f"tide-tell-{task_id}")

    async def end_of_owner(self, beat: Heartbeat) -> list[Exception]:
        """End the open tasks of an owner whose heartbeat has not come; the heartbeat goes with the last of them."""
        ids = await self._registry.repository.open_of(beat.owner, beat.prefix, limit=MAX_ENDED_AT_ONCE)
        if ids:
            log.warning("owner %s is silent for %g s: %d tasks end", beat.owner, beat.timeout_s, len(ids))
        failures = await self._all(ids, self._end_for_silence)
        if len(ids) < MAX_ENDED_AT_ONCE and not failures:
            await self._registry.repository.replicas.forget_owner_beat(beat.owner, beat.prefix, seen_s=beat.seen_s)
        return failures

    async def read_again(self) -> None:
        """Read the rows of the tasks that are in flight here, and give up what others have ended."""
        registry = self._registry
        busy = {task_id: live.task.version for task_id, live in registry.lives.items() if live.busy}
        if not busy:
            return
        for task in await registry.repository.newer_than(busy):
            live = registry.adopt(task)
            over = task.state in (TaskState.ENDING, TaskState.ENDED)
            if over and live.task.worker != registry.me and live.running is not None:
                self._endings.give_up(live, lifecycle.refusal(live.task))

    def forget_idle(self) -> None:
        """Drop the cached rows of tasks for which nothing is in flight here; they are read again when asked for."""
        for live in [live for live in self._registry.lives.values() if not live.busy]:
            self._registry.forget(live)

    async def _go_on(self, live: Live) -> None:
        state, repository = live.task.state, self._registry.repository
        if state is TaskState.STARTING:
            stored = await repository.start_of(live.task.task_id)
            if not self._endings.hosts(live.task):
                words = f"environment {live.task.environment} is not registered any more"
                await self._endings.fail(live, "environment_lost", words)
            elif stored is not None:
                self._starts.take_over(live, stored.request)
        elif lifecycle.is_busy(live.task):
            await self._turns.take_over(live)
        elif state in (TaskState.ENDING, TaskState.DONE):
            self._endings.release(live)

    async def _end_for_silence(self, task_id: str) -> None:
        task = await self._registry.repository.task(task_id)
        if task is None:
            return
        live = self._registry.adopt(task)

        async def end() -> None:
            await self._endings.refuse_elsewhere(live.task)
            if lifecycle.is_open(live.task):
                await self._endings.begin(live, Outcome(kind="aborted", reason=OWNER_LOST), detail=OWNER_LOST)

        await self._registry.decide(live, end)

    async def _all(self, task_ids: list[str], work) -> list[Exception]:
        async def one(task_id: str) -> None:
            async with self._gate:
                await work(task_id)

        outcomes = await asyncio.gather(*(one(task_id) for task_id in task_ids), return_exceptions=True)
        failures: list[Exception] = []
        for task_id, outcome in zip(task_ids, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failures.append(outcome)
                if not isinstance(outcome, TideError):
                    log.error("task %s could not be dealt with", task_id, exc_info=outcome)
        return failures
