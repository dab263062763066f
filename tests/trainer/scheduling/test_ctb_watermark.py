"""Aborts above the second watermark, as the engine measures its use."""

from __future__ import annotations

import pytest

from tide_trainer.scheduling.plan import Abort, Phase, UnknownRankError
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.types import RankId

RANK = RankId("w", 0)


def generate(made, **prompts: int) -> None:
    """Brings tasks to generation, each with up to 10 new tokens; `e` is an evaluation task."""
    for task, prompt_tokens in prompts.items():
        made.add(task, kind="eval" if task == "e" else "train")
        made.plan(0.0)
        made.on_call(task, prompt_tokens, 10, 0.0)
        made.plan(0.0)
        assert made.phase(task) is Phase.GENERATING


@pytest.fixture
def made(situation):
    """A budget of 900 in a cache of 1000: aborts above 950."""
    return situation(budget_tokens=900, budget_fraction=0.9, abort_fraction=0.95, max_wait_s=1e6)


def aborted(made, used_tokens: int, now_s: float = 1.0) -> list[str]:
    made.on_engine_usage(RANK, used_tokens, now_s)
    return [decision.task for decision in made.plan(now_s) if isinstance(decision, Abort)]


def test_the_lowest_priority_is_aborted_and_no_more_than_needed(made) -> None:
    generate(made, long=200, e=100, short=50, middle=90)
    assert aborted(made, 950) == []
    assert aborted(made, 951) == ["short"]
    assert aborted(made, 990) == [], "the abort does not show yet"
    assert made.view().num_aborts == 1


def test_a_larger_one_makes_a_smaller_one_needless(made) -> None:
    generate(made, long=200, short=50, middle=90)
    made.on_engine_usage(RANK, 1050, 1.0)
    (abort,) = made.plan(1.0)
    assert (abort.task, abort.rank) == ("middle", RANK)
    assert "1050 of 1000 tokens used, 100 too many" in abort.reason


def test_evaluation_goes_last_and_one_call_goes_on(made) -> None:
    generate(made, e=100, t=200, f=50)
    assert aborted(made, 10_000) == ["f", "t"]
    made.on_abort("f", 2.0)
    made.on_abort("t", 2.0)
    assert aborted(made, 10_000, 3.0) == [], "nothing generates beside it"
    made.on_end("e", 4.0)


def test_an_aborted_task_waits_until_the_engine_is_within_the_budget(made) -> None:
    generate(made, t=200, f=50)
    assert aborted(made, 990) == ["f"]
    made.on_abort("f", 2.0)
    made.on_call("f", 50, 10, 2.0)
    made.add("new")
    (pause,) = made.plan(2.0)
    assert "the engine measures 990 of 1000" in pause.reason
    assert aborted(made, 990, 2.0) == [], "measured before the abort"
    assert aborted(made, 940, 3.0) == [], "below the watermark, above the budget"
    assert made.phase("f") is Phase.PAUSED
    made.on_engine_usage(RANK, 900, 4.0)
    assert made.decide(4.0) == [("Resume", "f"), ("Admit", "new")]
    made.check()


def test_an_engine_that_falls_silent_while_overloaded_still_serves_one_call_at_a_time(made) -> None:
    generate(made, t=200, f=50)
    assert aborted(made, 990) == ["f"]
    made.on_abort("f", 2.0)
    made.on_call("f", 50, 10, 2.0)
    made.plan(2.0)
    made.on_turn("t", 205, 3.0)
    assert made.decide(3.0) == [("Resume", "f")]
    made.on_call("t", 220, 10, 4.0)
    assert made.decide(4.0) == [("Pause", "t")]


def test_a_call_that_ends_before_its_abort_is_over(made) -> None:
    generate(made, t=200, f=50)
    assert aborted(made, 990) == ["f"]
    made.on_turn("f", 55, 2.0)
    made.check()
    made.on_call("f", 60, 10, 2.5)
    made.plan(2.5)
    assert made.phase("f") is Phase.PAUSED
    made.withdraw("f")
    made.check()


def test_a_task_that_ends_under_an_abort_is_awaited_no_longer(made) -> None:
    generate(made, t=200, u=100, f=50)
    assert aborted(made, 990) == ["f"]
    made.on_end("f", 2.0)
    assert aborted(made, 990, 3.0) == ["u"]


def test_settings_and_misuse(situation) -> None:
    with pytest.raises(ValueError, match=r"ctb.abort_fraction: 0.9 must be above ctb.budget_fraction = 0.95 "):
        CtbSettings(abort_fraction=0.9)
    with pytest.raises(ValueError, match=r"ctb.grant_fraction: 0.9 must not be below ctb.budget_fraction = 0.95"):
        CtbSettings(grant_fraction=0.9)
    with pytest.raises(ValueError, match=r"ctb.abort_fraction: 0.97 must be above"):
        CtbSettings(abort_fraction=0.97, grant_fraction=0.98)
    assert CtbSettings(budget_fraction=0.9).abort_tokens(1000) == 980
    assert CtbSettings(budget_fraction=0.9).grant_tokens(900) == 960
    assert CtbSettings(budget_fraction=1.0).grant_tokens(900) == 900
    assert CtbSettings(grant_fraction=1.0).abort_tokens(1000) == 1000
    assert CtbSettings(budget_fraction=0.9, abort_fraction=0.99).abort_tokens(1000) == 990
    assert CtbSettings(abort_fraction=0).abort_tokens(1000) is None
    assert CtbSettings(ctb="off", max_tasks_per_rank=4).abort_tokens(1000) is None
    with pytest.raises(UnknownRankError, match="w:1 is not here; present: w:0"):
        situation().on_engine_usage(RankId("w", 1), 5, 0.0)


def test_calls_are_granted_up_to_less_than_what_is_aborted_for() -> None:
    for settings in (CtbSettings(), CtbSettings(abort_fraction=0.96), CtbSettings(abort_fraction=0.99)):
        abort_tokens = settings.abort_tokens(10_000)
        assert abort_tokens is not None
        assert settings.grant_tokens(settings.budget_tokens(10_000)) < abort_tokens
    assert CtbSettings(abort_fraction=0).grant_tokens(9500) == CtbSettings().grant_tokens(9500) == 9800


def test_a_smaller_budget_moves_no_watermark(situation) -> None:
    made = situation(budget_tokens=900, budget_fraction=0.9, abort_fraction=0.95)
    generate(made, t=200, u=100)
    made.add_rank(RANK, 500)
    assert aborted(made, 900) == []
    made.add_rank(RANK, 500, kv_tokens=800)
    assert aborted(made, 900, 2.0) == ["u"]
