"""Plays a workload under a policy on modelled ranks, on a virtual clock.

    policy ── Admit ──> reset ──> call ──> policy ── Grant, Resume ──> rank ──> turn ──> environment ──> call ...
                                              └── Pause: the call waits            └──> the task's end

It ends, or says what stands still: a task that fits no cache is refused and ended, and a play without a coming event
and with open tasks raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tide_trainer.scheduling.plan import Admit, Decision, Pause, Refuse
from tide_trainer.simulation.clock import VirtualClock
from tide_trainer.simulation.figures import Figures, worst_window
from tide_trainer.simulation.kv_cache import Chain
from tide_trainer.simulation.policies import Observer, Policy, PolicyFactory, rank_ids
from tide_trainer.simulation.rank import Rank, RankModel, Request, RequestTooLargeError
from tide_trainer.simulation.workload import TaskScript
from tide_trainer.types import RankId

MAX_TIME_S = 1e6


class StandstillError(Exception):
    """Tasks are open, and nothing will happen any more (or not before `MAX_TIME_S`); the message tells the phases."""


@dataclass(slots=True)
class _Task:
    script: TaskScript
    turn: int = 0
    prompt_tokens: int = 0
    paused_at_s: float | None = None
    chains: dict[RankId, tuple[tuple[Chain, ...], Chain]] = field(default_factory=dict)


class Play:
    """One workload under one policy; `run` plays it to its end."""

    def __init__(
        self, workload: Sequence[TaskScript], factory: PolicyFactory, model: RankModel | None = None, num_ranks: int = 1
    ) -> None:
        """Submits every task; nothing happens before `run`."""
        self._model = model or RankModel()
        self._policy: Policy = factory(self._model.kv_tokens, self._model.block_tokens, num_ranks)
        self.ranks = {rank: Rank(self._model) for rank in rank_ids(num_ranks)}
        self._clock = VirtualClock[str | None]()
        self._tasks = {script.entry.task: _Task(script, 0, script.prompt_tokens) for script in workload}
        self._num_tasks = len(self._tasks)
        self._chains: dict[tuple[RankId, str], Chain] = {}
        self._ideal = _PerfectCache(self._model.block_tokens)
        self._wake_s = math.inf
        self.num_pauses = self.num_refused = 0
        self._longest_pause_s = 0.0
        for script in workload:
            self._policy.submit(script.entry)

    def run(self) -> Figures:
        """Plays to the end.

        Raises:
            StandstillError: the policy leaves tasks waiting for ever.
        """
        if isinstance(self._policy, Observer):
            self._clock.push(self._policy.observe_every_s, None)
        clock, ranks = self._clock, list(self.ranks.items())
        while self._tasks:
            self._decide()
            if not self._tasks:
                break
            event_s = clock.next_s()
            rank_id, rank = min(ranks, key=lambda item: item[1].ready_s)
            next_s = min(event_s, rank.ready_s, self._wake_s)
            if next_s > MAX_TIME_S:
                raise StandstillError(f"{len(self._tasks)} of {self._num_tasks} tasks are open at {clock.now_s:.1f} s")
            if rank.ready_s == next_s:
                self._step(rank_id, rank, min(event_s, self._wake_s))
            elif event_s == next_s:
                self._happen(clock.pop())
            else:
                clock.move_to(next_s)
        return self._figures()

    def _step(self, rank_id: RankId, rank: Rank, until_s: float) -> None:
        others_s = min((other.ready_s for other in self.ranks.values() if other is not rank), default=math.inf)
        for request in rank.run(min(until_s, others_s)):
            self._clock.move_to(rank.ready_s)
            self._turn(request)

    def _turn(self, request: Request) -> None:
        task = self._tasks[request.key]
        script = task.script.turns[task.turn]
        now_s = self._clock.now_s
        context_tokens = task.prompt_tokens + script.output_tokens
        self._policy.on_turn(request.key, context_tokens, now_s)
        task.turn += 1
        if script.observation_tokens is not None:
            task.prompt_tokens = context_tokens + script.observation_tokens
        self._clock.push(now_s + script.environment_s, request.key)

    def _happen(self, name: str | None) -> None:
        now_s = self._clock.now_s
        if name is None:
            assert isinstance(self._policy, Observer)
            for rank_id, rank in self.ranks.items():
                self._policy.observe(rank.kv_usage_fraction, rank.counters.num_preemptions, now_s, rank_id)
            self._clock.push(now_s + self._policy.observe_every_s, None)
            return
        task = self._tasks[name]
        if task.turn and task.script.turns[task.turn - 1].observation_tokens is None:
            self._end(name, completed=task.script.completed)
        else:
            self._policy.on_call(name, task.prompt_tokens, task.script.max_new_tokens, now_s)

    def _end(self, name: str, *, completed: bool) -> None:
        self._policy.on_end(name, self._clock.now_s, completed=completed)
        del self._tasks[name]

    def _decide(self) -> None:
        now_s = self._clock.now_s
        while decisions := self._policy.plan(now_s):
            for decision in decisions:
                self._carry_out(decision, now_s)
        wake_s = self._policy.next_wake_s()
        self._wake_s = math.inf if wake_s is None else max(wake_s, now_s)

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        task = self._tasks[decision.task]
        match decision:
            case Admit():
                self._clock.push(now_s + task.script.reset_s, decision.task)
            case Pause():
                self.num_pauses += 1
                task.paused_at_s = now_s
            case Refuse():
                self.num_refused += 1
                self._end(decision.task, completed=False)
            case _:
                if task.paused_at_s is not None:
                    self._longest_pause_s = max(self._longest_pause_s, now_s - task.paused_at_s)
                    task.paused_at_s = None
                self._call(decision.task, task, decision.rank, now_s)

    def _call(self, name: str, task: _Task, rank: RankId, now_s: float) -> None:
        shared, own = task.chains.get(rank) or self._make_chains(task, rank)
        output_tokens = task.script.turns[task.turn].output_tokens
        try:
            self.ranks[rank].submit(Request(name, task.prompt_tokens, output_tokens, shared, own), now_s)
        except RequestTooLargeError:
            self.num_refused += 1
            self._policy.on_turn(name, task.prompt_tokens, now_s)
            self._end(name, completed=False)
            return
        self._ideal.count(task.script, task.prompt_tokens, output_tokens)

    def _make_chains(self, task: _Task, rank: RankId) -> tuple[tuple[Chain, ...], Chain]:
        script, block_tokens = task.script, self._model.block_tokens
        common = script.common_tokens // block_tokens
        chains = tuple(
            self._chains.setdefault((rank, name), Chain(num_blocks))
            for name, num_blocks in (
                (f"environment {script.entry.environment}", common),
                (f"group {script.entry.group}", script.prompt_tokens // block_tokens - common),
            )
        )
        task.chains[rank] = made = (chains, Chain())
        return made

    def _figures(self) -> Figures:
        counters = [rank.counters for rank in self.ranks.values()]
        time_s = self._clock.now_s
        schedulings = [one for rank in counters for one in rank.schedulings]
        return Figures(
            time_s=time_s,
            num_tasks=self._num_tasks,
            num_calls=len(schedulings),
            num_prompt_tokens=sum(rank.num_prompt_tokens for rank in counters),
            num_cached_tokens=sum(rank.num_cached_tokens for rank in counters),
            num_ideal_cached_tokens=self._ideal.num_cached_tokens,
            hit_rate_worst_window=worst_window(schedulings),
            num_prefilled_tokens=sum(rank.num_prefilled_tokens for rank in counters),
            num_recomputed_tokens=sum(rank.num_recomputed_tokens for rank in counters),
            num_generated_tokens=sum(rank.num_generated_tokens for rank in counters),
            num_preemptions=sum(rank.num_preemptions for rank in counters),
            num_pauses=self.num_pauses,
            num_refused=self.num_refused,
            busy_fraction=sum(rank.busy_s for rank in counters) / len(counters) / time_s if time_s else 0.0,
            longest_pause_s=self._longest_pause_s,
        )


class _PerfectCache:
    """What a cache that forgets nothing, one for all ranks, would have held of each call's prompt."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[str, int] = {}
        self.num_cached_tokens = 0

    def count(self, script: TaskScript, prompt_tokens: int, output_tokens: int) -> None:
        entry, block_tokens = script.entry, self._block_tokens
        known = max(self._known.get(name, 0) for name in (entry.environment, entry.group, entry.task))
        self.num_cached_tokens += min(known, (prompt_tokens - 1) // block_tokens) * block_tokens
        self._known[entry.environment] = script.common_tokens // block_tokens
        self._known[entry.group] = script.prompt_tokens // block_tokens
        self._known[entry.task] = (prompt_tokens + output_tokens - 1) // block_tokens
