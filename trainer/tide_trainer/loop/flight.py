"""Calls that were granted and have not ended: a weight sync waits until there is none."""

from __future__ import annotations

import asyncio


class CallsInFlight:
    """A set of calls with an event for its emptiness."""

    def __init__(self) -> None:
        self._calls: set[str] = set()
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, call: str) -> None:
        """A call was granted."""
        self._calls.add(call)
        self._none.clear()

    def end(self, call: str) -> None:
        """A call has ended, in whatever way; one that was never granted is ignored."""
        self._calls.discard(call)
        if not self._calls:
            self._none.set()

    async def drained(self) -> None:
        """Returns when no call is in flight; the caller sets the deadline."""
        await self._none.wait()
