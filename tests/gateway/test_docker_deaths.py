"""How containers end: asked, killed, by themselves or with their engine; and that all gateways hear of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import httpx
import pytest
from docker_engine import DockerEngine, docker_runtimes, docker_spec, engine_with_images, inside, shared_engine
from gateway_cluster import GatewayCluster, scripted

from tide_gateway import upstream
from tide_gateway.runtimes import Gone, LaunchFailed, RuntimeAway
from tide_gateway.runtimes.docker_engines import Engine

pytestmark = pytest.mark.docker

LAUNCH_S = 60.0
BOUND_S = 40.0
RUNAWAY = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.close(1), os.close(2)
        while True:
            pass
"""


@pytest.fixture
async def runtime(tmp_path):
    async with docker_runtimes(tmp_path) as make:
        yield make()


@pytest.fixture(scope="module")
def restored():
    """An engine of its own whose containers outlive it."""
    engine = engine_with_images("--live-restore")
    yield engine
    engine.stop()


async def exits(server) -> None:
    async with asyncio.timeout(BOUND_S):
        await server.exited.wait()


def processes_of(engine, container_id: str) -> list[int]:
    top = engine.client().top(container_id)
    return [int(row[top["Titles"].index("PID")]) for row in top["Processes"]]


async def test_g08_runaway_processes_are_gone_after_the_grace(runtime):
    server = await runtime.launch("one", 0, docker_spec(docker={"cpus": 0.5}), LAUNCH_S)
    engine = shared_engine()
    await asyncio.to_thread(inside, engine, server.place.handle, RUNAWAY)
    pids = await asyncio.to_thread(processes_of, engine, server.place.handle)
    assert len(pids) >= 5
    await runtime.destroy("one", docker_spec(), server.place, 1.0)
    assert not {str(pid) for pid in pids} & set(os.listdir("/proc"))
    assert server.exited.is_set()


@pytest.mark.parametrize("known", [True, False], ids=["launched-here", "launched-elsewhere"])
async def test_a_server_is_asked_first_and_its_end_is_not_waited_for_longer_than_it_takes(tmp_path, known):
    async with docker_runtimes(tmp_path) as make:
        runtime, other = make(), make()
        server = await runtime.launch("one", 0, docker_spec(), LAUNCH_S)
        # With a grace beyond the test's own limit only the server's own end can end it.
        await (runtime if known else other).destroy("one", docker_spec(), server.place, 3600.0)
        await exits(server)
        assert await other.survey() == set()


async def test_a_frozen_container_is_destroyed_all_the_same(runtime):
    server = await runtime.launch("one", 0, docker_spec(), LAUNCH_S)
    await runtime.freeze(server, True)
    await runtime.destroy("one", docker_spec(), server.place, 2.0)
    assert await runtime.survey() == set()


async def test_a_server_process_that_is_killed_is_noticed_and_its_log_is_kept(runtime, tmp_path, caplog):
    code = (
        "print('last words', flush=True)\n"
        + "import runpy, sys; sys.argv = sys.argv[1:]; "
        + ("runpy.run_path(sys.argv[0], run_name='__main__')")
    )
    command = ("python3", "-c", code, *docker_spec().command[1:])
    server = await runtime.launch("one", 0, docker_spec(command=command), LAUNCH_S)
    pids = await asyncio.to_thread(processes_of, shared_engine(), server.place.handle)
    with caplog.at_level(logging.WARNING):
        os.kill(max(pids), signal.SIGKILL)
        await exits(server)
    assert "instance one: its container is gone (exit code 137)" in caplog.text
    with pytest.raises(upstream.EnvironmentLost):
        await upstream.start(server, {"environment": "scripted", "key": "k"}, 10.0)
    await runtime.destroy("one", docker_spec(), server.place, 1.0)
    assert "last words" in (tmp_path / "logs" / "one.log").read_text()


