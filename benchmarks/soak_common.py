"""What the soaks share: arguments, a database, kills, progress, counts from outside, and the last line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import ROOT
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# The harness that tests and soaks share lies beside the tests.
sys.path.insert(0, str(ROOT / "tests" / "support"))

from gateway_cluster import GatewayCluster, scripted
from load_driver import Episode, Load, Report, drive, drive_each, open_client
from marked_servers import MarkedServer

__all__ = ["ROOT", "Episode", "GatewayCluster", "Load", "Report", "drive", "drive_each", "open_client", "scripted"]

SETTLE_S = 60.0
POLL_S = 0.25


def parser(what: str, *, tasks: int, turns: int, replicas: int, database: str) -> argparse.ArgumentParser:
    """The arguments of every soak; the defaults are the full form."""
    found = argparse.ArgumentParser(description=what)
    found.add_argument("--tasks", type=int, default=tasks, help=f"default: {tasks}")
    found.add_argument("--turns", type=int, default=turns, help=f"turns of each task; default: {turns}")
    found.add_argument("--replicas", type=int, default=replicas, help=f"gateways; default: {replicas}")
    found.add_argument(
        "--database", default=database, help=f"sqlite, postgres (a private server) or a URL; default: {database}"
    )
    found.add_argument("--outlive-s", type=float, default=120.0, help="for the gateways; 0 leaves it out; default: 120")
    found.add_argument("--seed", type=int, default=0, help="of all draws; default: 0")
    found.add_argument("--directory", type=Path, help="where the files are made; default: the temporary folder")
    found.add_argument("--keep-files", action="store_true", help="leave logs and the SQLite file; a failed run does")
    found.add_argument("--output", type=Path, help="file that takes the last line too")
    return found


def run(soak: Callable[[argparse.Namespace, Path, str], Coroutine[Any, Any, dict[str, Any]]], arguments: Any) -> int:
    """Run a soak on a database of its own; prints its result as the last line. 0 where its goal holds."""
    # Ends what runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="tide-soak-", dir=arguments.directory))
    holds = False
    try:
        with _database(arguments.database, folder) as url, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            result = runner.run(soak(arguments, folder, url))
        holds = bool(result["holds"])
        result["details"] |= {"command": " ".join(["python", *sys.argv]), "cores": len(os.sched_getaffinity(0))}
        line = json.dumps({name: result[name] for name in ("name", "value", "unit", "goal", "holds", "details")})
        if arguments.output is not None:
            arguments.output.write_text(line + "\n", encoding="utf-8")
        print(line, flush=True)
    finally:
        if holds and not arguments.keep_files:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the files are in {folder}")
    return 0 if holds else 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def say(text: str) -> None:
    """Tell the progress."""
    print(f"soak: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty database; a PostgreSQL server of our own ends with the block."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'gateway.db'}"
        return
    if kind != "postgres":
        yield kind
        return
    from postgres_server import PostgresServer

    # As an operator runs it: what is committed is on the disk, and dead row versions are removed.
    server = PostgresServer(fsync=True, settings={"autovacuum": "on", "shared_buffers": "128MB"})
    try:
        server.start()
        yield server.create_database()
    finally:
        server.close()


@contextlib.contextmanager
def progress_of(title: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on the terminal; the given function takes what is done, and words."""
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[words]}"), refresh_per_second=2) as bar:
        row = bar.add_task(title, total=total, words="")
        yield lambda done, words: bar.update(row, completed=done, words=words)


def in_words(report: Report) -> str:
    """A running load, for the bar."""
    retries = sum(report.retries.values())
    return f"{report.turns} turns, {report.ended} ended, {report.faults} faults, {retries} retries"


