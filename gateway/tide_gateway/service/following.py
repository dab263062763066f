"""Waits for a turn that another replica acts: its row tells how it ends."""

from __future__ import annotations

import asyncio

from tide_gateway import lifecycle
from tide_gateway.service import answers
from tide_gateway.service.live import Live, Registry, Running, removed, unfinished

_FIRST_LOOK_S, _MAX_LOOK_S = 0.02, 0.25


class Looks:
    """Pauses between looks at what another replica, or a thread of its own, does: from 20 ms on, at most 250 ms."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_LOOK_S
        self.waited_s = 0.0

    async def pause(self) -> None:
        """Wait before the next look."""
        await asyncio.sleep(self._pause_s)
        self.waited_s += self._pause_s
        self._pause_s = min(_MAX_LOOK_S, 1.5 * self._pause_s)


async def until_answered(registry: Registry, live: Live, running: Running) -> None:
    """Look until the turn is over, wherever it is acted; its clocks, kept by every replica's sweep, bound it."""
    looks = Looks()
    running.sends = False
    try:
        while True:
            task = await registry.repository.task(live.task.task_id)
            if task is None:
                running.worker = None
                running.fail(removed(live.task.task_id))
                break
            if task.version > live.task.version:
                live.task = task
            if task.turn > running.turn:
                stored = await registry.repository.turn_of(task.task_id, running.turn)
                if stored is not None and stored.answer is not None and not running.answer.done():
                    now_s = registry.time.now_s()
                    running.answer.set_result(answers.with_clocks(stored.answer, task, now_s))
                break
            if not lifecycle.is_open(task):
                running.worker = None
                running.fail(lifecycle.refusal(task))
                break
            if not lifecycle.is_busy(task):
                break
            await looks.pause()
    finally:
        if live.running is running and running.worker in (None, asyncio.current_task()):
            live.running = None
            if not running.answer.done():
                running.worker = None
                running.fail(unfinished())
