"""Configuration of Continuous Task Batching; the trainer's TOML embeds it as `[ctb]`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FootprintPrior(BaseModel):
    """What is assumed of an environment's tasks before any has been seen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt_tokens: int = Field(default=512, ge=1, description="Tokens of a task's first prompt.")
    final_tokens: int = Field(default=2048, ge=1, description="Tokens of a task's whole context when it ends.")


class PriorityWeights(BaseModel):
    """w1 to w4 of P(t), used with `priority = "weighted"`; every term is between 0 and 1. 0 ignores a term.

    The defaults keep the paper's tier order where tasks differ by whole terms: each exceeds the sum of those after it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    evaluation: float = Field(default=8.0, ge=0.0, description="w1: the task belongs to an evaluation.")
    group_completion: float = Field(default=4.0, ge=0.0, description="w2: finished siblings / siblings of its group.")
    active: float = Field(default=2.0, ge=0.0, description="w3: its context is on the rank now (it was not paused).")
    context: float = Field(default=1.0, ge=0.0, description="w4: context tokens / max_context_tokens.")


class CtbSettings(BaseModel):
    """How tasks are admitted to the rollout ranks, paused and resumed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ctb: Literal["on", "off"] = Field(
        default="on",
        description="on: token budgets. off: a fixed concurrency of max_tasks_per_rank without budgets, for ablations.",
    )
    max_tasks_per_rank: int = Field(
        default=0,
        ge=0,
        description="Tasks in flight on one rank, paused ones included. 0: no limit (not with ctb = off).",
    )
    budget_fraction: float = Field(
        default=0.95, gt=0.0, le=1.0, description="Share of an engine's KV cache that is its rank's token budget."
    )
    growth_fraction: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="Share of a task's predicted growth that is set aside when it is admitted or resumed. "
        "0: its present footprint only (many pauses); 1: its whole predicted footprint (no pauses, fewer tasks).",
    )
    default_prior: FootprintPrior = Field(
        default_factory=FootprintPrior,
        description="Assumed footprint of an environment that `priors` does not name.",
    )
    priors: dict[str, FootprintPrior] = Field(
        default_factory=dict, description="Assumed footprint by environment, until tasks have been measured."
    )
    prediction_weight: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="Weight of the newest finished task in an environment's predicted footprint.",
    )
    share_group_prefix: bool = Field(
        default=True, description="Count the first prompt of a group once per rank; false counts it for every sibling."
    )
    probe: bool = Field(
        default=True,
        description="The first task of a group runs alone until its first prompt is measured. false: all start.",
    )
    probe_timeout_s: float = Field(
        default=30.0,
        ge=0.0,
        description="Seconds after which siblings start on the prior, if the probe is late. 0: at once.",
    )
    max_wait_s: float = Field(
        default=30.0,
        ge=0.0,
        description="A call that waited this long goes before all but evaluation. 0: order of arrival.",
    )
    move_after_s: float = Field(
        default=2.0, ge=0.0, description="A paused task may move to a rank with room after so many seconds. 0: at once."
    )
    priority: Literal["tiers", "weighted"] = Field(
        default="tiers",
        description="tiers: evaluation, group completion, active, long context. weighted: the sum by `weights`.",
    )
    weights: PriorityWeights = Field(default_factory=PriorityWeights, description="Weights of `priority = weighted`.")
    max_context_tokens: int = Field(
        default=8192,
        ge=1,
        description="Longest context of a task; normalises the context term of `priority = weighted`.",
    )
    balance_task_types: bool = Field(
        default=False,
        description="Start new groups of the task type with the fewest tasks in flight. false: in their order.",
    )
    max_bypass: int = Field(
        default=4,
        ge=0,
        description="Waiting tasks of a rank that smaller ones may overtake in one decision. 0: none.",
    )
    max_tasks: int = Field(
        default=100_000, ge=1, description="Tasks known at once, queued ones included; more are refused."
    )

    @model_validator(mode="after")
    def _fixed_concurrency_has_a_number(self) -> Self:
        if self.ctb == "off" and self.max_tasks_per_rank == 0:
            raise ValueError("ctb.max_tasks_per_rank: ctb = off needs a concurrency above 0, for example 12")
        return self

    def prior(self, environment: str) -> FootprintPrior:
        """The footprint assumed for an environment before it is measured."""
        return self.priors.get(environment, self.default_prior)

    def budget_tokens(self, kv_tokens: int) -> int:
        """A rank's budget for an engine with a KV cache of `kv_tokens`."""
        return int(kv_tokens * self.budget_fraction)
