"""Rows of environment servers: who keeps them, where they are, and which task is placed on which.

    launching -> ready -> (condemned) -> gone -> row deleted        any change checks the row's version

A row is written before the server exists and deleted after nothing of it is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from tide_gateway.database import Database, Statement
from tide_gateway.models import InstanceRow, TaskRow
from tide_gateway.rows import storable
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.clocks import TaskState


class InstanceState(StrEnum):
    """Where an environment server stands: `condemned` gets no more tasks, `gone` is being removed."""

    LAUNCHING = "launching"
    READY = "ready"
    CONDEMNED = "condemned"
    GONE = "gone"


LIVING = frozenset({InstanceState.LAUNCHING, InstanceState.READY})

_COUNTED = (
    select(TaskRow.instance, func.count())
    .where(TaskRow.released == 0, TaskRow.instance != "")
    .group_by(TaskRow.instance)
)
_LOADS, _LOADS_OF = Statement(_COUNTED), Statement(_COUNTED.where(TaskRow.environment == bindparam("of")))
_ALL = Statement(select(InstanceRow.__table__))
_ALL_OF = Statement(select(InstanceRow.__table__).where(InstanceRow.environment == bindparam("of")))
_ONE = Statement(select(InstanceRow.__table__).where(InstanceRow.name == bindparam("of")))
_PLACE = Statement(
    update(TaskRow)
    .where(TaskRow.task_id == bindparam("id"), TaskRow.version == bindparam("known"))
    .values(instance=bindparam("instance"), version=bindparam("version"))
)
_SERVED = Statement(
    update(InstanceRow)
    .where(InstanceRow.name == bindparam("of"), InstanceRow.version == bindparam("known"))
    .values(served=bindparam("served"), version=bindparam("version"))
)


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of `instances`."""

    name: str
    environment: str
    runtime: str
    replica: str
    state: InstanceState
    version: int
    slot: int
    capacity: int
    served: int
    incarnation: str
    place: str
    created_s: float
    detail: str

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


