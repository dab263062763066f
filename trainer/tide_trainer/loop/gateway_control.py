"""`/pause` and `/resume` of one task after another's: in order, numbered upwards, failures counted.

Source: TideRL appendix B.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError
from tide_trainer.loop.shell_task import ShellTask

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 30.0


class GatewayControl:
    """Stops and frees the clocks of tasks at the gateway.

    Attributes:
        num_failed: calls that failed for good; the task's next turn then says what is wrong.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self.num_failed = 0

    async def pause(self, task: ShellTask) -> None:
        """Pauses the task once it has started."""
        async with task.control:
            await self._tell(task, self._gateway.pause, "pause")

    async def resume(self, task: ShellTask) -> None:
        """Resumes the task, after any `pause` before it."""
        async with task.control:
            await self._tell(task, self._gateway.resume, "resume")

    async def _tell(self, task: ShellTask, call: Callable[[str, int], Awaitable[Any]], name: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                task_id = await asyncio.shield(task.task_id)
                task.epoch += 1
                await call(task_id, task.epoch)
        except (TideError, TransportError, TimeoutError) as error:
            self.num_failed += 1
            _LOG.warning("/%s of task %s failed: %s", name, task.session, error)
