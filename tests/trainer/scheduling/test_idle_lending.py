"""Idle KV is lent where environments are slower than calls, and calls at the engine stay within the budget."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.lending import IdleLending
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior


@pytest.mark.parametrize(
    ("share", "generating_s", "acting_s", "factor"),
    [(0.8, 1.0, 9.0, 1.64), (0.8, 2.0, 2.0, 1.0), (0.8, 3.0, 1.0, 0.6), (0.0, 1.0, 9.0, 1.0), (0.8, 0.0, 0.0, 1.0)],
)
def test_what_is_lent_follows_the_share_of_idle_time(share, generating_s, acting_s, factor) -> None:
    lending = IdleLending(CtbSettings(idle_lending=share))
    lending.observe_generating(generating_s)
    assert lending.factor() == 1.0, "nothing is lent before both times are known"
    lending.observe_acting(acting_s)
    assert lending.factor() == pytest.approx(factor)


def test_slower_calls_lower_what_is_lent() -> None:
    lending = IdleLending(CtbSettings(idle_lending=0.8))
    lending.observe_acting(9.0)
    lending.observe_generating(1.0)
    before = lending.factor()
    for _ in range(100):
        lending.observe_generating(5.0)
    assert 1.0 < lending.factor() < before


def test_idle_contexts_exceed_the_budget_only_where_lending_is_on(roll_out) -> None:
    prior = FootprintPrior(prompt_tokens=100, final_tokens=250)
    settings = CtbSettings(default_prior=prior, grant_fraction=0.95, idle_lending=0.0)
    kept = roll_out(budget_tokens=800, settings=settings)
    lent = roll_out(budget_tokens=800, settings=settings.model_copy(update={"idle_lending": 0.8}))
    assert kept.peak_usage_tokens <= 800 < lent.peak_usage_tokens <= 1.8 * 800
    assert len(lent.ended_s) == len(kept.ended_s) == 24


def test_slow_calls_keep_new_tasks_out_and_leave_no_rank_idle(situation) -> None:
    policy = situation(1000, idle_lending=1.0, growth_fraction=0.0)
    policy.add("slow/0", "other/0")
    policy.plan(0.0)
    for task, prompt_tokens in (("slow/0", 430), ("other/0", 100)):
        policy.on_call(task, prompt_tokens, 10, 0.0)
        policy.plan(0.0)
        policy.on_turn(task, prompt_tokens + 10, 3.0)
    policy.on_call("slow/0", 440, 10, 4.0)
    assert policy.decide(4.0) == [("Grant", "slow/0")]
    policy.add("new/0")
    assert policy.decide(4.0) == [], "calls took 3 s and the environment 1 s: half of the budget is kept back"
    policy.on_call("other/0", 700, 10, 4.0)
    assert policy.decide(4.0) == [("Pause", "other/0")], "700 do not fit beside 450"
    policy.on_end("slow/0", 5.0)
    assert policy.decide(5.0) == [("Resume", "other/0")], "alone on its rank it may use what is kept back"
    policy.check()


def test_calls_at_the_engine_stay_within_the_budget(situation) -> None:
    policy = situation(1000, idle_lending=1.0, growth_fraction=0.0)
    policy.start("quick/0", 100)
    policy.on_call("quick/0", 110, 10, 100.0)
    policy.plan(100.0)
    policy.on_turn("quick/0", 120, 100.1)
    # The environment took 100 s and the calls none: nearly as much again as the budget is lent.
    for index in range(4):
        policy.start(f"{index}/0", 350, 101.0)
    calls = []
    for index in range(4):
        policy.on_call(f"{index}/0", 370, 10, 102.0)
        calls += policy.decide(102.0)
    assert [what for what, _ in calls] == ["Grant", "Grant", "Pause", "Pause"], "two of 380 tokens are at the engine"
    policy.check()
    policy.on_turn("0/0", 380, 103.0)
    assert policy.decide(103.0) == [("Resume", "2/0")]
    policy.remove_rank(next(iter(policy.view().ranks)).rank)
    policy.check()
