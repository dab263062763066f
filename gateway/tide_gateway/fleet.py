"""The environment servers of one environment: slots, placement, probes, restarts.

    reserve() -> place() -> [a server with room, or a new one, at most `servers`] -> give_back()

Consumes reserved slots, waits for a server to become healthy (deadline: the start clock), is unblocked by a server's
launch or by a slot that is given back. `reserve` is synchronous, so that the cap holds whatever the concurrency.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tide_gateway import upstream
from tide_gateway.repository import Instance, Repository
from tide_gateway.runtimes import LaunchFailed, Runtime, Server
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.clocks import ClockName
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError

MAX_BACKOFF_S = 30.0
PROBES_UNTIL_LOST = 3
DESTROY_GRACE_S = 2.0

log = logging.getLogger(__name__)

Lost = Callable[[str, list[str]], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Host:
    """One instance as the fleet sees it.

    Attributes:
        tasks: ids of the tasks that it holds or is to hold.
        server: None until it is healthy.
        condemned: it gets no more tasks and dies when its last one is over.
    """

    name: str
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[str] = field(default_factory=set[str])
    server: Server | None = None
    failure: str = ""
    condemned: bool = False
    keeper: asyncio.Task[None] | None = None


class Fleet:
    """Hosts the tasks of one environment.

    Args:
        spec: the environment.
        runtime: how its servers come to life.
        repository: where instance rows are written, before the instance exists.
        replica: this gateway's name.
        time: for the rows.
        on_lost: told the instance's name and its tasks when a server is gone.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        runtime: Runtime,
        repository: Repository,
        replica: str,
        time: Timekeeper,
        on_lost: Lost,
    ) -> None:
        self.spec = spec
        self._runtime = runtime
        self._repository = repository
        self._replica = replica
        self._time = time
        self._on_lost = on_lost
        self._hosts: dict[str, Host] = {}
        self._taken = 0
        self._share = spec.tasks_per_server
        self._num_failures = 0
        self._not_before_s = 0.0
        self._last_failure = ""
        self._room = asyncio.Event()
        self._closing = False

    @property
    def capacity(self) -> int:
        """Tasks at once: the configured limit, or less where the servers say that they hold fewer."""
        return min(self.spec.capacity, self._share * self.spec.servers)

    @property
    def taken(self) -> int:
        """Slots taken, starting and ending tasks counted."""
        return self._taken

    def servers(self) -> list[tuple[str, str, int, int]]:
        """Name, state, pid and number of tasks of each server."""
        return [
            (h.name, "condemned" if h.condemned else "ready" if h.server else "launching", h.server.place.pid if h.server
             else 0, len(h.tasks))
            for h in self._hosts.values()
        ]  # fmt: skip

    def reserve(self) -> None:
        """Take a slot; pair it with `give_back`.

        Raises:
            TideError: no slot is free, or the servers keep failing to launch.
        """
        wait_s = self._not_before_s - self._loop_s()
        if wait_s > 0 and not any(host.server for host in self._hosts.values()):
            raise TideError(
                "unavailable",
                f"environment {self.spec.name!r} fails to launch: {self._last_failure}",
                retry_after_s=max(1, round(wait_s)),
            )
        if self._taken >= self.capacity:
            words = f"all {self.capacity} slots of environment {self.spec.name!r} are taken; call again"
            raise TideError("capacity", words, retry_after_s=1)
        self._taken += 1

    async def place(self, task_id: str) -> Host:
        """A healthy server with room for the task, launched if need be. The caller sets the deadline.

        Raises:
            LaunchFailed: the server that it waited for did not become ready.
        """
        while True:
            host = self._pick()
            # Spread evenly from the start: an empty server beats a busy one, a busy one beats a failing launch.
            if host is None or (host.tasks and self._loop_s() >= self._not_before_s):
                host = self._launch() or host
            if host is not None:
                break
            self._room.clear()
            await self._room.wait()
        host.tasks.add(task_id)
        try:
            await host.ready.wait()
        except BaseException:
            host.tasks.discard(task_id)
            raise
        if host.server is None:
            host.tasks.discard(task_id)
            raise LaunchFailed(host.failure)
        return host

    def give_back(self, host: Host | None, task_id: str) -> None:
        """Free a slot that `reserve` took, and the task's place on its server."""
        self._taken -= 1
        if host is not None:
            host.tasks.discard(task_id)
            if host.condemned and not host.tasks and host.keeper is not None:
                host.keeper.cancel()
        self._room.set()

    def condemn(self, host: Host) -> None:
        """Kill the server once no task is on it; at once where the condemning task is its only one."""
        host.condemned = True
        log.warning("instance %s is condemned: a task on it did not end in time", host.name)

    async def close(self) -> None:
        """Destroy all servers in parallel. Safe to repeat."""
        self._closing = True
        keepers = [host.keeper for host in self._hosts.values() if host.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def _pick(self) -> Host | None:
        with_room = [h for h in self._hosts.values() if not h.condemned and len(h.tasks) < self._share]
        return min(with_room, key=lambda host: len(host.tasks), default=None)

    def _launch(self) -> Host | None:
        if self._closing or sum(not host.condemned for host in self._hosts.values()) >= self.spec.servers:
            return None
        host = Host(name=f"{self.spec.name}-{self._replica}-{secrets.token_hex(4)}")
        self._hosts[host.name] = host
        host.keeper = asyncio.create_task(self._keep(host), name=f"tide-keep-{host.name}")
        return host

    async def _keep(self, host: Host) -> None:
        """The whole life of one server: row, launch, probes, row again."""
        try:
            await self._bring_up(host)
            if host.server is not None:
                await self._watch(host, host.server)
        except asyncio.CancelledError:
            pass  # closing, or condemned and empty: bring it down below
        except Exception:
            log.exception("keeping instance %s failed", host.name)
            host.failure = host.failure or "an unexpected failure; see the gateway's log"
        finally:
            down = asyncio.create_task(self._bring_down(host), name=f"tide-down-{host.name}")
            while not down.done():
                # A second cancellation must not leave a server half destroyed.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({down})
            if (error := down.exception()) is not None:
                log.error("bringing down instance %s failed", host.name, exc_info=error)

    async def _bring_up(self, host: Host) -> None:
        await self._write(host, "launching")
        try:
            server = await self._runtime.launch(host.name, self.spec, self.spec.all_limits[ClockName.START])
        except LaunchFailed as error:
            self._num_failures += 1
            self._last_failure = host.failure = str(error)
            self._not_before_s = self._loop_s() + min(MAX_BACKOFF_S, 0.5 * 2**self._num_failures)
            log.warning("instance %s did not launch: %s", host.name, error)
            return
        self._num_failures = 0
        host.server = server
        if server.health.capacity < self._share:
            log.warning(
                "environment %s: its server holds %d tasks, not the %d configured",
                self.spec.name, server.health.capacity, self._share,
            )  # fmt: skip
            self._share = max(1, server.health.capacity)
        await self._write(host, "ready")
        host.ready.set()

    async def _watch(self, host: Host, server: Server) -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(self.spec.probe_interval_s):
                    await server.exited.wait()
                return
            except TimeoutError:
                pass
            try:
                await upstream.probe(server, max(self.spec.probe_interval_s, upstream.PROBE_TIMEOUT_S))
                failures = 0
            except upstream.EnvironmentLost:
                return
            except (TransportError, upstream.EnvironmentFailed) as error:
                failures += 1
                log.warning("instance %s: probe %d of %d failed: %s", host.name, failures, PROBES_UNTIL_LOST, error)
                if failures >= PROBES_UNTIL_LOST:
                    return

    async def _bring_down(self, host: Host) -> None:
        self._hosts.pop(host.name, None)
        host.failure = host.failure or "the environment server is gone"
        server, host.server = host.server, None
        host.ready.set()
        self._room.set()
        if server is not None:
            await self._runtime.destroy(server, DESTROY_GRACE_S)
        if host.tasks and not self._closing:
            await self._on_lost(host.name, sorted(host.tasks))
        await self._repository.forget_instance(host.name)

    async def _write(self, host: Host, state: str) -> None:
        server = host.server
        row = Instance(
            name=host.name,
            environment=self.spec.name,
            runtime=self.spec.runtime,
            replica=self._replica,
            state=state,
            version=0,
            slot=0,
            capacity=self._share,
            served=0,
            incarnation=server.health.incarnation if server else "",
            place="",
            created_s=self._time.now_s(),
            detail=host.failure,
        )
        await self._repository.put_instance(row)

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()