@contextlib.asynccontextmanager
async def killing(cluster: GatewayCluster, every_s: float) -> AsyncIterator[list[int]]:
    """Kill a replica with SIGKILL every so often, each in turn, and start it again; all run when the block ends.

    Yields:
        The numbers of the replicas killed so far.
    """
    kills: list[int] = []

    async def kill() -> None:
        while True:
            await asyncio.sleep(every_s)
            number = len(kills) % len(cluster.replicas)
            kills.append(number)
            await asyncio.to_thread(cluster.restart, number)

    killer = asyncio.create_task(kill())
    try:
        yield kills
    finally:
        if killer.done():
            killer.result()
        killer.cancel()
        # A restart in the thread goes on; it must not overlap with ours.
        await asyncio.wait({killer}, timeout=SETTLE_S)
    await asyncio.to_thread(cluster.start_all)


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes hold, summed.

    Attributes:
        rss_bytes: resident memory.
        descriptors: open file descriptors.
        threads: threads.
    """

    rss_bytes: int
    descriptors: int
    threads: int

    def as_dict(self) -> dict[str, int]:
        """Plain data."""
        return asdict(self)


def usage(pids: list[int]) -> Usage:
    """What the processes hold now, from /proc."""
    rss = descriptors = threads = 0
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss += int(status["VmRSS"].split()[0]) * 1024
        threads += int(status["Threads"])
        descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return Usage(rss, descriptors, threads)


async def settled_usage(pids: list[int]) -> Usage:
    """What the processes hold once their counts stand still: connections that were closed are gone by then."""
    found = usage(pids)
    for _ in range(int(SETTLE_S)):
        await asyncio.sleep(1.0)
        last, found = found, usage(pids)
        if (last.descriptors, last.threads) == (found.descriptors, found.threads):
            break
    return found


def left_rows(database_url: str) -> dict[str, int]:
    """Rows that hold something after all tasks have ended: each should be 0, `instances` the idle servers."""
    from sqlalchemy import create_engine, text

    queries = {
        "open_tasks": "SELECT count(*) FROM tasks WHERE state <> 'ended' AND state <> 'done'",
        "unreleased_tasks": "SELECT count(*) FROM tasks WHERE released = 0",
        "unanswered_turns": "SELECT count(*) FROM turns t JOIN tasks k ON k.task_id = t.task_id"
        " WHERE t.answer IS NULL AND k.state <> 'ended'",
        "instances": "SELECT count(*) FROM instances",
    }
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, connect_args={} if "sqlite" in url else {"connect_timeout": 10})
    try:
        with engine.connect() as connection:
            return {name: int(connection.execute(text(query)).scalar_one()) for name, query in queries.items()}
    finally:
        engine.dispose()


async def after(cluster: GatewayCluster) -> dict[str, Any]:
    """The account of a cluster whose tasks have all ended, before and after its stop.

    Returns:
        `taken` slots, `orphans` while it runs, `rows` that are left, and `problems`: views that failed, and what was
        wrong with the stop, its orphans included.
    """
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    rows, servers = await asyncio.to_thread(_rows_and_servers, cluster)
    # What is being ended when the last task is answered is waited for.
    while any(rows.values()) and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(POLL_S)
        rows, servers = await asyncio.to_thread(_rows_and_servers, cluster)
    problems: list[str] = []
    taken, orphans = 0, list[MarkedServer]()
    try:
        capacity = await asyncio.to_thread(cluster.view, "/capacity")
        taken = sum(environment["taken"] for environment in capacity.values())
        orphans = await asyncio.to_thread(cluster.wait_no_orphans)
    except httpx.HTTPError as error:
        problems.append(f"a view failed: {error}")
    problems += await asyncio.to_thread(cluster.close)
    stopped = await asyncio.to_thread(left_rows, cluster.database_url)
    rows["instances_after_the_stop"] = stopped["instances"]
    return {
        "taken": taken,
        "idle_servers": len(servers) - len(orphans),
        "orphans": [str(server) for server in orphans],
        "rows": rows,
        "problems": problems,
    }


def _rows_and_servers(cluster: GatewayCluster) -> tuple[dict[str, int], list[MarkedServer]]:
    rows = left_rows(cluster.database_url)
    servers = cluster.servers()
    rows["instances_without_a_server"] = rows.pop("instances") - len(servers)
    return rows, servers


def leftovers(account: dict[str, Any]) -> int:
    """How much `after` found that should not be there."""
    return (
        account["taken"] + len(account["orphans"]) + len(account["problems"]) + sum(map(abs, account["rows"].values()))
    )
