"""The losses, as sums that are exact for any split into micro-batches and ranks.

Every function takes padded matrices `[B, T]` and a mask of the sampled positions. What lies at a masked position, NaN
included, changes neither a value nor a gradient. Means divide by the counts of the whole optimizer update (`Totals`),
never by those of the micro-batch at hand.

Symbols: r = exp(lp - lp_old), A advantage, w = exp(lp_old - lp_engine), eps clip_low and clip_high, C behaviour_cap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tide_trainer.objectives import LossSettings

MAX_LOG_RATIO = 20.0
"""Log ratios are bounded before `exp`, so that a wild one stays finite; far outside every clip."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer update, all ranks: the divisors of every mean.

    Attributes:
        tokens: sampled positions.
        sequences: sequences with at least one sampled position.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch of policy data, already aligned: position t holds the log-prob of the id at t.

    Attributes:
        logprobs: [B, T] at the present weights, with gradient.
        engine: [B, T] behaviour log-probs of the rollout engine.
        advantages: [B, T] or [B, 1].
        mask: [B, T] True at sampled positions.
        old: [B, T] log-probs at the weights before this batch (lp_prox); None takes `logprobs` without gradient,
            which is exact with one optimizer update per batch.
        reference: [B, T] the reference model's log-probs; only for a KL penalty.
        entropy: [B, T] entropy of the present distribution, with gradient if it has a weight.
    """

    logprobs: Tensor
    engine: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None


def policy_loss(inputs: LossInputs, settings: LossSettings, totals: Totals) -> tuple[Tensor, dict[str, float]]:
    """The micro-batch's share of the update's loss, and sums for its metrics.

    Returns:
        The loss (a scalar; summed over micro-batches and ranks it is the update's loss) and a dict whose names end in
        `_sum` or `_max`: how to combine them.

    Raises:
        ValueError: a KL or entropy weight is set and its input is missing.
    """
    mask = inputs.mask
    lp = _keep(inputs.logprobs, mask)
    engine = _keep(inputs.engine, mask)
    old = lp.detach() if inputs.old is None else _keep(inputs.old, mask).detach()
    advantages = _keep(inputs.advantages.expand_as(mask), mask)
    tokens, clipped = policy_terms(lp, old, advantages, mask, settings)
    weight = behaviour_weight(old, engine, mask, settings)
    terms = weight * tokens
    kl: Tensor | None = None
    if settings.kl_coefficient:
        if inputs.reference is None:
            raise ValueError("kl_coefficient is set and the batch has no reference log-probs")
        kl = kl_terms(lp, _keep(inputs.reference, mask).detach(), settings.kl_estimator, settings.kl_clamp)
        terms = terms + settings.kl_coefficient * kl
    if settings.entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("entropy_coefficient is set and the batch has no entropy")
        terms = terms - settings.entropy_coefficient * _keep(inputs.entropy, mask)
    loss = aggregate(terms, mask, settings, totals)
    with torch.no_grad():
        metrics = {
            "loss_sum": float(loss.detach()),
            "clip_fraction_sum": float(_keep(clipped, mask).sum()),
            "behaviour_weight_sum": float(_keep(weight.expand_as(mask), mask).sum()),
            "logprob_gap_sum": float((old - engine).abs().sum()),
            "logprob_gap_max": float((old - engine).abs().max()) if mask.numel() else 0.0,
            "kl_sum": float(_keep(kl, mask).detach().sum()) if kl is not None else 0.0,
        }
        if inputs.entropy is not None:
            metrics["entropy_sum"] = float(_keep(inputs.entropy, mask).detach().sum())
    return loss, metrics


def supervised_loss(logprobs: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Cross-entropy of the sampled positions: -sum(lp) / tokens of the update."""
    return -_keep(logprobs, mask).sum() / max(totals.tokens, 1)


def policy_terms(
    lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each token [B, T] before the behaviour weight, and where the clip was active (1.0 or 0.0)."""
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if settings.policy == "reinforce":
        return -advantages * lp, torch.zeros_like(lp)
    log_ratio = (lp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if settings.policy == "gspo":
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(-1, keepdim=True) / lengths).expand_as(lp)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(low, high)
    if settings.policy == "cispo":
        return -bounded.detach() * advantages * lp, (ratio != bounded).float()
    free, clipped = -advantages * ratio, -advantages * bounded
    terms = torch.maximum(free, clipped)
    if settings.dual_clip:
        terms = torch.where(advantages < 0, torch.minimum(terms, -settings.dual_clip * advantages), terms)
    return terms, (clipped > free).float()


def behaviour_weight(old: Tensor, engine: Tensor, mask: Tensor, settings: LossSettings) -> Tensor:
    """The off-policy weight w of each token, without gradient: [B, T], or [B, 1] for a sequence's."""
    if settings.behaviour == "none":
        return torch.ones_like(old)
    log_weight = (old - engine).detach()
    if settings.behaviour == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if settings.behaviour == "icepop":
        inside = (weight >= settings.behaviour_floor) & (weight <= settings.behaviour_cap)
        return torch.where(inside, weight, torch.zeros_like(weight))
    return weight.clamp(max=settings.behaviour_cap) if settings.behaviour_cap else weight


def kl_terms(lp: Tensor, reference: Tensor, estimator: str, clamp: float = 10.0) -> Tensor:
    """An estimate of KL(policy, reference) per token, d = reference - lp.

    k1 = -d (as a metric or in the reward only), k2 = d^2 / 2, k3 = exp(d) - d - 1. Only the growing side of d is
    clamped: exp(d) overflows, while a very negative d is finite everywhere.

    Raises:
        ValueError: another estimator.
    """
    d = reference - lp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.clamp(max=clamp).square() / 2
    if estimator == "k3":
        d = d.clamp(max=clamp)
        return d.exp() - d - 1
    raise ValueError(f"kl_estimator: {estimator!r} is not k1, k2 or k3")


def aggregate(terms: Tensor, mask: Tensor, settings: LossSettings, totals: Totals) -> Tensor:
    """Sums token terms [B, T] into this micro-batch's share of the update's loss; a finite zero for nothing sampled."""
    terms = _keep(terms, mask)
    if settings.aggregation == "token_mean":
        return terms.sum() / max(totals.tokens, 1)
    if settings.aggregation == "sequence_mean":
        lengths = mask.sum(-1).clamp(min=1)
        return (terms.sum(-1) / lengths).sum() / max(totals.sequences, 1)
    if settings.aggregation == "dr_grpo":
        return terms.sum() / (max(totals.sequences, 1) * settings.constant_tokens)
    return terms.sum() / max(totals.sequences, 1)


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """Zero where masked; unlike a product with the mask, also for NaN and in the gradient."""
    return torch.where(mask, values, torch.zeros_like(values))
