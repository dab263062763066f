"""The configuration of a run as frozen models. Every field says its meaning, its unit, and what 0 or None does.

`config_file.py` reads it from TOML. Only this module reads the process environment.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tide_trainer.objectives import AdvantageSettings, LossSettings
from tide_trainer.scheduling.reconcile import WatchSettings
from tide_trainer.scheduling.settings import CtbSettings
from tide_trainer.settings_base import Settings
from tide_trainer.settings_play import AgentSettings, GatewaySettings, ModelSettings, TaskSettings

GATEWAY_TOKEN_VARIABLE = "TIDE_GATEWAY_TOKEN"  # noqa: S105 - the variable's name, not a token

Beta = Annotated[float, Field(ge=0, lt=1)]


class RunSettings(Settings):
    """[run]: what is run, for how long, and where its files go."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="folder name under `directory`"
    )
    directory: str = Field(default="runs", description="where run folders are made")
    seed: int = Field(default=1, ge=0, lt=2**32, description="seed of the model, the data order and the trainer")
    max_train_steps: int = Field(
        default=30, ge=1, description="train steps (optimizer updates) after which the run ends"
    )
    max_time_s: float = Field(default=0, ge=0, description="seconds after which the run ends in order; 0: no limit")
    target_success: float = Field(
        default=0, ge=0, le=1, description="evaluated success at which the run ends; 0: never"
    )
    database_url: str = Field(
        default="", description="trainer's SQLAlchemy URL; empty: trainer.sqlite3 in the run's folder"
    )


class RolloutSettings(Settings):
    """[rollout]: the rollout ranks and their engine."""

    engine: Literal["vllm", "fake"] = Field(default="vllm", description="inference engine of every rollout rank")
    num_ranks: int = Field(default=1, ge=1, le=64, description="rollout ranks")
    min_ranks: int = Field(default=1, ge=1, description="living rollout ranks below which the run fails")
    kv_tokens: int = Field(default=65_536, ge=64, description="KV cache of a rank, in tokens")
    max_context_tokens: int = Field(default=512, ge=16, description="longest prompt plus completion, in tokens")
    max_new_tokens: int = Field(default=4, ge=1, description="tokens that one turn may sample")
    block_tokens: int = Field(default=32, ge=1, description="tokens of a KV block; vLLM on CPU wants a multiple of 32")
    max_running: int = Field(
        default=256, ge=1, description="requests that a rank batches at once (vLLM's max_num_seqs)"
    )
    num_threads: int = Field(default=1, ge=1, description="CPU threads of one engine")
    temperature: float = Field(
        default=1.0, gt=0, le=2, description="sampling temperature of training rollouts; 1, that of all log-probs"
    )
    ready_timeout_s: float = Field(default=300, gt=0, description="seconds until an engine must serve")
    watch: WatchSettings = WatchSettings()
    probe_interval_s: float = Field(default=2, gt=0, description="seconds between health probes of an engine")
    sync_timeout_s: float = Field(
        default=120, gt=0, description="seconds for draining, and for one rank's weight update"
    )
    parity_tolerance: float = Field(
        default=1e-3, gt=0, description="largest allowed difference between the engine's and the trainer's log-probs"
    )

    @field_validator("temperature")
    @classmethod
    def _trained_as_sampled(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "must be 1: engine and trainer take log-probs at temperature 1, so what was sampled at another one "
                "would be trained as if the policy had said it; leave it out"
            )
        return value


