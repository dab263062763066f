"""Rows of tasks, their starts, turns and events. Writes go through `apply`, which the committer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, bindparam, func, select

from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database, OutcomeUnknown, Statement, StorageFailed
from tide_gateway.lifecycle import ENDED_S, OPEN, Task
from tide_gateway.models import EventRow, InstanceRow, StartRow, TaskRow, TurnRow
from tide_gateway.repository import group
from tide_gateway.repository.census import CensusRows
from tide_gateway.repository.images import ImageRows
from tide_gateway.repository.instances import InstanceRows
from tide_gateway.repository.replicas import ReplicaRows
from tide_gateway.repository.slots import SlotRows
from tide_gateway.rows import Change, task_of
from tide_sdk.clocks import TaskState

_TASK = Statement(select(TaskRow.__table__).where(TaskRow.task_id == bindparam("id")))
_NEWEST = Statement(
    select(TaskRow.__table__)
    .where(TaskRow.owner == bindparam("of"), TaskRow.key == bindparam("by"))
    .order_by(TaskRow.attempt.desc())
    .limit(1)
)
_START = Statement(select(StartRow.request, StartRow.answer).where(StartRow.task_id == bindparam("id")))
_TURN = Statement(
    select(TurnRow.action, TurnRow.answer).where(
        TurnRow.task_id == bindparam("id"), TurnRow.turn == bindparam("number")
    )
)
_OVERDUE = Statement(
    select(TaskRow.task_id)
    .where(TaskRow.due_s <= bindparam("now_s"))
    .order_by(TaskRow.due_s)
    .limit(bindparam("num_rows", type_=Integer))
)


class Conflict(Exception):
    """The stored row is newer than the one that the change was made from."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One row of `turns`."""

    action: bytes
    answer: bytes | None


@dataclass(frozen=True, slots=True)
class StoredStart:
    """One row of `task_starts`."""

    request: bytes
    answer: bytes | None