class InstanceRows:
    """Reads and writes of `instances`.

    Args:
        database: where the table is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._gates: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def all(self) -> list[Instance]:
        """All rows."""
        return await self._database.read(_all)

    async def get(self, name: str) -> Instance | None:
        """One row."""
        rows = await self._database.find(_ONE, of=name)
        return _instance(_ONE.named(rows[0])) if rows else None

    async def loads(self) -> Counter[str]:
        """The number of tasks that hold a place, by instance."""
        return await self._database.read(_loads)

    async def place(
        self,
        task_id: str,
        version: int,
        spec: EnvironmentSpec,
        fresh: Callable[[int], Instance],
        *,
        may_launch: bool,
        avoid: frozenset[str] = frozenset(),
    ) -> Placement | None:
        """Give a starting task its instance, which is a new row where that is better; None where all are full.

        The task's row moves to version + 1 with the instance's name in it. An empty server beats a busy one, and a
        busy one beats a launch that may not be tried now.

        Args:
            task_id: the task.
            version: its row's version as the caller knows it.
            spec: its environment.
            fresh: makes the row of a new instance from a slot.
            may_launch: False while launches fail.
            avoid: instances that the caller found dead.

        Raises:
            StaleTask: the task's row is newer than `version`.
        """

        def write(connection: Connection) -> Placement | None:
            self._database.lock(connection, f"places/{spec.name}")
            rows = _all(connection, spec.name)
            loads = _loads(connection, spec.name)
            chosen = best(spec, rows, loads, avoid)
            created = False
            if may_launch and may_add(spec, rows) and (chosen is None or loads[chosen.name] > 0):
                chosen, created = fresh(_free_slot(rows)), True
                _insert(connection, chosen)
            if chosen is None:
                return None
            if _PLACE.count(connection, id=task_id, known=version, instance=chosen.name, version=version + 1) != 1:
                raise StaleTask(task_id)
            after = replace(chosen, served=chosen.served + 1, version=chosen.version + 1)
            _SERVED.count(connection, of=chosen.name, known=chosen.version, served=after.served, version=after.version)
            return Placement(after, created)

        # One at a time, as in `SlotRows.admit`.
        async with self._database.alone(self._gates[spec.name]):
            return await self._database.write(write)

    async def add(self, spec: EnvironmentSpec, fresh: Callable[[int], Instance]) -> Instance | None:
        """Write the row of a new instance for the warm pool; None where that is full, or there is no room."""

        def write(connection: Connection) -> Instance | None:
            self._database.lock(connection, f"places/{spec.name}")
            rows = _all(connection, spec.name)
            if not wants_spare(spec, rows, _loads(connection, spec.name)):
                return None
            made = fresh(_free_slot(rows))
            _insert(connection, made)
            return made

        return await self._database.write(write)

    async def change(self, instance: Instance, **values: Any) -> Instance | None:
        """Write new values into a row if it is still as the caller knows it; the row as it is then, else None."""
        done = await self._database.write(lambda c: _update(c, instance, **values))
        return replace(instance, version=instance.version + 1, **values) if done else None

    async def condemn(self, name: str, why: str) -> bool:
        """Give an instance no more tasks, where it still gets any; True if this call did that."""
        values = {"state": InstanceState.CONDEMNED.value, "version": InstanceRow.version + 1, "detail": storable(why)}
        living = InstanceRow.state.in_([state.value for state in LIVING])
        statement = update(InstanceRow).where(InstanceRow.name == name, living).values(values)
        return await self._database.write(lambda c: c.execute(statement).rowcount == 1)

    async def keep(self, name: str, keepers: Iterable[str], **values: Any) -> Instance | None:
        """Write new values into a row, whatever tasks are placed on it meanwhile; the row as it is then.

        None where the row is gone, or is kept by a replica that is not among `keepers`.
        """
        values = _columns(values)
        mine = (InstanceRow.name == name, InstanceRow.replica.in_(list(keepers)))

        def write(connection: Connection) -> Instance | None:
            change = update(InstanceRow).where(*mine).values(version=InstanceRow.version + 1, **values)
            if connection.execute(change).rowcount != 1:
                return None
            found = connection.execute(select(InstanceRow.__table__).where(InstanceRow.name == name))
            return _instance(found.mappings().one())

        return await self._database.write(write)

    async def paused(self, name: str) -> bool:
        """True if a task on the instance is paused."""
        statement = (
            select(TaskRow.task_id)
            .where(TaskRow.instance == name, TaskRow.released == 0, TaskRow.state == TaskState.PAUSED.value)
            .limit(1)
        )
        return await self._database.read(lambda c: c.execute(statement).first() is not None)

    async def forget(self, name: str) -> None:
        """Remove the row of an instance of which nothing is left."""
        await self._database.write(lambda c: c.execute(delete(InstanceRow).where(InstanceRow.name == name)))


class StaleTask(Exception):
    """The task's row is newer than the caller's."""


def _instance(row: Any) -> Instance:
    return Instance(**{**row, "state": InstanceState(row["state"])})


def _all(connection: Connection, environment: str | None = None) -> list[Instance]:
    found = _ALL.rows(connection) if environment is None else _ALL_OF.rows(connection, of=environment)
    return [_instance(_ALL.named(row)) for row in found]


def _loads(connection: Connection, environment: str | None = None) -> Counter[str]:
    found = _LOADS.rows(connection) if environment is None else _LOADS_OF.rows(connection, of=environment)
    return Counter({row[0]: row[1] for row in found})


def _free_slot(rows: list[Instance]) -> int:
    taken = {row.slot for row in rows}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _insert(connection: Connection, instance: Instance) -> None:
    values = {name: getattr(instance, name) for name in Instance.__slots__}
    connection.execute(insert(InstanceRow).values(values | {"state": instance.state.value}))


def _update(connection: Connection, instance: Instance, **values: Any) -> bool:
    changed = connection.execute(
        update(InstanceRow)
        .where(InstanceRow.name == instance.name, InstanceRow.version == instance.version)
        .values(version=instance.version + 1, **_columns(values))
    )
    return changed.rowcount == 1


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(values)
    if "state" in changed:
        changed["state"] = InstanceState(changed["state"]).value
    if "detail" in changed:
        # A server's last words are in it.
        changed["detail"] = storable(changed["detail"])
    return changed
