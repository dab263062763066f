"""Bodies of the contract from stored tasks: pure, and lean where they are made once per turn."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from tide_gateway.lifecycle import Task
from tide_sdk import codec
from tide_sdk.clocks import ClockName
from tide_sdk.wire import TaskView

_NAMES = {name: name.value for name in ClockName}
"""`value` of an enumeration is a call."""


def wire_clocks(task: Task, now_s: float) -> dict[str, dict[str, float]]:
    """The task's clocks as the contract shows them."""
    shown: dict[str, dict[str, float]] = {}
    for name, (limit_s, consumed_s, since_s) in task.clocks.items():
        if since_s is not None and now_s > since_s:
            consumed_s += now_s - since_s
        left_s = limit_s - consumed_s
        shown[_NAMES[name]] = {"limit_s": limit_s, "consumed_s": consumed_s, "remaining_s": max(0.0, left_s)}
    return shown


def with_clocks(stored: bytes, task: Task, now_s: float) -> bytes:
    """A stored answer, a JSON object that is not empty, with the clocks as they stand now."""
    return b'%b,"clocks":%b}' % (stored[:-1], codec.dumps(wire_clocks(task, now_s)))


def epoch_answer(task: Task, now_s: float) -> bytes:
    """The answer of `/pause` and `/resume`."""
    return codec.dumps({"state": task.state.value, "epoch": task.epoch, "clocks": wire_clocks(task, now_s)})


def end_answer(task: Task, now_s: float) -> bytes:
    """The answer of `/end`."""
    outcome = task.outcome.model_dump(mode="json") if task.outcome else {"kind": "aborted"}
    return codec.dumps(
        {
            "reward": task.reward,
            "metrics": dict(task.metrics),
            "turns": task.turn,
            "clocks": wire_clocks(task, now_s),
            "outcome": outcome,
        }
    )


def view(task: Task, now_s: float) -> TaskView:
    """The task as `GET /tasks` shows it."""
    return TaskView(
        task_id=task.task_id,
        environment=task.environment,
        key=task.key,
        attempt=task.attempt,
        kind=cast("Any", task.kind),
        state=task.state,
        turn=task.turn,
        epoch=task.epoch,
        reward=task.reward,
        outcome=task.outcome,
        clocks=cast("Any", wire_clocks(task, now_s)),
        created_at=datetime.fromtimestamp(task.created_s, UTC).isoformat(),
    )
