"""Invariant 7: tokens sampled at version v, scored by the trainer with v's weights, agree with the engine's log-probs.

The sample is fixed: the same prompts of random ids after every publish, so that a drift shows as a drift.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tide_trainer.protocols import RolloutEngine, TrainingBackend
from tide_trainer.types import Sampling

NUM_PROMPTS = 4
NUM_SAMPLED = 8


def parity_prompts(vocab_size: int, max_context_tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The fixed sample: prompts of mixed lengths, each short enough for `NUM_SAMPLED` further tokens."""
    source = random.Random(seed)  # noqa: S311 - a fixed sample, not a secret
    longest = max(1, min(48, max_context_tokens - NUM_SAMPLED))
    lengths = [max(1, longest * (index + 1) // NUM_PROMPTS) for index in range(NUM_PROMPTS)]
    return tuple(tuple(source.randrange(vocab_size) for _ in range(length)) for length in lengths)


async def parity(
    engine: RolloutEngine, backend: TrainingBackend, prompts: Sequence[Sequence[int]], max_context_tokens: int
) -> float:
    """Largest absolute difference of a sampled token's log-prob between engine and trainer; NaN counts as infinite.

    The caller guarantees that both hold the same version and that no call is in flight.
    """
    num_sampled = min(NUM_SAMPLED, max_context_tokens - max(len(prompt) for prompt in prompts))
    sampling = Sampling(temperature=1.0, max_new_tokens=max(1, num_sampled))
    completions = [await engine.generate(prompt, sampling) for prompt in prompts]
    scored = await backend.score(
        [(*prompt, *completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)]
    )
    largest = 0.0
    for prompt, completion, logprobs in zip(prompts, completions, scored, strict=True):
        for theirs, ours in zip(completion.logprobs, logprobs[len(prompt) :], strict=True):
            difference = abs(theirs - ours)
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
