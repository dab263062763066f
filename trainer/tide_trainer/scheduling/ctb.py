"""Continuous Task Batching: the task scheduler of the rollout ranks.

The shell feeds events (a task was submitted, its call arrived, its turn ended) and calls `plan`; the scheduler
answers with decisions, each with its reason. It never waits, reads no clock, does no I/O; the simulator runs the same.

    queued --Admit--> admitted --call--> held --Grant--> generating --turn--> acting --call--> held ...
                                          |--Pause--> paused --Resume--> generating

Source: TideRL section 4, Algorithm 1.
Invariant 1: a call is granted only if the live tokens of the rank's other tasks (acting ones included; generating ones
at their maximal length), the new prompt and its maximal new tokens fit the rank's budget.
"""

from __future__ import annotations

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.inspection import check, view_of
from tide_trainer.scheduling.lifecycle import Lifecycle
from tide_trainer.scheduling.plan import (
    Decision,
    Phase,
    Report,
    SchedulerError,
    SchedulerFullError,
    SchedulerView,
    TaskEntry,
    UnknownRankError,
    UnknownTaskError,
    WrongPhaseError,
)
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.scheduling.state import GroupState, SchedulerState, TaskState
from tide_trainer.types import RankId

_STARTED = tuple(phase for phase in Phase if phase is not Phase.QUEUED)


