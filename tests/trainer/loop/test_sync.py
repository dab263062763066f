from __future__ import annotations

import asyncio

import pytest

from tide_trainer.errors import EngineFailed, RunFailed
from tide_trainer.images import ImageStore, ImageTokens, check_spans, image_size
from tide_trainer.loop.parity import NUM_PROMPTS, parity, parity_image, parity_prompts
from tide_trainer.loop.sync import WeightSync
from tide_trainer.types import Completion, RankId, WeightReceipt, WeightUpdate

FIRST, SECOND = RankId("rollout", 0), RankId("rollout", 1)


class Engine:
    """An engine whose every token has log-prob -1."""

    def __init__(self, rank, log, failure=None):
        self.rank, self.log, self.failure = rank, log, failure
        self.hangs = False

    async def update_weights(self, update):
        self.log.append(f"update {self.rank.index} to {update.version}")
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.failure:
            raise self.failure
        return WeightReceipt(self.rank, update.version, 1, 0.0)

    async def generate(self, prompt_ids, sampling, images=()):
        return Completion((1,) * sampling.max_new_tokens, (-1.0,) * sampling.max_new_tokens, 0, "length", 1)


class Backend:
    """A trainer that scores every token with the given log-prob."""

    def __init__(self, log, logprob=-1.0):
        self.log, self.logprob = log, logprob

    async def publish(self, version):
        self.log.append(f"publish {version}")
        return WeightUpdate(version, "file", {"w": "0"})

    async def score(self, sequences, images=()):
        return [[self.logprob] * len(sequence) for sequence in sequences]


class Gate:
    def __init__(self, log):
        self.log = log
        self.empty = asyncio.Event()
        self.empty.set()

    def close_gate(self):
        self.log.append("close")

    async def drained(self):
        await self.empty.wait()
        self.log.append("drained")

    def busy_ranks(self):
        return frozenset()

    def open_gate(self, version):
        self.log.append(f"open {version}")


def make(settings, engines, backend, gate, **rollout):
    quarantined = {}

    def quarantine(rank, reason):
        quarantined[rank] = reason
        del engines[rank]

    settings = settings.rollout.model_copy(update=rollout)
    return WeightSync(backend, engines, gate, quarantine, settings, 50, 1), quarantined


async def test_the_order_of_a_sync_and_the_version_of_every_rank(settings):
    log = []
    engines = {rank: Engine(rank, log) for rank in (FIRST, SECOND)}
    sync, _ = make(settings, engines, Backend(log), Gate(log))
    report = await sync.to_version(3)
    assert log[:3] == ["publish 3", "close", "drained"]
    assert set(log[3:5]) == {"update 0 to 3", "update 1 to 3"}
    assert log[5:] == ["open 3"]
    assert (report.version, report.parity_max_abs) == (3, 0.0)


async def test_no_weight_moves_while_a_call_is_in_flight(settings):
    log = []
    gate = Gate(log)
    gate.empty.clear()
    sync, _ = make(settings, {FIRST: Engine(FIRST, log)}, Backend(log), gate)
    syncing = asyncio.create_task(sync.to_version(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "update 0 to 1" not in log
    gate.empty.set()
    await syncing
    assert "update 0 to 1" in log


async def test_calls_that_never_finish_end_the_run_with_the_reason(settings):
    gate = Gate([])
    gate.empty.clear()
    sync, _ = make(settings, {FIRST: Engine(FIRST, [])}, Backend([]), gate, sync_timeout_s=0.02)
    with pytest.raises(RunFailed, match="in flight did not finish"):
        await sync.to_version(1)


async def test_a_rank_that_fails_or_hangs_is_named_left_out_and_the_sync_completes(settings):
    log = []
    engines = {FIRST: Engine(FIRST, log, EngineFailed("gone")), SECOND: Engine(SECOND, log)}
    sync, quarantined = make(settings, engines, Backend(log), Gate(log))
    await sync.to_version(1)
    assert list(engines) == [SECOND]
    assert "gone" in quarantined[FIRST]
    assert log[-1] == "open 1"
    engines[FIRST] = Engine(FIRST, log)
    engines[FIRST].hangs = True
    sync, quarantined = make(settings, engines, Backend(log), Gate(log), sync_timeout_s=0.05)
    await sync.to_version(2)
    assert list(quarantined) == [FIRST]


async def test_below_the_minimum_of_ranks_the_run_fails(settings):
    engines = {FIRST: Engine(FIRST, [], EngineFailed("gone"))}
    sync, _ = make(settings, engines, Backend([]), Gate([]))
    with pytest.raises(RunFailed, match="min_ranks"):
        await sync.to_version(1)


async def test_broken_parity_is_loud_and_the_gate_stays_closed(settings):
    log = []
    sync, _ = make(settings, {FIRST: Engine(FIRST, log)}, Backend(log, logprob=-1.5), Gate(log))
    with pytest.raises(RunFailed, match=r"differ by 0\.5"):
        await sync.to_version(1)
    assert not any(entry.startswith("open") for entry in log)
    assert sync.parity_max_abs == pytest.approx(0.5)


async def test_a_log_prob_that_is_no_number_breaks_parity(settings):
    sync, _ = make(settings, {FIRST: Engine(FIRST, [])}, Backend([], logprob=float("nan")), Gate([]))
    with pytest.raises(RunFailed, match="differ"):
        await sync.to_version(1)


async def test_the_parity_sample_is_fixed_and_fits_the_context():
    prompts = parity_prompts(50, 20, 7)
    assert prompts == parity_prompts(50, 20, 7) != parity_prompts(50, 20, 8)
    assert len(prompts) == NUM_PROMPTS
    assert all(0 <= token < 50 for prompt in prompts for token in prompt.token_ids)
    assert await parity(Engine(FIRST, []), Backend([]), prompts, 20) == 0.0


def test_the_parity_sample_has_an_image_where_the_model_takes_some(tmp_path):
    store = ImageStore(tmp_path)
    tokens = ImageTokens(9, "<|image_pad|>", 14, 2, 3136, 50176, (9, 10))
    image = parity_image(store, tokens, 7)
    assert image == parity_image(store, tokens, 7)
    assert tokens.count(*image_size(store.read(image.digest))) == image.num_tokens == 4
    prompts = parity_prompts(12, 100, 7, image)
    assert [len(prompt.images) for prompt in prompts] == [0, 1, 0, 1]
    for prompt in prompts:
        check_spans(prompt.token_ids, prompt.images, 9)
        assert 10 not in prompt.token_ids
        assert len(prompt.token_ids) + 8 <= 100
    # Without room there is none; the sample is the text's.
    assert not any(prompt.images for prompt in parity_prompts(12, 12, 7, image)[3:])
