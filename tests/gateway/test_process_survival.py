"""How long server processes live: through the death of a gateway, and never longer than they may."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from runtime_bench_process import marked, process_spec

from tide_gateway import upstream
from tide_gateway.runtimes import Place, launch
from tide_gateway.runtimes.process import ProcessRuntime

# A gateway's process that launches a server, says where, and goes on until it is killed.
PARENT = """
import asyncio, os, sys
from pathlib import Path
from runtime_bench_process import process_spec
from tide_gateway.runtimes.process import ProcessRuntime

async def main(folder, run_dir, outlive_s, command):
    runtime = ProcessRuntime(os.environ, Path(folder) / "logs", folder, Path(run_dir), float(outlive_s))
    server = await runtime.launch("one", 0, process_spec(*command), 20.0)
    if "freeze" in os.environ:
        await runtime.freeze(server, True)
    print(server.place.dumps(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:4], sys.argv[4:]))
"""


@dataclass
class Parents:
    """Gateways in processes of their own, all of one deployment."""

    folder: Path
    run_dir: Path
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return f"{self.folder}/one"

    async def start(
        self, outlive_s: float, *command: str, **variables: str
    ) -> tuple[asyncio.subprocess.Process, Place]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, str(self.folder), str(self.run_dir), str(outlive_s), *command,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        )  # fmt: skip
        self.started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            return process, Place.loads((await process.stdout.readline()).decode())

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        process.kill()
        await process.wait()

    def gateway(self, outlive_s: float) -> ProcessRuntime:
        return ProcessRuntime(os.environ, self.folder / "logs", str(self.folder), self.run_dir, outlive_s)


@pytest.fixture
async def parents(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parents]:
    parents = Parents(tmp_path, tmp_path_factory.mktemp("run"))
    yield parents
    for process in parents.started:
        if process.returncode is None:
            await parents.kill(process)
    runtime = parents.gateway(0.0)
    await runtime.destroy("one", None, None, 0.0)
    await runtime.close()


def with_children(*more: str) -> tuple[str, ...]:
    """A server whose children burn CPU, in a session of their own and as orphans."""
    spin = f"{sys.executable} -I -S -c 'while True: pass'"
    script = f'setsid {spin} & ({spin} &) ; exec "$@"'
    return ("sh", "-c", script, "x", *process_spec().command, *more)


async def test_a_server_survives_a_killed_gateway_and_the_next_one_goes_on_with_its_task(parents):
    process, place = await parents.start(30.0)
    first = parents.gateway(30.0)
    server = await first.attach("one", process_spec(), place, 20.0)
    body = {"environment": "scripted", "key": "k", "task": {}}
    task_id = (await upstream.start(server, body, 10.0))[0].task_id
    await upstream.observe(server, task_id, 0, b'{"role":"assistant"}', 10.0)
    await first.close()
    await parents.kill(process)
    second = parents.gateway(30.0)
    assert await second.survey() == {"one"}
    again = await second.attach("one", process_spec(), place, 20.0)
    assert again.health.incarnation == server.health.incarnation
    assert (await upstream.observe(again, task_id, 1, b'{"role":"assistant"}', 10.0))[1]["info"]["effects"] == 2
    await second.destroy("one", process_spec(), place, 5.0)
    assert marked(parents.mark) == []
    await second.close()


async def test_a_server_lives_on_as_long_as_any_gateway_shows_life(parents, eventually):
    process, place = await parents.start(3.0)
    second = parents.gateway(3.0)
    await second.open()
    beats = set()

    def beaten() -> bool:
        beats.add((parents.run_dir / "alive").stat().st_mtime_ns)
        return len(beats) > 10  # each is 0.6 s or more after the one before: longer than it outlives

    await parents.kill(process)
    await eventually(beaten, "the second gateway shows life")
    await upstream.probe(await second.attach("one", process_spec(), place, 20.0))
    await second.close()
    await eventually(lambda: marked(parents.mark) == [], "it dies without any gateway")
    assert "no gateway for 3 s" in (parents.folder / "logs" / "one.log").read_text()


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
async def test_a_server_without_a_gateway_dies_with_its_whole_tree(parents, eventually, frozen):
    process, _ = await parents.start(2.0, *with_children(), **({"freeze": "1"} if frozen else {}))
    assert len(marked(parents.mark)) == 4  # supervisor, server, two children
    await parents.kill(process)
    await eventually(lambda: marked(parents.mark) == [], "nothing is left")


async def test_servers_that_may_not_outlive_their_gateway_die_with_it(parents, eventually):
    process, _ = await parents.start(0.0, *with_children())
    assert len(marked(parents.mark)) == 4
    await parents.kill(process)
    await eventually(lambda: marked(parents.mark) == [], "nothing is left")


async def test_g08_a_runaway_tree_is_killed(parents, eventually):
    runtime = parents.gateway(30.0)
    server = await runtime.launch("one", 0, process_spec(*with_children()), 20.0)
    body = {"environment": "scripted", "key": "k", "task": {"spin": True, "hang_turn": 0}}
    task_id = (await upstream.start(server, body, 10.0))[0].task_id
    with pytest.raises(TimeoutError):
        await upstream.observe(server, task_id, 0, b'{"role":"assistant"}', 0.2)
    assert len(marked(parents.mark)) == 5
    await runtime.destroy("one", process_spec(), server.place, 0.2)
    assert marked(parents.mark) == []
    await runtime.close()


@pytest.mark.parametrize("attached", [False, True], ids=["launched", "attached"])
async def test_what_a_killed_supervisor_leaves_is_swept(parents, eventually, attached):
    if attached:
        _, place = await parents.start(30.0, *with_children())
        runtime = parents.gateway(30.0)
        server = await runtime.attach("one", process_spec(), place, 20.0)
        await parents.kill(parents.started[0])
    else:
        runtime = parents.gateway(30.0)
        server = await runtime.launch("one", 0, process_spec(*with_children()), 20.0)
    os.kill(server.place.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await server.exited.wait()
    await eventually(lambda: marked(parents.mark) == [], "the server and its orphans are gone")
    await runtime.close()


async def test_a_server_that_dies_takes_its_tree_along(parents, eventually):
    runtime = parents.gateway(30.0)
    server = await runtime.launch("one", 0, process_spec(*with_children()), 20.0)
    (child,) = (pid for pid in launch.descendants(server.place.pid) if b"--uds" in cmdline(pid))
    os.kill(child, signal.SIGKILL)
    async with asyncio.timeout(20):
        await server.exited.wait()
    assert marked(parents.mark) == []
    assert not runtime._folder.places("one").run.exists(), "the supervisor says that nothing is left"
    await runtime.close()


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_half_launched_server_of_another_gateway_is_destroyed_without_its_place(parents, eventually):
    process = asyncio.create_task(parents.start(30.0, sys.executable, "-c", "import time; time.sleep(300) # {uds}"))
    await eventually(lambda: len(marked(parents.mark)) == 2, "it is being launched")
    await parents.kill(parents.started[0])
    with pytest.raises(ValueError):
        await process
    runtime = parents.gateway(30.0)
    await runtime.destroy("one", None, None, 1.0)
    assert await runtime.survey() == set()
    await runtime.close()


@pytest.mark.parametrize("gaps_s", [[0.1] * 40, [0.1, 5000.0, 0.1]], ids=["silence", "suspended"])
def test_a_time_in_which_the_supervisor_itself_was_suspended_is_no_silence(monkeypatch, tmp_path, gaps_s):
    now_s = 0.0
    asked: list[float] = []
    supervisor = launch.Supervisor(0, 2.0, str(tmp_path / "alive"))

    def wait(_signals: set, _timeout_s: float) -> None:
        nonlocal now_s
        now_s += gaps_s.pop(0)
        if not gaps_s:
            supervisor._status = 0

    monkeypatch.setattr(launch.signal, "sigtimedwait", wait)
    monkeypatch.setattr(launch.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(supervisor, "_reap", lambda: True)
    monkeypatch.setattr(supervisor, "_kill_all", lambda: None)
    monkeypatch.setattr(supervisor, "_ask_to_stop", lambda: asked.append(now_s))
    silent = len(gaps_s) > 3
    supervisor.run()
    assert bool(asked) == silent


def test_a_long_log_begins_anew(tmp_path):
    log = tmp_path / "log"
    code = (
        "import sys; from tide_gateway.runtimes import launch\n"
        "launch.MAX_LOG_BYTES = 5000\n"
        "print('x' * 6000, flush=True); launch.cap_log(); print('more', flush=True); launch.cap_log()"
    )
    with log.open("ab") as out:
        os.waitpid(os.posix_spawn(
            sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, out.fileno(), 2)],
        ), 0)  # fmt: skip
    assert log.read_text() == "the log was longer than 5000 bytes and begins anew\nmore\n"
