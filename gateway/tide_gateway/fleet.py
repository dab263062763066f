"""The environment servers of one environment, as this replica sees them: placement, channels, the warm pool.

    place(task) -> [row: an instance with room, or a new one] -> ready(name) -> Server
    reach(name) -> Server, attached where another replica launched it
    tend(rows)  -> take over from dead replicas, retire, keep the warm pool, forget what is gone

The rows are the truth, and any replica places tasks on any instance. Each instance has one keeper among the replicas
(`tide_gateway.keeper`). A placement that finds no room waits for one, at most as long as the start clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from tide_gateway import upstream
from tide_gateway.keeper import Keeper
from tide_gateway.launches import Launches
from tide_gateway.members import Members
from tide_gateway.repository import Instance, InstanceRows, InstanceState
from tide_gateway.repository.choice import wants_spare
from tide_gateway.runtimes import Gone, LaunchFailed, Place, Runtime, Server
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import Timekeeper
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError

ATTACH_TIMEOUT_S = 10.0
HAND_OUT_PROBE_S = 2.0
"""A server that was heard of within the last second is handed out as it is, another one is asked first."""
_FRESH_S = 1.0
_POLL_S = 0.1

log = logging.getLogger(__name__)


class Vanished(Exception):
    """An instance that a task was placed on cannot host it; the task may be placed on another."""


Lost = Callable[[str, str, str], Awaitable[None]]
"""Ends the tasks of an instance: its name, the contract's code, and why."""


