"""Who may start now: a pure decision over what is held, who waits, and the start rate.

    caps of the owner -> slots (reserved for eval, then shared) -> start rate -> Admit | Refuse, with a ticket

Candidates are the live tickets and the start that asks, in the order of `tide_gateway.fairness`. The start is admitted
if the slots that are free now reach to its place. Starts that have a slot take the rate in the same fair order, so that
eval tasks that come and go on the reserve cannot use up the whole rate.

A ticket ahead holds back one slot until its holder calls again or it expires; nothing is blocked longer than that.
Nothing here reads a clock, writes or logs; equal arguments give equal answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from tide_gateway.fairness import (
    Holding,
    Kind,
    Order,
    Rules,
    Snapshot,
    Ticket,
    fair,
    in_turn,
    is_mark,
    mark,
    num_held,
    order_of,
    place_of,
)

__all__ = [
    "Admit",
    "Holding",
    "Kind",
    "Refuse",
    "Rules",
    "Snapshot",
    "Ticket",
    "Wish",
    "decide",
    "startable",
    "waiting",
]

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
class Wish:
    """The start that asks now."""

    owner: str
    key: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Admit:
    """The start may go on.

    Attributes:
        next_s: the rate's new `next_s`, to be stored with the start.
        drop: (owner, key) of tickets to delete: expired ones, the start's own, and marks that matter no more.
        mark: to be stored like a ticket, in place of the owner's older mark; None if it needs none.
    """

    next_s: float
    drop: tuple[tuple[str, str], ...]
    mark: Ticket | None = None


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


def decide(rules: Rules, wish: Wish, snapshot: Snapshot) -> Admit | Refuse:
    """Admit or refuse one start. O(n log n) in the number of tickets.

    The cap holds if the caller makes the snapshot, the decision and the start one transaction per environment.
    """
    now_s, me = snapshot.now_s, (wish.owner, wish.key)
    live = waiting(snapshot)
    expired = {(t.owner, t.key) for t in snapshot.tickets if t.expires_s <= now_s}
    own = next((t for t in live if t.key == wish.key and t.owner == wish.owner), None)
    asking = Ticket(wish.owner, wish.key, wish.kind, now_s if own is None else own.asked_s, now_s)
    order = order_of(rules, snapshot, [*[t for t in live if t is not own], asking], wish.owner)
    place = place_of(order.shared, asking)
    if place_of(order.granted, asking) is not None:
        starts = fair(in_turn(order.granted, snapshot.tickets), snapshot.holding, {})
        from_s, next_s = _rate(rules, snapshot, place_of(starts, asking) or 0)
        if from_s <= now_s + RATE_TOLERANCE_S:
            return _admit(snapshot, [t for t in live if t is not own], me, expired, next_s)
        words = f"the start rate of {rules.start_rate:g} per second is used up"
        return _refuse(order, asking, own, expired, ("rate", from_s - now_s, words))
    if place is not None:
        number = place - max(0, order.num_shared) + 1
        words = f"all slots that a task of kind {wish.kind} may have are taken; place {number} in the queue"
        return _refuse(order, asking, own, expired, ("capacity", _slot_wait_s(order, asking, place), words))
    return _refuse(order, asking, own, expired, _owner_wait(order, asking))


def _admit(
    snapshot: Snapshot, left: list[Ticket], me: tuple[str, str], expired: set[tuple[str, str]], next_s: float
) -> Admit:
    oldest: dict[str, float] = {}
    for ticket in left:
        oldest[ticket.owner] = min(ticket.asked_s, oldest.get(ticket.owner, inf))
    marks = [t for t in snapshot.tickets if is_mark(t)]
    drop = expired | {me} | {(t.owner, t.key) for t in marks if oldest.get(t.owner, inf) >= t.asked_s}
    if oldest.get(me[0], inf) >= snapshot.now_s:
        return Admit(next_s, tuple(sorted(drop)))
    new = mark(me[0], snapshot.now_s)
    return Admit(next_s, tuple(sorted(drop - {(new.owner, new.key)})), new)


def startable(rules: Rules, owner: str, kind: Kind, snapshot: Snapshot) -> int:
    """How many tasks of a kind an owner could start now, its own waiting starts among them; the rate left aside."""
    now_s = snapshot.now_s
    others = [ticket for ticket in waiting(snapshot) if ticket.owner != owner]
    num_free = rules.capacity - num_held(snapshot.holding)
    mine = [Ticket(owner, f"{number:06d}", kind, now_s, now_s) for number in range(num_free)]
    return sum(ticket.owner == owner for ticket in order_of(rules, snapshot, [*others, *mine], owner).granted)


def waiting(snapshot: Snapshot) -> list[Ticket]:
    """The tickets that still count."""
    return [t for t in snapshot.tickets if t.expires_s > snapshot.now_s and not is_mark(t)]


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
    per_s = snapshot.num_released_recently / snapshot.recent_s * num_of / num_held(snapshot.holding)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, num_releases / per_s))


def _slot_wait_s(order: Order, asking: Ticket, place: int) -> float:
    """Seconds until a slot reaches the start: a shared one, or a reserved one if that comes earlier."""
    snapshot = order.snapshot
    wait_s = _release_wait_s(snapshot, place - order.num_shared + 1, num_held(snapshot.holding))
    num_evals = sum(evals for _, evals in snapshot.holding.by_owner.values())
    if asking.kind != "eval" or not order.rules.eval_reserved or not num_evals:
        return wait_s
    evals = fair([t for t in order.queue if t.kind == "eval"], snapshot.holding, order.rooms)
    among = place_of(evals, asking)
    if among is None:
        return wait_s
    return min(wait_s, _release_wait_s(snapshot, among - len(order.reserved) + 1, num_evals))


def _owner_wait(order: Order, asking: Ticket) -> tuple[Reason, float, str]:
    snapshot, limit = order.snapshot, order.rules.owner_capacity
    held = sum(snapshot.holding.by_owner.get(asking.owner, (0, 0)))
    room = order.rooms[asking.owner]
    mine = [t for t in order.queue if t.owner == asking.owner]
    num_releases = (place_of(mine, asking) or 0) - room + 1
    if limit and limit - held == room:
        words = f"the owner holds {held} slots of the {limit} that one owner may have here"
        return "owner_capacity", _release_wait_s(snapshot, num_releases, held), words
    words = f"the owner holds {snapshot.owner_holds} tasks, of {snapshot.owner_max_tasks} over all environments"
    # How fast it releases elsewhere is not known here.
    return "owner_tasks", _release_wait_s(snapshot, num_releases, 0), words


def _refuse(
    order: Order, asking: Ticket, own: Ticket | None, drop: set[tuple[str, str]], why: tuple[Reason, float, str]
) -> Refuse:
    reason, retry_s, words = why
    me = (asking.owner, asking.key)
    detail = f"{words}; call again in {retry_s:.1f} s"
    if reason == "owner_tasks" and asking.owner not in order.snapshot.rooms:
        return Refuse(reason, retry_s, None, tuple(sorted(drop if own is None else drop | {me})), detail)
    if own is None and len(order.queue) > order.rules.max_queue:
        victim = _longest(order.queue, asking) if order.rules.max_queue else None
        if victim is None:
            full = f"{words}, and the queue holds {order.rules.max_queue} starts; call again in {retry_s:.1f} s"
            return Refuse("queue_full", retry_s, None, tuple(sorted(drop)), full)
        drop = drop | {(victim.owner, victim.key)}
    grace_s = min(MAX_GRACE_S, max(MIN_GRACE_S, retry_s))
    ticket = replace(asking, expires_s=order.snapshot.now_s + retry_s + grace_s)
    return Refuse(reason, retry_s, ticket, tuple(sorted(drop - {me})), detail)


def _longest(queue: list[Ticket], asking: Ticket) -> Ticket | None:
    """Whose place goes to the asking owner in a full queue: the last of the owner with the most, None if it has them.

    So a flood from one owner does not keep another one out of the queue.
    """
    counts = Counter(ticket.owner for ticket in queue)
    most = max(counts, key=lambda owner: (counts[owner], owner))
    if counts[asking.owner] >= counts[most]:
        return None
    return next(ticket for ticket in reversed(queue) if ticket.owner == most)
