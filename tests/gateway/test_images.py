"""The images: built offline on the machine's own base, and run as strictly as the gateway runs them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from tide_gateway.settings import load_settings
from tide_sdk.client import GatewayClient
from tide_sdk.http import LeanClient
from tide_sdk.wire import HealthResponse

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
BASE = "tide-base:debian"
OFFLINE = ("--network=none", f"--build-arg=BASE_IMAGE={BASE}", "--build-arg=PIP_NO_INDEX=1")
LIMIT_S = 60
BUILD_LIMIT_S = 300
STRICT = (
    "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none",
    "--pids-limit=256", "--memory=512m",
)  # fmt: skip
SECRETS = {"TIDE_POSTGRES_PASSWORD": "pass$word", "TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef"}


def run(*command: str, limit_s: float = LIMIT_S, **options) -> str:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, text=True, timeout=limit_s, cwd=ROOT, **(pipes | options))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{(done.stderr or '')[-4000:]}"
    return done.stdout.strip()


def takes_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.fixture(scope="module")
def engine_url() -> str:
    from docker_engine import shared_engine  # here: it needs the docker library

    return shared_engine().url


@pytest.fixture(scope="module")
def docker(engine_url: str) -> Callable[..., str]:
    environment = os.environ | {"DOCKER_HOST": engine_url, "DOCKER_BUILDKIT": "0"}
    return lambda *words, **options: run("docker", *words, env=environment, **options)


@pytest.fixture(scope="module")
def build(docker, engine_url: str) -> Callable[..., str]:
    """Builds a Dockerfile once and gives the image's name."""
    environment = os.environ | {"DOCKER_HOST": engine_url}
    run(sys.executable, "scripts/make_base_image.py", "--if-missing", "--tag", BASE, env=environment)
    run(sys.executable, "scripts/make_wheelhouse.py", limit_s=BUILD_LIMIT_S)
    built: set[str] = set()

    def build_once(name: str, *options: str) -> str:
        tag = f"tide-test-{name}"
        if tag not in built:
            arguments = [*OFFLINE, "--build-arg=PIP_FIND_LINKS=/wheelhouse", *options, f"--tag={tag}", "."]
            docker("build", "--quiet", f"--file=docker/Dockerfile.{name}", *arguments, limit_s=BUILD_LIMIT_S)
            built.add(tag)
        return tag

    return build_once


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    # Short, and open to the container's user inside a folder that is not.
    with tempfile.TemporaryDirectory(prefix="tide-") as private:
        folder = Path(private, "run")
        folder.mkdir()
        folder.chmod(0o777)
        yield folder


