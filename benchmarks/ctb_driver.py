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
from functools import partial
from typing import Protocol, TypeVar

from ctb_workload import MAX_NEW_TOKENS, BenchTask

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, Refuse, Resume, TaskEntry
from tide_trainer.simulation.policies import Observer, Policy
from tide_trainer.types import Completion, EngineStats, Sampling

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
    """Engine and tasks at one moment. The scheduler's sums are 0 where the policy has none."""

    at_s: float
    engine_tokens: int
    num_running: int
    usage_tokens: int
    projected_tokens: int
    num_generating: int
    num_acting: int
    num_held: int


class Driver:
    """One run of one policy.

    Args:
        engine: serves the calls.
        policy: decides.
        tasks: all are submitted at the start.
        kv_tokens: the engine's cache.
        on_end: told of each task that ended.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        tasks: Sequence[BenchTask],
        kv_tokens: int,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._tasks = {task.uid: task for task in tasks}
        self._kv_tokens = kv_tokens
        self._on_end = on_end
        self._calls: dict[str, asyncio.Future[None]] = {}
        self._groups: set[str] = set()
        self._left = len(tasks)
        self._num_generating = self._num_acting = 0
        self.num_pauses = 0
        self.num_preemptions = 0
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
                    self._tell(partial(self._policy.submit, entry))
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
            case Pause():
                self.num_pauses += 1

    async def _play(self, task: BenchTask) -> None:
        context = list(task.prompt_ids)
        for turn in task.turns:
            called_s = self._now_s()
            granted = self._calls[task.uid] = self._loop.create_future()
            prompt_tokens = len(context)
            self._tell(partial(self._policy.on_call, task.uid, prompt_tokens, MAX_NEW_TOKENS, called_s))
            await granted
            granted_s = self._now_s()
            first = task.group not in self._groups
            self._groups.add(task.group)
            self._num_generating += 1
            done = await self._engine.generate(context, Sampling(max_new_tokens=turn.num_output))
            self._num_generating -= 1
            if len(done.token_ids) != turn.num_output:
                raise RuntimeError(f"{task.uid}: {len(done.token_ids)} of {turn.num_output} tokens came back")
            context += done.token_ids
            ended_s = self._now_s()
            self._tell(partial(self._policy.on_turn, task.uid, len(context), ended_s))
            self.turns.append(
                PlayedTurn(
                    task.uid,
                    first,
                    called_s,
                    granted_s,
                    ended_s,
                    prompt_tokens,
                    done.cached_tokens,
                    len(done.token_ids),
                )
            )
            self._num_acting += 1
            await asyncio.sleep(turn.latency_s)
            self._num_acting -= 1
            context += turn.observation_ids
        self._tell(partial(self._policy.on_end, task.uid, self._now_s()))
        self._on_end()
        self._left -= 1
        if self._left == 0 and not self._done.done():
            self._done.set_result(None)

    async def _sample(self) -> None:
        policy = self._policy
        first = await self._engine.stats()
        every_s = policy.observe_every_s if isinstance(policy, Observer) else SAMPLE_EVERY_S
        while True:
            stats, now_s = await self._engine.stats(), self._now_s()
            self.num_preemptions = stats.num_preemptions - first.num_preemptions
            if isinstance(policy, Observer):
                used = stats.kv_used_tokens / self._kv_tokens
                self._tell(partial(policy.observe, used, self.num_preemptions, now_s))
            sums = (0, 0)
            if isinstance(policy, TaskScheduler):
                (rank,) = policy.view().ranks
                sums = (rank.usage_tokens, rank.projected_tokens)
            phases = (self._num_generating, self._num_acting, len(self._calls))
            self.samples.append(Sample(now_s, stats.kv_used_tokens, stats.num_running, *sums, *phases))
            await asyncio.sleep(every_s)