async def test_a_connection_lives_through_a_frozen_pause(runtime):
    server = await runtime.launch("one", 0, docker_spec(), LAUNCH_S)
    reader, writer = await asyncio.open_unix_connection(server.place.url.removeprefix("unix:"))
    await runtime.freeze(server, True)
    await runtime.freeze(server, True)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.3)
    await runtime.freeze(server, False)
    await runtime.freeze(server, False)
    assert (await asyncio.wait_for(reader.readline(), BOUND_S)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_frozen_container_is_thawed_when_it_is_attached_to(runtime):
    first = await runtime.launch("one", 0, docker_spec(), LAUNCH_S)
    await runtime.freeze(first, True)
    second = await runtime.attach("one", docker_spec(), first.place, LAUNCH_S)
    assert second.health.incarnation == first.health.incarnation
    state = shared_engine().client().inspect_container(first.place.handle)["State"]
    assert not state["Paused"]


async def test_another_deployments_container_is_not_attached_to(tmp_path):
    async with docker_runtimes(tmp_path) as ours, docker_runtimes(tmp_path) as theirs:
        server = await ours().launch("one", 0, docker_spec(), LAUNCH_S)
        stranger = theirs()
        assert await stranger.survey() == set()
        with pytest.raises(Gone, match="no container"):
            await stranger.attach("one", docker_spec(), server.place, 5.0)
        await stranger.destroy("one", docker_spec(), server.place, 0.0)
        await upstream.probe(server)


async def test_containers_outlive_a_killed_engine_and_their_later_deaths_are_noticed(tmp_path, restored):
    spec = docker_spec(restored)
    async with docker_runtimes(tmp_path, spec) as make:
        runtime, again = make(), make()
        kept, lost = [await runtime.launch(name, slot, spec, LAUNCH_S) for slot, name in enumerate(("kept", "lost"))]
        pids = processes_of(restored, lost.place.handle)
        restored.kill()
        with pytest.raises(RuntimeAway):
            await runtime.survey()
        with pytest.raises(LaunchFailed, match=f"no Docker engine is up .*{restored.url}"):
            await runtime.launch("third", 2, spec, LAUNCH_S)
        await runtime.destroy("third", spec, None, 0.0)
        await upstream.probe(kept)
        attached = await again.attach("kept", spec, kept.place, LAUNCH_S)
        os.kill(max(pids), signal.SIGKILL)  # no event will ever tell
        assert not kept.exited.is_set()
        restored.start()
        await exits(lost)
        assert not kept.exited.is_set()
        await asyncio.to_thread(restored.client().kill, kept.place.handle, "SIGKILL")
        await exits(kept)
        await exits(attached)


async def test_the_containers_that_ended_with_their_engine_are_noticed(tmp_path, eventually):
    # Without --live-restore an engine that starts again finds its containers ended.
    engine = engine_with_images()
    try:
        spec = docker_spec(engine)
        async with docker_runtimes(tmp_path, spec) as make:
            runtime = make()
            server = await runtime.launch("one", 0, spec, LAUNCH_S)
            engine.restart()
            await exits(server)

            async def is_found() -> bool:
                try:
                    return await runtime.survey() == {"one"}
                except RuntimeAway:
                    return False

            await eventually(is_found, "the engine is back with what is left of the container")
    finally:
        engine.stop()


async def test_starts_go_to_the_engines_that_are_up(tmp_path, restored, eventually):
    urls = (shared_engine().url, restored.url)
    spec = docker_spec(docker={"engines": urls})
    async with docker_runtimes(tmp_path, spec) as make:
        runtime = make()
        names = iter(f"s{number}" for number in range(100))

        async def places(*slots: int) -> list[str]:
            launched = (runtime.launch(next(names), slot, spec, LAUNCH_S) for slot in slots)
            return [server.place.host for server in await asyncio.gather(*launched)]

        assert await places(0, 1, 2) == [urls[0], urls[1], urls[0]]
        restored.kill()
        assert await places(3, 4) == [urls[0], urls[0]]
        assert await runtime.survey() == {"s0", "s2", "s3", "s4"}
        restored.start()

        async def all_are_found() -> bool:
            return await runtime.survey() == {f"s{number}" for number in range(5)}

        await eventually(all_are_found, "the engine is back with its container")
        assert await places(5) == [urls[1]]


async def test_an_engine_that_hangs_is_given_up_and_starts_go_elsewhere(tmp_path, restored, monkeypatch):
    call = Engine.call

    async def impatient(self, method, *args, limit_s=2.0, **options):
        return await call(
            self, method, *args, limit_s=min(limit_s, 2.0) if self.url == restored.url else 60.0, **options
        )

    monkeypatch.setattr(Engine, "call", impatient)
    spec = docker_spec(docker={"engines": (shared_engine().url, restored.url)})
    async with docker_runtimes(tmp_path, spec) as make:
        runtime = make()
        await runtime.survey()
        restored.hang(True)
        try:
            server = await runtime.launch("one", 1, spec, LAUNCH_S)
            assert server.place.host == shared_engine().url
            await runtime.destroy("none", spec, None, 0.0)
        finally:
            restored.hang(False)


async def test_a_gateway_is_ready_while_its_engine_answers(tmp_path, eventually):
    engine = DockerEngine().start()
    table = scripted("docker", docker={"image": "none", "engines": [engine.url]}, command=["serve"])
    try:
        with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", {"boxed": table}) as cluster:
            await asyncio.to_thread(cluster.start)
            async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=30) as client:
                assert (await client.get("/readyz")).json()["runtimes"] == {"docker": "up"}

                async def is_ready() -> bool:
                    return (await client.get("/readyz")).status_code == 200

                async def is_away() -> bool:
                    return not await is_ready()

                engine.kill()
                await eventually(is_away, "the engine is away")
                engine.start()
                await eventually(is_ready, "the engine is back")
    finally:
        engine.stop()
