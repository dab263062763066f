"""Calls that were granted and have not ended (a weight sync waits until there is none), and time without any task."""

from __future__ import annotations

import asyncio

from tide_trainer.types import RankId


class CallsInFlight:
    """Calls with the rank that each was granted, and an event for their emptiness."""

    def __init__(self) -> None:
        self._calls: dict[str, RankId | None] = {}
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, call: str, rank: RankId | None) -> None:
        """A call was granted a rank; None: its grant follows, once its task is resumed."""
        self._calls[call] = rank
        self._none.clear()

    def end(self, call: str) -> None:
        """A call has ended, in whatever way; one that was never granted is ignored."""
        self._calls.pop(call, None)
        if not self._calls:
            self._none.set()

    def ranks(self) -> frozenset[RankId]:
        """The ranks that calls in flight were granted."""
        return frozenset(rank for rank in self._calls.values() if rank is not None)

    async def drained(self) -> None:
        """Returns when no call is in flight; the caller sets the deadline."""
        await self._none.wait()


class IdleTime:
    """Seconds in which nothing was there to run: what rollout waits at the staleness bound (RWT).

    Args:
        now_s: a monotonic clock's seconds; it begins idle.
    """

    def __init__(self, now_s: float) -> None:
        self._total_s = 0.0
        self._since_s: float | None = now_s

    def note(self, idle: bool, now_s: float) -> None:
        """From now on there is nothing, or something, to run."""
        self._total_s = self.total_s(now_s)
        self._since_s = now_s if idle else None

    def total_s(self, now_s: float) -> float:
        """Idle seconds until now."""
        return self._total_s + (now_s - self._since_s if self._since_s is not None else 0.0)
