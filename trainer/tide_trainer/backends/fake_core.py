"""The fake engine's inside: a bigram model that samples exactly, and a simulated KV cache. No torch, no vllm.

generate -> [waiting, by priority] -> blocks free and a running slot -> sample, wait latency -> cache -> answer
"""

from __future__ import annotations

import array
import asyncio
import bisect
import heapq
import itertools
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_trainer import types
from tide_trainer.backends import weights_io
from tide_trainer.backends.fake_images import FakeImages, cache_ids
from tide_trainer.backends.prefix_cache import Lease, PrefixCache
from tide_trainer.engine_client import EngineHealth
from tide_trainer.errors import EngineRefused, ImageFailed, ImageRefused, WeightsDiffer

TENSOR = "logits"
"""The model's one tensor: [V, V] float32, logits of the next token given the previous one."""


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """What a fake engine is.

    Attributes:
        model_path: a safetensors file with the tensor `logits`.
        version: the version of that file.
        kv_tokens: KV cache capacity in tokens.
        block_tokens: tokens per KV block.
        max_context_tokens: longest prompt plus completion.
        max_running: requests at once.
        token_latency_s: simulated seconds per sampled token; 0: none.
        seed: with a request's id, decides what is sampled.
        image_folder: the run's image store; empty: images are refused.
        token: bearer token; None: none.
    """

    model_path: str
    version: int = 0
    kv_tokens: int = 65_536
    block_tokens: int = 32
    max_context_tokens: int = 1024
    max_running: int = 256
    token_latency_s: float = 0.0
    seed: int = 0
    image_folder: str = ""
    token: str | None = None


@dataclass(eq=False, slots=True)
class _Call:
    prompt_ids: list[int]
    cache_ids: list[int]
    digests: tuple[str, ...]
    max_new_tokens: int
    ready: asyncio.Future[Lease]
    lease: Lease | None = None
    aborted: bool = False


