"""Servers kept ready, servers for one task each, and servers whose processes stop during a pause."""

from __future__ import annotations

import asyncio

import pytest

from tide_gateway.database import StorageFailed


async def spare(bench) -> list[str]:
    """Servers without a task, after a sweep."""
    await bench.service.sweep()
    return [row.name for row, _, num_tasks in await bench.service.servers() if row.state == "ready" and not num_tasks]


def has_spare(bench, number: int):
    async def check() -> bool:
        return len(await spare(bench)) == number

    return check


async def test_the_pool_is_filled_used_and_filled_again_within_the_servers(benches, eventually):
    bench = await benches.open(capacity=3, servers=3, warm=2)
    await eventually(has_spare(bench, 2), "the pool is full")
    assert len(bench.runtime.launched) == 2
    await bench.start("a")
    assert len(bench.runtime.launched) == 2
    await eventually(has_spare(bench, 2), "the pool is full again")
    await bench.start("b")
    await bench.start("c")
    await bench.service.sweep()
    assert len(bench.runtime.launched) == 3


async def test_two_replicas_fill_one_pool(benches, eventually):
    bench = await benches.open(capacity=6, servers=6, warm=2)
    if not bench.repository.shared:
        pytest.skip("one gateway owns a SQLite file")
    other = await benches.open(capacity=6, servers=6, warm=2)
    for _ in range(4):
        await asyncio.gather(bench.service.sweep(), other.service.sweep())
    await eventually(has_spare(bench, 2), "the pool is full")
    assert len(benches.world.names()) == 2


@pytest.mark.parametrize("how", ["dead", "hanging"])
async def test_a_spare_server_is_asked_before_it_is_handed_out(benches, eventually, how):
    bench = await benches.open(capacity=4, servers=4, warm=1)
    await eventually(has_spare(bench, 1), "the pool is full")
    (name,) = await spare(bench)
    fleet = bench.service.fleets["scripted"]
    fleet.heard_s[name] -= 3600.0
    if how == "dead":
        bench.runtime.world.kill(name)
    else:
        bench.runtime.world.freeze(name, True)
    answer = await bench.start("a")
    (row,) = [row for row, _, num_tasks in await bench.service.servers() if num_tasks]
    assert row.name != name
    assert (await bench.act(answer["task_id"], 0))["info"]["effects"] == 1
    bench.runtime.world.freeze(name, False) if how == "hanging" else None


async def test_a_server_for_one_task_is_replaced_after_it(benches, eventually):
    bench = await benches.open(capacity=2, servers=2, retire_after=1)
    names = set()
    for number in range(3):
        task_id = (await bench.start(f"k{number}", turns=1))["task_id"]
        names |= {row.name for row, _, num_tasks in await bench.service.servers() if num_tasks}
        await bench.act(task_id, 0)
        await bench.end(task_id)

        async def gone() -> bool:
            await bench.service.sweep()
            return not bench.runtime.world.names()

        await eventually(gone, "its server is destroyed")
    assert len(names) == 3


async def test_a_pause_stops_the_server_and_a_resume_continues_it(benches, eventually):
    bench = await benches.open(capacity=2, servers=2, freeze=True, probe_interval_s=0.02)
    task_id = (await bench.start())["task_id"]
    world = benches.world
    (name,) = world.names()
    await bench.pause(task_id, 1)
    await eventually(lambda: world.frozen == {name}, "its processes are stopped")
    calls = [call for task in bench.runtime.launched[name].tasks.values() for call in task.calls]
    assert calls[-1:] == ["/pause"]
    for _ in range(10):  # probes that would fail, and end the server, if they were sent
        await asyncio.sleep(0.02)
        await bench.service.sweep()
    await bench.resume(task_id, 2)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert world.frozen == set()
    await bench.pause(task_id, 3)
    await eventually(lambda: world.frozen == {name}, "its processes are stopped")
    assert (await bench.end(task_id))["outcome"]["kind"] == "aborted"


async def test_a_database_that_is_away_for_a_moment_costs_no_server(benches, eventually, monkeypatch):
    bench = await benches.open(capacity=2, servers=2, freeze=True, probe_interval_s=0.02)
    task_id = (await bench.start())["task_id"]
    asked = asyncio.Event()

    async def away(_name):
        asked.set()
        raise StorageFailed("the database is away")

    with monkeypatch.context() as outage:
        outage.setattr(bench.repository.instances, "paused", away)
        await asked.wait()
        await eventually(lambda: not bench.service.fleets["scripted"]._keepers, "its keeper gives up")
    await bench.service.sweep()
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert len(benches.world.names()) == 1
    assert bench.service.fleets["scripted"]._keepers


@pytest.mark.parametrize("epochs", [(1, 2), (None, None)])
async def test_what_one_replica_stopped_another_continues(benches, eventually, epochs):
    bench = await benches.open(capacity=2, servers=2, freeze=True)
    if not bench.repository.shared:
        pytest.skip("one gateway owns a SQLite file")
    other = await benches.open(capacity=2, servers=2, freeze=True)
    task_id = (await bench.start())["task_id"]
    await bench.act(task_id, 0)
    await bench.pause(task_id, epochs[0])
    await eventually(lambda: bool(benches.world.frozen), "its processes are stopped")
    await other.resume(task_id, epochs[1])
    assert (await bench.act(task_id, 1))["info"]["effects"] == 2
    assert (await other.act(task_id, 2))["info"]["effects"] == 3


async def test_a_crash_in_a_pause_leaves_the_server_stopped_until_the_resume(benches, eventually):
    bench = await benches.open(capacity=2, servers=2, freeze=True)
    task_id = (await bench.start())["task_id"]
    await bench.pause(task_id, 1)
    await eventually(lambda: bool(benches.world.frozen), "its processes are stopped")
    await benches.crash(bench)
    bench = await benches.open(capacity=2, servers=2, freeze=True)
    await bench.service.sweep()
    assert await bench.state(task_id) == "paused"
    await bench.resume(task_id, 2)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
