"""Code that blocks, browsers, several replicas, dead servers and dead engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import pytest
from awkward_environments import picture_url
from awkward_table import awkward_table
from cluster_calls import clustered, sqlite, start, turn_of
from docker_engine import docker_spec, engine_with_images, shared_engine
from gateway_cluster import scripted
from load_driver import Load, drive
from replica_client import Refused, ReplicaClient


async def test_g21_code_that_blocks_holds_up_no_other_task(tmp_path):
    """Each method waits until all tasks are in it, so one after the other would never end; then a step takes time."""
    num, turns, slow_s = 24, 3, 0.5
    table = awkward_table("Gathering", set={"size": num, "slow_s": slow_s}, capacity=num, probe_interval_s=0.2)
    async with clustered(tmp_path, sqlite(tmp_path), {"gathering": table}) as (cluster, client):
        starts = [start(client, f"k{number}", "gathering") for number in range(num)]
        task_ids = await asyncio.gather(*starts)
        began_s = time.perf_counter()
        for turn in range(turns):
            answers = await asyncio.gather(*(client.post("/observation", turn_of(t, turn)) for t in task_ids))
            assert {answer.data["info"]["effects"] for answer in answers} == {turn + 1}
        took_s = time.perf_counter() - began_s
        await asyncio.gather(*(client.post("/pause", {"task_id": t, "epoch": 1}) for t in task_ids))
        await asyncio.gather(*(client.post("/end", {"task_id": t}) for t in task_ids))
        one_by_one_s = num * turns * slow_s
        assert one_by_one_s / took_s > num / 2, f"{took_s:.1f} s is more than twice the ideal"
        # Its health is answered all the while.
        assert "probe 1 of" not in cluster.log()


@pytest.mark.postgres
async def test_g22_two_browsers_at_once_and_pictures_of_5_mb(tmp_path, fresh_databases):
    with fresh_databases.fresh("postgres") as url:
        tables = {"browser": awkward_table("Browser", set={"size": 2})}
        async with clustered(tmp_path, url, tables, 2) as (_, client):
            task_ids = await asyncio.gather(start(client, "a", "browser"), start(client, "b", "browser"))
            first: list[dict] = []
            for turn in range(2):
                calls = [client.post("/observation", turn_of(task_id, turn), turn) for task_id in task_ids]
                answers = [answer.data for answer in await asyncio.gather(*calls)]
                for answer in answers:
                    assert answer["messages"][0]["content"][1]["image_url"]["url"] == picture_url(turn + 1)
                first.append(answers[0])
            for turn, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
                again = (await client.post("/observation", turn_of(task_ids[0], turn), number)).data
                assert {**again, "clocks": 0} == {**first[turn], "clocks": 0}
            epochs = [{"task_id": task_id, "epoch": epoch} for epoch in (1, 2) for task_id in task_ids]
            await asyncio.gather(*(client.post("/pause", body) for body in epochs[:2]))
            await asyncio.gather(*(client.post("/resume", body) for body in epochs[2:]))
            accounts = await asyncio.gather(*(client.post("/end", {"task_id": task_id}) for task_id in task_ids))
            assert [account.data["outcome"]["kind"] for account in accounts] == ["aborted"] * 2
            assert len({account.data["metrics"]["thread"] for account in accounts}) == 2


async def test_g22_an_action_may_hold_a_picture_of_5_mb(tmp_path):
    async with clustered(tmp_path, sqlite(tmp_path), {"scripted": scripted()}) as (_, client):
        task_id = await start(client)
        content = [{"type": "image_url", "image_url": {"url": picture_url(0)}}]
        body = {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": content}}
        for _ in range(2):
            assert (await client.post("/observation", body)).data["info"]["effects"] == 1


@pytest.mark.postgres
async def test_g23_any_replica_answers_for_any_task(tmp_path, fresh_databases):
    with fresh_databases.fresh("postgres") as url:
        async with clustered(tmp_path, url, {"scripted": scripted(capacity=64, servers=2)}, 3) as (cluster, client):
            load = Load(tasks=60, turns=5, repeat=0.2, pause=0.1, pause_s=0.02)
            report = await drive(cluster.urls, load)
            assert (report.finished, report.faults, report.infrastructure) == (60, 0, {}), str(report)
            # What one has just written all others read at once.
            for number in range(3):
                answer = await client.post("/start", {"environment": "scripted", "key": f"r{number}"}, number)
                task_id = answer.data["task_id"]
                paths = [f"/tasks/{task_id}", f"/tasks/{task_id}/events", f"/observation?task_id={task_id}"]
                for other in range(3):
                    for path in paths:
                        assert (await client.get(path, other)).replica == other
                await client.post("/end", {"task_id": task_id})


async def kill_and_tell(client: ReplicaClient, pids: list[int], eventually) -> None:
    """Kill a server with a turn in flight and an idle task on it; the probes alone would take minutes to tell."""
    acting, idle = await start(client, "acting", hang_turn=0), await start(client, "idle")
    calls = [asyncio.create_task(client.post("/observation", turn_of(acting, 0), 0)) for _ in range(3)]

    async def is_now(task_id: str, state: str) -> bool:
        return (await client.get(f"/tasks/{task_id}")).data["state"] == state

    await eventually(lambda: is_now(acting, "acting"), "the turn is in flight")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(call, 20)
        assert (caught.value.status, caught.value.code) == (503, "environment_lost")
    await eventually(lambda: is_now(idle, "ended"), "the idle task is over too")
    with pytest.raises(Refused) as caught:
        await client.post("/observation", turn_of(idle, 0))
    assert caught.value.status == 410
    for task_id in (acting, idle):
        account = (await client.post("/end", {"task_id": task_id})).data
        assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")
    # The next start has a new server.
    task_id = await start(client, "next", turns=1)
    assert (await client.post("/observation", turn_of(task_id, 0))).data["info"]["effects"] == 1
    await client.post("/end", {"task_id": task_id})


async def test_g24_a_killed_server_process_is_told_at_once(tmp_path, eventually):
    async with clustered(tmp_path, sqlite(tmp_path), {"scripted": scripted(probe_interval_s=120.0)}) as (
        cluster,
        client,
    ):
        await client.post("/end", {"task_id": await start(client, "first")})
        pids = [server["pid"] for server in cluster.view("/environments")[0]["servers"]]
        await kill_and_tell(client, pids, eventually)


@pytest.mark.docker
async def test_g24_a_killed_container_is_told_at_once(tmp_path, eventually):
    engine = shared_engine()
    table = docker_spec(probe_interval_s=120.0).model_dump(mode="json", exclude={"name"}, exclude_unset=True)
    tables = {"scripted": table}
    async with clustered(tmp_path, sqlite(tmp_path), tables, docker_host=engine.url) as (cluster, client):
        await client.post("/end", {"task_id": await start(client, "first")})
        (server,) = [server for server in cluster.servers() if server.container]
        top = engine.client().top(server.container)
        pids = [max(int(row[top["Titles"].index("PID")]) for row in top["Processes"])]
        await kill_and_tell(client, pids, eventually)


@pytest.mark.docker
async def test_g16_when_an_engine_dies_starts_go_elsewhere_and_its_tasks_are_told(tmp_path):
    """One task per container, so that they alternate between the engines; first the engine dies, then all of it."""
    doomed, kept = engine_with_images("--live-restore"), shared_engine()
    try:
        spec = docker_spec(capacity=8, servers=8, probe_interval_s=0.5, docker={"engines": (kept.url, doomed.url)})
        tables = {"scripted": spec.model_dump(mode="json", exclude={"name"}, exclude_unset=True)}
        async with clustered(tmp_path, sqlite(tmp_path), tables) as (_, client):
            there, here = {}, {}
            for key in "abcd":
                before = len(doomed.client().containers())
                task_id = await start(client, key)
                (there if len(doomed.client().containers()) > before else here)[key] = task_id
            assert len(there) == len(here) == 2
            client_of_doomed = doomed.client()
            tops = [client_of_doomed.top(c["Id"]) for c in client_of_doomed.containers()]
            pids = [int(row[top["Titles"].index("PID")]) for top in tops for row in top["Processes"]]
            doomed.kill()
            # Its containers still answer, and new ones begin on the other engine.
            for task_id in (*there.values(), *here.values()):
                assert (await client.post("/observation", turn_of(task_id, 0))).data["info"]["effects"] == 1
            num_kept = len(kept.client().containers())
            further = await asyncio.gather(*(start(client, key) for key in "ef"))
            assert len(kept.client().containers()) == num_kept + 2
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for task_id in there.values():
                with pytest.raises(Refused) as caught:
                    await client.post("/observation", turn_of(task_id, 1))
                assert (caught.value.status, caught.value.code) in ((503, "environment_lost"), (410, "ended"))
                account = (await client.post("/end", {"task_id": task_id})).data
                assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")
            for task_id, turn in ((here["a" if "a" in here else "b"], 1), (further[0], 0)):
                answer = await client.post("/observation", turn_of(task_id, turn))
                assert answer.data["info"]["effects"] == turn + 1
    finally:
        doomed.stop()