class FakeCore:
    """A `ServedEngine` (see `engine_app`), also usable in-process. Belongs to one event loop.

    What a request samples depends on `seed`, its `request_id`, its prompt's last id, its images' digests and the
    weights only: not on what runs beside it.
    """

    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._cache = PrefixCache(settings.kv_tokens // settings.block_tokens, settings.block_tokens)
        self._calls: dict[str, _Call] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        self._num_running = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._version = settings.version
        self._broken = ""
        self._images = FakeImages(Path(settings.model_path).parent, settings.image_folder)
        with weights_io.open_tensors(settings.model_path) as tensors:
            self._load(_matrix(tensors))

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: types.Sampling,
        priority: int,
        images: Sequence[types.ImageSpan] = (),
    ) -> types.Completion:
        """Samples one completion; see `engine_app.ServedEngine`. Cancelling frees its blocks."""
        self._check(request_id, prompt_ids, images)
        call = _Call(
            prompt_ids,
            cache_ids(prompt_ids, images),
            tuple(span.digest for span in images),
            sampling.max_new_tokens,
            asyncio.get_running_loop().create_future(),
        )
        self._calls[request_id] = call
        heapq.heappush(self._queue, (priority, next(self._order), request_id))
        kept: list[int] = []
        try:
            self._admit()
            lease = await call.ready
            self._prompt_tokens += len(prompt_ids)
            self._cached_tokens += lease.cached_tokens
            version = self._version
            token_ids, logprobs, reason = await self._sample(request_id, call, sampling)
            self._generated_tokens += len(token_ids)
            # As in vLLM, the last sampled token has no KV yet.
            kept = (call.cache_ids + token_ids)[:-1]
            return types.Completion(tuple(token_ids), tuple(logprobs), lease.cached_tokens, reason, version)
        except asyncio.CancelledError:
            if not call.aborted:
                raise
            return types.Completion((), (), 0, "abort", self._version)
        finally:
            del self._calls[request_id]
            if call.lease is not None:
                self._num_running -= 1
                self._cache.release(call.lease, kept)
            self._admit()

    async def update_weights(self, update: types.WeightUpdate) -> int:
        """Loads a version; see `engine_app.ServedEngine`."""
        if update.version <= self._version:
            raise EngineRefused(f"version {update.version} is not above {self._version}", reason="not_newer")
        if self._calls:
            raise EngineRefused(f"{len(self._calls)} calls are in flight: drain them first", reason="busy")
        self._broken = "the last weight update failed: publish a good version"
        with weights_io.open_tensors(update.path) as tensors:
            weights_io.verify(tensors, update.checksums)
            matrix = _matrix(tensors)
        if len(matrix) != len(self._logits):
            raise WeightsDiffer(f"{TENSOR}: vocabulary of {len(matrix)} instead of {len(self._logits)}")
        self._load(matrix)
        if not self._cache.clear():
            raise WeightsDiffer("the prefix cache could not be reset: its blocks belong to an older version")
        self._version = update.version
        self._broken = ""
        return 1

    def abort(self, request_ids: list[str]) -> int:
        """Ends calls in flight; unknown ids are ignored."""
        calls = [self._calls[request_id] for request_id in request_ids if request_id in self._calls]
        calls = [call for call in calls if not call.aborted]
        for call in calls:
            call.aborted = True
            call.ready.cancel()
        return len(calls)

    def stats(self) -> types.EngineStats:
        """The live numbers; nothing is ever preempted here, because a request's blocks are taken at once."""
        return types.EngineStats(
            version=self._version,
            num_running=self._num_running,
            num_waiting=len(self._calls) - self._num_running,
            kv_used_tokens=self._cache.used_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=0,
            num_cached_blocks=self._cache.num_cached_blocks,
        )

    async def requests(self) -> dict[str, tuple[int, int]]:
        """Request id -> (prompt tokens once it runs, KV blocks held)."""
        return {
            request_id: (len(call.prompt_ids), call.lease.num_blocks) if call.lease else (0, 0)
            for request_id, call in self._calls.items()
        }

    def health(self) -> EngineHealth:
        """What it serves now."""
        s = self._settings
        return EngineHealth(
            self._version, not self._broken, s.kv_tokens, s.block_tokens, s.max_context_tokens, self._broken
        )

    def _check(self, request_id: str, prompt_ids: list[int], images: Sequence[types.ImageSpan]) -> None:
        if self._broken:
            raise EngineRefused(self._broken, reason="no_weights")
        if request_id in self._calls:
            raise EngineRefused(f"request {request_id!r} is in flight already", reason="duplicate")
        if max(prompt_ids) >= len(self._logits):
            raise EngineRefused(
                f"prompt_ids: {max(prompt_ids)} is outside the vocabulary of {len(self._logits)}", reason="invalid"
            )
        try:
            self._images.check(prompt_ids, images)
        except (ValueError, ImageRefused, ImageFailed) as error:
            raise EngineRefused(f"images: {error}", reason="invalid") from error

    def _admit(self) -> None:
        while self._queue and self._num_running < self._settings.max_running:
            call = self._calls.get(self._queue[0][2])
            if call is None or call.ready.done():
                heapq.heappop(self._queue)
                continue
            lease = self._cache.acquire(call.cache_ids, call.max_new_tokens)
            if lease is None:
                return
            heapq.heappop(self._queue)
            call.lease = lease
            self._num_running += 1
            call.ready.set_result(lease)

    async def _sample(
        self, request_id: str, call: _Call, sampling: types.Sampling
    ) -> tuple[list[int], list[float], str]:
        rng = random.Random("/".join((str(self._settings.seed), request_id, *call.digests)))  # noqa: S311 - a simulation
        stops = frozenset(sampling.stop_token_ids)
        token_ids: list[int] = []
        logprobs: list[float] = []
        previous, reason = call.prompt_ids[-1], "length"
        while len(token_ids) < sampling.max_new_tokens:
            if self._settings.token_latency_s:
                await asyncio.sleep(self._settings.token_latency_s)
                if call.aborted:
                    return token_ids, logprobs, "abort"
            token_id = self._draw(rng, previous, sampling.temperature)
            token_ids.append(token_id)
            logprobs.append(self._row(previous)[token_id])
            previous = token_id
            if token_id in stops:
                reason = "stop"
                break
        return token_ids, logprobs, reason

    def _draw(self, rng: random.Random, previous: int, temperature: float) -> int:
        row = self._row(previous)
        if forbidden := self._images.forbidden:
            row = [-math.inf if token_id in forbidden else value for token_id, value in enumerate(row)]
        if temperature == 0.0:
            return row.index(max(row))
        key = (previous, temperature)
        cumulative = self._cumulative.get(key)
        if cumulative is None:
            top = max(row)
            weights = (math.exp((value - top) / temperature) for value in row)
            cumulative = self._cumulative[key] = list(itertools.accumulate(weights))
        return min(bisect.bisect_right(cumulative, rng.random() * cumulative[-1]), len(row) - 1)

    def _row(self, previous: int) -> list[float]:
        """[V] log-probs of the next token, made when first used."""
        row = self._logprobs.get(previous)
        if row is None:
            logits = self._logits[previous]
            top = max(logits)
            total = top + math.log(sum(math.exp(value - top) for value in logits))
            row = self._logprobs[previous] = [value - total for value in logits]
        return row

    def _load(self, matrix: list[array.array[float]]) -> None:
        self._logits = matrix
        self._logprobs: dict[int, list[float]] = {}
        self._cumulative: dict[tuple[int, float], list[float]] = {}


def _matrix(tensors: dict[str, weights_io.RawTensor]) -> list[array.array[float]]:
    weights_io.check_names(tensors, [TENSOR], "the file")
    tensor = tensors[TENSOR]
    shape = tensor.shape
    if tensor.dtype != "F32" or len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise WeightsDiffer(f"{TENSOR}: must be a square float32 matrix, is {tensor.dtype} {list(shape)}")
    values = array.array("f", bytes(tensor.data))
    if sys.byteorder == "big":
        values.byteswap()
    if not all(map(math.isfinite, values)):
        raise WeightsDiffer(f"{TENSOR}: holds values that are not finite")
    size = shape[0]
    return [values[row * size : (row + 1) * size] for row in range(size)]
