"""Signals with live tasks: line G12 of the list of faults."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_clusters import RUNTIMES, cluster_of, table

GO = {"role": "assistant", "content": "go"}


def sizes(runtime: str) -> dict[str, int]:
    """Tasks and servers of the short form."""
    return {"capacity": 40, "servers": 4} if runtime == "process" else {"capacity": 8, "servers": 4}


def start_all(client, num_tasks: int, **script) -> list[str]:
    """Tasks that have taken a turn each; every fourth is paused then."""
    with ThreadPoolExecutor(8) as pool:

        def start(number: int) -> str:
            body = {"environment": "scripted", "key": f"k{number}", "task": script}
            answer = client.post("/start", json=body)
            assert answer.status_code == 201, answer.text
            task_id = answer.json()["task_id"]
            assert act(client, task_id, 0).status_code == 200
            if number % 4 == 0:
                client.post("/pause", json={"task_id": task_id, "epoch": 1})
            return task_id

        return list(pool.map(start, range(num_tasks)))


def act(client, task_id: str, turn: int):
    return client.post("/observation", json={"task_id": task_id, "turn": turn, "message": GO})


@pytest.mark.parametrize(
    ("runtime", "number"),
    [
        ("process", signal.SIGINT),
        ("process", signal.SIGTERM),
        pytest.param("docker", signal.SIGINT, marks=pytest.mark.docker),
    ],
)
def test_g12_a_signal_ends_all_tasks_and_leaves_no_server(tmp_path, runtime, number):
    options = table(runtime, **sizes(runtime), limits={"start": 60.0})
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            tasks = start_all(client, sizes(runtime)["capacity"])
        assert len(cluster.listed()) == 4
        cluster.replicas[0].send(number)
        assert cluster.stop(0, number) == 0, cluster.log()  # a second signal, which changes nothing
        assert cluster.servers() == []
        assert "Traceback" not in cluster.log()
        cluster.start()
        with cluster.client() as client:
            assert client.get("/capacity").json()["scripted"]["free"] == len(tasks)
            for task_id in tasks[:3]:
                account = client.post("/end", json={"task_id": task_id}).json()
                assert (account["reward"], account["outcome"]["reason"]) == (None, "environment_lost")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g12_what_a_kill_9_leaves_is_recovered_by_the_next_start(tmp_path, runtime):
    options = table(runtime, **sizes(runtime), limits={"start": 60.0, "idle": 100.0})
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            tasks = start_all(client, sizes(runtime)["capacity"])
        servers = {server.name for server in cluster.servers()}
        cluster.kill(0)
        assert {server.name for server in cluster.servers()} == servers
        cluster.start()
        with cluster.client() as client:
            for number, task_id in enumerate(tasks):
                if number % 4 == 0:
                    assert act(client, task_id, 1).json()["code"] == "paused"
                    client.post("/resume", json={"task_id": task_id, "epoch": 2})
                assert act(client, task_id, 1).json()["info"]["effects"] == 2
            assert cluster.orphans() == []
            assert set(cluster.listed()) == servers
        assert cluster.stop(0, signal.SIGTERM) == 0, cluster.log()
        assert cluster.servers() == []


@pytest.mark.postgres
def test_g12_two_replicas_stopped_at_once_leave_nothing(tmp_path, fresh_databases):
    options = table("process", **sizes("process"), limits={"start": 60.0})
    with (
        fresh_databases.fresh("postgres") as url,
        cluster_of("process", tmp_path, options, database_url=url, replicas=2) as cluster,
    ):
        cluster.start_all()
        with cluster.client(0) as here, cluster.client(1) as there:
            start_all(here, 16)
            assert there.post("/start", json={"environment": "scripted", "key": "there"}).status_code == 201
        assert len(cluster.servers()) == 4
        for replica in cluster.replicas:
            replica.send(signal.SIGTERM)
        assert [cluster.stop(replica.number) for replica in cluster.replicas] == [0, 0]
        assert cluster.servers() == []
        cluster.start(0)
        assert cluster.view("/capacity")["scripted"]["free"] == 40
        assert {task["state"] for task in cluster.view("/tasks")["tasks"]} == {"ended"}


@pytest.mark.postgres
def test_g12_one_replica_killed_and_the_other_stopped_leave_nothing(tmp_path, fresh_databases):
    options = table("process", **sizes("process"), limits={"start": 60.0})
    with (
        fresh_databases.fresh("postgres") as url,
        cluster_of("process", tmp_path, options, database_url=url, replicas=2) as cluster,
    ):
        cluster.start_all()
        with cluster.client(0) as client:
            start_all(client, 8)
        cluster.kill(0)
        assert cluster.stop(1, signal.SIGTERM) == 0, cluster.log(1)
        assert cluster.servers() == []


@pytest.mark.parametrize("crashed", [False, True], ids=["its-own-servers", "those-of-a-dead-gateway"])
async def test_g12_all_servers_end_at_the_same_time(benches, monkeypatch, crashed):
    spec = {"capacity": 16, "servers": 16}
    bench = await benches.open(**spec)
    await asyncio.gather(*(bench.start(f"k{number}", end_s=3600.0) for number in range(16)))
    if crashed:
        await benches.crash(bench)
        bench = await benches.open(**spec)
    assert len(benches.world.names()) == 16
    barrier, destroy = asyncio.Barrier(16), bench.runtime.destroy

    async def slow(*args) -> None:
        await barrier.wait()  # none is destroyed before all are being destroyed
        await destroy(*args)

    monkeypatch.setattr(bench.runtime, "destroy", slow)
    async with asyncio.timeout(20):
        await bench.service.stop(drain_s=0.0)
    assert benches.world.names() == set()
    assert await bench.repository.open_tasks() == []
