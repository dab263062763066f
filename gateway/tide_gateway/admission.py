"""Who may start now: a pure decision over what is held, who waits, and the start rate.

    caps of the owner -> slots (reserved for eval, then shared) -> start rate -> Admit | Refuse with a place in the queue

Candidates are the live tickets and the start that asks. Their order is max-min fair: next is always the owner that
holds the fewest slots, where each slot that the order has already given it counts as held; ties go to who asked first,
and within an owner who asked first is first. An owner's candidates beyond its own caps are left out, so that they block
nobody. The start is admitted if the slots that are free now reach to its place.

Slots are given in two passes. First the reserved slots that no eval task uses yet, to eval candidates only. That takes
nothing from training: such a slot is one that a train task may not have, and filling it lowers the reserve by as much.
Then the shared slots, to all that are left, train and eval alike. Starts that have a slot take the rate in the same
fair order, so that eval tasks that come and go on the reserve cannot use up the whole rate.

A ticket ahead holds back one slot until its holder calls again or it expires; nothing is blocked longer than that.
Nothing here reads a clock, writes or logs; equal arguments give equal answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["train", "eval"]
Reason = Literal["capacity", "owner_capacity", "owner_tasks", "rate", "queue_full"]

MIN_RETRY_S = 0.5
MAX_RETRY_S = 30.0
UNKNOWN_RETRY_S = 1.0
UNKNOWN_RELEASES_PER_S = 10.0
"""What is assumed where nothing was released lately; keeps a full queue of 4096 below 200 calls a second."""
MIN_GRACE_S = 2.0
"""At least so long after its time may a ticket's holder call: the wire rounds up to whole seconds."""
MAX_GRACE_S = 30.0
RATE_TOLERANCE_S = 1e-6
"""Seconds since 1970 as floats are this exact; a caller that comes exactly when told is not refused for rounding."""


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
class Wish:
    """The start that asks now."""

    owner: str
    key: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is true at `now_s`, read in one transaction.

    Attributes:
        tickets: the environment's tickets, in any order (fastest by `asked_s`), expired ones too.
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
class Admit:
    """The start may go on.

    Attributes:
        next_s: the rate's new `next_s`, to be stored with the start.
        drop: (owner, key) of tickets to delete: expired ones, and the start's own.
    """

    next_s: float
    drop: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The start has to wait. Nothing changes but tickets.

    Attributes:
        reason: what is in its way; `owner_capacity` is the owner's limit here, `owner_tasks` that over all
            environments, `queue_full` that it waits without a place.
        retry_after_s: when to call again, from now; above 0.
        ticket: to be stored in place of the start's older one; None if it gets none.
        drop: (owner, key) of tickets to delete; never that of `ticket`.
        detail: one sentence for people.
    """

    reason: Reason
    retry_after_s: float
    ticket: Ticket | None
    drop: tuple[tuple[str, str], ...]
    detail: str


@dataclass(frozen=True, slots=True)
class _Case:
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


def decide(rules: Rules, wish: Wish, snapshot: Snapshot) -> Admit | Refuse:
    """Admit or refuse one start. O(n log n) in the number of tickets.

    The cap holds if the caller makes the snapshot, the decision and the start one transaction per environment.
    """
    now_s, me = snapshot.now_s, (wish.owner, wish.key)
    live = [t for t in snapshot.tickets if t.expires_s > now_s]
    expired = {(t.owner, t.key) for t in snapshot.tickets if t.expires_s <= now_s}
    own = next((t for t in live if (t.owner, t.key) == me), None)
    asking = Ticket(wish.owner, wish.key, wish.kind, now_s if own is None else own.asked_s, now_s)
    case = _case(rules, snapshot, [*(t for t in live if t is not own), asking], wish.owner)
    place = _place(case.shared, asking)
    if _place(case.granted, asking) is not None:
        starts = _fair(sorted(case.granted, key=_asked), snapshot.holding, {})
        from_s, next_s = _rate(rules, snapshot, _place(starts, asking) or 0)
        if from_s <= now_s + RATE_TOLERANCE_S:
            return Admit(next_s, tuple(sorted(expired | {me})))
        words = f"the start rate of {rules.start_rate:g} per second is used up"
        return _refuse(case, asking, own, expired, ("rate", from_s - now_s, words))
    if place is not None:
        number = place - max(0, case.num_shared) + 1
        words = f"all slots that a task of kind {wish.kind} may have are taken; place {number} in the queue"
        return _refuse(case, asking, own, expired, ("capacity", _slot_wait_s(case, asking, place), words))
    return _refuse(case, asking, own, expired, _owner_wait(case, asking))


def startable(rules: Rules, owner: str, kind: Kind, snapshot: Snapshot) -> int:
    """How many tasks of a kind an owner could start now, its own waiting starts among them; the rate left aside."""
    now_s = snapshot.now_s
    waiting = [t for t in snapshot.tickets if t.expires_s > now_s and t.owner != owner]
    num_free = rules.capacity - _num_held(snapshot.holding)
    mine = [Ticket(owner, f"{number:06d}", kind, now_s, now_s) for number in range(num_free)]
    return sum(ticket.owner == owner for ticket in _case(rules, snapshot, [*waiting, *mine], owner).granted)


def _asked(ticket: Ticket) -> tuple[float, str, str]:
    return ticket.asked_s, ticket.owner, ticket.key


def _place(tickets: list[Ticket], ticket: Ticket) -> int | None:
    return next((number for number, other in enumerate(tickets) if other is ticket), None)


def _num_held(holding: Holding) -> int:
    return sum(map(sum, holding.by_owner.values()))


def _case(rules: Rules, snapshot: Snapshot, queue: list[Ticket], owner: str) -> _Case:
    queue, rooms, holding = sorted(queue, key=_asked), _rooms(rules, owner, snapshot), snapshot.holding
    free = rules.capacity - _num_held(holding)
    reserve = max(0, rules.eval_reserved - sum(evals for _, evals in holding.by_owner.values()))
    first = _fair([t for t in queue if t.kind == "eval"], holding, rooms)[: max(0, min(free, reserve))]
    after, left = dict(holding.by_owner), dict(rooms)
    for ticket in first:
        train, evals = after.get(ticket.owner, (0, 0))
        after[ticket.owner] = (train, evals + 1)
        if ticket.owner in left:
            left[ticket.owner] -= 1
    taken = {(t.owner, t.key) for t in first}
    rest = [t for t in queue if (t.owner, t.key) not in taken] if first else queue
    return _Case(rules, snapshot, queue, rooms, first, _fair(rest, Holding(after), left), free - reserve)


def _rooms(rules: Rules, owner: str, snapshot: Snapshot) -> dict[str, int]:
    """Slots that each owner may still take under its own caps; an owner left out has none."""
    rooms = dict(snapshot.rooms)
    if snapshot.owner_max_tasks:
        rooms[owner] = snapshot.owner_max_tasks - snapshot.owner_holds
    if rules.owner_capacity:
        for name in {owner, *(t.owner for t in snapshot.tickets)}:
            here = rules.owner_capacity - sum(snapshot.holding.by_owner.get(name, (0, 0)))
            rooms[name] = min(here, rooms.get(name, here))
    return rooms


def _fair(queue: list[Ticket], holding: Holding, rooms: Mapping[str, int]) -> list[Ticket]:
    """The max-min fair order of a queue that is sorted by `_asked`, without what the owners' rooms leave out.

    An owner's candidate number k would be its slot number held + k. Taking the smallest such number first, and keeping
    the queue's order among equals, is the same as asking again and again for the owner that holds the fewest.
    """
    levels: dict[int, list[Ticket]] = {}
    next_level: dict[str, int] = {}
    for ticket in queue:
        held = sum(holding.by_owner.get(ticket.owner, (0, 0)))
        level = next_level.get(ticket.owner, held)
        if ticket.owner not in rooms or level - held < rooms[ticket.owner]:
            next_level[ticket.owner] = level + 1
            levels.setdefault(level, []).append(ticket)
    return [ticket for level in sorted(levels) for ticket in levels[level]]


def _rate(rules: Rules, snapshot: Snapshot, place: int) -> tuple[float, float]:
    """From when the start at `place` (from 0) is within the rate, and `next_s` after one start.

    GCRA: each start moves `next_s` on by one interval, and it never lies more than the burst behind now. Nor is it more
    than one interval ahead, unless the rate was raised or the clock set back: then that is cut.
    """
    if rules.start_rate <= 0:
        return snapshot.now_s, snapshot.next_s
    interval_s = 1.0 / rules.start_rate
    oldest_s = snapshot.now_s - (rules.start_burst - 1) * interval_s
    from_s = min(max(oldest_s, snapshot.next_s), snapshot.now_s + interval_s)
    return from_s + place * interval_s, from_s + interval_s


def _release_wait_s(snapshot: Snapshot, num_releases: int, num_of: int) -> float:
    """Seconds until `num_releases` of `num_of` held slots, if all that are held are released as evenly as lately."""
    if snapshot.num_released_recently <= 0 or snapshot.recent_s <= 0 or num_of <= 0:
        return min(MAX_RETRY_S, max(UNKNOWN_RETRY_S, num_releases / UNKNOWN_RELEASES_PER_S))
    per_s = snapshot.num_released_recently / snapshot.recent_s * num_of / _num_held(snapshot.holding)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, num_releases / per_s))


def _slot_wait_s(case: _Case, asking: Ticket, place: int) -> float:
    """Seconds until a slot reaches the start: a shared one, or a reserved one if that comes earlier."""
    snapshot = case.snapshot
    wait_s = _release_wait_s(snapshot, place - case.num_shared + 1, _num_held(snapshot.holding))
    num_evals = sum(evals for _, evals in snapshot.holding.by_owner.values())
    evals = _fair([t for t in case.queue if t.kind == "eval"], snapshot.holding, case.rooms)
    among = _place(evals, asking)
    if among is None or not case.rules.eval_reserved or not num_evals:
        return wait_s
    return min(wait_s, _release_wait_s(snapshot, among - len(case.reserved) + 1, num_evals))


def _owner_wait(case: _Case, asking: Ticket) -> tuple[Reason, float, str]:
    snapshot, limit = case.snapshot, case.rules.owner_capacity
    held = sum(snapshot.holding.by_owner.get(asking.owner, (0, 0)))
    room = case.rooms[asking.owner]
    mine = [t for t in case.queue if t.owner == asking.owner]
    num_releases = (_place(mine, asking) or 0) - room + 1
    if limit and limit - held == room:
        words = f"the owner holds {held} slots of the {limit} that one owner may have here"
        return "owner_capacity", _release_wait_s(snapshot, num_releases, held), words
    words = f"the owner holds {snapshot.owner_holds} tasks, of {snapshot.owner_max_tasks} over all environments"
    # How fast it releases elsewhere is not known here.
    return "owner_tasks", _release_wait_s(snapshot, num_releases, 0), words


def _refuse(
    case: _Case, asking: Ticket, own: Ticket | None, drop: set[tuple[str, str]], why: tuple[Reason, float, str]
) -> Refuse:
    reason, retry_s, words = why
    me = (asking.owner, asking.key)
    detail = f"{words}; call again in {retry_s:.1f} s"
    if reason == "owner_tasks" and asking.owner not in case.snapshot.rooms:
        return Refuse(reason, retry_s, None, tuple(sorted(drop if own is None else drop | {me})), detail)
    if own is None and len(case.queue) > case.rules.max_queue:
        victim = _longest(case.queue, asking) if case.rules.max_queue else None
        if victim is None:
            full = f"{words}, and the queue holds {case.rules.max_queue} starts; call again in {retry_s:.1f} s"
            return Refuse("queue_full", retry_s, None, tuple(sorted(drop)), full)
        drop = drop | {(victim.owner, victim.key)}
    grace_s = min(MAX_GRACE_S, max(MIN_GRACE_S, retry_s))
    ticket = replace(asking, expires_s=case.snapshot.now_s + retry_s + grace_s)
    return Refuse(reason, retry_s, ticket, tuple(sorted(drop - {me})), detail)


def _longest(queue: list[Ticket], asking: Ticket) -> Ticket | None:
    """Whose place goes to the asking owner in a full queue: the last one of the owner with the most; None if the asking
    owner would have as many."""
    counts = Counter(ticket.owner for ticket in queue)
    most = max(counts, key=lambda owner: (counts[owner], owner))
    if counts[asking.owner] >= counts[most]:
        return None
    return next(ticket for ticket in reversed(queue) if ticket.owner == most)
