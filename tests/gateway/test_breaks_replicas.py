"""Replicas that come and go at the wrong moment: one that has just begun is alive, one that stops ends only its own."""

from __future__ import annotations

import asyncio

import pytest

from tide_gateway.database import OutcomeUnknown
from tide_gateway.service import tasks

pytestmark = pytest.mark.postgres


async def test_a_replica_that_has_just_begun_is_not_taken_for_dead(replicated, eventually):
    older = await replicated.open()
    newer = await replicated.open()
    starting = asyncio.create_task(newer.start(start_s=3600.0))

    async def placed() -> bool:
        return any(num_tasks for _, _, num_tasks in await newer.service.servers())

    await eventually(placed, "the newer one works")
    await older.service._sweeper.tend()
    (unfinished,) = await newer.repository.unfinished()
    assert unfinished[1] == newer.service.replica
    assert [row.replica for row, _, _ in await newer.service.servers()] == [newer.service.replica]
    starting.cancel()


async def test_a_gateway_that_opens_while_the_last_one_stops_keeps_its_servers(replicated, monkeypatch):
    stopping = await replicated.open()
    await stopping.start("old")
    opened = []
    honest = tasks.destroy_all

    async def late(*args) -> None:
        # The stop has said that it is the last one, and destroys what it had; a new gateway comes up.
        newer = await replicated.open()
        opened.append((newer, (await newer.start("new"))["task_id"]))
        await honest(*args)

    with monkeypatch.context() as stop:
        stop.setattr(tasks, "destroy_all", late)
        await stopping.service.stop(drain_s=0.0)
    ((newer, task_id),) = opened
    await newer.service.sweep()
    assert (await newer.act(task_id, 0))["turn"] == 1
    assert {row.name for row, _, _ in await newer.service.servers()} == replicated.world.names()


async def test_an_action_gets_the_time_that_an_outage_took(replicated, monkeypatch):
    bench = await replicated.open()
    task_id = (await bench.start(step_s=2.0, limits={"turn": 0.5}))["task_id"]
    monkeypatch.setattr("tide_gateway.service.turns._SLACK_S", 0.0)
    # No time passes on the task's clock while the action takes four times its limit.
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_a_warm_pool_fills_where_the_leading_replica_does_not_know_the_environment(replicated):
    bench = await replicated.open(servers=4, warm=2)
    members = bench.service.members
    members.alive = frozenset({"", members.me.name})
    fleet = bench.service.fleets["scripted"]
    for _ in range(4):
        rows, loads = await bench.repository.instances.all(), await bench.repository.instances.loads()
        await fleet.tend(rows, loads, dead=frozenset())
    assert len(await bench.service.servers()) == 2


async def test_a_server_whose_end_may_have_been_written_is_ended(replicated, monkeypatch, eventually):
    bench = await replicated.open(retire_after=1)
    task_id = (await bench.start())["task_id"]
    await bench.end(task_id)
    rows, honest = bench.repository.instances, bench.repository.instances.change

    async def change(*args, **values):
        await honest(*args, **values)
        raise OutcomeUnknown("lost in the commit")

    with monkeypatch.context() as fault:
        fault.setattr(rows, "change", change)
        with pytest.raises(OutcomeUnknown):
            await bench.service.sweep()

    async def removed() -> bool:
        await bench.service.sweep()
        return not await bench.service.servers() and not replicated.world.names()

    await eventually(removed, "the server is gone")
