"""What the task scheduler takes and gives: entries, decisions, views, errors. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tide_trainer.types import Kind, RankId


class SchedulerError(Exception):
    """The scheduler was told something that cannot be; the message names the task or rank. State is unchanged."""


class UnknownTaskError(SchedulerError):
    """No such task: never submitted, ended or withdrawn."""


class UnknownRankError(SchedulerError):
    """No such rank: never added, or removed."""


class WrongPhaseError(SchedulerError):
    """The event does not follow from the task's phase."""


class SchedulerFullError(SchedulerError):
    """More tasks than `max_tasks`; submit again when some have ended."""


class Phase(StrEnum):
    """Where a task stands.

    `queued -> admitted -> (held -> generating | held -> paused -> generating) -> acting -> held ...`, and `refused`.
    """

    QUEUED = "queued"
    ADMITTED = "admitted"
    GENERATING = "generating"
    ACTING = "acting"
    HELD = "held"
    PAUSED = "paused"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One task that may be started.

    Attributes:
        task: unique id, for example `<group>/<member>`.
        group: the group's id.
        kind: train or eval.
        num_siblings: tasks of the whole group, this one included.
        environment: its capacity and predicted footprint are kept by this name.
        task_type: for `balance_task_types`; any word.
        order_key: smaller starts earlier among equals (the dataset's order, or V_buf of its reservation).
        version: the model version that all its calls must be sampled from (evaluation); None: any.
    """

    task: str
    group: str
    kind: Kind
    num_siblings: int
    environment: str
    task_type: str = ""
    order_key: int = 0
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a task's loop tells of itself, beside the calls that the scheduler sees.

    Attributes:
        context_tokens: its context now; None where the router measures it, so that nothing is counted twice.
        prompt_tokens: the prompt of the turn that is reported.
        completion_tokens: what the model wrote in it.
        final_tokens: how long the context is expected to get; None takes the environment's mean.
    """

    context_tokens: int | None
    prompt_tokens: int = 1
    completion_tokens: int = 1
    final_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """Start this new task (its environment and agent); it is meant for the rank."""

    task: str
    rank: RankId
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Let the task's held call go to the rank's engine now, which serves model version `version`."""

    task: str
    rank: RankId
    reason: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """The task's call is held: call the gateway's `/pause`."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Call the gateway's `/resume`, wait for it, then let the held call go to the rank's engine, as `Grant` does."""

    task: str
    rank: RankId
    reason: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the task's call at the rank's engine and hold it again (`on_abort`, then `on_call`): it will be paused."""

    task: str
    rank: RankId
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the task (then call `on_end`); answer its call, if it has one, with an error.

    Its call fits no rank even alone, or it is anchored to a model version that no rank serves any more.
    """

    task: str
    reason: str


Decision = Admit | Grant | Pause | Resume | Abort | Refuse


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's numbers.

    Attributes:
        budget_tokens: its limit.
        usage_tokens: live tokens of active tasks, acting ones included unless lent; a generating call counts its
            maximal length.
        projected_tokens: the most that its tasks are expected to hold together, admitted ones included.
        num_tasks: tasks placed here, paused ones included.
        num_waiting: paused tasks whose call waits.
        version: the model version that it serves.
        gate_open: whether calls are granted there.
        overloaded: the engine's measured usage is too high: nothing is granted beside a call that generates.
    """

    rank: RankId
    budget_tokens: int
    usage_tokens: int
    projected_tokens: int
    num_tasks: int
    num_waiting: int
    version: int = 0
    gate_open: bool = True
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's numbers for metrics and readiness.

    Attributes:
        ready: at least one rank with a budget is known; false must raise an alarm, for nothing is ever granted then.
        gate_open: no rank's gate is closed.
        num_pauses: Pause decisions since the start; likewise the other counters.
        num_refused: Refuse decisions since the start.
    """

    ready: bool
    gate_open: bool
    ranks: tuple[RankView, ...]
    num_queued: int
    num_admitted: int
    num_generating: int
    num_acting: int
    num_held: int
    num_paused: int
    num_admits: int
    num_grants: int
    num_pauses: int
    num_resumes: int
    num_refused: int
    num_aborts: int = 0
