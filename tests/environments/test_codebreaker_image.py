"""The image of the environment server in Node, run as strictly as the gateway runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import httpx
import pytest
from node_server import FOLDER, ROOT, node_program

pytestmark = pytest.mark.docker

BASE = "tide-base:debian"
NODE_BASE = "tide-test-node:latest"
IMAGE = "tide-test-codebreaker:latest"
STRICT = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--memory=512m")
LIMIT_S = 180


@pytest.fixture(scope="module")
def docker():
    from docker_engine import shared_engine  # here: it needs the docker library

    environment = os.environ | {"DOCKER_HOST": shared_engine().url, "DOCKER_BUILDKIT": "0"}

    def run(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def image(docker, tmp_path_factory) -> str:
    """Built on a base of this machine's own Debian with the Node of a wheel: no registry is reached."""
    docker(sys.executable, "scripts/make_base_image.py", "--if-missing", "--tag", BASE)
    context = tmp_path_factory.mktemp("node-base")
    shutil.copy(node_program(), context / "node")
    (context / "Dockerfile").write_text(f"FROM {BASE}\nCOPY node /usr/local/bin/node\n")
    docker("docker", "build", "--quiet", f"--tag={NODE_BASE}", str(context))
    argument = f"--build-arg=BASE_IMAGE={NODE_BASE}"
    docker("docker", "build", "--quiet", "--network=none", argument, f"--tag={IMAGE}", str(FOLDER))
    return IMAGE


def test_the_image_serves_where_its_variables_say_and_stops_well(docker, image, tmp_path):
    tmp_path.chmod(0o777)  # the container's user is nobody
    mount = f"--volume={tmp_path}:/run/tide"
    words = ["docker", "run", "--detach", *STRICT, mount, "--env=TIDE_UDS=/run/tide/s.sock", "--env=TIDE_CAPACITY=3"]
    container = docker(*words, image)
    try:
        transport = httpx.HTTPTransport(uds=str(tmp_path / "s.sock"), retries=0)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
            health = until_healthy(client, lambda: docker("docker", "logs", container))
            assert health["capacity"] == 3
            started = client.post("/start", json={"environment": "codebreaker", "key": "k", "seed": 7}).json()
            message = {"role": "assistant", "content": "1234"}
            observed = client.post("/observation", json={"task_id": started["task_id"], "turn": 0, "message": message})
            assert observed.json()["turn"] == 1
        docker("docker", "stop", "--time=10", container)
        assert docker("docker", "inspect", "--format={{.State.ExitCode}}", container) == "0"
    finally:
        docker("docker", "rm", "--force", container)


def until_healthy(client: httpx.Client, log) -> dict:
    for _ in range(300):
        try:
            return client.get("/health").json()
        except httpx.TransportError:
            assert "Error" not in log()
    raise AssertionError(log())
