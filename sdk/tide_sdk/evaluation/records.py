"""A play and what became of it: one line of results.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast, get_args

from tide_sdk import codec
from tide_sdk.evaluation.tasks import EvaluationTask
from tide_sdk.outcomes import OutcomeName, TaskResult

MAX_CONVERSATION_BYTES = 4 * 1024 * 1024
"""A longer conversation is left out of its line, which says so."""
REPLAYED: frozenset[str] = frozenset({"infrastructure", "environment_failed", "aborted"})
"""Outcomes without a reward that say nothing about agent or model: a resumed evaluation plays these again."""
_OUTCOMES = frozenset(get_args(OutcomeName))
_NUMBERS: tuple[type, ...] = (int, float)
_KINDS: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((str,), ("id", "outcome")),
    ((int,), ("repeat", "turns", "attempts")),
    (_NUMBERS, ("wall_s",)),
    ((*_NUMBERS, type(None)), ("reward",)),
    ((int, type(None)), ("seed",)),
    ((str, type(None)), ("split", "group", "task_id", "error", "left_out")),
    ((dict,), ("metrics",)),
    ((list, tuple), ("messages",)),
)
"""Which types a line's fields may have; a bool is no number."""


@dataclass(frozen=True, slots=True)
class Play:
    """One play of a task.

    Attributes:
        task: what is played.
        repeat: which of its plays, from 0.
    """

    task: EvaluationTask
    repeat: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others of the evaluation."""
        return self.task.id, self.repeat


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a play.

    Attributes:
        id: the task's.
        repeat: which of the task's plays, from 0.
        seed: the task's.
        split: the task's.
        group: the task's.
        outcome: one of `OutcomeName`.
        reward: None where the outcome tells nothing about the model.
        turns: turns that were played.
        attempts: attempts until this outcome.
        wall_s: seconds of all attempts.
        task_id: its id at the gateway.
        error: what went wrong.
        metrics: the environment's and the agent's.
        messages: the conversation; empty where it was not kept.
        left_out: why there are no messages or metrics.
    """

    id: str
    repeat: int
    outcome: str
    reward: float | None
    turns: int
    seed: int | None = None
    split: str | None = None
    group: str | None = None
    attempts: int = 1
    wall_s: float = 0.0
    task_id: str | None = None
    error: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] = ()
    left_out: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The play's."""
        return self.id, self.repeat

    @property
    def final(self) -> bool:
        """False if a resumed evaluation plays it again."""
        return self.reward is not None or self.outcome not in REPLAYED

    def line(self) -> bytes:
        """The record as a line of JSON; messages and metrics that are too long or no JSON are left out of it."""
        plain = {name: value for name, value in asdict(self).items() if value is not None and value not in ((), {})}
        plain["reward"] = self.reward
        try:
            body = codec.dumps(plain)
            if len(body) <= MAX_CONVERSATION_BYTES:
                return body + b"\n"
            why = f"{len(body):,} bytes are more than {MAX_CONVERSATION_BYTES:,}"
        except codec.CodecError as error:
            why = str(error)
        kept = {name: value for name, value in plain.items() if name not in ("messages", "metrics")}
        return codec.dumps(kept | {"left_out": why[:500], "error": _plain(kept.get("error"))}) + b"\n"


def record_of(
    play: Play,
    result: TaskResult,
    *,
    attempts: int,
    wall_s: float,
    messages: Sequence[Mapping[str, Any]] = (),
) -> Record:
    """The record of a play that a runner has carried out."""
    return Record(
        id=play.task.id,
        repeat=play.repeat,
        seed=play.task.seed,
        split=play.task.split,
        group=play.task.group,
        outcome=result.outcome,
        reward=result.reward,
        turns=result.turns,
        attempts=attempts,
        wall_s=round(wall_s, 3),
        task_id=result.task_id,
        error=None if result.error is None else _plain(result.error)[:4000],
        metrics=result.metrics,
        messages=messages,
    )


def read_record(line: bytes) -> Record:
    """A line of results.jsonl.

    Raises:
        ValueError: it is no record.
    """
    data = codec.loads(line)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    fields = cast("dict[str, Any]", data)
    try:
        record = Record(**{name: value for name, value in fields.items() if name in Record.__dataclass_fields__})
    except TypeError as error:
        raise ValueError(f"a field is missing: {error}") from error
    # The annotations promise what a file need not hold.
    for kinds, names in _KINDS:
        for name in names:
            if type(getattr(record, name)) not in kinds:
                raise ValueError(f"{name} is not as this release writes it")
    if record.outcome not in _OUTCOMES or record.turns < 0 or record.repeat < 0:
        raise ValueError("outcome, turns or repeat is not as this release writes it")
    if any(not isinstance(message, dict) for message in record.messages):
        raise ValueError("messages holds what is no message")
    return record


def _plain(text: str | None) -> str:
    """The text without what UTF-8 cannot hold."""
    return (text or "").encode("utf-8", "replace").decode()
