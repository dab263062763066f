"""What is played: groups of tasks with prompts, turns, environment times, drawn before the play from a given generator.

Every policy plays the very same tasks, so that generated tokens are the same and only the time differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tide_trainer.scheduling.plan import TaskEntry
from tide_trainer.types import Kind


@dataclass(frozen=True, slots=True)
class Shape:
    """How the tasks of one environment look. Token counts and times are means; `cv` is deviation over mean.

    Attributes:
        prompt_tokens: a first prompt; its first `common_tokens` are the same for all tasks, the rest for the group's.
        context_tokens: a task ends where its next call could pass this limit.
        observation_tokens, output_tokens: lognormal.
        max_new_tokens: the most that one call may generate.
        turns: mean of a task, between `min_turns` and `max_turns`; lognormal by group and, about that, by task.
        environment_s: the environment's time for one turn, lognormal.
        reset_s: from admission to the first call.
        failure: probability that a turn ends the task.
    """

    environment: str
    prompt_tokens: int = 1000
    common_tokens: int = 600
    context_tokens: int = 8192
    observation_tokens: float = 260.0
    observation_cv: float = 0.8
    output_tokens: float = 80.0
    output_cv: float = 0.6
    max_new_tokens: int = 512
    turns: float = 8.0
    min_turns: int = 3
    max_turns: int = 20
    group_sigma: float = 0.35
    task_sigma: float = 0.3
    environment_s: float = 9.0
    environment_cv: float = 1.0
    reset_s: float = 1.0
    failure: float = 0.005


WEBSHOP = Shape("webshop")
PRESETS: Mapping[str, Shape] = {
    "A": replace(WEBSHOP, environment_s=9.0, output_tokens=80.0),
    "B": replace(WEBSHOP, environment_s=1.0, output_tokens=40.0),
    "C": replace(WEBSHOP, environment_s=3.5, output_tokens=60.0),
}
"""WebShop on environments of different speed. A's output and time were fitted to the TideRL paper's Table 3."""

# Turns at the start of training; mean contexts as in TideRL appendix C. Images count as tokens and are never pruned.
ALFWORLD = replace(WEBSHOP, environment="alfworld", turns=16.0, observation_tokens=320.0, environment_s=3.5)
OSWORLD = Shape(
    "osworld",
    prompt_tokens=2000,
    common_tokens=1500,
    context_tokens=32_768,
    observation_tokens=205.0,
    turns=35.0,
    max_turns=50,
    reset_s=45.0,
)
SCIENCEBOARD = replace(OSWORLD, environment="scienceboard", turns=39.0, observation_tokens=485.0)


@dataclass(frozen=True, slots=True)
class TurnScript:
    """One turn: what the model writes, how long the environment takes, what it answers (None: the task is over)."""

    output_tokens: int
    environment_s: float
    observation_tokens: int | None


@dataclass(frozen=True, slots=True)
class TaskScript:
    """One task from its admission to its end. `completed` is False where its environment fails."""

    entry: TaskEntry
    prompt_tokens: int
    common_tokens: int
    max_new_tokens: int
    reset_s: float
    turns: tuple[TurnScript, ...]
    completed: bool = True


def make_workload(
    shape: Shape, rng: random.Random, *, train: tuple[int, int] = (32, 8), evaluation: tuple[int, int] = (200, 4)
) -> tuple[TaskScript, ...]:
    """Draws the tasks of one train step and one evaluation, all known from the start.

    Args:
        shape: how they look.
        rng: the source of all chance.
        train: number of groups and tasks of each.
        evaluation: the same of the evaluation.
    """
    kinds: tuple[tuple[Kind, tuple[int, int]], ...] = (("eval", evaluation), ("train", train))
    scripts: list[TaskScript] = []
    for kind, (num_groups, num_siblings) in kinds:
        for number in range(num_groups):
            group_turns = shape.turns * _lognormal(rng, shape.group_sigma)
            for member in range(num_siblings):
                group = f"{kind}/{number}"
                entry = TaskEntry(
                    f"{group}/{member}", group, kind, num_siblings, shape.environment, order_key=len(scripts)
                )
                scripts.append(_script(shape, rng, entry, group_turns))
    return tuple(scripts)


def _script(shape: Shape, rng: random.Random, entry: TaskEntry, group_turns: float) -> TaskScript:
    wanted = round(group_turns * _lognormal(rng, shape.task_sigma))
    num_turns = min(shape.max_turns, max(shape.min_turns, wanted))
    context, completed = shape.prompt_tokens, True
    turns: list[TurnScript] = []
    while completed:
        output = min(shape.max_new_tokens, _tokens(rng, shape.output_tokens, shape.output_cv))
        observation = _tokens(rng, shape.observation_tokens, shape.observation_cv)
        took_s = shape.environment_s * _lognormal_cv(rng, shape.environment_cv)
        context += output + observation
        completed = rng.random() >= shape.failure
        over = context + shape.max_new_tokens > shape.context_tokens or len(turns) + 1 == num_turns or not completed
        turns.append(TurnScript(output, took_s, None if over else observation))
        if over:
            break
    return TaskScript(
        entry, shape.prompt_tokens, shape.common_tokens, shape.max_new_tokens, shape.reset_s, tuple(turns), completed
    )


def _lognormal(rng: random.Random, sigma: float) -> float:
    """Mean 1."""
    return rng.lognormvariate(-sigma * sigma / 2, sigma)


def _lognormal_cv(rng: random.Random, cv: float) -> float:
    return _lognormal(rng, math.sqrt(math.log1p(cv * cv)))


def _tokens(rng: random.Random, mean: float, cv: float) -> int:
    return max(1, round(mean * _lognormal_cv(rng, cv)))
