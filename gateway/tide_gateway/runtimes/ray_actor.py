"""What runs on a cluster's node: one actor per environment server, which owns the server's process.

Sent to the node as it is: it may use the standard library and Ray, and nothing of ours, which need not be installed
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

POLL_S = 0.1
MAX_WORDS_BYTES = 16_384
KILL_S = 5.0

# Runs before the command: the server dies with the thread that started it, and so with the actor.
LAUNCHER = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"cannot execute {command[0]!r}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


class ServerActor:
    """Starts one environment server with the actor's life and kills it at the end of either.

    Args:
        name: the instance's name, which the server's processes carry in TIDE_INSTANCE.
        command: argv with `{announce}` or `{port}`, and `{host}` and `{capacity}`.
        env: further variables of the server; the rest is what Ray's worker has.
        capacity: tasks that the server shall hold.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], capacity: int) -> None:
        import ray

        self._name = name
        self._host = ray.util.get_node_ip_address()
        self._node = str(ray.get_runtime_context().get_node_id())
        self._folder = Path(tempfile.mkdtemp(prefix="tide-ray-"))
        self._announce = self._folder / "announce.json"
        self._port = _free_port(self._host) if any("{port}" in word for word in command) else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        self._over = False
        places = {"announce": str(self._announce), "port": str(self._port), "host": self._host}
        argv = [_fill(word, places | {"capacity": str(capacity)}) for word in command]
        own = {"TIDE_INSTANCE": name, "TIDE_HOST": self._host, "TIDE_CAPACITY": str(capacity)}
        if self._port:
            own["TIDE_PORT"] = str(self._port)
        # A server that uses Ray itself must not take itself for this actor.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        inherited["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
        started = threading.Event()
        # A thread of its own that lasts as long as the server: the death signal is bound to the thread that forks.
        threading.Thread(target=self._own, args=(argv, inherited | dict(env) | own, started), daemon=True).start()
        started.wait()

    async def place(self) -> dict[str, Any]:
        """Where the server listens, once it says so: `{url, host, node, pid, actor}`; or `{fault, words}`.

        `actor` is this process, as `sweep` wants it.

        It does not end by itself while the server is silent: the caller has the deadline.
        """
        while True:
            if self._over or self._process is None:
                return self._last()
            url = f"http://{_bracketed(self._host)}:{self._port}" if self._port else self._announced()
            if url:
                fault = self._loopback_fault(url)
                if fault:
                    return {"fault": fault, "words": self._words()}
                place = {"url": url, "host": self._host, "node": self._node, "pid": self._process.pid}
                return place | {"actor": [os.getpid(), _ticks(os.getpid())]}
            await asyncio.sleep(POLL_S)

    async def exited(self) -> dict[str, Any]:
        """Ends when the server does: `{fault, words}`."""
        while not self._over:  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(POLL_S)
        return self._last()

    async def stop(self, grace_s: float) -> dict[str, Any]:
        """Ask the server to stop, kill its processes after the grace, remove its files: `{over, words}`."""
        process = self._process
        if process is not None and not self._over:
            if grace_s > 0:
                _signal_group(process.pid, signal.SIGTERM)
                await self._over_within(grace_s)
            if not self._over:
                _signal_group(process.pid, signal.SIGKILL)
                await self._over_within(KILL_S)
        words = self._words()
        if self._over:
            shutil.rmtree(self._folder, ignore_errors=True)
        return {"over": self._over, "words": words}

    def _own(self, argv: list[str], env: dict[str, str], started: threading.Event) -> None:
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *argv]
        try:
            with (self._folder / "server.log").open("ab") as out:
                self._process = subprocess.Popen(
                    launcher, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
                )
        except OSError as error:
            self._fault, self._over = f"no process can be started: {error}", True
            return
        finally:
            started.set()
        # Its group is killed before it is reaped: until then nobody else has its number.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        _signal_group(self._process.pid, signal.SIGKILL)
        kill_marked(self._name)
        self._fault, self._over = f"it exited with code {self._process.wait()}", True

    async def _over_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while not self._over and loop.time() < until_s:  # noqa: ASYNC110 (set by a thread)
            await asyncio.sleep(0.02)

    def _last(self) -> dict[str, Any]:
        return {"fault": self._fault, "words": self._words()}

    def _announced(self) -> str:
        try:
            data = json.loads(self._announce.read_bytes())
        except (OSError, ValueError):
            return ""  # not written, or not completely
        url = data.get("url") if isinstance(data, dict) else None
        return url if isinstance(url, str) else ""

    def _loopback_fault(self, url: str) -> str:
        host = None
        if url.startswith("http://"):
            with contextlib.suppress(ValueError):
                host = urlsplit(url).hostname
        if not host:
            return f"it announces {url[:200]!r}; expected http://host:port"
        inside = host in ("localhost", "0.0.0.0", "::", "::1") or host.startswith("127.")  # noqa: S104 (compared)
        if inside and not self._host.startswith("127."):
            return f"it announces {url[:200]!r}, which other machines do not reach; let it listen on {{host}}"
        return ""

    def _words(self) -> str:
        try:
            with (self._folder / "server.log").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_WORDS_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def sweep(name: str, actor: Sequence[Any]) -> None:
    """Run on the node of an actor that hangs: kill what it owns, and its own process.

    Args:
        name: the instance.
        actor: the process's id and its start ticks, which tell it from a later one of the same id.
    """
    kill_marked(name)
    pid, ticks = actor
    if ticks and _ticks(pid) == ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_marked(name: str) -> int:
    """Kill the processes of this machine that carry the instance's name, wherever they went; how many.

    Safe to repeat; a name is given once and never again.
    """
    mark, killed = f"TIDE_INSTANCE={name}".encode(), 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _ticks(pid: int) -> str:
    """When the process started, in clock ticks since the machine did; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _fill(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace("{" + name + "}", value)
    return word


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
