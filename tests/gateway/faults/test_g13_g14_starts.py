"""A start that hangs, and thousands of starts: lines G13 and G14 of the list of faults."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from fault_clusters import RUNTIMES, cluster_of, table, wait_until
from gateway_cluster import SCRIPTED_SERVER
from load_driver import Load, drive

from tide_sdk.errors import TideError

NUM = 8
# The server that comes first makes the folder, and hangs before it listens.
FIRST_HANGS = """
import os, runpy, sys, time
folder = sys.argv[1]
try:
    os.mkdir(folder)
except FileExistsError:
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    time.sleep(3600)
"""


def start(client, number: int, **script):
    body = {"environment": "scripted", "key": f"k{number}", "task": script}
    return client.post("/start", json=body, timeout=60)


def test_g13_one_server_that_never_is_ready_holds_up_no_other_start(tmp_path):
    command = ("-c", FIRST_HANGS, str(tmp_path / "taken"), SCRIPTED_SERVER, "--uds", "{uds}", "--capacity", "1")
    options = table("process", command, capacity=NUM, servers=NUM, limits={"start": 60.0})
    with cluster_of("process", tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client, ThreadPoolExecutor(NUM) as pool:
            calls = [pool.submit(start, client, number) for number in range(NUM)]
            wait_until(lambda: sum(call.done() for call in calls) == NUM - 1, "all others have started")
            answers = [call.result() for call in calls if call.done()]
            assert [answer.status_code for answer in answers] == [201] * (NUM - 1)
            for answer in answers:
                body = {"task_id": answer.json()["task_id"], "turn": 0, "message": {"role": "assistant"}}
                assert client.post("/observation", json=body).status_code == 200
            (hanging,) = (call for call in calls if not call.done())
            (task,) = client.get("/tasks", params={"state": "starting"}).json()["tasks"]
            assert client.post("/end", json={"task_id": task["task_id"]}).json()["outcome"]["kind"] == "aborted"
            assert hanging.result(timeout=20).json()["code"] == "ended"
            wait_until(lambda: client.get("/capacity").json()["scripted"]["free"] == 1, "its slot is free")


@pytest.mark.parametrize("where", ["launch", "start"])
async def test_g13_one_of_thirty_two_hangs_until_its_limit(benches, eventually, monkeypatch, where):
    bench = await benches.open(capacity=32, servers=32 if where == "launch" else 1, limits={"start": 30.0, "end": 0.5})
    honest = bench.runtime.launch

    async def launch(name, slot, spec, timeout_s):
        if where == "launch" and slot == 5:
            benches.world.stuck.add(spec.name)  # read as the launch begins
            call = asyncio.ensure_future(honest(name, slot, spec, timeout_s))
            await asyncio.sleep(0)
            benches.world.stuck.discard(spec.name)
            return await call
        return await honest(name, slot, spec, timeout_s)

    monkeypatch.setattr(bench.runtime, "launch", launch)
    scripts = [{"start_s": 3600.0} if where == "start" and number == 5 else {} for number in range(32)]
    calls = [asyncio.create_task(bench.start(f"k{number}", **script)) for number, script in enumerate(scripts)]
    await eventually(lambda: sum(call.done() for call in calls) == 31, "all others have started")
    started = [call.result()["task_id"] for call in calls if call.done()]
    acted = await asyncio.gather(*(bench.act(task_id, 0) for task_id in started))
    assert [answer["turn"] for answer in acted] == [1] * 31
    (hanging,) = (call for call in calls if not call.done())
    bench.time.advance(30.1)
    for _ in range(3):
        await bench.service.sweep()
    with pytest.raises(TideError) as caught:
        await hanging
    assert (caught.value.code, caught.value.extra["clock"]) == ("expired", "start")
    acted = await asyncio.gather(*(bench.act(task_id, 1) for task_id in started))
    assert [answer["turn"] for answer in acted] == [2] * 31


@dataclass(frozen=True)
class Weight:
    """What a process holds."""

    descriptors: int
    threads: int
    rss_kb: int

    @classmethod
    def of(cls, pid: int) -> Self:
        status = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        threads, rss_kb = int(status["Threads"]), int(status["VmRSS"].split()[0])
        return cls(len(os.listdir(f"/proc/{pid}/fd")), threads, rss_kb)


ENGINE_CONNECTIONS = 24


def cycles(cluster, tasks: int, key: str, concurrency: int) -> None:
    load = Load(tasks=tasks, turns=1, concurrency=concurrency, key=key, max_in_flight=concurrency)
    report = asyncio.run(drive(cluster.urls, load))
    assert (report.finished, report.faults) == (tasks, 0), str(report)


def test_g14_starts_and_ends_leave_descriptors_threads_and_memory_as_they_were(tmp_path):
    options = table("process", capacity=16, servers=1)
    with cluster_of("process", tmp_path, options) as cluster:
        cluster.start()
        cycles(cluster, 150, "warm", 8)
        before = Weight.of(cluster.pid())
        cycles(cluster, 300, "more", 8)
        wait_until(lambda: Weight.of(cluster.pid()).descriptors <= before.descriptors, "connections are closed")
        after = Weight.of(cluster.pid())
        assert after.threads <= before.threads
        # 300 tasks that were kept whole would be more; what is left is the allocator's.
        assert after.rss_kb - before.rss_kb < 8 * 1024
        assert sum(cluster.listed().values()) == 0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g14_servers_that_come_and_go_leave_nothing_either(tmp_path, runtime):
    options = table(runtime, capacity=2, servers=2, retire_after=1, limits={"start": 60.0})
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()

        def gone() -> bool:
            return cluster.servers() == [] and cluster.listed() == {}

        num_cycles = 4 if runtime == "process" else 2
        cycles(cluster, num_cycles, "warm", 2)
        wait_until(gone, "the servers are retired")
        before = Weight.of(cluster.pid())
        cycles(cluster, 2 * num_cycles, "more", 2)
        wait_until(gone, "the servers are retired")
        # Fewer than one for each server that came and went; each thread that calls an engine keeps connections to it.
        most = before.descriptors + (2 * num_cycles - 1 if runtime == "process" else ENGINE_CONNECTIONS)
        wait_until(lambda: Weight.of(cluster.pid()).descriptors <= most, "descriptors are given back")
        after = Weight.of(cluster.pid())
        assert after.threads <= before.threads + 1
        assert after.rss_kb - before.rss_kb < 8 * 1024
