"""Losses: published values, poisoned masks, and exact sums over any split."""

from __future__ import annotations

import math

import pytest
import torch

from tide_trainer.backends.losses import (
    LossInputs,
    Totals,
    aggregate,
    kl_terms,
    policy_loss,
    policy_terms,
    supervised_loss,
)
from tide_trainer.objectives import LossSettings

torch.set_num_threads(1)
A, R = [1.0, -1.0, 2.0], [0.5, 1.0, 1.5]
ENGINE = [-0.5, -1.5, -0.8]
LOW = ["none", "token", "sequence", "icepop"]
POLICIES = ["ppo", "gspo", "cispo", "reinforce"]
AGGREGATIONS = ["token_mean", "sequence_mean", "dr_grpo", "sequence_sum"]


def row(values):
    return torch.tensor([values], dtype=torch.float64)


def loss_of(advantages, ratios, engine=None, old=-1.0, **settings):
    """The token-mean loss of one sequence whose ratios to lp_old = -1 are given."""
    settings.setdefault("behaviour", "none")
    old_row = torch.full((1, len(ratios)), old, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=old_row + row([math.log(r) for r in ratios]),
        engine=row(engine) if engine else old_row,
        advantages=row(advantages),
        mask=torch.ones(1, len(ratios), dtype=torch.bool),
        old=old_row,
    )
    return float(policy_loss(inputs, LossSettings(**settings), Totals(len(ratios), 1))[0])


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({}, -0.633333),
        ({"clip_high": 0.28}, -0.686667),
        ({"policy": "gspo"}, -0.605707),
        ({"policy": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, -0.575327),
        ({"policy": "cispo"}, 0.593800),
        ({"policy": "cispo", "clip_low": 1.0, "clip_high": 4.0}, 0.543393),
        ({"behaviour": "token", "behaviour_cap": 0.8, "engine": ENGINE}, -0.47442),
        ({"behaviour": "token", "behaviour_cap": 2.0, "engine": ENGINE}, -0.20650),
        ({"behaviour": "token", "behaviour_cap": 0.0, "engine": ENGINE}, -0.20650),
        ({"policy": "gspo", "behaviour": "sequence", "behaviour_cap": 0.8, "engine": ENGINE}, -0.48457),
    ],
)
def test_published_values(settings, value):
    assert loss_of(A, R, **settings) == pytest.approx(value, abs=2e-5)


def test_published_value_of_reinforce():
    found = loss_of(A, [math.exp(0.5), 1.0, math.exp(-0.5)], policy="reinforce")
    assert found == pytest.approx(0.83333, abs=1e-5)


def test_published_value_of_icepop():
    found = loss_of(A, [1.0] * 3, engine=[-0.5, -3.5, -0.8], behaviour="icepop", behaviour_floor=0.5, behaviour_cap=5.0)
    assert found == pytest.approx(-0.74800, abs=1e-5)


def test_dual_clip_bounds_a_negative_advantage():
    advantages, ratios = [1.0, -1.0, -4.0], [0.5, 1.0, 10.0]
    assert loss_of(advantages, ratios, dual_clip=3.0) == pytest.approx(4.16667, abs=1e-5)
    assert loss_of(advantages, ratios) == pytest.approx(13.5)


def test_token_terms_of_ppo():
    old = torch.full((1, 3), -1.0, dtype=torch.float64)
    lp = old + row([math.log(r) for r in R])
    mask = torch.ones(1, 3, dtype=torch.bool)
    terms, clipped = policy_terms(lp, old, row(A), mask, LossSettings())
    assert terms.tolist()[0] == pytest.approx([-0.5, 1, -2.4])
    assert clipped.tolist() == [[0, 0, 1]]


def test_kl_estimators():
    lp, reference = row([-1.0] * 3), row([0.0, -15, -30])
    assert kl_terms(lp, reference, "k1").tolist()[0] == pytest.approx([-1, 14, 29])
    assert kl_terms(lp, reference, "k2").tolist()[0] == pytest.approx([0.5, 98, 420.5])
    assert kl_terms(lp, reference, "k3").tolist()[0] == pytest.approx([0.71828, 13.0, 28], abs=1e-4)
    assert math.isfinite(float(kl_terms(row([-1000.0]), row([0.0]), "k3")))


def test_kl_penalty_is_added():
    mask = torch.ones(1, 3, dtype=torch.bool)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    inputs = LossInputs(row([0.0, -1, -2]), zero, zero, mask, reference=row([-1.0] * 3))
    loss, metrics = policy_loss(inputs, LossSettings(kl_coefficient=0.1, behaviour="none"), Totals(3, 1))
    assert float(loss) == pytest.approx(0.0362054, abs=1e-6)
    assert metrics["kl_sum"] / 3 == pytest.approx(0.362054, abs=1e-6)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(LossInputs(zero, zero, zero, mask), LossSettings(kl_coefficient=0.1), Totals(3, 1))


