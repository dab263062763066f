"""A tiny rollout on a virtual clock, driven by the scheduler's own decisions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Decision, Grant, Pause, Refuse, Resume, SchedulerView, TaskEntry
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior
from tide_trainer.types import RankId


@dataclass
class Workload:
    """Groups of equal size; every turn adds `growth` tokens, and a call may generate `max_new_tokens`."""

    num_groups: int = 6
    num_siblings: int = 4
    num_eval_groups: int = 0
    num_turns: int = 6
    prompt_tokens: int = 100
    growth_tokens: int = 30
    max_new_tokens: int = 20
    generate_s: float = 0.1
    act_s: float = 0.5
    gate: tuple[tuple[float, float], ...] = ()


@dataclass
class Outcome:
    """What happened: decisions with their times, in order, and when each task ended."""

    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    num_turns: int = 0
    peak_usage_tokens: int = 0
    view: SchedulerView | None = None


class Rollout:
    """Carries out decisions as the shell would, with exponential environment times from a seed."""

    def __init__(self, scheduler: TaskScheduler, workload: Workload, seed: int) -> None:
        self.scheduler = scheduler
        self.workload = workload
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, str, str]] = []
        self.context = {}
        self.turns = {}
        self.outcome = Outcome()
        self.num_events = 0
        self.version = 0
        for opens_s, closes_s in workload.gate:
            self.push(opens_s, "close", "")
            self.push(closes_s, "open", "")

    def push(self, at_s: float, what: str, task: str) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_s, self.num_events, what, task))

    def submit(self) -> None:
        work = self.workload
        for g in range(work.num_groups):
            prompt = self.random.randint(work.prompt_tokens // 2, work.prompt_tokens)
            kind = "eval" if g >= work.num_groups - work.num_eval_groups else "train"
            for m in range(work.num_siblings):
                task = f"{kind}{g}/{m}"
                self.context[task], self.turns[task] = prompt, self.random.randint(1, work.num_turns)
                self.scheduler.submit(TaskEntry(task, f"{kind}{g}", kind, work.num_siblings, "env", order_key=g))

    def carry_out(self, now_s: float) -> None:
        work = self.workload
        for decision in self.scheduler.plan(now_s):
            self.outcome.decisions.append((now_s, decision))
            match decision:
                case Admit():
                    self.push(now_s + work.act_s, "call", decision.task)
                case Grant() | Resume():
                    self.push(now_s + work.generate_s, "turn", decision.task)
                case Refuse():
                    self.end(decision.task, now_s)
                case Pause():
                    pass
        self.scheduler.check()
        usage = [rank.usage_tokens for rank in self.scheduler.view().ranks]
        self.outcome.peak_usage_tokens = max(self.outcome.peak_usage_tokens, *usage)

    def end(self, task: str, now_s: float) -> None:
        self.scheduler.on_end(task, now_s)
        self.outcome.ended_s[task] = now_s

    def happen(self, now_s: float, what: str, task: str) -> None:
        work = self.workload
        if what == "close":
            self.scheduler.close_gate()
        elif what == "open":
            self.version += 1
            self.scheduler.open_gate(self.version)
        elif what == "call":
            self.scheduler.on_call(task, self.context[task], work.max_new_tokens, now_s)
        else:
            self.outcome.num_turns += 1
            self.context[task] += self.random.randint(1, work.max_new_tokens)
            self.scheduler.on_turn(task, self.context[task], now_s)
            self.turns[task] -= 1
            if self.turns[task] == 0:
                self.end(task, now_s)
                return
            self.context[task] += work.growth_tokens
            self.push(now_s + self.random.expovariate(1 / work.act_s), "call", task)

    def run(self) -> Outcome:
        """Until every task has ended; fails if nothing can happen any more."""
        self.submit()
        now_s = 0.0
        while len(self.outcome.ended_s) < len(self.context):
            self.carry_out(now_s)
            if self.events:
                now_s, _, what, task = heapq.heappop(self.events)
                self.happen(now_s, what, task)
            else:
                wake_s = self.scheduler.next_wake_s()
                assert wake_s is not None, f"stuck: {self.scheduler.view()}"
                now_s = max(now_s, wake_s)
        self.outcome.view = self.scheduler.view()
        return self.outcome


@pytest.fixture
def roll_out() -> Callable[..., Outcome]:
    """Runs a workload on `num_ranks` ranks of `budget_tokens` each, under the given settings."""

    def run(
        workload: Workload | None = None,
        *,
        num_ranks: int = 1,
        budget_tokens: int = 2000,
        block_tokens: int = 16,
        seed: int = 0,
        settings: CtbSettings | None = None,
    ) -> Outcome:
        scheduler = TaskScheduler(settings or CtbSettings(idle_lending=0.0))
        for index in range(num_ranks):
            scheduler.add_rank(RankId("w", index), budget_tokens, block_tokens)
        return Rollout(scheduler, workload or Workload(), seed).run()

    return run


@pytest.fixture
def make_workload() -> type[Workload]:
    return Workload


class Situation(TaskScheduler):
    """A scheduler with short cuts for tests."""

    def add(
        self, *tasks: str, kind="train", siblings=1, environment="env", task_type="", order=0, version=None
    ) -> None:
        for task in tasks:
            self.submit(TaskEntry(task, task.split("/")[0], kind, siblings, environment, task_type, order, version))

    def decide(self, now_s: float) -> list[tuple[str, str]]:
        return [(type(decision).__name__, decision.task) for decision in self.plan(now_s)]

    def start(self, task: str, prompt_tokens: int, now_s: float = 0.0, **entry) -> None:
        """Submits a task and brings it to its first answered call: acting with `prompt_tokens + 10` tokens."""
        self.add(task, **entry)
        self.plan(now_s)
        self.on_call(task, prompt_tokens, 10, now_s)
        self.plan(now_s)
        self.on_turn(task, prompt_tokens + 10, now_s)


@pytest.fixture
def situation() -> Callable[..., Situation]:
    """Makes a scheduler with ranks w:0, w:1, ... of `budget_tokens` each; the rest are settings."""

    def make(budget_tokens: int = 1000, num_ranks: int = 1, **options) -> Situation:
        options.setdefault("default_prior", FootprintPrior(prompt_tokens=10, final_tokens=20))
        # One limit, unless a test is about the second.
        options.setdefault("grant_fraction", options.get("budget_fraction", 0.95))
        made = Situation(CtbSettings(**{"idle_lending": 0.0, **options}))
        for index in range(num_ranks):
            made.add_rank(RankId("w", index), budget_tokens)
        return made

    return make
