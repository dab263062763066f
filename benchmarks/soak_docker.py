"""100 tasks, each in a container of its own, and the engine restarted once in the middle: `make soak-docker`.

Each task goes on to its end, or ends with a typed infrastructure outcome and no reward; none silently, none twice.
Afterwards no container is left. The engine is one of the soak's own. The last line is JSON.

    make soak-docker ARGS="--tasks 8 --turns 6"
    make soak-docker ARGS="--live-restore"        containers outlive the engine, and their tasks go on
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
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
)

LIMITS = {"start": 1800.0, "idle": 600.0, "turn": 300.0, "active": 3600.0, "end": 60.0}
MEMORY_MB = 128
# Launching a container costs a good part of a core: as many at once as there are tasks would all be late.
CONCURRENT_STARTS = 8


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Start all tasks, play them while the engine restarts, and look what is left."""
    from docker_engine import docker_spec, engine_with_images
    from marked_servers import find_containers

    engine = engine_with_images(*(["--live-restore"] if arguments.live_restore else []))
    cluster: GatewayCluster | None = None
    try:
        spec = docker_spec(
            engine,
            capacity=arguments.tasks,
            servers=arguments.tasks,
            retire_after=1,
            limits=LIMITS,
            probe_interval_s=2.0,
            docker={"memory_mb": MEMORY_MB},
        )
        table = spec.model_dump(mode="json", exclude={"name"}, exclude_defaults=True, exclude_none=True)
        outlive_s = arguments.outlive_s or None
        cluster = GatewayCluster(
            folder, url, {"scripted": table}, arguments.replicas, outlive_s=outlive_s, docker_host=engine.url
        )
        await asyncio.to_thread(cluster.start_all)
        report, most = await play(arguments, cluster, engine)
        account = await after(cluster)
        left = [str(server) for server in await asyncio.to_thread(find_containers, engine.url)]
    finally:
        if cluster is not None:
            await asyncio.to_thread(cluster.close)
        engine.stop()
    silent = arguments.tasks - report.ended
    bad = silent + report.faults + leftovers(account) + len(left)
    return {
        "name": "soak-docker",
        "value": bad,
        "unit": "tasks that ended silently, lost or doubled, and things left behind",
        "goal": 0,
        "holds": bad == 0 and most >= arguments.tasks,
        "details": {
            **report.details(),
            "silent": silent,
            "containers_at_once": most,
            "containers_left": left,
            "live_restore": arguments.live_restore,
            "turns_each": arguments.turns,
            "replicas": arguments.replicas,
            "memory_mb": MEMORY_MB,
            "database": url.split(":")[0],
            "after": account,
        },
    }


async def play(arguments: argparse.Namespace, cluster: GatewayCluster, engine: Any) -> tuple[Report, int]:
    """All tasks at once, the engine restarted after a third of the turns; and the most containers that ran."""
    load = Load(
        tasks=arguments.tasks,
        turns=arguments.turns,
        think_s=arguments.think_s,
        repeat=0.1,
        pause=0.05,
        pause_s=1.0,
        call_deadline_s=arguments.deadline_s,
        seed=arguments.seed,
    )
    report = Report(num_tasks=load.tasks)
    began_s = time.perf_counter()
    third = asyncio.Event()
    with progress_of("soak-docker", load.tasks * load.turns) as show:

        def on_turn(found: Report) -> None:
            show(found.turns, in_words(found))
            if found.turns * 3 >= load.tasks * load.turns or found.ended + found.faults >= load.tasks:
                third.set()

        async def restart() -> None:
            await third.wait()
            say("the engine is restarted")
            await asyncio.to_thread(engine.terminate)
            # Here, and not in a thread: the kernel ends the engine with the thread that started it.
            engine.start()

        async with open_client(cluster.urls, load, None, report) as client:
            episodes = [Episode(client, load, number, report, on_turn) for number in range(load.tasks)]
            started = await drive_each(
                episodes, lambda episode, _: episode.start(), concurrency=CONCURRENT_STARTS,
                deadline_s=arguments.deadline_s, on_done=lambda done: show(0, f"{done} tasks started"),
            )  # fmt: skip
            most = sum(server.state == "running" for server in await asyncio.to_thread(cluster.servers))
            restarting = asyncio.create_task(restart())
            await drive_each(
                started, lambda episode, _: episode.play_on(), concurrency=load.tasks, deadline_s=arguments.deadline_s
            )
            await restarting
    report.wall_s = time.perf_counter() - began_s
    return report, most


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=100, turns=20, replicas=1, database="sqlite")
    found.add_argument("--think-s", type=float, default=2.0, help="mean seconds before each turn; default: 2")
    found.add_argument("--deadline-s", type=float, default=1200.0, help="of each task; default: 1200")
    found.add_argument("--live-restore", action="store_true", help="containers outlive the engine's restart")
    arguments = found.parse_args()
    if shutil.which("dockerd") is None:
        found.error("there is no Docker engine to start here; make engines installs one (Debian packages, as root)")
    return run(soak, arguments)


if __name__ == "__main__":
    sys.exit(main())
