"""The gateway's side of a driver process: starts it when it is needed, asks it, and hears which servers ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from tide_gateway.runtimes import Gone
from tide_sdk import codec

INIT_S = 90.0
"""Seconds for a driver to join a cluster, or to start a local one on a slow machine."""
_EXIT_S = 15.0
_WATCH_S = 10.0
_MAX_LINE_BYTES = 4 * 1024 * 1024
_MAX_BACKOFF_S = 60.0
# Ray would start a cluster of its own for a call that comes after the end, and tell its makers that it was used.
_SETTINGS = {"RAY_ENABLE_AUTO_CONNECT": "0"}
_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0"}

log = logging.getLogger(__name__)


class ClusterAway(Exception):
    """The cluster, or the process that speaks to it, gave no answer in time; what was asked may have been done."""


class Refused(Exception):
    """The cluster answered that it cannot be done; the message says why."""


class RayLink:
    """Calls one cluster; belongs to the event loop that first uses it.

    Args:
        address: the cluster; empty for the local one.
        namespace: Ray namespace of the actors.
        environ: variables of the driver process.
        log_path: what Ray says goes there.
        on_exit: called with an instance's name, why its server or actor ended, and what the server wrote last.
    """

    def __init__(
        self,
        address: str,
        namespace: str,
        environ: Mapping[str, str],
        log_path: Path,
        on_exit: Callable[[str, str, str], None],
    ) -> None:
        self.address = address
        self._namespace = namespace
        self._environ = {**_DEFAULTS, **environ, **_SETTINGS}
        self._log_path = log_path
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._failures = 0
        self._not_before_s = 0.0
        self._failure = ""
        self._closed = False
        self._watched: set[str] = set()

    @property
    def running(self) -> bool:
        """The driver is connected to its cluster."""
        return self._ready

    async def call(self, op: str, timeout_s: float, **arguments: Any) -> Any:
        """Ask for one thing, starting a driver where none runs. Cancelling it does not stop what the cluster does.

        Args:
            op: see `ray_driver.Driver`.
            timeout_s: deadline in seconds, the start of a driver included.
            arguments: the request's own.

        Raises:
            ClusterAway: no answer in time.
            Gone: there is no such server.
            Refused: it cannot be done.
        """
        name = str(arguments.get("name", ""))
        if op not in ("launch", "attach") or name in self._watched:
            return await self._ask(op, timeout_s, arguments)
        # Before the answer: the server's end may be told first.
        self._watched.add(name)
        try:
            return await self._ask(op, timeout_s, arguments)
        except BaseException:
            self._watched.discard(name)
            raise

    def forget(self, name: str) -> None:
        """Its end is no news any more."""
        self._watched.discard(name)

    async def close(self) -> None:
        """End the driver; detached actors live on, a local cluster of its own does not. Safe to repeat."""
        self._closed = True
        self._watched.clear()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            if not self._ready:
                _kill(process)  # it waits for a cluster, and does not read
            try:
                await asyncio.wait_for(process.wait(), _EXIT_S)
            except TimeoutError:
                _kill(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, op: str, timeout_s: float, arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(until_s):
                if not self._ready:
                    await asyncio.shield(self._start(loop))
                self._number += 1
                number = self._number
                answer = self._calls[number] = loop.create_future()
                try:
                    await self._send({"id": number, "op": op, "timeout_s": until_s - loop.time(), **arguments})
                    return await answer
                finally:
                    self._calls.pop(number, None)
        except TimeoutError:
            raise ClusterAway(f"{self._where()} did not answer within {timeout_s:g} s") from None

    def _start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """One start at a time, and after a failed one none for a while."""
        if self._starting is None:
            if self._closed:
                raise ClusterAway("the runtime is closed")
            if loop.time() < self._not_before_s:
                raise ClusterAway(self._failure)
            self._starting = self._spawn_task(self._connect(loop), "tide-ray-start")
        return self._starting

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # whoever waits for it has it; asyncio need not complain where nobody does any more

        task.add_done_callback(done)
        return task

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        process = None
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "tide_gateway.runtimes.ray_driver"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=out,
                    env=self._environ,
                    start_new_session=True,
                    limit=_MAX_LINE_BYTES,
                )
            self._process = process
            assert process.stdout is not None
            # A driver that ended at once is told by what it did not say, whether or not it still took the order.
            with contextlib.suppress(ClusterAway):
                await self._send({"address": self.address, "namespace": self._namespace})
            first = codec.loads(await asyncio.wait_for(process.stdout.readline(), INIT_S) or b"{}")
            if "ready" not in first:
                raise ClusterAway(f"{self._where()} cannot be joined: {first.get('failed', 'its driver ended')}")
        except BaseException as error:
            if process is not None:
                _kill(process)
            self._failures += 1
            self._not_before_s = loop.time() + min(_MAX_BACKOFF_S, 0.5 * 2**self._failures)
            if isinstance(error, TimeoutError | OSError | codec.CodecError):
                error = ClusterAway(f"{self._where()} cannot be joined: {str(error) or f'no answer in {INIT_S:g} s'}")
            if isinstance(error, ClusterAway):
                self._failure = f"{error} (log: {self._log_path})"
                raise ClusterAway(self._failure) from None
            raise
        finally:
            self._starting = None
        self._failures, self._ready = 0, True
        self._spawn_task(self._read(process), "tide-ray-read")

    async def _send(self, request: dict[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(codec.dumps(request) + b"\n")
            await process.stdin.drain()
        except OSError as error:
            raise ClusterAway(f"{self._where()}: its driver ended") from error

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(codec.loads(line))
        except (ValueError, OSError) as error:
            log.error("%s: its driver answers nonsense: %s", self._where(), error)
        finally:
            self._ready = False
            _kill(process)
            if process.stdin is not None:
                process.stdin.close()
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(ClusterAway(f"{self._where()}: its driver ended"))
        code = await process.wait()
        if not self._closed:
            log.warning("%s: its driver ended with code %d (log: %s)", self._where(), code, self._log_path)
            if self._watched:
                self._spawn_task(self._watch_again(), "tide-ray-watch")

    def _take(self, line: dict[str, Any]) -> None:
        if (name := line.get("exited")) is not None:
            if name in self._watched:
                self._watched.discard(name)
                self._on_exit(name, f"{line['fault']}{last_line(line['words'])}", line["words"])
            return
        answer = self._calls.get(line["id"])
        if answer is None or answer.done():
            return
        if "gone" in line:
            answer.set_exception(Gone(line["gone"]))
        elif "failed" in line:
            answer.set_exception(Refused(line["failed"]))
        else:
            answer.set_result(line["ok"])

    async def _watch_again(self) -> None:
        """After the loss of a driver: watch with a new one. Only a cluster that answers says that a server is gone;
        while it is away the health probes decide."""
        while self._watched and not self._closed:
            for name in list(self._watched):
                try:
                    await self.call("attach", _WATCH_S, name=name)
                except Gone as error:
                    self._watched.discard(name)
                    self._on_exit(name, str(error), "")
                except (ClusterAway, Refused) as error:
                    log.warning("instance %s is not watched: %s", name, error)
                    break
            else:
                return
            await asyncio.sleep(_WATCH_S)

    def _where(self) -> str:
        return f"the Ray cluster at {self.address}" if self.address else "the local Ray cluster"


def last_line(words: str) -> str:
    """A server's last words as part of a message; empty where it said nothing."""
    lines = words.strip().splitlines()
    return f"; its last words: {lines[-1][:300]}" if lines else ""


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
