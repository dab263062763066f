"""How tasks and ranks come and go, and what time alone changes."""

from __future__ import annotations

import heapq

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.budget import PeakLedger, TokenLedger
from tide_trainer.scheduling.entities import GroupState, RankState, TaskState
from tide_trainer.scheduling.plan import Phase, Report, SchedulerError, SchedulerFullError, TaskEntry
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.state import SchedulerState
from tide_trainer.types import RankId


class Lifecycle:
    """The changes that touch the queue, the waiting calls and the ranks together."""

    def __init__(self, state: SchedulerState, admission: Admission, serving: Serving) -> None:
        self._state = state
        self._admission = admission
        self._serving = serving

    def add_rank(
        self, rank: RankId, budget_tokens: int, block_tokens: int, version: int, kv_tokens: int | None
    ) -> None:
        """A new rank takes the homeless calls; a new budget makes calls move that are too large for it."""
        state = self._state
        known = state.ranks.get(rank)
        if known is None:
            live, projected = TokenLedger(block_tokens), PeakLedger(block_tokens)
            kv = int(budget_tokens / state.settings.budget_fraction) if kv_tokens is None else kv_tokens
            state.ranks[rank] = RankState(
                rank, next(state.sequence), budget_tokens, live, projected, kv, version, state.gate_open
            )
            moving = list(state.homeless.values())
        else:
            known.budget_tokens = budget_tokens
            known.kv_tokens = known.kv_tokens if kv_tokens is None else kv_tokens
            moving = [*known.fresh, *known.waiting.values()]
        for task in moving:
            self.move(task)
        state.mark_all()

    def remove_rank(self, rank: RankId) -> tuple[str, ...]:
        """Takes a rank out; calls that wait go to another rank, the other tasks are placed at their next call."""
        state = self._state
        gone = state.ranks.pop(rank)
        gone.stamp += 1
        tasks = list(gone.tasks.values())
        for task in tasks:
            if task.phase in (Phase.PAUSED, Phase.HELD):
                self.move(task, gone)
                continue
            state.assign(task, None)
            if task.phase is Phase.GENERATING:
                state.set_phase(task, Phase.ACTING)
        for group in state.groups.values():
            if group.home == rank:
                group.home = None
        state.mark_all()
        return tuple(task.entry.task for task in tasks)

    def submit(self, entry: TaskEntry) -> TaskState:
        """Takes in a new task and queues it."""
        state = self._state
        if entry.task in state.tasks:
            raise SchedulerError(f"task {entry.task!r} is already submitted; use a new id")
        if entry.num_siblings < 1:
            raise SchedulerError(
                f"task {entry.task!r}: num_siblings is {entry.num_siblings}; it counts the task itself"
            )
        if len(state.tasks) >= state.settings.max_tasks:
            raise SchedulerFullError(f"{len(state.tasks)} tasks are known, max_tasks is {state.settings.max_tasks}")
        group = state.groups.get(entry.group)
        if group is None:
            group = state.groups[entry.group] = GroupState(entry.group, entry.num_siblings)
        elif group.num_siblings != entry.num_siblings:
            raise SchedulerError(
                f"task {entry.task!r}: num_siblings is {entry.num_siblings}, its group has {group.num_siblings}"
            )
        task = TaskState(entry, next(state.sequence), group, state.environment(entry.environment))
        state.tasks[entry.task] = group.members[entry.task] = task
        if entry.version is not None:
            state.anchored[entry.task] = task
        state.phases[Phase.QUEUED] += 1
        self._admission.submit(task)
        return task

    def call(self, task: TaskState, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """The task's call arrives and waits for the next plan."""
        state = self._state
        if task.changed_s is not None:
            state.lending.observe_acting(now_s - task.changed_s)
            task.changed_s = None
        state.release(task)
        if task.first_prompt_tokens == 0:
            self.first_prompt(task, prompt_tokens, max_new_tokens)
        task.prompt_tokens, task.max_new_tokens = prompt_tokens, max_new_tokens
        task.waiting_since_s = now_s
        state.set_phase(task, Phase.HELD)
        self.hold(task)

    def turn(self, task: TaskState, context_tokens: int, now_s: float) -> None:
        """The task's call was answered; its rank may be gone meanwhile."""
        task.context_tokens = context_tokens
        if task.changed_s is not None:
            self._state.lending.observe_generating(now_s - task.changed_s)
        task.changed_s = now_s
        if task.rank is not None:
            self.call_ended(task, now_s)
            self._state.set_phase(task, Phase.ACTING)
            self._state.charge(task, task.rank, context_tokens)

    def end(self, task: TaskState, *, completed: bool) -> None:
        """The task ends; its siblings come nearer to completion."""
        state, group = self._state, task.group
        if completed and task.context_tokens:
            state.growth.observe_final(task.environment.name, task.context_tokens)
            group.num_finals += 1
            group.final_tokens += task.context_tokens
        group.num_finished += 1
        self.forget(task)
        for sibling in group.members.values():
            if sibling.phase is Phase.PAUSED:
                state.push(sibling)

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

    def abort(self, task: TaskState, now_s: float, context_tokens: int | None) -> None:
        """The task's call is no more: it acts, and holds `context_tokens`, or nothing until its next call."""
        state = self._state
        self._stop(task)
        self.call_ended(task, now_s)
        task.wait += 1
        task.starved, task.changed_s = False, None
        state.set_phase(task, Phase.ACTING)
        state.release(task)
        state.admission_dirty = True
        if context_tokens is not None:
            task.context_tokens = context_tokens
            if task.rank is not None:
                state.charge(task, task.rank, context_tokens)

    def call_ended(self, task: TaskState, now_s: float) -> None:
        """An abort of the task's call, if one was decided, is awaited no longer."""
        if task.rank is not None and task.entry.task in task.rank.aborting:
            task.rank.aborting.remove(task.entry.task)
            task.rank.aborted_at_s = now_s

    def leave(self, task: TaskState) -> None:
        """A task that was admitted gives back all that it holds."""
        state = self._state
        self._stop(task)
        if task.rank is not None:
            task.rank.aborting.discard(task.entry.task)
        state.assign(task, None)
        task.wait += 1
        task.environment.num_tasks -= 1
        task.environment.num_train -= not task.is_eval
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
        state.anchored.pop(task.entry.task, None)
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
            elif subject.rank is not None and (room := state.index.roomiest(subject.rank.version)) is not None:
                # The waiting task may go elsewhere now: the rank with the most room looks whether it fits.
                state.dirty[room.rank] = None

    def _stop(self, task: TaskState) -> None:
        if task.phase is Phase.PAUSED:
            self._state.stop_waiting(task)
        elif task.phase is Phase.HELD:
            self._state.homeless.pop(task.entry.task, None)
            if task.rank is not None:
                task.rank.fresh.remove(task)

    def move(self, task: TaskState, gone: RankState | None = None) -> None:
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
