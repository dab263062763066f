"""Environment servers as their rows tell, and which of them the next task goes to: pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from tide_gateway.specs import EnvironmentSpec


class InstanceState(StrEnum):
    """Where an environment server stands: `condemned` gets no more tasks, `gone` is being removed."""

    LAUNCHING = "launching"
    READY = "ready"
    CONDEMNED = "condemned"
    GONE = "gone"


LIVING = frozenset({InstanceState.LAUNCHING, InstanceState.READY})


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of `instances`."""

    name: str
    environment: str
    runtime: str
    replica: str
    state: InstanceState
    slot: int
    capacity: int
    created_s: float
    version: int = 0
    served: int = 0
    incarnation: str = ""
    place: str = ""
    detail: str = ""

    def retired(self, spec: EnvironmentSpec) -> bool:
        """True if it has had as many tasks as its environment allows."""
        return 0 < spec.retire_after <= self.served

    def superfluous(self, spec: EnvironmentSpec) -> bool:
        """True if it gets no more tasks, so that it can go once it has none."""
        return self.state is InstanceState.CONDEMNED or (self.state is InstanceState.READY and self.retired(spec))


@dataclass(frozen=True, slots=True)
class Placement:
    """A task's place: the instance as stored now, and whether its row was made for it and waits for a launch."""

    instance: Instance
    created: bool


def may_add(spec: EnvironmentSpec, instances: list[Instance]) -> bool:
    """True if another server may be launched. A condemned one does not count: its tasks may be long."""
    return sum(row.state is not InstanceState.CONDEMNED for row in instances) < spec.servers


def wants_spare(spec: EnvironmentSpec, instances: list[Instance], loads: Counter[str]) -> bool:
    """True if the warm pool may get another server."""
    spare = [row for row in instances if row.state in LIVING and not loads[row.name] and not row.retired(spec)]
    return len(spare) < spec.warm and may_add(spec, instances)


def best(
    spec: EnvironmentSpec, instances: list[Instance], loads: Counter[str], avoid: frozenset[str]
) -> Instance | None:
    """The instance that the next task goes to: the emptiest with room, a ready one before one that is launching."""
    with_room = [
        row
        for row in instances
        if row.state in LIVING
        and loads[row.name] < row.capacity
        and not row.retired(spec)
        and row.name not in avoid
        # Servers of an older file's runtime are nobody's here.
        and row.runtime == spec.runtime
    ]

    def order(row: Instance) -> tuple[int, bool, int]:
        return loads[row.name], row.state is not InstanceState.READY, row.slot

    return min(with_room, key=order, default=None)


def chosen(
    spec: EnvironmentSpec,
    instances: list[Instance],
    loads: Counter[str],
    *,
    may_launch: bool,
    avoid: frozenset[str] = frozenset(),
) -> tuple[Instance | None, bool]:
    """`best`, and whether a new one is better: an empty server beats a busy one, and a busy one beats a launch that may
    not be tried now."""
    found = best(spec, instances, loads, avoid)
    return found, may_launch and may_add(spec, instances) and (found is None or loads[found.name] > 0)


def free_slot(instances: list[Instance]) -> int:
    """The lowest number that no server of the environment has."""
    taken = {row.slot for row in instances}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
