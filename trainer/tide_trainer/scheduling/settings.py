"""Configuration of Continuous Task Batching; the trainer's TOML embeds it as `[ctb]`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FootprintPrior(BaseModel):
    """What is assumed of an environment's tasks before any has been seen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt_tokens: int = Field(default=512, ge=1, description="Tokens of a task's first prompt.")
    final_tokens: int = Field(
        default=0, ge=0, description="Tokens of a task's whole context when it ends. 0: twice what it holds now."
    )


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
    abort_fraction: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Share of an engine's KV cache above which, as the engine measures it, calls that generate are "
        "aborted and made again, the lowest priority first. Above budget_fraction and grant_fraction. 0: never. None: "
        "four fifths of the way from budget_fraction to 1.",
    )
    grant_fraction: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Share of an engine's KV cache up to which calls of running tasks are granted; tasks are admitted "
        "and resumed up to budget_fraction. Not below that. None: three fifths of the way from there to a given "
        "abort_fraction, else to 1.",
    )
    growth_fraction: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of the tasks' predicted growth that counts in the peak of a rank's use, for admitting and "
        "resuming. 0: their present footprints only (many pauses).",
    )
    idle_lending: float = Field(
        default=0.4,
        ge=0.0,
        le=1.0,
        description="How far the contexts of a rank's tasks may exceed its budget where environments take longer than "
        "calls, and stay below it where calls take longer: tasks start and are resumed up to budget x (1 + "
        "idle_lending x (acting - generating) / (acting + generating)), from their mean seconds. Calls at the engine "
        "stay within the budget. 0: the budget always.",
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
    diversity_weight: float = Field(
        default=0.0,
        ge=0.0,
        description="By how much each task of a type in flight puts off new groups of that type, in steps of order. "
        "0: groups start in their order, whatever their type.",
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

    @model_validator(mode="after")
    def _watermarks_stand_in_order(self) -> Self:
        if self.grant_fraction is not None and self.grant_fraction < self.budget_fraction:
            raise ValueError(
                f"ctb.grant_fraction: {self.grant_fraction:g} must not be below ctb.budget_fraction = "
                f"{self.budget_fraction:g}"
            )
        lower = max(self.budget_fraction, self.grant_fraction or 0.0)
        if self.abort_fraction and self.abort_fraction <= lower:
            raise ValueError(
                f"ctb.abort_fraction: {self.abort_fraction:g} must be above ctb.budget_fraction = "
                f"{self.budget_fraction:g} and ctb.grant_fraction, or 0 for no aborts"
            )
        return self

    def prior(self, environment: str) -> FootprintPrior:
        """The footprint assumed for an environment before it is measured."""
        return self.priors.get(environment, self.default_prior)

    def budget_tokens(self, kv_tokens: int) -> int:
        """A rank's budget for an engine with a KV cache of `kv_tokens`."""
        return int(kv_tokens * self.budget_fraction)

    def abort_tokens(self, kv_tokens: int) -> int | None:
        """The measured usage of an engine with a KV cache of `kv_tokens` above which calls are aborted; None: none."""
        fraction = self.abort_fraction
        if fraction is None:
            fraction = max(self._between(0.8), self.grant_fraction or 0.0)
        return int(kv_tokens * fraction) if fraction and self.ctb == "on" else None

    def grant_tokens(self, budget_tokens: int) -> int:
        """What the tasks of a rank with this budget may hold when one of their calls is granted."""
        fraction = self.grant_fraction
        if fraction is None:
            fraction = self._between(0.6, self.abort_fraction or 1.0)
        return int(budget_tokens * max(1.0, fraction / self.budget_fraction))

    def _between(self, share: float, top: float = 1.0) -> float:
        return self.budget_fraction + share * (top - self.budget_fraction)
