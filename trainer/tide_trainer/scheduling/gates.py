"""Model versions: which ranks serve which, whose gates are closed, and tasks that are anchored to one.

A task without an anchor is sampled at the newest version only; an anchored one at its own. A rank that stays behind (it
keeps an evaluation's version) takes nothing else.

Source: TideRL section 3.2 and 5.2. Deviation: the paper leaves open where an evaluation's version stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.entities import RankState, TaskState
from tide_trainer.scheduling.lifecycle import Lifecycle
from tide_trainer.scheduling.plan import Phase, SchedulerError
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.state import SchedulerState
from tide_trainer.types import RankId


class Gates:
    """Closes and opens the gates of ranks around their weight updates, and moves tasks that may not stay."""

    def __init__(self, state: SchedulerState, admission: Admission, serving: Serving, lifecycle: Lifecycle) -> None:
        self._state = state
        self._admission = admission
        self._serving = serving
        self._lifecycle = lifecycle

    def close(self, ranks: Collection[RankId] | None) -> None:
        """Nothing is granted on the ranks from now on; None: on all, and on those that come."""
        if ranks is None:
            self._state.gate_open = False
        for rank in self._chosen(ranks):
            rank.gate_open = False

    def open(self, version: int, ranks: Collection[RankId] | None) -> None:
        """The ranks serve `version` from now on. O(tasks)."""
        state, chosen = self._state, self._chosen(ranks)
        for rank in chosen:
            if rank.version > version:
                raise SchedulerError(f"rank {rank.rank} serves model version {rank.version}, newer than {version}")
        if ranks is None:
            state.gate_open = True
        for rank in chosen:
            rank.gate_open = True
            if rank.version != version:
                rank.version = version
                for task in rank.waiting.values():
                    task.cold = True
        self._advance(version)
        state.mark_all()

    def add_rank(
        self, rank: RankId, budget_tokens: int, block_tokens: int, version: int, kv_tokens: int | None
    ) -> None:
        """A new rank, or a new budget of one that is there. O(tasks) if it brings a newer version."""
        known = rank in self._state.ranks
        self._lifecycle.add_rank(rank, budget_tokens, block_tokens, version, kv_tokens)
        if not known and version > self._state.newest:
            self._advance(version)

    def remove_rank(self, rank: RankId) -> tuple[str, ...]:
        """Takes a rank out; tasks that are anchored to a version which only it served are refused."""
        tasks = self._lifecycle.remove_rank(rank)
        self.refuse_lost(self._state.anchored.values())
        return tasks

    def refuse_lost(self, tasks: Iterable[TaskState]) -> None:
        """Refuses the queued ones among the tasks whose version no rank serves any more; others at their next call."""
        for task in [task for task in tasks if task.phase is Phase.QUEUED and self._state.is_lost(task)]:
            self._admission.forget(task)
            # It leaves through `on_end`, as one that had started.
            self._state.count_started(task)
            self._serving.refuse(task)

    def _chosen(self, ranks: Collection[RankId] | None) -> list[RankState]:
        return [rank for rank in self._state.ranks.values() if ranks is None or rank.rank in ranks]

    def _advance(self, version: int) -> None:
        state = self._state
        state.newest = max(state.newest, version)
        for rank in state.ranks.values():
            for task in [task for task in rank.tasks.values() if not state.serves(rank, task)]:
                if task.phase in (Phase.HELD, Phase.PAUSED):
                    self._lifecycle.move(task)
                elif task.phase is not Phase.GENERATING:
                    # Its next call goes elsewhere; what it holds here is of no more use.
                    state.assign(task, None)
        for task in list(state.homeless.values()):
            self._lifecycle.move(task)
        self.refuse_lost(state.anchored.values())
        self._admission.drop_empty_lanes()
        state.index.drop_versions({rank.version for rank in state.ranks.values()})