class AlgorithmSettings(Settings):
    """[algorithm]: group sampling, the staleness bound, advantages and the loss."""

    groups_per_batch: int = Field(default=16, ge=1, description="groups that one train step consumes")
    group_size: int = Field(default=8, ge=1, description="sibling trajectories of one prompt")
    eta: int = Field(default=1, ge=0, le=64, description="staleness bound: V_traj + eta >= V_buf; 0: synchronous")
    min_group_size: int = Field(default=2, ge=1, description="rewarded siblings below which a group is dropped")
    spare_groups: int = Field(
        default=0,
        ge=0,
        description="redundancy: groups in flight for each coming batch beyond `groups_per_batch`; what is slower than "
        "the batch and fits no later one is aborted and sampled again; 0: none",
    )
    spare_siblings: int = Field(
        default=0,
        ge=0,
        description="redundancy: trajectories of a group beyond `group_size`; the first `group_size` with a reward "
        "count, the rest is aborted; 0: none",
    )
    filter_equal_rewards: bool = Field(
        default=False,
        description="True: groups whose rewards are all equal carry no signal, are dropped, and another prompt is "
        "sampled; False: they train",
    )
    stuck_s: float = Field(
        default=60,
        ge=0,
        description="unpaused seconds that a train step waits for a group once its buffer is full of complete groups "
        "and such in flight; then the group is aborted and its prompt sampled again later; 0: waits on",
    )
    stuck_episodes: float = Field(
        default=3, ge=0, description="the same in measured episodes of the environment; the longer of the two counts"
    )
    max_samplings: int = Field(
        default=3, ge=1, le=1000, description="times that a prompt is sampled before it is dropped as given up"
    )
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size {self.min_group_size} is above group_size {self.group_size}; lower it")
        if self.eta and not (self.loss.clipped or self.loss.allow_unclipped):
            raise ValueError(
                "an unclipped loss diverges on stale data; set eta = 0, clip, or loss.allow_unclipped = true"
            )
        if self.loss.needs_reference:
            raise ValueError("loss.kl_coefficient needs Ref ranks, which do not exist yet; set it to 0")
        return self


class TrainSettings(Settings):
    """[train]: the training backend and the optimizer."""

    backend: Literal["fsdp", "fake"] = Field(default="fsdp", description="training backend of the Actor ranks")
    num_ranks: int = Field(default=1, ge=1, le=1024, description="Actor ranks")
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's learning rate")
    warmup_train_steps: int = Field(
        default=0, ge=0, description="train steps over which the learning rate rises linearly to its value; 0: none"
    )
    final_fraction: float = Field(
        default=1.0, gt=0, le=1, description="share of the learning rate left at the run's last train step, linearly"
    )
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's betas, each below 1")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradient norm clip; 0: no clip")
    micro_batch_tokens: int = Field(default=16_384, ge=1, description="tokens, padding included, of a micro-batch")
    num_threads: int = Field(default=1, ge=1, description="CPU threads of one Actor rank")
    checkpoint_every: int = Field(default=10, ge=0, description="train steps between checkpoints; 0: only at the end")
    timeout_s: float = Field(default=600, gt=0, description="seconds for one train step, and for the boot")

    def learning_rate_at(self, num_done: int, max_train_steps: int) -> float:
        """The learning rate of the train step after `num_done` of `max_train_steps`."""
        warmup = self.warmup_train_steps
        rise = min(1.0, (num_done + 1) / warmup) if warmup else 1.0
        falling = max(0, num_done + 1 - warmup) / max(1, max_train_steps - warmup)
        return self.learning_rate * rise * (1.0 - (1.0 - self.final_fraction) * min(1.0, falling))


class WarmStartSettings(Settings):
    """[warm_start]: supervised training on recorded demonstrations before reinforcement learning; off by default."""

    enabled: bool = Field(default=False, description="False: start from the model as it is")
    demonstrator: str = Field(default="", description="module:function of the @agent that demonstrates")
    num_episodes: int = Field(default=300, ge=1, description="demonstrations to record")
    batch_episodes: int = Field(default=64, ge=1, description="demonstrations of one supervised train step")
    learning_rate: float = Field(default=1e-3, gt=0, description="learning rate of the supervised train steps")
    steps_between_evaluations: int = Field(
        default=5, ge=1, description="supervised train steps between success measurements"
    )
    first_evaluation: int = Field(default=10, ge=1, description="supervised train steps before the first measurement")
    max_steps: int = Field(default=400, ge=1, description="supervised train steps after which the warm start fails")
    num_eval: int = Field(default=100, ge=1, description="episodes of one measurement")
    min_success: float = Field(default=0.45, ge=0, le=1, description="sampled success at which it stops")
    max_success: float = Field(
        default=0.65, ge=0, le=1, description="sampled success above which it stops with a warning"
    )
    max_greedy_success: float = Field(default=0.85, ge=0, le=1, description="greedy success above which it warns")


