"""All SQL of the gateway. Reads are coroutines; task writes go through `apply`, which the committer groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database, StorageFailed
from tide_gateway.lifecycle import ENDED_S, Task
from tide_gateway.models import EventRow, InstanceRow, ReplicaRow, StartRow, TaskRow, TurnRow
from tide_gateway.rows import Change, all_columns, mutable_columns, task_of
from tide_sdk.clocks import TaskState

__all__ = ["Conflict", "Instance", "Repository", "StorageFailed", "StoredStart", "StoredTurn", "write_group"]

_MUTABLE = (
    "state", "turn", "epoch", "version", "worker", "wall_since_s", "due_s", "since_s", "start_consumed_s", "idle_consumed_s",
    "turn_consumed_s", "active_consumed_s", "end_consumed_s", "instance", "peer_task", "released", "reward",
    "outcome", "metrics", "detail",
)  # fmt: skip
_TASK_UPDATE = (
    update(TaskRow.__table__)  # type: ignore[arg-type]
    .where(TaskRow.task_id == bindparam("b_task_id"), TaskRow.version == bindparam("b_version"))
    .values({name: bindparam(name) for name in _MUTABLE})
)
_TASK_INSERT = insert(TaskRow.__table__)  # type: ignore[arg-type]
_START_INSERT = insert(StartRow.__table__)  # type: ignore[arg-type]
_TURN_INSERT = insert(TurnRow.__table__)  # type: ignore[arg-type]
_EVENT_INSERT = insert(EventRow.__table__)  # type: ignore[arg-type]
_START_UPDATE = (
    update(StartRow.__table__)  # type: ignore[arg-type]
    .where(StartRow.task_id == bindparam("b_task_id"))
    .values(answer=bindparam("answer"))
)
_TURN_UPDATE = (
    update(TurnRow.__table__)  # type: ignore[arg-type]
    .where(TurnRow.task_id == bindparam("b_task_id"), TurnRow.turn == bindparam("b_turn"))
    .values(answer=bindparam("answer"), answered_s=bindparam("answered_s"))
)


class Conflict(Exception):
    """The stored row is newer than the one that the change was made from."""


class _Stale(Exception):
    """Some row of a group is stale: none of it may be committed as a group."""


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


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of `instances`."""

    name: str
    environment: str
    runtime: str
    replica: str
    state: str
    version: int
    slot: int
    capacity: int
    served: int
    incarnation: str
    place: str
    created_s: float
    detail: str


def write_group(connection: Connection, changes: Sequence[Change], blobs: BlobStore) -> None:
    """Write all changes in the caller's transaction; large bodies go to `blobs` first.

    Raises:
        _Stale: a row's version does not match; the caller rolls back.
    """
    new = [change for change in changes if change.request is not None]
    old = [change for change in changes if change.request is None]
    if new:
        connection.execute(_TASK_INSERT, [all_columns(change.after) for change in new])
        rows = [{"task_id": c.after.task_id, "request": blobs.put(c.request or b""), "answer": None} for c in new]
        connection.execute(_START_INSERT, rows)
    if old:
        updates = [
            mutable_columns(c.after) | {"b_task_id": c.after.task_id, "b_version": c.after.version - 1} for c in old
        ]
        if connection.execute(_TASK_UPDATE, updates).rowcount != len(old):
            raise _Stale
    _write_parts(connection, changes, blobs)


def _write_parts(connection: Connection, changes: Sequence[Change], blobs: BlobStore) -> None:
    intents: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    firsts: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for change in changes:
        task_id = change.after.task_id
        if change.intent is not None:
            row = {"turn": change.intent.turn, "action": blobs.put(change.intent.action), "acted_s": change.intent.at_s}
            intents.append({"task_id": task_id, "answer": None, "answered_s": None} | row)
        if change.result is not None:
            row = {"answer": blobs.put(change.result.answer), "answered_s": change.result.at_s}
            results.append({"b_task_id": task_id, "b_turn": change.result.turn} | row)
        if change.first is not None:
            firsts.append({"b_task_id": task_id, "answer": blobs.put(change.first)})
        for event in change.events:
            events.append({"task_id": task_id, "at_s": event.at_s, "kind": event.kind, "detail": event.detail})
    for statement, rows in (
        (_TURN_INSERT, intents),
        (_TURN_UPDATE, results),
        (_START_UPDATE, firsts),
        (_EVENT_INSERT, events),
    ):
        if rows:
            connection.execute(statement, rows)


