"""Continuous Task Batching: the task scheduler of the rollout ranks.

The shell feeds events (a task was submitted, its call arrived, its turn ended) and calls `plan`; the scheduler
answers with decisions, each with its reason. It never waits, reads no clock, does no I/O; the simulator runs the same.

    queued --Admit--> admitted --call--> held --Grant--> generating --turn--> acting --call--> held ...
                                          |--Pause--> paused --Resume--> generating

Source: TideRL section 4, Algorithm 1.
Invariant 1: a call is granted only if the live tokens of the rank's other tasks (acting ones included, unless theirs
are lent; generating ones at their maximal length), the new prompt and its maximal new tokens fit the rank's budget.
"""

from __future__ import annotations

from collections.abc import Collection

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.gates import Gates
from tide_trainer.scheduling.inspection import check, in_phase, known, rank_of, view_of
from tide_trainer.scheduling.lifecycle import Lifecycle
from tide_trainer.scheduling.plan import (
    Decision,
    Phase,
    Report,
    SchedulerError,
    SchedulerView,
    TaskEntry,
)
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.scheduling.state import SchedulerState
from tide_trainer.scheduling.watermark import Watermark
from tide_trainer.types import RankId

_STARTED = tuple(phase for phase in Phase if phase is not Phase.QUEUED)


