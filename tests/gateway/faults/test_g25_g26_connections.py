"""Partitions, lost answers, failures that are no reward, and turns that are repeated in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from cluster_calls import GO, clustered, sqlite, start, turn_of
from dropping_proxy import DroppingProxy
from gateway_cluster import GatewayCluster, scripted
from load_driver import Load, drive
from remote_peer import ScriptedPeer, spec_of

from tide_gateway import upstream
from tide_gateway.runtimes.remote import RemoteRuntime
from tide_sdk import codec
from tide_sdk.errors import TideError

ACTION = codec.dumps(GO)


@contextlib.asynccontextmanager
async def behind_proxy() -> AsyncIterator:
    """An environment server, and the proxy in front of it."""
    peer = ScriptedPeer(8)
    await peer.go_on()
    proxy = DroppingProxy(f"http://127.0.0.1:{peer.port}")
    await proxy.start()
    try:
        yield peer, proxy
    finally:
        await proxy.aclose()
        peer.kill()


@contextlib.asynccontextmanager
async def partitioned(folder, **options) -> AsyncIterator:
    """A gateway whose environment server is behind a proxy: the server, the proxy, a client."""
    async with behind_proxy() as (peer, proxy):
        table = scripted("remote", capacity=8, remote={"urls": [proxy.url], "allow_private": True}, **options)
        async with clustered(folder, sqlite(folder), {"scripted": table}) as (_, client):
            yield peer, proxy, client


@pytest.mark.parametrize("mode", ["stall", "reset"])
async def test_g25_a_partition_in_mid_turn_changes_nothing_for_the_task(tmp_path, mode):
    async with partitioned(tmp_path, probe_interval_s=2.0) as (peer, proxy, client):
        task_id = await start(client, turns=3, step_s=0.5)
        await client.post("/observation", turn_of(task_id, 0))
        acting = asyncio.create_task(client.post("/observation", turn_of(task_id, 1)))
        await asyncio.sleep(0.25)
        proxy.switch(mode)
        await asyncio.sleep(3.0)
        assert not acting.done()
        proxy.switch("pass")
        assert (await acting).data["info"]["effects"] == 2
        assert (await client.post("/observation", turn_of(task_id, 2))).data["info"]["effects"] == 3
        account = (await client.post("/end", {"task_id": task_id})).data
        assert (account["reward"], account["turns"], account["outcome"]["kind"]) == (1.0, 3, "completed")
        assert len(peer._environment.keys) == 1


@pytest.mark.parametrize("mode", ["drop_answers", "cut"])
async def test_g25_a_lost_answer_of_the_environment_is_asked_for_again(tmp_path, mode):
    async with partitioned(tmp_path, limits={"turn": 8.0, "start": 8.0}) as (_, proxy, client):
        task_id = await start(client, turns=2)
        for turn in range(2):
            proxy.switch(mode, cut_bytes=20, times=1)
            assert (await client.post("/observation", turn_of(task_id, turn))).data["info"]["effects"] == turn + 1
        assert (await client.post("/end", {"task_id": task_id})).data["reward"] == 1.0


@pytest.mark.parametrize("mode", ["blackhole", "mute_answers"])
async def test_g25_what_a_network_swallowed_is_asked_for_again(monkeypatch, mode):
    """No end of the connection tells of it; a turn that only takes its time is asked for again too, and acts once."""
    monkeypatch.setattr(upstream, "TRY_S", 0.5)
    async with behind_proxy() as (_, proxy):
        runtime = RemoteRuntime()
        server = await runtime.launch("far-0", 0, spec_of(proxy.url), 20.0)
        body = {"environment": "scripted", "key": "k", "task": {"step_s": 0.7}}
        task_id = (await upstream.start(server, body, 20.0))[0].task_id
        acting = asyncio.create_task(upstream.observe(server, task_id, 0, ACTION, 20.0))
        await asyncio.sleep(0.2)
        proxy.switch(mode)
        await asyncio.sleep(1.0)
        proxy.switch("pass")
        assert (await acting)[1]["info"]["effects"] == 1
        with pytest.raises(TimeoutError):
            await upstream.observe(server, task_id, 1, ACTION, 0.6)
        assert (await upstream.observe(server, task_id, 1, ACTION, 20.0))[1]["info"]["effects"] == 2
        await runtime.close()


async def test_g25_lost_answers_of_the_gateway_lose_no_task(tmp_path):
    with GatewayCluster(tmp_path, sqlite(tmp_path), {"scripted": scripted()}) as cluster:
        await asyncio.to_thread(cluster.start_all)
        proxy = DroppingProxy(cluster.urls[0])
        await proxy.start()
        modes = ["drop_answers", "reset", "cut", "stall"] * 3

        async def break_now_and_then() -> None:
            for mode in modes:
                proxy.switch(mode, cut_bytes=30)
                await asyncio.sleep(0.2)
                proxy.switch("pass")
                await asyncio.sleep(0.3)

        breaking = asyncio.create_task(break_now_and_then())
        load = Load(tasks=12, turns=6, think_s=0.3, pause=0.2, pause_s=0.05)
        report = await drive([proxy.url], load)
        await breaking
        await proxy.aclose()
        assert (report.finished, report.faults, report.infrastructure) == (12, 0, {}), str(report)
        assert sum(report.retries.values()) > 5


FAILURES = [{"fail_turn": 1}, {"garbage_turn": 1}, {"die_turn": 1}, {"hang_turn": 1}]


@pytest.mark.parametrize("fault", [*FAILURES, {}], ids=[*(next(iter(fault)) for fault in FAILURES), "killed_idle"])
async def test_g25_a_failure_of_the_infrastructure_is_never_a_reward(bench, eventually, fault):
    """Also where turns before it had rewards."""
    task_id = (await bench.start(turns=2, reward=0.5, **fault))["task_id"]
    await bench.act(task_id, 0)
    acting = asyncio.create_task(bench.act(task_id, 1)) if fault else None
    if "hang_turn" in fault:
        await eventually(lambda: bench.effects() == 2, "the action runs")
        bench.time.advance(11.0)
        await bench.service.sweep()
    if acting is None:
        for name in bench.runtime.world.names():
            bench.runtime.world.kill(name)
        await eventually(lambda: ended(bench, task_id), "the loss is noticed")
    else:
        with pytest.raises(TideError, match=r"environment_failed|environment_lost|turn_expired"):
            await acting
    account = await bench.end(task_id)
    assert account["reward"] is None
    assert account["outcome"]["kind"] in ("failed", "expired")
    assert (await bench.service.task(bench.owner, task_id)).reward is None


async def ended(bench, task_id: str) -> bool:
    return await bench.state(task_id) == "ended"


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.postgres)])
async def test_g26_a_turn_repeated_in_flight_acts_once(tmp_path, fresh_databases, replicas):
    """So do starts and ends; whoever repeats gets the same bytes, wherever and however often it asks."""
    with fresh_databases.fresh("postgres" if replicas > 1 else "sqlite") as url:
        async with clustered(tmp_path, url, {"scripted": scripted()}, replicas) as (cluster, client):

            async def many(path: str, body: dict) -> dict:
                calls = [client.post(path, body, number % replicas) for number in range(40)]
                bodies = [{**answer.data, "clocks": 0} for answer in await asyncio.gather(*calls)]
                assert all(body == bodies[0] for body in bodies)
                return bodies[0]

            body = {"environment": "scripted", "key": "k", "task": {"turns": 3, "step_s": 0.4, "start_s": 0.2}}
            task_id = (await many("/start", body))["task_id"]
            for turn in range(3):
                assert (await many("/observation", turn_of(task_id, turn)))["info"]["effects"] == turn + 1
            assert (await many("/end", {"task_id": task_id}))["metrics"] == {"effects": 3}
            assert len(cluster.view("/tasks")["tasks"]) == 1
