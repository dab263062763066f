"""The task scheduler under random events, against a plain model of what the ranks hold."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Admit, Grant, Pause, Phase, Refuse, Report, Resume, TaskEntry
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior
from tide_trainer.types import RankId

BUDGET, PICK = 300, st.integers(0, 10**6)


def chosen(options: list, pick: int):
    return options[pick % len(options)]


@dataclass
class Seen:
    """What the shell knows of a task; `phase` follows from the decisions alone."""

    kind: str
    environment: str
    phase: str = "queued"
    rank: RankId | None = None
    tokens: int = 0
    need: int = 0
    prompt: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        growth=st.sampled_from([0.0, 0.3, 1.0]),
        priority=st.sampled_from(["tiers", "weighted"]),
        share=st.booleans(),
        probe=st.booleans(),
    )
    def start(self, growth: float, priority: str, share: bool, probe: bool) -> None:
        self.scheduler = TaskScheduler(
            CtbSettings.model_validate(
                {
                    "growth_fraction": growth,
                    "priority": priority,
                    "share_group_prefix": share,
                    "probe": probe,
                    "max_wait_s": 5.0,
                    "default_prior": FootprintPrior(prompt_tokens=20, final_tokens=90),
                }
            )
        )
        self.share = share
        self.tasks: dict[str, Seen] = {}
        self.ended: set[str] = set()
        self.ranks: set[RankId] = set()
        self.limits: dict[str, int | None] = {"e0": None, "e1": None}
        self.gate_open = True
        self.version = 0
        self.now_s = 0.0
        self.num_groups = 0
        self.add_rank(0)

    def in_phase(self, *phases: str) -> list[str]:
        return sorted(task for task, seen in self.tasks.items() if seen.phase in phases)

    def others_tokens(self, rank: RankId, but: str) -> int:
        """Live tokens of the rank's other tasks; a group's first prompt counts once if it is shared (block size 1)."""
        active = {t: s for t, s in self.tasks.items() if s.tokens and s.phase in ("generating", "acting")}
        there = {t: s for t, s in active.items() if s.rank == rank and t != but}
        total = sum(seen.tokens for seen in there.values())
        if self.share:
            groups = [task.split("/")[0] for task in (*there, but)]
            total -= sum((groups.count(group) - 1) * self.prompt_of(group) for group in set(groups))
        return total

    def prompt_of(self, group: str) -> int:
        return 10 + 7 * (int(group[1:]) % 3)

    @rule(index=st.integers(0, 2))
    def add_rank(self, index: int) -> None:
        rank = RankId("w", index)
        self.scheduler.add_rank(rank, BUDGET, 1, self.version)
        self.ranks.add(rank)
        self.decide()

    @precondition(lambda self: self.ranks)
    @rule(pick=PICK)
    def remove_rank(self, pick: int) -> None:
        rank = chosen(sorted(self.ranks), pick)
        gone = set(self.scheduler.remove_rank(rank))
        self.ranks.remove(rank)
        for task, seen in self.tasks.items():
            if seen.rank == rank:
                if seen.phase in ("admitted", "generating", "acting"):
                    assert task in gone
                if seen.phase == "generating":
                    seen.phase = "acting"
                seen.rank = None
        self.decide()

    @precondition(lambda self: len(self.tasks) < 40)
    @rule(size=st.integers(1, 4), is_eval=st.booleans(), environment=st.sampled_from(["e0", "e1"]))
    def submit_group(self, size: int, is_eval: bool, environment: str) -> None:
        group = f"g{self.num_groups}"
        self.num_groups += 1
        for member in range(size):
            task, kind = f"{group}/{member}", "eval" if is_eval else "train"
            self.scheduler.submit(TaskEntry(task, group, kind, size, environment, order_key=self.num_groups))
            self.tasks[task] = Seen(kind, environment)
        self.decide()

    @precondition(lambda self: self.in_phase("admitted", "acting"))
    @rule(pick=PICK, more=st.sampled_from([0, 10, 40, 80]), new=st.integers(1, 30))
    def call(self, pick: int, more: int, new: int) -> None:
        task = chosen(self.in_phase("admitted", "acting"), pick)
        seen = self.tasks[task]
        first = self.prompt_of(task.split("/")[0])
        seen.prompt = seen.tokens + more if seen.tokens else first
        seen.need, seen.phase = seen.prompt + new, "held"
        self.scheduler.on_call(task, seen.prompt, new, self.now_s)
        self.decide()

    @precondition(lambda self: self.in_phase("generating"))
    @rule(pick=PICK, share=st.floats(0, 1))
    def turn(self, pick: int, share: float) -> None:
        task = chosen(self.in_phase("generating"), pick)
        seen = self.tasks[task]
        seen.tokens = seen.prompt + max(1, round(share * (seen.need - seen.prompt)))
        seen.phase = "acting"
        self.scheduler.on_turn(task, seen.tokens, self.now_s)
        self.decide()

    @precondition(lambda self: self.in_phase("generating", "paused", "refused"))
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        task = chosen(self.in_phase("generating", "paused", "refused"), pick)
        self.scheduler.on_abort(task, self.now_s)
        self.tasks[task].phase, self.tasks[task].tokens = "acting", 0
        self.decide()

    @precondition(lambda self: self.tasks)
    @rule(pick=PICK, more=st.integers(0, 40), final=st.sampled_from([None, 0, 100, 10**6]), measured=st.booleans())
    def report(self, pick: int, more: int, final: int | None, measured: bool) -> None:
        task = chosen(sorted(self.tasks), pick)
        first, seen = self.prompt_of(task.split("/")[0]), self.tasks[task]
        self.scheduler.on_report(task, Report(None if measured else first + more, first, more, final))
        if not measured and seen.phase in ("admitted", "acting"):
            seen.phase, seen.tokens = "acting", first + more
        self.decide()

    @precondition(lambda self: self.in_phase("admitted", "generating", "acting", "paused", "refused"))
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        task = chosen(self.in_phase("admitted", "generating", "acting", "paused", "refused"), pick)
        self.scheduler.on_end(task, self.now_s)
        self.forget(task)
        self.decide()

    @precondition(lambda self: self.in_phase("queued"))
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        task = chosen(self.in_phase("queued"), pick)
        self.scheduler.withdraw(task)
        self.forget(task)
        self.decide()

    @rule()
    def toggle_gate(self) -> None:
        self.gate_open = not self.gate_open
        if self.gate_open:
            self.version += 1
            self.scheduler.open_gate(self.version)
        else:
            self.scheduler.close_gate()
        self.decide()

    @rule(environment=st.sampled_from(["e0", "e1"]), limit=st.sampled_from([None, None, 0, 2, 5]))
    def limit_environment(self, environment: str, limit: int | None) -> None:
        self.limits[environment] = limit
        self.scheduler.set_environment_capacity(environment, limit)
        self.decide()

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.decide()

    def forget(self, task: str) -> None:
        del self.tasks[task]
        self.ended.add(task)

    def decide(self) -> None:
        for decision in self.scheduler.plan(self.now_s):
            seen = self.tasks[decision.task]
            assert decision.reason
            match decision:
                case Admit():
                    assert self.gate_open
                    assert seen.phase == "queued"
                    seen.phase, seen.rank = "admitted", decision.rank
                    running = [s for s in self.tasks.values() if s.environment == seen.environment]
                    limit = self.limits[seen.environment]
                    assert limit is None or sum(s.phase != "queued" for s in running) <= limit
                case Grant() | Resume():
                    assert self.gate_open
                    assert seen.phase == ("held" if isinstance(decision, Grant) else "paused")
                    # Invariant 1.
                    assert self.others_tokens(decision.rank, decision.task) + seen.need <= BUDGET
                    seen.phase, seen.rank, seen.tokens = "generating", decision.rank, seen.need
                case Pause():
                    assert seen.phase == "held"
                    seen.phase = "paused"
                case Refuse():
                    assert seen.need > BUDGET
                    seen.phase = "refused"
        assert not self.in_phase("held"), "a held call was neither granted nor paused"
        assert self.scheduler.plan(self.now_s) == ()

    @invariant()
    def the_scheduler_agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        for task, seen in self.tasks.items():
            assert self.scheduler.phase(task) is Phase(seen.phase)

    def teardown(self) -> None:
        """With the gate open and a rank up, every task ends, and none is paused for ever."""
        if not hasattr(self, "scheduler"):
            return
        if not self.gate_open:
            self.toggle_gate()
        if not self.ranks:
            self.add_rank(0)
        for environment in self.limits:
            self.limit_environment(environment, None)
        for _ in range(2000):
            if not self.tasks:
                return
            self.now_s += 1.0
            self.decide()
            for task in self.in_phase("generating"):
                self.scheduler.on_turn(task, self.tasks[task].need, self.now_s)
                self.tasks[task].phase = "acting"
                self.tasks[task].tokens = self.tasks[task].need
                self.scheduler.on_end(task, self.now_s)
                self.forget(task)
            for task in self.in_phase("refused"):
                self.scheduler.on_end(task, self.now_s)
                self.forget(task)
            for task in self.in_phase("admitted", "acting"):
                seen = self.tasks[task]
                seen.prompt = seen.tokens or self.prompt_of(task.split("/")[0])
                seen.need, seen.phase = seen.prompt + 1, "held"
                self.scheduler.on_call(task, seen.prompt, 1, self.now_s)
        pytest.fail(f"not ended: {self.tasks}")


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_long_random_runs_keep_every_invariant(seed: int) -> None:
    """The same rules, in the mix of a busy rollout, where the small budget keeps many tasks paused."""
    choose = random.Random(seed)
    machine = SchedulerMachine()
    machine.start(choose.choice([0.0, 0.3]), choose.choice(["tiers", "weighted"]), seed % 2 == 0, seed % 3 > 0)
    machine.add_rank(1)
    for _ in range(2500):
        pick, dice = choose.randrange(10**6), choose.random()
        if dice < 0.1 and len(machine.tasks) < 40:
            machine.submit_group(choose.randint(1, 4), choose.random() < 0.2, choose.choice(["e0", "e1"]))
        elif dice < 0.5 and machine.in_phase("admitted", "acting"):
            machine.call(pick, choose.choice([0, 10, 40]), choose.randint(1, 30))
        elif dice < 0.53 and machine.tasks:
            machine.report(pick, choose.randrange(40), choose.choice([None, 90, 10**6]), choose.random() < 0.5)
        elif dice < 0.55 and machine.in_phase("generating", "paused", "refused"):
            machine.abort(pick)
        elif dice < 0.85 and machine.in_phase("generating"):
            machine.turn(pick, choose.random())
        elif dice < 0.9 and machine.in_phase("acting", "refused"):
            machine.end(pick)
        elif dice < 0.92:
            machine.wait(choose.random() * 4)
        elif dice < 0.94:
            machine.toggle_gate()
        elif dice < 0.95:
            machine.limit_environment(choose.choice(["e0", "e1"]), choose.choice([None, 3, 8]))
        elif dice < 0.96:
            machine.add_rank(choose.randrange(3))
        elif dice < 0.97 and machine.ranks:
            machine.remove_rank(pick)
        elif dice < 0.98 and machine.in_phase("queued"):
            machine.withdraw(pick)
        machine.the_scheduler_agrees()
    view = machine.scheduler.view()
    assert min(view.num_pauses, view.num_resumes) > 50
    machine.teardown()
