"""The lifecycle of a task: pure functions from a frozen task and a moment to the next frozen task.

    starting -> waiting <-> acting -> done -> ended
                  |  ^        |
                  v  |        v           any state before done -> ending -> ended
                 paused <- pausing

Nothing here reads a clock or touches I/O: `now_s` is an argument, and a refused change raises the contract's error.

Source: TideRL appendix B.1 (start, observation, pause, resume, end).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tide_sdk.clocks import ClockName, ClockState, TaskState, enter, new_clocks
from tide_sdk.errors import TideError
from tide_sdk.wire import MAX_EPOCH, Outcome

ASLEEP_S = 1e17
"""`due_s` of a task of which no clock runs (paused, done)."""
ENDED_S = 1e18
"""`due_s` of an ended task; all others are below, so one index finds both the overdue and the open tasks."""

SUPERSEDED = "superseded"
"""Outcome reason of an attempt that a higher one replaced. A caller's `/end` may use the word too: then it is the
task's detail as well."""

OPEN = frozenset({TaskState.STARTING, TaskState.WAITING, TaskState.ACTING, TaskState.PAUSING, TaskState.PAUSED})
_BUSY = frozenset({TaskState.ACTING, TaskState.PAUSING})


@dataclass(frozen=True)
class Task:
    """One task as stored. Without slots, so that the next row is made by one copy (`_with`).

    Attributes:
        turn: number of the next action; equal to the number of turns answered.
        epoch: the newest pause or resume epoch, 0 before the first.
        version: raised by 1 with every commit; a write with an older one is refused.
        worker: the replica that has something in flight for the task, "" where none has.
        max_pause_s, max_wall_s: the operator's caps, `ASLEEP_S` where there is none.
        paused_since_s: the moment of the pause, None while it is not paused.
        wall_since_s: the moment from which `max_wall_s` counts; outages move it.
        instance: name of the instance that hosts it, "" before it has one.
        peer_task: the task's id on its environment server, "" before the server gave one.
        reward: final score, None before the end and after a failure.
        released: its environment server has let it go; nothing of it is left there.
        detail: one line on how it ended, for people.
    """

    task_id: str
    owner: str
    environment: str
    key: str
    attempt: int
    kind: str
    state: TaskState
    clocks: Mapping[ClockName, ClockState]
    created_s: float
    turn: int = 0
    epoch: int = 0
    version: int = 0
    worker: str = ""
    max_pause_s: float = ASLEEP_S
    max_wall_s: float = ASLEEP_S
    paused_since_s: float | None = None
    wall_since_s: float = 0.0
    instance: str = ""
    peer_task: str = ""
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcome: Outcome | None = None
    released: bool = False
    detail: str = ""


class TurnVerdict(Enum):
    """What a call with an action gets."""

    RUN = "run"
    JOIN = "join"
    STORED = "stored"


def new_task(
    *,
    task_id: str,
    owner: str,
    environment: str,
    key: str,
    attempt: int,
    kind: str,
    limits: Mapping[ClockName, float],
    now_s: float,
    worker: str = "",
    max_pause_s: float = ASLEEP_S,
    max_wall_s: float = ASLEEP_S,
) -> Task:
    """A task that begins to start at `now_s`; its `start` clock runs."""
    return Task(
        task_id=task_id,
        owner=owner,
        environment=environment,
        key=key,
        attempt=attempt,
        kind=kind,
        state=TaskState.STARTING,
        clocks=enter(new_clocks(limits), TaskState.STARTING, now_s),
        created_s=now_s,
        worker=worker,
        max_pause_s=max_pause_s,
        max_wall_s=max_wall_s,
        wall_since_s=now_s,
    )


def is_open(task: Task) -> bool:
    """True before the task is done, ending or ended."""
    return task.state in OPEN


def is_busy(task: Task) -> bool:
    """True while the environment acts, paused or not."""
    return task.state in _BUSY


