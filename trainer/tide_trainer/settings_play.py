"""What is played, by whom, and where: the sections model, gateway, tasks and agent."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tide_trainer.settings_base import Settings


class ModelSettings(Settings):
    """[model]: a Hugging Face folder, or a tiny model made from the run's seed."""

    path: str = Field(default="", description="folder with config, weights and tokenizer; empty: make the tiny model")
    tool_format: Literal["auto", "hermes", "mistral", "deepseek", "llama3", "none"] = Field(
        default="auto",
        description="how replies write tool calls; auto: as the chat template does; none: not looked for",
    )
    reasoning_format: Literal["auto", "think", "none"] = Field(
        default="auto",
        description="how replies mark thinking; think: <think> blocks; auto: as the template does; none: it is content",
    )
    words: str = Field(
        default="tide_environments.babyai:words", description="module:function that lists the tiny vocabulary"
    )
    hidden_size: int = Field(default=128, ge=32, description="tiny model: width")
    num_layers: int = Field(default=2, ge=1, description="tiny model: decoder layers")
    num_heads: int = Field(default=4, ge=1, description="tiny model: attention heads of 32 dimensions")
    num_kv_heads: int = Field(default=2, ge=1, description="tiny model: key-value heads")
    intermediate_size: int = Field(default=256, ge=32, description="tiny model: width of the MLP")
    vision: bool = Field(
        default=False, description="tiny model: True takes images too (Qwen2.5-VL instead of Qwen3); not with `path`"
    )

    @model_validator(mode="after")
    def _vision(self) -> Self:
        if self.vision and self.path:
            raise ValueError(
                "vision is the tiny model's; a model of `path` takes images or not by itself: leave it out"
            )
        if self.vision and self.hidden_size != 32 * self.num_heads:
            raise ValueError(f"hidden_size must be 32 * num_heads ({32 * self.num_heads}) where vision is true")
        return self


class GatewaySettings(Settings):
    """[gateway]: a gateway that runs, or one that the run starts for itself."""

    url: str = Field(default="", description="base URL of a running gateway; empty: start one")
    environments: str = Field(
        default="environments.toml", description="registry file for a gateway that the run starts"
    )
    port: int = Field(default=0, ge=0, le=65_535, description="port of a gateway that the run starts; 0: a free one")
    ready_timeout_s: float = Field(default=60, gt=0, description="seconds until a started gateway must serve")
    heartbeat_timeout_s: float = Field(
        default=60,
        ge=1,
        le=86_400,
        description="seconds without a sign of the run after which the gateway ends its tasks",
    )
    capacity_interval_s: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="seconds between looks at the gateway's free slots; 0: never, and starts are refused instead",
    )


class TaskSettings(Settings):
    """[tasks]: which environment is played, and the seeds of each split."""

    environment: str = Field(description="the environment's name at the gateway")
    parameters: dict[str, Any] = Field(default_factory=dict, description="task parameters for the environment")
    train_seed: int = Field(
        default=1_000_000, ge=0, lt=2**62, description="first seed of the training split; the run counts up from it"
    )
    eval_seed: int = Field(default=1_000, ge=0, lt=2**62, description="first seed of the held-out split")
    num_eval: int = Field(default=200, ge=1, description="held-out seeds in an evaluation")
    warm_start_seed: int = Field(default=500_000, ge=0, lt=2**62, description="first seed of the demonstrations")

    @model_validator(mode="after")
    def _splits_apart(self) -> Self:
        if self.eval_seed <= self.train_seed < self.eval_seed + self.num_eval:
            raise ValueError("train_seed lies inside the held-out seeds; choose train_seed >= eval_seed + num_eval")
        if self.eval_seed <= self.warm_start_seed < self.eval_seed + self.num_eval:
            raise ValueError("warm_start_seed lies inside the held-out seeds; choose another first seed")
        return self


class AgentSettings(Settings):
    """[agent]: the loop that plays a task, and the processes that run it."""

    entry: str = Field(
        default="tide_sdk.agents:chat_agent", pattern=r"^[\w.]+:\w+$", description="module:function of an @agent"
    )
    folder: str = Field(
        default="",
        description="modules are looked for here too, beside the working directory; empty: the configuration's folder",
    )
    num_workers: int = Field(default=1, ge=1, le=64, description="agent worker processes")
    max_tasks_per_worker: int = Field(default=512, ge=1, description="tasks that one worker plays at once")
    task_timeout_s: float = Field(
        default=600, gt=0, description="seconds of one attempt's wall time before it is aborted"
    )
    max_attempts: int = Field(
        default=3, ge=1, le=10, description="attempts of a task that fails for infrastructure reasons"
    )
    max_images: int = Field(
        default=10,
        ge=0,
        le=4096,
        description="images of a conversation at which only the newest `keep_images` stay for the model; 0: all stay. "
        "An agent's `ctx.images.window` goes before",
    )
    keep_images: int = Field(default=5, ge=1, description="images that stay then; below `max_images`")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.max_images and self.keep_images >= self.max_images:
            raise ValueError(
                f"keep_images {self.keep_images} must be below max_images {self.max_images}; max_images = 0 keeps all"
            )
        return self
