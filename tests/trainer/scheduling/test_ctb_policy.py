"""The scheduler's decisions, one situation at a time."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import (
    Admit,
    Grant,
    Pause,
    Phase,
    Refuse,
    UnknownTaskError,
)
from tide_trainer.scheduling.settings import FootprintPrior
from tide_trainer.types import RankId

RANK = RankId("w", 0)
OTHER = RankId("w", 1)


def test_a_task_is_admitted_granted_and_measured(situation) -> None:
    made = situation()
    made.add("a")
    (admit,) = made.plan(0.0)
    assert isinstance(admit, Admit)
    assert admit.rank == RANK
    made.on_call("a", 100, 20, 1.0)
    (grant,) = made.plan(1.0)
    assert isinstance(grant, Grant)
    assert "120 of 1000" in grant.reason
    assert made.view().ranks[0].usage_tokens == 120
    made.on_turn("a", 105, 2.0)
    assert made.view().ranks[0].usage_tokens == 105
    made.on_end("a", 3.0)
    assert made.view().ranks[0].usage_tokens == 0
    with pytest.raises(UnknownTaskError, match="'a'"):
        made.on_end("a", 3.0)


def test_acting_tasks_keep_their_tokens_and_a_call_that_does_not_fit_is_paused(situation) -> None:
    made = situation(budget_tokens=300)
    made.start("a", 100)
    made.start("b", 100)
    made.on_call("a", 150, 40, 1.0)
    assert made.decide(1.0) == [("Grant", "a")]  # 110 + 190 = 300
    made.on_call("b", 120, 10, 1.0)
    (pause,) = made.plan(1.0)
    assert isinstance(pause, Pause)
    assert "needs 130 tokens; 190 of 300" in pause.reason
    assert made.plan(1.5) == ()
    made.on_turn("a", 160, 2.0)
    assert made.decide(2.0) == [("Resume", "b")]
    assert made.view().ranks[0].usage_tokens == 290


def test_a_paused_task_resumes_on_its_projected_footprint(situation) -> None:
    priors = {
        "growing": FootprintPrior(prompt_tokens=10, final_tokens=150),
        "env": FootprintPrior(prompt_tokens=10, final_tokens=180),
    }
    made = situation(budget_tokens=300, growth_fraction=1.0, priors=priors)
    made.start("a", 100)
    made.start("b", 90, environment="growing")
    made.on_call("a", 150, 40, 1.0)
    made.plan(1.0)
    made.on_call("b", 120, 10, 1.0)
    made.plan(1.0)
    made.on_turn("a", 160, 2.0)
    # 160 live + 130 fit now, but both are expected to grow by 20 more.
    assert made.plan(2.0) == ()
    made.on_end("a", 3.0)
    assert made.decide(3.0) == [("Resume", "b")]


def test_a_running_task_may_use_what_is_kept_from_new_and_paused_ones(situation) -> None:
    made = situation(budget_tokens=300, budget_fraction=0.75, grant_fraction=0.8)
    for task in ("a", "b", "c"):
        made.start(task, 50)
    made.on_call("a", 190, 10, 1.0)
    assert made.decide(1.0) == [("Grant", "a")], "320 of 400"
    made.on_turn("a", 195, 1.0)
    made.on_call("b", 65, 10, 2.0)
    assert made.decide(2.0) == [("Pause", "b")], "330 of 400"
    made.on_end("c", 3.0)
    assert made.decide(3.0) == [("Resume", "b")], "270 of 300"


def test_an_evaluation_call_takes_the_room_before_a_train_call(situation) -> None:
    made = situation(budget_tokens=300)
    made.start("t", 100)
    made.start("e", 100, kind="eval")
    made.on_call("t", 150, 20, 1.0)
    made.on_call("e", 150, 20, 1.0)
    assert made.decide(1.0) == [("Grant", "e"), ("Pause", "t")]


def test_room_is_kept_for_an_evaluation_call_that_does_not_fit_yet(situation) -> None:
    made = situation(budget_tokens=300)
    made.start("t1", 80)
    made.start("t2", 80)
    made.start("e", 50, kind="eval")
    made.on_call("e", 200, 20, 1.0)
    assert made.decide(1.0) == [("Pause", "e")]
    # t1 fits beside t2, but then the evaluation would not when t2 comes back.
    made.on_call("t1", 100, 10, 2.0)
    assert made.decide(2.0) == [("Pause", "t1")]
    made.on_call("t2", 100, 10, 3.0)
    assert made.decide(3.0) == [("Resume", "e"), ("Pause", "t2")]


def test_a_paused_task_alone_resumes_even_if_it_may_outgrow_the_budget(situation) -> None:
    prior = FootprintPrior(prompt_tokens=10, final_tokens=5000)
    made = situation(budget_tokens=300, growth_fraction=1.0, default_prior=prior, max_wait_s=1e6)
    made.start("a", 50)
    made.close_gate()
    made.on_call("a", 60, 10, 1.0)
    assert made.decide(1.0) == [("Pause", "a")]
    made.open_gate(1)
    assert made.decide(2.0) == [("Resume", "a")]


def test_the_more_complete_group_goes_first(situation) -> None:
    made = situation(budget_tokens=300)
    made.add("g/0", "g/1", siblings=2)
    made.plan(0.0)
    made.on_call("g/0", 10, 10, 0.0)
    made.plan(0.0)
    made.on_call("g/1", 10, 10, 0.0)
    made.plan(0.0)
    for task in ("g/0", "g/1"):
        made.on_turn(task, 20, 0.0)
    made.on_end("g/0", 0.0)
    made.start("x", 100)
    made.on_call("x", 190, 10, 1.0)
    made.on_call("g/1", 190, 10, 1.0)
    assert made.decide(1.0) == [("Grant", "g/1"), ("Pause", "x")]


def test_progress_of_its_group_moves_a_paused_task_forward(situation) -> None:
    made = situation(budget_tokens=420, max_wait_s=1000.0)
    for task in ("big", "x", "g/0", "g/1"):
        made.start(task, 10, siblings=2 if task[0] == "g" else 1)
    made.on_call("big", 310, 10, 0.0)
    made.plan(0.0)
    made.on_call("x", 300, 10, 1.0)
    made.on_call("g/1", 290, 10, 1.0)
    assert [name for name, _ in made.decide(1.0)] == ["Pause", "Pause"]
    made.on_end("g/0", 2.0)
    made.on_end("big", 2.0)
    assert made.decide(2.0) == [("Resume", "g/1")]


def test_a_long_wait_goes_before_priority(situation) -> None:
    made = situation(budget_tokens=300, max_wait_s=10.0)
    made.start("a", 100)
    made.start("b", 100)
    made.on_call("b", 250, 20, 0.0)
    made.plan(0.0)
    for now_s in (1.0, 5.0, 9.0):
        made.on_call("a", 150, 10, now_s)
        assert made.decide(now_s) == [("Grant", "a")]
        made.on_turn("a", 110, now_s)
    made.plan(10.0)
    made.on_call("a", 150, 10, 11.0)
    assert made.decide(11.0) == [("Resume", "b"), ("Pause", "a")]


def test_a_task_larger_than_every_budget_is_refused_with_the_numbers(situation) -> None:
    made = situation(budget_tokens=300, num_ranks=2)
    made.add("a")
    made.plan(0.0)
    made.on_call("a", 290, 20, 1.0)
    (refuse,) = made.plan(1.0)
    assert isinstance(refuse, Refuse)
    assert "prompt of 290 plus up to 20 new tokens is more than the largest rank budget of 300" in refuse.reason
    assert made.phase("a") is Phase.REFUSED
    made.on_end("a", 2.0)
    assert made.view().num_refused == 1


def test_a_task_too_large_for_its_rank_goes_to_a_larger_one(situation) -> None:
    made = situation(budget_tokens=200)
    made.start("a", 50)
    made.add_rank(OTHER, 500)
    made.on_call("a", 300, 20, 1.0)
    (grant,) = made.plan(1.0)
    assert isinstance(grant, Grant)
    assert grant.rank == OTHER
    made.add_rank(OTHER, 250)
    made.on_turn("a", 310, 2.0)
    made.on_call("a", 310, 20, 2.0)
    assert made.decide(2.0) == [("Refuse", "a")]


def test_a_closed_gate_pauses_every_call_and_admits_nothing(situation) -> None:
    made = situation()
    made.start("a", 50)
    made.add("b")
    made.close_gate()
    made.on_call("a", 60, 10, 1.0)
    (pause,) = made.plan(1.0)
    assert isinstance(pause, Pause)
    assert "weights" in pause.reason
    made.open_gate(1)
    assert made.decide(2.0) == [("Resume", "a"), ("Admit", "b")]
