"""How tasks and ranks come and go, and what time alone changes."""

from __future__ import annotations

import heapq

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.budget import TokenLedger
from tide_trainer.scheduling.plan import Phase, Report
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

    def first_prompt(self, task: TaskState, prompt_tokens: int, max_new_tokens: int) -> None:
        """The task's first prompt is measured: its environment's mean learns of it, and its siblings may start."""
        state, group = self._state, task.group
        task.first_prompt_tokens = prompt_tokens
        state.growth.observe_first_call(task.environment.name, prompt_tokens, max_new_tokens)
        if group.prompt_tokens is None:
            group.prompt_tokens = prompt_tokens
        self._admission.release_siblings(group)

    def report(self, task: TaskState, report: Report) -> None:
        """Takes what a task's loop says. While a call of it waits or runs, that call's tokens count."""
        state = self._state
        task.final_tokens = report.final_tokens
        if report.context_tokens is not None and task.phase in (Phase.ADMITTED, Phase.ACTING):
            if task.first_prompt_tokens == 0:
                self.first_prompt(task, max(1, report.prompt_tokens), max(1, report.completion_tokens))
            task.context_tokens = max(1, report.context_tokens)
            state.set_phase(task, Phase.ACTING)
            if task.rank is not None:
                state.charge(task, task.rank, task.context_tokens)
        elif task.rank is not None and task.entry.task in task.rank.live:
            generating = task.phase is Phase.GENERATING
            state.charge(task, task.rank, task.need_tokens if generating else task.context_tokens)

    def abort(self, task: TaskState, context_tokens: int | None) -> None:
        """The task's call is no more: it acts, and holds `context_tokens`, or nothing until its next call."""
        state = self._state
        self._stop(task)
        task.wait += 1
        task.starved = False
        state.set_phase(task, Phase.ACTING)
        state.release(task)
        state.admission_dirty = True
        if context_tokens is not None:
            task.context_tokens = context_tokens
            if task.rank is not None:
                state.charge(task, task.rank, context_tokens)

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
