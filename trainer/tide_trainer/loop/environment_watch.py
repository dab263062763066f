"""Asks the gateway how many tasks of the run's environments it can hold, and tells the scheduler.

    every interval_s:  GET /capacity -> {mine, free, free_eval} -> at most mine + free_eval tasks in flight,
                                                                   of which some are for evaluation only

A gateway that does not answer changes nothing: the last known capacity counts. Where the answer is late, or another run
takes the places, a start meets 429 and its task goes back into the queue (`shell`).
Source: TideRL section 4.2 (admission by environment capacity).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from tide_sdk.client import GatewayClient
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError
from tide_sdk.wire import CapacityView
from tide_trainer.settings import TrainerSettings

_LOG = logging.getLogger(__name__)
_DEADLINE_S = 10.0


class Limited(Protocol):
    """What the watch needs of the scheduler's shell."""

    def set_environment_capacity(self, environment: str, limit: int | None, reserved_eval: int) -> None:
        """At most `limit` tasks in flight, `reserved_eval` of them for evaluation only."""
        ...


def environment_watch_of(settings: TrainerSettings, gateway: GatewayClient, shell: Limited) -> EnvironmentWatch:
    """The watch of a run, as its configuration says."""
    return EnvironmentWatch(
        gateway,
        shell,
        (settings.tasks.environment,),
        reserved_slots=settings.evaluation.reserved_slots,
        interval_s=settings.gateway.capacity_interval_s,
    )


class EnvironmentWatch:
    """Keeps the scheduler's environment capacities as the gateway has them.

    Attributes:
        num_failed: answers that did not come; the last known capacities stay.

    Args:
        gateway: where the tasks are played.
        shell: who is told.
        environments: names that the run plays.
        reserved_slots: places for evaluation only, beside those that the gateway itself reserves.
        interval_s: seconds between looks; 0: never, and no limit is set.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        shell: Limited,
        environments: Collection[str],
        *,
        reserved_slots: int = 0,
        interval_s: float = 2.0,
    ) -> None:
        self._gateway = gateway
        self._shell = shell
        self._environments = environments
        self._reserved_slots = reserved_slots
        self._interval_s = interval_s
        self._gateways_own: dict[str, int] = {}
        self._unknown: set[str] = set()
        self._silent = False
        self.num_failed = 0

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while self._interval_s:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """One look at all environments."""
        try:
            async with asyncio.timeout(_DEADLINE_S + 1.0):
                found = await self._gateway.capacity(deadline_s=_DEADLINE_S)
        except (TideError, TransportError, TimeoutError) as error:
            self.num_failed += 1
            if not self._silent:
                _LOG.warning("the gateway does not tell its capacity; the last known one counts: %s", error)
            self._silent = True
            return
        self._silent = False
        for name in self._environments:
            view = found.get(name)
            if view is not None:
                self._shell.set_environment_capacity(name, *self._limits(name, view))
            elif name not in self._unknown:
                self._unknown.add(name)
                _LOG.warning("environment %s: the gateway tells no capacity of it; no limit is set", name)

    def _limits(self, name: str, view: CapacityView) -> tuple[int, int]:
        # What the gateway reserves shows in full only while no evaluation runs: the largest difference is it.
        own = self._gateways_own[name] = max(self._gateways_own.get(name, 0), view.free_eval - view.free)
        limit = view.mine + max(view.free, view.free_eval)
        return limit, min(limit, max(own, self._reserved_slots))
