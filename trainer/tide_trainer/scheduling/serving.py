"""Waiting calls: which are granted or resumed on a rank, and which must be paused.

Source: TideRL section 4.2, Algorithm 1. Deviation: a task is paused only where its call waits (a turn's end), so no
work in flight is lost; a paused task is resumed where the rank's predicted peak stays within its budget, not its
present use (hysteresis); a call of an evaluation or a starved task that does not fit keeps the room that falls free
for itself (bounded wait).
"""

from __future__ import annotations

import heapq

from tide_trainer.scheduling.entities import HeapEntry, RankState, TaskState
from tide_trainer.scheduling.plan import Grant, Pause, Phase, Refuse, Resume
from tide_trainer.scheduling.state import SchedulerState


class Serving:
    """Serves the calls that wait for one rank at a time, in order of priority."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.num_grants = 0
        self.num_pauses = 0
        self.num_resumes = 0
        self.num_refused = 0

    def place(self, task: TaskState) -> RankState | None:
        """The rank for a waiting call whose own rank is gone or too small: the most room among those large enough."""
        best: RankState | None = None
        best_standing = (False, 0)
        for rank in self._state.ranks.values():
            room = rank.budget_tokens - rank.live.usage_tokens - rank.waiting_tokens
            # A rank whose gate is closed is for want of a better one.
            standing = (rank.gate_open, room)
            if self._can_hold(rank, task) and (best is None or standing > best_standing):
                best, best_standing = rank, standing
        return best

    def settle(self, task: TaskState) -> None:
        """Gives a waiting call that has no suitable rank a new one; refuses it where none is or will be suitable."""
        state = self._state
        if task.rank is not None and self._can_hold(task.rank, task):
            return
        rank = self.place(task)
        if task.rank is not None or rank is not None:
            state.assign(task, rank)
            task.cold = True
        if rank is not None:
            return
        hopeful = [rank for rank in state.ranks.values() if state.may_serve(rank, task)]
        if state.is_lost(task) or (hopeful and not any(self._is_large_enough(rank, task) for rank in hopeful)):
            self.refuse(task)

    def refuse(self, task: TaskState) -> None:
        """The task's call fits no rank, even alone; or no rank has its version any more."""
        state = self._state
        if state.is_lost(task):
            reason = (
                f"it is anchored to model version {task.entry.version}, which no rank serves any more (the newest is "
                f"{state.newest}); measure it as missing"
            )
        else:
            reason = (
                f"prompt of {task.prompt_tokens} plus up to {task.max_new_tokens} new tokens is more than the largest "
                f"rank budget of {state.largest_budget_tokens(task)}; shorten the context, lower max_new_tokens, or "
                "enlarge the KV cache"
            )
        state.set_phase(task, Phase.REFUSED)
        self.num_refused += 1
        state.out.append(Refuse(task.entry.task, reason))

    def hold_back(self, rank: RankState, now_s: float) -> None:
        """The rank's gate is closed: every call that has arrived since the last plan is paused."""
        fresh, rank.fresh = rank.fresh, []
        for task in fresh:
            # Its context is about to go, so that it may wait anywhere.
            task.cold = True
            self.pause(task, now_s, "the weights are being updated")

    def serve(self, rank: RankState, now_s: float) -> None:
        """Decides all fresh calls of a rank, and resumes what fits. O((fresh + bypassed + resumed) log n)."""
        state = self._state
        fresh = rank.fresh
        fresh.sort(key=lambda task: (state.key(task, active=True), task.seq), reverse=True)
        bypassed: list[HeapEntry] = []
        reserved = 0
        while True:
            waiting = self._next_waiting(rank) if len(bypassed) <= state.settings.max_bypass else None
            if fresh and (waiting is None or state.key(fresh[-1], active=True) <= rank.heap[0][0]):
                task, entry = fresh.pop(), None
            elif waiting is not None:
                task, entry = waiting, heapq.heappop(rank.heap)
            else:
                break
            if self._fits(rank, task, reserved, is_fresh=entry is None):
                self._let_go(task, rank, now_s)
                continue
            if reserved == 0 and (task.starved or (task.is_eval and state.settings.priority == "tiers")):
                reserved = rank.live.marginal_tokens(task.need_tokens, task.group.uid, state.shared_tokens(task))
            if entry is None:
                self.pause(task, now_s, self._no_room(rank, task, reserved))
            else:
                bypassed.append(entry)
        for entry in bypassed:
            heapq.heappush(rank.heap, entry)

    def pull(self, rank: RankState, now_s: float) -> None:
        """A rank with room and nothing of its own that waits takes paused tasks of the rank with the most.

        Only of those with its version: what waits for another one is anchored to that.
        """
        state = self._state
        if (
            rank.waiting
            or not rank.gate_open
            or rank.overloaded
            or len(state.ranks) == 1
            or state.phases[Phase.PAUSED] == 0
        ):
            return
        donor = state.index.busiest(rank.version)
        if donor is None or rank.live.usage_tokens >= state.limit_tokens(rank):
            return
        num_tasks = len(rank.tasks)
        kept: list[HeapEntry] = []
        while len(kept) <= state.settings.max_bypass and (task := donor.peek()) is not None:
            entry = heapq.heappop(donor.heap)
            movable = task.cold or now_s - task.waiting_since_s >= state.settings.move_after_s
            if movable and self._can_hold(rank, task) and self._fits(rank, task, 0, is_fresh=False):
                state.stop_waiting(task)
                state.assign(task, rank)
                self._let_go(task, rank, now_s)
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(donor.heap, entry)
        if len(rank.tasks) > num_tasks:
            state.index.refresh(donor)
            state.index.refresh(rank)

    def pause(self, task: TaskState, now_s: float, reason: str) -> None:
        """Files a held call with those that wait."""
        state = self._state
        state.set_phase(task, Phase.PAUSED)
        self.num_pauses += 1
        task.wait += 1
        task.waiting_since_s = now_s
        state.start_waiting(task)
        state.set_timer(now_s + state.settings.max_wait_s, "starve", task, task.wait)
        state.set_timer(now_s + state.settings.move_after_s, "move", task, task.wait)
        state.out.append(Pause(task.entry.task, reason))

    def _next_waiting(self, rank: RankState) -> TaskState | None:
        """The waiting task of the highest priority, unless it is plain that no paused task can be resumed now."""
        task = rank.peek()
        if task is None or task.is_eval or task.starved or self._state.settings.ctb == "off":
            return task
        full = rank.projected.peak_tokens >= self._state.limit_tokens(rank) and rank.num_active() > 0
        return None if full else task

    def _can_hold(self, rank: RankState, task: TaskState) -> bool:
        return self._state.serves(rank, task) and self._is_large_enough(rank, task)

    def _is_large_enough(self, rank: RankState, task: TaskState) -> bool:
        return rank.live.rounded(task.need_tokens) <= rank.budget_tokens

    def _fits(self, rank: RankState, task: TaskState, reserved: int, *, is_fresh: bool) -> bool:
        state = self._state
        if rank.overloaded and rank.generating:
            return False
        if state.settings.ctb == "off":
            return True
        group, shared = task.group.uid, state.shared_tokens(task)
        # A rank without other tasks takes whatever fits its budget, however much of that is kept back.
        goes_on = is_fresh or task.is_eval or task.starved or rank.num_active() == 0
        limit_tokens = state.limit_tokens(rank)
        # What is lent is idle: calls at the engine fit the budget, so that none of them is ever preempted.
        if limit_tokens > rank.budget_tokens and rank.generating_tokens + task.need_tokens > rank.budget_tokens:
            return False
        granted_tokens = max(limit_tokens, state.settings.grant_tokens(rank.budget_tokens)) if goes_on else limit_tokens
        room = granted_tokens - reserved - rank.live.usage_tokens
        if rank.live.marginal_tokens(task.need_tokens, group, shared) > room:
            return False
        if goes_on:
            return True
        remaining = state.remaining_tokens(task, task.need_tokens)
        return rank.projected.fits(limit_tokens, task.need_tokens, group, shared, remaining)

    def _let_go(self, task: TaskState, rank: RankState, now_s: float) -> None:
        state = self._state
        paused = task.phase is Phase.PAUSED
        waited_s = now_s - task.waiting_since_s
        if paused:
            state.stop_waiting(task)
        task.wait += 1
        task.starved = task.cold = False
        task.changed_s = now_s
        state.set_phase(task, Phase.GENERATING)
        state.charge(task, rank, task.need_tokens)
        used = f"{rank.live.usage_tokens} of {rank.budget_tokens} tokens used with it"
        if paused:
            self.num_resumes += 1
            state.out.append(Resume(task.entry.task, rank.rank, f"fits after {waited_s:.3f} s; {used}", rank.version))
        else:
            self.num_grants += 1
            state.out.append(Grant(task.entry.task, rank.rank, used, rank.version))

    def _no_room(self, rank: RankState, task: TaskState, reserved: int) -> str:
        if rank.overloaded:
            return f"the engine measures {rank.engine_tokens} of {rank.kv_tokens} tokens used, and still generates"
        kept = f", {reserved} kept for a call that goes first" if reserved else ""
        return (
            f"needs {task.need_tokens} tokens; {rank.live.usage_tokens} of {rank.budget_tokens} are used{kept}, "
            f"{len(rank.waiting)} calls wait"
        )
