"""Environment servers on a Ray cluster of several nodes: what only a cluster can show."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from pathlib import Path

import pytest
from ray_cluster import environ, ray_spec, shared_cluster, told_by

from tide_gateway import upstream
from tide_gateway.runtimes import Gone, LaunchFailed, Place, RuntimeAway, Server
from tide_gateway.runtimes.ray_runtime import RayRuntime

SMALL = str(Path(__file__).parents[1] / "support" / "small_http.py")
SMALL_COMMAND = (sys.executable, SMALL, "{host}", "{port}", "{capacity}")
LAUNCH_S = 60.0
BOUND_S = 60.0
needs_ray = pytest.mark.ray


@pytest.fixture
def deployment() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def cluster():
    return shared_cluster()


@pytest.fixture
async def runtime(cluster, deployment, tmp_path):
    runtime = RayRuntime(deployment, tmp_path / "logs", environ(), [cluster.address])
    yield runtime
    for name in await runtime.survey():
        await runtime.destroy(name, None, None, 0.0)
    await runtime.close()


async def launch(runtime: RayRuntime, address: str, *names: str, **values) -> list[Server]:
    spec = ray_spec(address, *SMALL_COMMAND, **values)
    launching = (runtime.launch(name, slot, spec, LAUNCH_S) for slot, name in enumerate(names))
    return list(await asyncio.gather(*launching))


async def exits(*servers: Server) -> None:
    async with asyncio.timeout(BOUND_S):
        for server in servers:
            await server.exited.wait()


def proc(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_text().split("\0")


def marked(name: str) -> list[int]:
    """The living processes that carry an instance's name."""
    found, mark = [], f"TIDE_INSTANCE={name}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def lives(pid: int) -> bool:
    """The process runs; one that is dead and that nobody reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@needs_ray
async def test_servers_are_spread_over_the_nodes_and_know_what_they_are(runtime, cluster):
    env = {"COLOUR": "green"}
    servers = await launch(runtime, cluster.address, "a", "b", "c", "d", capacity=16, servers=4, env=env)
    assert {told_by(server)["node"] for server in servers} == set(cluster.nodes)
    assert len({server.health.incarnation for server in servers}) == 4
    pid = told_by(servers[0])["pid"]
    variables = dict(entry.split("=", 1) for entry in proc(pid, "environ") if "=" in entry)
    assert (variables["COLOUR"], variables["TIDE_INSTANCE"], variables["TIDE_CAPACITY"]) == ("green", "a", "4")
    assert servers[0].place.url == f"http://{variables['TIDE_HOST']}:{variables['TIDE_PORT']}"
    assert servers[0].place.host == variables["TIDE_HOST"]
    assert not [name for name in variables if name.startswith("RAY_")]
    assert proc(pid, "cmdline")[-2] == "4"


@needs_ray
async def test_a_lost_node_ends_its_servers_and_no_others(runtime, cluster):
    node = await asyncio.to_thread(cluster.add, "doomed")
    there = {"num_cpus": 0.0, "resources": {"doomed": 1.0}}
    lost = await launch(runtime, cluster.address, "lost-a", "lost-b", options=there)
    [kept] = await launch(runtime, cluster.address, "kept")
    assert {told_by(server)["node"] for server in lost} == {node}
    await asyncio.to_thread(cluster.kill, node)
    await exits(*lost)
    assert not kept.exited.is_set()
    await upstream.probe(kept)
    assert await runtime.survey() == {"kept"}
    with pytest.raises(Gone):
        await runtime.attach("lost-a", ray_spec(cluster.address, *SMALL_COMMAND), lost[0].place, BOUND_S)
    assert not any(lives(told_by(server)["pid"]) for server in lost)


@needs_ray
async def test_an_actor_that_hangs_is_destroyed_with_its_server(runtime, cluster, eventually):
    name = f"hangs-{secrets.token_hex(4)}"
    server = await runtime.launch(name, 0, ray_spec(cluster.address, *SMALL_COMMAND, "child"), LAUNCH_S)
    actor, pid = told_by(server)["actor"][0], told_by(server)["pid"]
    await eventually(lambda: len(marked(name)) == 2, "the server has a child in a session of its own")
    assert pid in marked(name)
    os.kill(actor, signal.SIGSTOP)
    await runtime.destroy(name, None, server.place, 0.1)
    await eventually(lambda: not lives(actor) and not marked(name), "all are dead")
    assert await runtime.survey() == set()


@needs_ray
async def test_an_actor_that_is_killed_takes_its_server_along(runtime, cluster, eventually):
    [server] = await launch(runtime, cluster.address, "orphan")
    os.kill(told_by(server)["actor"][0], signal.SIGKILL)
    await exits(server)
    await eventually(lambda: not lives(told_by(server)["pid"]), "the server ends")


@needs_ray
async def test_a_lost_driver_loses_no_server_and_the_next_one_watches_them(runtime, cluster, eventually):
    first, second = await launch(runtime, cluster.address, "first", "second")
    [link] = runtime._links.values()
    driver = link._process
    os.kill(driver.pid, signal.SIGKILL)
    await eventually(lambda: link._process is not driver and link.running, "another driver is there")
    await upstream.probe(first)
    assert await runtime.survey() == {"first", "second"}
    os.kill(told_by(first)["pid"], signal.SIGKILL)
    await exits(first)
    assert not second.exited.is_set()


@needs_ray
async def test_a_server_that_fails_is_told_by_its_last_words(runtime, cluster, tmp_path):
    dies = (sys.executable, "-c", "import sys; print('no such map'); sys.exit(3) # {announce}")
    with pytest.raises(LaunchFailed, match="exited with code 3; its last words: no such map"):
        await runtime.launch("dies", 0, ray_spec(cluster.address, *dies), LAUNCH_S)
    dies = (sys.executable, "-c", "import sys; print('no such map'); sys.exit(3) # {port}")
    with pytest.raises(LaunchFailed, match="exited with code 3; its last words: no such map"):
        await runtime.launch("dies-late", 0, ray_spec(cluster.address, *dies), LAUNCH_S)
    assert (tmp_path / "logs" / "dies-late.log").read_text() == "no such map\n"
    with pytest.raises(LaunchFailed, match="cannot execute 'no-such-program'"):
        await runtime.launch("none", 0, ray_spec(cluster.address, "no-such-program", "{announce}"), LAUNCH_S)
    assert await runtime.survey() == set()


@needs_ray
async def test_an_announced_address_must_be_one_that_others_reach(runtime, cluster):
    spec = ray_spec(cluster.address, sys.executable, SMALL, "{host}", "{announce}")
    await upstream.probe(await runtime.launch("announces", 0, spec, LAUNCH_S))
    spec = ray_spec(cluster.address, sys.executable, SMALL, "127.0.0.1", "{announce}")
    with pytest.raises(LaunchFailed, match=re.escape("other machines do not reach; let it listen on {host}")):
        await runtime.launch("inside", 0, spec, LAUNCH_S)


@needs_ray
async def test_a_cluster_without_room_says_so(runtime, cluster):
    await runtime.survey()  # the driver is there: the launch's time is for the launch
    spec = ray_spec(cluster.address, *SMALL_COMMAND, options={"num_cpus": 1000.0})
    with pytest.raises(LaunchFailed, match="no node of the Ray cluster had room for it in time"):
        await runtime.launch("large", 0, spec, 3.0)
    assert await runtime.survey() == set()


@needs_ray
async def test_a_cluster_that_is_away_fails_the_launch_in_time(deployment, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    runtime = RayRuntime(deployment, tmp_path / "logs", environ(), [address])
    with pytest.raises(LaunchFailed, match=f"the Ray cluster at {address} did not answer within 1 s"):
        await runtime.launch("away", 0, ray_spec(address, *SMALL_COMMAND), 1.0)
    await runtime.close()


async def test_a_driver_that_does_not_start_is_told_and_not_started_again_at_once(deployment, tmp_path):
    broken = environ() | {"PYTHONHOME": str(tmp_path)}
    runtime = RayRuntime(deployment, tmp_path / "logs", broken, ["a.test:1"])
    spec = ray_spec("a.test:1", *SMALL_COMMAND)
    with pytest.raises(LaunchFailed, match=r"the Ray cluster at a\.test:1 cannot be joined: its driver ended \(log: "):
        await runtime.launch("one", 0, spec, LAUNCH_S)
    log = tmp_path / "logs" / "ray-driver-0.log"
    num_bytes = log.stat().st_size
    assert num_bytes > 0
    with pytest.raises(LaunchFailed, match="cannot be joined"):
        await runtime.launch("two", 0, spec, LAUNCH_S)
    assert log.stat().st_size == num_bytes
    with pytest.raises(RuntimeAway):
        await runtime.survey()
    with pytest.raises(Gone, match="cannot be joined"):
        await runtime.attach("one", spec, Place("http://a.test:2", handle='{"address":"a.test:1"}'), 0.5)
    await runtime.close()