def _with(task: Task, **changes: Any) -> Task:
    """`dataclasses.replace`, which for so many fields costs more than all else that a turn decides."""
    after = object.__new__(Task)
    after.__dict__.update(task.__dict__, **changes)
    return after


def _move(task: Task, state: TaskState, now_s: float, *, new_turn: bool = False, **changes: Any) -> Task:
    if state in (TaskState.WAITING, TaskState.ENDED):
        changes.setdefault("worker", "")  # nothing is in flight any more
    changes |= {"state": state, "paused_since_s": now_s if state is TaskState.PAUSED else None}
    return _with(task, clocks=enter(task.clocks, state, now_s, new_turn=new_turn), **changes)


def refusal(task: Task) -> TideError:
    """The error of a call that needs an open task, for a task that is done, ending or ended."""
    if task.state is TaskState.DONE:
        return TideError("state_conflict", "the task is done; read its account with /end", state=task.state.value)
    if (outcome := task.outcome) is None:
        return TideError("ended", "the task has ended")
    if outcome.reason == SUPERSEDED and task.detail != SUPERSEDED:
        return stale(task)
    shown = outcome.model_dump(exclude_none=True)
    if outcome.kind == "expired" and (clock := outcome.clock) is not None:
        return TideError("expired", f"the task's {clock} clock has expired", clock=clock.value, outcome=shown)
    if outcome.kind == "expired":
        return TideError("expired", f"the operator's cap {outcome.reason} has passed", outcome=shown)
    why = f"{outcome.kind} ({outcome.reason})" if outcome.reason else outcome.kind
    return TideError("ended", f"the task has ended: {why}", outcome=shown)


def stale(task: Task) -> TideError:
    """The error of a call for an attempt that a higher one has replaced."""
    return TideError("stale_attempt", f"attempt {task.attempt} of key {task.key!r} was replaced by a higher one")


def taken_over(task: Task, worker: str) -> Task:
    """The same task, for which `worker` now has something in flight; "" where all has been done."""
    return _with(task, worker=worker)


def placed(task: Task, instance: str) -> Task:
    """The starting task, which takes place there."""
    return _with(task, instance=instance)


def started(task: Task, peer_task: str, now_s: float) -> Task:
    """The task waits for its first action."""
    return _move(task, TaskState.WAITING, now_s, new_turn=True, peer_task=peer_task)


def take_turn(task: Task, turn: int) -> TurnVerdict:
    """Judge an action for `turn`, which changes nothing yet.

    Returns:
        RUN: it is the turn that the task waits for. JOIN: it is being acted now. STORED: it was answered. The caller
        compares the bodies of the last two.

    Raises:
        TideError: the turn cannot be taken, now or ever.
    """
    if 0 <= turn < task.turn:
        return TurnVerdict.STORED
    if turn == task.turn and task.state in _BUSY:
        return TurnVerdict.JOIN
    if task.state in (TaskState.DONE, TaskState.ENDING, TaskState.ENDED):
        raise refusal(task)
    if task.state is TaskState.STARTING:
        raise TideError("state_conflict", "the task is still starting", state=task.state.value)
    if turn != task.turn:
        raise TideError("turn_order", f"turn {turn} is out of order: turn {task.turn} is next", turn=task.turn)
    if task.state is TaskState.PAUSED:
        raise TideError("paused", "the task is paused; call again after /resume", epoch=task.epoch)
    return TurnVerdict.RUN


def acting(task: Task, now_s: float, worker: str = "") -> Task:
    """The environment's turn begins; `worker` sends the action."""
    return _move(task, TaskState.ACTING, now_s, new_turn=True, worker=worker)


