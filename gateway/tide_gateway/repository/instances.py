"""Rows of environment servers: who keeps them, where they are, and which task is placed on which.

    launching -> ready -> (condemned) -> gone -> row deleted        any change checks the row's version

A row is written before the server exists and deleted after nothing of it is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from tide_gateway.database import Database, Statement
from tide_gateway.models import InstanceRow, TaskRow
from tide_gateway.repository.choice import LIVING, Instance, InstanceState, Placement, chosen, free_slot, wants_spare
from tide_gateway.rows import storable
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.clocks import TaskState

_COUNTED = (
    select(TaskRow.instance, func.count())
    .where(TaskRow.released == 0, TaskRow.instance != "")
    .group_by(TaskRow.instance)
)
_LOADS, _LOADS_OF = Statement(_COUNTED), Statement(_COUNTED.where(TaskRow.environment == bindparam("of")))
_ALL = Statement(select(InstanceRow.__table__))
ALL_OF = Statement(select(InstanceRow.__table__).where(InstanceRow.environment == bindparam("of")))
_ONE = Statement(select(InstanceRow.__table__).where(InstanceRow.name == bindparam("of")))
_PLACE = Statement(
    update(TaskRow)
    .where(TaskRow.task_id == bindparam("id"), TaskRow.version == bindparam("known"))
    .values(instance=bindparam("instance"), version=bindparam("version"))
)
SERVED = Statement(
    update(InstanceRow)
    .where(InstanceRow.name == bindparam("of"), InstanceRow.version == bindparam("known"))
    .values(served=bindparam("served"), version=bindparam("version"))
)


class InstanceRows:
    """Reads and writes of `instances`.

    Args:
        database: where the table is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

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

        The task's row moves to version + 1 with the instance's name in it.

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
            of = {"of": spec.name}
            found, held = self._database.locked(connection, starts_of(spec.name), [(ALL_OF, of), (_LOADS_OF, of)])
            rows = [instance_of(row) for row in found]
            instance, created = chosen(spec, rows, _counted(held), may_launch=may_launch, avoid=avoid)
            if created:
                instance = fresh(free_slot(rows))
                _insert(connection, instance)
            if instance is None:
                return None
            if SERVED.count(connection, **served(instance)) != 1:
                return None  # its row was changed meanwhile, and may take no more tasks
            if _PLACE.count(connection, id=task_id, known=version, instance=instance.name, version=version + 1) != 1:
                raise StaleTask(task_id)
            after = replace(instance, served=instance.served + 1, version=instance.version + 1)
            return Placement(after, created)

        async with self._database.alone(starts_of(spec.name)):
            return await self._database.write(write)

    async def add(self, spec: EnvironmentSpec, fresh: Callable[[int], Instance]) -> Instance | None:
        """Write the row of a new instance for the warm pool; None where that is full, or there is no room."""

        def write(connection: Connection) -> Instance | None:
            of = {"of": spec.name}
            found, held = self._database.locked(connection, starts_of(spec.name), [(ALL_OF, of), (_LOADS_OF, of)])
            rows = [instance_of(row) for row in found]
            if not wants_spare(spec, rows, _counted(held)):
                return None
            made = fresh(free_slot(rows))
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


def starts_of(environment: str) -> str:
    """Name of the lock under which the environment's slots and places are given."""
    return f"starts/{environment}"


def instance_of(row: tuple[Any, ...]) -> Instance:
    """The instance in a row that `ALL_OF` finds."""
    return _instance(ALL_OF.named(row))


def served(instance: Instance) -> dict[str, Any]:
    """Values of `SERVED`: the instance gets one more task."""
    after = {"served": instance.served + 1, "version": instance.version + 1}
    return {"of": instance.name, "known": instance.version} | after


def _instance(row: Mapping[Any, Any]) -> Instance:
    return Instance(**{**row, "state": InstanceState(row["state"])})


def _all(connection: Connection) -> list[Instance]:
    return [instance_of(row) for row in _ALL.rows(connection)]


def _loads(connection: Connection) -> Counter[str]:
    return _counted(_LOADS.rows(connection))


def _counted(rows: Iterable[tuple[Any, ...]]) -> Counter[str]:
    return Counter({row[0]: row[1] for row in rows})


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
