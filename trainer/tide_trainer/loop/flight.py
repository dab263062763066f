"""Calls that were granted and have not ended (a weight sync waits until there is none), and time without any task."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from tide_trainer.types import RankId


class CallsInFlight:
    """Calls with the rank that each is for, and who waits until a rank has none."""

    def __init__(self) -> None:
        self._calls: dict[str, RankId] = {}
        self._granted: set[str] = set()
        self._ended = asyncio.Event()

    def begin(self, call: str, rank: RankId, *, granted: bool = True) -> None:
        """A call is for a rank; not `granted`: its grant follows, once its task is resumed."""
        self._calls[call] = rank
        if granted:
            self._granted.add(call)

    def end(self, call: str) -> None:
        """A call has ended, in whatever way; one that was never granted is ignored."""
        self._calls.pop(call, None)
        self._granted.discard(call)
        self._ended.set()

    def ranks(self) -> frozenset[RankId]:
        """The ranks that calls in flight were granted."""
        return frozenset(self._calls[call] for call in self._granted)

    async def drained(self, ranks: Set[RankId] | None = None) -> None:
        """Returns when no call is in flight on any of `ranks` (None: on any rank); the caller sets the deadline."""
        while any(ranks is None or rank in ranks for rank in self._calls.values()):
            self._ended.clear()
            await self._ended.wait()


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
