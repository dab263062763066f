"""The tasks that `bench_ctb` plays, from a seed: groups with a shared prompt, fixed outputs, slow environments."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = 2000
MAX_NEW_TOKENS = 16
"""What a policy is told that a call may generate; the true lengths are shorter and known to the engine only."""

_PROMPT_TOKENS = (200, 300)
_OUTPUT_TOKENS = (8, MAX_NEW_TOKENS)
_OBSERVATION_TOKENS = (40, 72)
_TURNS = (3, 10)
_LATENCY_SIGMA = math.sqrt(math.log(2.0))
"""Of the lognormal whose standard deviation is its mean."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: what the model writes and what the environment answers.

    Attributes:
        num_output: tokens that the engine samples.
        latency_s: how long the environment acts.
        observation_ids: [N] its answer; empty after the last turn.
    """

    num_output: int
    latency_s: float
    observation_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchTask:
    """One task. `prompt_ids` is the same for all of its group."""

    uid: str
    group: str
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    def prompt_lengths(self) -> list[int]:
        """Tokens of the prompt of each turn's call."""
        lengths, tokens = [], len(self.prompt_ids)
        for turn in self.turns:
            lengths.append(tokens)
            tokens += turn.num_output + len(turn.observation_ids)
        return lengths

    @property
    def final_tokens(self) -> int:
        """Tokens of its whole context when it ends."""
        return self.prompt_lengths()[-1] + self.turns[-1].num_output


def make_tasks(seed: int, *, num_groups: int, group_size: int, mean_latency_s: float) -> list[BenchTask]:
    """The same tasks for the same arguments, in the order of submission."""
    rng = random.Random(seed)  # noqa: S311 - a workload, no secret
    low, high = _TURNS
    # The numbers of turns are spread evenly, so that seeds differ in order and not in work.
    turns = [round(low + (high - low) * (index + 0.5) / num_groups) for index in range(num_groups)]
    rng.shuffle(turns)
    mu = math.log(mean_latency_s) - _LATENCY_SIGMA**2 / 2
    tasks: list[BenchTask] = []
    for number, num_turns in enumerate(turns):
        prompt = _ids(rng, rng.randint(*_PROMPT_TOKENS))
        for member in range(group_size):
            played = tuple(
                Turn(
                    rng.randint(*_OUTPUT_TOKENS),
                    rng.lognormvariate(mu, _LATENCY_SIGMA),
                    _ids(rng, rng.randint(*_OBSERVATION_TOKENS)) if index + 1 < num_turns else (),
                )
                for index in range(num_turns)
            )
            tasks.append(BenchTask(f"g{number}/{member}", f"g{number}", prompt, played))
    return tasks


def ideal_prefill_tokens(tasks: Sequence[BenchTask], block_tokens: int) -> int:
    """Prompt tokens that a cache of any size must compute: it holds whole blocks, and a last token is never cached."""
    seen: set[str] = set()
    total = 0
    for task in tasks:
        held = len(task.prompt_ids) if task.group in seen else 0
        seen.add(task.group)
        for prompt, turn in zip(task.prompt_lengths(), task.turns, strict=True):
            total += prompt - min(held, prompt - 1) // block_tokens * block_tokens
            # The token sampled last has not been computed yet.
            held = prompt + turn.num_output - 1
    return total


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
