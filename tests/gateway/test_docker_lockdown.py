"""What a container can do, as seen from inside, and how each kind of connection reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from docker_engine import docker_runtimes, docker_spec, inside, shared_engine

from tide_gateway import upstream
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker import DockerRuntime

pytestmark = pytest.mark.docker

LAUNCH_S = 60.0
LOOK_AROUND = """
import json, os, socket

def can_write(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False

status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "ids": [os.getuid(), os.getgid()],
    "groups": os.getgroups(),
    "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": int(status["NoNewPrivs"]),
    "interfaces": sorted(os.listdir("/sys/class/net")),
    "writable": [path for path in ("/x", "/usr/x", "/etc/x", "/run/x", "/tide/sdk/x", "/run/tide/x", "/tmp/x")
                 if can_write(path)],
    "tmp_bytes": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize,
    "first_process": open("/proc/1/comm").read().strip(),
}))
"""
FORK_BOMB = """
import os, time
children = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children)
"""
ROUTES = """
lines = [line.split() for line in open("/proc/net/route").read().splitlines()[1:]]
print(lines)
"""
PORT_SERVER = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps({"contract": 1, "environment": "e", "capacity": int(os.environ["TIDE_CAPACITY"]),
                           "tasks": 0, "incarnation": os.environ["TIDE_INSTANCE"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", int(os.environ["TIDE_PORT"])), Handler).serve_forever()
"""


@pytest.fixture
async def runtime(tmp_path):
    async with docker_runtimes(tmp_path) as make:
        yield make()


def port_spec(**options):
    return docker_spec(command=("python3", "-c", PORT_SERVER), docker=options)


async def test_a_container_can_change_nothing_and_reach_nobody(runtime):
    options = {"memory_mb": 256, "pids": 24, "cpus": 0.5, "tmpfs_mb": 16}
    server = await runtime.launch("one", 0, docker_spec(docker=options), LAUNCH_S)
    engine = shared_engine()
    seen = json.loads(await asyncio.to_thread(inside, engine, server.place.handle, LOOK_AROUND))
    assert seen["ids"] == [65534, 65534]
    assert seen["groups"] in ([], [65534])
    assert seen["capabilities"] == [0, 0, 0, 0, 0]
    assert seen["no_new_privileges"] == 1
    assert seen["interfaces"] == ["lo"]
    assert seen["writable"] == ["/tmp/x"]
    assert seen["tmp_bytes"] == 16 * 1024 * 1024
    assert seen["first_process"] in ("docker-init", "tini")
    host = engine.client().inspect_container(server.place.handle)["HostConfig"]
    assert (host["Memory"], host["PidsLimit"], host["NanoCpus"]) == (256 * 1024 * 1024, 24, 500_000_000)
    assert int(await asyncio.to_thread(inside, engine, server.place.handle, FORK_BOMB)) < 24
    assert await asyncio.to_thread(inside, engine, server.place.handle, ROUTES) == "[]\n"


async def test_a_container_that_uses_up_its_memory_is_named_as_such(runtime):
    words = ("python3", "-c", "print('growing', flush=True); x = bytearray(256 << 20); x[::4096] = x[1::4096]")
    with pytest.raises(LaunchFailed, match=r"exited with code 137, out of memory; its last words: growing"):
        await runtime.launch("big", 0, docker_spec(command=words, docker={"memory_mb": 32}), LAUNCH_S)


async def test_a_link_in_the_sockets_place_reaches_no_other_instance(runtime):
    victim = await runtime.launch("victim", 0, docker_spec(), LAUNCH_S)
    path = victim.place.url.removeprefix("unix:")
    code = f"import os, time; os.symlink({path!r}, os.environ['TIDE_UDS']); time.sleep(300)"
    with pytest.raises(LaunchFailed, match="something else in its socket's place"):
        await runtime.launch("thief", 1, docker_spec(command=("python3", "-c", code)), LAUNCH_S)
    assert await runtime.survey() == {"victim"}
    await upstream.probe(victim)


async def test_a_bridge_is_internal_and_shared_by_all_that_ask_at_once(tmp_path):
    async with docker_runtimes(tmp_path) as make:
        first, second = make(), make()
        spec = port_spec(connect="bridge")
        servers = await asyncio.gather(
            *(runtime.launch(f"{number}-{index}", number, spec, LAUNCH_S) for number in range(3)
              for index, runtime in enumerate((first, second)))
        )  # fmt: skip
        assert len({server.place.url for server in servers}) == 6
        assert {server.health.incarnation for server in servers} == {server.name for server in servers}
        engine = shared_engine()
        networks = engine.client().networks(filters={"label": "tide.deployment"})
        # One for each runtime at the worst: engines take a name twice.
        assert [network["Internal"] for network in networks] in ([True], [True, True])
        late = await asyncio.gather(*(make().launch(f"late-{number}", number, spec, LAUNCH_S) for number in range(2)))
        used = [engine.client().inspect_container(server.place.handle) for server in late]
        assert len({tuple(container["NetworkSettings"]["Networks"]) for container in used}) == 1
        servers += late
        await asyncio.gather(*(first.destroy(server.name, spec, server.place, 0.0) for server in servers))
        await first.close()
        assert engine.client().networks(filters={"label": "tide.deployment"}) == []


async def test_g29_a_published_port_is_reached_at_the_address_that_was_configured(runtime):
    spec = port_spec(connect="bridge", address="127.0.0.1")
    servers = await asyncio.gather(*(runtime.launch(f"p{number}", number, spec, LAUNCH_S) for number in range(2)))
    assert all(server.place.url.startswith("http://127.0.0.1:") for server in servers)
    assert [server.health.incarnation for server in servers] == ["p0", "p1"]


async def test_containers_of_the_engines_network_get_a_free_port_each(runtime):
    spec = port_spec(connect="host")
    servers = await asyncio.gather(*(runtime.launch(f"h{number}", number, spec, LAUNCH_S) for number in range(3)))
    assert len({server.place.url for server in servers}) == 3
    assert [server.health.incarnation for server in servers] == ["h0", "h1", "h2"]


async def test_an_engine_of_another_machine_is_called_over_tcp(tmp_path, eventually):
    path = shared_engine().url.removeprefix("unix://")
    relays: list[bool] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(True)
        engine_reader, engine_writer = await asyncio.open_unix_connection(path)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while chunk := await source.read(65536):
                    target.write(chunk)
                    await target.drain()
            target.close()

        await asyncio.gather(pump(reader, engine_writer), pump(engine_reader, writer))
        relays.pop()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    spec = port_spec(engines=(url,), connect="bridge", address="127.0.0.1")
    async with docker_runtimes(tmp_path, spec) as make:
        launched = await make().launch("far", 0, spec, LAUNCH_S)
        assert launched.place.host == url
        await asyncio.to_thread(shared_engine().client().kill, launched.place.handle, "SIGKILL")
        async with asyncio.timeout(LAUNCH_S):
            await launched.exited.wait()
        assert relays, "the events' connection at least"
    runtime = DockerRuntime("other", tmp_path / "logs", Path("/tmp/tide-run-never-made"), {"DOCKER_HOST": url})
    with pytest.raises(LaunchFailed, match='connect = "uds" needs an engine of this machine, not tcp://'):
        await runtime.launch("far", 0, docker_spec(docker={"engines": ()}), LAUNCH_S)
    await runtime.close()
    await eventually(lambda: not relays, "all connections to the engine are closed")
    server.close()
