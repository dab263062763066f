"""Environment servers as child processes: argv lists, own process groups, bound to the gateway's life."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tide_gateway.runtimes import LaunchFailed, Place, Server
from tide_gateway.specs import EnvironmentSpec
from tide_sdk import codec
from tide_sdk.http import LeanClient, TransportError
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

MARK = "TIDE_INSTANCE"
"""Variable with the instance's name: every descendant of a server carries it, so that leftovers are found."""

_POLL_S = 0.03
_MAX_POLL_S = 0.25
_KILL_S = 2.0
_LAUNCHER = str(Path(__file__).with_name("launch.py"))

log = logging.getLogger(__name__)


class ProcessRuntime:
    """Starts environment servers as processes of this machine.

    Args:
        environ: the variables that servers inherit.
        log_dir: folder of the servers' log files.
    """

    def __init__(self, environ: Mapping[str, str], log_dir: Path) -> None:
        self._environ = dict(environ)
        self._log_dir = log_dir
        self._run_dir: Path | None = None
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._number = 0

    async def launch(self, name: str, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a server and wait until it is healthy; see `Runtime.launch`."""
        folder = self._folder()
        self._number += 1
        places = {
            "uds": str(folder / f"{self._number}.sock"),
            "announce": str(folder / f"{self._number}.json"),
            "capacity": str(spec.tasks_per_server),
        }
        if any("{port}" in word for word in spec.command):
            places["port"] = str(_free_port())
        argv = [_fill(word, places) for word in spec.command]
        log_path = self._log_dir / f"{name}.log"
        try:
            process = await self._spawn(name, argv, spec, log_path)
        except OSError as error:
            raise LaunchFailed(f"no process can be started: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                channel, health = await self._until_healthy(process, places, spec)
        except TimeoutError:
            await self._kill(name, process, 0.0)
            raise LaunchFailed(
                f"the environment server was not healthy within {timeout_s:g} s{_last_words(log_path)}"
            ) from None
        except LaunchFailed as error:
            await self._kill(name, process, 0.0)
            raise LaunchFailed(f"{error}{_last_words(log_path)}") from None
        except BaseException:
            await asyncio.shield(self._kill(name, process, 0.0))
            raise
        server = Server(name=name, channel=channel, health=health, place=Place(channel.base_url, pid=process.pid))
        self._watchers[name] = asyncio.create_task(self._watch(server, process), name=f"tide-watch-{name}")
        return server

    async def destroy(self, server: Server, grace_s: float) -> None:
        """Stop a server and all its children; see `Runtime.destroy`."""
        process = self._processes.get(server.name)
        if process is not None:
            await self._kill(server.name, process, grace_s)
        server.exited.set()
        await server.channel.aclose()

    async def remove_leftovers(self, names: Iterable[str]) -> int:
        """Kill every process that carries one of the names; see `Runtime.remove_leftovers`."""
        marks = {f"{MARK}={name}".encode() for name in names}
        return await asyncio.to_thread(_kill_marked, marks) if marks else 0

    async def close(self) -> None:
        """Kill what still runs and remove the sockets."""
        await asyncio.gather(*(self._kill(name, process, 0.0) for name, process in list(self._processes.items())))
        for watcher in self._watchers.values():
            watcher.cancel()
        self._watchers.clear()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    def _folder(self) -> Path:
        if self._run_dir is None:
            self._run_dir = _make_run_dir(self._log_dir)
        return self._run_dir

    async def _spawn(
        self, name: str, argv: list[str], spec: EnvironmentSpec, log_path: Path
    ) -> asyncio.subprocess.Process:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        environ = self._environ | spec.env | {MARK: name}
        # The commands of our own installation are found even where its environment is not activated.
        environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
        launcher = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *argv]
        with log_path.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    async def _until_healthy(
        self, process: asyncio.subprocess.Process, places: Mapping[str, str], spec: EnvironmentSpec
    ) -> tuple[LeanClient, HealthResponse]:
        pause_s = _POLL_S
        while True:
            if process.returncode is not None:
                raise LaunchFailed(f"the environment server exited with code {process.returncode} before it was ready")
            url = _url_of(places, spec)
            if url is not None:
                channel = LeanClient(url, max_in_flight=4096, timeout_s=30.0)
                try:
                    response = await channel.request("GET", "/health", timeout_s=2.0)
                    if response.status == 200:
                        return channel, _read_health(response.body)
                except TransportError:
                    pass  # not listening yet: ask again until the start clock says no
                except BaseException:
                    await channel.aclose()
                    raise
                await channel.aclose()
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_POLL_S, pause_s * 1.3)

    async def _watch(self, server: Server, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._processes.get(server.name) is process:
            log.warning("environment server %s (pid %d) exited with code %d", server.name, process.pid, code)
            self._processes.pop(server.name, None)
            await self._kill_descendants(server.name, process.pid)
        self._watchers.pop(server.name, None)
        server.exited.set()

    async def _kill(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        self._processes.pop(name, None)
        if process.returncode is None and grace_s > 0:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        await self._kill_descendants(name, process.pid)
        try:
            await asyncio.wait_for(process.wait(), _KILL_S)
        except TimeoutError:
            log.error("environment server %s (pid %d) does not die", name, process.pid)

    async def _kill_descendants(self, name: str, pid: int) -> None:
        """Kill the server's group, and what left the group but still carries its mark."""
        _signal_group(pid, signal.SIGKILL)
        await self.remove_leftovers([name])


def _make_run_dir(log_dir: Path) -> Path:
    """A private folder for sockets, named after the log folder: a killed gateway's is found and emptied by the next.

    It lies in the system's temporary folder, since a unix socket's path has 107 bytes at most.
    """
    digest = hashlib.sha256(str(log_dir.absolute()).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"tide-{os.getuid()}-{digest}"
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            # Somebody else made it: a name in a shared folder is no proof.
            return Path(tempfile.mkdtemp(prefix="tide-"))
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def _fill(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace("{" + name + "}", value)
    return word


def _url_of(places: Mapping[str, str], spec: EnvironmentSpec) -> str | None:
    """Where the server listens, None while it has not said so."""
    words = " ".join(spec.command)
    if "{uds}" in words:
        return f"unix:{places['uds']}" if Path(places["uds"]).exists() else None
    if "{port}" in words:
        return f"http://127.0.0.1:{places['port']}"
    try:
        data = codec.loads(Path(places["announce"]).read_bytes())
    except (OSError, ValueError):
        return None  # not written, or not completely
    url = data.get("url") if isinstance(data, dict) else None
    return url if isinstance(url, str) else None


def _read_health(body: bytes) -> HealthResponse:
    try:
        health = HealthResponse.model_validate_json(body, strict=True)
    except ValueError as error:
        raise LaunchFailed(f"GET /health of the environment server is not the contract's: {error}") from error
    if health.contract != CONTRACT_VERSION:
        raise LaunchFailed(f"the environment server speaks contract {health.contract}, not {CONTRACT_VERSION}")
    return health


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _last_words(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2048))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    last = f"; its last words: {lines[-1][:300]}" if lines else ""
    return f"{last} (log: {path})"


def _kill_marked(marks: set[bytes]) -> int:
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if not marks.isdisjoint(variables):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed
