"""Counts over all rows, for metrics; and whether the database answers at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from tide_gateway.database import Database
from tide_gateway.lifecycle import ASLEEP_S, ENDED_S
from tide_gateway.models import InstanceRow, TaskRow, TicketRow


@dataclass(frozen=True, slots=True)
class Census:
    """What the rows of all replicas say at one moment.

    Attributes:
        tasks: that have not ended, by environment and state.
        left_s: seconds until the first clock or cap of any of them runs out, by environment; below 0 where it has,
            none where none runs.
        taken: slots that are held, by environment.
        instances: environment servers by environment and state.
        waiting: starts in the queue, by environment.
    """

    tasks: Mapping[tuple[str, str], int]
    left_s: Mapping[str, float]
    taken: Mapping[str, int]
    instances: Mapping[tuple[str, str], int]
    waiting: Mapping[str, int]


class CensusRows:
    """Counts rows.

    Args:
        database: where the tables are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def count(self, now_s: float) -> Census:
        """Count on one snapshot. Over indexes of what is open: ended tasks, however many, cost nothing.

        Raises:
            StorageFailed: the database does not answer.
        """

        def read(connection: Connection) -> Census:
            grouped = select(TaskRow.environment, TaskRow.state, func.count(), func.min(TaskRow.due_s))
            tasks: dict[tuple[str, str], int] = {}
            left_s: dict[str, float] = {}
            for name, state, number, first_s in connection.execute(
                grouped.where(TaskRow.due_s < ENDED_S).group_by(TaskRow.environment, TaskRow.state)
            ):
                tasks[name, state] = number
                if first_s < ASLEEP_S:
                    left_s[name] = min(first_s - now_s, left_s.get(name, ASLEEP_S))
            held = select(TaskRow.environment, func.count()).where(TaskRow.released == 0)
            taken = {row[0]: row[1] for row in connection.execute(held.group_by(TaskRow.environment))}
            servers = select(InstanceRow.environment, InstanceRow.state, func.count())
            found = connection.execute(servers.group_by(InstanceRow.environment, InstanceRow.state))
            instances = {(row[0], row[1]): row[2] for row in found}
            # Without a key it is an owner's mark, which waits for nothing.
            queue = select(TicketRow.environment, func.count()).where(TicketRow.expires_s > now_s, TicketRow.key != "")
            waiting = {row[0]: row[1] for row in connection.execute(queue.group_by(TicketRow.environment))}
            return Census(tasks, left_s, taken, instances, waiting)

        return await self._database.read(read)

    async def ping(self) -> None:
        """Return when a transaction that may write was made, on the connection that waits for no other call.

        Raises:
            StorageFailed: the database does not answer.
        """
        await self._database.write(self._database.clock_s, urgent=True)