class Repository:
    """Reads and writes of the gateway's tables.

    Args:
        database: where the tables are.
        blobs: where large bodies are.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs

    async def apply(self, changes: Sequence[Change]) -> list[Exception | None]:
        """Commit a group of changes; the result has one entry per change, None where it was committed.

        Usually one transaction. If a row is stale (or anything else fails), each change gets a transaction of its
        own, so that only the one at fault fails.
        """
        try:
            await self._database.write(lambda connection: write_group(connection, changes, self._blobs))
        except Exception:  # noqa: BLE001 (found again, and reported, for the one change that caused it)
            return [await self._apply_one(change) for change in changes]
        return [None] * len(changes)

    async def _apply_one(self, change: Change) -> Exception | None:
        try:
            await self._database.write(lambda connection: write_group(connection, [change], self._blobs))
        except _Stale:
            return Conflict(change.after.task_id)
        except Exception as error:  # noqa: BLE001 (handed to the waiter of this change)
            return error
        return None

    async def task(self, task_id: str) -> Task | None:
        """The task of that id, whoever owns it."""
        statement = select(TaskRow.__table__).where(TaskRow.task_id == task_id)
        row = await self._database.read(lambda c: c.execute(statement).mappings().first())
        return None if row is None else task_of(row)  # type: ignore[arg-type]

    async def newest_attempt(self, owner: str, key: str) -> Task | None:
        """The highest attempt of a key."""
        statement = (
            select(TaskRow.__table__)
            .where(TaskRow.owner == owner, TaskRow.key == key)
            .order_by(TaskRow.attempt.desc())
            .limit(1)
        )
        row = await self._database.read(lambda c: c.execute(statement).mappings().first())
        return None if row is None else task_of(row)  # type: ignore[arg-type]

    async def start_of(self, task_id: str) -> StoredStart | None:
        """What a task was started with."""
        statement = select(StartRow.request, StartRow.answer).where(StartRow.task_id == task_id)
        pair = await self._database.read(lambda c: self._pair(c.execute(statement).first()))
        return None if pair is None else StoredStart(*pair)

    async def turn_of(self, task_id: str, turn: int) -> StoredTurn | None:
        """One turn of a task."""
        statement = select(TurnRow.action, TurnRow.answer).where(TurnRow.task_id == task_id, TurnRow.turn == turn)
        pair = await self._database.read(lambda c: self._pair(c.execute(statement).first()))
        return None if pair is None else StoredTurn(*pair)

    async def tasks(
        self, owner: str, *, limit: int, after: str | None, state: TaskState | None, environment: str | None
    ) -> list[Task]:
        """A page of an owner's tasks, newest first; `after` is the last id of the page before."""
        statement = select(TaskRow.__table__).where(TaskRow.owner == owner)
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
        statement = select(TaskRow.task_id).where(TaskRow.due_s <= now_s).order_by(TaskRow.due_s).limit(limit)
        return list(await self._database.read(lambda c: c.execute(statement).scalars().all()))

    async def open_tasks(self) -> list[Task]:
        """All tasks that have not ended."""
        statement = select(TaskRow.__table__).where(TaskRow.due_s < ENDED_S)
        rows = await self._database.read(lambda c: c.execute(statement).mappings().all())
        return [task_of(row) for row in rows]  # type: ignore[arg-type]

    async def forgive(self, seconds: float) -> None:
        """Move every running clock on by `seconds`, an outage that charges nobody."""
        running = (
            update(TaskRow)
            .where(TaskRow.since_s > 0)
            .values(since_s=TaskRow.since_s + seconds, due_s=TaskRow.due_s + seconds, version=TaskRow.version + 1)
        )
        await self._database.write(lambda c: c.execute(running))

    async def put_instance(self, instance: Instance) -> None:
        """Write an instance's row, new or changed."""
        values = {
            name: getattr(instance, name)
            for name in (
                "environment",
                "runtime",
                "replica",
                "state",
                "version",
                "slot",
                "capacity",
                "served",
                "incarnation",
                "place",
                "created_s",
                "detail",
            )
        }

        def write(connection: Connection) -> None:
            changed = connection.execute(update(InstanceRow).where(InstanceRow.name == instance.name).values(values))
            if changed.rowcount == 0:
                connection.execute(insert(InstanceRow).values(name=instance.name, **values))

        await self._database.write(write)

    async def instances(self) -> list[Instance]:
        """All instances that have a row."""
        rows = await self._database.read(lambda c: c.execute(select(InstanceRow.__table__)).mappings().all())
        return [Instance(**row) for row in rows]  # type: ignore[arg-type]

    async def forget_instance(self, name: str) -> None:
        """Remove the row of an instance that is gone."""
        await self._database.write(lambda c: c.execute(delete(InstanceRow).where(InstanceRow.name == name)))

    async def last_seen_s(self) -> float | None:
        """The newest heartbeat of any replica, None in a new database."""
        return await self._database.read(lambda c: c.execute(select(func.max(ReplicaRow.seen_s))).scalar())

    async def enter_replica(self, name: str, now_s: float) -> None:
        """Begin this replica's heartbeat; the rows of replicas that are gone are removed."""

        def write(connection: Connection) -> None:
            connection.execute(delete(ReplicaRow))
            connection.execute(
                insert(ReplicaRow).values(name=name, host="", pid=0, ticks=0, started_s=now_s, seen_s=now_s)
            )

        await self._database.write(write)

    async def heartbeat(self, name: str, now_s: float) -> None:
        """Write this replica's heartbeat."""
        beat = update(ReplicaRow).where(ReplicaRow.name == name).values(seen_s=now_s)
        await self._database.write(lambda c: c.execute(beat))

    def _pair(self, row: Any) -> tuple[bytes, bytes | None] | None:
        """A body that is always there and one that may not be, read in the reader's thread."""
        if row is None:
            return None
        return self._blobs.get(row[0]), None if row[1] is None else self._blobs.get(row[1])
