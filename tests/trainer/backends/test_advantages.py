"""Advantages: published values, and what must not explode."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tide_trainer.objectives import AdvantageSettings, LossSettings, group_advantages

REWARDS = [1.0, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        ({"method": "grpo", "ddof": 1}, 1.207612, -0.724567),
        ({"method": "grpo", "ddof": 0}, 1.290992, -0.774595),
        ({"method": "dr_grpo"}, 0.625, -0.375),
        ({"method": "rloo"}, 0.714286, -0.428571),
        ({"method": "maxrl"}, 1.666662, -0.999997),
    ],
)
def test_published_values(settings, good, bad):
    found = group_advantages(REWARDS, AdvantageSettings(**settings))
    assert found == pytest.approx([good if reward else bad for reward in REWARDS], abs=1e-6)


def test_negative_advantages_may_be_scaled_down():
    found = group_advantages(REWARDS, AdvantageSettings(negative_scale=0.1))
    assert found == pytest.approx([1.207612 if reward else -0.0724567 for reward in REWARDS], abs=1e-6)


def test_rloo_of_small_groups():
    settings = AdvantageSettings(method="rloo")
    found = [group_advantages(group, settings) for group in ([6.0, 3.0], [9.0, 12.0], [1.0])]
    assert [a for group in found for a in group] == pytest.approx([3, -3, -3, 3, 0])


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_equal_rewards_give_zero(method):
    assert group_advantages([0.35] * 7, AdvantageSettings(method=method)) == [0.0] * 7


def test_nearly_equal_rewards_stay_small():
    # 1e-9 apart: without a floor of the std this would be an advantage of about 1.
    found = group_advantages([0.35, 0.35 + 1e-9, 0.35], AdvantageSettings())
    assert max(map(abs, found)) < 1e-2


def test_a_group_of_one_is_zero_and_warns(caplog):
    with caplog.at_level(logging.WARNING):
        assert group_advantages([3.0], AdvantageSettings()) == [0.0]
    assert "group of one" in caplog.text
    assert group_advantages([], AdvantageSettings()) == []


def test_maxrl_of_a_group_without_success_is_zero():
    assert group_advantages([-1.0, 0.0], AdvantageSettings(method="maxrl")) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad], AdvantageSettings())


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=32),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards, method):
    found = group_advantages(rewards, AdvantageSettings(method=method))
    scale = max(1.0, *map(abs, found))
    assert abs(sum(found)) <= 1e-6 * scale * len(found)
    by_reward = [a for _, a in sorted(zip(rewards, found, strict=True))]
    assert all(low <= high + 1e-9 * scale for low, high in pairwise(by_reward))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"policy": "gspo", "dual_clip": 3.0}, "dual_clip"),
        ({"behaviour": "icepop", "behaviour_cap": 0.5}, "icepop"),
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"policy": "grpo2"}, "policy"),
        ({"clip": 0.2}, "clip"),
    ],
)
def test_impossible_losses_are_refused_by_field(values, text):
    with pytest.raises(ValidationError, match=text):
        LossSettings(**values)


def test_which_losses_count_as_clipped():
    assert LossSettings().clipped
    assert not LossSettings(policy="reinforce").clipped
    assert not LossSettings(behaviour="none").clipped
    assert not LossSettings(behaviour_cap=0).clipped
    assert not LossSettings().needs_reference
