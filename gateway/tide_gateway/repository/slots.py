"""Slots: what is held, who waits, and the one transaction that lets a start in.

The decision is `tide_gateway.admission`'s; here it gets its facts, and what it decides is stored with the task's row.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, case, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from tide_gateway.admission import Admit, Holding, Refuse, Rules, Snapshot, Ticket, Wish, decide, startable, waiting
from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database, Statement
from tide_gateway.lifecycle import OPEN
from tide_gateway.models import OwnerRow, StartRateRow, TaskRow, TicketRow
from tide_gateway.repository import group
from tide_gateway.rows import Change
from tide_gateway.specs import EnvironmentSpec

_SAME = Statement(
    select(TaskRow.task_id)
    .where(TaskRow.owner == bindparam("of"), TaskRow.key == bindparam("by"))
    # A lower attempt that is open was let in since the caller looked, and has to be ended first.
    .where(or_(TaskRow.attempt >= bindparam("number"), *(TaskRow.state == state.value for state in OPEN)))
    .limit(1)
)
_LIMITED = Statement(select(OwnerRow.owner, OwnerRow.max_tasks).where(OwnerRow.max_tasks > 0))
_TICKETS = Statement(
    select(TicketRow.owner, TicketRow.key, TicketRow.kind, TicketRow.asked_s, TicketRow.expires_s)
    .where(TicketRow.environment == bindparam("of"))
    .order_by(TicketRow.asked_s)
)
_NEXT = Statement(select(StartRateRow.next_s).where(StartRateRow.environment == bindparam("of")))
_HOLDING = Statement(
    select(TaskRow.owner, func.count(), func.sum(case((TaskRow.kind == "eval", 1), else_=0)))
    .where(TaskRow.released == 0, TaskRow.environment == bindparam("of"))
    .group_by(TaskRow.owner)
)


UNIQUE_VIOLATION = "23505"
"""PostgreSQL's SQLSTATE; in SQLite nobody else writes."""


class KeyTaken(Exception):
    """Another start with the same owner and key was let in meanwhile, which the caller does not know."""


@dataclass(frozen=True, slots=True)
class Releases:
    """How fast slots were given back lately, for an honest Retry-After."""

    count: int
    recent_s: float


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one environment as one owner sees them.

    Attributes:
        taken: slots held, starting and ending tasks included.
        mine: those of the owner.
        num_waiting: starts that have a place in the queue.
        free, free_eval: tasks of kind train, or eval, that the owner could start now, the rate left aside.
    """

    taken: int
    mine: int
    num_waiting: int
    free: int
    free_eval: int


def rules_of(spec: EnvironmentSpec, capacity: int) -> Rules:
    """The environment's limits; `capacity` is lower than configured where its servers hold fewer."""
    return Rules(
        capacity=capacity,
        owner_capacity=spec.owner_capacity,
        eval_reserved=spec.eval_reserved,
        start_rate=spec.start_rate,
        start_burst=spec.start_burst,
        max_queue=spec.max_queue,
    )