class TaskScheduler:
    """Admits, pauses and resumes tasks so that what is resident on each rank stays useful.

    An event is O(log n), `on_end` O(siblings log n); `plan` is O(log n) per decision plus O(ranks + environments) while
    tasks are queued, and O(ranks) for each rank that has room while tasks are paused elsewhere. Not thread-safe. An
    event that raises has changed nothing. Times are any monotonic clock's seconds.
    """

    def __init__(self, settings: CtbSettings) -> None:
        """Makes a scheduler without ranks: it grants nothing until `add_rank`."""
        self._settings = settings
        self._state = SchedulerState(settings)
        self._admission = Admission(self._state)
        self._serving = Serving(self._state)
        self._lifecycle = Lifecycle(self._state, self._admission, self._serving)

    def add_rank(self, rank: RankId, budget_tokens: int, block_tokens: int = 1) -> None:
        """Adds a rollout rank, or changes the budget of one that is there.

        Args:
            rank: keyed by worker and index.
            budget_tokens: see `CtbSettings.budget_tokens`; at least one block.
            block_tokens: the engine's KV block size; footprints are rounded up to it. Fixed at the first call.
        """
        if block_tokens < 1 or budget_tokens < block_tokens:
            raise SchedulerError(
                f"rank {rank}: budget_tokens {budget_tokens} must hold at least one block of {block_tokens} tokens; "
                "without capacity data the rank cannot be scheduled"
            )
        self._lifecycle.add_rank(rank, budget_tokens, block_tokens)

    def remove_rank(self, rank: RankId) -> tuple[str, ...]:
        """Takes a rank out at once (dead, or moved to another role); its tasks are placed anew at their next call.

        Returns:
            All its tasks. Those that were generating count as acting: the shell repeats their call through `on_call`.

        Raises:
            UnknownRankError: it is not here.
        """
        if rank not in self._state.ranks:
            present = ", ".join(map(str, self._state.ranks)) or "none"
            raise UnknownRankError(f"rank {rank} is not here; present: {present}")
        return self._lifecycle.remove_rank(rank)

    def submit(self, entry: TaskEntry) -> None:
        """Queues a task that staleness admits.

        Raises:
            SchedulerFullError: `max_tasks` are known; submit again later.
            SchedulerError: the id is known, or the entry makes no sense.
        """
        state = self._state
        if entry.task in state.tasks:
            raise SchedulerError(f"task {entry.task!r} is already submitted; use a new id")
        if entry.num_siblings < 1:
            raise SchedulerError(
                f"task {entry.task!r}: num_siblings is {entry.num_siblings}; it counts the task itself"
            )
        if len(state.tasks) >= self._settings.max_tasks:
            raise SchedulerFullError(f"{len(state.tasks)} tasks are known, max_tasks is {self._settings.max_tasks}")
        group = state.groups.get(entry.group)
        if group is None:
            group = state.groups[entry.group] = GroupState(entry.group, entry.num_siblings)
        elif group.num_siblings != entry.num_siblings:
            raise SchedulerError(
                f"task {entry.task!r}: num_siblings is {entry.num_siblings}, its group has {group.num_siblings}"
            )
        task = TaskState(entry, next(state.sequence), group, state.environment(entry.environment))
        state.tasks[entry.task] = group.members[entry.task] = task
        state.phases[Phase.QUEUED] += 1
        self._admission.submit(task)

    def withdraw(self, task: str) -> None:
        """Forgets a task in any phase without counting it as finished (its group was aborted).

        The shell aborts a call that is at the engine first: its tokens count no longer.
        """
        self._lifecycle.forget(self._known(task))

    def requeue(self, task: str, retry_at_s: float | None = None) -> None:
        """Puts an admitted task back into the queue (the gateway answered 429).

        Args:
            task: its id; it must not have made a call.
            retry_at_s: no task of its environment is admitted before; None sets no such time.
        """
        found = self._in_phase(task, "requeue", Phase.ADMITTED)
        self._lifecycle.leave(found)
        self._state.set_phase(found, Phase.QUEUED)
        self._admission.requeue(found)
        if retry_at_s is not None:
            found.environment.blocked_until_s = retry_at_s
            self._state.set_timer(retry_at_s, "unblock", found.environment, 0)

    def on_call(self, task: str, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """The agent's next call has arrived and waits; the next plan grants it or pauses the task.

        Args:
            task: an admitted or acting task.
            prompt_tokens: its whole context.
            max_new_tokens: the most that this call may generate.
            now_s: the time.
        """
        if prompt_tokens < 1 or max_new_tokens < 1:
            raise SchedulerError(
                f"task {task!r}: prompt_tokens {prompt_tokens} and max_new_tokens {max_new_tokens} must be at least 1"
            )
        found = self._in_phase(task, "on_call", Phase.ADMITTED, Phase.ACTING)
        state = self._state
        state.release(found)
        if found.first_prompt_tokens == 0:
            self._lifecycle.first_prompt(found, prompt_tokens, max_new_tokens)
        found.prompt_tokens, found.max_new_tokens = prompt_tokens, max_new_tokens
        found.waiting_since_s = now_s
        state.set_phase(found, Phase.HELD)
        self._lifecycle.hold(found)

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """The call has been answered; the environment acts now and the context stays on the rank.

        Args:
            task: a generating task (or one whose rank was removed while its answer was under way).
            context_tokens: prompt plus completion, measured.
            now_s: the time.
        """
        if context_tokens < 1:
            raise SchedulerError(f"task {task!r}: context_tokens {context_tokens} must be at least 1")
        found = self._known(task)
        displaced = found.phase is Phase.ACTING and found.rank is None
        if not displaced:
            self._in_phase(task, "on_turn", Phase.GENERATING)
        found.context_tokens = context_tokens
        if found.rank is not None:
            self._state.set_phase(found, Phase.ACTING)
            self._state.charge(found, found.rank, context_tokens)

    def on_abort(self, task: str, now_s: float, context_tokens: int | None = None) -> None:
        """The call is no more, whether it waited, was refused or was at the engine; another comes through `on_call`.

        Args:
            task: its id.
            now_s: the time.
            context_tokens: what the task holds although it has no call (its loop has its own engine); None: nothing.
        """
        found = self._in_phase(task, "on_abort", Phase.GENERATING, Phase.HELD, Phase.PAUSED, Phase.REFUSED)
        self._lifecycle.abort(found, context_tokens)

    def on_report(self, task: str, report: Report) -> None:
        """The task's loop tells its footprint, or how long its context will get; in any phase."""
        self._lifecycle.report(self._known(task), report)

    def predicted_tokens(self, task: str) -> int | None:
        """How long the task's context is expected to get, None where nothing is known."""
        found = self._known(task)
        said = found.final_tokens
        return self._state.growth.known_final_tokens(found.environment.name) if said is None else said

    def on_end(self, task: str, now_s: float, *, completed: bool = True) -> None:
        """The task has ended, whatever its outcome; it counts for its group's completion.

        Args:
            task: in any phase but queued; `withdraw` is for those.
            now_s: the time.
            completed: False keeps its footprint out of the predictions (an infrastructure failure cut it short).
        """
        found = self._in_phase(task, "on_end", *_STARTED)
        group = found.group
        if completed and found.context_tokens:
            self._state.growth.observe_final(found.environment.name, found.context_tokens)
        group.num_finished += 1
        self._lifecycle.forget(found)
        for sibling in group.members.values():
            if sibling.phase is Phase.PAUSED:
                self._state.push(sibling)

    def close_gate(self) -> None:
        """From now on nothing is granted, resumed or admitted (weights update); calls that arrive are paused."""
        self._state.gate_open = False

    def open_gate(self) -> None:
        """Grants go on. Cached contexts are gone with the old weights, so that paused tasks may go to any rank."""
        state = self._state
        state.gate_open = True
        for rank in state.ranks.values():
            for task in rank.waiting.values():
                task.cold = True
        state.mark_all()

    def set_environment_capacity(self, environment: str, limit: int | None) -> None:
        """At most `limit` tasks of the environment are in flight; None sets no limit. Running ones are left alone."""
        self._state.environment(environment).limit = limit
        self._state.admission_dirty = True

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """Decides about everything that has happened since the last plan.

        Call it after each event or batch of events, and at `next_wake_s`. The shell carries the decisions out in order;
        the scheduler counts them as done at once. Without new events it returns nothing.
        """
        state = self._state
        self._lifecycle.fire_timers(now_s)
        for task in [task for task in state.homeless.values() if task.phase is Phase.HELD]:
            self._serving.pause(task, now_s, "no rollout rank is up")
        if state.gate_open:
            ranks = [state.ranks[rank] for rank in state.dirty]
            for rank in ranks:
                self._serving.serve(rank, now_s)
            for rank in ranks:
                self._serving.pull(rank, now_s)
            self._admission.admit(now_s)
            state.dirty.clear()
        else:
            for rank in state.ranks.values():
                if rank.fresh:
                    self._serving.hold_back(rank, now_s)
        decisions, state.out = tuple(state.out), []
        return decisions

    def next_wake_s(self) -> float | None:
        """When a plan is due even without an event; None if only events can change anything."""
        return self._state.timers[0][0] if self._state.timers else None

    def phase(self, task: str) -> Phase:
        """Where a task stands. Raises UnknownTaskError."""
        return self._known(task).phase

    def view(self) -> SchedulerView:
        """The numbers for metrics, readiness and people. O(ranks)."""
        return view_of(self._state, self._admission, self._serving)

    def check(self) -> None:
        """Raises SchedulerError if a sum or an index is wrong. O(tasks); for tests and idle moments."""
        check(self._state)

    def _known(self, task: str) -> TaskState:
        found = self._state.tasks.get(task)
        if found is None:
            raise UnknownTaskError(f"task {task!r} is not here: never submitted, ended or withdrawn")
        return found

    def _in_phase(self, task: str, event: str, *phases: Phase) -> TaskState:
        found = self._known(task)
        if found.phase not in phases:
            raise WrongPhaseError(f"task {task!r} is {found.phase}; {event} needs it {' or '.join(phases)}")
        return found
