"""1,000 tasks at once through two gateways on one PostgreSQL, one killed -9 every 10 s: `make soak-gateway`.

Each task takes 20 turns with some seconds of thought; some turns, starts and ends are asked for twice, some tasks are
paused. All must finish: no task lost, no action doubled, no server, container or row left. The last line is JSON.

    make soak-gateway ARGS="--tasks 100 --turns 5 --kill-every-s 3"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from soak_common import (
    GatewayCluster,
    Load,
    Report,
    after,
    drive,
    in_words,
    killing,
    leftovers,
    parser,
    progress_of,
    run,
    scripted,
)

LIMITS = {"start": 600.0, "idle": 600.0, "turn": 300.0, "active": 3600.0, "end": 30.0}


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Play the tasks while gateways are killed."""
    table = scripted(servers=arguments.servers, capacity=arguments.tasks, probe_interval_s=2.0, limits=LIMITS)
    load = Load(
        tasks=arguments.tasks,
        turns=arguments.turns,
        script={"step_s": arguments.step_s},
        think_s=arguments.think_s,
        repeat=0.1,
        pause=0.05,
        pause_s=1.0,
        task_deadline_s=arguments.deadline_s,
        call_deadline_s=arguments.deadline_s,
        seed=arguments.seed,
    )
    cluster = GatewayCluster(
        folder, url, {"scripted": table}, arguments.replicas, outlive_s=arguments.outlive_s or None
    )
    report = Report()
    try:
        await asyncio.to_thread(cluster.start_all)
        with progress_of("soak-gateway", arguments.tasks * arguments.turns) as show:
            async with killing(cluster, arguments.kill_every_s) as kills:
                await drive(
                    cluster.urls, load, report,
                    on_turn=lambda found: show(found.turns, f"{in_words(found)}, {len(kills)} kills"),
                )  # fmt: skip
        account = await after(cluster)
    finally:
        await asyncio.to_thread(cluster.close)
    bad = load.tasks - report.finished + report.faults + leftovers(account)
    return {
        "name": "soak-gateway",
        "value": bad,
        "unit": "tasks unfinished, lost or doubled, and things left behind",
        "goal": 0,
        "holds": bad == 0,
        "details": {
            **report.details(),
            "turns_each": arguments.turns,
            "replicas": arguments.replicas,
            "servers": arguments.servers,
            "database": url.split(":")[0],
            "kills": len(kills),
            "kill_every_s": arguments.kill_every_s,
            "think_s": arguments.think_s,
            "step_s": arguments.step_s,
            "after": account,
        },
    }


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=1000, turns=20, replicas=2, database="postgres")
    found.add_argument("--kill-every-s", type=float, default=10.0, help="default: 10")
    found.add_argument("--think-s", type=float, default=5.0, help="mean seconds before each turn; default: 5")
    found.add_argument("--step-s", type=float, default=0.05, help="seconds that an action takes; default: 0.05")
    found.add_argument("--servers", type=int, default=4, help="environment servers; default: 4")
    found.add_argument("--deadline-s", type=float, default=1200.0, help="of each task; default: 1200")
    return run(soak, found.parse_args())


if __name__ == "__main__":
    sys.exit(main())
