"""What an evaluation plays: tasks from a file, or seeds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_sdk import codec
from tide_sdk.wire import PRINTABLE

MAX_TASKS = 1_000_000
MAX_LINE_BYTES = 16 * 1024 * 1024
_RANGE = re.compile(r"(\d{1,19})(?::(\d{1,19}))?")


class TasksWrong(ValueError):
    """The tasks are not as they must be; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """One task.

    Attributes:
        id: unique in the evaluation; it is how a play is found again.
        task: parameters for the environment.
        seed: the episode's seed, None for none.
        split: the data split, which the environment is told.
        group: a kind of task, for figures of its own in the report; the environment is not told.
    """

    id: str
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    split: str | None = None
    group: str | None = None


class _Line(BaseModel):
    """A line of a tasks file; an unknown field is refused, for it may be a misspelt one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str | None = Field(default=None, min_length=1, max_length=200, pattern=PRINTABLE)
    task: dict[str, Any] = Field(default_factory=dict[str, Any])
    seed: int | None = Field(default=None, strict=True, ge=0, le=2**63 - 1)
    split: str | None = Field(default=None, max_length=64, pattern=PRINTABLE)
    group: str | None = Field(default=None, max_length=64, pattern=PRINTABLE)


def read_tasks(path: Path) -> list[EvaluationTask]:
    """The tasks of a JSONL file: an object a line, with `task`, `seed`, `split`, `group` and `id`, all optional.

    A task without an id has the number of its line. Empty lines are passed over.

    Raises:
        TasksWrong: the file, a line or a field is wrong, or two tasks have one id.
    """
    tasks: dict[str, EvaluationTask] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if not raw.strip():
                    continue
                task = _task(path, number, raw)
                if task.id in tasks:
                    raise TasksWrong(f"{path}:{number}: there is a task with the id {task.id!r} already")
                tasks[task.id] = task
                if len(tasks) > MAX_TASKS:
                    raise TasksWrong(f"{path}: more than {MAX_TASKS:,} tasks")
    except OSError as error:
        raise TasksWrong(f"{path}: cannot be read ({error.strerror})") from error
    if not tasks:
        raise TasksWrong(f"{path}: holds no task")
    return list(tasks.values())


def _task(path: Path, number: int, raw: bytes) -> EvaluationTask:
    try:
        line = _Line.model_validate(codec.loads(raw))
    except codec.CodecError as error:
        raise TasksWrong(f"{path}:{number}: is not one JSON object: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise TasksWrong(f"{path}:{number}: {where}: {first['msg']}") from error
    return EvaluationTask(line.id or str(number), line.task, line.seed, line.split, line.group)


def parse_seeds(text: str) -> list[int]:
    """Seeds from numbers and half-open ranges between commas: `0:200`, `7`, `0:10,100:110`.

    Raises:
        TasksWrong: it reads otherwise, a range is empty, or a seed comes twice.
    """
    seeds: dict[int, None] = {}
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise TasksWrong(f"{part.strip()!r}: give seeds as 0:200 (without 200), as 7, or several between commas")
        first = int(found[1])
        last = first + 1 if found[2] is None else int(found[2])
        if not first < last <= 2**63:
            raise TasksWrong(f"{part.strip()!r}: the range is empty; its end must lie above its beginning")
        if last - first + len(seeds) > MAX_TASKS:
            raise TasksWrong(f"{text!r}: more than {MAX_TASKS:,} seeds")
        for seed in range(first, last):
            if seed in seeds:
                raise TasksWrong(f"{text!r}: the seed {seed} comes twice")
            seeds[seed] = None
    return list(seeds)


def seeded_tasks(
    seeds: Iterable[int], task: Mapping[str, Any] | None = None, split: str | None = None
) -> list[EvaluationTask]:
    """The same parameters with each seed; a task's id is its seed."""
    return [EvaluationTask(str(seed), dict(task or {}), seed, split) for seed in seeds]


def digest(tasks: Sequence[EvaluationTask]) -> str:
    """SHA-256 (hex) of the tasks, in which nothing but their content counts."""
    whole = hashlib.sha256()
    for task in tasks:
        whole.update(codec.dumps(_sorted(asdict(task))) + b"\n")
    return whole.hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        return {name: _sorted(items[name]) for name in sorted(items)}
    if isinstance(value, (list, tuple)):
        return [_sorted(one) for one in cast("Sequence[Any]", value)]
    return value
