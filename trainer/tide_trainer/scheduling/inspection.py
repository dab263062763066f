"""Looking at the scheduler: its tasks and ranks by name, its numbers, and whether its sums are right."""

from __future__ import annotations

from tide_trainer.scheduling.admission import Admission
from tide_trainer.scheduling.entities import RankState, TaskState
from tide_trainer.scheduling.plan import (
    Phase,
    RankView,
    SchedulerError,
    SchedulerView,
    UnknownRankError,
    UnknownTaskError,
    WrongPhaseError,
)
from tide_trainer.scheduling.serving import Serving
from tide_trainer.scheduling.state import SchedulerState
from tide_trainer.scheduling.watermark import Watermark
from tide_trainer.types import RankId

_WITH_RANK_ONLY = frozenset({Phase.GENERATING})
_WITHOUT_RANK_ONLY = frozenset({Phase.QUEUED, Phase.REFUSED})


def view_of(state: SchedulerState, admission: Admission, serving: Serving, watermark: Watermark) -> SchedulerView:
    """The scheduler's numbers. O(ranks)."""
    phases = state.phases
    return SchedulerView(
        ready=bool(state.ranks),
        gate_open=state.gate_open and all(rank.gate_open for rank in state.ranks.values()),
        ranks=tuple(
            RankView(
                rank=rank.rank,
                budget_tokens=rank.budget_tokens,
                usage_tokens=rank.live.usage_tokens,
                projected_tokens=rank.projected.peak_tokens,
                num_tasks=len(rank.tasks),
                num_waiting=len(rank.waiting),
                version=rank.version,
                gate_open=rank.gate_open,
                overloaded=rank.overloaded,
            )
            for rank in state.ranks.values()
        ),
        num_queued=phases[Phase.QUEUED],
        num_admitted=phases[Phase.ADMITTED],
        num_generating=phases[Phase.GENERATING],
        num_acting=phases[Phase.ACTING],
        num_held=phases[Phase.HELD],
        num_paused=phases[Phase.PAUSED],
        num_admits=admission.num_admits,
        num_grants=serving.num_grants,
        num_pauses=serving.num_pauses,
        num_resumes=serving.num_resumes,
        num_refused=serving.num_refused,
        num_aborts=watermark.num_aborts,
    )


def rank_of(state: SchedulerState, rank: RankId) -> RankState:
    """The rank's state. Raises UnknownRankError."""
    found = state.ranks.get(rank)
    if found is None:
        present = ", ".join(map(str, state.ranks)) or "none"
        raise UnknownRankError(f"rank {rank} is not here; present: {present}")
    return found


def known(state: SchedulerState, task: str) -> TaskState:
    """The task's state. Raises UnknownTaskError."""
    found = state.tasks.get(task)
    if found is None:
        raise UnknownTaskError(f"task {task!r} is not here: never submitted, ended or withdrawn")
    return found


def in_phase(state: SchedulerState, task: str, event: str, *phases: Phase) -> TaskState:
    """The state of a task that is in one of the phases, as `event` needs. Raises UnknownTaskError, WrongPhaseError."""
    found = known(state, task)
    if found.phase not in phases:
        raise WrongPhaseError(f"task {task!r} is {found.phase}; {event} needs it {' or '.join(phases)}")
    return found


def check(state: SchedulerState) -> None:
    """Raises SchedulerError if a sum or an index is wrong. O(tasks)."""
    counts = dict.fromkeys(Phase, 0)
    for task in state.tasks.values():
        counts[task.phase] += 1
        uid = task.entry.task
        if (task.rank is None and task.phase in _WITH_RANK_ONLY) or (task.rank and task.phase in _WITHOUT_RANK_ONLY):
            raise SchedulerError(f"task {uid!r} is {task.phase} on rank {task.rank.rank if task.rank else None}")
        if task.rank is not None and task.rank.tasks.get(uid) is not task:
            raise SchedulerError(f"task {uid!r} is not among its rank's tasks")
        if task.phase is Phase.PAUSED and uid not in (state.homeless if task.rank is None else task.rank.waiting):
            raise SchedulerError(f"task {uid!r} is paused and waits nowhere")
        if task.phase is Phase.GENERATING and task.rank and task.rank.live.tokens_of(uid) < task.need_tokens:
            raise SchedulerError(f"task {uid!r} generates and is not charged for it")
        if task.phase is Phase.PAUSED and task.rank is not None and not state.serves(task.rank, task):
            raise SchedulerError(f"task {uid!r} waits for rank {task.rank.rank}, which serves another version")
    if counts != state.phases:
        raise SchedulerError(f"phases are counted {state.phases}, there are {counts}")
    for environment in state.environments.values():
        here = [task for task in state.tasks.values() if task.environment is environment]
        if environment.num_tasks != sum(task.phase is not Phase.QUEUED for task in here):
            raise SchedulerError(f"environment {environment.name!r} counts {environment.num_tasks} tasks")
        if environment.num_train != sum(task.phase is not Phase.QUEUED and not task.is_eval for task in here):
            raise SchedulerError(f"environment {environment.name!r} counts {environment.num_train} train tasks")
    for rank in state.ranks.values():
        _check_rank(rank)


def _check_rank(rank: RankState) -> None:
    waiting = list(rank.waiting.values())
    if rank.live.usage_tokens != rank.live.recount() or rank.projected.peak_tokens != rank.projected.recount():
        raise SchedulerError(f"rank {rank.rank}: the usage is not the sum of the charges")
    if any(rank.tasks.get(task.entry.task) is not task or task.phase is not Phase.PAUSED for task in waiting):
        raise SchedulerError(f"rank {rank.rank}: a waiting task is not paused here")
    if any(task.entry.task in rank.live or task.entry.task in rank.projected for task in waiting):
        raise SchedulerError(f"rank {rank.rank}: a waiting task is charged")
    if rank.waiting_tokens != sum(task.need_tokens for task in waiting):
        raise SchedulerError(f"rank {rank.rank}: the waiting tokens are not the sum of the needs")
    if rank.num_waiting_eval != sum(task.is_eval for task in waiting):
        raise SchedulerError(f"rank {rank.rank}: waiting evaluation tasks are miscounted")
    if rank.num_starved != sum(task.starved for task in waiting):
        raise SchedulerError(f"rank {rank.rank}: starved tasks are miscounted")
    if rank.generating_tokens != sum(rank.generating.values()):
        raise SchedulerError(f"rank {rank.rank}: tokens of calls at the engine are miscounted")
    if any(rank.tasks[uid].phase is not Phase.GENERATING for uid in rank.generating):
        raise SchedulerError(f"rank {rank.rank}: a call is counted at the engine that is not there")
    if any(rank.tasks[uid].phase is not Phase.GENERATING for uid in rank.aborting):
        raise SchedulerError(f"rank {rank.rank}: an abort is awaited of a task that does not generate")
    if any(task.phase is not Phase.HELD for task in rank.fresh):
        raise SchedulerError(f"rank {rank.rank}: a fresh call is not held")
