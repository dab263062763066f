"""What the task scheduler remembers, and the changes that keep its sums right. Mutable, private to `scheduling`."""

from __future__ import annotations

import heapq
import itertools
from typing import Literal

from tide_trainer.scheduling.capacity import EnvironmentState
from tide_trainer.scheduling.entities import GroupState, RankState, TaskState
from tide_trainer.scheduling.growth import GrowthPredictor
from tide_trainer.scheduling.lending import IdleLending
from tide_trainer.scheduling.plan import Decision, Phase
from tide_trainer.scheduling.priority import Key, waiting_key
from tide_trainer.scheduling.rank_index import RankIndex
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.types import RankId

NO_VERSION = -(2**63)
"""The newest version while no rank has come yet: below all, for a warm start's versions are negative."""
TimerKind = Literal["starve", "move", "probe", "unblock"]


class SchedulerState:
    """All of it, with the primitive changes that keep the sums right."""

    def __init__(self, settings: CtbSettings) -> None:
        self.settings = settings
        self.growth = GrowthPredictor(settings)
        self.lending = IdleLending(settings)
        self.tasks: dict[str, TaskState] = {}
        self.groups: dict[str, GroupState] = {}
        self.environments: dict[str, EnvironmentState] = {}
        self.ranks: dict[RankId, RankState] = {}
        self.homeless: dict[str, TaskState] = {}
        self.dirty: dict[RankId, None] = {}
        self.index = RankIndex(settings)
        self.admission_dirty = True
        # For ranks that are still to come; each of those that are here has its own gate.
        self.gate_open = True
        self.newest = NO_VERSION
        self.anchored: dict[str, TaskState] = {}
        self.phases = dict.fromkeys(Phase, 0)
        self.task_types: dict[str, int] = {}
        self.out: list[Decision] = []
        self.sequence = itertools.count()
        self.timers: list[tuple[float, int, TimerKind, TaskState | EnvironmentState, int]] = []

    def environment(self, name: str) -> EnvironmentState:
        """The environment's state, made at its first mention."""
        state = self.environments.get(name)
        if state is None:
            state = self.environments[name] = EnvironmentState(name)
        return state

    def set_phase(self, task: TaskState, phase: Phase) -> None:
        """Moves a task to a phase and keeps the counts."""
        self.phases[task.phase] -= 1
        self.phases[phase] += 1
        task.phase = phase

    def mark_all(self) -> None:
        """Every rank is looked at again in the next plan, and so is the queue."""
        self.dirty = dict.fromkeys(self.ranks)
        self.admission_dirty = True

    def serves(self, rank: RankState, task: TaskState) -> bool:
        """Whether the rank has the version that the task is sampled from: its anchor, or the newest."""
        version = task.entry.version
        return rank.version == (self.newest if version is None else version)

    def may_serve(self, rank: RankState, task: TaskState) -> bool:
        """Whether the rank serves the task, or will after a weight update that is still to come."""
        version = task.entry.version
        return version is None or rank.version == version or version >= self.newest

    def is_lost(self, task: TaskState) -> bool:
        """Whether the task is anchored to a version that no rank serves any more. O(ranks) for old versions."""
        version = task.entry.version
        if version is None or version >= self.newest:
            return False
        return all(rank.version != version for rank in self.ranks.values())

    def count_started(self, task: TaskState) -> None:
        """The task takes its place in its environment, until it leaves."""
        task.environment.num_tasks += 1
        task.environment.num_train += not task.is_eval
        self.task_types[task.entry.task_type] = self.task_types.get(task.entry.task_type, 0) + 1

    def set_timer(self, due_s: float, kind: TimerKind, subject: TaskState | EnvironmentState, wait: int) -> None:
        """Fires at the first plan from `due_s` on, if the subject still is as it was."""
        heapq.heappush(self.timers, (due_s, next(self.sequence), kind, subject, wait))

    def shared_tokens(self, task: TaskState) -> int:
        """The prefix that a task shares with its siblings; 0 while unknown, or if its own first prompt differs."""
        prompt = task.group.prompt_tokens
        if not self.settings.share_group_prefix or prompt is None or task.first_prompt_tokens not in (0, prompt):
            return 0
        return prompt

    def known_final_tokens(self, task: TaskState) -> int | None:
        """How long the task's context gets: as it said, as its siblings' did, as is usual; None before any ended."""
        said = self._final_tokens(task)
        return self.growth.known_final_tokens(task.environment.name, task.context_tokens) if said is None else said

    def remaining_tokens(self, task: TaskState, tokens: int) -> int:
        """By how much a footprint of `tokens` is expected to grow."""
        return self.growth.remaining_tokens(task.environment.name, tokens, self._final_tokens(task))

    def _final_tokens(self, task: TaskState) -> int | None:
        group = task.group
        if task.final_tokens is not None or not group.num_finals:
            return task.final_tokens
        return group.final_tokens // group.num_finals

    def limit_tokens(self, rank: RankState) -> int:
        """What the contexts of the rank's tasks may come to: the budget times what is lent or kept back."""
        return int(rank.budget_tokens * self.lending.factor())

    def charge(self, task: TaskState, rank: RankState, tokens: int) -> None:
        """The task's context holds `tokens` on the rank; its growth is projected afresh."""
        uid, group, shared = task.entry.task, task.group.uid, self.shared_tokens(task)
        rank.live.charge(uid, tokens, group, shared)
        rank.projected.charge(uid, tokens, group, shared, self.remaining_tokens(task, tokens))
        rank.at_engine(uid, tokens if task.phase is Phase.GENERATING else 0)
        self.dirty[rank.rank] = None

    def release(self, task: TaskState) -> None:
        """The task's context no longer counts on its rank."""
        if task.rank is not None:
            task.rank.live.release(task.entry.task)
            task.rank.projected.release(task.entry.task)
            task.rank.at_engine(task.entry.task, 0)
            self.dirty[task.rank.rank] = None

    def assign(self, task: TaskState, rank: RankState | None) -> None:
        """Places a task that does not wait on a rank, or on none; its charges are released."""
        self.release(task)
        if task.rank is not None:
            del task.rank.tasks[task.entry.task]
        task.rank = rank
        if rank is not None:
            rank.tasks[task.entry.task] = task
            self.dirty[rank.rank] = None

    def start_waiting(self, task: TaskState) -> None:
        """Files a paused task with the calls that wait for its rank, or with the homeless."""
        rank = task.rank
        if rank is None:
            self.homeless[task.entry.task] = task
            return
        rank.waiting[task.entry.task] = task
        rank.waiting_tokens += task.need_tokens
        rank.num_waiting_eval += task.is_eval
        rank.num_starved += task.starved
        if len(rank.orders) > 2 * len(rank.waiting) + 64:
            rank.orders = [(other.entry.order_key, other.seq, other) for other in rank.waiting.values()]
            heapq.heapify(rank.orders)
        else:
            heapq.heappush(rank.orders, (task.entry.order_key, task.seq, task))
        self.push(task)

    def stop_waiting(self, task: TaskState) -> None:
        """Takes a task from the waiting calls of its rank or the homeless."""
        task.stamp += 1
        rank = task.rank
        if rank is None:
            self.homeless.pop(task.entry.task, None)
        elif rank.waiting.pop(task.entry.task, None) is not None:
            rank.waiting_tokens -= task.need_tokens
            rank.num_waiting_eval -= task.is_eval
            rank.num_starved -= task.starved

    def push(self, task: TaskState) -> None:
        """Files a waiting task under its present priority; an older filing becomes stale."""
        rank = task.rank
        if rank is None:
            return
        task.stamp += 1
        if len(rank.heap) > 2 * len(rank.waiting) + 64:
            rank.heap = [entry for entry in rank.heap if entry[2] == entry[3].stamp and entry[3].rank is rank]
            heapq.heapify(rank.heap)
        heapq.heappush(rank.heap, (self.key(task, active=False), next(self.sequence), task.stamp, task))
        self.dirty[rank.rank] = None

    def key(self, task: TaskState, *, active: bool) -> Key:
        """The task's priority; smaller goes first."""
        group = task.group
        return waiting_key(
            self.settings,
            is_eval=task.is_eval,
            completion=min(1.0, group.num_finished / group.num_siblings),
            active=active,
            order_key=task.entry.order_key,
            context_tokens=task.prompt_tokens,
            starved_since_s=task.waiting_since_s if task.starved else None,
        )

    def largest_budget_tokens(self, task: TaskState) -> int:
        """The largest budget of the ranks that may serve the task; 0 without one."""
        return max((rank.budget_tokens for rank in self.ranks.values() if self.may_serve(rank, task)), default=0)
