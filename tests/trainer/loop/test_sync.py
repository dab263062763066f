from __future__ import annotations

import asyncio

import pytest
from sync_parts import FIRST, SECOND, Backend, Engine, Gate, make_sync

from tide_trainer.errors import EngineFailed, RunFailed
from tide_trainer.images import ImageStore, ImageTokens, check_spans, image_size
from tide_trainer.loop.parity import NUM_PROMPTS, parity, parity_image, parity_prompts


def make(settings, engines, backend, gate, **rollout):
    return make_sync(settings, engines, gate, backend, **rollout)


async def test_the_order_of_a_sync_and_the_version_of_every_rank(settings):
    log = []
    engines = {rank: Engine(rank, log) for rank in (FIRST, SECOND)}
    sync, _ = make(settings, engines, Backend(log), Gate(log))
    report = await sync.to_version(3)
    assert log[:3] == ["publish 3", "close 0,1", "drained 0,1"]
    assert set(log[3:5]) == {"update 0 to 3", "update 1 to 3"}
    assert log[5:] == ["open 0,1 at 3"]
    assert (report.version, report.parity_max_abs) == (3, 0.0)


async def test_no_weight_moves_while_a_call_is_in_flight(settings):
    log = []
    gate = Gate(log, busy=[FIRST])
    sync, _ = make(settings, {FIRST: Engine(FIRST, log)}, Backend(log), gate)
    syncing = asyncio.create_task(sync.to_version(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert log[-1] == "close 0"
    assert "update 0 to 1" not in log
    gate.free(FIRST)
    await syncing
    assert "update 0 to 1" in log


async def test_calls_that_never_finish_end_the_run_with_the_reason(settings):
    gate = Gate([], busy=[FIRST])
    gate.busy_ranks = frozenset  # it is a task's resume that hangs
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
    assert log[-1] == "open 1 at 1"
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
