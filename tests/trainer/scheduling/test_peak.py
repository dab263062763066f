"""The predicted peak of a rank's use, predicted final lengths, and idle KV that is lent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_trainer.scheduling.finals import FinalLengths
from tide_trainer.scheduling.peak import Holder, predicted_peak_tokens
from tide_trainer.scheduling.plan import Pause, Refuse
from tide_trainer.scheduling.settings import CtbSettings

PEAK = CtbSettings(admission="peak", admission_fraction=0.95, budget_fraction=1.0, lend_idle=True)


def simulated_peak(holders: list[Holder]) -> int:
    """The highest use of tasks that all grow by a token at a time, step by step."""
    peak = 0
    for grown in range(max((holder.growth_tokens for holder in holders), default=0) + 1):
        alive = [holder for holder in holders if holder.growth_tokens >= grown]
        shared = {holder.group: holder.shared_tokens for holder in alive if holder.shared_tokens}
        own = sum(holder.tokens - holder.shared_tokens + grown for holder in alive)
        peak = max(peak, own + sum(shared.values()))
    return peak


@given(st.lists(st.tuples(st.integers(5, 60), st.integers(0, 50), st.sampled_from("ab"), st.booleans()), max_size=12))
def test_the_peak_is_that_of_the_growth_played_step_by_step(rows: list[tuple[int, int, str, bool]]) -> None:
    holders = [Holder(tokens, growth, group, 5 if shares else 0) for tokens, growth, group, shares in rows]
    assert predicted_peak_tokens(holders) == simulated_peak(holders)


def test_a_task_near_its_end_makes_room_for_one_that_begins() -> None:
    old, new = Holder(90, 10, "a", 0), Holder(10, 90, "b", 0)
    assert predicted_peak_tokens([old, new]) == 120 < 90 + 10 + 10 + 90


def test_siblings_tell_the_final_length_and_longer_tasks_the_rest() -> None:
    finals = FinalLengths()
    assert finals.predicted_tokens("e", "g", 300) == 600
    for tokens in (200, 400, 800):
        finals.observe("e", f"g{tokens}", tokens)
    assert finals.predicted_tokens("e", "g", 300) == 600
    assert finals.predicted_tokens("e", "g", 500) == 800
    assert finals.predicted_tokens("e", "g", 1000) == 1100
    assert finals.predicted_tokens("e", "g400", 100) == 400
    finals.forget_group("g400")
    assert finals.predicted_tokens("e", "g400", 100) == (200 + 400 + 800) // 3


def test_old_tasks_are_forgotten() -> None:
    finals = FinalLengths()
    for tokens in (100_000, *[500] * 64):
        finals.observe("e", "g", tokens)
    assert finals.predicted_tokens("e", "other", 100) == 500


@pytest.mark.parametrize("budget_tokens", [400, 800, 2000])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_task_ends_under_peak_admission(roll_out, budget_tokens: int, num_ranks: int) -> None:
    outcome = roll_out(settings=PEAK, budget_tokens=budget_tokens, num_ranks=num_ranks)
    assert len(outcome.ended_s) == 24
    assert outcome.peak_usage_tokens <= budget_tokens
    assert not any(isinstance(decision, Refuse) for _, decision in outcome.decisions)


def test_lending_saves_pauses(roll_out) -> None:
    pauses = [
        sum(
            isinstance(decision, Pause)
            for seed in range(4)
            for _, decision in roll_out(
                settings=PEAK.model_copy(update={"lend_idle": lend}), budget_tokens=800, seed=seed
            ).decisions
        )
        for lend in (True, False)
    ]
    assert pauses[0] < pauses[1]