class EvaluationSettings(Settings):
    """[evaluation]: success on held-out seeds."""

    every_train_steps: int = Field(
        default=5, ge=0, description="train steps between evaluations; 0: only first and last"
    )
    greedy: Literal["ends", "always", "never"] = Field(
        default="ends", description="when greedy success is measured too"
    )
    grace_s: float = Field(
        default=120,
        gt=0,
        description="seconds that a weight sync waits for a running evaluation where no rank can keep its version: "
        "with one rollout rank, or more such versions than ranks to spare; then it is recorded as partial",
    )
    timeout_s: float = Field(
        default=1800,
        gt=0,
        description="seconds after its start at which an evaluation is recorded as partial; a rank that keeps its "
        "version takes the newest one then",
    )
    reserved_slots: int = Field(
        default=0,
        ge=0,
        description="environment slots that only evaluation tasks take, beside what the gateway reserves; 0: none",
    )
    num_samples: int = Field(
        default=2, ge=0, le=50, description="trajectories kept for the report, before and after training"
    )


class ReportSettings(Settings):
    """[report]: which trajectories are recorded turn by turn, beside the evaluations' `num_samples`."""

    trajectories_every: int = Field(
        default=10, ge=0, description="train steps between recorded training trajectories; 0: none"
    )
    num_trajectories: int = Field(
        default=2, ge=1, le=50, description="training trajectories recorded at each such train step"
    )
    max_mib: int = Field(
        default=256, ge=1, description="MiB of a run's recorded trajectories; training ones take at most half of it"
    )


class TrainerSettings(Settings):
    """A whole configuration file."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    gateway: GatewaySettings = GatewaySettings()
    tasks: TaskSettings
    agent: AgentSettings = AgentSettings()
    rollout: RolloutSettings = RolloutSettings()
    scheduler: CtbSettings = CtbSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    train: TrainSettings = TrainSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    report: ReportSettings = ReportSettings()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        rollout = self.rollout
        if rollout.engine == "vllm" and rollout.block_tokens % 32:
            raise ValueError(f"rollout.block_tokens {rollout.block_tokens} is no multiple of 32; use 32")
        if rollout.max_new_tokens >= rollout.max_context_tokens:
            raise ValueError("rollout.max_new_tokens must be below rollout.max_context_tokens; lower it")
        if rollout.max_context_tokens > rollout.kv_tokens:
            raise ValueError(
                f"rollout.max_context_tokens {rollout.max_context_tokens} does not fit rollout.kv_tokens "
                f"{rollout.kv_tokens}: the longest task must fit one rank's cache; raise kv_tokens"
            )
        if rollout.min_ranks > rollout.num_ranks:
            raise ValueError("rollout.min_ranks is above rollout.num_ranks; lower it")
        if (rollout.engine == "fake") != (self.train.backend == "fake"):
            raise ValueError("rollout.engine and train.backend must both be 'fake', or neither; change one")
        if self.evaluation.grace_s > self.evaluation.timeout_s:
            raise ValueError(
                f"evaluation.grace_s {self.evaluation.grace_s:g} is above evaluation.timeout_s "
                f"{self.evaluation.timeout_s:g}, after which an evaluation is over; lower it or raise timeout_s"
            )
        if self.warm_start.enabled and not self.warm_start.demonstrator:
            raise ValueError("warm_start.demonstrator is empty; name an agent as module:function")
        if self.warm_start.min_success > self.warm_start.max_success:
            raise ValueError("warm_start.min_success is above warm_start.max_success; lower it")
        return self


def gateway_token() -> str | None:
    """The gateway's bearer token from the environment, None when unset."""
    return os.environ.get(GATEWAY_TOKEN_VARIABLE) or None
