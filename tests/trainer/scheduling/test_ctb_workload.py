"""Whole rollouts on a virtual clock: every task ends, whatever the budget; pausing is rare where growth is foreseen."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import Admit, Grant, Pause, Refuse, Resume
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("budget_tokens", [400, 800, 2000, 100_000])
def test_every_task_ends_within_any_budget(roll_out, budget_tokens: int, num_ranks: int) -> None:
    outcome = roll_out(budget_tokens=budget_tokens, num_ranks=num_ranks)
    assert len(outcome.ended_s) == 24
    assert outcome.peak_usage_tokens <= CtbSettings().grant_tokens(budget_tokens)
    assert not any(isinstance(decision, Refuse) for _, decision in outcome.decisions)


def test_a_small_budget_pauses_and_a_large_one_does_not(roll_out) -> None:
    assert roll_out(budget_tokens=800).view.num_pauses > 0
    assert roll_out(budget_tokens=100_000).view.num_pauses == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_pause_is_followed_by_one_resume(roll_out, seed: int) -> None:
    outcome = roll_out(budget_tokens=600, seed=seed, settings=CtbSettings(growth_fraction=0.0))
    paused: set[str] = set()
    for _, decision in outcome.decisions:
        if isinstance(decision, Pause):
            assert decision.task not in paused
            paused.add(decision.task)
        elif isinstance(decision, Resume):
            paused.remove(decision.task)
        elif isinstance(decision, Grant):
            assert decision.task not in paused
        assert decision.reason
    assert not paused
    assert outcome.view.num_pauses == outcome.view.num_resumes > 5


def test_setting_growth_aside_saves_pauses(roll_out, make_workload) -> None:
    workload = make_workload(num_groups=10, num_siblings=8)
    prior = FootprintPrior(prompt_tokens=100, final_tokens=300)
    pauses = [
        roll_out(
            workload,
            budget_tokens=3000,
            settings=CtbSettings(growth_fraction=fraction, default_prior=prior, idle_lending=0.0),
        ).view.num_pauses
        for fraction in (0.0, 0.3, 1.0)
    ]
    assert pauses[0] >= pauses[1] > pauses[2], pauses


def test_evaluation_submitted_last_ends_first(roll_out, make_workload) -> None:
    outcome = roll_out(make_workload(num_eval_groups=2), budget_tokens=800)
    ends = {kind: [at for task, at in outcome.ended_s.items() if task.startswith(kind)] for kind in ("eval", "train")}
    assert sum(ends["eval"]) / len(ends["eval"]) < 0.6 * sum(ends["train"]) / len(ends["train"])
    admitted = [decision.task for _, decision in outcome.decisions if isinstance(decision, Admit)]
    assert all(task.startswith("eval") for task in admitted[:2])


def test_nothing_is_granted_while_weights_change(roll_out, make_workload) -> None:
    outcome = roll_out(make_workload(gate=((1.0, 3.0), (4.0, 4.5))), budget_tokens=2000, num_ranks=2)
    during = [d for at_s, d in outcome.decisions if 1.0 < at_s < 3.0 or 4.0 < at_s < 4.5]
    assert during
    assert all(isinstance(decision, Pause) for decision in during)
    assert len(outcome.ended_s) == 24


def test_fixed_concurrency_never_exceeds_its_number(roll_out) -> None:
    outcome = roll_out(settings=CtbSettings(ctb="off", max_tasks_per_rank=3), budget_tokens=300, num_ranks=2)
    live = peak = 0
    events = [(at_s, 1) for at_s, d in outcome.decisions if isinstance(d, Admit)]
    events += [(at_s, -1) for at_s in outcome.ended_s.values()]
    for _, change in sorted(events):
        live += change
        peak = max(peak, live)
    assert peak == 6
    assert outcome.view.num_pauses == 0


def test_weighted_priorities_end_too(roll_out) -> None:
    outcome = roll_out(settings=CtbSettings(priority="weighted"), budget_tokens=600)
    assert len(outcome.ended_s) == 24


def test_the_same_seed_decides_the_same(roll_out) -> None:
    first, second = (roll_out(budget_tokens=700, num_ranks=2, seed=3).decisions for _ in range(2))
    assert first == second


def test_no_paused_task_starves(roll_out, make_workload) -> None:
    workload = make_workload(num_groups=20, num_siblings=4)
    settings = CtbSettings(growth_fraction=0.0, max_wait_s=4.0)
    outcome = roll_out(workload, budget_tokens=1000, settings=settings)
    waits: dict[str, float] = {}
    longest_s = 0.0
    for at_s, decision in outcome.decisions:
        if isinstance(decision, Pause):
            waits[decision.task] = at_s
        elif isinstance(decision, Resume):
            longest_s = max(longest_s, at_s - waits[decision.task])
    assert longest_s < 4.0 + 8.0
