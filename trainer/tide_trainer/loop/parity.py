"""Invariant 7: tokens sampled at version v, scored by the trainer with v's weights, agree with the engine's log-probs.

The sample is fixed: the same prompts of random ids after every publish, so that a drift shows as a drift. Where the
model takes images, half of the prompts have one: the weights of its vision tower are checked with the rest.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tide_trainer.images import ImageStore, ImageTokens
from tide_trainer.protocols import RolloutEngine, TrainingBackend
from tide_trainer.types import ImageSpan, Sampling

NUM_PROMPTS = 4
NUM_SAMPLED = 8
_PICTURE_SIDE = 28


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """One prompt of the sample: its ids, and the images in them."""

    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ParityImage:
    """The image of the sample, in the run's store.

    Attributes:
        digest: its name there.
        num_tokens: placeholder ids that it takes.
        placeholder_id: the model's.
        forbidden_ids: ids that stand in no prompt alone.
    """

    digest: str
    num_tokens: int
    placeholder_id: int
    forbidden_ids: tuple[int, ...]


def parity_image(store: ImageStore, tokens: ImageTokens, seed: int) -> ParityImage:
    """Puts a small picture of random pixels into the store. Raises ImageFailed where the store takes none."""
    from PIL import Image

    side, file = _PICTURE_SIDE, io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * side * side)  # noqa: S311 - a fixed sample, not a secret
    Image.frombytes("RGB", (side, side), pixels).save(file, "PNG")
    digest = store.put(file.getvalue())
    return ParityImage(digest, tokens.count(side, side), tokens.placeholder_id, tokens.forbidden_ids)


def parity_prompts(
    vocab_size: int, max_context_tokens: int, seed: int, image: ParityImage | None = None
) -> tuple[ParityPrompt, ...]:
    """The fixed sample: prompts of mixed lengths, each short enough for `NUM_SAMPLED` further tokens.

    Every second prompt has the image where there is one and the context has room for it.
    """
    source = random.Random(seed)  # noqa: S311 - a fixed sample, not a secret
    forbidden = image.forbidden_ids if image else ()
    allowed = [token_id for token_id in range(vocab_size) if token_id not in forbidden]
    longest = max(1, min(48, max_context_tokens - NUM_SAMPLED))
    lengths = [max(1, longest * (index + 1) // NUM_PROMPTS) for index in range(NUM_PROMPTS)]
    prompts: list[ParityPrompt] = []
    for index, length in enumerate(lengths):
        ids = tuple(allowed[source.randrange(len(allowed))] for _ in range(length))
        room = max_context_tokens - NUM_SAMPLED - length
        if image is None or index % 2 == 0 or image.num_tokens > room:
            prompts.append(ParityPrompt(ids))
            continue
        begin, held = length // 2, (image.placeholder_id,) * image.num_tokens
        span = ImageSpan(begin, image.num_tokens, image.digest)
        prompts.append(ParityPrompt((*ids[:begin], *held, *ids[begin:]), (span,)))
    return tuple(prompts)


async def parity(
    engine: RolloutEngine, backend: TrainingBackend, prompts: Sequence[ParityPrompt], max_context_tokens: int
) -> float:
    """Largest absolute difference of a sampled token's log-prob between engine and trainer; NaN counts as infinite.

    The caller guarantees that both hold the same version and that no call is in flight.
    """
    num_sampled = min(NUM_SAMPLED, max_context_tokens - max(len(prompt.token_ids) for prompt in prompts))
    sampling = Sampling(temperature=1.0, max_new_tokens=max(1, num_sampled))
    completions = [await engine.generate(prompt.token_ids, sampling, prompt.images) for prompt in prompts]
    scored = await backend.score(
        [(*prompt.token_ids, *completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)],
        [prompt.images for prompt in prompts],
    )
    largest = 0.0
    for prompt, completion, logprobs in zip(prompts, completions, scored, strict=True):
        for theirs, ours in zip(completion.logprobs, logprobs[len(prompt.token_ids) :], strict=True):
            difference = abs(theirs - ours)
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
