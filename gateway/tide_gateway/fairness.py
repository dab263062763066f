"""The fair order of an environment's waiting starts, and which of them the free slots reach.

Next is always the owner that holds the fewest slots, where each slot that the order has already given it counts as
held, and within an owner who asked first is first. A tie between owners goes to who asked first, but a start that was
asked for before its owner's latest start counts as asked for then: owners take turns, however many starts one of them
has waiting. The latest start is kept as a mark among the tickets, while it matters. An owner's starts beyond its own
caps are left out, so that they block nobody.

Slots are given in two passes. First the reserved slots that no eval task uses yet, to eval starts only. That takes
nothing from training: such a slot is one that a train task may not have, and filling it lowers the reserve by as much.
Then the shared slots, to all that are left, train and eval alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Literal

Kind = Literal["train", "eval"]
MARK_S = 30 * 86400.0
"""A mark is dropped as soon as no older start of its owner waits; this is only for an environment that nobody uses."""


@dataclass(frozen=True, slots=True)
class Rules:
    """An environment's limits, as its table in `environments.toml` gives them.

    Attributes:
        capacity: slots.
        owner_capacity: slots of one owner, 0 for no limit of its own.
        eval_reserved: slots that only tasks of kind `eval` get.
        start_rate: starts per second, 0 for no limit.
        start_burst: starts that may come at once before the rate holds, at least 1.
        max_queue: tickets that are kept.
    """

    capacity: int
    owner_capacity: int = 0
    eval_reserved: int = 0
    start_rate: float = 0.0
    start_burst: int = 1
    max_queue: int = 4096


@dataclass(frozen=True, slots=True)
class Holding:
    """Slots held now in the environment, starting and ending tasks included: owner -> (train, eval)."""

    by_owner: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True, slots=True)
class Ticket:
    """A refused start's place in the environment's queue; `owner` and `key` together name it.

    With an empty key it is its owner's mark (`is_mark`), which is stored with the tickets and waits for nothing.

    Attributes:
        asked_s: when it asked first; its place follows from this.
        expires_s: from then on it counts no more, unless its holder has called again.
    """

    owner: str
    key: str
    kind: Kind
    asked_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is true at `now_s`, read in one transaction.

    Attributes:
        tickets: the environment's tickets, in any order (fastest by `asked_s`), expired ones and marks too.
        next_s: from when the next start is within the rate (GCRA); 0 before the first.
        owner_max_tasks: the asking owner's limit over all environments, 0 for none.
        owner_holds: slots that it holds over all environments.
        num_released_recently: slots of the environment that were released in the last `recent_s` seconds.
        rooms: starts that an owner may still make over all environments, for owners with such a limit. An owner that is
            not in it is taken to have none, so a start refused for `owner_max_tasks` then gets no ticket: it would
            block others.
    """

    holding: Holding
    tickets: Sequence[Ticket]
    next_s: float
    owner_max_tasks: int
    owner_holds: int
    num_released_recently: int
    recent_s: float
    now_s: float
    rooms: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Order:
    """One decision's derived facts. `reserved` get a slot in the first pass, `shared[:num_shared]` in the second."""

    rules: Rules
    snapshot: Snapshot
    queue: list[Ticket]
    rooms: Mapping[str, int]
    reserved: list[Ticket]
    shared: list[Ticket]
    num_shared: int

    @property
    def granted(self) -> list[Ticket]:
        """All that have a slot now."""
        return [*self.reserved, *self.shared[: max(0, self.num_shared)]]


def is_mark(ticket: Ticket) -> bool:
    """True for an owner's mark, which waits for nothing: its `asked_s` is the owner's latest start."""
    return not ticket.key


def mark(owner: str, now_s: float) -> Ticket:
    """The mark of an owner that starts now while older starts of it wait."""
    return Ticket(owner, "", "train", now_s, now_s + MARK_S)


def in_turn(queue: Iterable[Ticket], tickets: Iterable[Ticket]) -> list[Ticket]:
    """The queue sorted for `fair`: by when each asked, or its owner's mark among all `tickets` where that is later."""
    marks = {ticket.owner: ticket.asked_s for ticket in tickets if is_mark(ticket)}
    if not marks:
        return sorted(queue, key=attrgetter("asked_s", "owner", "key"))

    def turn(ticket: Ticket) -> tuple[float, bool, str, float, str]:
        from_s = marks.get(ticket.owner, -inf)
        return max(ticket.asked_s, from_s), from_s >= ticket.asked_s, ticket.owner, ticket.asked_s, ticket.key

    return sorted(queue, key=turn)


def place_of(tickets: list[Ticket], ticket: Ticket) -> int | None:
    """At which place this very ticket is, from 0; None if it is not among them."""
    for number, other in enumerate(tickets):
        if other is ticket:
            return number
    return None


def num_held(holding: Holding) -> int:
    """Slots held, of both kinds and all owners."""
    return sum(map(sum, holding.by_owner.values()))


def order_of(rules: Rules, snapshot: Snapshot, queue: list[Ticket], owner: str) -> Order:
    """The order of `queue`, all live tickets with the asking `owner`'s start among them, and who gets a free slot."""
    queue, rooms, holding = in_turn(queue, snapshot.tickets), _rooms(rules, owner, snapshot), snapshot.holding
    free = rules.capacity - num_held(holding)
    reserve = max(0, rules.eval_reserved - sum(evals for _, evals in holding.by_owner.values()))
    num_first = max(0, min(free, reserve))
    first = fair([t for t in queue if t.kind == "eval"], holding, rooms)[:num_first] if num_first else []
    after, left = dict(holding.by_owner), dict(rooms)
    for ticket in first:
        train, evals = after.get(ticket.owner, (0, 0))
        after[ticket.owner] = (train, evals + 1)
        if ticket.owner in left:
            left[ticket.owner] -= 1
    taken = {(t.owner, t.key) for t in first}
    rest = [t for t in queue if (t.owner, t.key) not in taken] if first else queue
    return Order(rules, snapshot, queue, rooms, first, fair(rest, Holding(after), left), free - reserve)


def _rooms(rules: Rules, owner: str, snapshot: Snapshot) -> dict[str, int]:
    """Slots that each owner may still take under its own caps; an owner left out has none."""
    rooms = dict(snapshot.rooms)
    if snapshot.owner_max_tasks:
        rooms[owner] = snapshot.owner_max_tasks - snapshot.owner_holds
    if rules.owner_capacity:
        for name in {owner, *[t.owner for t in snapshot.tickets]}:
            here = rules.owner_capacity - sum(snapshot.holding.by_owner.get(name, (0, 0)))
            rooms[name] = min(here, rooms.get(name, here))
    return rooms


def fair(queue: list[Ticket], holding: Holding, rooms: Mapping[str, int]) -> list[Ticket]:
    """The max-min fair order of a queue that is sorted by `in_turn`, without what the owners' rooms leave out.

    An owner's candidate number k would be its slot number held + k. Taking the smallest such number first, and keeping
    the queue's order among equals, is the same as asking again and again for the owner that holds the fewest.
    """
    levels: dict[int, list[Ticket]] = {}
    next_level: dict[str, int] = {}
    end_level: dict[str, float] = {}
    for ticket in queue:
        owner = ticket.owner
        level = next_level.get(owner)
        if level is None:
            level = sum(holding.by_owner.get(owner, (0, 0)))
            end_level[owner] = level + rooms.get(owner, inf)
        if level < end_level[owner]:
            next_level[owner] = level + 1
            if level in levels:
                levels[level].append(ticket)
            else:
                levels[level] = [ticket]
    return [ticket for level in sorted(levels) for ticket in levels[level]]
