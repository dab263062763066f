"""A model of what the gateway keeps for its admission: tasks, tickets and the start rate, on a manual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tide_gateway.admission import Admit, Holding, Kind, Refuse, Rules, Snapshot, Ticket, Wish, decide


@dataclass
class Store:
    """What the gateway keeps: tasks, tickets and the rate. Each step is one transaction."""

    rules: Rules
    max_tasks: dict[str, int] = field(default_factory=dict[str, int])
    now_s: float = 1.8e9
    next_s: float = 0.0
    held: dict[tuple[str, str], Kind] = field(default_factory=dict[tuple[str, str], Kind])
    tickets: dict[tuple[str, str], Ticket] = field(default_factory=dict[tuple[str, str], Ticket])
    released: list[float] = field(default_factory=list[float])

    def snapshot(self, owner: str) -> Snapshot:
        by_owner: dict[str, tuple[int, int]] = {}
        for (name, _), kind in self.held.items():
            train, evals = by_owner.get(name, (0, 0))
            by_owner[name] = (train + (kind == "train"), evals + (kind == "eval"))
        holds = Counter(name for name, _ in self.held)
        return Snapshot(
            holding=Holding(by_owner),
            tickets=tuple(self.tickets.values()),
            next_s=self.next_s,
            owner_max_tasks=self.max_tasks.get(owner, 0),
            owner_holds=holds[owner],
            num_released_recently=sum(at > self.now_s - 60 for at in self.released),
            recent_s=60.0,
            now_s=self.now_s,
            rooms={name: limit - holds[name] for name, limit in self.max_tasks.items()},
        )

    def ask(self, owner: str, key: str, kind: Kind = "train") -> Admit | Refuse:
        answer = decide(self.rules, Wish(owner, key, kind), self.snapshot(owner))
        for name in answer.drop:
            self.tickets.pop(name, None)
        if isinstance(answer, Admit):
            self.next_s = answer.next_s
            self.held[owner, key] = kind
            if answer.mark is not None:
                self.tickets[owner, answer.mark.key] = answer.mark
        elif answer.ticket is not None:
            self.tickets[owner, key] = answer.ticket
        return answer

    def release(self, owner: str, key: str) -> None:
        del self.held[owner, key]
        self.released.append(self.now_s)


def refused(answer: Admit | Refuse) -> Refuse:
    assert isinstance(answer, Refuse)
    return answer


def full_store(capacity: int = 2, **rules: float) -> Store:
    store = Store(Rules(capacity=capacity, **rules))  # type: ignore[arg-type]
    for number in range(capacity):
        assert isinstance(store.ask("flood", f"first{number}"), Admit)
    return store