class TaskScheduler:
    """Admits, pauses and resumes tasks so that what is resident on each rank stays useful.

    An event is O(log n), `on_end` O(siblings log n); `plan` is O(log n) per decision and per rank that an event
    touched, plus O(environments x task types) while tasks are queued. What touches a
    rank as such (a weight update, a rank that comes or goes) is O(tasks). Not thread-safe. An event that raises has
    changed nothing. Times are any monotonic clock's seconds.
    """

    def __init__(self, settings: CtbSettings) -> None:
        """Makes a scheduler without ranks: it grants nothing until `add_rank`."""
        self._state = SchedulerState(settings)
        self._admission = Admission(self._state)
        self._serving = Serving(self._state)
        self._lifecycle = Lifecycle(self._state, self._admission, self._serving)
        self._watermark = Watermark(self._state)
        self._gates = Gates(self._state, self._admission, self._serving, self._lifecycle)

    def add_rank(
        self,
        rank: RankId,
        budget_tokens: int,
        block_tokens: int = 1,
        version: int = 0,
        kv_tokens: int | None = None,
    ) -> None:
        """Adds a rollout rank, or changes the budget of one that is there.

        Args:
            rank: keyed by worker and index.
            budget_tokens: see `CtbSettings.budget_tokens`; at least one block.
            block_tokens: the engine's KV block size; footprints are rounded up to it. Fixed at the first call.
            version: the model version that a new rank serves (a warm start's are negative); `open_gate` changes it.
            kv_tokens: the engine's KV cache, for the abort watermark. None: as before, or by the budget's share.
        """
        if block_tokens < 1 or budget_tokens < block_tokens:
            raise SchedulerError(
                f"rank {rank}: budget_tokens {budget_tokens} must hold at least one block of {block_tokens} tokens; "
                "without capacity data the rank cannot be scheduled"
            )
        self._gates.add_rank(rank, budget_tokens, block_tokens, version, kv_tokens)

    def remove_rank(self, rank: RankId) -> tuple[str, ...]:
        """Takes a rank out at once (dead, or moved to another role); its tasks are placed anew at their next call.

        Returns:
            All its tasks. Those that were generating count as acting: the shell repeats their call through `on_call`.

        Raises:
            UnknownRankError: it is not here.
        """
        rank_of(self._state, rank)
        return self._gates.remove_rank(rank)

    def submit(self, entry: TaskEntry) -> None:
        """Queues a task that staleness admits.

        Raises:
            SchedulerFullError: `max_tasks` are known; submit again later.
            SchedulerError: the id is known, or the entry makes no sense.
        """
        self._gates.refuse_lost((self._lifecycle.submit(entry),))

    def withdraw(self, task: str) -> None:
        """Forgets a task in any phase without counting it as finished (its group was aborted).

        The shell aborts a call that is at the engine first: its tokens count no longer.
        """
        self._lifecycle.forget(known(self._state, task))

    def requeue(self, task: str, retry_at_s: float | None = None) -> None:
        """Puts an admitted task back into the queue (the gateway answered 429).

        Args:
            task: its id; it must not have made a call.
            retry_at_s: no task of its environment is admitted before; None sets no such time.
        """
        found = in_phase(self._state, task, "requeue", Phase.ADMITTED)
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
        found = in_phase(self._state, task, "on_call", Phase.ADMITTED, Phase.ACTING)
        self._lifecycle.call(found, prompt_tokens, max_new_tokens, now_s)

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """The call has been answered; the environment acts now and the context stays on the rank.

        Args:
            task: a generating task (or one whose rank was removed while its answer was under way).
            context_tokens: prompt plus completion, measured.
            now_s: the time.
        """
        if context_tokens < 1:
            raise SchedulerError(f"task {task!r}: context_tokens {context_tokens} must be at least 1")
        found = known(self._state, task)
        displaced = found.phase is Phase.ACTING and found.rank is None
        if not displaced:
            in_phase(self._state, task, "on_turn", Phase.GENERATING)
        self._lifecycle.turn(found, context_tokens, now_s)

    def on_abort(self, task: str, now_s: float, context_tokens: int | None = None) -> None:
        """The call is no more, whether it waited, was refused or was at the engine; another comes through `on_call`.

        Args:
            task: its id.
            now_s: the time.
            context_tokens: what the task holds although it has no call (its loop has its own engine); None: nothing.
        """
        found = in_phase(self._state, task, "on_abort", Phase.GENERATING, Phase.HELD, Phase.PAUSED, Phase.REFUSED)
        self._lifecycle.abort(found, now_s, context_tokens)

    def on_report(self, task: str, report: Report) -> None:
        """The task's loop tells its footprint, or how long its context will get; in any phase."""
        self._lifecycle.report(known(self._state, task), report)

    def predicted_tokens(self, task: str) -> int | None:
        """How long the task's context is expected to get, None where nothing is known."""
        return self._state.known_final_tokens(known(self._state, task))

    def on_end(self, task: str, now_s: float, *, completed: bool = True) -> None:
        """The task has ended, whatever its outcome; it counts for its group's completion.

        Args:
            task: in any phase but queued; `withdraw` is for those.
            now_s: the time.
            completed: False keeps its footprint out of the predictions (an infrastructure failure cut it short).
        """
        self._lifecycle.end(in_phase(self._state, task, "on_end", *_STARTED), completed=completed)

    def close_gate(self, ranks: Collection[RankId] | None = None) -> None:
        """From now on the ranks get no grant, resume or admission (weights update); their calls are paused.

        Args:
            ranks: those whose gates close; None: all, and those that are added before `open_gate` opens all.
        """
        self._gates.close(ranks)

    def open_gate(self, version: int, ranks: Collection[RankId] | None = None) -> None:
        """The ranks serve `version` now, and grants go on there.

        Cached contexts are gone with the old weights, so that paused tasks may go to any rank. A rank that stays older
        than the newest version keeps only the tasks that are anchored to its own.

        Args:
            version: the model version of their weights.
            ranks: those whose gates open; None: all. Ranks that have left meanwhile are passed over.

        Raises:
            SchedulerError: one of them serves a newer version already.
        """
        self._gates.open(version, ranks)

    def set_environment_capacity(self, environment: str, limit: int | None, reserved_eval: int = 0) -> None:
        """At most `limit` tasks of the environment are in flight; None sets no limit. Running ones are left alone.

        `reserved_eval` of them are kept for evaluation tasks, which may use the others too.

        Raises:
            SchedulerError: a number is below 0, or more are reserved than there are.
        """
        if reserved_eval < 0 or (limit is not None and reserved_eval > limit):
            raise SchedulerError(
                f"environment {environment!r}: reserved_eval {reserved_eval} must be between 0 and the limit {limit}"
            )
        state = self._state.environment(environment)
        state.limit, state.reserved_eval = limit, reserved_eval
        self._state.admission_dirty = True

    def on_engine_usage(self, rank: RankId, used_tokens: int, now_s: float) -> None:
        """The engine's own measure of its KV cache; the next plan aborts calls if it is above the second watermark.

        Args:
            rank: keyed by worker and index.
            used_tokens: in blocks that running requests hold; cached blocks that may be evicted do not count.
                -1: not known any more.
            now_s: when it was measured; what is older than the last abort decides nothing.

        Raises:
            UnknownRankError: it is not here.
        """
        self._watermark.observe(rank_of(self._state, rank), used_tokens, now_s)

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """Decides about everything that has happened since the last plan.

        Call it after each event or batch of events, and at `next_wake_s`. The shell carries the decisions out in order;
        the scheduler counts them as done at once. Without new events it returns nothing.
        """
        state = self._state
        self._lifecycle.fire_timers(now_s)
        why = "no rank serves its model version" if state.ranks else "no rollout rank is up"
        for task in [task for task in state.homeless.values() if task.phase is Phase.HELD]:
            self._serving.pause(task, now_s, why)
        ranks = [state.ranks[rank] for rank in state.dirty]
        for rank in ranks:
            self._watermark.relieve(rank)
            (self._serving.serve if rank.gate_open else self._serving.hold_back)(rank, now_s)
        for rank in ranks:
            state.index.refresh(rank)
        for rank in ranks:
            self._serving.pull(rank, now_s)
        self._admission.admit(now_s)
        state.dirty.clear()
        decisions, state.out = tuple(state.out), []
        return decisions

    def next_wake_s(self) -> float | None:
        """When a plan is due even without an event; None if only events can change anything."""
        return self._state.timers[0][0] if self._state.timers else None

    def phase(self, task: str) -> Phase:
        """Where a task stands. Raises UnknownTaskError."""
        return known(self._state, task).phase

    def view(self) -> SchedulerView:
        """The numbers for metrics, readiness and people. O(ranks)."""
        return view_of(self._state, self._admission, self._serving, self._watermark)

    def check(self) -> None:
        """Raises SchedulerError if a sum or an index is wrong. O(tasks); for tests and idle moments."""
        check(self._state)
