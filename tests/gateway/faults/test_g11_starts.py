"""A gateway that dies at any point of a start: line G11 of the list of faults."""

from __future__ import annotations

import asyncio

import pytest
from fault_clusters import RUNTIMES, cluster_of, table, wait_until

from tide_gateway.database import StorageFailed
from tide_sdk.errors import TideError

SLOW = """
import sys, time, runpy
time.sleep(1.0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TYPED = ("unavailable", "environment_lost", "environment_failed", "expired")


def dies_after(bench, num_commits: int) -> None:
    """From that many commits on, the database takes nothing from the bench: as if its process were dead."""
    left, honest = [num_commits], bench.database.write

    async def write(fn, **options):
        if left[0] <= 0:
            raise StorageFailed("this process is dead")
        left[0] -= 1
        return await honest(fn, **options)

    bench.database.write = write


def on_servers(benches) -> int:
    """Tasks on all servers that live."""
    launched = benches.world.launched
    return sum(len(launched[name].tasks) for name in benches.world.names() if name in launched)


async def check(benches, bench, eventually, script: dict) -> None:
    """The gateway that goes on: one task under the key, no server without a row, no place without a task."""
    for _ in range(3):
        await bench.service.sweep()
    async with asyncio.timeout(20):
        (answer,) = await asyncio.gather(bench.start(**script), return_exceptions=True)
    tasks = await bench.service.tasks("local", limit=9, after=None, state=None, environment=None)
    assert len(tasks) <= 1
    lives = isinstance(answer, dict)
    if lives:
        assert tasks[0].task_id == answer["task_id"]
        async with asyncio.timeout(20):
            (acted,) = await asyncio.gather(bench.act(answer["task_id"], 0), return_exceptions=True)
        # A start that was over before its server died with the gateway is a task without a server.
        lives = isinstance(acted, dict)
        assert acted["info"]["effects"] == 1 if lives else acted.code in ("environment_lost", "ended")
    else:
        assert answer.code in TYPED

    async def no_orphan() -> bool:
        await bench.service.sweep()
        rows = {row.name: row.state for row in await bench.repository.instances.all()}
        settled = set(rows.values()) <= {"ready"} and benches.world.names() == rows.keys()
        return settled and on_servers(benches) == await bench.taken() == int(lives)

    await eventually(no_orphan, "no orphan is left")
    if lives:
        await bench.end(answer["task_id"])
        assert (on_servers(benches), await bench.taken()) == (0, 0)


@pytest.mark.parametrize("servers_too", [False, True], ids=["servers-live", "servers-die-too"])
@pytest.mark.parametrize("num_commits", range(6))
async def test_g11_killed_between_any_two_commits(benches, eventually, num_commits, servers_too):
    bench = await benches.open()
    dies_after(bench, num_commits)
    calling = asyncio.create_task(bench.start())
    await asyncio.wait({calling}, timeout=1.0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    del bench.database.write
    await benches.crash(bench, servers_too=servers_too)
    await check(benches, await benches.open(), eventually, {})


async def test_g11_a_server_without_a_row_is_destroyed(benches, eventually):
    benches.world.begin("scripted-0-0rphan")  # its row was lost, or it took longer to come than its row to go
    bench = await benches.open()
    assert benches.world.names() == set()
    task_id = (await bench.start())["task_id"]
    benches.world.begin("scripted-1-0rphan")
    await bench.service.sweep()
    assert len(benches.world.names()) == 1
    assert (await bench.act(task_id, 0))["turn"] == 1


MOMENTS = {
    "during-the-launch": ({"launch_s": 60.0}, {}, lambda benches: bool(benches.world.names())),
    "during-the-upstream-start": ({}, {"start_s": 0.5}, lambda benches: on_servers(benches) == 1),
}


@pytest.mark.parametrize("servers_too", [False, True], ids=["servers-live", "servers-die-too"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_g11_killed_while_the_start_waits(benches, eventually, moment, servers_too):
    options, script, reached = MOMENTS[moment]
    bench = await benches.open()
    bench.runtime.launch_s = options.get("launch_s", 0.0)
    calling = asyncio.create_task(bench.start(**script))
    await eventually(lambda: reached(benches), moment)
    await benches.crash(bench, servers_too=servers_too)
    await asyncio.gather(calling, return_exceptions=True)
    await check(benches, await benches.open(), eventually, script)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_g11_a_caller_that_cancels_its_start_leaves_one_task(benches, eventually, moment):
    options, script, reached = MOMENTS[moment]
    bench = await benches.open()
    bench.runtime.launch_s = 0.3 if options else 0.0
    calling = asyncio.create_task(bench.start(**script))
    await eventually(lambda: reached(benches), moment)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    await check(benches, bench, eventually, script)


@pytest.mark.parametrize("num_loops", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_g11_a_caller_that_goes_away_at_any_moment_leaves_no_slot_taken(benches, eventually, num_loops):
    bench = await benches.open()
    calling = asyncio.create_task(bench.start())
    for _ in range(num_loops):
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    await check(benches, bench, eventually, {})


@pytest.mark.postgres
@pytest.mark.parametrize("moment", MOMENTS)
async def test_g11_another_replica_goes_on(fresh_databases, benches_class, tmp_path, eventually, moment):
    options, script, reached = MOMENTS[moment]
    with fresh_databases.fresh("postgres") as url:
        benches = benches_class(url, tmp_path)
        here, there = await benches.open(), await benches.open()
        here.runtime.launch_s = options.get("launch_s", 0.0)
        calling = asyncio.create_task(here.start(**script))
        await eventually(lambda: reached(benches), moment)
        joined = asyncio.create_task(there.start(**script))
        await benches.crash(here)
        await asyncio.gather(calling, return_exceptions=True)
        for _ in range(3):
            await there.service.sweep()
        async with asyncio.timeout(20):
            answer = (await asyncio.gather(joined, return_exceptions=True))[0]
        assert isinstance(answer, (dict, TideError))
        await check(benches, there, eventually, script)
        await benches.close()


def slow_command(runtime: str) -> tuple[str, ...]:
    from gateway_cluster import SCRIPTED_SERVER

    server = SCRIPTED_SERVER if runtime == "process" else "/tide/tests/scripted_server.py"
    return ("-c", SLOW, server, "--uds", "{uds}", "--capacity", "{capacity}")


def states(cluster) -> list[str]:
    return [server["state"] for environment in cluster.view("/environments") for server in environment["servers"]]


@pytest.mark.parametrize("moment", ["launch", "start"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g11_kill_9_in_a_start_over_real_servers(tmp_path, runtime, moment):
    options = table(runtime, slow_command(runtime), capacity=2, servers=2, limits={"start": 60.0})
    body = {"environment": "scripted", "key": "k", "task": {"start_s": 0.0 if moment == "launch" else 2.0}}
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            with pytest.raises(Exception, match="timed out"):
                client.post("/start", json=body, timeout=0.4)
            if moment == "launch":
                wait_until(lambda: bool(cluster.servers()), "the server is being launched")
            else:
                wait_until(lambda: states(cluster) == ["ready"], "the server is ready, and starts the task")
        cluster.restart(kill=True)
        with cluster.client() as client:
            answer = client.post("/start", json=body)
            assert answer.status_code == 201, answer.text
            assert [task["task_id"] for task in client.get("/tasks").json()["tasks"]] == [answer.json()["task_id"]]
            assert cluster.wait_no_orphans() == []
            assert sum(cluster.listed().values()) == 1
            wait_until(lambda: len(cluster.servers()) == len(cluster.listed()), "half-launched servers are gone")
            ended = client.post("/end", json={"task_id": answer.json()["task_id"]})
            assert ended.json()["outcome"]["kind"] == "aborted"
    assert cluster.servers() == []
