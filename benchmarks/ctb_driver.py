"""Plays tasks against an engine under a policy: the scheduler's shell without router, workers and gateway.

    policy.plan -> Admit  -> a coroutine plays the task -> on_call -> waits
                   Grant, Resume -> the call goes to the engine -> on_turn -> the environment acts -> on_call ...

A pause costs nothing here: the call waits in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ctb_workload import MAX_NEW_TOKENS, BenchTask

from tide_trainer.scheduling.plan import Admit, Decision, Grant, Refuse, Resume, SchedulerView, TaskEntry
from tide_trainer.types import Completion, EngineStats, RankId, Sampling

SAMPLE_EVERY_S = 0.25
ENVIRONMENT = "bench"
_T = TypeVar("_T")


class Engine(Protocol):
    """What is asked of the engine (`EngineClient` has it)."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Samples one completion."""
        ...

    async def stats(self) -> EngineStats:
        """The engine's live numbers."""
        ...


class Policy(Protocol):
    """What decides (`TaskScheduler` has it)."""

    def add_rank(self, rank: RankId, budget_tokens: int, block_tokens: int = 1) -> None:
        """A rank serves from now on."""
        ...

    def submit(self, entry: TaskEntry) -> None:
        """Queues a task."""
        ...

    def on_call(self, task: str, prompt_tokens: int, max_new_tokens: int, now_s: float) -> None:
        """A task's next call waits."""
        ...

    def on_turn(self, task: str, context_tokens: int, now_s: float) -> None:
        """A task's call has been answered."""
        ...

    def on_end(self, task: str, now_s: float) -> None:
        """A task has ended."""
        ...

    def plan(self, now_s: float) -> tuple[Decision, ...]:
        """Decides about all that has happened."""
        ...

    def next_wake_s(self) -> float | None:
        """When a plan is due without an event."""
        ...

    def view(self) -> SchedulerView:
        """Its numbers."""
        ...


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One call as the engine answered it; times are seconds since the run began.

    Attributes:
        first: it was the first call of its group.
        called_s: when the call was there; it may have waited for its grant.
    """

    task: str
    first: bool
    called_s: float
    granted_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Engine and policy at one moment; `engine_tokens` are in blocks that requests hold."""

    at_s: float
    engine_tokens: int
    num_running: int
    usage_tokens: int
    projected_tokens: int
    num_acting: int
    num_paused: int
    num_generating: int


class Driver:
    """One run of one policy.

    Args:
        engine: serves the calls.
        policy: decides; without ranks yet.
        tasks: all are submitted at the start.
        on_stats: gets each sample of the engine's numbers (an AIMD controller lives on it).
        on_end: told of each task that ended.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        tasks: Sequence[BenchTask],
        *,
        on_stats: Callable[[EngineStats, float], None] = lambda _stats, _now_s: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._tasks = {task.uid: task for task in tasks}
        self._on_stats = on_stats
        self._on_end = on_end
        self._calls: dict[str, asyncio.Future[None]] = {}
        self._groups: set[str] = set()
        self._left = len(tasks)
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self.turns: list[PlayedTurn] = []
        self.samples: list[Sample] = []
        self.policy_cpu_s = 0.0
        self.wall_s = 0.0

    async def run(self, timeout_s: float) -> None:
        """Plays all tasks. Raises what broke, or TimeoutError."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as self._playing:
                for task in self._tasks.values():
                    entry = TaskEntry(task.uid, task.group, "train", self._siblings(task), ENVIRONMENT)
                    self._tell(lambda entry=entry: self._policy.submit(entry))
                sampler = self._playing.create_task(self._sample())
                await self._done
                self.wall_s = self._now_s()
                sampler.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _siblings(self, task: BenchTask) -> int:
        return sum(other.group == task.group for other in self._tasks.values())

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _tell(self, event: Callable[[], _T]) -> _T:
        began_s = time.thread_time()
        try:
            return event()
        finally:
            self.policy_cpu_s += time.thread_time() - began_s
            if not self._woken:
                self._woken = True
                self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        try:
            now_s = self._now_s()
            began_s = time.thread_time()
            decisions = self._policy.plan(now_s)
            wake_s = self._policy.next_wake_s()
            self.policy_cpu_s += time.thread_time() - began_s
            self._woken = False
            for decision in decisions:
                self._carry_out(decision)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if wake_s is not None and not self._done.done():
                self._timer = self._loop.call_later(max(0.01, wake_s - now_s), self._tell, lambda: None)
        except Exception as error:  # noqa: BLE001 - handed to `run`
            if not self._done.done():
                self._done.set_exception(error)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Admit(task=uid):
                self._playing.create_task(self._play(self._tasks[uid]))
            case Grant(task=uid) | Resume(task=uid):
                self._calls.pop(uid).set_result(None)
            case Refuse(reason=reason):
                raise RuntimeError(f"a task was refused: {reason}")
            case _:
                pass

    async def _play(self, task: BenchTask) -> None:
        context = list(task.prompt_ids)
        for turn in task.turns:
            called_s = self._now_s()
            granted = self._calls[task.uid] = self._loop.create_future()
            self._tell(lambda: self._policy.on_call(task.uid, len(context), MAX_NEW_TOKENS, self._now_s()))
            await granted
            granted_s, prompt_tokens = self._now_s(), len(context)
            first = task.group not in self._groups
            self._groups.add(task.group)
            done = await self._engine.generate(context, Sampling(max_new_tokens=turn.num_output))
            if len(done.token_ids) != turn.num_output:
                raise RuntimeError(f"{task.uid}: {len(done.token_ids)} of {turn.num_output} tokens came back")
            context += done.token_ids
            self._tell(lambda: self._policy.on_turn(task.uid, len(context), self._now_s()))
            times = (called_s, granted_s, self._now_s())
            self.turns.append(
                PlayedTurn(task.uid, first, *times, prompt_tokens, done.cached_tokens, len(done.token_ids))
            )
            await asyncio.sleep(turn.latency_s)
            context += turn.observation_ids
        self._tell(lambda: self._policy.on_end(task.uid, self._now_s()))
        self._on_end()
        self._left -= 1
        if self._left == 0 and not self._done.done():
            self._done.set_result(None)

    async def _sample(self) -> None:
        while True:
            stats = await self._engine.stats()
            now_s, view = self._now_s(), self._policy.view()
            self._tell(lambda stats=stats, now_s=now_s: self._on_stats(stats, now_s))
            rank = view.ranks[0]
            self.samples.append(
                Sample(
                    now_s,
                    stats.kv_used_tokens,
                    stats.num_running,
                    rank.usage_tokens,
                    rank.projected_tokens,
                    view.num_acting,
                    view.num_paused,
                    view.num_generating,
                )
            )
            await asyncio.sleep(SAMPLE_EVERY_S)
