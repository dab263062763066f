"""From frozen tasks to rows and back, and the frozen write orders that the committer groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tide_gateway.deadlines import due_s
from tide_gateway.lifecycle import Task
from tide_sdk import codec
from tide_sdk.clocks import RUNNING, ClockName, ClockState, TaskState
from tide_sdk.wire import Outcome


class Intent(NamedTuple):
    """An action that is about to go out."""

    turn: int
    action: bytes
    at_s: float


class Result(NamedTuple):
    """The answer to an action."""

    turn: int
    answer: bytes
    at_s: float


class StoredImage(NamedTuple):
    """An image of an observation; its digest is the SHA-256 (hex) of its bytes."""

    digest: str
    data: bytes


class Event(NamedTuple):
    """One line of a task's history."""

    kind: str
    at_s: float
    detail: str = ""


class Change(NamedTuple):
    """One task's next row and what belongs to it; all of it is committed, or nothing.

    Attributes:
        after: the task as it shall be; its `version` is one above the stored one.
        request: the start's body, for a task that is new.
        first: the first observation, with the commit that ends the start.
        images: what `first` or the result refers to.
    """

    after: Task
    request: bytes | None = None
    first: bytes | None = None
    intent: Intent | None = None
    result: Result | None = None
    events: tuple[Event, ...] = ()
    images: tuple[StoredImage, ...] = ()

    @property
    def only_moves(self) -> bool:
        """True where no other columns of the task change than those of `turn_columns`: a turn begins, or is answered
        and the task goes on."""
        if self.intent is not None:
            return self.after.state is TaskState.ACTING
        return self.result is not None and self.after.state in _GOES_ON


_GOES_ON = frozenset({TaskState.WAITING, TaskState.PAUSED})


def storable(words: str) -> str:
    """An environment's words without the NUL that PostgreSQL refuses."""
    return words.replace("\0", "\N{SYMBOL FOR NULL}")


def turn_columns(task: Task) -> dict[str, Any]:
    """The columns that a turn changes which does not end the task."""
    clocks = task.clocks
    running = RUNNING[task.state]
    since = next((clocks[name].running_since_s for name in running), task.paused_since_s)
    return {
        "state": task.state.value,
        "turn": task.turn,
        "version": task.version,
        "worker": task.worker,
        "due_s": due_s(task),
        "since_s": since if since is not None else 0.0,
        "idle_consumed_s": clocks[ClockName.IDLE].consumed_s,
        "turn_consumed_s": clocks[ClockName.TURN].consumed_s,
        "active_consumed_s": clocks[ClockName.ACTIVE].consumed_s,
    }


def mutable_columns(task: Task) -> dict[str, Any]:
    """The columns that change during a task's life; limits are not among them."""
    clocks = task.clocks
    return turn_columns(task) | {
        "epoch": task.epoch,
        "wall_since_s": task.wall_since_s,
        "start_consumed_s": clocks[ClockName.START].consumed_s,
        "end_consumed_s": clocks[ClockName.END].consumed_s,
        "instance": task.instance,
        "peer_task": task.peer_task,
        "released": int(task.released),
        "reward": task.reward,
        "outcome": None if task.outcome is None else codec.dumps(task.outcome.model_dump(mode="json")),
        "metrics": codec.dumps(dict(task.metrics)) if task.metrics else None,
        "detail": storable(task.detail),
    }


def all_columns(task: Task) -> dict[str, Any]:
    """Every column of a task."""
    limits = {f"{name.value}_limit_s": clock.limit_s for name, clock in task.clocks.items()}
    fixed = {
        "task_id": task.task_id,
        "owner": task.owner,
        "environment": task.environment,
        "key": task.key,
        "attempt": task.attempt,
        "kind": task.kind,
        "created_s": task.created_s,
        "max_pause_s": task.max_pause_s,
        "max_wall_s": task.max_wall_s,
    }
    return fixed | limits | mutable_columns(task)


def task_of(row: Mapping[str, Any]) -> Task:
    """The task in a row of `tasks`."""
    state = TaskState(row["state"])
    clocks = {
        name: ClockState(
            limit_s=row[f"{name.value}_limit_s"],
            consumed_s=row[f"{name.value}_consumed_s"],
            running_since_s=row["since_s"] if name in RUNNING[state] else None,
        )
        for name in ClockName
    }
    return Task(
        task_id=row["task_id"],
        owner=row["owner"],
        environment=row["environment"],
        key=row["key"],
        attempt=row["attempt"],
        kind=row["kind"],
        state=state,
        clocks=clocks,
        created_s=row["created_s"],
        turn=row["turn"],
        epoch=row["epoch"],
        version=row["version"],
        worker=row["worker"],
        max_pause_s=row["max_pause_s"],
        max_wall_s=row["max_wall_s"],
        paused_since_s=row["since_s"] if state is TaskState.PAUSED else None,
        wall_since_s=row["wall_since_s"],
        instance=row["instance"],
        peer_task=row["peer_task"],
        reward=row["reward"],
        metrics=codec.loads(row["metrics"]) if row["metrics"] else {},
        outcome=None if row["outcome"] is None else Outcome.model_validate_json(row["outcome"]),
        released=bool(row["released"]),
        detail=row["detail"],
    )
