"""A baseline: Algorithm 1 of the TideRL paper as printed, with present footprints only and without hysteresis.

Source: TideRL section 4, Algorithm 1.
Deviation: a task chosen for pausing while its call is at the engine is paused where its next call waits, and its tokens
count as free from the choice on; the last active task of a rank is never paused, so that every workload ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tide_trainer.scheduling.budget import TokenLedger
from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, Refuse, Resume, TaskEntry
from tide_trainer.simulation.new_tasks import NewTasks
from tide_trainer.types import RankId


@dataclass(frozen=True, slots=True)
class AlgorithmOneSettings:
    """The paper's free choices.

    Attributes:
        budget_fraction: share of the KV cache that is B_r.
        probe: siblings wait until the first prompt of their group's first task is known.
        prior_tokens: footprint of a task before any first prompt has been seen.
        share_group_prefix: counts a group's first prompt once per rank; the paper counts each context whole.
        new_while_paused: as printed, a new task may start while no paused one fits; false: paused ones go first always.
    """

    budget_fraction: float = 0.92
    probe: bool = True
    prior_tokens: int = 512
    share_group_prefix: bool = False
    new_while_paused: bool = True


class _Where(Enum):
    ADMITTED = 0
    GENERATING = 1
    ACTING = 2
    HELD = 3
    PAUSED = 4


@dataclass(slots=True)
class _Group:
    num_siblings: int
    num_finished: int = 0
    prompt_tokens: int | None = None
    probe: str | None = None
    home: RankId | None = None
    held_back: list[TaskEntry] = field(default_factory=list[TaskEntry])


@dataclass(slots=True)
class _Task:
    entry: TaskEntry
    rank: RankId
    group: _Group
    tokens: int
    where: _Where = _Where.ADMITTED
    leaving: bool = False
    max_new_tokens: int = 0


@dataclass(slots=True)
class _Rank:
    kv_tokens: int
    budget_tokens: int
    ledger: TokenLedger
    active: dict[str, _Task] = field(default_factory=dict[str, _Task])
    paused: dict[str, _Task] = field(default_factory=dict[str, _Task])
    # Usage at which no paused task fitted, while the paused ones stay the same: nothing fits above it either.
    full_at_tokens: int | None = None


class AlgorithmOnePolicy:
    """`active` are the tasks that count; `paused` those chosen for pausing, whether their call waits already or not."""

    def __init__(self, ranks: Mapping[RankId, int], block_tokens: int, settings: AlgorithmOneSettings) -> None:
        """Takes the KV tokens of each rank."""
        self._settings = settings
        self._ranks = {
            rank: _Rank(kv, int(kv * settings.budget_fraction), TokenLedger(block_tokens)) for rank, kv in ranks.items()
        }
        self._new = NewTasks()
        self._tasks: dict[str, _Task] = {}
        self._groups: dict[str, _Group] = {}
        self._out: list[Decision] = []
        self._calls: list[_Task] = []
        self._seen_prompt_tokens = settings.prior_tokens

    def submit(self, entry: TaskEntry) -> None:
        """See `Policy`."""
        group = self._groups.setdefault(entry.group, _Group(entry.num_siblings))
        if self._settings.probe and group.probe is not None and group.prompt_tokens is None:
            group.held_back.append(entry)
            return
        group.probe = group.probe or entry.task
        self._new.push(entry)

    def on_call(self, task: str, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """See `Policy`."""
        found = self._tasks[task]
        if found.group.prompt_tokens is None:
            found.group.prompt_tokens = self._seen_prompt_tokens = prompt_tokens
            self._release(found.group)
        found.where, found.max_new_tokens = _Where.HELD, max_new_tokens
        self._measure(found, prompt_tokens)
        self._calls.append(found)

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """See `Policy`."""
        found = self._tasks[task]
        found.where = _Where.ACTING
        self._measure(found, context_tokens)

    def on_end(self, task: str, now_s: float, *, completed: bool = True) -> None:
        """See `Policy`."""
        gone = self._tasks.pop(task)
        rank = self._ranks[gone.rank]
        rank.ledger.release(task)
        rank.active.pop(task, None)
        rank.paused.pop(task, None)
        gone.group.num_finished += 1
        if gone.group.probe == task:
            self._release(gone.group)

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """One round of the algorithm for each rank, then the calls of tasks that are still active are granted."""
        calls, self._calls = [task for task in self._calls if task.where is _Where.HELD], []
        for task in calls:
            self._refuse_if_too_large(self._ranks[task.rank], task)
        for rank_id, rank in self._ranks.items():
            self._evict(rank)
            self._fill(rank_id, rank)
        for task in calls:
            if task.where is _Where.HELD:
                self._answer(task)
        self._admit()
        decisions, self._out = tuple(self._out), []
        return decisions

    def next_wake_s(self) -> float | None:
        """See `Policy`; only events change anything."""
        return None

    def _answer(self, task: _Task) -> None:
        budget_tokens = self._ranks[task.rank].budget_tokens
        if task.leaving:
            task.where = _Where.PAUSED
            self._out.append(Pause(task.entry.task, f"above the budget of {budget_tokens} tokens"))
        else:
            task.where = _Where.GENERATING
            used = f"{self._ranks[task.rank].ledger.usage_tokens} of {budget_tokens}"
            self._out.append(Grant(task.entry.task, task.rank, used))

    def _priority(self, task: _Task) -> tuple[float, ...]:
        group = task.group
        executing = task.where in (_Where.GENERATING, _Where.HELD)
        return (task.entry.kind == "eval", group.num_finished / group.num_siblings, executing, task.tokens)

    def _evict(self, rank: _Rank) -> None:
        while rank.ledger.usage_tokens > rank.budget_tokens and len(rank.active) > 1:
            task = min(rank.active.values(), key=self._priority)
            task.leaving = True
            rank.ledger.release(task.entry.task)
            del rank.active[task.entry.task]
            rank.paused[task.entry.task] = task
            rank.full_at_tokens = None

    def _fill(self, rank_id: RankId, rank: _Rank) -> None:
        while rank.paused:
            if rank.active and rank.full_at_tokens is not None and rank.ledger.usage_tokens >= rank.full_at_tokens:
                return
            room = rank.budget_tokens - rank.ledger.usage_tokens
            fitting = [task for task in rank.paused.values() if self._added(rank, task) <= room or not rank.active]
            if (room <= 0 and rank.active) or not fitting:
                rank.full_at_tokens = rank.ledger.usage_tokens
                return
            task = max(fitting, key=self._priority)
            del rank.paused[task.entry.task]
            rank.active[task.entry.task] = task
            task.leaving = False
            self._measure(task, task.tokens)
            if task.where is _Where.PAUSED:
                task.where = _Where.GENERATING
                used = f"{rank.ledger.usage_tokens} of {rank.budget_tokens}"
                self._out.append(Resume(task.entry.task, rank_id, used))

    def _admit(self) -> None:
        while (entry := self._new.peek()) is not None:
            group = self._groups[entry.group]
            tokens = group.prompt_tokens or self._seen_prompt_tokens
            fitting = [
                (rank_id != group.home, rank.ledger.usage_tokens - rank.budget_tokens, rank_id, rank)
                for rank_id, rank in self._ranks.items()
                if self._accepts(rank, entry, tokens)
            ]
            if not fitting:
                return
            _, _, rank_id, rank = min(fitting, key=lambda item: item[:2])
            group.home = group.home or rank_id
            self._new.pop()
            task = self._tasks[entry.task] = _Task(entry, rank_id, group, tokens)
            rank.active[entry.task] = task
            self._measure(task, tokens)
            self._out.append(Admit(entry.task, rank_id, f"{rank.ledger.usage_tokens} of {rank.budget_tokens}"))

    def _accepts(self, rank: _Rank, entry: TaskEntry, tokens: int) -> bool:
        if rank.paused and not self._settings.new_while_paused:
            return False
        shared = self._shared(self._groups[entry.group])
        added = rank.ledger.marginal_tokens(tokens, entry.group, shared)
        return rank.ledger.usage_tokens + added <= rank.budget_tokens or not (rank.active or rank.paused)

    def _added(self, rank: _Rank, task: _Task) -> int:
        return rank.ledger.marginal_tokens(task.tokens, task.entry.group, self._shared(task.group))

    def _shared(self, group: _Group) -> int:
        return (group.prompt_tokens or 0) if self._settings.share_group_prefix else 0

    def _measure(self, task: _Task, tokens: int) -> None:
        task.tokens = tokens
        rank = self._ranks[task.rank]
        if task.leaving:
            rank.full_at_tokens = None
        if not task.leaving and task.entry.task in rank.active:
            rank.ledger.charge(task.entry.task, tokens, task.entry.group, self._shared(task.group))

    def _release(self, group: _Group) -> None:
        for entry in group.held_back:
            self._new.push(entry)
        group.held_back.clear()

    def _refuse_if_too_large(self, rank: _Rank, task: _Task) -> None:
        need = task.tokens + task.max_new_tokens
        if need > rank.kv_tokens:
            # It counts until the driver ends it.
            task.where = _Where.ACTING
            self._out.append(Refuse(task.entry.task, f"{need} tokens are more than the KV cache of {rank.kv_tokens}"))
