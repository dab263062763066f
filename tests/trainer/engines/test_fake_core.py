"""The fake engine in-process: sampling, queueing and its simulated cache."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_trainer import types
from tide_trainer.backends.fake_core import FakeCore, FakeSettings
from tide_trainer.backends.prefix_cache import PrefixCache

SAMPLED = types.Sampling(temperature=1.0, max_new_tokens=8)


@pytest.fixture
def settings(tmp_path, bigram_writer) -> FakeSettings:
    bigram_writer(tmp_path / "m.safetensors", 0, 40)
    return FakeSettings(str(tmp_path / "m.safetensors"), kv_tokens=128)


async def test_what_a_request_samples_depends_on_its_id_and_not_on_its_neighbours(settings):
    async def answer(core, name):
        return (await core.generate(name, [3, 4], SAMPLED, 0)).token_ids

    alone = [await answer(FakeCore(settings), f"r{number}") for number in range(6)]
    core = FakeCore(settings)
    together = await asyncio.gather(*(answer(core, f"r{number}") for number in reversed(range(6))))
    assert alone == together[::-1]
    assert len(set(alone)) > 1
    assert await answer(FakeCore(dataclasses.replace(settings, seed=1)), "r0") != alone[0]


async def test_calls_beyond_the_cache_wait_and_go_in_order_of_priority(settings):
    core = FakeCore(dataclasses.replace(settings, token_latency_s=0.001))
    done: list[str] = []

    async def call(name, priority):
        await core.generate(name, [3] * 60, SAMPLED, priority)
        done.append(name)

    tasks = [asyncio.create_task(call(*each)) for each in [("a", 5), ("late", 9), ("soon", 1), ("next", 5)]]
    await asyncio.sleep(0)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 3)
    assert stats.kv_used_tokens <= 128
    await asyncio.gather(*tasks)
    assert done == ["a", "soon", "next", "late"]
    assert core.stats().kv_used_tokens == 0


async def test_an_aborted_waiting_call_answers_and_leaves_nothing(settings):
    core = FakeCore(dataclasses.replace(settings, token_latency_s=0.001))
    first = asyncio.create_task(core.generate("a", [3] * 90, SAMPLED, 0))
    second = asyncio.create_task(core.generate("b", [4] * 90, SAMPLED, 0))
    await asyncio.sleep(0)
    assert core.abort(["b"]) == 1
    assert (await second).finish_reason == "abort"
    assert (await first).finish_reason == "length"
    assert core.stats().kv_used_tokens == 0


def test_the_least_recently_used_prefix_is_dropped_first_and_from_its_end():
    cache = PrefixCache(num_blocks=4, block_tokens=2)

    def play(token_ids):
        lease = cache.acquire(token_ids, 1)
        assert lease is not None
        cache.release(lease, token_ids)
        return lease.cached_tokens

    assert [play([1, 1, 2, 2, 3]) for _ in range(2)] == [0, 4]
    assert play([5, 5, 6, 6, 7]) == 0
    # Six full blocks do not fit four: the older prefix lost its end.
    assert play([1, 1, 2, 2, 3]) < 4


def test_a_reset_is_refused_while_a_request_holds_blocks():
    cache = PrefixCache(num_blocks=4, block_tokens=2)
    lease = cache.acquire([1, 2, 3], 1)
    assert lease is not None
    assert not cache.clear()
    cache.release(lease, [1, 2, 3])
    assert cache.clear()
    again = cache.acquire([1, 2, 3], 1)
    assert again is not None
    assert again.cached_tokens == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()), max_size=40))
def test_blocks_never_exceed_the_capacity_and_all_come_back(plays):
    cache = PrefixCache(num_blocks=6, block_tokens=2)
    held = []
    for token_ids, hold in plays:
        lease = cache.acquire(token_ids, 2)
        if lease is not None:
            assert lease.cached_tokens < len(token_ids)
            assert lease.num_blocks * 2 >= len(token_ids) + 2
            held.append((lease, token_ids))
        assert cache.used_tokens <= 12
        if held and not hold:
            cache.release(*held.pop(0))
    for lease, token_ids in held:
        cache.release(lease, token_ids)
    assert cache.used_tokens == 0
    assert cache.clear()
