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
from itertools import takewhile

from tide_trainer.errors import WeightsDiffer
from tide_trainer.images import ImageStore, ImageTokens
from tide_trainer.protocols import RolloutEngine, TrainingBackend
from tide_trainer.types import Completion, ImageSpan, Sampling

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

    The caller guarantees that both hold the same version and that no call is in flight on this engine.

    Raises:
        WeightsDiffer: the engine used KV of an older version, see `sampled`.
    """
    completions = await sampled(engine, prompts, Sampling(1.0, _num_sampled(prompts, max_context_tokens)))
    return _largest(completions, await scored(backend, prompts, completions))


@dataclass(frozen=True, slots=True)
class GreedyReference:
    """What a proven rank said greedily at a version, with the trainer's log-probs of it: for a rank that joins later.

    The trainer's own weights have moved on by then, so that it cannot score for it.
    """

    prompts: tuple[ParityPrompt, ...]
    sampling: Sampling
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    async def parity(self, engine: RolloutEngine) -> float:
        """Largest absolute difference of the log-prob of the likeliest token, up to where two are as likely.

        Where the engine takes another token than the reference, their log-probs are still compared, for the largest
        log-prob hardly depends on rounding; behind it the contexts differ, and nothing is compared.

        Raises:
            WeightsDiffer: the engine used KV of an older version, see `sampled`.
        """
        largest = 0.0
        completions = await sampled(engine, self.prompts, self.sampling)
        for found, token_ids, logprobs in zip(completions, self.token_ids, self.logprobs, strict=True):
            for token_id, theirs, wanted, ours in zip(
                found.token_ids, found.logprobs, token_ids, logprobs, strict=False
            ):
                largest = max(largest, _difference(theirs, ours))
                if token_id != wanted:
                    break
        return largest


async def greedy_reference(
    engine: RolloutEngine, backend: TrainingBackend, prompts: Sequence[ParityPrompt], max_context_tokens: int
) -> GreedyReference:
    """Has a rank that passed `parity` say the reference, and the trainer score it, both at the same version.

    Raises:
        WeightsDiffer: the engine used KV of an older version, see `sampled`.
    """
    sampling = Sampling(0.0, _num_sampled(prompts, max_context_tokens))
    completions = await sampled(engine, prompts, sampling, fresh=False)
    logprobs = await scored(backend, prompts, completions)
    token_ids = tuple(completion.token_ids for completion in completions)
    return GreedyReference(tuple(prompts), sampling, token_ids, tuple(map(tuple, logprobs)))


async def sampled(
    engine: RolloutEngine, prompts: Sequence[ParityPrompt], sampling: Sampling, *, fresh: bool = True
) -> list[Completion]:
    """The engine's completions, one after the other.

    The sample is the same at every version, so what is left of the version before would be found here. Right after
    an update (`fresh`) a prompt may find in the cache only what the prompts before it have put there.

    Raises:
        WeightsDiffer: an answer, or the engine's counter, tells of more cached tokens.
    """
    before = await engine.stats()
    completions: list[Completion] = []
    seen: list[tuple[int, ...]] = []
    for prompt in prompts:
        completion = await engine.generate(prompt.token_ids, sampling, prompt.images)
        may_find = max((_num_common(ids, prompt.token_ids) for ids in seen), default=0)
        if fresh and completion.cached_tokens > may_find:
            raise WeightsDiffer(
                f"{completion.cached_tokens} cached tokens were used right after a weight update, {may_find} at most "
                "can be of this version: the engine holds KV of an older one"
            )
        seen.append((*prompt.token_ids, *completion.token_ids))
        completions.append(completion)
    counted = (await engine.stats()).cached_tokens - before.cached_tokens
    told = sum(completion.cached_tokens for completion in completions)
    if counted != told:
        raise WeightsDiffer(f"the engine counts {counted} cached tokens for answers that tell of {told}")
    return completions


async def scored(
    backend: TrainingBackend, prompts: Sequence[ParityPrompt], completions: Sequence[Completion]
) -> list[list[float]]:
    """The trainer's log-probs of what was sampled, a list for each completion."""
    whole = await backend.score(
        [(*prompt.token_ids, *completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)],
        [prompt.images for prompt in prompts],
    )
    return [logprobs[len(prompt.token_ids) :] for prompt, logprobs in zip(prompts, whole, strict=True)]


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Ids at the beginning that are the same in both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))


def _num_sampled(prompts: Sequence[ParityPrompt], max_context_tokens: int) -> int:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return max(1, min(NUM_SAMPLED, max_context_tokens - longest))


def _largest(completions: Sequence[Completion], logprobs: Sequence[Sequence[float]]) -> float:
    pairs = (
        (theirs, ours)
        for completion, found in zip(completions, logprobs, strict=True)
        for theirs, ours in zip(completion.logprobs, found, strict=True)
    )
    return max((_difference(theirs, ours) for theirs, ours in pairs), default=0.0)


def _difference(theirs: float, ours: float) -> float:
    difference = abs(theirs - ours)
    return math.inf if math.isnan(difference) else difference
