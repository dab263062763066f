"""A modelled rollout rank: a vLLM engine that batches continuously over a paged, prefix-caching KV cache.

Each step serves, as the engine's scheduler does: one token of every decoding request, then chunks of prompts, first
come, first served, up to `max_batched_tokens`. Where a decoding request finds no free block, the latest one is
preempted and computed again later, at full price.

Source: StaleFlow section 5 (step time from sequences and KV tokens), with prefill added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tide_trainer.simulation.kv_cache import Chain, Holding, KvCache


class RequestTooLargeError(Exception):
    """The request fits the KV cache not even alone; the driver ends its task."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """An engine's capacity and the coefficients of its step time. The defaults: Qwen2.5-7B bf16 on one H100 SXM 80 GB,
    60% of it for the engine, as where training shares the card (90%: 1,082,544 KV tokens).

    A step takes `k4 + max(k2, kp*P + k3*n) + k1*KV + ka*A` seconds.

    Symbols:
        n: decoding sequences; P: prompt tokens computed; KV: cached tokens that the decoding sequences read.
        A: for each computed prompt token, the tokens before it, summed.

    Attributes:
        k1: seconds per KV token. k2: seconds that reading the weights takes. k3: seconds per decoding sequence.
        k4: seconds of overhead. kp: seconds per prompt token. ka: seconds per prompt token and token before it.
    """

    kv_tokens: int = 600_000
    block_tokens: int = 16
    max_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    k1: float = 2.63e-8
    k2: float = 5.28e-3
    k3: float = 2.38e-5
    k4: float = 2.5e-3
    kp: float = 2.20e-5
    ka: float = 6.8e-10

    def step_s(self, num_decoding: int, kv_tokens: int, num_prefilled: int = 0, attended: float = 0.0) -> float:
        """Seconds of one step."""
        work = self.kp * num_prefilled + self.k3 * num_decoding
        return self.k4 + (work if work > self.k2 else self.k2) + self.k1 * kv_tokens + self.ka * attended

    def roofline_tokens_per_s(self, num_decoding: int, context_tokens: int) -> float:
        """Generated tokens per second of `num_decoding` sequences with nothing to prefill."""
        return num_decoding / self.step_s(num_decoding, num_decoding * context_tokens)


class Request:
    """One call at the engine: a prompt, of which a prefix may be cached, and `output_tokens` to generate."""

    __slots__ = (
        "first_step",
        "holding",
        "key",
        "last_step",
        "num_computed",
        "num_computed_before",
        "num_left",
        "num_to_compute",
        "prompt_tokens",
        "was_scheduled",
    )

    def __init__(self, key: str, prompt_tokens: int, output_tokens: int, shared: Sequence[Chain], own: Chain) -> None:
        """Makes a call of the task `key`; its content is `shared` and then `own`."""
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.holding = Holding(shared, own)
        self.num_left = output_tokens
        self.num_to_compute = prompt_tokens
        self.num_computed = 0
        self.num_computed_before = 0
        self.first_step = 0
        self.last_step = 0
        self.was_scheduled = False


@dataclass(slots=True)
class RankCounters:
    """Sums since the start.

    Attributes:
        num_prompt_tokens: of calls, at their first scheduling; `num_cached_tokens` of these were in the cache.
        num_prefilled_tokens: prompt tokens computed, those of preempted calls again included.
        num_recomputed_tokens: of these, the ones that a preempted call had computed before.
        schedulings: (time in seconds, prompt tokens, cached tokens) of each call.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    schedulings: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])


