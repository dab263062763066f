"""Which ranks have the most room, and on which the most calls wait, without a look at all of them."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from tide_trainer.scheduling.settings import CtbSettings

if TYPE_CHECKING:
    from tide_trainer.scheduling.entities import RankState

_MIN_ENTRIES = 256


class _Heap:
    """Ranks by a key, the smallest first; an entry is stale once its rank was filed again."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int, RankState]] = []
        self._limit = _MIN_ENTRIES

    def push(self, key: int, rank: RankState) -> None:
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if entry[2] == entry[3].stamp]
            heapq.heapify(self._entries)
            self._limit = max(_MIN_ENTRIES, 4 * len(self._entries))
        heapq.heappush(self._entries, (key, rank.seq, rank.stamp, rank))

    def top(self, most: int) -> list[RankState]:
        taken: list[tuple[int, int, int, RankState]] = []
        while self._entries and len(taken) < most:
            entry = heapq.heappop(self._entries)
            if entry[2] == entry[3].stamp:
                taken.append(entry)
        for entry in taken:
            heapq.heappush(self._entries, entry)
        return [entry[3] for entry in taken]


class RankIndex:
    """Ranks by model version. One that changes is filed again; a change and a look cost O(log ranks) on average."""

    def __init__(self, settings: CtbSettings) -> None:
        self._settings = settings
        self._free: dict[int, _Heap] = {}
        self._passable: dict[int, _Heap] = {}
        self._busy: dict[int, _Heap] = {}

    def refresh(self, rank: RankState) -> None:
        """Files a rank by its present numbers."""
        rank.stamp += 1
        settings = self._settings
        if rank.waiting:
            self._busy.setdefault(rank.version, _Heap()).push(-len(rank.waiting), rank)
        if not rank.gate_open or rank.overloaded:
            return
        if settings.max_tasks_per_rank and len(rank.tasks) >= settings.max_tasks_per_rank:
            return
        room = rank.budget_tokens - rank.projected.peak_tokens
        if not rank.waiting or settings.ctb == "off":
            self._free.setdefault(rank.version, _Heap()).push(-room, rank)
        elif rank.num_waiting_eval + rank.num_starved == 0:
            self._passable.setdefault(rank.version, _Heap()).push(-room, rank)

    def roomiest(self, version: int) -> RankState | None:
        """The rank with the most projected room that takes new tasks and on which no call waits."""
        return next(iter(self._top(self._free, version, 1)), None)

    def passable(self, version: int, most: int) -> list[RankState]:
        """Up to `most` ranks by room on which calls wait, but none of an evaluation and none for too long."""
        return self._top(self._passable, version, most)

    def busiest(self, version: int) -> RankState | None:
        """The rank with the most waiting calls; None where none waits."""
        return next(iter(self._top(self._busy, version, 1)), None)

    def drop_versions(self, present: set[int]) -> None:
        """Forgets versions that no rank serves. O(versions)."""
        for heaps in (self._free, self._passable, self._busy):
            for version in [version for version in heaps if version not in present]:
                del heaps[version]

    def _top(self, heaps: dict[int, _Heap], version: int, most: int) -> list[RankState]:
        heap = heaps.get(version)
        return [] if heap is None else heap.top(most)