@pytest.fixture
def until(docker) -> Callable[[str, Callable[[], object]], None]:
    """Waits for a condition while the container lives."""

    def wait(name: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if docker("inspect", "--format={{.State.Running}}", name) != "true" or time.monotonic() > deadline:
                pytest.fail(docker("logs", name, stderr=subprocess.STDOUT), pytrace=False)
            time.sleep(0.1)

    return wait


@pytest.fixture
def is_healthy(docker) -> Callable[[str], bool]:
    """Whether the image's own check passes now; the engine would wait for it ten seconds."""

    def ask(name: str) -> bool:
        check = json.loads(docker("inspect", "--format={{json .Config.Healthcheck.Test}}", name))
        assert check[0] == "CMD"
        with contextlib.suppress(AssertionError):
            docker("exec", name, *check[1:])
            return True
        return False

    return ask


@pytest.fixture
def container(docker) -> Iterator[Callable[..., str]]:
    """Starts containers and removes them in the end."""
    started: list[str] = []

    def start(*words: str) -> str:
        started.append(docker("run", "--detach", *words))
        return started[-1]

    yield start
    if started:
        docker("rm", "--force", "--volumes", *started)


async def test_an_environment_plays_a_whole_task_on_a_socket_without_network_or_anything_to_write(
    build, docker, container, until, socket_folder
):
    image = build("environment")
    mount = f"--volume={socket_folder}:/run/tide"
    variables = ("--env=TIDE_UDS=/run/tide/env.sock", "--env=TIDE_CAPACITY=3")
    name = container(*STRICT, "--user=65534:65534", mount, *variables, image)
    path = socket_folder / "env.sock"
    until(name, lambda: takes_connections(path))
    async with LeanClient(f"unix:{path}") as lean, GatewayClient(f"unix:{path}") as client:
        health = HealthResponse.model_validate(await lean.json("GET", "/health"))
        assert (health.environment, health.capacity) == ("babyai", 3)
        task = await client.start("babyai", "k", task={"expert": True}, seed=3)
        answer, turn = task, 0
        while turn == 0 or not (answer.terminated or answer.truncated):
            action = answer.messages[-1].model_dump()["expert_action"]
            answer = await client.observe(task.task_id, turn, {"role": "assistant", "content": action})
            turn += 1
        assert answer.info["success"]
        assert (await client.end(task.task_id)).reward > 0.5
    docker("stop", "--time=10", name)
    assert docker("inspect", "--format={{.State.ExitCode}}", name) == "0"
    assert not path.exists()


async def test_an_environment_listens_on_its_port_where_no_socket_is_named(build, docker, container, until):
    name = container(*STRICT, build("environment"))
    code = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/health', timeout=5).read().decode())"

    def ask() -> str:
        with contextlib.suppress(AssertionError):
            return docker("exec", name, "python", "-c", code)
        return ""

    until(name, ask)
    assert json.loads(ask())["environment"] == "babyai"
    assert docker("exec", name, "python", "-c", "import os; print(os.getuid(), os.getgid())") == "65534 65534"


def test_the_gateway_is_healthy_by_its_own_check_and_writes_only_its_data(build, docker, container, until, is_healthy):
    image = build("gateway")
    config = f"--volume={ROOT / 'examples' / 'environments.toml'}:/etc/tide/environments.toml:ro"
    tokens = f"--env=TIDE_GATEWAY_TOKENS={SECRETS['TIDE_GATEWAY_TOKENS']}"
    name = container(*STRICT, config, tokens, image)
    until(name, lambda: is_healthy(name))
    assert docker("exec", name, "python", "-c", "import os; print(os.getuid())") == "10001"
    found = docker("exec", name, "python", "-c", "import os; print(*os.listdir('/data'))").split()
    assert "tide-gateway.db" in found
    docker("stop", "--time=10", name)
    assert docker("inspect", "--format={{.State.ExitCode}}", name) == "0"


@pytest.mark.postgres
def test_the_gateway_serves_on_postgresql_as_compose_runs_it(build, docker, container, until, is_healthy, postgres):
    url = postgres.create_database()
    socket = f"--volume={postgres.folder}/.s.PGSQL.5432:/pg/.s.PGSQL.5432"
    config = f"--volume={ROOT / 'examples' / 'environments.toml'}:/etc/tide/environments.toml:ro"
    tokens = f"--env=TIDE_GATEWAY_TOKENS={SECRETS['TIDE_GATEWAY_TOKENS']}"
    database = f"--database={url.replace(str(postgres.folder), '/pg')}"
    serve = (
        "tide-gateway",
        "serve",
        "--config=/etc/tide/environments.toml",
        "--host=0.0.0.0",
        "--data=/data",
        "--keep",
    )
    name = container(*STRICT, "--init", socket, config, tokens, build("gateway"), *serve, database)
    until(name, lambda: is_healthy(name))
    code = "import os, sys; print(*sorted(os.listdir('/data')))"
    assert "tide-gateway.db" not in docker("exec", name, "python", "-c", code).split()
    docker("stop", "--time=10", name)
    assert docker("inspect", "--format={{.State.ExitCode}}", name) == "0"


def test_a_gateway_that_nobody_has_a_key_of_refuses_to_serve_other_machines(build, docker):
    config = f"--volume={ROOT / 'examples' / 'environments.toml'}:/etc/tide/environments.toml:ro"
    with pytest.raises(AssertionError, match="only a loopback address is served"):
        docker("run", "--rm", *STRICT, config, build("gateway"))


def test_the_trainers_file_builds(build, docker):
    # Without extras: the trainer's own packages are gigabytes.
    image = build("trainer", "--build-arg=EXTRAS=", "--build-arg=APT_PACKAGES=")
    assert docker("run", "--rm", *STRICT, "--entrypoint=tide-env", image, "--help").startswith("usage: tide-env")
    shown = json.loads(docker("inspect", "--format={{json .Config}}", image))
    assert (shown["User"], shown["Entrypoint"]) == ("10001:10001", ["tide-train"])


def test_only_what_images_need_is_sent_to_the_engine(docker, tmp_path):
    (tmp_path / "Dockerfile").write_text('FROM scratch\nCOPY . /context\nCMD ["none"]\n')
    image = docker("build", "--quiet", "--network=none", f"--file={tmp_path / 'Dockerfile'}", ".")
    name = docker("create", "--network=none", image)
    try:
        docker("export", f"--output={tmp_path / 'files.tar'}", name)
    finally:
        docker("rm", name)
        docker("rmi", image)
    with tarfile.open(tmp_path / "files.tar") as archive:
        names = [member.name.split("/")[1:] for member in archive if member.name.startswith("context/")]
    assert {parts[0] for parts in names if parts[0]} - {"build"} == {
        "LICENSE", "README.md", "pyproject.toml", "alembic", "environments", "gateway", "sdk", "trainer"
    }  # fmt: skip
    assert {parts[1] for parts in names if parts[0] == "build" and len(parts) > 1} <= {"wheelhouse"}
    assert not [parts for parts in names if parts[-1].endswith(".pyc")]


@pytest.fixture
def compose() -> Callable[..., subprocess.CompletedProcess[str]]:
    files = ["--file=docker/compose.yaml"]

    def config(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
        command = ["docker-compose", *files, *more, "config"]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment)

    return config


@pytest.mark.parametrize("missing", sorted(SECRETS))
def test_compose_has_no_default_for_a_secret(compose, missing):
    done = compose(**{name: value for name, value in SECRETS.items() if name != missing})
    assert done.returncode != 0
    assert "docker/README.md tells how" in done.stderr


def test_compose_is_valid_and_publishes_on_the_loopback_address_only(compose):
    done = compose(**SECRETS)
    assert done.returncode == 0, done.stderr
    published = [line.strip() for line in done.stdout.splitlines() if line.strip().endswith("/tcp")]
    assert published == ["- 127.0.0.1:8800:8800/tcp"]
    assert "docker.sock" not in done.stdout


def test_the_engines_socket_is_handed_over_only_on_request(compose):
    done = compose("--file=docker/compose.engine.yaml", TIDE_ENGINE_GROUP="999", **SECRETS)
    assert done.returncode == 0, done.stderr
    assert "/var/run/docker.sock:/var/run/docker.sock:rw" in done.stdout


def test_the_environments_of_compose_are_valid():
    assert load_settings(ROOT / "docker" / "environments.toml", {}).environments["babyai"].runtime == "remote"
