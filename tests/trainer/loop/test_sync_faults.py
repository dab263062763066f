from __future__ import annotations

import asyncio

import pytest
from sync_parts import FIRST, SECOND, THIRD, Backend, Engine, Gate, make_sync, sparing

from tide_trainer.errors import BackendFailed, EngineFailed, RunFailed, WeightsDiffer


async def test_w3_a_rank_that_does_not_finish_its_calls_is_left_out_and_the_sync_completes(settings):
    engines, gate = {rank: Engine(rank, []) for rank in (FIRST, SECOND)}, Gate([], busy=[FIRST])
    sync, quarantined = make_sync(settings, engines, gate, sync_timeout_s=0.02)
    await sync.to_version(1)
    assert "did not finish in 0.02 s" in quarantined[FIRST]
    assert list(engines) == [SECOND]
    assert 1 in gate.serves.values()


async def test_below_the_minimum_a_rank_that_does_not_finish_its_calls_ends_the_run(settings):
    gate = Gate([], busy=[FIRST])
    sync, _ = make_sync(settings, {FIRST: Engine(FIRST, [])}, gate, sync_timeout_s=0.02)
    with pytest.raises(RunFailed, match=r"did not finish.*min_ranks"):
        await sync.to_version(1)
    assert gate.serves == {}


async def test_a_rank_that_dies_between_its_update_and_the_parity_sample_is_left_out(settings):
    engines, gate = {FIRST: Engine(FIRST, [], mute=EngineFailed("gone")), SECOND: Engine(SECOND, [])}, Gate([])
    sync, quarantined = make_sync(settings, engines, gate)
    await sync.to_version(1)
    assert "gone" in quarantined[FIRST]
    assert 1 in gate.serves.values()
    sync, _ = make_sync(settings, {FIRST: Engine(FIRST, [], mute=EngineFailed("gone"))}, Gate([]))
    with pytest.raises(RunFailed, match="min_ranks"):
        await sync.to_version(1)


async def test_a_rank_that_is_quarantined_during_the_parity_sample_does_not_stop_it(settings):
    gate, engines = Gate([]), {}
    sync, _ = make_sync(settings, engines, gate)

    class Vanishing(Engine):
        async def generate(self, prompt_ids, sampling, images=()):
            engines.pop(SECOND, None)  # as its watch does
            return await super().generate(prompt_ids, sampling, images)

    engines |= {FIRST: Vanishing(FIRST, []), SECOND: Engine(SECOND, [])}
    await sync.to_version(1)
    assert 1 in gate.serves.values()


async def test_a_backend_that_cannot_score_is_no_rank_s_fault(settings):
    sync, quarantined = make_sync(
        settings, {FIRST: Engine(FIRST, [])}, Gate([]), Backend([], failure=BackendFailed("died"))
    )
    with pytest.raises(BackendFailed):
        await sync.to_version(1)
    assert quarantined == {}


@pytest.mark.parametrize("hides_blocks", [False, True], ids=["blocks", "counter"])
async def test_w1_an_engine_that_keeps_its_cache_across_an_update_is_found_by_its_own_counters(settings, hides_blocks):
    engines = {rank: Engine(rank, []) for rank in (FIRST, SECOND)}
    gate = Gate([])
    sync, quarantined = make_sync(settings, engines, gate)
    await sync.to_version(1)
    assert quarantined == {}
    engines[FIRST].keeps_cache, engines[FIRST].hides_blocks = True, hides_blocks
    await sync.to_version(2)
    told = "cached tokens were used right after" if hides_blocks else "still caches 4 KV blocks of an older version"
    assert told in quarantined[FIRST]
    assert gate.serves == {FIRST: 1, SECOND: 2}


async def test_w1_below_the_minimum_a_cache_that_stays_ends_the_run(settings):
    engine = Engine(FIRST, [])
    sync, _ = make_sync(settings, {FIRST: engine}, Gate([]))
    await sync.to_version(1)
    engine.keeps_cache = True
    with pytest.raises(RunFailed, match="min_ranks"):
        await sync.to_version(2)


async def test_w1_a_counter_that_tells_of_more_than_the_answers_is_found(settings):
    class Hiding(Engine):
        async def generate(self, prompt_ids, sampling, images=()):
            self.cached_tokens += 32
            return await super().generate(prompt_ids, sampling, images)

    sync, quarantined = make_sync(settings, engines := {FIRST: Hiding(FIRST, []), SECOND: Engine(SECOND, [])}, Gate([]))
    await sync.to_version(1)
    assert "the engine counts 128 cached tokens for answers that tell of 0" in quarantined[FIRST]
    assert list(engines) == [SECOND]


