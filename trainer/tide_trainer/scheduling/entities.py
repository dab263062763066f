"""Groups, ranks and tasks as the task scheduler remembers them. Mutable, private to `scheduling`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tide_trainer.scheduling.budget import PeakLedger, TokenLedger
from tide_trainer.scheduling.capacity import EnvironmentState
from tide_trainer.scheduling.plan import Phase, TaskEntry
from tide_trainer.scheduling.priority import Key
from tide_trainer.types import RankId


@dataclass(slots=True, eq=False)
class GroupState:
    """Sibling tasks. `prompt_tokens` is the first prompt as first measured; `released`: siblings may start."""

    uid: str
    num_siblings: int
    num_finished: int = 0
    num_finals: int = 0
    final_tokens: int = 0
    prompt_tokens: int | None = None
    released: bool = False
    probe: TaskState | None = None
    home: RankId | None = None
    members: dict[str, TaskState] = field(default_factory=dict[str, "TaskState"])
    held_back: dict[str, TaskState] = field(default_factory=dict[str, "TaskState"])


@dataclass(slots=True, eq=False)
class RankState:
    """A rollout rank: its budget, the model version it serves, what its tasks hold, and the calls that wait for it."""

    rank: RankId
    seq: int
    budget_tokens: int
    live: TokenLedger
    projected: PeakLedger
    kv_tokens: int
    version: int = 0
    gate_open: bool = True
    engine_tokens: int | None = None
    excess_tokens: int = 0
    overloaded: bool = False
    aborting: set[str] = field(default_factory=set[str])
    aborted_at_s: float = float("-inf")
    stamp: int = 0
    tasks: dict[str, TaskState] = field(default_factory=dict[str, "TaskState"])
    fresh: list[TaskState] = field(default_factory=list["TaskState"])
    waiting: dict[str, TaskState] = field(default_factory=dict[str, "TaskState"])
    waiting_tokens: int = 0
    num_waiting_eval: int = 0
    num_starved: int = 0
    generating: dict[str, int] = field(default_factory=dict[str, int])
    generating_tokens: int = 0
    heap: list[HeapEntry] = field(default_factory=list["HeapEntry"])
    orders: list[tuple[int, int, TaskState]] = field(default_factory=list[tuple[int, int, "TaskState"]])

    def num_active(self) -> int:
        """Tasks here that are neither paused nor held."""
        return len(self.tasks) - len(self.waiting) - len(self.fresh)

    def at_engine(self, uid: str, tokens: int) -> None:
        """A task's call at the engine may get so long; 0: it has none there."""
        self.generating_tokens += tokens - self.generating.pop(uid, 0)
        if tokens:
            self.generating[uid] = tokens

    def earliest_order(self) -> int | None:
        """The smallest `order_key` of the waiting tasks."""
        while self.orders:
            order_key, _, task = self.orders[0]
            if self.waiting.get(task.entry.task) is task:
                return order_key
            heapq.heappop(self.orders)
        return None

    def peek(self) -> TaskState | None:
        """The waiting task of the highest priority."""
        while self.heap:
            _, _, stamp, task = self.heap[0]
            if stamp == task.stamp and task.rank is self:
                return task
            heapq.heappop(self.heap)
        return None


@dataclass(slots=True, eq=False)
class TaskState:
    """One task. `stamp` changes whenever a heap entry about it becomes stale; `wait` numbers its waits, for timers."""

    entry: TaskEntry
    seq: int
    group: GroupState
    environment: EnvironmentState
    phase: Phase = Phase.QUEUED
    rank: RankState | None = None
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    context_tokens: int = 0
    first_prompt_tokens: int = 0
    final_tokens: int | None = None
    waiting_since_s: float = 0.0
    changed_s: float | None = None
    starved: bool = False
    cold: bool = False
    stamp: int = 0
    wait: int = 0

    @property
    def is_eval(self) -> bool:
        """Whether it belongs to an evaluation."""
        return self.entry.kind == "eval"

    @property
    def need_tokens(self) -> int:
        """The longest that the waiting call can get."""
        return self.prompt_tokens + self.max_new_tokens


HeapEntry = tuple[Key, int, int, TaskState]