class SlotRows:
    """Admission of starts, and views of slots.

    Args:
        database: where the tables are.
        blobs: where large starts are.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._gates: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def admit(self, change: Change, rules: Rules, releases: Releases, now_s: float) -> Refuse | None:
        """Write a new task's first row if its start may go on; otherwise its place in the queue.

        Returns:
            None where the task's row is committed.

        Raises:
            KeyTaken: there is such a task already, or a lower attempt of it is open.
        """
        task = change.after
        wish = Wish(task.owner, task.key, "eval" if task.kind == "eval" else "train")

        def write(connection: Connection) -> Refuse | None:
            self._database.lock(connection, f"starts/{task.environment}")
            max_tasks = _max_tasks(connection)
            if max_tasks:
                # Their holdings elsewhere count too.
                self._database.lock(connection, "starts of limited owners")
            if _SAME.rows(connection, of=task.owner, by=task.key, number=task.attempt):
                raise KeyTaken(task.key)
            facts = _snapshot(connection, task.environment, wish, max_tasks, releases, now_s)
            verdict = decide(rules, wish, facts)
            kept = {(ticket.owner, ticket.key) for ticket in facts.tickets}
            _drop(connection, task.environment, [name for name in verdict.drop if name in kept])
            if isinstance(verdict, Refuse):
                if verdict.ticket is not None:
                    _keep(connection, task.environment, verdict.ticket)
                return verdict
            if verdict.mark is not None:
                _keep(connection, task.environment, verdict.mark)
            if rules.start_rate > 0:
                _set_rate(connection, task.environment, verdict)
            group.write_group(connection, [change], self._blobs)
            return None

        # One at a time: others would only wait for the same lock, and with it hold the threads that all share.
        async with self._database.alone(self._gates[task.environment]):
            try:
                return await self._database.write(write)
            except IntegrityError as error:
                if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
                    raise
                # The same key for another environment, whose starts have a lock of their own.
                raise KeyTaken(task.key) from error

    async def views(self, rules: Mapping[str, Rules], owner: str, now_s: float) -> dict[str, Slots]:
        """The slots of each environment of `rules`, as `owner` sees them."""

        def read(connection: Connection) -> dict[str, Slots]:
            limits = _max_tasks(connection)
            found: dict[str, Slots] = {}
            for name, rule in rules.items():
                facts = _snapshot(connection, name, Wish(owner, "", "train"), limits, Releases(0, 0.0), now_s)
                holding = facts.holding.by_owner
                found[name] = Slots(
                    taken=sum(map(sum, holding.values())),
                    mine=sum(holding.get(owner, (0, 0))),
                    num_waiting=len(waiting(facts)),
                    free=startable(rule, owner, "train", facts),
                    free_eval=startable(rule, owner, "eval", facts),
                )
            return found

        return await self._database.read(read)


def _holding(connection: Connection, environment: str) -> dict[str, tuple[int, int]]:
    rows = _HOLDING.rows(connection, of=environment)
    return {owner: (total - num_eval, num_eval) for owner, total, num_eval in rows}


def _max_tasks(connection: Connection) -> dict[str, int]:
    """The owners that have a limit over all environments."""
    return {row[0]: row[1] for row in _LIMITED.rows(connection)}


def _snapshot(
    connection: Connection, environment: str, wish: Wish, max_tasks: Mapping[str, int], releases: Releases, now_s: float
) -> Snapshot:
    next_s = _NEXT.rows(connection, of=environment)
    over_all: dict[str, int] = {}
    if max_tasks:
        held = select(TaskRow.owner, func.count()).where(TaskRow.released == 0, TaskRow.owner.in_(list(max_tasks)))
        over_all = {row[0]: row[1] for row in connection.execute(held.group_by(TaskRow.owner))}
    return Snapshot(
        holding=Holding(_holding(connection, environment)),
        tickets=[Ticket(*row) for row in _TICKETS.rows(connection, of=environment)],
        next_s=next_s[0][0] if next_s else 0.0,
        owner_max_tasks=max_tasks.get(wish.owner, 0),
        owner_holds=over_all.get(wish.owner, 0),
        num_released_recently=releases.count,
        recent_s=releases.recent_s,
        now_s=now_s,
        rooms={owner: max(0, limit - over_all.get(owner, 0)) for owner, limit in max_tasks.items()},
    )


def _drop(connection: Connection, environment: str, names: list[tuple[str, str]]) -> None:
    for begin in range(0, len(names), 200):
        some = names[begin : begin + 200]
        named = tuple_(TicketRow.owner, TicketRow.key).in_(some)
        connection.execute(delete(TicketRow).where(TicketRow.environment == environment, named))


def _keep(connection: Connection, environment: str, ticket: Ticket) -> None:
    values = {"kind": ticket.kind, "asked_s": ticket.asked_s, "expires_s": ticket.expires_s}
    same = (TicketRow.environment == environment, TicketRow.owner == ticket.owner, TicketRow.key == ticket.key)
    if connection.execute(update(TicketRow).where(*same).values(values)).rowcount == 0:
        row = {"environment": environment, "owner": ticket.owner, "key": ticket.key} | values
        connection.execute(insert(TicketRow).values(row))


def _set_rate(connection: Connection, environment: str, verdict: Admit) -> None:
    same = StartRateRow.environment == environment
    if connection.execute(update(StartRateRow).where(same).values(next_s=verdict.next_s)).rowcount == 0:
        connection.execute(insert(StartRateRow).values(environment=environment, next_s=verdict.next_s))
