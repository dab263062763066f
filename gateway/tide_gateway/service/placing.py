"""Where a start takes place: an instance by its row, the server behind it, and another one where that server is gone.

named in the task's first row, or [commit: instance] -> healthy server -> upstream /start -> its answer
                                          ^---------------- gone, or died in it ------|
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tide_gateway import deadlines, upstream
from tide_gateway.fleet import Fleet, Vanished
from tide_gateway.repository.instances import StaleTask
from tide_gateway.runtimes import Server
from tide_gateway.service.endings import peer_start
from tide_gateway.service.live import Live, Registry, removed
from tide_sdk.clocks import TaskState
from tide_sdk.wire import StartResponse

MAX_LOST_SERVERS = 2
"""Servers that may die under one start before it is taken for the start's own doing."""


class Placing:
    """Places starting tasks.

    Args:
        registry: the tasks.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def start_somewhere(
        self, live: Live, data: dict[str, Any], fleet: Fleet
    ) -> tuple[StartResponse, dict[str, Any]]:
        """The environment's answer to the start; where a server dies in it, another one is tried."""
        avoid: set[str] = set()
        while True:
            server = await self._place(live, fleet, avoid)
            limit_s = deadlines.remaining_s(live.task, self._registry.time.now_s()) + 1.0
            body = peer_start(live.task, server.health.environment, data)
            try:
                return await upstream.start(server, body, limit_s)
            except upstream.EnvironmentLost:
                avoid.add(server.name)
                if len(avoid) > MAX_LOST_SERVERS:
                    raise

    async def _place(self, live: Live, fleet: Fleet, avoid: set[str]) -> Server:
        """A healthy server with room for the task, its name committed in the task's row.

        Raises:
            LaunchFailed: the launch that it waited for failed.
            StaleTask: the task was ended, or is another replica's now.
        """
        while True:
            name = live.task.instance
            if name and name not in avoid:
                try:
                    return await fleet.ready(name)
                except Vanished:
                    avoid.add(name)
            async with live.lock:
                if live.task.state is not TaskState.STARTING or live.task.worker != self._registry.me:
                    raise StaleTask(live.task.task_id)
                before = live.task
                limit_s = deadlines.remaining_s(before, self._registry.time.now_s())
                try:
                    instance = await fleet.place(before.task_id, before.version, frozenset(avoid), limit_s)
                except StaleTask:
                    await self.read_again(live)
                    continue
                if instance is not None:
                    # From the row that was changed: the cache may have read the new one meanwhile.
                    self._registry.advance(live, replace(before, instance=instance.name, version=before.version + 1))
            if instance is None:
                await fleet.wait_for_room()

    async def read_again(self, live: Live) -> None:
        """Take the task's row into the cache as it is now.

        Raises:
            TideError: the row is gone.
        """
        task = await self._registry.repository.task(live.task.task_id)
        if task is None:
            raise removed(live.task.task_id)
        self._registry.advance(live, task)
