"""What stands around the weight sync: engines, a trainer and a gate that do what a test says."""

from __future__ import annotations

import asyncio

from tide_trainer.loop.sync import WeightSync
from tide_trainer.types import Completion, EngineStats, RankId, WeightReceipt, WeightUpdate

FIRST, SECOND, THIRD = (RankId("rollout", index) for index in range(3))


class Engine:
    """An engine whose every token has log-prob -1, and which keeps its prompts cached until an update.

    Attributes:
        failure: raised by an update.
        mute: raised by a generation.
        hangs: an update never ends.
        keeps_cache: an update drops nothing of the cache, and says so by its counters only.
        hides_blocks: the count of cached blocks is 0 all the same.
    """

    def __init__(self, rank, log, failure=None, mute=None):
        self.rank, self.log, self.failure, self.mute = rank, log, failure, mute
        self.hangs = self.keeps_cache = self.hides_blocks = False
        self.version, self.cached_tokens, self.cache = 0, 0, set()

    async def update_weights(self, update):
        self.log.append(f"update {self.rank.index} to {update.version}")
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.failure:
            raise self.failure
        self.version = update.version
        if not self.keeps_cache:
            self.cache.clear()
        return WeightReceipt(self.rank, update.version, 1, 0.0)

    async def generate(self, prompt_ids, sampling, images=()):
        await asyncio.sleep(0)
        if self.mute:
            raise self.mute
        cached = len(prompt_ids) - 1 if tuple(prompt_ids) in self.cache else 0
        self.cached_tokens += cached
        self.cache.add(tuple(prompt_ids))
        num = sampling.max_new_tokens
        return Completion((1,) * num, (-1.0,) * num, cached, "length", self.version)

    async def stats(self):
        await asyncio.sleep(0)
        num_blocks = 0 if self.hides_blocks else len(self.cache)
        return EngineStats(self.version, 0, 0, 0, 0, self.cached_tokens, 0, 0, num_blocks)


class Backend:
    """A trainer that scores every token with the given log-prob, or fails to."""

    def __init__(self, log, logprob=-1.0, failure=None):
        self.log, self.logprob, self.failure = log, logprob, failure

    async def publish(self, version):
        await asyncio.sleep(0)
        self.log.append(f"publish {version}")
        return WeightUpdate(version, "file", {"w": "0"})

    async def score(self, sequences, images=()):
        await asyncio.sleep(0)
        if self.failure:
            raise self.failure
        return [[self.logprob] * len(sequence) for sequence in sequences]


class Gate:
    """A gate that notes what it is told; calls in flight end when their rank is dropped, or `free` is called."""

    def __init__(self, log, busy=()):
        self.log, self.busy = log, set(busy)
        self.ended = asyncio.Event()
        self.serves = {}

    def close_gate(self, ranks):
        self.log.append(f"close {told(ranks)}")

    async def drained(self, ranks):
        while self.busy & ranks:
            self.ended.clear()
            await self.ended.wait()
        self.log.append(f"drained {told(ranks)}")

    def free(self, rank):
        self.busy.discard(rank)
        self.ended.set()

    def busy_ranks(self):
        return frozenset(self.busy)

    def open_gate(self, version, ranks):
        self.log.append(f"open {told(ranks)} at {version}")
        self.serves |= dict.fromkeys(ranks, version)


def told(ranks):
    return ",".join(str(rank.index) for rank in sorted(ranks)) or "none"


def make_sync(settings, engines, gate, backend=None, **rollout):
    """A sync over these parts, and what it has quarantined."""
    quarantined = {}

    def quarantine(rank, reason):
        quarantined[rank] = reason
        engines.pop(rank, None)
        gate.free(rank)

    settings = settings.rollout.model_copy(update=rollout)
    return WeightSync(backend or Backend([]), engines, gate, quarantine, settings, 50, 1), quarantined


def sparing(*ranks):
    """What a sync is told to leave at its version."""

    async def spare():
        return frozenset(ranks)

    return spare
