"""The run's heartbeats at the gateway, so that the tasks of a run that died end, and its slots come free.

every timeout_s / 4:  /heartbeat {prefix, timeout_s}      at the end:  /heartbeat {prefix, timeout_s: null}
"""

from __future__ import annotations

import asyncio
import logging

from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError
from tide_sdk.wire import HeartbeatResponse

_LOG = logging.getLogger(__name__)
_PER_TIMEOUT = 4
"""Heartbeats within one timeout: three in a row may be lost."""
_LAST_S = 2.0
_FORMER_S = 1.0


class Heartbeats:
    """Keeps the promise that the run is alive.

    Attributes:
        num_failed: heartbeats that the gateway did not take; the run goes on without them.

    Args:
        gateway: where the run's tasks are.
        prefix: what the keys of all its tasks begin with.
        timeout_s: seconds without a heartbeat after which the gateway ends the tasks.
    """

    def __init__(self, gateway: GatewayClient, prefix: str, timeout_s: float) -> None:
        self._gateway = gateway
        self._prefix = prefix
        self._timeout_s = timeout_s
        self.num_failed = 0

    async def run(self) -> None:
        """Sends heartbeats until it is cancelled; the first at once."""
        loop = asyncio.get_running_loop()
        every_s = self._timeout_s / _PER_TIMEOUT
        while True:
            began_s = loop.time()
            await self._send(self._timeout_s, every_s)
            await asyncio.sleep(max(0.0, began_s + every_s - loop.time()))

    async def withdraw(self) -> None:
        """Takes the promise back, after `run`; where tasks are still open it stands, so that the gateway ends them."""
        answer = await self._send(None, _LAST_S)
        if answer is not None and answer.owner_tasks:
            _LOG.warning("%d tasks of the run are left at the gateway, which will end them", answer.owner_tasks)
            await self._send(self._timeout_s, _LAST_S)

    async def end_former(self, prefix: str) -> None:
        """Has the gateway end what an earlier life of the run left there: its promise now lasts for a second only."""
        answer = await _beat(self._gateway, prefix, _FORMER_S, _LAST_S)
        if answer is not None and answer.owner_tasks:
            _LOG.info("the gateway ends the tasks that the run's earlier life left")

    async def _send(self, timeout_s: float | None, deadline_s: float) -> HeartbeatResponse | None:
        answer = await _beat(self._gateway, self._prefix, timeout_s, deadline_s)
        self.num_failed += answer is None
        return answer


async def _beat(
    gateway: GatewayClient, prefix: str, timeout_s: float | None, deadline_s: float
) -> HeartbeatResponse | None:
    try:
        async with asyncio.timeout(deadline_s + 1.0):
            return await gateway.heartbeat(prefix, timeout_s, deadline_s=deadline_s)
    except (TideError, TransportError, TimeoutError) as error:
        _LOG.warning("the gateway did not take a heartbeat for %r: %s", prefix, error)
        return None
