"""Plays many scripted tasks at once over the replicas of a gateway, and checks every answer.

    Load -> drive() -> workers -> Episode: start, (think, pause and resume, turn, the turn again)*, end -> Report

Back-pressure: `concurrency` tasks at once, and `max_in_flight` calls to each replica.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from load_episode import Episode, Load
from load_report import Report
from replica_client import ReplicaClient

__all__ = ["Episode", "Load", "Report", "drive", "drive_each", "open_client"]


async def drive(
    urls: Sequence[str],
    load: Load,
    report: Report | None = None,
    *,
    token: str | None = None,
    on_turn: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play all tasks of a load; cancelling it leaves tasks to the gateway's clocks.

    Args:
        urls: the replicas; each call goes to one of them by chance.
        load: what is played.
        report: filled while the load runs; a new one by default.
        token: sent with each call.
        on_turn: called after each turn and each task.
    """
    report = report or Report()
    report.num_tasks += load.tasks
    began_s = time.perf_counter()
    numbers = iter(range(load.tasks))
    async with open_client(urls, load, token, report) as client:

        async def work() -> None:
            for number in numbers:
                await Episode(client, load, number, report, on_turn).play()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency or load.tasks, load.tasks)):
                group.create_task(work())
    report.wall_s += time.perf_counter() - began_s
    return report


async def drive_each(
    episodes: Sequence[Episode],
    part: Callable[[Episode, int], Awaitable[None]],
    *,
    concurrency: int,
    deadline_s: float,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Episode]:
    """Carry out one part of each task; whatever breaks is noted in its report.

    Args:
        episodes: the tasks.
        part: what is done with each, given its number of turns; raises `Broken` as the episode's own calls do.
        concurrency: tasks at once.
        deadline_s: of one part; a task that takes longer is lost.
        on_done: called after each task with the number of those that are through or broken.

    Returns:
        The tasks that came through, in order.
    """
    broken: set[Episode] = set()
    waiting = iter(episodes)
    done = 0

    async def work() -> None:
        nonlocal done
        for episode in waiting:
            if not await episode.carry_out(part, deadline_s):
                broken.add(episode)
            done += 1
            on_done(done)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(episodes))):
            group.create_task(work())
    return [episode for episode in episodes if episode not in broken]


def open_client(urls: Sequence[str], load: Load, token: str | None, report: Report) -> ReplicaClient:
    """The client that a load calls through, with its retries in the report; the caller closes it."""
    return ReplicaClient(
        urls,
        token=token,
        max_in_flight=load.max_in_flight,
        try_s=load.try_s,
        deadline_s=load.call_deadline_s,
        rng=random.Random(load.seed),
        retries=report.retries,
    )
