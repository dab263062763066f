"""The frozen data that crosses modules and processes of the trainer. No behaviour, no I/O, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Kind = Literal["train", "eval"]


class Role(StrEnum):
    """What a rank does now. Actor ranks never change their role; Ref and Rollout ranks may."""

    ACTOR = "actor"
    REF = "ref"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, order=True)
class RankId:
    """A distributed process, keyed by its worker (host or server) and its index there."""

    worker: str
    index: int

    def __str__(self) -> str:
        return f"{self.worker}:{self.index}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem that a group of trajectories answers.

    Attributes:
        uid: unique in the run, for example `train/17`.
        environment: the environment's name at the gateway.
        task: parameters for the environment.
        seed: the episode's seed.
        split: the data split that it comes from.
    """

    uid: str
    environment: str
    task: Mapping[str, Any]
    seed: int
    split: str


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a token sequence.

    Attributes:
        start: index of its first placeholder id.
        num_tokens: placeholder ids, all the same; what the model's image processor makes of the image.
        digest: SHA-256 (hex) of the image's bytes, which is its name in the run's image store.
    """

    start: int
    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One training sequence of a trajectory: exactly the ids that the engine saw and sampled.

    Attributes:
        token_ids: [T] ids in order: prompt, completion, observation, completion, ...
        sampled: [T] True where the engine sampled the id; only these train.
        logprobs: [T] the engine's log-prob of a sampled id at temperature 1; 0.0 elsewhere.
        versions: [T] model version that sampled the id; -1 elsewhere.
        images: in order of `start`; none overlap, none is sampled.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one attempt at a prompt.

    Attributes:
        uid: `<group>/<member>`.
        reward: None after an infrastructure failure, never 0.
        outcome: the SDK's outcome word (completed, truncated, agent_error, ...).
        version: the oldest model version that sampled any of it.
        messages: the conversation as the agent saw it, for people.
        rewards: the environment's reward of each turn, None where it gave none; empty if they are not known.
    """

    uid: str
    group: str
    member: int
    segments: tuple[Segment, ...]
    reward: float | None
    outcome: str
    turns: int
    version: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    rewards: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Sibling trajectories of one prompt, complete and rewarded."""

    uid: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One training sequence with its advantage, as a training backend takes it.

    Attributes:
        token_ids: [T] ids.
        sampled: [T] positions that train.
        logprobs: [T] behaviour log-probs (engine's), 0.0 where not sampled.
        advantage: the trajectory's advantage; 1.0 for supervised data.
        images: as in `Segment`.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All sequences of one optimizer update.

    Attributes:
        objective: `policy` (the configured RL loss) or `supervised` (cross-entropy on sampled positions).
        sequences: in training order; the backend forms micro-batches.
        learning_rate: overrides the configured one for this update; None keeps it.
    """

    objective: Literal["policy", "supervised"]
    sequences: tuple[Sequence, ...]
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What one optimizer update did. `metrics` has loss, grad_norm, entropy, clip_fraction, kl, ... by name."""

    num_sequences: int
    num_trained_tokens: int
    wall_s: float
    cpu_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One published model version.

    Attributes:
        version: +1 per train step.
        path: a safetensors file, Hugging Face tensor names.
        checksums: tensor name -> SHA-256 (hex) of its little-endian contiguous bytes.
    """

    version: int
    path: str
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """A rollout rank's proof that it serves a version: what it loaded, read back from the live model."""

    rank: RankId
    version: int
    num_tensors: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A rollout engine that is up.

    Attributes:
        rank: its rank.
        url: base URL of its HTTP server.
        kv_tokens: KV cache capacity in tokens.
        block_tokens: tokens per KV block.
        max_context_tokens: longest prompt plus completion.
        version: model version that it holds.
    """

    rank: RankId
    url: str
    kv_tokens: int
    block_tokens: int
    max_context_tokens: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Temperature 0 is greedy and allowed for evaluation only."""

    temperature: float = 1.0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's answer to one call.

    Attributes:
        token_ids: [N] sampled ids, the stop id included.
        logprobs: [N] log-prob of each sampled id.
        cached_tokens: prompt tokens that came from the prefix cache.
        finish_reason: stop, length or abort.
        version: model version that sampled all of it; -1 where the engine does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish_reason: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A rollout engine's live numbers.

    Attributes:
        version: model version served now.
        num_running: requests in the batch.
        num_waiting: requests in the queue.
        kv_used_tokens: tokens in blocks that running requests hold.
        prompt_tokens: prompt tokens since start.
        cached_tokens: prompt tokens since start that came from the prefix cache.
        generated_tokens: sampled tokens since start.
        num_preemptions: preemptions since start.
        num_cached_blocks: KV blocks that the prefix cache would find now; -1 where that cannot be read.
    """

    version: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_preemptions: int
    num_cached_blocks: int
