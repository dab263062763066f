"""Launches that fail, are broken off or meet leftovers: a typed error, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from docker_engine import IMAGE, OTHER_IMAGE, docker_runtimes, docker_spec, shared_engine

from tide_gateway import upstream
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker_container import container_name
from tide_gateway.runtimes.docker_engines import Engine
from tide_gateway.runtimes.docker_sdk import EngineRefused

pytestmark = pytest.mark.docker

LAUNCH_S = 60.0
SLEEP = ("python3", "-c", "import time; print('sleeping', flush=True); time.sleep(300)")


@pytest.fixture
async def runtime(tmp_path):
    async with docker_runtimes(tmp_path) as make:
        yield make()


def python(code: str, **changes):
    return docker_spec(command=("python3", "-c", code), **changes)


async def left_of(runtime) -> tuple[set[str], list[Path]]:
    run_dir = runtime._ways._run_dir
    return await runtime.survey(), list(run_dir.iterdir()) if run_dir.exists() else []


async def test_a_server_that_exits_is_quoted_and_its_log_is_kept(runtime, tmp_path):
    spec = python("import sys; print('loading', file=sys.stderr); sys.exit('no such level')")
    with pytest.raises(LaunchFailed, match="exited with code 1; its last words: no such level") as caught:
        await runtime.launch("one", 0, spec, LAUNCH_S)
    log = tmp_path / "logs" / "one.log"
    assert str(log) in str(caught.value)
    assert set(log.read_text().splitlines()) == {"loading", "no such level"}
    assert await left_of(runtime) == (set(), [])


async def test_g10_a_server_that_never_listens_is_removed_and_its_log_is_kept(runtime, tmp_path):
    with pytest.raises(LaunchFailed, match="not healthy within 4 s; its last words: sleeping"):
        await runtime.launch("one", 0, docker_spec(command=SLEEP), 4.0)
    assert await left_of(runtime) == (set(), [])
    assert shared_engine().client().containers(all=True, filters={"label": "tide.instance=one"}) == []


async def test_g13_one_start_that_hangs_holds_up_no_other(runtime):
    hanging = asyncio.create_task(runtime.launch("hangs", 0, docker_spec(command=SLEEP), LAUNCH_S))
    servers = await asyncio.gather(
        *(runtime.launch(f"s{number}", number, docker_spec(), LAUNCH_S) for number in (1, 2, 3))
    )
    assert len(servers) == 3
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_a_long_log_is_kept_within_bounds(runtime, tmp_path):
    spec = python("import sys\nfor n in range(40000): print(n, 'x' * 1000)\nprint('the end'); sys.exit(1)")
    with pytest.raises(LaunchFailed, match="the end"):
        await runtime.launch("one", 0, spec, LAUNCH_S)
    assert 128 * 1024 < (tmp_path / "logs" / "one.log").stat().st_size <= 256 * 1024


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"command": ("no-such-command",)}, "no-such-command"),
        ({"docker": {"mounts": ["/tide-missing-folder:/data"]}}, "/tide-missing-folder"),
        ({"docker": {"image": "no-such-image:1"}}, "'no-such-image:1' is not on the engine"),
        ({"docker": {"image": OTHER_IMAGE}}, "built for linux/s390x, but the engine .* wants linux/"),
        ({"docker": {"runtime": "no-such-runtime"}}, "no-such-runtime"),
    ],
    ids=["command", "mount", "image", "architecture", "runtime"],
)
async def test_what_the_engine_cannot_start_is_named(runtime, spec, words):
    with pytest.raises(LaunchFailed, match=words):
        await runtime.launch("one", 0, docker_spec(**spec), LAUNCH_S)
    assert await left_of(runtime) == (set(), [])


async def test_an_image_that_no_registry_has_is_a_failed_launch(runtime):
    # 127.0.0.1:1 is nobody's registry.
    spec = docker_spec(docker={"image": "127.0.0.1:1/maze:1", "pull": "missing"})
    with pytest.raises(LaunchFailed, match=r"'127\.0\.0\.1:1/maze:1' cannot be pulled on the engine"):
        await runtime.launch("one", 0, spec, LAUNCH_S)


async def test_a_leftover_of_the_same_name_makes_room(runtime):
    client = shared_engine().client()
    name = container_name(runtime._deployment, "one")
    old = client.create_container(IMAGE, ["sleep", "300"], name=name)["Id"]
    client.start(old)
    server = await runtime.launch("one", 0, docker_spec(), LAUNCH_S)
    assert server.place.handle != old
    assert not server.exited.is_set()
    await upstream.probe(server)


async def test_an_engine_that_stumbles_over_creating_is_asked_again(runtime, monkeypatch):
    call, stumbles = Engine.call, iter([500, 503])

    async def stumbling(self, method, *args, **options):
        if method == "create_container_from_config" and (status := next(stumbles, None)) is not None:
            raise EngineRefused(status, "device or resource busy")
        return await call(self, method, *args, **options)

    monkeypatch.setattr(Engine, "call", stumbling)
    await upstream.probe(await runtime.launch("one", 0, docker_spec(), LAUNCH_S))


@pytest.mark.parametrize("point", ["inspect_image", "create_container_from_config", "start", "running"])
async def test_a_launch_that_is_cancelled_at_any_point_leaves_nothing(runtime, monkeypatch, point):
    call, reached = Engine.call, asyncio.Event()

    async def marking(self, method, *args, **options):
        if method == point:
            reached.set()
        answer = await call(self, method, *args, **options)
        if method == "start" and point == "running":
            reached.set()
        return answer

    monkeypatch.setattr(Engine, "call", marking)
    launching = asyncio.create_task(runtime.launch("one", 0, docker_spec(command=SLEEP), LAUNCH_S))
    async with asyncio.timeout(LAUNCH_S):
        await reached.wait()
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert await left_of(runtime) == (set(), [])


async def test_a_gateway_killed_between_create_and_reply_leaves_what_a_survey_names(runtime, tmp_path):
    code = """
import asyncio, os, signal, sys
from pathlib import Path
from docker_engine import docker_spec
from tide_gateway.runtimes import docker_engines
from tide_gateway.runtimes.docker import DockerRuntime
from tide_gateway.specs import EnvironmentSpec

spec = EnvironmentSpec.model_validate_json(sys.argv[3])
real = docker_engines.translated

def killed(function, connect):
    answer = real(function, connect)
    if isinstance(answer, dict) and "Id" in answer and "Warnings" in answer:
        os.kill(os.getpid(), signal.SIGKILL)  # the engine has created it, and nobody has heard
    return answer

docker_engines.translated = killed
runtime = DockerRuntime(sys.argv[1], Path("logs"), Path(sys.argv[2]), {}, [spec])
asyncio.run(runtime.launch("orphan", 0, spec, 60.0))
"""
    spec = docker_spec()
    argv = [runtime._deployment, str(runtime._ways._run_dir), spec.model_dump_json()]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, *argv], env=environ, cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert await runtime.survey() == {"orphan"}
    await runtime.destroy("orphan", spec, None, 1.0)
    assert await left_of(runtime) == (set(), [])
