"""The sweep: what each replica does again and again, whether or not anybody calls.

    heartbeat (0.5 s)   -> row of this replica -> which replicas are alive
    every interval      -> overdue tasks end, but not while this replica's heartbeat has lapsed
    every 0.5 s         -> fleets are brought in line with their rows; what dead replicas left is taken over;
                           silent owners' tasks end
    every 5 s           -> what exists without a row is destroyed (by one replica)

Consumes due rows, waits for the interval, unblocks calls that wait for a task whose clock has run out. The heartbeat is
a loop of its own: a slow sweep must not make this replica look dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tide_gateway.fleet import Fleet
from tide_gateway.repository import Instance, StorageFailed
from tide_gateway.runtimes import Place, Runtime
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Registry
from tide_gateway.service.recovery import Recovery
from tide_sdk.errors import TideError

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
TEND_S = 0.5
RECONCILE_S = 5.0
FORGET_S = 30.0
PAUSE_S = 1.0
"""Seconds between sweeps while the database does not take changes."""
MAX_PER_SWEEP = 1000
SURVEY_LIMIT_S = 30.0


class Sweeper:
    """Runs the sweep.

    Args:
        registry: time, rows and members.
        endings: ends what is overdue.
        recovery: takes over what was left.
        fleets: by environment.
        runtimes: by name.
        interval_s: seconds between sweeps; a limit holds to that precision.
    """

    def __init__(
        self,
        registry: Registry,
        endings: Endings,
        recovery: Recovery,
        fleets: Mapping[str, Fleet],
        runtimes: Mapping[str, Runtime],
        interval_s: float,
    ) -> None:
        self._registry = registry
        self._endings = endings
        self._recovery = recovery
        self._fleets = fleets
        self._runtimes = runtimes
        self._interval_s = interval_s
        self._reconciling: asyncio.Future[None]
        self._next_s = {"tend": 0.0, "reconcile": 0.0, "forget": 0.0}

    async def run(self) -> None:
        """Sweep for ever. One failed sweep is logged and the next one tried."""
        loop = asyncio.get_running_loop()
        self._reconciling = loop.create_future()
        self._reconciling.set_result(None)
        while True:
            await asyncio.sleep(self._interval_s)
            if self._registry.members.lapsed(loop.time()):
                continue  # until a heartbeat is written again: others act, or nobody can
            failures: list[Exception] = []
            try:
                failures += await self.expire()
                if self._due("tend", TEND_S, loop.time()):
                    failures += await self.tend()
                if self._reconciling.done() and self._due("reconcile", RECONCILE_S, loop.time()):
                    # On its own: an engine that does not answer must not stop the clocks.
                    self._reconciling = self._registry.spawn(self.reconcile(), "tide-reconcile")
                if self._registry.repository.shared and self._due("forget", FORGET_S, loop.time()):
                    self._recovery.forget_idle()
            except StorageFailed as error:
                failures.append(error)
            except Exception:
                log.exception("a sweep failed; the next one follows in %g s", self._interval_s)

            if failures:
                # A full disk fails them all: not ten times a second, and in one line.
                log.error("a sweep could not do %d things, first: %s", len(failures), failures[0])
                await asyncio.sleep(PAUSE_S)

    async def beat(self) -> None:
        """Write the heartbeat for ever; see who else is alive."""
        failed, loop, members = False, asyncio.get_running_loop(), self._registry.members
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            sent_at = loop.time()
            try:
                if members.lapsed(sent_at):
                    await self._forgive_outage()
                await self.beat_once()
                members.wrote(sent_at)
                failed = False
            except StorageFailed as error:
                if not failed:
                    log.error("the heartbeat could not be written: %s", error)
                failed = True
            except Exception:
                log.exception("a heartbeat failed")

    async def _forgive_outage(self) -> None:
        """After a time without heartbeats: if no replica could write one, no clock counts it."""
        registry = self._registry
        me = registry.members.now(registry.time.now_s())
        outage_s = await registry.repository.replicas.forgive_outage(me, registry.members.lease_s)
        if outage_s > 0:
            log.warning("no gateway could write for %.1f s, which no clock counts", outage_s)
            self._recovery.forget_idle()

    async def beat_once(self) -> None:
        """One heartbeat."""
        registry = self._registry
        members = registry.members
        now_s = registry.time.now_s()
        members.see(await registry.repository.replicas.beat(members.now(now_s)), now_s)

    async def sweep(self) -> list[Exception]:
        """Everything once, now: what failed is returned."""
        await self.beat_once()
        failures = await self.expire()
        failures += await self.tend()
        await self.reconcile()
        return failures

    async def expire(self) -> list[Exception]:
        """Expire all tasks that are overdue now, side by side; what could not be written is due again."""
        now_s = self._registry.time.now_s()
        overdue = await self._registry.repository.overdue(now_s, limit=MAX_PER_SWEEP)
        outcomes = await asyncio.gather(*(self._endings.expire(task_id) for task_id in overdue), return_exceptions=True)
        for task_id, outcome in zip(overdue, outcomes, strict=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, TideError):
                log.error("task %s could not be expired", task_id, exc_info=outcome)
        return [outcome for outcome in outcomes if isinstance(outcome, TideError)]

    async def tend(self) -> list[Exception]:
        """Bring fleets in line with their rows, take over what dead replicas left, end silent owners' tasks."""
        registry, repository = self._registry, self._registry.repository
        rows = await repository.instances.all()
        loads = await repository.instances.loads()
        unfinished = await repository.unfinished()
        named = {row.replica for row in rows} | {worker for _, worker in unfinished}
        if named - registry.members.alive - registry.members.dead - {""}:
            # One that began to work after the last heartbeat here is not dead.
            registry.members.see(await repository.replicas.all(), registry.time.now_s())
        alive = registry.members.alive
        dead = frozenset(row.replica for row in rows if row.replica not in alive)
        await asyncio.gather(*(fleet.tend(rows, loads, dead=dead) for fleet in self._fleets.values()))
        failures = await self._recovery.take_over_all(unfinished)
        if repository.shared:
            await self._recovery.read_again()
        # The moment before the look: whatever holds that up is no silence of the owners'.
        now_s = registry.time.now_s()
        if not registry.members.lapsed(asyncio.get_running_loop().time()):
            for beat in await repository.replicas.overdue_owners(now_s):
                failures += await self._recovery.end_of_owner(beat)
        if registry.members.dead:
            # Their rows have done their part: everything they kept is seen as left over without them.
            before_s = registry.time.now_s() - registry.members.lease_s
            await repository.replicas.remove(sorted(registry.members.dead), before_s)
        return failures

    async def reconcile(self) -> None:
        """Destroy what exists without a row, and forget rows that no registered environment hosts any more."""
        if not self._registry.members.leads:
            return
        found = {kind: await self._survey(kind, runtime) for kind, runtime in self._runtimes.items()}
        rows = {row.name: row for row in await self._registry.repository.instances.all()}
        for kind, names in found.items():
            orphans = sorted(names - rows.keys())
            if orphans:
                log.warning("%d %s servers without a row are destroyed, first: %s", len(orphans), kind, orphans[0])
                self._registry.metrics.orphans.add(kind, by=len(orphans))
            await asyncio.gather(*(self._destroy(self._runtimes[kind], name) for name in orphans))
        for row in rows.values():
            if not self._hosts(row) and row.replica not in self._registry.members.alive:
                await self._bury(row)
        for task_id in await self._registry.repository.homeless():
            await self._lose(task_id, "the environment server is gone")

    def _hosts(self, row: Instance) -> bool:
        """Whether the row's environment is registered, and still for the runtime that the server was launched in."""
        fleet = self._fleets.get(row.environment)
        return fleet is not None and fleet.spec.runtime == row.runtime

    async def _bury(self, row: Instance) -> None:
        """Remove a server that no fleet hosts any more, and end its tasks."""
        words = "for another runtime" if row.environment in self._fleets else "no more"
        why = f"environment {row.environment} is registered {words}"
        log.warning("instance %s is removed: %s", row.name, why)
        for task_id in await self._registry.repository.held_by(row.name):
            await self._lose(task_id, why)
        if (runtime := self._runtimes.get(row.runtime)) is not None:
            # Only the place says on which engine or cluster: what is registered names other ones by now.
            await self._destroy(runtime, row.name, Place.loads(row.place) if row.place else None)
        else:
            log.error("instance %s may be left: there is no %s runtime here to remove it", row.name, row.runtime)
        await self._registry.repository.instances.forget(row.name)

    async def _lose(self, task_id: str, why: str) -> None:
        # A context of its own: what is logged afterwards is not about this task.
        await asyncio.create_task(self._endings.lose(task_id, "environment_lost", why))

    async def _survey(self, kind: str, runtime: Runtime) -> set[str]:
        try:
            async with asyncio.timeout(SURVEY_LIMIT_S):
                return await runtime.survey()
        except Exception as error:  # noqa: BLE001 (an engine that is away now; the next round asks again)
            log.warning("what exists in the %s runtime could not be listed: %s", kind, error or type(error).__name__)
            return set()

    async def _destroy(self, runtime: Runtime, name: str, place: Place | None = None) -> None:
        try:
            async with asyncio.timeout(SURVEY_LIMIT_S):
                await runtime.destroy(name, None, place, 0.0)
        except Exception as error:  # noqa: BLE001 (found again in the next round)
            log.warning("instance %s could not be destroyed: %s", name, error or type(error).__name__)

    def _due(self, what: str, every_s: float, now_s: float) -> bool:
        if now_s < self._next_s[what]:
            return False
        self._next_s[what] = now_s + every_s
        return True
