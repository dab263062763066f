"""How tasks and ranks come and go, and what time alone changes."""

from __future__ import annotations

import heapq

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.budget import TokenLedger
from tide_trainer.scheduling.plan import Phase
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.state import RankState, SchedulerState, TaskState
from tide_trainer.types import RankId


class Lifecycle:
    """The changes that touch the queue, the waiting calls and the ranks together."""

    def __init__(self, state: SchedulerState, admission: Admission, serving: Serving) -> None:
        self._state = state
        self._admission = admission
        self._serving = serving

    def add_rank(self, rank: RankId, budget_tokens: int, block_tokens: int) -> None:
        """A new rank takes the homeless calls; a new budget makes calls move that are too large for it."""
        state = self._state
        known = state.ranks.get(rank)
        if known is None:
            state.ranks[rank] = RankState(rank, budget_tokens, TokenLedger(block_tokens), TokenLedger(block_tokens))
            moving = list(state.homeless.values())
        else:
            known.budget_tokens = budget_tokens
            moving = [*known.fresh, *known.waiting.values()]
        for task in moving:
            self._move(task)
        state.mark_all()

    def remove_rank(self, rank: RankId) -> tuple[str, ...]:
        """Takes a rank out; calls that wait go to another rank, the other tasks are placed at their next call."""
        state = self._state
        gone = state.ranks.pop(rank)
        tasks = list(gone.tasks.values())
        for task in tasks:
            if task.phase in (Phase.PAUSED, Phase.HELD):
                self._move(task, gone)
                continue
            state.assign(task, None)
            if task.phase is Phase.GENERATING:
                state.set_phase(task, Phase.ACTING)
        for group in state.groups.values():
            if group.home == rank:
                group.home = None
        state.mark_all()
        return tuple(task.entry.task for task in tasks)

    def hold(self, task: TaskState) -> None:
        """Files a held call with its rank for the next plan; with another one if need be, or with the homeless."""
        self._serving.settle(task)
        if task.phase is Phase.REFUSED:
            return
        if task.rank is None:
            self._state.homeless[task.entry.task] = task
        else:
            task.rank.fresh.append(task)
            self._state.dirty[task.rank.rank] = None

    def leave(self, task: TaskState) -> None:
        """A task that was admitted gives back all that it holds."""
        state = self._state
        self._stop(task)
        state.assign(task, None)
        task.wait += 1
        task.environment.num_tasks -= 1
        state.task_types[task.entry.task_type] -= 1
        state.admission_dirty = True

    def forget(self, task: TaskState) -> None:
        """Removes every trace of a task; its group goes with its last member."""
        state, group = self._state, task.group
        self._admission.forget(task)
        if task.phase is not Phase.QUEUED:
            self.leave(task)
        # A queued head that leaves may have stood before a smaller task.
        state.admission_dirty = True
        state.phases[task.phase] -= 1
        del state.tasks[task.entry.task], group.members[task.entry.task]
        if not group.members:
            del state.groups[group.uid]

    def fire_timers(self, now_s: float) -> None:
        """Waits that are too long, probes that are late, environments that may start tasks again."""
        state = self._state
        while state.timers and state.timers[0][0] <= now_s:
            _, _, kind, subject, wait = heapq.heappop(state.timers)
            if not isinstance(subject, TaskState):
                if subject.blocked_until_s is not None and subject.blocked_until_s <= now_s:
                    subject.blocked_until_s = None
                    state.admission_dirty = True
            elif subject.wait != wait:
                continue
            elif kind == "probe":
                self._admission.release_siblings(subject.group)
            elif kind == "starve":
                subject.starved = True
                if subject.rank is not None:
                    subject.rank.num_starved += 1
                    state.push(subject)
            elif len(state.ranks) > 1:
                # The waiting task may go elsewhere now: the rank with the most room looks whether it fits.
                room = max(state.ranks.values(), key=lambda rank: rank.budget_tokens - rank.live.usage_tokens)
                state.dirty[room.rank] = None

    def _stop(self, task: TaskState) -> None:
        if task.phase is Phase.PAUSED:
            self._state.stop_waiting(task)
        elif task.phase is Phase.HELD:
            self._state.homeless.pop(task.entry.task, None)
            if task.rank is not None:
                task.rank.fresh.remove(task)

    def _move(self, task: TaskState, gone: RankState | None = None) -> None:
        """Finds a suitable rank for a held or paused call; the wait of a paused one goes on."""
        self._stop(task)
        if gone is not None:
            self._state.assign(task, None)
        if task.phase is Phase.HELD:
            self.hold(task)
            return
        self._serving.settle(task)
        if task.phase is Phase.PAUSED:
            self._state.start_waiting(task)
