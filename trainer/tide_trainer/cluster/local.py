"""Child processes on this machine: started, announced, measured, and ended with all that they started.

spawn -> child.py (parent-death signal) -> program -> announce file -> ready
main dies in any way -> kernel sends SIGTERM to the children, `guard.py` ends the rest of their trees
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tide_trainer import errors
from tide_trainer.cluster import proc

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_STOP_POLL_S = 0.05
_GUARD_LIMIT_S = 10.0
_TAIL_BYTES = 4096
_KILL_SHARE = 0.25
"""Share of a stop's deadline that is kept for SIGKILL and its effect."""
_HERE = Path(__file__).parent


class ChildFailed(errors.ProcessFailed):
    """A child did not start, or died before it was ready.

    Attributes:
        name: the child's name.
        exit_code: its exit code, negative for a signal; None if it still ran (it was then ended).
        tail: the last lines of its log.
    """

    def __init__(self, name: str, reason: str, exit_code: int | None, tail: str) -> None:
        super().__init__(f"process {name!r} {reason}; the end of its log:\n{tail or '(empty)'}")
        self.name = name
        self.exit_code = exit_code
        self.tail = tail


@dataclass(eq=False)
class ChildProcess:
    """A running child.

    Attributes:
        name: unique among the live children.
        pid: its process, which leads a session of its own.
        log_path: where its stdout and stderr go.
        announced: what it wrote to its announce file, empty without one.
    """

    name: str
    pid: int
    log_path: Path
    started_ticks: int
    cookie: str
    process: asyncio.subprocess.Process
    announced: Mapping[str, Any] = field(default_factory=dict)
    cpu_seen_s: float = 0.0
    rss_seen_bytes: int = 0
    end: asyncio.Task[int] | None = None

    @property
    def url(self) -> str:
        """The URL that it announced. Raises KeyError without an announcement."""
        return str(self.announced["url"])

    @property
    def alive(self) -> bool:
        """True until its own process has ended."""
        return self.process.returncode is None

    async def wait_dead(self) -> int:
        """Wait for its end without a deadline of its own; the exit code, negative for a signal. Safe to cancel."""
        assert self.end is not None
        return await asyncio.shield(self.end)

    def tail(self) -> str:
        """The end of its log."""
        return read_tail(self.log_path)

    def members(self) -> list[proc.ProcessInfo]:
        """The live processes of its tree."""
        return proc.tree(self.cookie, {self.pid: self.started_ticks})