@pytest.mark.parametrize(("how", "value"), list(zip(AGGREGATIONS, [3.5, 3.0, 1.3125, 10.5], strict=True)))
def test_aggregation(how, value):
    terms = torch.tensor([[1.0, 2, 99, 99], [3, 4, 5, 6]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    settings = LossSettings(aggregation=how, constant_tokens=8)
    assert float(aggregate(terms, mask, settings, Totals(6, 2))) == pytest.approx(value)


def random_inputs(seed, rows=5, width=7):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2  # noqa: E731
    mask = torch.rand(rows, width, generator=generator) < 0.6
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return (
        {"logprobs": draw(), "engine": draw(), "old": draw(), "reference": draw(), "entropy": draw()},
        advantages,
        mask,
    )


def gradient(data, advantages, mask, settings, parts):
    lp = data["logprobs"].clone().requires_grad_()
    totals = Totals(int(mask.sum()), int(mask.any(-1).sum()))
    total = 0.0
    for part in parts:
        rest = {name: value[part] for name, value in data.items() if name != "logprobs"}
        inputs = LossInputs(logprobs=lp[part], advantages=advantages[part], mask=mask[part], **rest)
        loss, _ = policy_loss(inputs, settings, totals)
        total += float(loss.detach())
        loss.backward()
    assert lp.grad is not None
    return total, lp.grad


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("behaviour", LOW)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_split_gives_the_same_loss_and_gradient(policy, behaviour, aggregation):
    settings = LossSettings(policy=policy, behaviour=behaviour, aggregation=aggregation, kl_coefficient=0.1,
                            entropy_coefficient=0.01)  # fmt: skip
    data, advantages, mask = random_inputs(1)
    mask[2] = False
    whole = gradient(data, advantages, mask, settings, [slice(0, 5)])
    split = gradient(data, advantages, mask, settings, [slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 5)])
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(split[1], whole[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("behaviour", LOW)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
def test_masked_positions_change_nothing(policy, behaviour, poison):
    settings = LossSettings(policy=policy, behaviour=behaviour, kl_coefficient=0.1, entropy_coefficient=0.01)
    data, advantages, mask = random_inputs(2)
    advantages = advantages.expand(5, 7).clone()
    clean = gradient(data, advantages, mask, settings, [slice(0, 5)])
    poisoned = {name: torch.where(mask, value, torch.full_like(value, poison)) for name, value in data.items()}
    dirty = gradient(poisoned, torch.where(mask, advantages, poison), mask, settings, [slice(0, 5)])
    assert dirty[0] == pytest.approx(clean[0], abs=1e-12)
    torch.testing.assert_close(dirty[1], clean[1], atol=0, rtol=0)
    assert bool((clean[1][~mask] == 0).all())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_sampled_is_a_finite_zero_with_a_gradient(aggregation, rows):
    lp = torch.zeros(rows, 4, requires_grad=True)
    inputs = LossInputs(lp, torch.zeros(rows, 4), torch.ones(rows, 1), torch.zeros(rows, 4, dtype=torch.bool))
    loss, metrics = policy_loss(inputs, LossSettings(aggregation=aggregation), Totals(0, 0))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert lp.grad is not None
    assert bool((lp.grad == 0).all())
    assert all(value == 0 for value in metrics.values())


def test_with_one_update_per_batch_old_is_the_present():
    data, advantages, mask = random_inputs(3)
    settings = LossSettings()
    given = gradient({**data, "old": data["logprobs"]}, advantages, mask, settings, [slice(0, 5)])
    lp = data["logprobs"].clone().requires_grad_()
    inputs = LossInputs(lp, data["engine"], advantages, mask)
    policy_loss(inputs, settings, Totals(int(mask.sum()), 5))[0].backward()
    torch.testing.assert_close(lp.grad, given[1])


def test_supervised_loss_is_the_mean_over_sampled_tokens():
    mask = torch.tensor([[True, False], [True, True]])
    lp = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]], requires_grad=True)
    loss = supervised_loss(lp, mask, Totals(3, 2))
    loss.backward()
    assert float(loss) == pytest.approx(2.0)
    assert lp.grad is not None
    assert lp.grad.tolist() == [pytest.approx([-1 / 3, 0]), pytest.approx([-1 / 3, -1 / 3])]
