"""Finds environment servers from outside, by the marks in their environment, and removes what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

COOKIE = "TIDE_TEST_CLUSTER"
"""Variable that a test's cluster puts into the environment of all its servers."""
MARK = "TIDE_INSTANCE"
"""Variable with `DEPLOYMENT/INSTANCE` or the instance's name, which the gateway sets."""
ENGINE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class MarkedServer:
    """One environment server that exists.

    Attributes:
        name: the instance, "" where it says none.
        pids: its processes on this machine; () for a container.
        container: the container's id, "" for processes.
        state: the container's state, for example running or exited.
    """

    name: str
    pids: tuple[int, ...] = ()
    container: str = ""
    state: str = ""

    def __str__(self) -> str:
        what = f"container {self.container[:12]} {self.state}" if self.container else f"processes {list(self.pids)}"
        return f"{self.name or 'without a name'} ({what})"


def find_processes(cookie: str) -> list[MarkedServer]:
    """Servers whose processes carry the cookie, this process excepted."""
    wanted = f"{COOKIE}={cookie}".encode()
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if wanted not in variables:
            continue
        names = [v.partition(b"=")[2].decode() for v in variables if v.startswith(MARK.encode() + b"=")]
        found.setdefault(_instance(names[0] if names else ""), []).append(int(entry.name))
    return [MarkedServer(name, tuple(sorted(pids))) for name, pids in sorted(found.items())]


def find_containers(docker_host: str, cookie: str | None = None) -> list[MarkedServer]:
    """Containers of an engine, running or not, whose environment has the cookie; all of them for None."""
    found: list[MarkedServer] = []
    with _engine(docker_host) as engine:
        for listed in engine.get("/containers/json", params={"all": "1"}).raise_for_status().json():
            answer = engine.get(f"/containers/{listed['Id']}/json")
            if answer.status_code == 404:
                continue  # removed in between
            container: dict[str, Any] = answer.raise_for_status().json()
            variables = dict(v.partition("=")[::2] for v in container["Config"]["Env"] or ())
            if cookie is not None and variables.get(COOKIE) != cookie:
                continue
            name = _instance(variables.get(MARK) or container["Name"])
            found.append(MarkedServer(name, (), listed["Id"], container["State"]["Status"]))
    return found


def remove(servers: Iterable[MarkedServer], docker_host: str | None = None) -> None:
    """Kill the processes and remove the containers."""
    for server in servers:
        for pid in server.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if server.container and docker_host:
            with _engine(docker_host) as engine:
                engine.delete(f"/containers/{server.container}", params={"force": "1", "v": "1"})


def _instance(mark: str) -> str:
    return mark.rpartition("/")[2]


def _engine(docker_host: str) -> httpx.Client:
    path = docker_host.removeprefix("unix://")
    return httpx.Client(base_url="http://engine", transport=httpx.HTTPTransport(uds=path), timeout=ENGINE_TIMEOUT_S)
