"""`/pause` and `/resume`: our clocks stop with the commit; the environment server is told afterwards, in order.

    /pause  -> [commit: paused, by this replica] -> answer -> environment /pause -> freeze -> [commit: nobody's]
    /resume -> [commit: waiting] -> answer -> thaw -> environment /resume

A replica that dies before the environment was told leaves its name in the row; another one tells it then. A resume
that was not told is made up for by the next action.
"""

from __future__ import annotations

import asyncio
import logging

from tide_gateway import lifecycle, upstream
from tide_gateway.rows import Event
from tide_gateway.runtimes import Gone
from tide_gateway.service import answers
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Live, Registry
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError
from tide_sdk.wire import EpochRequest

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 10.0
THAW_PAUSE_S = 0.5


class Pauses:
    """Pauses and resumes tasks.

    Args:
        registry: the open tasks.
        endings: ends a task whose clock had run out before the pause, and reaches environment servers.
    """

    def __init__(self, registry: Registry, endings: Endings) -> None:
        self._registry = registry
        self._endings = endings

    async def change(self, owner: str, request: EpochRequest, *, paused: bool) -> bytes:
        """Answer `/pause` or `/resume`. An epoch that is not newer answers the present state."""
        registry = self._registry
        live = await registry.find(owner, request.task_id)

        async def change() -> bytes:
            await self._endings.expire_if_overdue(live)
            now_s = registry.time.now_s()
            if paused:
                after = lifecycle.pause(live.task, request.epoch, now_s, registry.me)
            else:
                after = lifecycle.resume(live.task, request.epoch, now_s)
            if after is not live.task:
                moved, since_s = after.state is not live.task.state, live.task.paused_since_s
                events = (Event(after.state.value, now_s, f"epoch {after.epoch}"),) if moved else ()
                await registry.commit(live, after, events=events)
                if moved and since_s is not None:
                    registry.metrics.paused_s.add(after.environment, by=max(0.0, now_s - since_s))
                if moved:
                    live.told = (-1, False)  # whatever it was told before, by whomever
            return answers.epoch_answer(live.task, now_s)

        answer = await registry.decide(live, change)
        if live.told not in (None, _wanted(live)) and lifecycle.is_open(live.task) and not lifecycle.is_busy(live.task):
            registry.spawn(self.settle(live), f"tide-tell-{request.task_id}")
        return answer

    async def settle(self, live: Live) -> None:
        """Tell the environment server until it knows whether the task is paused. Safe to repeat.

        A server that does not listen is written down; the clocks that count are ours and have stopped already.
        """
        while True:
            async with live.peer_lock:
                await self._tell_all(live)
            if live.task.state is not TaskState.PAUSED or live.task.worker != self._registry.me:
                return
            await self._registry.decide(live, lambda: self._told(live))
            if not lifecycle.is_open(live.task) or live.told == _wanted(live):
                return  # else another replica has resumed it meanwhile

    async def before_action(self, live: Live) -> None:
        """Make sure that the environment server does not hold a pause which is over, as far as that is not known.

        Raises:
            EnvironmentLost: it is gone. The caller sets the deadline.
        """
        wanted = (live.task.epoch, False)
        if live.told not in (None, wanted) or (
            live.told is None and (live.task.epoch > 0 or self._endings.freezes(live.task))
        ):
            await self.settle(live)
            while self._endings.freezes(live.task) and live.told != _wanted(live) and lifecycle.is_busy(live.task):
                # What is frozen answers nothing, and takes no action: not even to say that it does not.
                await asyncio.sleep(THAW_PAUSE_S)
                await self._endings.reach(live.task)
                await self.settle(live)

    async def _tell_all(self, live: Live) -> None:
        while lifecycle.is_open(live.task) and live.task.peer_task and live.told != _wanted(live):
            live.told = told = _wanted(live)
            try:
                await self._tell(live, paused=told[1])
            except (OSError, Gone, upstream.EnvironmentFailed, upstream.EnvironmentLost) as error:
                words = error or type(error).__name__
                log.warning("task %s: telling the environment failed: %s", live.task.task_id, words)
                if live.told == told and not told[1]:
                    live.told = (-1, True)  # the next action must not meet a pause
                return

    async def _tell(self, live: Live, *, paused: bool) -> None:
        async with asyncio.timeout(TELL_TIMEOUT_S):
            task, server = live.task, await self._endings.reach(live.task)
            freezes = self._endings.freezes(task)
            if freezes and not paused:
                await self._endings.freeze(task, server, frozen=False)
            # Row versions only grow, so that a late message can never undo a newer one.
            await upstream.pause(server, task.peer_task, paused=paused, epoch=task.version, timeout_s=TELL_TIMEOUT_S)
            if freezes and paused and live.told == _wanted(live):
                await self._endings.freeze(task, server, frozen=True)

    async def _told(self, live: Live) -> None:
        task = live.task
        if task.state is TaskState.PAUSED and task.worker == self._registry.me and live.told == _wanted(live):
            try:
                await self._registry.commit(live, lifecycle.taken_over(task, ""))
            except TideError as error:
                log.debug("task %s: that the environment was told is not written down: %s", task.task_id, error)


def _wanted(live: Live) -> tuple[int, bool]:
    """What the environment server should have been told last."""
    return live.task.epoch, live.task.state is TaskState.PAUSED
