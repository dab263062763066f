"""Checks of many tasks at once."""

from __future__ import annotations

import asyncio
from typing import Any

from tide_sdk.check.answers import same
from tide_sdk.check.case import Failed, Skipped, case
from tide_sdk.check.cases_turns import ONCE
from tide_sdk.check.talk import Talk, Task

_TURNS = 3
_SEEN = ("messages", "reward", "terminated", "truncated")


@case("load.tasks", ONCE, "Many tasks at once do not disturb each other.")
async def tasks_at_once(talk: Talk) -> None:
    """As many as fit, each with words of its own; each goes as it would alone."""
    health = await talk.health()
    size = min(health.capacity - health.tasks, talk.plan.max_tasks)
    if size < 2:
        raise Skipped("the server holds one task at a time")
    alone = [await _play(talk, number) for number in range(size)]
    again = [await _play(talk, number) for number in (0, size - 1)]
    together = await asyncio.gather(*(_play(talk, number) for number in range(size)))
    for number, task in enumerate(together):
        said = str([observed["messages"] for observed in task.observations])
        for other in range(size):
            if other != number and _words(other) in said and _words(number) not in said:
                raise Failed(f"a task was shown the words of another: {_words(other)} instead of {_words(number)}")
    if [_seen(task) for task in again] != [_seen(alone[0]), _seen(alone[-1])]:
        talk.notes.append("the environment differs from task to task: observations were not compared")
    else:
        for one, other in zip(together, alone, strict=True):
            same(_seen(one), _seen(other), "a task among many and the same task alone")
    talk.notes.append(f"{size} tasks at once")


async def _play(talk: Talk, number: int) -> Task:
    task = await talk.start(seed=number)
    while task.turn < _TURNS and not task.done:
        await talk.act(task, _words(number))
    await talk.end(task)
    return task


def _words(number: int) -> str:
    return f"words-of-task-{number:05d}"


def _seen(task: Task) -> list[dict[str, Any]]:
    first = {"messages": task.started["messages"]}
    return [first, *({name: observed[name] for name in _SEEN} for observed in task.observations)]


CASES = (tasks_at_once,)
