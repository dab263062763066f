"""New tasks: their queue, the probing of groups, and on which rank they start."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tide_trainer.scheduling.capacity import EnvironmentState
from tide_trainer.scheduling.entities import GroupState, RankState, TaskState
from tide_trainer.scheduling.plan import Admit, Phase
from tide_trainer.scheduling.state import SchedulerState

Entry = tuple[int, int, int, TaskState]

# Ranks with waiting calls that a missing sibling tries, beside its group's own.
_MAX_PASSABLE = 4


@dataclass(slots=True, eq=False)
class _Lane:
    """Queued tasks of one environment, task type and anchor: evaluation, siblings of open groups, first tasks."""

    environment: EnvironmentState
    task_type: str
    version: int | None
    queues: tuple[list[Entry], list[Entry], list[Entry]] = field(
        default_factory=lambda: (list[Entry](), list[Entry](), list[Entry]())
    )

    def head(self, tier: int) -> Entry | None:
        queue = self.queues[tier]
        while queue:
            entry = queue[0]
            if entry[2] == entry[3].stamp:
                return entry
            heapq.heappop(queue)
        return None


class Admission:
    """Decides which queued task starts next, and where.

    Source: TideRL section 4.1. Order: evaluation, then missing siblings of open groups, then first tasks of new groups;
    inside each by `order_key`. The head is never overtaken by a smaller task, except where its environment is full, or
    on ranks of another model version than the head's. A task that is paused on a rank goes before new ones there, but
    not before a missing sibling with an earlier `order_key`.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._lanes: dict[tuple[str, str, int | None], _Lane] = {}
        self.num_admits = 0

    def submit(self, task: TaskState) -> None:
        """Queues a new task: as its group's probe, behind the probe, or with the siblings that may start."""
        group = task.group
        if group.released or group.num_siblings == 1:
            self._push(task, 1 if group.released else 2)
        elif group.probe is None:
            group.probe = task
            self._push(task, 2)
        else:
            group.held_back[task.entry.task] = task

    def requeue(self, task: TaskState) -> None:
        """Queues an admitted task again; a probe stays its group's probe."""
        self._push(task, 2 if task.group.probe is task and not task.group.released else 1)

    def release_siblings(self, group: GroupState) -> None:
        """The group's first prompt is known, or is waited for no longer: its other tasks may start."""
        if group.released:
            return
        group.released = True
        for task in group.held_back.values():
            self._push(task, 1)
        group.held_back.clear()

    def forget(self, task: TaskState) -> None:
        """A task leaves. A queued probe hands over to a sibling; one that had started lets the siblings start."""
        group = task.group
        task.stamp += 1
        group.held_back.pop(task.entry.task, None)
        if group.probe is not task or group.released:
            return
        group.probe = None
        if task.phase is not Phase.QUEUED:
            self.release_siblings(group)
        elif group.held_back:
            uid = next(iter(group.held_back))
            self.submit(group.held_back.pop(uid))

    def admit(self, now_s: float) -> None:
        """Starts queued tasks while one fits somewhere. O(lanes + log ranks) per task started."""
        state = self._state
        if not state.admission_dirty and not state.dirty:
            return
        state.admission_dirty = False
        full: set[int] = set()
        while (found := self._next(full)) is not None:
            tier, task = found
            tokens = state.growth.first_call_tokens(task.environment.name, task.group.prompt_tokens)
            rank = self._choose(task, tier, tokens)
            if rank is None:
                full.add(self._pool(task.entry.version))
                continue
            self._start(task, rank, tokens, now_s)
            state.index.refresh(rank)
            # Another head may fit where the last one did not.
            full.clear()

    def drop_empty_lanes(self) -> None:
        """Forgets the lanes that hold no task. O(lanes)."""
        for key in [key for key, lane in self._lanes.items() if all(lane.head(tier) is None for tier in (0, 1, 2))]:
            del self._lanes[key]

    def _pool(self, version: int | None) -> int:
        """The version of the ranks on which a task so anchored may start."""
        return self._state.newest if version is None else version

    def _push(self, task: TaskState, tier: int) -> None:
        entry = task.entry
        key = (entry.environment, entry.task_type, entry.version)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(task.environment, entry.task_type, entry.version)
        task.stamp += 1
        heapq.heappush(lane.queues[0 if task.is_eval else tier], (entry.order_key, task.seq, task.stamp, task))
        self._state.admission_dirty = True

    def _next(self, full: set[int]) -> tuple[int, TaskState] | None:
        """The queued task that starts next, and its tier; full environments and `full` versions are left out."""
        lanes = [lane for lane in self._lanes.values() if self._pool(lane.version) not in full]
        types, weight = self._state.task_types, self._state.settings.diversity_weight
        for tier in (0, 1, 2):
            best: tuple[float, Entry] | None = None
            for lane in lanes:
                head = lane.head(tier)
                if head is None or not lane.environment.has_room(is_eval=tier == 0):
                    continue
                # `seq` in the entry is unique, so that a comparison never reaches the task itself.
                penalty = weight * types.get(lane.task_type, 0) if tier == 2 else 0.0
                candidate = (head[0] + penalty, head)
                if best is None or candidate < best:
                    best = candidate
            if best is not None:
                return tier, best[1][3]
        return None

    def _choose(self, task: TaskState, tier: int, tokens: int) -> RankState | None:
        """The group's rank if the task fits there, else the rank with the most room."""
        state = self._state
        home = None if task.group.home is None else state.ranks.get(task.group.home)
        if home is not None and self._accepts(home, task, tier, tokens):
            return home
        version = self._pool(task.entry.version)
        roomiest = state.index.roomiest(version)
        candidates = [] if roomiest is None else [roomiest]
        if tier < 2:
            candidates += state.index.passable(version, _MAX_PASSABLE if tier == 1 else 1)
        accepting = [rank for rank in candidates if self._accepts(rank, task, tier, tokens)]
        return max(accepting, key=lambda rank: rank.budget_tokens - rank.projected.peak_tokens, default=None)

    def _accepts(self, rank: RankState, task: TaskState, tier: int, tokens: int) -> bool:
        settings = self._state.settings
        if not rank.gate_open or rank.overloaded or not self._state.serves(rank, task):
            return False
        if settings.max_tasks_per_rank and len(rank.tasks) >= settings.max_tasks_per_rank:
            return False
        if settings.ctb == "off":
            return True
        if rank.waiting and not self._goes_before_those_that_wait(rank, task, tier):
            return False
        if not rank.tasks:
            return True
        shared, remaining = self._state.shared_tokens(task), self._state.remaining_tokens(task, tokens)
        return rank.projected.fits(self._state.limit_tokens(rank), tokens, task.group.uid, shared, remaining)

    def _goes_before_those_that_wait(self, rank: RankState, task: TaskState, tier: int) -> bool:
        """Resumed before new. Evaluation waits for its own kind, a missing sibling for all but later buffers."""
        if tier == 2 or rank.num_waiting_eval or rank.num_starved:
            return False
        earliest = rank.earliest_order()
        return tier == 0 or earliest is None or task.entry.order_key < earliest

    def _start(self, task: TaskState, rank: RankState, tokens: int, now_s: float) -> None:
        state, group = self._state, task.group
        first = group.probe is task and not group.released
        task.stamp += 1
        task.wait += 1
        state.set_phase(task, Phase.ADMITTED)
        state.assign(task, rank)
        remaining = state.remaining_tokens(task, tokens)
        rank.projected.charge(task.entry.task, tokens, group.uid, state.shared_tokens(task), remaining)
        state.count_started(task)
        home = state.ranks.get(group.home) if group.home is not None else None
        if home is None or not state.serves(home, task):
            group.home = rank.rank
        self.num_admits += 1
        why = "probe of its group" if first else "next in order"
        state.out.append(
            Admit(
                task.entry.task,
                rank.rank,
                f"{why}; {tokens} tokens and {remaining} more expected, "
                f"the rank's peak at {rank.projected.peak_tokens} of {rank.budget_tokens}",
            )
        )
        if first:
            if state.settings.probe and state.settings.probe_timeout_s > 0:
                state.set_timer(now_s + state.settings.probe_timeout_s, "probe", task, task.wait)
            else:
                self.release_siblings(group)
