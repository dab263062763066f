"""The second watermark: what is done when an engine measures more KV in use than its tasks were charged for.

Source: TideRL section 4.2 ("usage > B_r": pause the lowest priority). Deviation: the budget alone pauses at turn ends;
a call in flight is aborted only where the engine itself would soon preempt one.
"""

from __future__ import annotations

from tide_trainer.scheduling.entities import RankState, TaskState
from tide_trainer.scheduling.plan import Abort, Phase
from tide_trainer.scheduling.state import SchedulerState


class Watermark:
    """Compares each engine's measured usage with its KV cache.

    Above the watermark a rank is overloaded: calls are aborted, and none is granted beside one that generates, until a
    measure is within the budget again. Never more calls are aborted than their charges say are needed, evaluation only
    after training, and one always goes on.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.num_aborts = 0

    def observe(self, rank: RankState, used_tokens: int, now_s: float) -> None:
        """Takes a measure; -1 (unknown) ends an overload. One that may not show an abort yet is left out. O(1)."""
        limit_tokens = self._state.settings.abort_tokens(rank.kv_tokens)
        if limit_tokens is None or rank.aborting or now_s <= rank.aborted_at_s:
            return
        rank.engine_tokens = used_tokens
        rank.excess_tokens = max(0, used_tokens - limit_tokens)
        was = rank.overloaded
        rank.overloaded = used_tokens > (rank.budget_tokens if was else limit_tokens)
        if was or rank.overloaded:
            self._state.dirty[rank.rank] = None
        if was and not rank.overloaded:
            self._state.admission_dirty = True

    def relieve(self, rank: RankState) -> None:
        """Aborts calls if the last measure asks for it. O(tasks of the rank) if so, else O(1)."""
        if not rank.excess_tokens:
            return
        # One measure asks once: what follows shows in the next.
        excess_tokens, rank.excess_tokens = rank.excess_tokens, 0
        for task in self._chosen(rank, excess_tokens):
            rank.aborting.add(task.entry.task)
            self.num_aborts += 1
            self._state.out.append(
                Abort(
                    task.entry.task,
                    rank.rank,
                    f"the engine measures {rank.engine_tokens} of {rank.kv_tokens} tokens used, "
                    f"{excess_tokens} too many; up to {task.need_tokens} fall free",
                )
            )

    def _chosen(self, rank: RankState, excess_tokens: int) -> list[TaskState]:
        """The fewest of the lowest priority that together were charged for `excess_tokens`."""
        state = self._state
        generating = [task for task in rank.tasks.values() if task.phase is Phase.GENERATING]
        generating.sort(key=lambda task: (not task.is_eval, state.key(task, active=True), task.seq))
        chosen: list[TaskState] = []
        freed_tokens = 0
        while freed_tokens < excess_tokens and len(generating) > 1:
            chosen.append(generating.pop())
            freed_tokens += rank.live.rounded(chosen[-1].need_tokens)
        # A large one may have made others needless.
        for task in reversed(chosen[:-1]):
            tokens = rank.live.rounded(task.need_tokens)
            if freed_tokens - tokens >= excess_tokens:
                freed_tokens -= tokens
                chosen.remove(task)
        return chosen
