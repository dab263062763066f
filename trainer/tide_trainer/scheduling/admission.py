"""New tasks: their queue, the probing of groups, and on which rank they start."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tide_trainer.scheduling.plan import Admit, Phase
from tide_trainer.scheduling.state import EnvironmentState, GroupState, RankState, SchedulerState, TaskState

Entry = tuple[int, int, int, TaskState]


@dataclass(slots=True, eq=False)
class _Lane:
    """Queued tasks of one environment and task type: evaluation, siblings of open groups, first tasks of groups."""

    environment: EnvironmentState
    task_type: str
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
    inside each by `order_key`. The head is never overtaken by a smaller task, except where its environment is full.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._lanes: dict[tuple[str, str], _Lane] = {}
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
        """Starts queued tasks while one fits somewhere. O(lanes + ranks) per task started."""
        state = self._state
        ranks = list(state.ranks.values()) if state.admission_dirty else [state.ranks[rank] for rank in state.dirty]
        state.admission_dirty = False
        while ranks and (task := self._next()) is not None:
            tokens = self._projected(task)
            rank = self._choose(task, tokens, ranks)
            if rank is None:
                return
            self._start(task, rank, tokens, now_s)
            # Another head may fit where the last one did not.
            ranks = list(state.ranks.values())

    def _push(self, task: TaskState, tier: int) -> None:
        entry = task.entry
        lane = self._lanes.get((entry.environment, entry.task_type))
        if lane is None:
            lane = self._lanes[entry.environment, entry.task_type] = _Lane(task.environment, entry.task_type)
        task.stamp += 1
        heapq.heappush(lane.queues[0 if task.is_eval else tier], (entry.order_key, task.seq, task.stamp, task))
        self._state.admission_dirty = True

    def _next(self) -> TaskState | None:
        """The queued task that starts next, environments without room left out."""
        lanes = [lane for lane in self._lanes.values() if lane.environment.has_room()]
        types = self._state.task_types if self._state.settings.balance_task_types else {}
        for tier in (0, 1, 2):
            best: tuple[int, Entry] | None = None
            for lane in lanes:
                head = lane.head(tier)
                if head is None:
                    continue
                # `seq` in the entry is unique, so that a comparison never reaches the task itself.
                candidate = (types.get(lane.task_type, 0) if tier == 2 else 0, head)
                if best is None or candidate < best:
                    best = candidate
            if best is not None:
                return best[1][3]
        return None

    def _projected(self, task: TaskState) -> int:
        growth = self._state.growth
        name = task.environment.name
        return growth.projected_tokens(name, growth.first_call_tokens(name, task.group.prompt_tokens))

    def _choose(self, task: TaskState, tokens: int, ranks: list[RankState]) -> RankState | None:
        """The group's rank if the task fits there, else the rank with the most room."""
        best: RankState | None = None
        best_room = 0
        for rank in ranks:
            if not self._accepts(rank, task, tokens):
                continue
            if rank.rank == task.group.home:
                return rank
            room = rank.budget_tokens - rank.projected.usage_tokens
            if best is None or room > best_room:
                best, best_room = rank, room
        return best

    def _accepts(self, rank: RankState, task: TaskState, tokens: int) -> bool:
        settings = self._state.settings
        if settings.max_tasks_per_rank and len(rank.tasks) >= settings.max_tasks_per_rank:
            return False
        if settings.ctb == "off":
            return True
        # Resumed before new; evaluation waits only for what goes before it.
        waiting = rank.num_waiting_eval + rank.num_starved if task.is_eval else len(rank.waiting)
        if waiting:
            return False
        added = rank.projected.marginal_tokens(tokens, task.group.uid, self._state.shared_tokens(task))
        return rank.projected.usage_tokens + added <= rank.budget_tokens or not rank.tasks

    def _start(self, task: TaskState, rank: RankState, tokens: int, now_s: float) -> None:
        state, group = self._state, task.group
        first = group.probe is task and not group.released
        task.stamp += 1
        task.wait += 1
        state.set_phase(task, Phase.ADMITTED)
        state.assign(task, rank)
        rank.projected.charge(task.entry.task, tokens, group.uid, state.shared_tokens(task))
        task.environment.num_tasks += 1
        state.task_types[task.entry.task_type] = state.task_types.get(task.entry.task_type, 0) + 1
        if group.home is None:
            group.home = rank.rank
        self.num_admits += 1
        why = "probe of its group" if first else "next in order"
        state.out.append(
            Admit(
                task.entry.task,
                rank.rank,
                f"{why}; projected {tokens} tokens, rank projected at {rank.projected.usage_tokens} "
                f"of {rank.budget_tokens}",
            )
        )
        if first:
            if state.settings.probe and state.settings.probe_timeout_s > 0:
                state.set_timer(now_s + state.settings.probe_timeout_s, "probe", task, task.wait)
            else:
                self.release_siblings(group)
