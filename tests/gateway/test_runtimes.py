"""One contract for all runtimes, and what only real processes can show."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tide_gateway import upstream
from tide_gateway.runtimes import LaunchFailed, Runtime
from tide_gateway.runtimes.fake import FakeRuntime
from tide_gateway.runtimes.process import MARK, ProcessRuntime
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.http import TransportError

SERVER = str(Path(__file__).with_name("scripted_server.py"))


def spec_of(kind: str, *words: str) -> EnvironmentSpec:
    command = words or (sys.executable, SERVER, "--uds", "{uds}", "--capacity", "{capacity}")
    return EnvironmentSpec(name="scripted", runtime=kind, command=command if kind == "process" else (), capacity=8)


@pytest.fixture
async def processes(tmp_path):
    runtime = ProcessRuntime(os.environ, tmp_path / "logs")
    yield runtime
    await runtime.close()


@pytest.fixture(params=["fake", "process"])
async def runtime(request, processes):
    return request.param, processes if request.param == "process" else FakeRuntime()


async def launch(runtime: tuple[str, Runtime], name: str = "one"):
    kind, made = runtime
    return await made.launch(name, spec_of(kind), 20.0)


async def test_a_launched_server_is_healthy_and_serves(runtime):
    server = await launch(runtime)
    health = await upstream.probe(server)
    assert (health.incarnation, health.capacity) == (server.health.incarnation, 8)
    body = {"environment": "scripted", "key": "k", "task": {"turns": 1}}
    answer, _ = await upstream.start(server, body, 5.0)
    observed, _ = await upstream.observe(server, answer.task_id, 0, {"role": "assistant"}, 5.0)
    assert observed.terminated
    assert (await upstream.end(server, answer.task_id, "over", 5.0))[0] == 1.0
    await runtime[1].destroy(server, 1.0)


async def test_two_servers_are_two_incarnations(runtime):
    first, second = await asyncio.gather(launch(runtime, "one"), launch(runtime, "two"))
    assert first.health.incarnation != second.health.incarnation


async def test_a_destroyed_server_answers_nobody_and_destroying_it_again_is_no_fault(runtime):
    server = await launch(runtime)
    await runtime[1].destroy(server, 1.0)
    await runtime[1].destroy(server, 1.0)
    assert server.exited.is_set()
    with pytest.raises(TransportError):
        await upstream.probe(server)
    with pytest.raises(upstream.EnvironmentLost):
        await upstream.end(server, "t", "over", 5.0)


async def test_closing_destroys_every_server(runtime):
    servers = [await launch(runtime, "one"), await launch(runtime, "two")]
    await runtime[1].close()
    async with asyncio.timeout(10):
        for server in servers:
            await server.exited.wait() if runtime[0] == "fake" else None
    for server in servers:
        with pytest.raises(TransportError):
            await upstream.probe(server)


async def test_a_killed_server_is_noticed_at_once(processes):
    server = await launch(("process", processes))
    os.kill(server.place.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await server.exited.wait()


async def test_a_server_that_exits_is_quoted(processes):
    spec = spec_of("process", sys.executable, "-c", "import sys; sys.exit('no such level') # {uds}")
    with pytest.raises(LaunchFailed, match=r"exited with code 1 .* no such level"):
        await processes.launch("one", spec, 20.0)


async def test_a_process_that_cannot_be_made_is_a_failed_launch(processes, monkeypatch):
    async def no_process(*_args, **_options):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    with pytest.raises(LaunchFailed, match="Resource temporarily unavailable"):
        await processes.launch("one", spec_of("process", "true", "{uds}"), 20.0)


async def test_a_command_that_does_not_exist_is_named(processes):
    with pytest.raises(LaunchFailed, match="cannot execute 'no-such-command'"):
        await processes.launch("one", spec_of("process", "no-such-command", "{uds}"), 20.0)


async def test_a_server_that_never_listens_is_killed_with_its_children(processes, eventually):
    script = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '300']); time.sleep(300) # {uds}"
    with pytest.raises(LaunchFailed, match="not healthy within 1 s"):
        await processes.launch("never-listens", spec_of("process", sys.executable, "-c", script), 1.0)
    await eventually(lambda: marked("never-listens") == [], "no process is left")


async def test_a_cancelled_launch_leaves_nothing(processes, eventually):
    spec = spec_of("process", sys.executable, "-c", "import time; time.sleep(300) # {uds}")
    launching = asyncio.create_task(processes.launch("cancelled", spec, 20.0))
    await eventually(lambda: marked("cancelled") != [], "it runs")
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    await eventually(lambda: marked("cancelled") == [], "no process is left")


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(processes, eventually):
    script = (
        "import signal, runpy, sys; signal.signal(15, signal.SIG_IGN); sys.argv = sys.argv[1:];"
        f"runpy.run_path({SERVER!r}, run_name='__main__')"
    )
    spec = spec_of("process", sys.executable, "-c", script, "x", "--uds", "{uds}")
    server = await processes.launch("stubborn", spec, 20.0)
    os.kill(server.place.pid, signal.SIGSTOP)
    await processes.destroy(server, 0.1)
    await eventually(lambda: marked("stubborn") == [], "no process is left")


async def test_leftovers_are_found_by_their_mark_and_nobody_else_is_touched(processes, eventually):
    mine = await asyncio.create_subprocess_exec("sleep", "300", env={**os.environ, MARK: "left-a"})
    other = await asyncio.create_subprocess_exec("sleep", "300", env={**os.environ, MARK: "left-b"})
    await eventually(lambda: marked("left-a") and marked("left-b"), "both run")
    assert await processes.remove_leftovers(["left-a", "never-was"]) == 1
    async with asyncio.timeout(10):
        assert await mine.wait() == -signal.SIGKILL
    assert marked("left-b") == [other.pid]
    other.kill()
    await other.wait()


@pytest.mark.parametrize("place", ["announce", "port"])
async def test_servers_may_announce_themselves_or_take_a_port(processes, tmp_path, place):
    module = tmp_path / "guess.py"
    module.write_text(
        "import asyncio, sys, json, pathlib, uvicorn\n"
        f"sys.path.insert(0, {str(Path(SERVER).parent)!r})\n"
        "from scripted_server import App\n"
        "kind, value = sys.argv[1:]\n"
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', int(value) if kind == 'port' else 0))\n"
        "config = uvicorn.Config(App(4), lifespan='off', log_level='warning')\n"
        "if kind == 'announce':\n"
        "    url = f'http://127.0.0.1:{s.getsockname()[1]}'\n"
        "    pathlib.Path(value).write_text(json.dumps({'url': url}))\n"
        "asyncio.run(uvicorn.Server(config).serve(sockets=[s]))\n"
    )
    spec = spec_of("process", sys.executable, str(module), place, "{" + place + "}")
    server = await processes.launch("one", spec, 20.0)
    assert (await upstream.probe(server)).capacity == 4


async def test_the_sockets_folder_is_private_and_taken_over_after_a_crash(processes, tmp_path):
    server = await launch(("process", processes))
    folder = Path(server.channel.base_url.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    other = ProcessRuntime(os.environ, tmp_path / "logs")  # the same place, as after kill -9
    assert other._folder() == folder
    assert list(folder.iterdir()) == []
    folder.chmod(0o777)
    third = ProcessRuntime(os.environ, tmp_path / "logs")
    assert third._folder() != folder
    await third.close()
    await other.close()
    assert not folder.exists()


def marked(name: str) -> list[int]:
    """Processes that carry the instance's name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={name}".encode() in variables:
                found.append(int(entry.name))
    return found
