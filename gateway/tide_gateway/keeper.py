"""The whole life of one environment server, in the replica that keeps it.

    row (launching) -> launch -> row (ready) -> probes until it is gone or retired -> row (gone) -> its tasks end
                                                                                   -> destroyed -> row deleted
    row of a dead replica -> taken over -> attach -> probes ... or, where nothing lives there, the same end

Every change of the row checks who keeps it: a keeper that was taken for dead finds that, and leaves the server alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from tide_gateway import upstream
from tide_gateway.log_lines import OnServer, request_scope, working_on
from tide_gateway.members import Members
from tide_gateway.repository import Instance, InstanceState, StorageFailed
from tide_gateway.runtimes import Gone, LaunchFailed, Place, Server
from tide_sdk.clocks import ClockName
from tide_sdk.http import TransportError

if TYPE_CHECKING:
    from tide_gateway.fleet import Fleet

PROBES_UNTIL_LOST = 3
ATTACH_ATTEMPTS = 3
DESTROY_GRACE_S = 2.0
DESTROY_LIMIT_S = 60.0
"""A destroy that takes longer is left to the next reconciliation."""

log = logging.getLogger(__name__)


class _NotMine(Exception):
    """Another replica keeps the instance now."""


class Keeper:
    """Keeps one instance; it begins at once.

    Args:
        fleet: whose instance it is.
        row: as stored; its `replica` may be a dead one, which is then replaced.
        members: this replica.
        launch_s: what the start that asked for it leaves for the launch; the environment's `start` limit where that is
            longer.

    Attributes:
        settled: set when the server is ready, or will not be.
        failure: why its launch failed.
        watches: True while the server is ready, in its row too.
    """

    def __init__(self, fleet: Fleet, row: Instance, members: Members, launch_s: float = 0.0) -> None:
        self.name = row.name
        self.settled = asyncio.Event()
        self.failure = ""
        self.watches = False
        self._fleet = fleet
        self._row = row
        self._me = members.me.name
        self._launch_s = max(launch_s, fleet.spec.all_limits[ClockName.START])
        self._destroy = True
        self._tasks_end = True
        self._why = "the environment server is gone"
        self._task = asyncio.create_task(self._run(), name=f"tide-keep-{row.name}")

    def retire(self, row: Instance) -> None:
        """End the server, whose row says so already (`gone`)."""
        self._row, self._why = row, row.detail
        self._task.cancel()

    async def stop(self, *, destroy: bool) -> None:
        """End the keeping: with the server, or leaving it as it is. Bounded."""
        self._destroy = destroy
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=DESTROY_LIMIT_S + DESTROY_GRACE_S)

    async def _run(self) -> None:
        # It outlives the task and the call that it was made for.
        working_on.set(OnServer(self._fleet.spec.name, self.name))
        request_scope.set(None)
        try:
            await self._live()
        except asyncio.CancelledError:
            pass  # retired, or the gateway stops: see below
        except _NotMine:
            self._destroy, self.failure = False, ""
        except StorageFailed as error:
            # That says nothing about the server: the next tending goes on from its row.
            log.warning("instance %s is left as it is for now: %s", self.name, error)
            self._destroy, self.failure = False, ""
        except Exception:
            log.exception("keeping instance %s failed", self.name)
            self.failure = self.failure or "an unexpected failure; see the gateway's log"
        down = asyncio.create_task(self._bring_down(), name=f"tide-down-{self.name}")
        while not down.done():
            # A second cancellation must not leave a server half destroyed.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({down})
        error = down.exception()
        if isinstance(error, StorageFailed):
            log.error("instance %s is not brought down yet: %s", self.name, error)
        elif error is not None:
            log.error("bringing down instance %s failed", self.name, exc_info=error)

    async def _live(self) -> None:
        row = self._row
        fresh = (
            row.state is InstanceState.LAUNCHING and row.replica == self._me and self._fleet.launches.first(self.name)
        )
        if row.replica != self._me:
            log.warning("instance %s is taken over from replica %s", self.name, row.replica or "(none)")
            await self._write(replica=self._me)
        if row.state is InstanceState.GONE:
            return
        if fresh:
            server = await self._launch()
        elif row.state is InstanceState.LAUNCHING:
            # Tasks that were placed on it are placed again, by whoever works on them.
            self._why, self._tasks_end = "the launch of the environment server was broken off", False
            return
        else:
            server = await self._attach()
        if server is not None:
            self.watches = True
            self.settled.set()
            try:
                await self._watch(server)
            finally:
                self.watches = False
        if not self.failure:
            self._fleet.num_lost += 1

    async def _launch(self) -> Server | None:
        fleet, spec = self._fleet, self._fleet.spec
        try:
            server = await fleet.runtime.launch(self.name, self._row.slot, spec, self._launch_s)
        except LaunchFailed as error:
            self.failure = self._why = str(error)
            fleet.launches.note(self.failure)
            log.warning("instance %s did not launch: %s", self.name, error)
            return None
        fleet.launches.note("")
        self._hear(server)
        capacity = max(1, min(server.health.capacity, spec.tasks_per_server))
        if capacity < spec.tasks_per_server:
            log.warning(
                "environment %s: its server holds %d tasks, not the %d configured",
                spec.name, server.health.capacity, spec.tasks_per_server,
            )  # fmt: skip
        await self._write(
            state=InstanceState.READY,
            capacity=capacity,
            incarnation=server.health.incarnation,
            place=server.place.dumps(),
        )
        return server

    async def _attach(self) -> Server | None:
        for attempt in range(ATTACH_ATTEMPTS):
            try:
                return await self._fleet.attach(self._row)
            except Gone as error:
                self._why = f"the environment server is gone: {error}"
                await asyncio.sleep(0.0 if attempt + 1 == ATTACH_ATTEMPTS else 0.5)
        return None

    async def _watch(self, server: Server) -> None:
        spec, failures = self._fleet.spec, 0
        while True:
            try:
                async with asyncio.timeout(spec.probe_interval_s):
                    await server.exited.wait()
                return
            except TimeoutError:
                pass
            if spec.freeze and await self._fleet.frozen(self.name):
                continue
            try:
                await upstream.probe(server, max(spec.probe_interval_s, upstream.PROBE_TIMEOUT_S))
                failures = 0
                self._hear(server)
            except upstream.EnvironmentLost as error:
                self._why = str(error)
                return
            except (TransportError, upstream.EnvironmentFailed) as error:
                failures += 1
                log.warning("instance %s: probe %d of %d failed: %s", self.name, failures, PROBES_UNTIL_LOST, error)
                if failures >= PROBES_UNTIL_LOST:
                    self._why = f"the environment server does not answer its probes: {error}"
                    return

    async def _bring_down(self) -> None:
        fleet = self._fleet
        try:
            if self._destroy:
                await self._end()
        except _NotMine:
            log.warning("instance %s has another keeper now and is left to it", self.name)
            self.failure = ""  # how its launch ended here says nothing: who waits for it asks its row
        finally:
            self.settled.set()
            fleet.kept(self)

    async def _end(self) -> None:
        fleet = self._fleet
        never_ready = self._row.state is InstanceState.LAUNCHING and self.failure
        code = "environment_failed" if never_ready else "environment_lost"
        if self._row.state is not InstanceState.GONE:
            await self._write(state=InstanceState.GONE, detail=self._why)
        self.settled.set()
        await fleet.drop(self.name)
        place = Place.loads(self._row.place) if self._row.place else None
        losing = asyncio.ensure_future(fleet.on_lost(self.name, code, self._why) if self._tasks_end else _nothing())
        try:
            async with asyncio.timeout(DESTROY_LIMIT_S):
                await fleet.runtime.destroy(self.name, fleet.spec, place, DESTROY_GRACE_S)
        except TimeoutError:
            log.error("instance %s was not destroyed within %g s", self.name, DESTROY_LIMIT_S)
        finally:
            await losing
        await fleet.rows.forget(self.name)

    async def _write(self, **values: object) -> None:
        """Change the row, which only placements of tasks may have changed meanwhile.

        Raises:
            _NotMine: another replica has taken it over.
        """
        after = await self._fleet.rows.keep(self.name, {self._me, self._row.replica}, **values)
        if after is None:
            raise _NotMine
        self._row = after

    def _hear(self, server: Server) -> None:
        self._fleet.servers.setdefault(self.name, server)
        self._fleet.heard_s[self.name] = asyncio.get_running_loop().time()


async def _nothing() -> None:
    """Tasks that are placed again do not end."""