class Rank:
    """Steps one after the other while there is work. `ready_s` is when the present step ends; infinity: it is idle."""

    def __init__(self, model: RankModel) -> None:
        """Makes an idle engine with an empty cache."""
        self.model = model
        self.cache = KvCache(model.kv_tokens // model.block_tokens, model.block_tokens)
        self.counters = RankCounters()
        self.ready_s = math.inf
        self._waiting: deque[Request] = deque()
        # Both in the order of their scheduling; what still prefills was scheduled last.
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}
        self._kv_tokens = 0
        self._next_step = 0
        # By step modulo block_tokens: who needs its next block then. By step: who gets its last token then.
        self._needs_block: list[dict[Request, None]] = [{} for _ in range(model.block_tokens)]
        self._finishes: dict[int, dict[Request, None]] = {}

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def kv_usage_fraction(self) -> float:
        """Blocks of running requests over all blocks, as the engine reports it; idle tasks' cached blocks are free."""
        return self.cache.num_used / self.cache.num_blocks

    def submit(self, request: Request, now_s: float) -> None:
        """A call arrives; the next step may serve it.

        Raises:
            RequestTooLargeError: prompt and output are more than the cache.
        """
        tokens = request.prompt_tokens + request.num_left
        capacity = self.cache.num_blocks * self.cache.block_tokens
        if tokens > capacity:
            raise RequestTooLargeError(f"{request.key}: {tokens} tokens, the KV cache holds {capacity}")
        self._waiting.append(request)
        if self.ready_s == math.inf:
            self.ready_s = now_s

    def run(self, until_s: float) -> list[Request]:
        """Ends the present step and begins further ones, until one has finished a request.

        Args:
            until_s: no step begins later.

        Returns:
            Requests that finished at `ready_s`, the next step not begun; none if `until_s` came first.
        """
        while self.ready_s <= until_s:
            done = self._finishes.pop(self._next_step - 1, None)
            if done:
                for request in done:
                    self._finish(request)
                return list(done)
            if not self.num_running and not self._waiting:
                self.ready_s = math.inf
                break
            self._begin_step()
        return []

    def _begin_step(self) -> None:
        model, counters = self.model, self.counters
        num_preemptions = counters.num_preemptions
        self._grow()
        num_decoding, kv_tokens = len(self._decoding), self._kv_tokens
        may_start = counters.num_preemptions == num_preemptions
        num_prefilled, attended, prefilled = self._prefill(model.max_batched_tokens - num_decoding, may_start)
        took_s = model.step_s(num_decoding, kv_tokens, num_prefilled, attended)
        counters.num_steps += 1
        counters.busy_s += took_s
        counters.num_prefilled_tokens += num_prefilled
        counters.num_generated_tokens += num_decoding + len(prefilled)
        self._kv_tokens += num_decoding
        for request in prefilled:
            self._start_decoding(request)
        self._next_step += 1
        self.ready_s += took_s

    def _grow(self) -> None:
        """Gives a block to each decoding request whose last one is full, at the cost of the latest requests."""
        bucket = self._needs_block[self._next_step % self.model.block_tokens]
        for request in list(bucket):
            while request in bucket and not self.cache.grow(request.holding):
                self._preempt_latest()

    def _prefill(self, budget: int, may_start: bool) -> tuple[int, float, list[Request]]:
        """Computes prompts: those begun, then waiting ones.

        Returns:
            Tokens computed, tokens before each of them summed, and the requests whose prompt is complete.
        """
        used, attended = 0, 0.0
        complete: list[Request] = []
        cache, block_tokens = self.cache, self.model.block_tokens
        for request in list(self._prefilling):
            chunk = min(budget - used, request.num_to_compute - request.num_computed)
            blocks = -(-(request.num_computed + chunk) // block_tokens)
            while request in self._prefilling and chunk > 0 and not cache.extend(request.holding, blocks):
                self._preempt_latest()
                may_start = False
            if chunk <= 0 or request not in self._prefilling:
                break
            attended += self._advance(request, chunk, complete)
            used += chunk
        while may_start and self._waiting and used < budget and self.num_running < self.model.max_num_seqs:
            request = self._waiting[0]
            cached = cache.take(request.holding, request.num_to_compute, budget - used)
            if cached is None:
                break
            self._waiting.popleft()
            if not request.was_scheduled:
                request.was_scheduled = True
                self._count(request, cached)
            self._prefilling[request] = None
            request.num_computed = cached
            chunk = min(budget - used, request.num_to_compute - cached)
            attended += self._advance(request, chunk, complete)
            used += chunk
        return used, attended, complete

    def _count(self, request: Request, cached: int) -> None:
        counters = self.counters
        counters.num_prompt_tokens += request.prompt_tokens
        counters.num_cached_tokens += cached
        counters.schedulings.append((self.ready_s, request.prompt_tokens, cached))

    def _advance(self, request: Request, chunk: int, complete: list[Request]) -> float:
        attended = chunk * (request.num_computed + chunk / 2)
        request.num_computed += chunk
        again = min(request.num_computed, request.num_computed_before) - (request.num_computed - chunk)
        self.counters.num_recomputed_tokens += max(0, again)
        if request.num_computed == request.num_to_compute:
            complete.append(request)
        return attended

    def _start_decoding(self, request: Request) -> None:
        """Its prompt's last token gives its first output token in this step; the others follow one a step."""
        del self._prefilling[request]
        self._decoding[request] = None
        self._kv_tokens += request.num_computed
        request.first_step = self._next_step + 1
        request.last_step = self._next_step + request.num_left - 1
        self._needs_block[(request.first_step - request.num_computed) % self.model.block_tokens][request] = None
        self._finishes.setdefault(request.last_step, {})[request] = None

    def _stop_decoding(self, request: Request, num_decoded: int) -> None:
        del self._decoding[request]
        del self._needs_block[(request.first_step - request.num_computed) % self.model.block_tokens][request]
        request.num_computed += num_decoded
        self._kv_tokens -= request.num_computed

    def _finish(self, request: Request) -> None:
        self._stop_decoding(request, request.num_left - 1)
        self.cache.release(request.holding, request.num_computed)

    def _preempt_latest(self) -> None:
        self.counters.num_preemptions += 1
        if self._prefilling:
            request, _ = self._prefilling.popitem()
            request.num_computed_before = max(request.num_computed_before, request.num_computed)
        else:
            request = next(reversed(self._decoding))
            num_decoded = self._next_step - request.first_step
            self._stop_decoding(request, num_decoded)
            del self._finishes[request.last_step][request]
            request.num_left -= num_decoded + 1
            # The token that was sampled last is not in the cache yet.
            request.num_to_compute = request.num_computed_before = request.num_computed + 1
        self.cache.release(request.holding, request.num_computed)
        self._waiting.appendleft(request)
