"""What an admission has to know of an environment, of its tickets and of a key: one statement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from sqlalchemy import bindparam, case, func, literal_column, select, union_all

from tide_gateway.admission import Ticket
from tide_gateway.database import Statement
from tide_gateway.models import OwnerRow, StartRateRow, TaskRow, TicketRow

_NOTHING = literal_column("''")
# One statement: with each of its own the round trip costs more than the rows. What a row tells is its first column.
FACTS = Statement(
    union_all(
        select(
            literal_column("'ticket'"),
            TicketRow.owner,
            TicketRow.key,
            TicketRow.kind,
            TicketRow.asked_s,
            TicketRow.expires_s,
        ).where(TicketRow.environment == bindparam("of")),
        select(
            literal_column("'limit'"), OwnerRow.owner, _NOTHING, _NOTHING, OwnerRow.max_tasks, literal_column("0")
        ).where(OwnerRow.max_tasks > literal_column("0")),
        select(literal_column("'rate'"), _NOTHING, _NOTHING, _NOTHING, StartRateRow.next_s, literal_column("0")).where(
            StartRateRow.environment == bindparam("of")
        ),
        select(
            literal_column("'attempt'"), _NOTHING, _NOTHING, _NOTHING, func.max(TaskRow.attempt), literal_column("0")
        ).where(TaskRow.owner == bindparam("owner"), TaskRow.key == bindparam("key")),
        select(
            literal_column("'held'"),
            TaskRow.owner,
            TaskRow.instance,
            _NOTHING,
            func.count(),
            func.sum(case((TaskRow.kind == literal_column("'eval'"), literal_column("1")), else_=literal_column("0"))),
        )
        .where(TaskRow.released == literal_column("0"), TaskRow.environment == bindparam("of"))
        .group_by(TaskRow.owner, TaskRow.instance),
    )
)


@dataclass(slots=True)
class Facts:
    """What is stored about an environment's starts, and about the key that asks.

    Attributes:
        tickets: the environment's, in the order of their moments.
        limits: the owners that have a limit over all environments.
        next_s: from when the next start is within the rate.
        attempt: the highest attempt of the key, None where it has none.
        holding: slots held in the environment: owner -> (train, eval).
        loads: tasks that hold a place, by instance.
    """

    tickets: list[Ticket] = field(default_factory=list[Ticket])
    limits: dict[str, int] = field(default_factory=dict[str, int])
    next_s: float = 0.0
    attempt: int | None = None
    holding: dict[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])
    loads: Counter[str] = field(default_factory=Counter[str])


def facts_of(rows: list[tuple[Any, ...]]) -> Facts:
    """The facts in the rows that `FACTS` finds."""
    facts = Facts()
    for what, owner, name, kind, number, second in rows:
        match what:
            case "ticket":
                facts.tickets.append(Ticket(owner, name, kind, number, second))
            case "limit":
                facts.limits[owner] = int(number)
            case "rate":
                facts.next_s = number
            case "attempt":
                facts.attempt = None if number is None else int(number)
            case _:
                train, evals = facts.holding.get(owner, (0, 0))
                facts.holding[owner] = (train + int(number - second), evals + int(second))
                if name:
                    facts.loads[name] += int(number)
    facts.tickets.sort(key=attrgetter("asked_s"))
    return facts
