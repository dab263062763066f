"""Tasks as rows, for tests of what stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tide_gateway import lifecycle
from tide_gateway.repository import Repository
from tide_gateway.rows import Change, Event, Intent
from tide_gateway.specs import DEFAULT_LIMITS


def new(number: int, task_id: str | None = None) -> lifecycle.Task:
    """A task that starts at 100 s; its id is `t` and the number unless one is given."""
    return lifecycle.new_task(
        task_id=task_id or f"t{number:03}", owner="o", environment="e", key=f"k{number}", attempt=0, kind="train",
        limits=DEFAULT_LIMITS, now_s=100.0,
    )  # fmt: skip


async def add(repository: Repository, count: int, make: Callable[[int], lifecycle.Task] = new) -> list[lifecycle.Task]:
    """Store new tasks."""
    tasks = [make(number) for number in range(count)]
    assert await repository.apply([Change(task, request=b"{}") for task in tasks]) == [None] * count
    return tasks


def next_of(task: lifecycle.Task, **changes) -> Change:
    """The change that starts a task and takes its first turn."""
    after = replace(lifecycle.started(task, "peer", 101.0), version=task.version + 1, **changes)
    return Change(after, intent=Intent(0, b'{"a":1}', 101.0), events=(Event("started", 101.0),))
