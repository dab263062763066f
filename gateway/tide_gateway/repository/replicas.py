"""Rows of gateway processes and of what they share: heartbeats, outages, and the owners' own heartbeats."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from tide_gateway.database import Database
from tide_gateway.models import DeploymentRow, HeartbeatRow, ReplicaRow, TaskRow


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of `replicas`: a gateway process, found again by machine, process id and start ticks."""

    name: str
    host: str
    pid: int
    ticks: int
    started_s: float
    seen_s: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One row of `heartbeats`."""

    owner: str
    prefix: str
    timeout_s: float
    seen_s: float


class ReplicaRows:
    """Reads and writes of `replicas`, `deployment` and `heartbeats`.

    Args:
        database: where the tables are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def deployment(self) -> tuple[str, float]:
        """The deployment's name, made where there is none, and its newest heartbeat (0 before the first)."""

        def write(connection: Connection) -> tuple[str, float]:
            self._database.lock(connection, "deployment")
            return _deployment(connection)

        return await self._database.write(write)

    async def enter(self, me: Replica, alive: Callable[[Replica], bool]) -> float:
        """Begin this replica's heartbeat; the seconds of outage that were taken off all clocks are returned.

        Where no other replica is alive, the time since the newest heartbeat was nobody's: it charges no task, no cap
        and no owner. Rows of dead replicas are removed.
        """

        def write(connection: Connection) -> float:
            self._database.lock(connection, "deployment")
            others = [row for row in _replicas(connection) if row.name != me.name]
            living = [row for row in others if alive(row)]
            _, seen_s = _deployment(connection)
            outage_s = max(0.0, me.seen_s - seen_s) if not living and seen_s > 0 else 0.0
            if outage_s > 0:
                _forgive(connection, outage_s)
            connection.execute(delete(ReplicaRow).where(ReplicaRow.name.not_in([row.name for row in living])))
            _insert(connection, me)
            connection.execute(update(DeploymentRow).values(seen_s=max(seen_s, me.seen_s)))
            return outage_s

        return await self._database.write(write)

    async def all(self) -> list[Replica]:
        """All rows."""
        return await self._database.read(_replicas)

    async def beat(self, me: Replica) -> list[Replica]:
        """Write this replica's heartbeat, and its row again if others took it for dead; all rows."""

        def write(connection: Connection) -> list[Replica]:
            beat = update(ReplicaRow).where(ReplicaRow.name == me.name).values(seen_s=me.seen_s)
            if connection.execute(beat).rowcount == 0:
                _insert(connection, me)
            newest = update(DeploymentRow).where(DeploymentRow.seen_s < me.seen_s).values(seen_s=me.seen_s)
            connection.execute(newest)
            return _replicas(connection)

        return await self._database.write(write, urgent=True)

    async def forgive_outage(self, me: Replica, longer_than_s: float) -> float:
        """Take the time since the newest heartbeat of any replica off all clocks, caps and owners, if it is longer than
        that: none could reach the database. The seconds taken off; of several replicas one takes them."""

        def write(connection: Connection) -> float:
            self._database.lock(connection, "deployment")
            _, seen_s = _deployment(connection)
            outage_s = me.seen_s - seen_s
            if outage_s <= longer_than_s:
                return 0.0
            _forgive(connection, outage_s)
            connection.execute(update(DeploymentRow).values(seen_s=me.seen_s))
            return outage_s

        return await self._database.write(write, urgent=True)

    async def leave(self, me: Replica, alive: Callable[[Replica], bool]) -> bool:
        """End this replica's heartbeat; True if it was the last one that lives, which then ends everything.

        One transaction: of several that leave at once, one is the last.
        """

        def write(connection: Connection) -> bool:
            self._database.lock(connection, "deployment")
            connection.execute(delete(ReplicaRow).where(ReplicaRow.name == me.name))
            connection.execute(update(DeploymentRow).where(DeploymentRow.seen_s < me.seen_s).values(seen_s=me.seen_s))
            return not any(alive(row) for row in _replicas(connection))

        return await self._database.write(write)

    async def remove(self, names: Sequence[str], seen_before_s: float | None = None) -> None:
        """Remove rows of replicas that are gone; with a moment, only those that have not been seen since."""
        statement = delete(ReplicaRow).where(ReplicaRow.name.in_(list(names)))
        if seen_before_s is not None:
            statement = statement.where(ReplicaRow.seen_s < seen_before_s)
        await self._database.write(lambda c: c.execute(statement))

    async def owner_beat(self, beat: Heartbeat) -> None:
        """Write an owner's heartbeat."""
        values = {"timeout_s": beat.timeout_s, "seen_s": beat.seen_s}
        same = (HeartbeatRow.owner == beat.owner, HeartbeatRow.prefix == beat.prefix)

        def write(connection: Connection) -> None:
            self._database.lock(connection, f"heartbeats/{beat.owner}")
            if connection.execute(update(HeartbeatRow).where(*same).values(values)).rowcount == 0:
                connection.execute(insert(HeartbeatRow).values(owner=beat.owner, prefix=beat.prefix, **values))

        await self._database.write(write)

    async def forget_owner_beat(self, owner: str, prefix: str, *, seen_s: float | None = None) -> None:
        """Remove an owner's heartbeat; with `seen_s`, only if it has not come since."""
        statement = delete(HeartbeatRow).where(HeartbeatRow.owner == owner, HeartbeatRow.prefix == prefix)
        if seen_s is not None:
            statement = statement.where(HeartbeatRow.seen_s == seen_s)
        await self._database.write(lambda c: c.execute(statement))

    async def overdue_owners(self, now_s: float) -> list[Heartbeat]:
        """Heartbeats that have not come in time."""
        statement = select(HeartbeatRow.__table__).where(HeartbeatRow.seen_s + HeartbeatRow.timeout_s <= now_s)
        rows = await self._database.read(lambda c: c.execute(statement).mappings().all())
        return [Heartbeat(**row) for row in rows]  # type: ignore[arg-type]


def _deployment(connection: Connection) -> tuple[str, float]:
    row = connection.execute(select(DeploymentRow.name, DeploymentRow.seen_s)).first()
    if row is not None and row[0]:
        return row[0], row[1]
    name, seen_s = secrets.token_hex(6), 0.0 if row is None else row[1]
    connection.execute(delete(DeploymentRow))
    connection.execute(insert(DeploymentRow).values(one=1, name=name, seen_s=seen_s))
    return name, seen_s


def _replicas(connection: Connection) -> list[Replica]:
    rows: Sequence[Any] = connection.execute(select(ReplicaRow.__table__)).mappings().all()
    return [Replica(**row) for row in rows]


def _insert(connection: Connection, me: Replica) -> None:
    connection.execute(insert(ReplicaRow).values({name: getattr(me, name) for name in Replica.__slots__}))


def _forgive(connection: Connection, seconds: float) -> None:
    """Move the beginning of all that runs on by `seconds`; paused tasks' caps too."""
    connection.execute(
        update(TaskRow)
        .where(TaskRow.since_s > 0)
        .values(
            since_s=TaskRow.since_s + seconds,
            due_s=TaskRow.due_s + seconds,
            wall_since_s=TaskRow.wall_since_s + seconds,
            version=TaskRow.version + 1,
        )
    )
    connection.execute(update(HeartbeatRow).values(seen_s=HeartbeatRow.seen_s + seconds))
