"""Private Docker engines for tests: started on a folder of their own, with an image made of this machine's files."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker
import uvicorn
from docker.errors import DockerException

import tide_gateway
import tide_sdk
from tide_gateway.runtimes.docker import DockerRuntime
from tide_gateway.specs import EnvironmentSpec

ROOT = Path(__file__).parents[2]
IMAGE = "tide-test-base:latest"
OTHER_IMAGE = "tide-test-other:latest"
"""An empty one for another architecture."""
READY_S = 60.0
STOP_S = 60.0
_FOLDERS = {
    "gateway": Path(tide_gateway.__file__).parents[1],
    "sdk": Path(tide_sdk.__file__).parents[1],
    "site": Path(uvicorn.__file__).parents[1],
    "tests": ROOT / "tests" / "gateway",
}
COMMAND = ("python3", "/tide/tests/scripted_server.py", "--uds", "{uds}", "--capacity", "{capacity}")
_PR_SET_PDEATHSIG = 1


class DockerEngine:
    """One engine without networks of its own at the start; it ends with the thread that starts it: the main one.

    Args:
        flags: further flags of the engine.
    """

    def __init__(self, *flags: str) -> None:
        # Short, since sockets lie in it.
        self.folder = Path(tempfile.mkdtemp(prefix="tide-engine-"))
        self.url = f"unix://{self.folder}/docker.sock"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> DockerEngine:
        """Start it and wait until it answers."""
        folder = self.folder
        argv = ["dockerd", "-H", self.url, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        argv += ["--pidfile", f"{folder}/dockerd.pid", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        # No bridge at the start: several engines of one machine would fight over its name.
        argv += ["--ip-masq=false", "--bridge=none", "--shutdown-timeout=3", *self._flags]
        prctl = ctypes.CDLL(None).prctl
        with (folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )  # fmt: skip
        self._until(self._answers, READY_S, "it answers")
        return self

    def client(self) -> Any:
        """The library's own client, to look behind the runtime's back."""
        return docker.APIClient(self.url, timeout=60)

    def hang(self, hung: bool) -> None:
        """Stop or continue the engine's process: it takes connections and answers none."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if hung else signal.SIGCONT)

    def kill(self) -> None:
        """Kill the engine as a crash does; its containers' processes may live on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)
        # Its containerd dies with it. Where nobody reaps that, the next engine would wait for its corpse.
        (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def restart(self) -> None:
        """Stop the engine, politely, and start it again."""
        self.terminate()
        self.start()

    def terminate(self) -> None:
        """Stop the engine; its containers end too, but for `--live-restore`."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(STOP_S)

    def stop(self) -> None:
        """Remove all containers, stop it and remove its folder."""
        if self._process is not None:
            if self._process.poll() is not None:
                self.start()  # what a killed engine left runs still
            with contextlib.suppress(DockerException):
                client = self.client()
                for container in client.containers(all=True):
                    client.remove_container(container["Id"], force=True, v=True)
                for network in client.networks():
                    if network["Name"].startswith("tide-"):
                        client.remove_network(network["Id"])
            self.terminate()
        # Engines leave mounts of network namespaces behind.
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if Path(mount).is_relative_to(self.folder)]):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True, timeout=STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"dockerd ended: {(self.folder / 'dockerd.log').read_text()[-2000:]}")
        with contextlib.suppress(DockerException, OSError):
            return docker.APIClient(self.url, timeout=5).ping()
        return False

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {limit_s:g} s until {what}")
            time.sleep(0.1)


def engine_with_images(*flags: str) -> DockerEngine:
    """A running engine with the test images."""
    engine = DockerEngine(*flags).start()
    words = ["docker", "-H", engine.url, "import", str(_base_archive()), IMAGE]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    for line in engine.client().load_image(_foreign_archive()):
        assert "error" not in line, line
    return engine


@functools.cache
def shared_engine() -> DockerEngine:
    """The engine of this test run; tests must not stop it."""
    engine = engine_with_images()
    atexit.register(engine.stop)
    return engine


def docker_spec(engine: DockerEngine | None = None, **changes: Any) -> EnvironmentSpec:
    """The scripted environment as a container.

    Args:
        engine: the only engine; None takes the shared one.
        changes: of the environment; those of its docker table under `docker`.
    """
    options = {
        "image": IMAGE,
        "engines": ((engine or shared_engine()).url,),
        "mounts": [f"{folder}:/tide/{name}" for name, folder in _FOLDERS.items()],
        "pull": "never",
    } | changes.pop("docker", {})
    path = ":".join(f"/tide/{name}" for name in ("gateway", "sdk", "site"))
    values = {
        "name": "scripted",
        "runtime": "docker",
        "command": COMMAND,
        "capacity": 8,
        "env": {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    } | changes
    return EnvironmentSpec.model_validate(values | {"docker": options})


@contextlib.asynccontextmanager
async def docker_runtimes(folder: Path, *specs: EnvironmentSpec) -> AsyncIterator[Callable[[], DockerRuntime]]:
    """Makes runtimes of one new deployment, as several gateways have them; nothing of it is left.

    Args:
        folder: for logs.
        specs: whose engines are cleaned; none takes the shared one's.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="tide-run-"))
    deployment = f"test-{secrets.token_hex(4)}"
    made: list[DockerRuntime] = []

    def make() -> DockerRuntime:
        made.append(DockerRuntime(deployment, folder / "logs", run_dir, {}, specs or [docker_spec()]))
        return made[-1]

    try:
        yield make
    finally:
        last = make()
        names = await last.survey()
        await asyncio.gather(*(last.destroy(name, None, None, 0.0) for name in names))
        for runtime in made:
            await runtime.close()
        shutil.rmtree(run_dir, ignore_errors=True)


def inside(engine: DockerEngine, container_id: str, code: str) -> str:
    """Run Python code in a container, as its user and under its limits; what it printed, tracebacks included."""
    client = engine.client()
    made = client.exec_create(container_id, ["python3", "-I", "-c", code])
    return client.exec_start(made["Id"]).decode()


def _base_archive() -> Path:
    script = ROOT / "scripts" / "make_base_image.py"
    python = Path("/usr/bin/python3").resolve().stat()
    digest = hashlib.sha256(script.read_bytes() + f"{python.st_mtime_ns} {python.st_size}".encode()).hexdigest()[:12]
    archive = Path(tempfile.gettempdir()) / f"tide-test-base-{os.getuid()}-{digest}.tar"
    if not archive.exists():
        part = archive.with_suffix(f".{os.getpid()}")
        subprocess.run([sys.executable, str(script), "--output", str(part)], check=True, timeout=300)
        part.replace(archive)
    return archive


def _foreign_archive() -> bytes:
    """An image archive, as `docker load` reads it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    config = {"architecture": "s390x", "os": "linux", "config": {}, "rootfs": rootfs, "history": [{}]}
    manifest = [{"Config": "config.json", "RepoTags": [OTHER_IMAGE], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
        "layer.tar": layer.getvalue(),
    }
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()
