"""Finds processes again: by a mark in their environment, by start ticks, and by their place in the tree.

Every descendant of a server inherits the variable `TIDE_INSTANCE=deployment/name`, whoever launched it and wherever it
went. A process id alone is no name, since ids are used again; with the start ticks it is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
from pathlib import Path

from tide_gateway.runtimes.launch import descendants

MARK = "TIDE_INSTANCE"
_KILL_S = 5.0
_PASS_S = 0.02

log = logging.getLogger(__name__)


def host_name() -> str:
    """`hostname:digest`, the digest of the machine and the pid namespace: only there do process ids mean the same."""
    machine = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            machine = machine or Path(path).read_text().strip()
    name = socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{name}:{hashlib.sha256(f'{machine or name} {namespace}'.encode()).hexdigest()[:12]}"


def same_host(one: str, other: str) -> bool:
    """Whether two of `host_name`'s answers mean the same machine, renamed or not."""
    return one.rpartition(":")[2] == other.rpartition(":")[2]


def mark_of(pid: int) -> str | None:
    """What the process's mark says, None where it has none or is gone."""
    wanted = f"{MARK}=".encode()
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None  # gone, or another user's
    if wanted not in data:
        return None
    for variable in data.split(b"\0"):
        if variable.startswith(wanted):
            return variable[len(wanted) :].decode("utf-8", "replace")
    return None


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Signal all processes below a supervisor, also those that are born meanwhile."""
    seen: set[int] = set()
    while True:
        born = set(descendants(pid)) - seen
        if not born:
            return
        for child in born:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, number)
        seen |= born


def listens(pid: int, port: int) -> bool:
    """Whether a process below the supervisor listens on a TCP port; another's listener may have come first."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for child in descendants(pid):
        folder = f"/proc/{child}/fd"
        with contextlib.suppress(OSError):
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{number}") in inodes:
                        return True
    return False


class Marks:
    """The marked processes of one deployment.

    Args:
        deployment: others' processes are never touched.
    """

    def __init__(self, deployment: str) -> None:
        self._prefix = f"{deployment}/"
        self._running: asyncio.Task[dict[str, list[int]]] | None = None
        self._next: asyncio.Task[dict[str, list[int]]] | None = None

    def mark(self, name: str) -> str:
        """The mark of an instance."""
        return f"{self._prefix}{name}"

    async def find(self) -> dict[str, list[int]]:
        """All marked processes by instance name, in a scan that begins now; those who wait together share it."""
        if self._next is None or self._next.done():
            # A scan that began before the question may have missed what it asks for.
            self._next = asyncio.create_task(self._scan_after(self._running), name="tide-scan")
        return await asyncio.shield(self._next)

    async def kill(self, name: str) -> None:
        """Kill every process of an instance, and wait until none is left."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _KILL_S
        while loop.time() < until_s:
            pids = (await self.find()).get(name, [])
            if not pids:
                return
            for pid in pids:
                # The id may have been used again since the scan.
                if mark_of(pid) == self.mark(name):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_PASS_S)
        log.error("processes of environment server %s do not die", name)

    async def _scan_after(self, running: asyncio.Task[dict[str, list[int]]] | None) -> dict[str, list[int]]:
        if running is not None:
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await asyncio.to_thread(scan, self._prefix)


def scan(prefix: str) -> dict[str, list[int]]:
    """Process ids by what their mark says behind the prefix, in the whole of `/proc`."""
    found: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            mark = mark_of(int(entry))
            if mark is not None and mark.startswith(prefix) and "/" not in mark[len(prefix) :]:
                found.setdefault(mark[len(prefix) :], []).append(int(entry))
    return found