class LocalProcesses:
    """Starts and ends children; at most one object's children share a log folder.

    Args:
        log_dir: made if missing; one file per child name, appended to.
        guard_keeps: file descriptors that the guard holds open until nothing of the children is left: locks.
    """

    def __init__(self, log_dir: str | Path, *, guard_keeps: Sequence[int] = ()) -> None:
        self.log_dir = Path(log_dir)
        self._guard_keeps = tuple(guard_keeps)
        self._children: dict[str, ChildProcess] = {}
        self._guard: asyncio.subprocess.Process | None = None
        self._guard_lock = asyncio.Lock()
        self._cookie = secrets.token_hex(16)
        self._folders: list[Path] = []

    @property
    def children(self) -> tuple[ChildProcess, ...]:
        """The children that have not ended."""
        return tuple(self._children.values())

    async def spawn(
        self,
        name: str,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        announce: bool = False,
        ready_timeout_s: float = 60.0,
    ) -> ChildProcess:
        """Start a child and wait until it is ready. Cancelling ends the child.

        Args:
            name: unique among the live children; also names the log file.
            argv: the program and its arguments; no shell.
            env: variables added to this process's own.
            announce: append `--announce FILE` and wait until the child has written `{"url": ..., "pid": ...}` there
                (`tide_sdk.serve.announce` does).
            ready_timeout_s: longest wait for the announcement.

        Raises:
            ChildFailed: it could not be run, died, or did not announce in time; nothing of it is left.
            ValueError: the name is in use or not a plain file name.
        """
        if name in self._children or not name or "/" in name or name.startswith("."):
            raise ValueError(f"child name {name!r} is in use or not a plain file name")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        guard = await self._start_guard()
        announce_path = self.log_dir / f".{name}.announce.json"
        announce_path.unlink(missing_ok=True)
        if announce:
            argv = [*argv, "--announce", str(announce_path)]
        child = await self._start(name, argv, env or {})
        try:
            assert guard.stdin is not None
            guard.stdin.write(f"{child.pid} {child.started_ticks}\n".encode())
            if announce:
                child.announced = await self._announced(child, announce_path, ready_timeout_s)
        except BaseException:
            await asyncio.shield(self.stop(child, 2.0))
            raise
        finally:
            announce_path.unlink(missing_ok=True)
        return child

    async def stop(self, child: ChildProcess, deadline_s: float = 10.0) -> None:
        """End a child and its tree: SIGTERM, then SIGKILL before the deadline; idempotent."""
        self.cpu_seconds(child)
        self.peak_rss_bytes(child)
        if await _end(child.name, child.members, deadline_s):
            await child.wait_dead()

    async def stop_all(self, deadline_s: float = 10.0) -> None:
        """End all children in parallel, also what ended ones have left, and at last the guard; idempotent."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        await asyncio.gather(*(self.stop(child, deadline_s) for child in self.children))
        # Afterwards and not beside them: to some programs a second SIGTERM means to stop without order.
        await _end("left over", lambda: proc.tree(self._cookie, {}), max(1.0, end_s - loop.time()))
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()  # with nothing left to end it is gone at once
            async with asyncio.timeout(_GUARD_LIMIT_S):
                await guard.wait()

    async def remove_at_end(self, folder: Path) -> None:
        """Have a folder removed once this process and its children are gone, however it ended."""
        guard = await self._start_guard()
        self._folders.append(folder)
        assert guard.stdin is not None
        guard.stdin.write(f"remove {folder}\n".encode())

    def cpu_seconds(self, child: ChildProcess) -> float:
        """CPU seconds of the child's tree so far, ended descendants that were waited for included; never falls."""
        child.cpu_seen_s = max(child.cpu_seen_s, sum(info.cpu_s for info in child.members()))
        return child.cpu_seen_s

    def peak_rss_bytes(self, child: ChildProcess) -> int:
        """Sum of the highest resident memory of each process of the tree (shared pages count in each); never falls."""
        total = sum(proc.peak_rss_bytes(info.pid) for info in child.members())
        child.rss_seen_bytes = max(child.rss_seen_bytes, total)
        return child.rss_seen_bytes

    async def _start(self, name: str, argv: list[str], env: Mapping[str, str]) -> ChildProcess:
        log_path = self.log_dir / f"{name}.log"
        cookie = f"{self._cookie}.{secrets.token_hex(4)}"
        with open(log_path, "ab", opener=_private) as log:  # noqa: ASYNC230 - a local file, opened only
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_HERE / "child.py"), str(os.getpid()), *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env, proc.COOKIE_VARIABLE: cookie},
                start_new_session=True,
            )  # fmt: skip
        info = proc.read_process(process.pid)
        child = ChildProcess(name, process.pid, log_path, info.started_ticks if info else 0, cookie, process)
        self._children[name] = child
        child.end = asyncio.create_task(self._watch(child), name=f"child {name}")
        return child

    async def _watch(self, child: ChildProcess) -> int:
        exit_code = await child.process.wait()
        # Only its session: what it put into sessions of their own may outlive it on purpose, until `stop_all`.
        left = proc.tree(child.cookie, {child.pid: child.started_ticks}, by_cookie=False)
        proc.send(left, signal.SIGKILL)
        if self._children.get(child.name) is child:
            del self._children[child.name]
        return exit_code

    async def _announced(self, child: ChildProcess, path: Path, timeout_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                while child.alive:
                    if path.exists():  # noqa: ASYNC240 - a stat of a local file
                        return read_announcement(path)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            reason = f"was not ready within {timeout_s:g} s"
            raise ChildFailed(child.name, reason, None, child.tail()) from None
        code = await child.wait_dead()
        raise ChildFailed(child.name, f"ended with exit code {code} before it was ready", code, child.tail())

    async def _start_guard(self) -> asyncio.subprocess.Process:
        async with self._guard_lock:
            if self._guard is None or self._guard.returncode is not None:
                self._guard = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", str(_HERE / "guard.py"), self._cookie,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=self._guard_keeps,
                )  # fmt: skip
                assert self._guard.stdin is not None
                for child in self.children:
                    self._guard.stdin.write(f"{child.pid} {child.started_ticks}\n".encode())
                for folder in self._folders:
                    self._guard.stdin.write(f"remove {folder}\n".encode())
            return self._guard


async def _end(name: str, members: Callable[[], list[proc.ProcessInfo]], deadline_s: float) -> bool:
    """SIGTERM, then SIGKILL before the deadline; False if something outlived both (an uninterruptible wait)."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + deadline_s
    left = members()
    proc.send(left, signal.SIGTERM)
    while left and loop.time() < end_s:
        if loop.time() > end_s - deadline_s * _KILL_SHARE:
            proc.send(left, signal.SIGKILL)
        await asyncio.sleep(_STOP_POLL_S)
        left = members()
    if left:
        _LOG.error("%s: processes %s outlived SIGKILL", name, [info.pid for info in left])
    return not left


def read_announcement(path: Path) -> Mapping[str, Any]:
    """What a child announced. Raises ValueError if it is not a JSON object."""
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict):
        raise ValueError(f"the announcement {path} is not a JSON object")
    return data


def read_tail(path: Path) -> str:
    """The last 4 KiB of a log, from the first whole line on; empty if there is none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        data = log.read()
        return (data.partition(b"\n")[2] if size > _TAIL_BYTES else data).decode(errors="replace").strip()
    return ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
