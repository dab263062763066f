"""The supervisors of server processes, as one gateway sees them: children of its own, or another gateway's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from tide_gateway.host import start_ticks
from tide_gateway.runtimes import Server
from tide_gateway.runtimes.process_marks import Marks, mark_of, signal_tree
from tide_gateway.runtimes.process_places import RunFolder

_KILL_S = 6.0

log = logging.getLogger(__name__)


class Exit:
    """Notices at once that a process ended, also one that is no child of ours.

    Args:
        pid: the process; it is told apart from a later one of the same id by its ticks.
        ticks: see `start_ticks`.
        ended: called once, in the event loop.

    Raises:
        ProcessLookupError: there is no such process any more.
    """

    def __init__(self, pid: int, ticks: str, ended: Callable[[], None]) -> None:
        self.pid = pid
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._fd = os.pidfd_open(pid)
        # After the descriptor was opened: what it means can change no more.
        if str(start_ticks(pid)) != ticks:
            self.close()
            raise ProcessLookupError(f"process {pid} ended")
        self._loop.add_reader(self._fd, self._on_end)

    def send(self, number: signal.Signals) -> None:
        """Signal the process, and never another one of the same id."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Watch no more. Safe to repeat."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_end(self) -> None:
        self.close()
        self._ended()


@dataclass(slots=True, eq=False)
class Life:
    """One supervisor.

    Attributes:
        child: None where another gateway started it.
        servers: what was handed out for it.
        gone: set at its end.
        wanted: its end is no news.
    """

    name: str
    pid: int
    ticks: str
    child: subprocess.Popen[bytes] | None = None
    exit: Exit | None = None
    servers: list[Server] = field(default_factory=list[Server])
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: bool = False

    async def gone_within(self, seconds: float) -> bool:
        """Wait for its end at most so long; whether it came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), seconds)
        return self.gone.is_set()

    async def stop(self, grace_s: float) -> None:
        """Ask the server to stop, and kill its whole tree after the grace."""
        self.wanted = True
        if grace_s > 0 and not self.gone.is_set():
            self._send(signal.SIGTERM)
            await self.gone_within(grace_s)
        if not self.gone.is_set():
            self._send(signal.SIGUSR1)
            self._send(signal.SIGCONT)
            if not await self.gone_within(_KILL_S):
                log.error("the supervisor of environment server %s (pid %d) does not end", self.name, self.pid)
                signal_tree(self.pid, signal.SIGKILL)
                self._send(signal.SIGKILL)
                await self.gone_within(_KILL_S)

    def _send(self, number: signal.Signals) -> None:
        if self.exit is not None:
            self.exit.send(number)


class Lives:
    """The supervisors that one gateway watches, by instance name.

    Args:
        marks: finds what a supervisor that was killed leaves behind.
        folder: where supervisors leave their files.
    """

    def __init__(self, marks: Marks, folder: RunFolder) -> None:
        self._marks = marks
        self._folder = folder
        self._lives: dict[str, Life] = {}
        self._sweeps: set[asyncio.Task[None]] = set()

    def get(self, name: str) -> Life | None:
        """What is watched under the name, dead or alive."""
        return self._lives.get(name)

    def forget(self, name: str) -> None:
        """Watch the name no more."""
        life = self._lives.pop(name, None)
        if life is not None and life.exit is not None:
            life.exit.close()

    def watch(self, life: Life) -> None:
        """Begin to watch; its `gone` may be set when this returns."""
        self.forget(life.name)
        self._lives[life.name] = life
        try:
            life.exit = Exit(life.pid, life.ticks, lambda: self._ended(life))
        except ProcessLookupError:
            self._ended(life)

    def find(self, name: str, pid: int, ticks: str) -> Life | None:
        """The living supervisor of a name, whoever launched it; None where that process is not it or not alive."""
        life = self._lives.get(name)
        if life is not None and (life.pid, life.ticks) == (pid, ticks):
            return None if life.gone.is_set() else life
        if pid <= 0 or mark_of(pid) != self._marks.mark(name) or str(start_ticks(pid)) != ticks:
            return None
        life = Life(name, pid, ticks)
        self.watch(life)
        return None if life.gone.is_set() else life

    async def close(self) -> None:
        """Watch nothing any more, and close what was handed out."""
        for sweep in self._sweeps:
            sweep.cancel()
        await asyncio.gather(*self._sweeps, return_exceptions=True)
        servers = [server for life in self._lives.values() for server in life.servers]
        for name in list(self._lives):
            self.forget(name)
        for server in servers:
            await server.channel.aclose()

    def _ended(self, life: Life) -> None:
        code = life.child.wait() if life.child is not None else None  # it is dead: this only reads the code
        life.gone.set()
        for server in life.servers:
            server.exited.set()
        if life.wanted or not life.servers:
            return
        words = "ended" if code is None else f"exited with code {code}"
        log.warning("environment server %s (pid %d) %s", life.name, life.pid, words)
        if self._folder.places(life.name).run.exists():
            # It was killed itself, and could kill nothing.
            sweep = asyncio.ensure_future(self._marks.kill(life.name))
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)
