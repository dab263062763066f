"""The sweep: finds overdue tasks by SQL, and writes the heartbeat from which outages are known.

    every `interval_s` -> SELECT ... WHERE due_s <= now -> expire each -> heartbeat once a second

Consumes due rows, waits for the interval, unblocks calls that wait for a task whose clock has run out.
"""

from __future__ import annotations

import asyncio
import logging

from tide_gateway.repository import StorageFailed
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Registry
from tide_sdk.errors import TideError

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PAUSE_S = 1.0
"""Seconds between sweeps while the database does not take changes."""
MAX_PER_SWEEP = 1000


class Sweeper:
    """Runs the sweep.

    Args:
        registry: time and rows.
        endings: ends what is overdue.
        replica: whose heartbeat is written.
        interval_s: seconds between sweeps; a limit holds to that precision.
    """

    def __init__(self, registry: Registry, endings: Endings, replica: str, interval_s: float) -> None:
        self._registry = registry
        self._endings = endings
        self._replica = replica
        self._interval_s = interval_s
        self._beat_s = 0.0

    async def run(self) -> None:
        """Sweep for ever. One failed sweep is logged and the next one tried."""
        while True:
            await asyncio.sleep(self._interval_s)
            failures: list[Exception] = []
            try:
                failures += await self.sweep()
            except StorageFailed as error:
                failures.append(error)
            except Exception:
                log.exception("a sweep failed; the next one follows in %g s", self._interval_s)

            if failures:
                # A full disk fails them all: not ten times a second, and in one line.
                log.error("a sweep could not write %d changes, first: %s", len(failures), failures[0])
                await asyncio.sleep(PAUSE_S)

    async def sweep(self) -> list[TideError]:
        """Expire all tasks that are overdue now, side by side; what could not be written is returned, and due again."""
        now_s = self._registry.time.now_s()
        overdue = await self._registry.repository.overdue(now_s, limit=MAX_PER_SWEEP)
        outcomes = await asyncio.gather(*(self._endings.expire(task_id) for task_id in overdue), return_exceptions=True)
        for task_id, outcome in zip(overdue, outcomes, strict=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, TideError):
                log.error("task %s could not be expired", task_id, exc_info=outcome)
        if abs(now_s - self._beat_s) >= HEARTBEAT_S:
            self._beat_s = now_s
            await self._registry.repository.heartbeat(self._replica, now_s)
        return [outcome for outcome in outcomes if isinstance(outcome, TideError)]
