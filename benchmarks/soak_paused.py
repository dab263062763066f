"""1,024 paused tasks through a gateway that is killed -9 and stays away for some seconds: `make soak-paused`.

No task may be lost, no clock of one may be off by more than 1 s, and all resume and finish. The last line is JSON.

    make soak-paused ARGS="--tasks 100 --turns 4"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_common import (
    Episode,
    GatewayCluster,
    Load,
    Report,
    after,
    drive_each,
    in_words,
    leftovers,
    open_client,
    parser,
    progress_of,
    run,
    say,
    scripted,
)

GOAL_S = 1.0
LIMITS = {"start": 600.0, "idle": 600.0, "turn": 300.0, "active": 3600.0, "end": 30.0}
PAGE = 500
CONCURRENCY = 128


@dataclass(slots=True)
class Restart:
    """What every paused task looked like: before the kill, after the restart, and in the answer of its resume."""

    before: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    after: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    resumed: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def off_s(self) -> float:
        """The most by which a clock differed; a resumed task's clocks begin to run with the answer that tells them."""
        return max(compare(self.before, self.after)[0], compare(self.before, self.resumed)[0])

    @property
    def forgotten(self) -> int:
        """Tasks that were gone or not paused any more after the restart."""
        return compare(self.before, self.after)[1]


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Play half of each task, pause it, kill the gateways, compare the clocks, resume, play the rest."""
    table = scripted(servers=arguments.servers, capacity=arguments.tasks, probe_interval_s=2.0, limits=LIMITS)
    outlive_s = arguments.outlive_s or None
    cluster = GatewayCluster(folder, url, {"scripted": table}, arguments.replicas, outlive_s=outlive_s)
    report = Report(num_tasks=arguments.tasks)
    try:
        await asyncio.to_thread(cluster.start_all)
        restart = await play(arguments, cluster, report)
        account = await after(cluster)
    finally:
        await asyncio.to_thread(cluster.close)
    bad = arguments.tasks - report.finished + report.faults + leftovers(account) + restart.forgotten
    return {
        "name": "soak-paused",
        "value": round(restart.off_s, 4),
        "unit": "s by which a paused task's clock was off after the restart",
        "goal": GOAL_S,
        "holds": restart.off_s <= GOAL_S and bad == 0 and len(restart.before) == arguments.tasks,
        "details": {
            **report.details(),
            "paused_through_the_restart": len(restart.before),
            "forgotten": restart.forgotten,
            "resumed_and_finished": report.finished,
            "away_s": arguments.away_s,
            "turns_each": arguments.turns,
            "replicas": arguments.replicas,
            "servers": arguments.servers,
            "database": url.split(":")[0],
            "after": account,
        },
    }


async def play(arguments: argparse.Namespace, cluster: GatewayCluster, report: Report) -> Restart:
    """All tasks, with the restart in the middle."""
    load = Load(
        tasks=arguments.tasks,
        turns=arguments.turns,
        think_s=0.02,
        repeat=0.1,
        call_deadline_s=arguments.deadline_s,
        seed=arguments.seed,
    )
    restart = Restart()

    async def play_to_the_end(episode: Episode, turns: int) -> None:
        restart.resumed[episode.task_id] = view_of((await episode.resume()).data, "paused")
        await episode.play_on()

    began_s = time.perf_counter()
    async with open_client(cluster.urls, load, None, report) as client:
        episodes = [Episode(client, load, number, report) for number in range(load.tasks)]
        paused = await each("until the pause", episodes, report, play_until_paused, arguments.deadline_s)
        restart.before = await asyncio.to_thread(clocks_of, cluster)
        say(f"{len(paused)} tasks are paused; the gateways are away for {arguments.away_s:g} s")
        for replica in cluster.replicas:
            cluster.kill(replica.number)
        await asyncio.sleep(arguments.away_s)
        await asyncio.to_thread(cluster.start_all)
        restart.after = await asyncio.to_thread(clocks_of, cluster)
        await each("after the restart", paused, report, play_to_the_end, arguments.deadline_s)
    report.wall_s = time.perf_counter() - began_s
    return restart


async def play_until_paused(episode: Episode, turns: int) -> None:
    """Start a task, play half of its turns, and pause it."""
    await episode.start()
    while episode.turn < turns // 2:
        await episode.act()
    await episode.pause()


async def each(
    title: str,
    episodes: list[Episode],
    report: Report,
    part: Callable[[Episode, int], Awaitable[None]],
    deadline_s: float,
) -> list[Episode]:
    """Carry out a part for all tasks, some at once; those that came through. The others are in the report."""
    with progress_of(title, len(episodes)) as show:
        return await drive_each(
            episodes, part, concurrency=CONCURRENCY, deadline_s=deadline_s,
            on_done=lambda done: show(done, in_words(report)),
        )  # fmt: skip


def clocks_of(cluster: GatewayCluster) -> dict[str, dict[str, Any]]:
    """Every paused task that a gateway knows: its state and the consumed seconds of its clocks."""
    found: dict[str, dict[str, Any]] = {}
    after_id = ""
    with cluster.client(cluster.running[0]) as client:
        while True:
            page = client.get(f"/tasks?state=paused&limit={PAGE}{after_id}").raise_for_status().json()
            for task in page["tasks"]:
                found[task["task_id"]] = view_of(task, task["state"])
            if page["next"] is None:
                return found
            after_id = f"&after={page['next']}"


def view_of(body: dict[str, Any], state: str) -> dict[str, Any]:
    """A task's state and the consumed seconds of its clocks."""
    return {"state": state, "clocks": {name: clock["consumed_s"] for name, clock in body["clocks"].items()}}


def compare(before: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> tuple[float, int]:
    """The most by which a clock differs, and the tasks that are gone or not paused any more."""
    off_s, forgotten = 0.0, 0
    for task_id, task in before.items():
        now = found.get(task_id)
        if now is None or now["state"] != task["state"]:
            forgotten += 1
            continue
        off_s = max(off_s, *(abs(now["clocks"][name] - seconds) for name, seconds in task["clocks"].items()))
    return off_s, forgotten


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=1024, turns=4, replicas=1, database="sqlite")
    found.add_argument("--away-s", type=float, default=10.0, help="seconds without a gateway; default: 10")
    found.add_argument("--servers", type=int, default=4, help="environment servers; default: 4")
    found.add_argument("--deadline-s", type=float, default=600.0, help="of each half of each task; default: 600")
    return run(soak, found.parse_args())


if __name__ == "__main__":
    sys.exit(main())
