"""What the last gateway does with tasks and environment servers when it stops and leaves none to a next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tide_gateway import lifecycle
from tide_gateway.fleet import Fleet
from tide_gateway.lifecycle import Task
from tide_gateway.repository import Instance, InstanceState, Repository
from tide_gateway.repository.instances import InstanceRows
from tide_gateway.rows import Change, Event
from tide_gateway.runtimes import Place, Runtime
from tide_sdk.clocks import TaskState
from tide_sdk.wire import Outcome

log = logging.getLogger(__name__)

DESTROY_GRACE_S = 2.0
DESTROY_LIMIT_S = 60.0
"""All servers are destroyed in parallel within this; what is left then is found at the next start."""
DESTROY_AT_ONCE = 64
_DETAIL = "the gateway was stopped, and the environment server with it"


async def close_tasks(repository: Repository, tasks: list[Task], now_s: float) -> None:
    """End tasks whose environment is gone, without asking it; one transaction for all."""
    changes: list[Change] = []
    for task in tasks:
        after = task
        if lifecycle.is_open(task):
            after = lifecycle.ending(task, Outcome(kind="failed", reason="environment_lost"), now_s, detail=_DETAIL)
        after = lifecycle.released(after, None, now_s, _DETAIL)
        kind = "ended" if after.state is TaskState.ENDED else "released"
        changes.append(Change(lifecycle.bumped(after), events=(Event(kind, now_s, _DETAIL),)))
    for failure in await repository.apply(changes) if changes else []:
        if failure is not None:
            log.error("a task could not be ended", exc_info=failure)


async def destroy_all(
    instances: InstanceRows, rows: list[Instance], runtimes: Mapping[str, Runtime], fleets: Mapping[str, Fleet]
) -> None:
    """Destroy the servers that no keeper of this process had: those of replicas that died."""
    gate = asyncio.Semaphore(DESTROY_AT_ONCE)

    async def destroy(row: Instance) -> None:
        async with gate:
            if await instances.keep(row.name, {row.replica}, state=InstanceState.GONE) is None:
                return  # removed already, or a new gateway's
            place = Place.loads(row.place) if row.place else None
            runtime, fleet = runtimes.get(row.runtime), fleets.get(row.environment)
            if runtime is not None:
                await runtime.destroy(row.name, fleet.spec if fleet else None, place, DESTROY_GRACE_S)
            await instances.forget(row.name)

    try:
        async with asyncio.timeout(DESTROY_LIMIT_S):
            await asyncio.gather(*(destroy(row) for row in rows))
    except TimeoutError:
        log.error("not all environment servers were destroyed within %g s", DESTROY_LIMIT_S)
