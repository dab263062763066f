"""A state machine for the task scheduler: random events against a plain model of what the ranks hold."""

from __future__ import annotations

import pytest
from ctb_model import ANCHOR, BUDGET, KV, PICK, SchedulerModel, Seen, chosen, masked
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tide_trainer.scheduling.plan import Report, TaskEntry
from tide_trainer.types import RankId


class SchedulerMachine(SchedulerModel):
    """The events."""

    def begin(self) -> None:
        self.add_rank(0)

    @rule(index=st.integers(0, 2), behind=st.booleans())
    def add_rank(self, index: int, behind: bool = False) -> None:
        rank = RankId("w", index)
        version = max(0, self.newest - behind)
        self.scheduler.add_rank(rank, BUDGET, 1, version, KV)
        if rank not in self.ranks:
            self.ranks[rank] = version
            if self.all_closed:
                self.closed.add(rank)
        self.decide()

    @precondition(lambda self: self.ranks)
    @rule(pick=PICK)
    def remove_rank(self, pick: int) -> None:
        rank = chosen(sorted(self.ranks), pick)
        gone = set(self.scheduler.remove_rank(rank))
        del self.ranks[rank]
        self.closed.discard(rank)
        for task, seen in self.tasks.items():
            if seen.rank == rank:
                if seen.phase in ("admitted", "generating", "acting"):
                    assert task in gone or seen.phase != "generating"
                if seen.phase == "generating":
                    seen.phase = "acting"
                    self.aborting.pop(task, None)
                seen.rank = None
        self.decide()

    @precondition(lambda self: len(self.tasks) < 40)
    @rule(size=st.integers(1, 4), is_eval=st.booleans(), environment=st.sampled_from(["e0", "e1"]), anchor=ANCHOR)
    def submit_group(self, size: int, is_eval: bool, environment: str, anchor: int | None = None) -> None:
        group = f"g{self.num_groups}"
        self.num_groups += 1
        for member in range(size):
            task, kind = f"{group}/{member}", "eval" if is_eval else "train"
            version = None if anchor is None else max(0, self.newest + anchor)
            order = self.num_groups % 7
            self.scheduler.submit(TaskEntry(task, group, kind, size, environment, "", order, version))
            self.tasks[task] = Seen(kind, environment, version)
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
        self.aborting.pop(task, None)
        self.scheduler.on_turn(task, seen.tokens, self.now_s)
        self.decide()

    @precondition(lambda self: self.in_phase("generating", "paused", "refused"))
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        task = chosen(self.in_phase("generating", "paused", "refused"), pick)
        self.scheduler.on_abort(task, self.now_s)
        self.tasks[task].phase, self.tasks[task].tokens = "acting", 0
        self.aborting.pop(task, None)
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

    @rule(mask=st.integers(1, 15))
    def close_gate(self, mask: int) -> None:
        ranks = None if mask & 8 else masked(mask)
        self.scheduler.close_gate(ranks)
        self.closed |= set(self.ranks) if ranks is None else {rank for rank in ranks if rank in self.ranks}
        self.all_closed |= ranks is None
        self.decide()

    @rule(mask=st.integers(1, 15), newer=st.booleans())
    def open_gate(self, mask: int, newer: bool) -> None:
        ranks = None if mask & 8 else masked(mask)
        opened = [rank for rank in self.ranks if ranks is None or rank in ranks]
        # An engine is updated while no call is in flight there.
        if newer and any(seen.phase == "generating" and seen.rank in opened for seen in self.tasks.values()):
            return
        version = self.newest + newer
        self.scheduler.open_gate(version, ranks)
        self.newest = version
        self.closed -= set(opened)
        self.ranks |= dict.fromkeys(opened, version)
        self.all_closed &= ranks is not None
        for seen in self.tasks.values():
            # What a rank left behind holds of the others is of no more use.
            if seen.phase in ("admitted", "acting") and self.ranks.get(seen.rank) != self.sampled_at(seen):
                seen.rank = None
        self.decide()

    @rule(
        environment=st.sampled_from(["e0", "e1"]),
        limit=st.sampled_from([None, None, 0, 2, 5]),
        reserved=st.integers(0, 2),
    )
    def limit_environment(self, environment: str, limit: int | None, reserved: int = 0) -> None:
        reserved = 0 if limit is None else min(limit, reserved)
        self.limits[environment] = (limit, reserved)
        self.scheduler.set_environment_capacity(environment, limit, reserved)
        self.decide()

    @precondition(lambda self: self.ranks)
    @rule(pick=PICK, used_tokens=st.integers(0, 2 * KV))
    def measure(self, pick: int, used_tokens: int) -> None:
        """The engine measures its use, which has nothing to do with what the tasks said."""
        rank = chosen(sorted(self.ranks), pick)
        before = dict(self.aborting)
        self.scheduler.on_engine_usage(rank, used_tokens, self.now_s)
        self.decide()
        new = {task for task in self.aborting if task not in before}
        if not new:
            return
        assert rank not in before.values(), "the last abort does not show yet"
        freed = [self.tasks[task].need for task in new]
        excess_tokens = used_tokens - int(KV * (BUDGET / KV + 0.8 * (1 - BUDGET / KV)))
        assert sum(freed) - min(freed) < excess_tokens, "more than needed"
        rest = [
            seen
            for task, seen in self.tasks.items()
            if seen.phase == "generating" and seen.rank == rank and task not in new
        ]
        assert rest, "the only one"
        if any(self.tasks[task].kind == "eval" for task in new):
            assert all(seen.kind == "eval" for seen in rest)

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.decide()

    def teardown(self) -> None:
        """With the gates open and a rank up, every task ends, and none is paused for ever."""
        if not hasattr(self, "scheduler"):
            return
        if not self.ranks:
            self.add_rank(0)
        for task in self.in_phase("generating"):
            self.scheduler.on_abort(task, self.now_s)
            self.tasks[task].phase, self.tasks[task].tokens = "acting", 0
        self.now_s += 1.0
        for _ in range(2):
            # The versions to come that some wait for, and no more of those that are gone.
            self.open_gate(8, newer=True)
        for rank in self.ranks:
            self.scheduler.on_engine_usage(rank, 0, self.now_s)
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
