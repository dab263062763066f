"""What is optimised, by name: the settings of advantages and losses, and the advantages themselves. Pure, no torch.

The losses are in `backends/losses.py`. Frameworks differ in every choice here, so each has a name and a default.

Source: TideRL section 6 trains with GRPO; the formulas and their published values are pinned in
`tests/trainer/backends/test_advantages.py` and `test_losses.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_LOG = logging.getLogger(__name__)


class AdvantageSettings(BaseModel):
    """How the rewards of a group become advantages."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["grpo", "dr_grpo", "rloo", "maxrl"] = Field(
        default="grpo",
        description="grpo: (R - mean) / (std + eps); dr_grpo: R - mean; rloo: R - mean of the others; "
        "maxrl: (R - mean) / (mean + eps)",
    )
    ddof: Literal[0, 1] = Field(default=1, description="divisor of grpo's variance: n - ddof")
    eps: float = Field(default=1e-6, gt=0, le=1, description="added to grpo's std and maxrl's mean")
    std_floor: float = Field(default=1e-6, ge=0, description="grpo: smallest std; equal rewards then give 0, not noise")
    negative_scale: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="factor of negative advantages, after the method; 1: none. A long failure repeats one action in "
        "one state, and a small policy answers by swinging from action to action in every state: 0.1 stops that",
    )


class LossSettings(BaseModel):
    """The policy loss of one token, its off-policy weight, its penalties, and how tokens are summed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: Literal["ppo", "gspo", "cispo", "reinforce"] = Field(
        default="ppo",
        description="ppo: clipped token ratio (GRPO's loss); gspo: clipped sequence ratio; cispo: clipped weight on "
        "the log-prob; reinforce: the log-prob alone, unclipped",
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="ratios are clipped at 1 - clip_low; 1: no lower clip")
    clip_high: float = Field(default=0.2, ge=0, description="ratios are clipped at 1 + clip_high; DAPO: 0.28")
    dual_clip: float = Field(
        default=0.0, ge=0, description="ppo: bound of the loss of a negative advantage, above 1; 0: none"
    )
    behaviour: Literal["none", "token", "sequence", "icepop"] = Field(
        default="token",
        description="weight exp(lp_old - lp_engine) on each token's loss. token: truncated at behaviour_cap (TIS); "
        "sequence: of the sequence's product, truncated; icepop: 0 outside [behaviour_floor, behaviour_cap]",
    )
    behaviour_cap: float = Field(default=2.0, ge=0, description="C; 0: not truncated (token: decoupled PPO)")
    behaviour_floor: float = Field(default=0.5, ge=0, description="icepop's lower bound")
    kl_coefficient: float = Field(
        default=0.0, ge=0, description="weight of the KL penalty to the reference; 0: no reference"
    )
    kl_estimator: Literal["k2", "k3"] = Field(default="k3", description="k1 is missing: its expected gradient is zero")
    kl_clamp: float = Field(
        default=10.0, gt=0, le=80, description="largest ref - lp that enters k2 and k3, against overflow"
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus; 0: none")
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo", "sequence_sum"] = Field(
        default="token_mean",
        description="over the whole optimizer update. token_mean: sum / sampled tokens (DAPO); sequence_mean: mean of "
        "sequence means (GRPO); dr_grpo: sum / (sequences * constant_tokens); sequence_sum: mean of sequence sums",
    )
    constant_tokens: int = Field(default=1024, ge=1, description="dr_grpo's constant length L")
    allow_unclipped: bool = Field(default=False, description="True: accept an unclipped loss although eta >= 1")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.dual_clip and (self.policy != "ppo" or self.dual_clip <= 1):
            raise ValueError("dual_clip needs policy 'ppo' and a value above 1; correct it or set it to 0")
        if self.behaviour == "icepop" and not self.behaviour_floor <= 1 <= self.behaviour_cap:
            raise ValueError("icepop needs behaviour_floor <= 1 <= behaviour_cap; correct them")
        return self

    @property
    def clipped(self) -> bool:
        """True where neither a stale ratio nor a behaviour weight can grow without bound."""
        truncated = self.behaviour != "none" and self.behaviour_cap > 0
        return self.policy != "reinforce" and truncated

    @property
    def needs_reference(self) -> bool:
        """True where the loss reads a reference model's log-probs."""
        return self.kl_coefficient > 0


def group_advantages(rewards: Sequence[float], settings: AdvantageSettings) -> list[float]:
    """The advantage of each sibling of one group, in float64, negative ones scaled by `negative_scale`.

    A group of one has nothing to compare with: its advantage is 0, with a warning. Equal rewards give 0.

    Args:
        rewards: [G] rewards of the group's trajectories.
        settings: the method and its constants.

    Returns:
        [G] advantages.

    Raises:
        ValueError: a reward is not finite.
    """
    size = len(rewards)
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards: {list(rewards)} has a value that is not finite; fix the environment's reward")
    if size < 2:
        if size:
            _LOG.warning("a group of one trajectory has advantage 0 and trains nothing")
        return [0.0] * size
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * size
    scale = settings.negative_scale
    return [value * scale if value < 0 else value for value in _centred(rewards, settings)]


def _centred(rewards: Sequence[float], settings: AdvantageSettings) -> list[float]:
    """The method's advantages of at least two rewards that are not all equal."""
    size = len(rewards)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if settings.method == "rloo":
        return [value * size / (size - 1) for value in centred]
    if settings.method == "dr_grpo":
        return centred
    if settings.method == "maxrl":
        # A mean of 0 or less has no maximum-likelihood reading: such groups train nothing.
        return [value / (mean + settings.eps) if mean > 0 else 0.0 for value in centred]
    std = math.sqrt(math.fsum(value * value for value in centred) / (size - settings.ddof))
    return [value / (max(std, settings.std_floor) + settings.eps) for value in centred]
