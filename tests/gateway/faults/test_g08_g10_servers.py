"""Commands that run away and servers that never become ready: lines G8 and G10 of the list of faults."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fault_clusters import RUNTIMES, cluster_of, table, wait_until

from tide_sdk.errors import TideError

RUNAWAY = ("-m", "tide_sdk.cli", "serve", "runaway_environment:Runaway", "--uds", "{uds}", "--capacity", "{capacity}")
CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'while True: pass']); "
NEVER = {
    "never-listens": CHILD + "time.sleep(3600) # {uds}",
    "ends-at-once": CHILD + "sys.exit('no such level') # {uds}",
    "answers-nonsense": CHILD + "import socket; s = socket.socket(socket.AF_UNIX); s.bind('{uds}'); s.listen(9)\n"
    "while True: c = s.accept()[0]; c.recv(999); c.sendall(b'HTTP/1.1 500 no\\r\\ncontent-length: 0\\r\\n\\r\\n')",
}


def say(client, task_id: str, text: str, **options):
    body = {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": text}}
    return client.post("/observation", json=body, **options)


def start(client, key: str, task: dict | None = None, limits: dict | None = None):
    body = {"environment": "scripted", "key": key, "task": task or {}, "limits": limits or {}}
    return client.post("/start", json=body)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g08_a_runaway_command_is_killed_at_its_limit_and_the_grace(tmp_path, runtime):
    options = table(runtime, RUNAWAY, capacity=2, servers=2, limits={"start": 60.0, "end": 0.5})
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            good = start(client, "good", limits={"idle": 100.0}).json()["task_id"]
            (kept,) = cluster.listed()
            bad = start(client, "bad", limits={"turn": 1.0}).json()["task_id"]
            assert say(client, bad, "run").status_code == 504
            assert say(client, bad, "run").status_code == 410
            account = client.post("/end", json={"task_id": bad}).json()
            assert (account["reward"], account["outcome"]["clock"]) == (None, "turn")
            wait_until(lambda: {s.name for s in cluster.servers()} == {kept}, "the runaway's server is gone")
            assert say(client, good, "walk").json()["messages"][0]["content"] == "walk"
    assert cluster.servers() == []


def test_g08_what_runs_away_in_a_start_or_is_ended_by_its_caller_is_killed_too(tmp_path):
    options = table("process", RUNAWAY, capacity=2, servers=2, limits={"start": 30.0, "end": 0.5})
    with cluster_of("process", tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            task_id = start(client, "ended").json()["task_id"]
            with pytest.raises(httpx.ReadTimeout):
                say(client, task_id, "run", timeout=1.0)
            client.post("/end", json={"task_id": task_id})
            wait_until(lambda: cluster.servers() == [], "the runaway's server is gone")
            answer = start(client, "bad", {"start": True}, {"start": 3.0})
            assert (answer.status_code, answer.json()["code"]) == (410, "expired")
            wait_until(lambda: cluster.servers() == [], "the runaway's server is gone")


@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_g10_a_server_that_never_is_ready_leaves_nothing(tmp_path, runtime, kind):
    options = table(runtime, ("-c", NEVER[kind]), capacity=2, servers=2, limits={"start": 3.0})
    with cluster_of(runtime, tmp_path, options) as cluster:
        cluster.start()
        with cluster.client() as client:
            answer = start(client, "k")
            # Both end at the same moment: the launch, and the start's own clock.
            assert (answer.status_code, answer.json()["code"]) in {(502, "environment_failed"), (410, "expired")}
            if kind == "ends-at-once":
                assert answer.status_code == 502
                assert "no such level" in answer.json()["detail"]
            assert start(client, "k").json()["code"] == answer.json()["code"]
            wait_until(lambda: cluster.servers() == [], "nothing of the server is left")
            wait_until(lambda: client.get("/capacity").json()["scripted"]["free"] == 2, "the slot is free")
            assert cluster.listed() == {}
            (task,) = client.get("/tasks").json()["tasks"]
            assert (task["state"], task["reward"]) == ("ended", None)
            if kind == "ends-at-once":
                refused = start(client, "next")
                assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
                assert int(refused.headers["retry-after"]) >= 1


async def test_g10_ten_failed_launches_leave_every_slot_free(benches, eventually):
    bench = await benches.open(capacity=10, servers=10)
    bench.runtime.launch_s, bench.runtime.num_failures = 1.0, 10
    outcomes = await asyncio.gather(*(bench.start(f"k{number}") for number in range(10)), return_exceptions=True)
    assert {error.code for error in outcomes if isinstance(error, TideError)} == {"environment_failed"}
    await eventually(bench.freed, "every slot is free")
    await eventually(lambda: benches.world.names() == set(), "nothing is left")
    assert await bench.repository.instances.all() == []
    bench.runtime.num_failures = 0
    bench.service.fleets["scripted"].launches.not_before_s = 0.0
    assert (await bench.start("next"))["turn"] == 0


async def test_g10_a_server_that_hangs_in_its_launch_is_given_up_with_the_start(benches, eventually):
    benches.world.stuck.add("scripted")
    bench = await benches.open(limits={"start": 0.2, "end": 5.0})
    error = await asyncio.gather(bench.start(), return_exceptions=True)
    assert isinstance(error[0], TideError)
    await eventually(bench.freed, "the slot is free")
    await eventually(lambda: benches.world.names() == set(), "nothing is left")
