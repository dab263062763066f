"""Clients that are killed: line G9 of the list of faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest
from fault_clusters import RUNTIMES, cluster_of, table, wait_until

NUM_CLIENTS = 40
# 40 processes, each with a task: a fourth think, a fourth wait for a turn, a fourth for their start, a fourth are
# paused and resumed and then think. Each writes a byte when it is as far as it gets.
CLIENTS = """
import http.client, json, os, socket, sys, time
port, count, start_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def post(path, body):
    call = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    call.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return call

def client(number):
    kind = number % 4
    task = {"start_s": start_s} if kind == 2 else {"hang_turn": 0}
    starting = post("/start", {"environment": "scripted", "key": f"dead-{number}", "task": task})
    if kind != 2:
        task_id = json.loads(starting.getresponse().read())["task_id"]
        if kind == 1:
            post("/observation", {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": "go"}})
        if kind == 3:
            post("/pause", {"task_id": task_id, "epoch": 1}).getresponse().read()
            post("/resume", {"task_id": task_id, "epoch": 2}).getresponse().read()
    print(number, flush=True)
    time.sleep(3600)

for number in range(count):
    if os.fork() == 0:
        client(number)
time.sleep(3600)
"""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g09_the_slots_and_servers_of_killed_clients_come_back(tmp_path, runtime):
    num_clients = NUM_CLIENTS if runtime == "process" else 8
    servers = 4 if runtime == "process" else 2
    options = table(
        runtime, capacity=num_clients, servers=servers, retire_after=num_clients // servers,
        limits={"start": 60.0, "idle": 3.0, "turn": 3.0, "end": 2.0},
    )  # fmt: skip
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        argv = [sys.executable, "-I", "-S", "-c", CLIENTS, str(cluster.replicas[0].port), str(num_clients), "1.0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as clients:
            try:
                assert clients.stdout is not None
                for _ in range(num_clients):
                    assert clients.stdout.readline()
                seen = cluster.view("/tasks")["tasks"]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(clients.pid, signal.SIGKILL)
        assert len(seen) == num_clients
        wait_until(lambda: cluster.view("/capacity")["scripted"]["free"] == num_clients, "all slots are back")
        wait_until(lambda: cluster.servers() == [], "all servers are back")
        tasks = cluster.view("/tasks")["tasks"]
        assert {(task["state"], task["outcome"]["kind"]) for task in tasks} == {("ended", "expired")}
        assert {task["outcome"]["clock"] for task in tasks} == {"idle", "turn"}
        with cluster.client() as client:
            answers = [
                client.post("/start", json={"environment": "scripted", "key": f"new-{number}"}) for number in range(3)
            ]
        assert [answer.status_code for answer in answers] == [201] * 3


async def test_g09_one_sweep_after_the_idle_limit_is_enough(benches, eventually):
    bench = await benches.open(capacity=40, servers=4, retire_after=10)
    calls = [asyncio.create_task(bench.start(f"k{number}")) for number in range(40)]
    started = await asyncio.gather(*calls)
    acting = [asyncio.create_task(bench.act(answer["task_id"], 0)) for answer in started[:10]]
    await asyncio.gather(*acting)
    assert await bench.taken() == 40
    # What a server of HTTP does with the calls of a client that is gone.
    for call in (*calls, *acting):
        call.cancel()
    bench.time.advance(19.9)
    await bench.service.sweep()
    assert await bench.taken() == 40
    bench.time.advance(0.2)
    await bench.service.sweep()
    await eventually(bench.freed, "every slot is free")

    async def retired() -> bool:
        await bench.service.sweep()
        return benches.world.names() == set()

    await eventually(retired, "every server is gone")


async def test_g09_callers_that_vanish_in_their_calls_hold_nothing_beyond_the_limits(benches, eventually):
    bench = await benches.open(capacity=20, servers=2, limits={"start": 30.0, "turn": 10.0, "end": 0.5})
    started = await asyncio.gather(*(bench.start(f"k{number}", hang_turn=0) for number in range(10)))
    calls = [asyncio.create_task(bench.act(answer["task_id"], 0)) for answer in started]
    calls += [asyncio.create_task(bench.start(f"s{number}", start_s=3600.0)) for number in range(10)]
    await eventually(lambda: bench.effects() == 10, "the actions run")

    async def all_taken() -> bool:
        return await bench.taken() == 20

    await eventually(all_taken, "the starts are let in")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    bench.time.advance(30.1)  # the longest limit of the two
    await bench.service.sweep()
    # What has to be ended first is asked for its end limit; the start that hangs is repeated to learn its task.
    bench.time.advance(5.1)
    await eventually(bench.freed, "every slot is free")
