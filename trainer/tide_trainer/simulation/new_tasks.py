"""The queue of tasks that have not started, as the baselines keep it."""

from __future__ import annotations

import heapq

from tide_trainer.scheduling.plan import TaskEntry


class NewTasks:
    """Evaluation first, then by `order_key`, then as submitted."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, TaskEntry]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: TaskEntry) -> None:
        """Adds a task."""
        self._count += 1
        heapq.heappush(self._heap, (entry.kind != "eval", entry.order_key, self._count, entry))

    def peek(self) -> TaskEntry | None:
        """The task that starts next."""
        return self._heap[0][3] if self._heap else None

    def pop(self) -> TaskEntry:
        """Takes it out."""
        return heapq.heappop(self._heap)[3]
