"""When a task is overdue: pure functions over its clocks and the operator's caps."""

from __future__ import annotations

from tide_gateway.lifecycle import ASLEEP_S, ENDED_S, Task, is_open
from tide_sdk.clocks import RUNNING, TaskState, first_expired
from tide_sdk.wire import Outcome


def overdue(task: Task, now_s: float) -> Outcome | None:
    """What the task ends with because a clock or an operator's cap has run out at `now_s`; None if none has.

    A cap has no clock of the contract: its name is the outcome's reason.
    """
    clock = first_expired(task.clocks, now_s)
    if clock is not None:
        return Outcome(kind="expired", clock=clock)
    if not is_open(task):
        return None
    if task.paused_since_s is not None and now_s - task.paused_since_s >= task.max_pause_s:
        return Outcome(kind="expired", reason="max_pause_s")
    if now_s - task.wall_since_s >= task.max_wall_s:
        return Outcome(kind="expired", reason="max_wall_s")
    return None


def remaining_s(task: Task, now_s: float) -> float:
    """Seconds until the first running clock of the task runs out; `ASLEEP_S` when none runs."""
    return min((task.clocks[name].remaining(now_s) for name in RUNNING[task.state]), default=ASLEEP_S)


def due_s(task: Task) -> float:
    """The moment at which the first running clock or cap runs out, as things stand; stored for the sweep's index."""
    if task.state is TaskState.ENDED:
        return ENDED_S
    moments = [
        since_s + limit_s - consumed_s for limit_s, consumed_s, since_s in task.clocks.values() if since_s is not None
    ]
    if is_open(task):
        if task.max_wall_s < ASLEEP_S:
            moments.append(task.wall_since_s + task.max_wall_s)
        if task.paused_since_s is not None and task.max_pause_s < ASLEEP_S:
            moments.append(task.paused_since_s + task.max_pause_s)
    return min(moments, default=ASLEEP_S)