def answered(task: Task, now_s: float, *, terminated: bool, truncated: bool) -> Task:
    """The environment has answered: the agent's turn, done where the answer ended the task, paused where asked."""
    if terminated or truncated:
        outcome = Outcome(kind="completed" if terminated else "truncated")
        return _move(task, TaskState.DONE, now_s, new_turn=True, turn=task.turn + 1, outcome=outcome)
    state = TaskState.PAUSED if task.state is TaskState.PAUSING else TaskState.WAITING
    return _move(task, state, now_s, new_turn=True, turn=task.turn + 1)


def pause(task: Task, epoch: int | None, now_s: float, worker: str = "") -> Task:
    """The task after `/pause`, of which `worker` has still to tell the environment server; the very same object where
    the call changes nothing. Raises like `resume`."""
    if _settled(task, epoch):
        return task
    newest = task.epoch if epoch is None else epoch
    if task.state is TaskState.WAITING:
        return _move(task, TaskState.PAUSED, now_s, epoch=newest, worker=worker)
    if task.state is TaskState.ACTING:
        return _move(task, TaskState.PAUSING, now_s, epoch=newest)
    return task if newest == task.epoch else _with(task, epoch=newest)


def resume(task: Task, epoch: int | None, now_s: float) -> Task:
    """The task after `/resume`; the very same object where the call changes nothing.

    Raises:
        TideError: the task starts, ends or has ended.
    """
    if _settled(task, epoch):
        return task
    newest = task.epoch if epoch is None else epoch
    if task.state is TaskState.PAUSED:
        return _move(task, TaskState.WAITING, now_s, epoch=newest)
    if task.state is TaskState.PAUSING:
        return _move(task, TaskState.ACTING, now_s, epoch=newest)
    return task if newest == task.epoch else _with(task, epoch=newest)


def _settled(task: Task, epoch: int | None) -> bool:
    """True if the call can only answer the present state."""
    if task.state is TaskState.STARTING:
        raise TideError("state_conflict", "the task is still starting", state=task.state.value)
    if task.state in (TaskState.ENDING, TaskState.ENDED):
        raise refusal(task)
    if epoch is not None and not 1 <= epoch <= MAX_EPOCH:
        raise TideError("invalid", f"epoch: must be 1 to 2^63-1, got {epoch}", field="epoch")
    return task.state is TaskState.DONE or (epoch is not None and epoch <= task.epoch)


def ending(task: Task, outcome: Outcome, now_s: float, *, detail: str = "", worker: str = "") -> Task:
    """The task ends, from any open state; its `end` clock runs, and `worker` releases its environment."""
    return _move(task, TaskState.ENDING, now_s, outcome=outcome, detail=detail, worker=worker)


def released(task: Task, account: tuple[float | None, Mapping[str, Any]] | None, now_s: float, detail: str) -> Task:
    """The environment server has let the task go, or is gone.

    Args:
        task: a task that is done (it stays so, for `/end` to read) or ending (it becomes ended).
        account: reward and metrics that the server gave, None if it gave none.
        now_s: the moment.
        detail: why there is no account.
    """
    reward, metrics = account or (None, {})
    if task.state is TaskState.DONE and account is None:
        lost = Outcome(kind="failed", reason="environment_lost")
        return _with(task, released=True, outcome=lost, detail=detail, reward=None, worker="")
    if task.state is TaskState.DONE:
        return _with(task, released=True, reward=reward, metrics=metrics, worker="")
    outcome = task.outcome
    # An environment that never answered says nothing about the agent, whatever sum it had so far.
    failed = outcome is not None and (outcome.kind == "failed" or outcome.clock in (ClockName.START, ClockName.TURN))
    last = {"reward": None if failed else reward, "metrics": metrics, "detail": task.detail or detail}
    return _move(task, TaskState.ENDED, now_s, released=True, **last)


def read_out(task: Task, now_s: float) -> Task:
    """The done task after `/end`: ended, with everything that it had."""
    return _move(task, TaskState.ENDED, now_s)


def bumped(task: Task) -> Task:
    """The task as the next version of its row."""
    return _with(task, version=task.version + 1)
