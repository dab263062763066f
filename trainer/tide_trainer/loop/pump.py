"""Runs one piece of work soon after it was asked for, once for many requests, and again at the time that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SOONEST_S = 0.01


class Pump:
    """Belongs to one event loop.

    Args:
        work: does what there is to do; returns when it is due again although nobody asks, None for never.
        now: a monotonic clock in seconds.
        failed: gets what `work` raises.
    """

    def __init__(
        self, work: Callable[[], float | None], now: Callable[[], float], failed: Callable[[BaseException], None]
    ) -> None:
        self._work = work
        self._now = now
        self._failed = failed
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Has the work done in the loop's next round."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._run)

    def stop(self) -> None:
        """Forgets the time that the work named."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._woken = False
        try:
            due_s = self._work()
        except Exception as error:  # noqa: BLE001 - the boundary: who made the pump ends with it
            self._failed(error)
            return
        self.stop()
        if due_s is not None:
            delay_s = max(_SOONEST_S, due_s - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)
