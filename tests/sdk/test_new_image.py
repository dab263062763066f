"""The image of a project that `tide-env new` wrote: built offline, run strictly, killed and checked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tide_sdk import cli

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 300
STRICT = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
OFFLINE = ("--network=none", "--build-arg=PIP_NO_INDEX=1", "--build-arg=PIP_FIND_LINKS=/wheels")
FILL = """
import sys
from pathlib import Path
from make_base_image import python_name
from make_wheelhouse import make_wheelhouse
make_wheelhouse(Path(sys.argv[1]), "gateway", python_name().removeprefix("python"))
"""
DRIVE = ["--task", '{"highest": 3}', "--action", "0", *(w for n in "123" for w in ("--end-action", n))]


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def docker():
    from docker_engine import shared_engine  # here: it needs the docker library

    environment = os.environ | {"DOCKER_HOST": shared_engine().url, "DOCKER_BUILDKIT": "0"}
    return lambda *words, **options: run("docker", *words, env=environment, **options)


@pytest.fixture(scope="module")
def image(docker, tmp_path_factory) -> str:
    from docker_engine import IMAGE

    project = tmp_path_factory.mktemp("new") / "maze"
    assert cli.main(["new", "maze", "--path", str(project)]) == 0
    # A wheelhouse of its own: other tests fill and use the repository's at the same time.
    scripts = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    run(sys.executable, "-c", FILL, str(project / "wheels"), env=scripts)
    wheel = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(project / "wheels")]
    run(*wheel, str(ROOT))
    docker("build", "--quiet", *OFFLINE, f"--build-arg=BASE_IMAGE={IMAGE}", "--tag=tide-test-maze", str(project))
    return "tide-test-maze"


def test_it_speaks_the_contract_also_after_its_container_was_killed(docker, image, capsys):
    with tempfile.TemporaryDirectory(prefix="tide-") as private:
        folder = Path(private, "run")  # short, and open to the container's user inside a folder that is not
        folder.mkdir()
        folder.chmod(0o777)
        mount, uds = f"--volume={folder}:/run/tide", "--env=TIDE_UDS=/run/tide/env.sock"
        name = docker("run", "--detach", "--restart=always", *STRICT, mount, uds, "--env=TIDE_CAPACITY=8", image)
        try:
            assert docker("inspect", "--format={{.Config.User}}", name) == "65534:65534"
            pid = docker("inspect", "--format={{.State.Pid}}", name)
            code = cli.main(["check", *DRIVE, "--pid", pid, "--boot-s", "60", f"unix:{folder}/env.sock"])
            shown = capsys.readouterr().out
            assert code == 0, shown
            assert "maze, capacity 8" in shown
            assert "pass  kill.lost" in shown
        finally:
            docker("rm", "--force", "--volumes", name)


def test_the_wheel_of_the_sdk_brings_the_templates_along(docker, image):
    words = docker("run", "--rm", *STRICT, image, "tide-env", "new", "maze", "--path", "/tmp/maze")
    assert words.startswith("/tmp/maze: begin with maze/environment.py")
