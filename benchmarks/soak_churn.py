"""10,000 tasks started, played for a turn and ended, 32 at once: `make soak-churn`.

Memory, descriptors and threads are read from outside, idle: after 20%, after half and after all of the tasks. The
gateway's may not have grown since 20% by more than the bounds below, the environment server's not since half: it
remembers its newest 4,096 tasks by design, so that its memory stands still from then on only. No row may be left that
holds anything. The last line is JSON.

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

MARKS = {"at_20_percent": 0.2, "at_half": 0.5, "at_the_end": 1.0}
SINCE = {"gateway": "at_20_percent", "servers": "at_half"}
# A leak of 2 KB a task would be 16 MB in 8,000 tasks; a leaked connection, thread or file a task would be thousands.
MAX_RSS_BYTES = {"gateway": 16 * 2**20, "servers": 8 * 2**20}
MAX_DESCRIPTORS = 16
MAX_THREADS = 4
REMEMBERED_TASKS = 4096
"""Tasks that an environment server remembers, `max_remembered` of `tide_sdk.server`."""
REMEMBERED_BYTES = 8192
"""What one of them may cost; counts only while the record is not full, in the smaller forms."""
COMMAND = ["tide-env", "serve", "counting_environment:Counting", "--uds", "{uds}", "--capacity", "{capacity}"]


async def soak(arguments: argparse.Namespace, folder: Path, url: str) -> dict[str, Any]:
    """Churn a part, look, churn the next, look again."""
    table = {
        "command": COMMAND,
        "env": {"PYTHONPATH": ":".join([str(ROOT / "tests" / "support"), *sys.path[1:]])},
        "capacity": arguments.concurrency,
        "servers": arguments.servers,
    }
    load = Load(
        tasks=arguments.tasks,
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
            found: dict[str, dict[str, Usage]] = {}
            for mark, share in MARKS.items():
                part = replace(load, tasks=round(arguments.tasks * share) - report.num_tasks, key=mark)
                await drive(cluster.urls, part, report, on_turn=lambda now: show(now.ended, in_words(now)))
                found[mark] = await usage_of(cluster)
        account = await after(cluster)
    finally:
        await asyncio.to_thread(cluster.close)
    grown = {part: growth(found[mark][part], found["at_the_end"][part]) for part, mark in SINCE.items()}
    bounds = {part: bounds_of(part, arguments) for part in SINCE}
    too_much = [
        f"{part}: {name} grew by {grown[part][name]}, at most {bound}"
        for part in SINCE
        for name, bound in bounds[part].items()
        if grown[part][name] > bound
    ]
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
            "bounds": bounds,
            "usage": {mark: {part: of.as_dict() for part, of in parts.items()} for mark, parts in found.items()},
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


def bounds_of(part: str, arguments: argparse.Namespace) -> dict[str, int]:
    """By how much each count may grow."""
    rss_bytes = MAX_RSS_BYTES[part]
    if part == "servers":
        record = REMEMBERED_TASKS * arguments.servers
        before = round(arguments.tasks * MARKS[SINCE[part]])
        rss_bytes += REMEMBERED_BYTES * (min(record, arguments.tasks) - min(record, before))
    return {"rss_bytes": rss_bytes, "descriptors": MAX_DESCRIPTORS, "threads": MAX_THREADS}


def main() -> int:
    """Run the soak; returns the exit code."""
    found = parser(str(__doc__).splitlines()[0], tasks=10_000, turns=1, replicas=1, database="sqlite")
    found.add_argument("--concurrency", type=int, default=32, help="tasks at once; default: 32")
    found.add_argument("--servers", type=int, default=1, help="environment servers; default: 1")
    return run(soak, found.parse_args())


if __name__ == "__main__":
    sys.exit(main())