async def test_a_spared_rank_stays_open_at_its_version_and_joins_the_newest_later(settings):
    log = []
    engines = {rank: Engine(rank, log) for rank in (FIRST, SECOND, THIRD)}
    gate = Gate(log, busy=[SECOND])  # what it does never delays the sync
    sync, quarantined = make_sync(settings, engines, gate)
    report = await sync.to_version(1, sparing(SECOND))
    assert report.kept == {SECOND}
    assert not any("1" in line.split()[1] for line in log if line.startswith(("close", "drained", "update", "open")))
    report = await sync.to_version(2, sparing(SECOND))
    del log[:]
    joining = asyncio.create_task(sync.join(SECOND))
    for _ in range(20):
        await asyncio.sleep(0)
    assert log == ["close 1"]
    gate.free(SECOND)
    await joining
    assert log == ["close 1", "drained 1", "update 1 to 2", "open 1 at 2"]
    assert gate.serves == dict.fromkeys(engines, 2)
    assert quarantined == {}
    await sync.join(SECOND)
    assert log[-1] == "open 1 at 2", "a rank that is not behind is left alone"


async def test_a_join_waits_for_a_sync_and_the_sync_may_take_the_rank_along(settings):
    log = []
    engines = {rank: Engine(rank, log) for rank in (FIRST, SECOND)}
    sync, quarantined = make_sync(settings, engines, Gate(log))
    await sync.to_version(1, sparing(SECOND))
    syncing = asyncio.create_task(sync.to_version(2))
    await asyncio.sleep(0)
    await asyncio.gather(sync.join(SECOND), syncing)
    assert [line for line in log if line.startswith("update 1")] == ["update 1 to 2"]
    assert quarantined == {}
    await sync.to_version(3, sparing(SECOND))
    syncing = asyncio.create_task(sync.to_version(4, sparing(SECOND)))
    while "close 0" not in log[-2:]:  # noqa: ASYNC110 - the log is a list, and one turn of the loop is enough
        await asyncio.sleep(0)
    await asyncio.gather(sync.join(SECOND), syncing)
    assert log.index("open 0 at 4") < log.index("close 1")
    assert log[-1] == "open 1 at 4"


async def test_a_spared_rank_whose_later_update_fails_is_left_out_and_below_the_minimum_ends_the_run(settings):
    for failure in (EngineFailed("gone"), WeightsDiffer("no")):
        engines = {rank: Engine(rank, []) for rank in (FIRST, SECOND)}
        gate = Gate([])
        sync, quarantined = make_sync(settings, engines, gate, min_ranks=1)
        await sync.to_version(1, sparing(SECOND))
        engines[SECOND].failure = failure
        await sync.join(SECOND)
        assert "weight update to version 1 failed" in quarantined[SECOND]
        assert gate.serves == {FIRST: 1}
        await sync.to_version(2)
        assert gate.serves == {FIRST: 2}
    engines = {rank: Engine(rank, []) for rank in (FIRST, SECOND)}
    sync, _ = make_sync(settings, engines, Gate([]), min_ranks=2)
    await sync.to_version(1, sparing(SECOND))
    engines[SECOND].failure = EngineFailed("gone")
    with pytest.raises(RunFailed, match="min_ranks"):
        await sync.join(SECOND)


async def test_a_joining_rank_is_judged_by_what_the_trainer_said_of_its_version(settings):
    backend = Backend([])
    engines = {rank: Engine(rank, []) for rank in (FIRST, SECOND)}
    sync, _ = make_sync(settings, engines, Gate([]), backend)
    await sync.to_version(1, sparing(SECOND))
    backend.failure = AssertionError("the trainer's weights have moved on")

    class Wrong(Engine):
        async def generate(self, prompt_ids, sampling, images=()):
            done = await super().generate(prompt_ids, sampling, images)
            return type(done)(done.token_ids, (-1.25,) * len(done.logprobs), done.cached_tokens, "length", 1)

    engines[SECOND] = Wrong(SECOND, [])
    with pytest.raises(RunFailed, match=r"differ by 0\.25"):
        await sync.join(SECOND)


async def test_where_all_updated_ranks_die_the_spared_one_goes_on_and_joins_without_a_reference(settings):
    engines = {FIRST: Engine(FIRST, [], EngineFailed("gone")), SECOND: Engine(SECOND, [])}
    gate = Gate([])
    sync, quarantined = make_sync(settings, engines, gate)
    await sync.to_version(1, sparing(SECOND))
    assert list(quarantined) == [FIRST]
    assert gate.log[-1] == "open none at 1"
    await sync.join(SECOND)
    assert gate.serves == {SECOND: 1}


async def test_t6_a_sync_or_join_that_is_interrupted_at_any_await_leaves_the_next_one_whole(settings):
    """Each is driven by hand and cancelled at its n-th await, for every n."""
    for interrupted in ("sync", "join"):
        num_awaits = 0
        while True:
            log = []
            engines = {rank: Engine(rank, log) for rank in (FIRST, SECOND)}
            gate = Gate(log)
            sync, quarantined = make_sync(settings, engines, gate)
            await sync.to_version(1, sparing(SECOND))
            coroutine = sync.to_version(2, sparing()) if interrupted == "sync" else sync.join(SECOND)
            task = asyncio.create_task(coroutine)
            for _ in range(num_awaits):
                await asyncio.sleep(0)
            ended = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(sync.to_version(3), 5)
            assert quarantined == {}
            assert gate.serves == {FIRST: 3, SECOND: 3}
            if ended:
                break
            num_awaits += 1
        assert num_awaits > 10
