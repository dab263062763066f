"""The modelled engine: its step time, what it counts, what it refuses, and what a preemption costs."""

from __future__ import annotations

import math

import pytest

from tide_trainer.simulation.kv_cache import Chain
from tide_trainer.simulation.rank import Rank, RankModel, Request, RequestTooLargeError


def drain(rank: Rank) -> list[tuple[str, float]]:
    done = []
    while rank.ready_s < math.inf:
        for request in rank.run(math.inf):
            done.append((request.key, rank.ready_s))
    rank.cache.check()
    return done


def call(key: str, prompt_tokens: int, output_tokens: int = 4, own: Chain | None = None, shared=()) -> Request:
    return Request(key, prompt_tokens, output_tokens, shared, own or Chain())


@pytest.mark.parametrize(("num_decoding", "k_tokens_per_s"), [(64, 5.7), (256, 11.6), (512, 12.3)])
def test_the_step_time_gives_the_published_rates(num_decoding: int, k_tokens_per_s: float) -> None:
    assert RankModel().roofline_tokens_per_s(num_decoding, 2000) / 1e3 == pytest.approx(k_tokens_per_s, abs=0.05)


@pytest.mark.parametrize("num_decoding", [64, 256, 512])
def test_a_full_batch_runs_at_the_rate_of_the_formula(num_decoding: int) -> None:
    model = RankModel(kv_tokens=2_000_000)
    rank = Rank(model)
    for index in range(num_decoding):
        rank.submit(call(str(index), 2000, 200), 0.0)
    drain(rank)
    counters = rank.counters
    assert counters.num_generated_tokens == num_decoding * 200
    assert counters.num_prefilled_tokens == counters.num_prompt_tokens == num_decoding * 2000
    # What remains without the prompts' own time is decoding at 2,000 to 2,200 tokens of context.
    decoding_s = counters.busy_s - counters.num_prefilled_tokens * (model.kp + model.ka * 1000)
    rate = counters.num_generated_tokens / decoding_s
    assert 0.9 * model.roofline_tokens_per_s(num_decoding, 2200) < rate
    assert rate <= 1.01 * model.roofline_tokens_per_s(num_decoding, 2000)


def test_a_long_prompt_is_computed_in_chunks_beside_the_others() -> None:
    rank = Rank(RankModel(kv_tokens=16_000, max_batched_tokens=100))
    rank.submit(call("short", 50, 30), 0.0)
    rank.submit(call("long", 1000, 1), 0.0)
    done = dict(drain(rank))
    assert rank.counters.num_prefilled_tokens == 1050
    # 50 tokens beside the first prompt, then 99 beside each decoded token: ten steps more.
    assert rank.counters.num_steps == 30
    assert done["long"] < done["short"]


def test_the_next_turn_finds_its_context_and_a_sibling_the_groups_prompt() -> None:
    rank = Rank(RankModel(kv_tokens=16_000))
    group, own = (Chain(6),), Chain()
    rank.submit(call("a", 100, 13, own, group), 0.0)
    drain(rank)
    rank.submit(call("b", 100, 4, Chain(), group), rank.counters.busy_s)
    drain(rank)
    rank.submit(call("a", 150, 4, own, group), 1.0)
    drain(rank)
    # Of 112 computed tokens (the last one sampled is not), seven blocks of 16 are whole.
    assert [cached for _, _, cached in rank.counters.schedulings] == [0, 96, 112]
    assert rank.counters.num_prefilled_tokens == 100 + 4 + 38


def test_the_content_that_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    rank = Rank(RankModel(kv_tokens=160))
    chains = {key: Chain() for key in "abc"}
    for key in "abc":
        rank.submit(call(key, 64, 1, chains[key]), 0.0)
        drain(rank)
    # Ten blocks: c took the two that were free and the last two of a.
    assert [chains[key].num_cached for key in "abc"] == [2, 4, 4]


def test_a_request_larger_than_the_cache_is_refused_and_the_largest_that_fits_is_served() -> None:
    rank = Rank(RankModel(kv_tokens=160))
    with pytest.raises(RequestTooLargeError, match="161 tokens, the KV cache holds 160"):
        rank.submit(call("large", 150, 11), 0.0)
    assert rank.ready_s == math.inf
    rank.submit(call("fits", 150, 10), 0.0)
    assert [key for key, _ in drain(rank)] == ["fits"]


def test_preempted_work_is_computed_again_and_counted() -> None:
    rank = Rank(RankModel(kv_tokens=160, block_tokens=16))
    rank.submit(call("first", 64, 60), 0.0)
    rank.submit(call("second", 64, 60), 0.0)
    done = drain(rank)
    counters = rank.counters
    assert [key for key, _ in done] == ["first", "second"]
    assert counters.num_preemptions == 1
    assert counters.num_generated_tokens == 120
    # The second one lost its place with 80 tokens computed and one more sampled; the first one needed eight of ten
    # blocks, so that two were left of it.
    assert counters.num_recomputed_tokens == 81 - 32
    assert counters.num_prefilled_tokens == 128 + counters.num_recomputed_tokens
    assert counters.num_prompt_tokens == 128
    assert counters.num_cached_tokens == 0


def test_preemption_takes_longer_than_the_same_work_in_a_large_cache() -> None:
    times = []
    for kv_tokens in (160, 1600):
        rank = Rank(RankModel(kv_tokens=kv_tokens))
        for key in ("first", "second"):
            rank.submit(call(key, 64, 60), 0.0)
        times.append(max(at_s for _, at_s in drain(rank)))
    assert times[0] > 1.5 * times[1]


def test_no_more_requests_run_than_sequences_are_allowed() -> None:
    rank = Rank(RankModel(kv_tokens=16_000, max_num_seqs=3))
    for index in range(5):
        rank.submit(call(str(index), 16, 8), 0.0)
    rank.run(0.0)
    assert (rank.num_running, rank.num_waiting) == (3, 2)
    assert len(drain(rank)) == 5
