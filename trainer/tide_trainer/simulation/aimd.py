"""A baseline: concurrency by additive increase and multiplicative decrease, on the engine's KV use.

The limit grows by a constant and shrinks by a factor; with `slow_start` it doubles until the first congestion.
Tasks above a lowered limit are paused where their next call waits, and go on, the latest paused first (the likeliest to
be cached), before new ones start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, Refuse, Resume, TaskEntry
from tide_trainer.simulation.new_tasks import NewTasks
from tide_trainer.types import RankId


@dataclass(frozen=True, slots=True)
class AimdSettings:
    """The controller's constants; the defaults were the best found for presets A to C on seeds of tuning.

    Attributes:
        start: tasks in flight on a rank at first.
        increase: tasks added in each interval without congestion, after the first congestion.
        decrease: factor at congestion.
        target_fraction: KV use above which the engine counts as congested; so does any preemption.
        interval_s: seconds between two looks at the engine.
        settle_s: seconds after a decrease in which no other one follows.
        slow_start: doubles at first. Contexts fill a cache over many turns, so that the signal comes too late for it.
        pauses: whether tasks above a lowered limit are paused; else they run to their end.
    """

    start: int = 128
    increase: float = 8.0
    decrease: float = 0.75
    target_fraction: float = 0.5
    interval_s: float = 2.0
    settle_s: float = 5.0
    slow_start: bool = False
    pauses: bool = True


@dataclass(slots=True)
class _Task:
    entry: TaskEntry
    rank: RankId
    call: tuple[int, int] | None = None
    paused: bool = False


@dataclass(slots=True)
class _Rank:
    kv_tokens: int
    limit: float
    num_running: int = 0
    climbing: bool = False
    settled_at_s: float = 0.0
    num_preemptions: int = 0
    paused: list[str] = field(default_factory=list[str])


class AimdPolicy:
    """One limit per rank; a running task is one that has started and is not paused."""

    def __init__(self, ranks: Mapping[RankId, int], settings: AimdSettings) -> None:
        """Takes the KV tokens of each rank."""
        self._settings = settings
        self._ranks = {
            rank: _Rank(kv_tokens, settings.start, climbing=settings.slow_start) for rank, kv_tokens in ranks.items()
        }
        self._new = NewTasks()
        self._tasks: dict[str, _Task] = {}
        self._calls: list[str] = []

    @property
    def observe_every_s(self) -> float:
        """See `Observer`."""
        return self._settings.interval_s

    def observe(self, kv_usage_fraction: float, num_preemptions: int, now_s: float, rank: RankId | None = None) -> None:
        """Moves a rank's limit (the first rank's, if none is named)."""
        of = self._ranks[rank] if rank is not None else next(iter(self._ranks.values()))
        settings = self._settings
        congested = kv_usage_fraction > settings.target_fraction or num_preemptions > of.num_preemptions
        of.num_preemptions = num_preemptions
        if congested:
            of.climbing = False
            if now_s >= of.settled_at_s:
                of.limit = max(1.0, min(of.limit, of.num_running) * settings.decrease)
                of.settled_at_s = now_s + settings.settle_s
        elif of.num_running >= int(of.limit):
            # A limit that nobody reaches says nothing about a higher one.
            of.limit = 2 * of.limit if of.climbing else of.limit + settings.increase

    def limit(self, rank: RankId) -> int:
        """Tasks that may run on the rank now."""
        return int(self._ranks[rank].limit)

    def submit(self, entry: TaskEntry) -> None:
        """See `Policy`."""
        self._new.push(entry)

    def on_call(self, task: str, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """See `Policy`."""
        self._tasks[task].call = (prompt_tokens, max_new_tokens)
        self._calls.append(task)

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """See `Policy`."""

    def on_end(self, task: str, now_s: float, *, completed: bool = True) -> None:
        """See `Policy`."""
        gone = self._tasks.pop(task)
        if gone.paused:
            self._ranks[gone.rank].paused.remove(task)
        else:
            self._ranks[gone.rank].num_running -= 1

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """Grants what waits, pauses above the limit, then resumes and starts up to it."""
        out: list[Decision] = []
        calls, self._calls = self._calls, []
        for name in calls:
            if (task := self._tasks.get(name)) is not None:
                out.append(self._answer(name, task))
        for rank_id, rank in self._ranks.items():
            while rank.paused and rank.num_running < int(rank.limit):
                name = rank.paused.pop()
                self._tasks[name].paused = False
                rank.num_running += 1
                out.append(Resume(name, rank_id, f"{rank.num_running} of {rank.limit:.1f} run"))
        while (entry := self._new.peek()) is not None:
            rank_id, rank = max(self._ranks.items(), key=lambda item: int(item[1].limit) - item[1].num_running)
            if rank.num_running >= int(rank.limit) or rank.paused:
                break
            self._new.pop()
            self._tasks[entry.task] = _Task(entry, rank_id)
            rank.num_running += 1
            out.append(Admit(entry.task, rank_id, f"{rank.num_running} of {rank.limit:.1f} run"))
        return tuple(out)

    def next_wake_s(self) -> float | None:
        """See `Policy`; `observe` alone changes anything without an event."""
        return None

    def _answer(self, name: str, task: _Task) -> Decision:
        rank = self._ranks[task.rank]
        assert task.call is not None
        if sum(task.call) > rank.kv_tokens:
            return Refuse(name, f"{sum(task.call)} tokens are more than the KV cache of {rank.kv_tokens}")
        above = self._settings.pauses and rank.num_running > int(rank.limit)
        if above and task.entry.kind != "eval":
            task.paused = True
            rank.paused.append(name)
            rank.num_running -= 1
            return Pause(name, f"{rank.num_running + 1} run, {rank.limit:.1f} may")
        return Grant(name, task.rank, f"{rank.num_running} of {rank.limit:.1f} run")
