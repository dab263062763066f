"""A question that many ask: one of them asks it, all get the answer, and a hanging answer holds nobody for long."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Asked(Generic[T]):
    """Asks at most once at a time.

    Args:
        ask: asks; it runs on when nobody waits for it any more.
        fresh_s: seconds for which an answer, or a failure, is given again.
        limit_s: seconds that a caller waits.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], *, fresh_s: float, limit_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._limit_s = limit_s
        self._asking: asyncio.Task[T] | None = None
        self._answered_s = 0.0

    async def answer(self) -> T:
        """The answer. Cancelled, the question goes on for the others.

        Raises:
            TimeoutError: there is none within `limit_s`.
            Exception: whatever asking raised.
        """
        loop = asyncio.get_running_loop()
        asking = self._asking
        if asking is None or (asking.done() and loop.time() - self._answered_s > self._fresh_s):
            # Not in the context of whoever happened to ask first: it is asked for all.
            asking = loop.create_task(self._run(), name="tide-ask", context=contextvars.Context())
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asking = asking
        async with asyncio.timeout(self._limit_s):
            return await asyncio.shield(asking)

    async def _run(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_s = asyncio.get_running_loop().time()
