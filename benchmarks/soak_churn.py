"""10,000 tasks started, played for a turn and ended, 32 at once: `make soak-churn`.

Memory, descriptors and threads of the gateway and of its environment servers are read from outside, idle, after 20% of
the tasks and after all: they must not have grown by more than the bounds below. No row may be left that holds
anything. The last line is JSON.

    make soak-churn ARGS="--tasks 1000"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from soak_common import (
    ROOT,
    GatewayCluster,
    Load,
    Report,
    Usage,
    after,
    drive,
    in_words,
    leftovers,
    parser,
    progress_of,
    run,
    settled_usage,
)

WARM_SHARE = 0.2
# Growth from 20% to the end. A leak of 1 KB a task would be 8 MB in 8,000 tasks; a leaked connection, thread or file
# a task would be thousands. The environment servers remember the answers of their newest 4,096 tasks each, by design.
MAX_GATEWAY_RSS_BYTES = 16 * 2**20
MAX_SERVERS_RSS_BYTES = 32 * 2**20
MAX_DESCRIPTORS = 16
MAX_THREADS = 4
COMMAND = ["tide-env", "serve", "counting_environment:Counting", "--uds", "{uds}", "--capacity", "{capacity}"]


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Churn a fifth, look, churn the rest, look again."""
    table = {
        "command": COMMAND,
        "env": {"PYTHONPATH": ":".join([str(ROOT / "tests" / "support"), *sys.path[1:]])},
        "capacity": arguments.concurrency,
        "servers": arguments.servers,
    }
    load = Load(
        tasks=int(arguments.tasks * WARM_SHARE),
        turns=arguments.turns,
        concurrency=arguments.concurrency,
        environment="counting",
        repeat=0.05,
        pause=0.05,
        seed=arguments.seed,
    )
    outlive_s = arguments.outlive_s or None
    cluster = GatewayCluster(folder, url, {"counting": table}, arguments.replicas, outlive_s=outlive_s)
    report = Report()
    try:
        await asyncio.to_thread(cluster.start_all)
        with progress_of("soak-churn", arguments.tasks) as show:

            async def churn(part: Load) -> dict[str, Usage]:
                await drive(cluster.urls, part, report, on_turn=lambda found: show(found.ended, in_words(found)))
                return await usage_of(cluster)

            early = await churn(load)
            late = await churn(replace(load, tasks=arguments.tasks - load.tasks, key="rest"))
        account = await after(cluster)
    finally:
        await asyncio.to_thread(cluster.close)
    grown = {part: growth(early[part], late[part]) for part in early}
    too_much = [f"{part}: {name}" for part, found in grown.items() for name in over(part, found)]
    bad = arguments.tasks - report.finished + report.faults + leftovers(account)
    return {
        "name": "soak-churn",
        "value": len(too_much) + bad,
        "unit": "counts that grew, tasks that did not finish, and things left behind",
        "goal": 0,
        "holds": not too_much and bad == 0,
        "details": {
            **report.details(),
            "concurrency": arguments.concurrency,
            "too_much": too_much,
            "grown": grown,
            "after_a_fifth": {part: found.as_dict() for part, found in early.items()},
            "at_the_end": {part: found.as_dict() for part, found in late.items()},
            "bounds": {
                "gateway_rss_bytes": MAX_GATEWAY_RSS_BYTES,
                "servers_rss_bytes": MAX_SERVERS_RSS_BYTES,
                "descriptors": MAX_DESCRIPTORS,
                "threads": MAX_THREADS,
            },
            "database": url.split(":")[0],
            "after": account,
        },
    }


async def usage_of(cluster: GatewayCluster) -> dict[str, Usage]:
    """What the gateways and the environment servers hold once nothing is going on."""
    servers = [pid for server in await asyncio.to_thread(cluster.servers) for pid in server.pids]
    gateways = [cluster.pid(number) for number in cluster.running]
    return {"gateway": await settled_usage(gateways), "servers": await settled_usage(servers)}


def growth(early: Usage, late: Usage) -> dict[str, int]:
    """By how much each count grew."""
    before, now = early.as_dict(), late.as_dict()
    return {name: now[name] - before[name] for name in now}


def over(part: str, grown: dict[str, int]) -> list[str]:
    """The counts that grew by more than their bounds."""
    rss = MAX_GATEWAY_RSS_BYTES if part == "gateway" else MAX_SERVERS_RSS_BYTES
    bounds = {"rss_bytes": rss, "descriptors": MAX_DESCRIPTORS, "threads": MAX_THREADS}
    return [f"{name} grew by {grown[name]}, at most {bound}" for name, bound in bounds.items() if grown[name] > bound]


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=10_000, turns=1, replicas=1, database="sqlite")
    found.add_argument("--concurrency", type=int, default=32, help="tasks at once; default: 32")
    found.add_argument("--servers", type=int, default=2, help="environment servers; default: 2")
    return run(soak, found.parse_args())


if __name__ == "__main__":
    sys.exit(main())