class Repository:
    """Reads and writes of the gateway's tables.

    Args:
        database: where the tables are.
        blobs: where large bodies and images are.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self.shared = database.shared
        self.census = CensusRows(database)
        self.images = ImageRows(database, blobs)
        self.instances = InstanceRows(database)
        self.replicas = ReplicaRows(database)
        self.slots = SlotRows(database, blobs)
        self._database = database
        self._blobs = blobs

    async def apply(self, changes: Sequence[Change]) -> list[Exception | None]:
        """Commit a group of changes; the result has one entry per change, None where it was committed.

        Usually one transaction. If a row is stale (or anything else fails), each change gets a transaction of its
        own, so that only the one at fault fails.
        """
        try:
            await self._database.write(lambda connection: group.write_group(connection, changes, self._blobs))
        except OutcomeUnknown as error:
            # Alone, a change that is stored would look like another's.
            return [error] * len(changes)
        except StorageFailed as error:
            # A full disk may take the small ones; a server that is away takes none, and is not asked for each.
            if self.shared or len(changes) == 1:
                return [error] * len(changes)
            return await self._apply_each(changes)
        except Exception:  # noqa: BLE001 (found again, and reported, for the one change that caused it)
            return await self._apply_each(changes)
        return [None] * len(changes)

    async def _apply_each(self, changes: Sequence[Change]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for change in changes:
            outcomes.append(failure := await self._apply_one(change))
            if self.shared and isinstance(failure, StorageFailed):
                # A server that hangs would keep a whole group, and all that waits behind it, for a timeout of each.
                left = StorageFailed(f"not tried after another change: {failure}")
                return outcomes + [left] * (len(changes) - len(outcomes))
        return outcomes

    async def _apply_one(self, change: Change) -> Exception | None:
        try:
            await self._database.write(lambda connection: group.write_group(connection, [change], self._blobs))
        except group.Stale:
            return Conflict(change.after.task_id)
        except Exception as error:  # noqa: BLE001 (handed to the waiter of this change)
            return error
        return None

    async def task(self, task_id: str) -> Task | None:
        """The task of that id, whoever owns it."""
        rows = await self._database.find(_TASK, id=task_id)
        return task_of(_TASK.named(rows[0])) if rows else None

    async def newest_attempt(self, owner: str, key: str) -> Task | None:
        """The highest attempt of a key."""
        rows = await self._database.find(_NEWEST, of=owner, by=key)
        return task_of(_NEWEST.named(rows[0])) if rows else None

    async def start_of(self, task_id: str) -> StoredStart | None:
        """What a task was started with."""
        pair = await self._database.read(lambda c: self._pair(_START.rows(c, id=task_id)))
        return None if pair is None else StoredStart(*pair)

    async def turn_of(self, task_id: str, turn: int) -> StoredTurn | None:
        """One turn of a task."""
        pair = await self._database.read(lambda c: self._pair(_TURN.rows(c, id=task_id, number=turn)))
        return None if pair is None else StoredTurn(*pair)

    async def tasks(
        self, owner: str | None, *, limit: int, after: str | None, state: TaskState | None, environment: str | None
    ) -> list[Task]:
        """A page of an owner's tasks (None: everyone's), newest first; `after` is the last id of the page before."""
        statement = select(TaskRow.__table__)
        if owner is not None:
            statement = statement.where(TaskRow.owner == owner)
        if after is not None:
            statement = statement.where(TaskRow.task_id < after)
        if state is not None:
            statement = statement.where(TaskRow.state == state.value)
        if environment is not None:
            statement = statement.where(TaskRow.environment == environment)
        statement = statement.order_by(TaskRow.task_id.desc()).limit(limit)
        rows = await self._database.read(lambda c: c.execute(statement).mappings().all())
        return [task_of(row) for row in rows]  # type: ignore[arg-type]

    async def events_of(self, task_id: str) -> list[tuple[str, float, str]]:
        """A task's history: kind, moment, detail."""
        statement = (
            select(EventRow.kind, EventRow.at_s, EventRow.detail)
            .where(EventRow.task_id == task_id)
            .order_by(EventRow.id)
        )
        rows = await self._database.read(lambda c: c.execute(statement).all())
        return [(row[0], row[1], row[2]) for row in rows]

    async def overdue(self, now_s: float, *, limit: int) -> list[str]:
        """Ids of tasks of which a running clock is used up at `now_s`, the longest overdue first."""
        return [row[0] for row in await self._database.find(_OVERDUE, now_s=now_s, num_rows=limit)]

    async def open_tasks(self) -> list[Task]:
        """All tasks that have not ended."""
        statement = select(TaskRow.__table__).where(TaskRow.due_s < ENDED_S)
        rows = await self._database.read(lambda c: c.execute(statement).mappings().all())
        return [task_of(row) for row in rows]  # type: ignore[arg-type]

    async def unfinished(self) -> list[tuple[str, str]]:
        """Id and worker of every task that has something in flight, by whatever replica."""
        statement = select(TaskRow.task_id, TaskRow.worker).where(TaskRow.due_s < ENDED_S, TaskRow.worker != "")
        rows = await self._database.read(lambda c: c.execute(statement).all())
        return [(row[0], row[1]) for row in rows]

    async def newer_than(self, known: Mapping[str, int]) -> list[Task]:
        """The tasks among `known` (id -> version) whose row is newer."""
        statement = select(TaskRow.__table__).where(TaskRow.task_id.in_(list(known)))
        rows = await self._database.read(lambda c: c.execute(statement).mappings().all())
        return [task_of(row) for row in rows if row["version"] > known[row["task_id"]]]  # type: ignore[arg-type]

    async def held_by(self, instance: str) -> list[str]:
        """Ids of the tasks that hold a place on an instance."""
        statement = select(TaskRow.task_id).where(TaskRow.instance == instance, TaskRow.released == 0)
        return list(await self._database.read(lambda c: c.execute(statement).scalars().all()))

    async def homeless(self) -> list[str]:
        """Ids of open tasks whose environment server has no row any more: none is left that they could go on with."""
        known = select(InstanceRow.name).where(InstanceRow.name == TaskRow.instance).exists()
        statement = (
            select(TaskRow.task_id)
            .where(TaskRow.released == 0, TaskRow.instance != "", ~known)
            .where(TaskRow.state.in_([state.value for state in OPEN - {TaskState.STARTING}]))
        )
        return list(await self._database.read(lambda c: c.execute(statement).scalars().all()))

    async def open_of(self, owner: str, prefix: str, *, limit: int) -> list[str]:
        """Ids of an owner's open tasks whose key begins with `prefix`."""
        statement = (
            select(TaskRow.task_id)
            .where(TaskRow.owner == owner, TaskRow.released == 0, TaskRow.state.in_([s.value for s in OPEN]))
            .where(func.substr(TaskRow.key, 1, len(prefix)) == prefix)  # LIKE takes "RUN" for "run" in SQLite
            .limit(limit)
        )
        return list(await self._database.read(lambda c: c.execute(statement).scalars().all()))

    def _pair(self, rows: list[tuple[Any, ...]]) -> tuple[bytes, bytes | None] | None:
        """A body that is always there and one that may not be, read in the reader's thread."""
        if not rows:
            return None
        row = rows[0]
        return self._blobs.get(row[0]), None if row[1] is None else self._blobs.get(row[1])
