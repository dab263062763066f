"""What a decision of the task scheduler and an operation of the staleness protocol cost, in CPU time.

A decision is one event (a call arrives, a turn ends, a task ends, a group is submitted) and the plan that follows it.
The scheduler is first brought to a steady state: most of its tasks in flight, some of them paused because their
ranks are full, the rest queued. Then one event follows another, in the mix of a rollout. Nothing here waits: the times
are virtual, and what is measured is this thread's CPU time.

The last line is JSON; `value` is the 99th percentile of a decision for 10,000 tasks on 32 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Grant, Pause, Refuse, Resume, TaskEntry
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.scheduling.staleness import StalenessBuffers
from tide_trainer.types import RankId

NAME = "scheduler"
SIZES = ((1_000, 4), (3_000, 10), (10_000, 32), (30_000, 100), (100_000, 1_000))
GOALS_MS = {(10_000, 32): 1.0, (100_000, 1_000): 10.0}
PROTOCOL_GOAL_US = 50.0
GROUP_SIZE, NUM_TYPES, MAX_NEW_TOKENS = 8, 4, 128
PROMPT_TOKENS, GROWTH_TOKENS, NUM_TURNS = 600, 180, 8
MEAN_TOKENS = PROMPT_TOKENS + GROWTH_TOKENS * NUM_TURNS // 2
IN_FLIGHT = 0.6
TURN_S = 4.0
ETAS = (0, 1, 3, 10)
BATCH_SIZE = 64


class Bag:
    """Tasks of one phase: adding, removing and drawing one at random are O(1)."""

    def __init__(self) -> None:
        self._items: list[str] = []
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: str) -> None:
        self._at[item] = len(self._items)
        self._items.append(item)

    def remove(self, item: str) -> None:
        at, last = self._at.pop(item), self._items.pop()
        if last != item:
            self._items[at], self._at[last] = last, at

    def draw(self, choose: random.Random) -> str:
        return self._items[int(choose.random() * len(self._items))]


@dataclass
class Rollout:
    """A scheduler with `num_tasks` known tasks, and what its shell would know of them."""

    num_tasks: int
    num_ranks: int
    seed: int
    events_us: dict[str, list[float]] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)  # noqa: S311 - a workload
        self.scheduler = TaskScheduler(CtbSettings(max_wait_s=60.0))
        budget_tokens = int(IN_FLIGHT * self.num_tasks / self.num_ranks * MEAN_TOKENS)
        for index in range(self.num_ranks):
            self.scheduler.add_rank(RankId(f"w{index // 8}", index % 8), budget_tokens, 16)
        self.generating, self.acting = Bag(), Bag()
        self.context: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.known = self.num_groups = 0
        self.now_s = 0.0
        self.is_set_up = False
        while self.known < self.num_tasks:
            self.submit_group()
        self.is_set_up = True

    def submit_group(self) -> None:
        group = f"g{self.num_groups}"
        self.num_groups += 1
        prompt = self.choose.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS * 3 // 2)
        kind = "eval" if self.num_groups % 20 == 0 else "train"
        task_type = f"t{self.num_groups % NUM_TYPES}"
        for member in range(GROUP_SIZE):
            task = f"{group}/{member}"
            turns = self.choose.randint(1, 2 * NUM_TURNS)
            # The first ones are found in the midst of their lives, so that the steady state is there sooner.
            done = 0 if self.is_set_up else self.choose.randrange(turns)
            self.context[task], self.turns[task] = prompt + done * 3 * GROWTH_TOKENS // 4, turns - done
            order = self.num_groups // BATCH_SIZE
            self.scheduler.submit(TaskEntry(task, group, kind, GROUP_SIZE, "env", task_type, order))
        self.known += GROUP_SIZE

    def event(self) -> str:
        """The next event of the mix; the events of a turn take a turn's share of the virtual time."""
        self.now_s += TURN_S / (2 * max(1, len(self.acting) + len(self.generating)))
        if self.known + GROUP_SIZE <= self.num_tasks:
            return "submit"
        if len(self.generating) and (self.choose.random() < 0.5 or not len(self.acting)):
            return "turn"
        return "call" if len(self.acting) else "wait"

    def happen(self, what: str) -> Callable[[], None]:
        """Draws what the event is about; what is returned is what the scheduler has to do."""
        if what == "submit":
            return self.submit_group
        if what == "wait":
            self.now_s = max(self.now_s, self.scheduler.next_wake_s() or self.now_s)
            return lambda: None
        if what == "call":
            task = self.acting.draw(self.choose)
            self.acting.remove(task)
            return lambda: self.scheduler.on_call(task, self.context[task], MAX_NEW_TOKENS, self.now_s)
        task = self.generating.draw(self.choose)
        self.generating.remove(task)
        self.turns[task] -= 1
        context = self.context[task] + self.choose.randint(1, MAX_NEW_TOKENS)
        if self.turns[task] == 0:
            self.forget(task)
            return partial(self.end, task, context)
        self.acting.add(task)
        self.context[task] = context + self.choose.randint(GROWTH_TOKENS // 2, GROWTH_TOKENS)
        return lambda: self.scheduler.on_turn(task, context, self.now_s)

    def end(self, task: str, context: int) -> None:
        self.scheduler.on_turn(task, context, self.now_s)
        self.scheduler.on_end(task, self.now_s)

    def forget(self, task: str) -> None:
        del self.context[task], self.turns[task]
        self.known -= 1

    def step(self) -> None:
        """One decision."""
        what = self.event()
        act = self.happen(what)
        began_ns = time.thread_time_ns()
        act()
        decisions = self.scheduler.plan(self.now_s)
        self.events_us.setdefault(what, []).append((time.thread_time_ns() - began_ns) / 1e3)
        for decision in decisions:
            self.decisions[type(decision).__name__] += 1
            match decision:
                case Admit():
                    self.acting.add(decision.task)
                case Grant() | Resume():
                    self.generating.add(decision.task)
                case Refuse():
                    self.scheduler.on_end(decision.task, self.now_s)
                    self.forget(decision.task)
                case _:
                    assert isinstance(decision, Pause)


def measure_decisions(num_tasks: int, num_ranks: int, num_events: int, seed: int) -> dict[str, Any]:
    """The cost of `num_events` decisions in the steady state, and what that state is."""
    rollout = Rollout(num_tasks, num_ranks, seed)
    for _ in range(5 * num_tasks):
        rollout.step()
    rollout.events_us.clear()
    rollout.decisions.clear()
    for _ in range(num_events):
        rollout.step()
    rollout.scheduler.check()
    view = rollout.scheduler.view()
    costs_us = sorted(cost for costs in rollout.events_us.values() for cost in costs)
    return {
        "num_tasks": num_tasks,
        "num_ranks": num_ranks,
        "median_us": round(median(costs_us), 1),
        "p99_us": round(quantiles(costs_us, n=100)[98], 1),
        "mean_us": round(sum(costs_us) / len(costs_us), 1),
        "max_us": round(costs_us[-1], 1),
        "median_us_by_event": {what: round(median(costs), 1) for what, costs in rollout.events_us.items()},
        "decisions": dict(rollout.decisions),
        "phases": {
            name: getattr(view, f"num_{name}") for name in ("queued", "admitted", "generating", "acting", "paused")
        },
    }


def fit(points: list[tuple[int, float]]) -> dict[str, float]:
    """`cost = base + slope * log2(tasks)` by least squares, and the exponent of `cost ~ tasks^p` (0: no growth)."""
    logs = [math.log2(size) for size, _ in points]
    costs = [cost for _, cost in points]
    slope, base = _line(logs, costs)
    exponent, _ = _line(logs, [math.log2(cost) for cost in costs])
    return {"base_us": round(base, 2), "us_per_doubling": round(slope, 2), "exponent": round(exponent, 3)}


def _line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    return slope, mean_y - slope * mean_x


def measure_protocol(eta: int, num_operations: int, seed: int) -> dict[str, float]:
    """The cost of an operation on nearly full buffers of 64 groups: reserve, occupy, delete, consume."""
    choose = random.Random(seed)  # noqa: S311 - a workload
    buffers, running = StalenessBuffers(eta, BATCH_SIZE), Bag()
    costs_us: list[float] = []
    names = iter(range(10 * num_operations))
    while len(costs_us) < num_operations:
        dice = choose.random()
        if buffers.ready():
            operation: Callable[[], object] = buffers.consume
        elif buffers.can_reserve(buffers.version) and (dice < 0.6 or not len(running)):
            entry = f"g{next(names)}"
            running.add(entry)
            operation = partial(buffers.reserve, entry, buffers.version)
        else:
            entry = running.draw(choose)
            running.remove(entry)
            operation = partial(buffers.delete if dice < 0.1 else buffers.occupy, entry)
        began_ns = time.thread_time_ns()
        operation()
        costs_us.append((time.thread_time_ns() - began_ns) / 1e3)
    buffers.check()
    return {"median_us": round(median(costs_us), 2), "p99_us": round(quantiles(costs_us, n=100)[98], 2)}


def main() -> int:
    """Measures, prints a line per size, and the JSON line last; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000, help="decisions measured of each size")
    parser.add_argument("--most-tasks", type=int, default=SIZES[-1][0], help="leave out sizes above")
    parser.add_argument("--seed", type=int, default=1, help="of the workload")
    parser.add_argument("--out", type=Path, help="file that takes the last line too")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size[0] <= options.most_tasks]
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for size in sizes:
        found[size] = measure_decisions(*size, options.events, options.seed)
        print(json.dumps(found[size]), flush=True)
    growth = fit([(size[0], one["median_us"]) for size, one in found.items()]) if len(found) > 1 else {}
    print(f"median decision = base_us + us_per_doubling * log2(tasks): {growth}", flush=True)
    protocol = {eta: measure_protocol(eta, options.events, options.seed) for eta in ETAS}
    print(f"protocol operation by eta: {protocol}", flush=True)
    holds = {
        **{f"{tasks} tasks": found[tasks, ranks]["p99_us"] < 1e3 * goal
           for (tasks, ranks), goal in GOALS_MS.items() if (tasks, ranks) in found},
        "protocol": all(one["p99_us"] < PROTOCOL_GOAL_US for one in protocol.values()),
    }  # fmt: skip
    value = found.get(SIZES[2], found[sizes[-1]])["p99_us"] / 1e3
    line = json.dumps(
        {
            "name": NAME,
            "value": round(value, 4),
            "unit": "ms of CPU for a decision of 10,000 tasks on 32 ranks, 99th percentile",
            "goal": GOALS_MS[SIZES[2]],
            "holds": all(holds.values()),
            "details": {"holds": holds, "sizes": list(found.values()), "growth": growth, "protocol": protocol},
        }
    )
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
