"""A plain model of what the task scheduler must hold, and the checks of its decisions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from tide_trainer.scheduling.ctb import TaskScheduler
from tide_trainer.scheduling.plan import Abort, Admit, Grant, Pause, Phase, Refuse, Resume
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior
from tide_trainer.types import RankId

BUDGET, GRANT, KV = 300, 306, 316
LENDING = 0.8
PICK = st.integers(0, 10**6)
ANCHOR = st.sampled_from([None, None, -1, 0, 0, 1])


def masked(mask: int) -> list[RankId]:
    return [RankId("w", index) for index in range(3) if mask & (1 << index)]


def chosen(options: list, pick: int):
    return options[pick % len(options)]


@dataclass
class Seen:
    """What the shell knows of a task; `phase` follows from the decisions alone."""

    kind: str
    environment: str
    version: int | None = None
    phase: str = "queued"
    rank: RankId | None = None
    tokens: int = 0
    need: int = 0
    prompt: int = 0


class SchedulerModel(RuleBasedStateMachine):
    """What follows from the events and decisions alone; `decide` plans and checks each decision against it."""

    def begin(self) -> None:
        """The first events."""

    @initialize(
        growth=st.sampled_from([0.0, 0.3, 1.0]),
        priority=st.sampled_from(["tiers", "weighted"]),
        lend=st.booleans(),
        share=st.booleans(),
        probe=st.booleans(),
    )
    def start(self, growth: float, priority: str, share: bool, probe: bool, lend: bool = False) -> None:
        self.scheduler = TaskScheduler(
            CtbSettings.model_validate(
                {
                    "growth_fraction": growth,
                    "priority": priority,
                    "share_group_prefix": share,
                    "probe": probe,
                    "idle_lending": LENDING if lend else 0.0,
                    "max_wait_s": 5.0,
                    "budget_fraction": BUDGET / KV,
                    "grant_fraction": GRANT / KV,
                    "default_prior": FootprintPrior(prompt_tokens=20, final_tokens=90),
                }
            )
        )
        self.share, self.lend = share, lend
        self.tasks: dict[str, Seen] = {}
        self.ended: set[str] = set()
        self.ranks: dict[RankId, int] = {}
        self.closed: set[RankId] = set()
        self.aborting: dict[str, RankId] = {}
        self.limits: dict[str, tuple[int | None, int]] = {"e0": (None, 0), "e1": (None, 0)}
        self.all_closed = False
        self.newest = 0
        self.now_s = 0.0
        self.num_groups = 0
        self.begin()

    def in_phase(self, *phases: str) -> list[str]:
        return sorted(task for task, seen in self.tasks.items() if seen.phase in phases)

    def others_tokens(self, rank: RankId, but: str, *counting: str) -> int:
        """Live tokens of the rank's other tasks; a group's first prompt counts once if it is shared (block size 1)."""
        active = {t: s for t, s in self.tasks.items() if s.tokens and s.phase in counting}
        there = {t: s for t, s in active.items() if s.rank == rank and t != but}
        total = sum(seen.tokens for seen in there.values())
        if self.share:
            groups = [task.split("/")[0] for task in (*there, but)]
            total -= sum((groups.count(group) - 1) * self.prompt_of(group) for group in set(groups))
        return total

    def prompt_of(self, group: str) -> int:
        return 10 + 7 * (int(group[1:]) % 3)

    def sampled_at(self, seen: Seen) -> int:
        """The version of the ranks that the task may be sampled on."""
        return self.newest if seen.version is None else seen.version

    def is_lost(self, seen: Seen) -> bool:
        return self.sampled_at(seen) < self.newest and seen.version not in self.ranks.values()

    def forget(self, task: str) -> None:
        del self.tasks[task]
        self.aborting.pop(task, None)
        self.ended.add(task)

    def check_rank(self, rank: RankId, seen: Seen) -> None:
        assert rank not in self.closed
        assert self.ranks[rank] == self.sampled_at(seen)

    def check_admit(self, decision: Admit, seen: Seen) -> None:
        assert seen.phase == "queued"
        self.check_rank(decision.rank, seen)
        running = [s for s in self.tasks.values() if s.environment == seen.environment and s.phase != "queued"]
        limit, reserved = self.limits[seen.environment]
        if limit is not None:
            assert len(running) < limit
            if seen.kind == "train":
                assert sum(s.kind == "train" for s in running) < limit - reserved

    def decide(self) -> None:
        for decision in self.scheduler.plan(self.now_s):
            seen = self.tasks[decision.task]
            assert decision.reason
            match decision:
                case Admit():
                    self.check_admit(decision, seen)
                    seen.phase, seen.rank = "admitted", decision.rank
                case Grant() | Resume():
                    assert seen.phase == ("held" if isinstance(decision, Grant) else "paused")
                    self.check_rank(decision.rank, seen)
                    assert decision.version == self.ranks[decision.rank]
                    # Invariant 1; where idle KV is lent, calls at the engine alone keep to it.
                    engine = self.others_tokens(decision.rank, decision.task, "generating") + seen.need
                    live = self.others_tokens(decision.rank, decision.task, "generating", "acting") + seen.need
                    assert engine <= GRANT
                    assert live <= (max(GRANT, (1 + LENDING) * BUDGET) if self.lend else GRANT)
                    seen.phase, seen.rank, seen.tokens = "generating", decision.rank, seen.need
                case Pause():
                    assert seen.phase == "held"
                    seen.phase = "paused"
                case Abort():
                    assert seen.phase == "generating"
                    assert seen.rank == decision.rank
                    self.aborting[decision.task] = decision.rank
                case Refuse():
                    assert seen.need > BUDGET or self.is_lost(seen)
                    seen.phase, seen.rank = "refused", None
        assert not self.in_phase("held"), "a held call was neither granted nor paused"
        assert self.scheduler.plan(self.now_s) == ()

    @invariant()
    def the_scheduler_agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert not any(self.is_lost(self.tasks[task]) for task in self.in_phase("queued", "paused"))
        for task, seen in self.tasks.items():
            assert self.scheduler.phase(task) is Phase(seen.phase)