class Fleet:
    """Hosts the tasks of one environment.

    Args:
        spec: the environment.
        runtime: how its servers come to life.
        rows: where instances are written, before they exist.
        members: this replica and the others.
        time: for the rows.
        on_lost: ends the tasks of an instance that is gone.

    Attributes:
        launches: how they went.
        num_lost: servers that died or stopped to answer, while this replica kept them.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        runtime: Runtime,
        rows: InstanceRows,
        members: Members,
        time: Timekeeper,
        on_lost: Lost,
    ) -> None:
        self.spec = spec
        self.runtime = runtime
        self.rows = rows
        self.servers: dict[str, Server] = {}
        self.heard_s: dict[str, float] = {}
        self.on_lost = on_lost
        self.launches = Launches()
        self._members = members
        self._time = time
        self._keepers: dict[str, Keeper] = {}
        self._attaching: dict[str, asyncio.Task[Server]] = {}
        self._room = asyncio.Event()
        self._share = spec.tasks_per_server
        self.num_lost = 0
        self.closing = False

    @property
    def capacity(self) -> int:
        """Tasks at once: the configured limit, or less where the servers say that they hold fewer."""
        return min(self.spec.capacity, self._share * self.spec.servers)

    @property
    def may_launch(self) -> bool:
        """False while launches fail, and after the last one."""
        return not self.closing and self.launches.wait_s <= 0

    @property
    def may_start(self) -> bool:
        """False while launches fail and nothing else can host a task."""
        return bool(self.servers) or self.launches.wait_s <= 0

    def check(self) -> None:
        """Refuse a start while launches fail and nothing else can host it.

        Raises:
            TideError: with the time until the next launch may be tried.
        """
        if not self.may_start:
            words = f"environment {self.spec.name!r} fails to launch: {self.launches.failure}"
            raise TideError("unavailable", words, retry_after_s=max(1, round(self.launches.wait_s)))

    async def place(self, task_id: str, version: int, avoid: frozenset[str], limit_s: float = 0.0) -> Instance | None:
        """Give the starting task, which has `limit_s` left, an instance; None where none has room now."""
        placed = await self.rows.place(
            task_id, version, self.spec, self._fresh, may_launch=self.may_launch, avoid=avoid
        )
        if placed is None:
            self._room.clear()
            return None
        if placed.created:
            self._keep(placed.instance, limit_s)
        return placed.instance

    async def wait_for_room(self) -> None:
        """Return when a slot may have become free; other replicas' are found by looking again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._room.wait()
        self._room.clear()

    def note_room(self) -> None:
        """A task has let go of its place."""
        self._room.set()

    async def ready(self, name: str) -> Server:
        """The server of an instance, once it is healthy. The caller sets the deadline.

        Raises:
            LaunchFailed: it did not become ready.
            Vanished: it is gone, or does not answer; another one may do.
        """
        while True:
            keeper = self._keepers.get(name)
            if keeper is not None:
                await keeper.settled.wait()
                if keeper.failure:
                    raise LaunchFailed(keeper.failure)
                if keeper.watches and (server := self.at_hand(name)) is not None and self._is_fresh(name):
                    return server  # what else its row said, this replica would have written
            row = await self.rows.get(name)
            if row is None or row.state is InstanceState.GONE:
                raise Vanished("it is gone")
            if row.state is not InstanceState.LAUNCHING:
                break
            await asyncio.sleep(_POLL_S)
        try:
            server = await self.reach(name)
            if not self._is_fresh(name):
                await upstream.probe(server, HAND_OUT_PROBE_S)
                self.heard_s[name] = _loop_s()
        except (upstream.EnvironmentLost, upstream.EnvironmentFailed, TransportError) as error:
            raise Vanished(str(error)) from error
        return server

    def at_hand(self, name: str) -> Server | None:
        """The server that an instance's row names, if it is reached already."""
        server = self.servers.get(name)
        return None if server is None or server.exited.is_set() else server

    async def reach(self, name: str) -> Server:
        """The server that an instance's row names. The caller sets the deadline.

        Raises:
            EnvironmentLost: it is gone, or was restarted.
        """
        while True:
            if (server := self.at_hand(name)) is not None:
                return server
            row = await self.rows.get(name)
            if row is None or row.state is InstanceState.GONE:
                raise upstream.EnvironmentLost("the environment server is gone")
            try:
                return await self.attach(row)
            except Gone as error:
                # Whether it is gone or only slow is for its keeper to say, who then says so in its row.
                log.debug("instance %s is not reached: %s", name, error)
            await asyncio.sleep(_POLL_S)

    async def attach(self, row: Instance) -> Server:
        """The server of a row, found by the runtime; one attempt, shared by all who ask.

        Raises:
            Gone: it was not found, is another one, or does not answer in time.
        """
        attaching = self._attaching.get(row.name)
        if attaching is None:
            attaching = self._attaching[row.name] = asyncio.create_task(self._attach(row), name=f"attach-{row.name}")
            attaching.add_done_callback(lambda _: self._attaching.pop(row.name, None))
            attaching.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(attaching)

    async def condemn(self, name: str, why: str) -> None:
        """Give the server no more tasks; it dies when its last one is over."""
        if await self.rows.condemn(name, why):
            log.warning("instance %s is condemned: %s", name, why)

    async def tend(self, rows: Iterable[Instance], loads: Counter[str], *, dead: frozenset[str]) -> None:
        """Bring this replica in line with the rows, and the rows that it keeps in line with what is asked for.

        `rows` were read before `loads`, so that a row whose version still fits has no task that is not in `loads`.
        """
        mine = {row.name: row for row in rows if (row.environment, row.runtime) == (self.spec.name, self.spec.runtime)}
        self.launches.keep(mine.keys() | self._keepers.keys())
        for name in [name for name in self.servers if name not in mine or mine[name].state is InstanceState.GONE]:
            if name not in self._keepers:
                await self.drop(name)
        shares = [row.capacity for row in mine.values() if row.state is InstanceState.READY]
        self._share = min(shares, default=self._share)
        if self.closing:
            return
        for row in mine.values():
            keeper = self._keepers.get(row.name)
            if keeper is None and (row.replica == self._members.me.name or row.replica in dead or not row.replica):
                self._keep(row)
            elif keeper is not None and row.state is InstanceState.GONE and row.replica == self._members.me.name:
                keeper.retire(row)  # again, or as it was not known that the row was written
            elif keeper is not None and not loads[row.name] and row.superfluous(self.spec):
                # Checked by the row's version: a task that was placed since keeps it.
                after = await self.rows.change(row, state=InstanceState.GONE, detail=row.detail or "retired")
                if after is not None:
                    keeper.retire(after)
        # Any replica does it, as not all may know the environment; the write looks again.
        wanted = wants_spare(self.spec, list(mine.values()), loads) and self.may_launch
        if wanted and (made := await self.rows.add(self.spec, self._fresh)) is not None:
            self._keep(made)

    async def frozen(self, name: str) -> bool:
        """True while the one task of an instance that freezes is paused: it cannot answer, and is not asked."""
        return self.spec.freeze and await self.rows.paused(name)

    async def drop(self, name: str) -> None:
        """Forget a server that is gone; whoever waits for it is told."""
        self.heard_s.pop(name, None)
        if (server := self.servers.pop(name, None)) is not None:
            server.exited.set()
            await server.channel.aclose()

    def kept(self, keeper: Keeper) -> None:
        """A keeper's work is over."""
        self._keepers.pop(keeper.name, None)
        self._room.set()

    async def close(self, *, destroy: bool) -> None:
        """Stop to keep servers: destroy them all in parallel, or leave them to other replicas. Safe to repeat."""
        self.closing = True
        await asyncio.gather(*(keeper.stop(destroy=destroy) for keeper in list(self._keepers.values())))
        for attaching in list(self._attaching.values()):
            attaching.cancel()
        for name in list(self.servers):
            await self.drop(name)

    def _keep(self, row: Instance, launch_s: float = 0.0) -> None:
        if row.name not in self._keepers:
            self._keepers[row.name] = Keeper(self, row, self._members, launch_s)

    def _is_fresh(self, name: str) -> bool:
        return _loop_s() - self.heard_s.get(name, 0.0) <= _FRESH_S

    def _fresh(self, slot: int) -> Instance:
        return Instance(
            # No two instances ever share a name; what is made outside the database is named after it.
            name=f"{self.spec.name}-{slot}-{secrets.token_hex(4)}",
            environment=self.spec.name,
            runtime=self.spec.runtime,
            replica=self._members.me.name,
            state=InstanceState.LAUNCHING,
            slot=slot,
            capacity=self.spec.tasks_per_server,
            created_s=self._time.now_s(),
        )

    async def _attach(self, row: Instance) -> Server:
        if not row.place or row.runtime != self.spec.runtime:
            raise Gone(f"it was never ready, or lives in a runtime that is not registered any more, {row.runtime}")
        server = await self.runtime.attach(row.name, self.spec, Place.loads(row.place), ATTACH_TIMEOUT_S)
        if server.health.incarnation != row.incarnation:
            await server.channel.aclose()
            raise Gone("another incarnation is in its place")
        self.servers[row.name] = server
        self.heard_s[row.name] = _loop_s()
        return server


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
