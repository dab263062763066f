from __future__ import annotations

import asyncio

import pytest

from tide_trainer.errors import BackendFailed, EngineFailed, RunFailed
from tide_trainer.loop.sync import WeightSync
from tide_trainer.types import Completion, RankId, WeightReceipt, WeightUpdate

FIRST, SECOND = RankId("rollout", 0), RankId("rollout", 1)


class Engine:
    """An engine whose every token has log-prob -1; `generate` may fail."""

    def __init__(self, rank, failure=None):
        self.rank, self.failure = rank, failure

    async def update_weights(self, update):
        return WeightReceipt(self.rank, update.version, 1, 0.0)

    async def generate(self, prompt_ids, sampling, images=()):
        if self.failure:
            raise self.failure
        return Completion((1,) * sampling.max_new_tokens, (-1.0,) * sampling.max_new_tokens, 0, "length", 1)


class Backend:
    def __init__(self, failure=None):
        self.failure = failure

    async def publish(self, version):
        return WeightUpdate(version, "file", {"w": "0"})

    async def score(self, sequences, images=()):
        if self.failure:
            raise self.failure
        return [[-1.0] * len(sequence) for sequence in sequences]


class Gate:
    """A gate whose calls in flight end when their rank is dropped."""

    def __init__(self, busy=()):
        self.busy = set(busy)
        self.empty = asyncio.Event()
        self.opened = []
        self.note()

    def note(self):
        if not self.busy:
            self.empty.set()

    def close_gate(self): ...

    async def drained(self):
        await self.empty.wait()

    def busy_ranks(self):
        return frozenset(self.busy)

    def open_gate(self, version):
        self.opened.append(version)


def make(settings, engines, gate, backend=None, **rollout):
    quarantined = {}

    def quarantine(rank, reason):
        quarantined[rank] = reason
        del engines[rank]
        gate.busy.discard(rank)
        gate.note()

    settings = settings.rollout.model_copy(update=rollout)
    return WeightSync(backend or Backend(), engines, gate, quarantine, settings, 50, 1), quarantined


async def test_w3_a_rank_that_does_not_finish_its_calls_is_left_out_and_the_sync_completes(settings):
    engines, gate = {rank: Engine(rank) for rank in (FIRST, SECOND)}, Gate(busy=[FIRST])
    sync, quarantined = make(settings, engines, gate, sync_timeout_s=0.02)
    await sync.to_version(1)
    assert "did not finish in 0.02 s" in quarantined[FIRST]
    assert list(engines) == [SECOND]
    assert gate.opened == [1]


async def test_below_the_minimum_a_rank_that_does_not_finish_its_calls_ends_the_run(settings):
    gate = Gate(busy=[FIRST])
    sync, _ = make(settings, {FIRST: Engine(FIRST)}, gate, sync_timeout_s=0.02)
    with pytest.raises(RunFailed, match=r"did not finish.*min_ranks"):
        await sync.to_version(1)
    assert gate.opened == []


async def test_a_rank_that_dies_between_its_update_and_the_parity_sample_is_left_out(settings):
    engines, gate = {FIRST: Engine(FIRST, EngineFailed("gone")), SECOND: Engine(SECOND)}, Gate()
    sync, quarantined = make(settings, engines, gate)
    await sync.to_version(1)
    assert "gone" in quarantined[FIRST]
    assert gate.opened == [1]
    sync, _ = make(settings, {FIRST: Engine(FIRST, EngineFailed("gone"))}, Gate())
    with pytest.raises(RunFailed, match="min_ranks"):
        await sync.to_version(1)


async def test_a_rank_that_is_quarantined_during_the_parity_sample_does_not_stop_it(settings):
    gate, engines = Gate(), {}
    sync, _ = make(settings, engines, gate)

    class Vanishing(Engine):
        async def generate(self, prompt_ids, sampling, images=()):
            engines.pop(SECOND, None)  # as its watch does
            return await super().generate(prompt_ids, sampling, images)

    engines |= {FIRST: Vanishing(FIRST), SECOND: Engine(SECOND)}
    await sync.to_version(1)
    assert gate.opened == [1]


async def test_a_backend_that_cannot_score_is_no_rank_s_fault(settings):
    sync, quarantined = make(settings, {FIRST: Engine(FIRST)}, Gate(), Backend(BackendFailed("died")))
    with pytest.raises(BackendFailed):
        await sync.to_version(1)
    assert quarantined == {}
