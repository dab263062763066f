"""A virtual clock: what will happen, in order of time and, at one time, of filing."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Event = TypeVar("Event")


class VirtualClock(Generic[Event]):
    """Holds events until they are due; `now_s` moves when one is taken, never back."""

    def __init__(self) -> None:
        """Starts at 0 s without events."""
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at_s: float, event: Event) -> None:
        """Files an event; one in the past is due now."""
        self._count += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._count, event))

    def next_s(self) -> float:
        """When the next event is due; infinity without any."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> Event:
        """Moves to the next event and takes it."""
        self.now_s, _, event = heapq.heappop(self._heap)
        return event

    def move_to(self, at_s: float) -> None:
        """Moves on to a time that something outside the clock's own events set."""
        self.now_s = max(self.now_s, at_s)
