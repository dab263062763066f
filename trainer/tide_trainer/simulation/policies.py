"""Task schedulers that are compared with each other: the product's, and baselines behind the same calls.

A driver (the simulator, or one in front of real engines) feeds events, calls `plan` after each, and carries the
decisions out. Every policy pauses at a turn's boundary only: a call at the engine is never cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Decision, TaskEntry
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.simulation.aimd import AimdPolicy, AimdSettings
from tide_trainer.simulation.algorithm_one import AlgorithmOnePolicy, AlgorithmOneSettings
from tide_trainer.types import RankId


class Policy(Protocol):
    """What a driver calls; `TaskScheduler` satisfies it, with its ranks added."""

    def submit(self, entry: TaskEntry) -> None:
        """Queues a task."""
        ...

    def on_call(self, task: str, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """The task's next call has arrived and waits for a decision."""
        ...

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """The call has been answered; the task's context is `context_tokens` now."""
        ...

    def on_end(self, task: str, now_s: float, *, completed: bool = True) -> None:
        """The task has ended."""
        ...

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """Decides about all that has happened since the last plan."""
        ...

    def next_wake_s(self) -> float | None:
        """When a plan is due without an event."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A policy that wants the engine's own numbers from time to time."""

    @property
    def observe_every_s(self) -> float:
        """Seconds between two calls of `observe`."""
        ...

    def observe(self, kv_usage_fraction: float, num_preemptions: int, now_s: float, rank: RankId | None = None) -> None:
        """Takes the engine's KV use (blocks of running requests / all) and its preemptions since it started."""
        ...


PolicyFactory = Callable[[int, int, int], Policy]
"""(KV tokens of a rank, tokens of a block, number of ranks) -> a fresh policy."""


def rank_ids(num_ranks: int) -> tuple[RankId, ...]:
    """The ranks that every policy made here knows."""
    return tuple(RankId("rollout", index) for index in range(num_ranks))


def ctb(settings: CtbSettings | None = None) -> PolicyFactory:
    """Continuous Task Batching as the trainer runs it."""
    chosen = settings or CtbSettings()

    def make(kv_tokens: int, block_tokens: int, num_ranks: int = 1) -> TaskScheduler:
        policy = TaskScheduler(chosen)
        for rank in rank_ids(num_ranks):
            policy.add_rank(rank, chosen.budget_tokens(kv_tokens), block_tokens)
        return policy

    return make


def fixed(num_tasks_per_rank: int, *, probe: bool = False) -> PolicyFactory:
    """A fixed number of tasks in flight on each rank; a task holds its place until it ends."""
    return ctb(CtbSettings(ctb="off", max_tasks_per_rank=num_tasks_per_rank, budget_fraction=1.0, probe=probe))


def aimd(settings: AimdSettings | None = None) -> PolicyFactory:
    """A concurrency that follows the engine's KV use; the driver must call `observe`."""

    def make(kv_tokens: int, block_tokens: int, num_ranks: int = 1) -> AimdPolicy:
        return AimdPolicy(dict.fromkeys(rank_ids(num_ranks), kv_tokens), settings or AimdSettings())

    return make


def algorithm_one(settings: AlgorithmOneSettings | None = None) -> PolicyFactory:
    """The TideRL paper's Algorithm 1, as printed."""

    def make(kv_tokens: int, block_tokens: int, num_ranks: int = 1) -> AlgorithmOnePolicy:
        ranks = dict.fromkeys(rank_ids(num_ranks), kv_tokens)
        return AlgorithmOnePolicy(ranks, block_tokens, settings or AlgorithmOneSettings())

    return make
