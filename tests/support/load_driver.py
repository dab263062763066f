"""Plays many scripted tasks at once over the replicas of a gateway, and checks every answer.

    Load -> drive() -> workers -> Episode: start, (think, pause and resume, turn, the turn again)*, end -> Report

Back-pressure: `concurrency` tasks at once, and `max_in_flight` calls to each replica.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from load_episode import Episode, Load
from load_report import Report
from replica_client import ReplicaClient

__all__ = ["Episode", "Load", "Report", "drive", "open_client"]


async def drive(
    urls: Sequence[str],
    load: Load,
    report: Report | None = None,
    *,
    token: str | None = None,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play all tasks of a load; cancelling it leaves tasks to the gateway's clocks.

    Args:
        urls: the replicas; each call goes to one of them by chance.
        load: what is played.
        report: filled while the load runs; a new one by default.
        token: sent with each call.
        on_progress: called after each task.
    """
    report = report or Report()
    report.num_tasks += load.tasks
    began_s = time.perf_counter()
    numbers = iter(range(load.tasks))
    async with open_client(urls, load, token) as client:

        async def work() -> None:
            for number in numbers:
                await Episode(client, load, number, report).play()
                on_progress(report)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency or load.tasks, load.tasks)):
                group.create_task(work())
        report.retries += client.retries
    report.wall_s += time.perf_counter() - began_s
    return report


def open_client(urls: Sequence[str], load: Load, token: str | None = None) -> ReplicaClient:
    """The client that a load calls through; the caller closes it."""
    return ReplicaClient(
        urls,
        token=token,
        max_in_flight=load.max_in_flight,
        try_s=load.try_s,
        deadline_s=load.call_deadline_s,
        rng=random.Random(load.seed),
    )
