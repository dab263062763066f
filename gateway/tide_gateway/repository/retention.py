"""Removes rows of tasks that are over for long, a bounded number at a time, and says which large bodies are in use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, or_, select

from tide_gateway.blobs import REFERENCE_BYTES, name_in
from tide_gateway.database import Database
from tide_gateway.models import EventRow, StartRow, TaskImageRow, TaskRow, TicketRow, TurnRow
from tide_sdk.clocks import TaskState

MAX_ROWS = 500
"""Rows that one transaction removes, about; the writers of turns wait for it."""
_MIN_ROWS = 4
"""Of a task: itself, its start, two events."""
_OVER = (TaskState.ENDED.value, TaskState.DONE.value)
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Removed:
    """What one transaction has removed: whole tasks; `more` where there may be others."""

    task_ids: tuple[str, ...]
    more: bool


class RetentionRows:
    """Removal of what is over.

    Args:
        database: where the tables are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def remove_tasks(self, before_s: float, max_rows: int = MAX_ROWS) -> Removed:
        """Remove some tasks that were over before that moment, with their starts, turns, images and events.

        Over means ended, or done, released and never read out. Several replicas may do it: one at a time does. A task
        with more turns or events than `max_rows` loses these first, the oldest in front.

        Raises:
            StorageFailed: nothing was removed.
        """

        def write(connection: Connection) -> Removed:
            self._database.lock(connection, "retention")
            most = max(1, max_rows // _MIN_ROWS)
            found: list[Any] = list(connection.execute(_over_before(before_s).limit(most)))
            # Their rows are locked from here on; what was read out before that is kept from then.
            touched = _touched_since(connection, [row[0] for row in found], before_s)
            ids: list[str] = []
            num_rows = 0
            for row in found:
                task_id = row[0]
                if task_id in touched:
                    continue
                num_rows += row[1] + row[2] + 2
                if num_rows > max_rows and (ids or _shorten(connection, task_id, max_rows)):
                    return Removed(_remove(connection, ids), more=True)
                ids.append(task_id)
            return Removed(_remove(connection, ids), more=len(found) == most)

        return await self._database.write(write)

    async def remove_tickets(self, before_s: float) -> int:
        """Remove places in queues that ended before that moment; how many."""
        statement = delete(TicketRow).where(TicketRow.expires_s < before_s, TicketRow.asked_s < before_s)
        return await self._database.write(lambda connection: connection.execute(statement).rowcount)

    async def bodies_in_use(self) -> AsyncGenerator[set[str], None]:
        """Hashes of all large bodies and images that rows name, some tasks at a time.

        Raises:
            StorageFailed: they could not be read.
        """
        after: str | None = ""
        while after is not None:
            names, after = await self._database.read(_page_reader(after))
            yield names


def _id_at(moment_s: float) -> str:
    """The beginning of the ids of tasks that began at a moment; they are ordered by it."""
    return f"{max(0, int(moment_s * 1000)):012x}"


def _over_before(before_s: float) -> Any:
    """Id, turns and events of tasks that were over before a moment: nothing has happened to them since."""
    events = select(func.count()).where(EventRow.task_id == TaskRow.task_id).scalar_subquery()
    happened = select(EventRow.id).where(EventRow.task_id == TaskRow.task_id, EventRow.at_s >= before_s).exists()
    return (
        select(TaskRow.task_id, TaskRow.turn, events)
        # Ids begin with the moment of the start: by the primary key, only what is old is looked at.
        .where(TaskRow.task_id < _id_at(before_s), TaskRow.created_s < before_s)
        .where(TaskRow.state.in_(_OVER), TaskRow.released == 1, ~happened)
        .order_by(TaskRow.task_id)
        .with_for_update(skip_locked=True, of=TaskRow)
    )


def _touched_since(connection: Connection, ids: Sequence[str], moment_s: float) -> set[str]:
    touched = select(EventRow.task_id).where(EventRow.task_id.in_(ids), EventRow.at_s >= moment_s)
    return set(connection.execute(touched).scalars())


def _remove(connection: Connection, ids: Sequence[str]) -> tuple[str, ...]:
    if ids:
        for table in (TurnRow, StartRow, TaskImageRow, EventRow, TaskRow):
            connection.execute(delete(table).where(table.task_id.in_(ids)))
    return tuple(ids)


def _shorten(connection: Connection, task_id: str, max_rows: int) -> bool:
    """Remove the oldest turns, or else events, of a task that has too many; False where what is left may go at once."""
    for table, order in ((TurnRow, TurnRow.turn), (EventRow, EventRow.id)):
        mine = table.task_id == task_id
        beyond = connection.execute(select(order).where(mine).order_by(order).offset(max_rows).limit(1)).scalar()
        if beyond is not None:
            connection.execute(delete(table).where(mine, order < beyond))
            return True
    return False


def _page_reader(after: str) -> Any:
    """Reads the references of some tasks; also the last task's id, None where there are no others."""

    def refers(column: Any) -> ColumnElement[bool]:
        return func.length(column) == REFERENCE_BYTES

    def read(connection: Connection) -> tuple[set[str], str | None]:
        page = select(TaskRow.task_id).where(TaskRow.task_id > after).order_by(TaskRow.task_id).limit(_PAGE)
        ids = list(connection.execute(page).scalars())
        names = set(connection.execute(select(TaskImageRow.digest).where(TaskImageRow.task_id.in_(ids))).scalars())
        for table, one, two in (
            (TurnRow, TurnRow.action, TurnRow.answer),
            (StartRow, StartRow.request, StartRow.answer),
        ):
            rows = select(one, two).where(table.task_id.in_(ids), or_(refers(one), refers(two)))
            for row in connection.execute(rows):
                names.update(name for body in row if body is not None and (name := name_in(body)) is not None)
        return names, ids[-1] if len(ids) == _PAGE else None

    return read
