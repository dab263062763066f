"""Whether this gateway can serve tasks now: its database, the runtimes of its environments, its heartbeat, no stop.

/readyz, /metrics -> parts() -> database: a transaction, at most 2 s     runtime: a survey, at most 3 s
                                (each asked once at a time, for all who want to know)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tide_gateway.asked import Asked
from tide_gateway.members import Members
from tide_gateway.repository import Repository
from tide_gateway.runtimes import Runtime
from tide_gateway.service.starts import Starts
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import Timekeeper

log = logging.getLogger(__name__)

DATABASE_LIMIT_S = 2.0
RUNTIME_LIMIT_S = 3.0
FRESH_S = 1.0
"""Seconds for which an answer of the database is believed."""
RUNTIME_FRESH_S = 5.0
"""The same of a runtime, whose survey costs more."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How each part is, True where it is well.

    Attributes:
        serving: the gateway is not stopping.
        heartbeat: the others do not take it for dead.
        database: a transaction was made.
        runtimes: by name, those of registered environments.
    """

    serving: bool
    heartbeat: bool
    database: bool
    runtimes: Mapping[str, bool]

    @property
    def faults(self) -> list[str]:
        """Why the gateway is not ready, [] where it is: a runtime counts while no other one is left."""
        faults = [] if self.serving else ["stopping"]
        faults += [] if self.database else ["database"]
        faults += [] if self.heartbeat else ["heartbeat"]
        if self.runtimes and not any(self.runtimes.values()):
            faults += [f"runtime {name}" for name in sorted(self.runtimes)]
        return faults


class Readiness:
    """Tells how the parts are.

    Args:
        repository: of the database.
        members: know when the heartbeat has lapsed.
        time: of the census.
        runtimes: by name.
        environments: the registered ones, whose runtimes count; other runtimes only remove what was left.
        starts: know whether the gateway takes no more of them.

    Attributes:
        census: counts over the rows of all replicas, for metrics.
    """

    def __init__(
        self,
        repository: Repository,
        members: Members,
        time: Timekeeper,
        runtimes: Mapping[str, Runtime],
        environments: Mapping[str, EnvironmentSpec],
        starts: Starts,
    ) -> None:
        self._members = members
        self._starts = starts
        self.census = Asked(lambda: repository.census.count(time.now_s()), fresh_s=FRESH_S, limit_s=DATABASE_LIMIT_S)
        self._database = Asked(repository.census.ping, fresh_s=FRESH_S, limit_s=DATABASE_LIMIT_S)
        self._surveys = {
            name: Asked(runtimes[name].survey, fresh_s=RUNTIME_FRESH_S, limit_s=RUNTIME_LIMIT_S)
            for name in sorted({spec.runtime for spec in environments.values()})
        }
        self._said: list[str] = []

    async def parts(self) -> Parts:
        """How the parts are, within a few seconds. A change is logged."""
        questions = [self._is_there("the database", self._database)]
        questions += [self._is_there(f"runtime {name}", survey) for name, survey in self._surveys.items()]
        database, *runtimes = await asyncio.gather(*questions)
        lapsed = self._members.lapsed(asyncio.get_running_loop().time())
        parts = Parts(not self._starts.stopping, not lapsed, database, dict(zip(self._surveys, runtimes, strict=True)))
        if parts.faults != self._said:
            self._said = parts.faults
            if parts.faults:
                log.warning("not ready: %s", ", ".join(parts.faults))
            else:
                log.info("ready again")
        return parts

    async def _is_there(self, what: str, asked: Asked[Any]) -> bool:
        try:
            await asked.answer()
        except TimeoutError:
            log.debug("%s does not answer in time", what)
            return False
        except Exception as error:  # noqa: BLE001 (StorageFailed, RuntimeAway, or a library's own words for them)
            log.debug("%s is away: %r", what, error)
            return False
        return True
