"""A recorded trajectory as it lies on disk: `runs/NAME/trajectories/<name>.json`, format 1, checked when it is read.

`docs/trajectories.md` describes the fields for people. Times are seconds since the attempt was handed to the scheduler.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tide_trainer.errors import TrainerError

FORMAT = 1
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_NAME_CHARS = 120
_PLAIN = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*\Z")


class RecordedFailed(TrainerError):
    """A recorded trajectory cannot be found, read or shown; the message names the file, the field and the fix."""


class Record(BaseModel):
    """Base of all parts: frozen; unknown keys, infinities and NaN refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RecordedTurn(Record):
    """One call of the model.

    Attributes:
        turn: its number, from 0.
        call_s: when the call reached the router.
        held_s: seconds in which it waited for its grant, pauses included.
        engine_s: seconds at the engine.
        end_s: when the answer was there.
        prompt_tokens: the whole prompt, images included.
        cached_tokens: prompt tokens that came from the prefix cache.
        image_tokens: prompt tokens that stand for images.
        context_tokens: prompt plus completion.
        predicted_tokens: the context that the scheduler expected at the task's end; None if it could not say.
        budget_tokens: the rank's budget; None if it was not known.
        usage_tokens: live tokens of all tasks on the rank when the call was granted, this one included.
        reason: the scheduler's reason for the grant.
    """

    turn: int = Field(ge=0)
    call_s: float = Field(ge=0)
    held_s: float = Field(ge=0)
    engine_s: float = Field(ge=0)
    end_s: float = Field(ge=0)
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    cached_tokens: int = Field(ge=0)
    image_tokens: int = Field(default=0, ge=0)
    context_tokens: int = Field(ge=0)
    predicted_tokens: int | None = None
    budget_tokens: int | None = None
    usage_tokens: int | None = None
    rank: str = ""
    model_version: int = -1
    finish_reason: str = ""
    reason: str = ""


class RecordedEvent(Record):
    """Something that the scheduler decided, or that went wrong, between turns."""

    at_s: float = Field(ge=0)
    kind: Literal["admitted", "paused", "resumed", "refused", "call_failed", "call_cancelled"]
    reason: str = ""
    rank: str = ""


class RecordedImage(Record):
    """Where an image stands in a segment; `digest` (SHA-256, hex) is its file's name in the run's `images` folder."""

    start: int = Field(ge=0)
    num_tokens: int = Field(ge=1)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class RecordedSegment(Record):
    """One training sequence.

    Attributes:
        token_ids: [T] ids that the engine saw and sampled.
        texts: [T] each id's text.
        sampled: [T] True where the engine sampled the id.
        logprobs: [T] log-prob of a sampled id; None elsewhere.
        versions: [T] model version that sampled the id; -1 elsewhere.
        images: in order of `start`.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[int, ...]
    images: tuple[RecordedImage, ...] = ()

    @model_validator(mode="after")
    def _same_lengths(self) -> Self:
        length = len(self.token_ids)
        for name in ("texts", "sampled", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {length} token_ids")
        end = 0
        for index, image in enumerate(self.images):
            if image.start < end or image.start + image.num_tokens > length:
                raise ValueError(f"images.{index} lies outside the segment, or over the image before it")
            end = image.start + image.num_tokens
        return self


class EarlierAttempt(Record):
    """An attempt at the same task that failed for infrastructure reasons and was repeated."""

    attempt: int = Field(ge=0)
    outcome: str
    error: str = ""


class RecordedTrajectory(Record):
    """One attempt at a prompt, from its submission to its end.

    Attributes:
        started_at: wall-clock time of its submission, ISO 8601, UTC.
        duration_s: seconds from there to its end.
        temperature: sampling temperature of its calls.
        end_version: model version that the ranks served when it ended.
        max_context_tokens: longest prompt plus completion that the run allows.
        num_turns: turns that the environment counted.
        rewards: the environment's reward of each turn, None where it gave none; empty if they were not told.
        messages: the conversation as the agent saw it; an image is `{"type": "image", "digest": ...}`.
        left_out: what the bounds of the recording cut, in words.
    """

    format: Literal[1]
    run: str
    uid: str = Field(min_length=1)
    group: str
    member: int = Field(ge=0)
    kind: Literal["train", "eval"]
    attempt: int = Field(ge=0)
    earlier_attempts: tuple[EarlierAttempt, ...] = ()
    environment: str
    task: dict[str, Any] = Field(default_factory=dict)
    seed: int
    split: str = ""
    temperature: float
    outcome: str
    reward: float | None
    error: str = ""
    metrics: dict[str, Any] = Field(default_factory=dict)
    num_turns: int = Field(ge=0)
    started_at: str
    duration_s: float = Field(ge=0)
    end_version: int
    max_context_tokens: int | None = None
    rewards: tuple[float | None, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    turns: tuple[RecordedTurn, ...] = ()
    events: tuple[RecordedEvent, ...] = ()
    segments: tuple[RecordedSegment, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def versions(self) -> tuple[int, ...]:
        """The model versions that sampled any of it, in order."""
        return tuple(sorted({v for segment in self.segments for v in segment.versions if v >= 0}))


def file_name(uid: str) -> str:
    """A uid as a file's name without its end: `train/17/3` is `train.17.3`; what is not plain gets a hash behind it."""
    if _PLAIN.match(uid) and len(uid) <= MAX_NAME_CHARS:
        return uid.replace("/", ".")
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", uid)[:64]
    return f"{safe}-{hashlib.sha256(uid.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def read_recorded(path: Path) -> RecordedTrajectory:
    """A recorded trajectory.

    Raises:
        RecordedFailed: the file is missing, too large, damaged, or of another format.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise RecordedFailed(f"{path}: {size} bytes, at most {MAX_FILE_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise RecordedFailed(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return RecordedTrajectory.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        fix = f"; this version reads format {FORMAT}" if field == "format" else ""
        raise RecordedFailed(f"{path}: {field}: {first['msg']}{fix}") from error
