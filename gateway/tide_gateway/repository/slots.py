"""Slots: what is held, who waits, and the one transaction that lets a start in.

The decision is `tide_gateway.admission`'s; here it gets its facts, and what it decides is stored with the task's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from tide_gateway import lifecycle
from tide_gateway.admission import Admit, Holding, Refuse, Rules, Snapshot, Ticket, Wish, decide, startable, waiting
from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database
from tide_gateway.lifecycle import Task
from tide_gateway.models import StartRateRow, TaskRow, TicketRow
from tide_gateway.repository import group
from tide_gateway.repository.choice import chosen
from tide_gateway.repository.facts import FACTS, Facts, facts_of
from tide_gateway.repository.instances import ALL_OF, SERVED, instance_of, served, starts_of
from tide_gateway.rows import Change
from tide_gateway.specs import EnvironmentSpec

UNIQUE_VIOLATION = "23505"
"""PostgreSQL's SQLSTATE; in SQLite nobody else writes."""


class KeyTaken(Exception):
    """The key has an attempt that the caller does not know."""


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

    async def admit(
        self,
        change: Change,
        rules: Rules,
        releases: Releases,
        now_s: float,
        *,
        known: int = -1,
        host: EnvironmentSpec | None = None,
        may_launch: bool = True,
    ) -> Task | Refuse:
        """Write a new task's first row if its start may go on; otherwise its place in the queue.

        Where a server that lives is best for the task, its name is in that row already. To launch one is the caller's.

        Args:
            change, rules, releases, now_s: the new task, and what its start is judged by.
            known: the key's highest attempt, which the caller has dealt with; -1 where it knows none.
            host: the environment; None places the task nowhere.
            may_launch: False while launches fail.

        Returns:
            The task as committed, or why it has to wait.

        Raises:
            KeyTaken: there is a higher attempt than `known`.
        """
        task, name = change.after, starts_of(change.after.environment)
        wish = Wish(task.owner, task.key, "eval" if task.kind == "eval" else "train")
        about = {"of": task.environment, "owner": task.owner, "key": task.key}
        asked = [(FACTS, about), *([(ALL_OF, {"of": task.environment})] if host else [])]

        def write(connection: Connection, *, placing: bool) -> Task | Refuse:
            rows, *instances = self._database.locked(connection, name, asked)
            facts = facts_of(rows)
            if facts.attempt is not None and facts.attempt > known:
                raise KeyTaken(task.key)
            if facts.limits:  # their holdings elsewhere count too
                self._database.lock(connection, "starts of limited owners")
            verdict = decide(rules, wish, _snapshot(connection, facts, wish, releases, now_s))
            _settle(connection, task.environment, rules, facts, verdict)
            if isinstance(verdict, Refuse):
                return verdict
            instance, launches = None, False
            if host is not None and placing:
                living = [instance_of(row) for row in instances[0]]
                instance, launches = chosen(host, living, facts.loads, may_launch=may_launch)
            if instance is None or launches:
                group.write_group(connection, [change], self._blobs)
                return task
            whole = change._replace(after=lifecycle.placed(task, instance.name))
            group.write_group(connection, [whole], self._blobs, and_one=(SERVED, served(instance)))
            return whole.after

        async with self._database.alone(name):
            return await self._write(write, task.key)

    async def _write(self, write: Callable[..., Task | Refuse], key: str) -> Task | Refuse:
        try:
            try:
                return await self._database.write(lambda connection: write(connection, placing=True))
            except group.Stale:
                # The server's row was changed meanwhile: which one is best then is found by `InstanceRows.place`.
                return await self._database.write(lambda connection: write(connection, placing=False))
        except IntegrityError as error:
            if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
                raise
            # The same key for another environment, whose starts have a lock of their own.
            raise KeyTaken(key) from error

    async def views(self, rules: Mapping[str, Rules], owner: str, now_s: float) -> dict[str, Slots]:
        """The slots of each environment of `rules`, as `owner` sees them."""

        def read(connection: Connection) -> dict[str, Slots]:
            found: dict[str, Slots] = {}
            for name, rule in rules.items():
                stored = facts_of(FACTS.rows(connection, of=name, owner=owner, key=""))
                facts = _snapshot(connection, stored, Wish(owner, "", "train"), Releases(0, 0.0), now_s)
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


def _snapshot(connection: Connection, facts: Facts, wish: Wish, releases: Releases, now_s: float) -> Snapshot:
    over_all: dict[str, int] = {}
    if facts.limits:
        held = select(TaskRow.owner, func.count()).where(TaskRow.released == 0, TaskRow.owner.in_(list(facts.limits)))
        over_all = {row[0]: row[1] for row in connection.execute(held.group_by(TaskRow.owner))}
    return Snapshot(
        holding=Holding(facts.holding),
        tickets=facts.tickets,
        next_s=facts.next_s,
        owner_max_tasks=facts.limits.get(wish.owner, 0),
        owner_holds=over_all.get(wish.owner, 0),
        num_released_recently=releases.count,
        recent_s=releases.recent_s,
        now_s=now_s,
        rooms={owner: max(0, limit - over_all.get(owner, 0)) for owner, limit in facts.limits.items()},
    )


def _settle(connection: Connection, environment: str, rules: Rules, facts: Facts, verdict: Admit | Refuse) -> None:
    """Store what the verdict changes of tickets and the rate."""
    kept = {(ticket.owner, ticket.key) for ticket in facts.tickets}
    _drop(connection, environment, [name for name in verdict.drop if name in kept])
    ticket = verdict.ticket if isinstance(verdict, Refuse) else verdict.mark
    if ticket is not None:
        _keep(connection, environment, ticket)
    if isinstance(verdict, Admit) and rules.start_rate > 0:
        _set_rate(connection, environment, verdict)


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
