"""Gateways are replaced one after the other, or one by itself, and no caller notices more than repeated calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time

import pytest
from cluster_calls import GO, clustered, sqlite, start, turn_of
from gateway_cluster import GatewayCluster, scripted
from load_driver import Episode, Load, Report, open_client
from sqlalchemy import create_engine, text

from tide_sdk.client import GatewayClient

DRAIN = ["--drain-s", "20"]


async def keep_playing(urls: list[str], load: Load, report: Report, over: asyncio.Event) -> int:
    """Play tasks, as many at once as the load says, until it is over; how many."""
    numbers = itertools.count()
    async with open_client(urls, load, None, report) as client, asyncio.TaskGroup() as group:

        async def work() -> None:
            while not over.is_set():
                await Episode(client, load, next(numbers), report).play()

        for _ in range(load.concurrency):
            group.create_task(work())
    return next(numbers)


@pytest.mark.postgres
async def test_replicas_are_restarted_in_turn_under_load_and_every_task_finishes(fresh_databases, tmp_path, eventually):
    load = Load(tasks=0, turns=6, concurrency=16, think_s=0.2, repeat=0.2, pause=0.1, script={"step_s": 0.1})
    tables = {"scripted": scripted(capacity=24, servers=3)}
    report, over = Report(), asyncio.Event()
    with fresh_databases.fresh("postgres") as url:
        async with clustered(tmp_path, url, tables, 2, options=DRAIN) as (cluster, _):
            playing = asyncio.create_task(keep_playing(cluster.urls, load, report, over))
            for number in (0, 1):
                goal = report.turns + 20
                await eventually(lambda goal=goal: report.turns >= goal, "both replicas are at work")
                assert await asyncio.to_thread(cluster.stop, number) == 0
                await asyncio.to_thread(cluster.start, number)
            over.set()
            num_tasks = await playing
            logs = cluster.log(0) + cluster.log(1)
    assert (report.finished, report.faults, sum(report.infrastructure.values())) == (num_tasks, 0, 0), str(report)
    assert report.turns == num_tasks * load.turns
    # Nothing had to be done again: what was in flight was over before each stop.
    assert "cut off after" not in logs
    assert "(acting) is taken over" not in logs
    assert "Traceback" not in logs


async def test_a_gateway_alone_is_restarted_with_its_servers_and_clocks_do_not_count_the_gap(tmp_path, eventually):
    async with (
        clustered(tmp_path, sqlite(tmp_path), {"scripted": scripted()}, keep=True, options=DRAIN) as (cluster, _),
        GatewayClient(cluster.urls[0], timeout_s=10.0, deadline_s=60.0) as client,
    ):
        tasks = [(await client.start("scripted", f"k{number}")).task_id for number in range(3)]
        slow = (await client.start("scripted", "slow", task={"step_s": 1.0})).task_id
        servers = cluster.servers()
        acting = asyncio.create_task(client.observe(slow, 0, GO))
        before = await client.task(tasks[0])
        since = time.monotonic()

        async def acts() -> bool:
            return (await client.task(slow)).state.value == "acting"

        await eventually(acts, "the turn is in flight")

        stopping = asyncio.create_task(asyncio.to_thread(cluster.stop))
        assert (await acting).turn == 1, "a turn in flight is answered"
        assert await stopping == 0
        gap = time.monotonic()
        waiting = [asyncio.create_task(client.observe(task_id, 0, GO)) for task_id in tasks[1:]]
        await asyncio.sleep(1.0)
        gap = time.monotonic() - gap
        await asyncio.to_thread(cluster.start)

        assert [(await call).info["effects"] for call in waiting] == [1, 1]
        after = await client.task(tasks[0])
        passed = time.monotonic() - since
        moved = after.clocks["idle"].consumed_s - before.clocks["idle"].consumed_s
        assert 0 < moved <= passed - gap
        assert cluster.servers() == servers
        assert (await client.observe(slow, 1, GO)).info["effects"] == 2
        for task_id in (*tasks, slow):
            assert (await client.end(task_id)).outcome.kind == "aborted"


@contextlib.contextmanager
def silent_engine(path):
    """A Docker engine that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        yield f"unix://{path}"


def test_a_signal_before_the_first_request_is_obeyed_at_once(tmp_path):
    """The opening waits for an engine that does not answer."""
    with silent_engine(tmp_path / "engine") as engine:
        docker = {"image": "none", "pull": "never", "engines": [engine]}
        tables = {"away": scripted("docker", docker=docker, env={})}
        with GatewayCluster(tmp_path, sqlite(tmp_path), tables, options=["--log-level", "debug"]) as cluster:
            replica = cluster.start(wait=False)
            deadline = time.monotonic() + 40
            while not (tmp_path / "data").exists() and "opening" not in cluster.log():
                assert replica.running, cluster.log()
                assert time.monotonic() < deadline, cluster.log()
                time.sleep(0.02)
            assert cluster.stop() == 0, cluster.log()
            log = cluster.log()
    assert "told to stop before the first request" in log
    assert "serving on" not in log
    assert "Traceback" not in log


@pytest.mark.postgres
async def test_a_replica_works_on_beside_a_newer_schema_and_is_not_started_again(fresh_databases, tmp_path):
    with fresh_databases.fresh("postgres") as url:
        async with clustered(tmp_path, url, {"scripted": scripted()}, 2) as (cluster, client):
            task_id = await start(client)
            await asyncio.to_thread(cluster.stop, 1)
            engine = create_engine(url)
            with engine.begin() as connection:  # as a newer version expands it
                for table in ("tasks", "turns", "task_starts", "task_events", "instances", "replicas", "start_tickets"):
                    connection.execute(text(f"ALTER TABLE {table} ADD COLUMN newer TEXT NOT NULL DEFAULT 'x'"))
                connection.execute(text("CREATE TABLE newer (id INTEGER PRIMARY KEY)"))
                connection.execute(text("UPDATE gateway_alembic_version SET version_num = 'gateway_9999'"))
            engine.dispose()
            with pytest.raises(AssertionError, match=r"exit code 2.*(?s:.*)gateway_9999"):
                await asyncio.to_thread(cluster.start, 1)
            assert (await client.post("/observation", turn_of(task_id, 0))).data["info"]["effects"] == 1
            other = await start(client, "other")
            assert (await client.post("/observation", turn_of(other, 0))).data["turn"] == 1
            for each in (task_id, other):
                assert (await client.post("/end", {"task_id": each})).data["outcome"]["kind"] == "aborted"
