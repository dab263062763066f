"""What every rollout engine does, over the real server process: one suite for the fake and for vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import pytest

from tide_trainer import types
from tide_trainer.errors import EngineFailed, EngineRefused, WeightsDiffer

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = types.Sampling(temperature=0.0, max_new_tokens=4)
SAMPLED = types.Sampling(temperature=1.0, max_new_tokens=6)
ENDLESS = types.Sampling(temperature=1.0, max_new_tokens=900)


def prompt(seed: int, num_tokens: int = 70) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in range(num_tokens)]


async def test_it_says_what_it_is_and_starts_once(case):
    assert (case.info.rank, case.info.kv_tokens, case.info.block_tokens) == (case.engine.rank, 4096, 32)
    assert case.info.max_context_tokens == 1024
    with pytest.raises(EngineFailed, match="started already"):
        await case.engine.start()


async def test_greedy_tokens_and_logprobs_are_the_models(case):
    ids = prompt(1)
    done = await case.engine.generate(ids, GREEDY)
    assert list(done.token_ids) == case.greedy(ids, 4)
    assert done.logprobs == pytest.approx(case.logprobs(ids, done.token_ids), abs=2e-4)
    assert (done.finish_reason, done.version) == ("length", case.version)


async def test_logprobs_of_sampled_tokens_are_those_of_the_sampling_distribution(case):
    ids = prompt(2)
    calls = [case.engine.generate(ids, SAMPLED) for _ in range(8)]
    answers = await asyncio.gather(*calls)
    assert len({done.token_ids for done in answers}) > 1
    for done in answers:
        assert done.logprobs == pytest.approx(case.logprobs(ids, done.token_ids), abs=2e-4)


async def test_another_temperature_changes_the_tokens_and_not_the_meaning_of_logprobs(case):
    ids = prompt(3)
    done = await case.engine.generate(ids, types.Sampling(temperature=0.5, max_new_tokens=6))
    assert done.logprobs == pytest.approx(case.logprobs(ids, done.token_ids), abs=2e-4)


async def test_a_stop_id_ends_the_completion_and_is_part_of_it(case):
    ids = prompt(4)
    stop_id = case.greedy(ids, 2)[1]
    done = await case.engine.generate(ids, dataclasses.replace(GREEDY, max_new_tokens=50, stop_token_ids=(stop_id,)))
    assert done.token_ids[-1] == stop_id
    assert done.token_ids.count(stop_id) == 1
    assert len(done.logprobs) == len(done.token_ids)
    assert done.finish_reason == "stop"


async def test_no_id_stops_unless_it_is_named(case):
    done = await case.engine.generate(prompt(5), types.Sampling(temperature=1.0, max_new_tokens=400))
    assert (len(done.token_ids), done.finish_reason) == (400, "length")


async def test_whole_blocks_of_an_earlier_prompt_come_from_the_cache(case):
    ids = prompt(6)
    assert (await case.engine.generate(ids, GREEDY)).cached_tokens == 0
    assert (await case.engine.generate(ids, GREEDY)).cached_tokens == 64
    assert (await case.engine.generate(ids[:40] + prompt(7, 40), GREEDY)).cached_tokens == 32
    # The next turn's prompt begins with this turn's prompt and completion.
    longer = ids + list((await case.engine.generate(ids, dataclasses.replace(GREEDY, max_new_tokens=40))).token_ids)
    assert (await case.engine.generate([*longer, 5], GREEDY)).cached_tokens == 96


async def test_the_last_prompt_token_is_always_computed(case):
    ids = prompt(8, 64)
    await case.engine.generate(ids, GREEDY)
    assert (await case.engine.generate(ids, GREEDY)).cached_tokens == 32


async def test_stats_add_up(case, eventually):
    before = await case.engine.stats()
    answers = await asyncio.gather(*(case.engine.generate(prompt(seed), SAMPLED) for seed in range(100, 130)))
    after = await case.engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 30 * 70
    assert after.generated_tokens - before.generated_tokens == 30 * 6
    assert after.cached_tokens - before.cached_tokens == sum(done.cached_tokens for done in answers)
    assert after.version == case.version

    async def empty() -> bool:
        stats = await case.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)

    await eventually(empty)


@pytest.mark.parametrize(
    ("ids", "sampling", "field"),
    [
        ([], GREEDY, "prompt_ids"),
        ([3] * 1021, GREEDY, "max_context_tokens"),
        ([3, -1], GREEDY, "prompt_ids"),
        ([3, 200], GREEDY, "vocabulary"),
        ([3], types.Sampling(max_new_tokens=0), "max_new_tokens"),
        ([3], types.Sampling(temperature=-1.0), "temperature"),
    ],
)
async def test_a_bad_call_is_refused_by_name_and_harms_nothing(case, ids, sampling, field):
    with pytest.raises(EngineRefused, match=field) as caught:
        await case.engine.generate(ids, sampling)
    assert caught.value.reason == "invalid"
    assert len((await case.engine.generate([3], GREEDY)).token_ids) == 4


async def test_a_wrong_token_is_refused(case):
    client = case.client(token="x" * 20)
    with pytest.raises(EngineRefused) as caught:
        await client.generate([3], GREEDY)
    assert caught.value.reason == "unauthorized"
    await client.aclose()


async def test_a_running_call_is_seen_cannot_be_doubled_holds_off_updates_and_can_be_aborted(case, eventually):
    client = case.client()
    call = asyncio.create_task(client.generate(prompt(9), ENDLESS, request_id="long"))

    async def running() -> bool:
        return (await client.stats()).num_running == 1

    await eventually(running)
    tokens, blocks = (await client.snapshot()).requests["long"]
    assert tokens >= 70
    assert blocks >= 3
    assert (await client.stats()).kv_used_tokens >= 96
    with pytest.raises(EngineRefused) as caught:
        await client.generate([3], GREEDY, request_id="long")
    assert caught.value.reason == "duplicate"
    with pytest.raises(EngineRefused) as caught:
        await case.engine.update_weights(case.update(case.model))
    assert caught.value.reason == "busy"
    assert await client.abort(["long", "unknown"]) == 1
    assert (await call).finish_reason == "abort"
    await client.aclose()


async def test_a_cancelled_or_late_call_frees_its_blocks(case, eventually):
    client = case.client()
    call = asyncio.create_task(client.generate(prompt(10), ENDLESS))

    async def running() -> bool:
        return (await client.stats()).num_running == 1

    async def free() -> bool:
        return (await client.stats()).kv_used_tokens == 0

    await eventually(running)
    call.cancel()
    await eventually(free)
    with pytest.raises(EngineFailed, match="longer than"):
        await client.generate(prompt(11), ENDLESS, timeout_s=0.1)
    await eventually(free)
    await client.aclose()


async def test_an_update_changes_what_is_served_and_no_older_block_is_used(case):
    await case.publish(1 - case.model)
    ids = prompt(12)
    old = await case.engine.generate(ids, GREEDY)
    assert (await case.engine.generate(ids, GREEDY)).cached_tokens == 64
    receipt = await case.publish(1 - case.model)
    assert (receipt.rank, receipt.num_tensors) == (case.engine.rank, len(case.update(0).checksums))
    new = await case.engine.generate(ids, GREEDY)
    assert new.cached_tokens == 0
    assert new.version == old.version + 1 == (await case.engine.stats()).version
    assert list(new.token_ids) == case.greedy(ids, 4) != list(old.token_ids)
    assert new.logprobs == pytest.approx(case.logprobs(ids, new.token_ids), abs=2e-4)


async def test_a_version_that_is_not_newer_is_refused_and_the_present_one_is_served(case):
    await case.publish(1 - case.model)
    for version in (case.version, case.version - 1):
        with pytest.raises(EngineRefused) as caught:
            await case.engine.update_weights(dataclasses.replace(case.update(1 - case.model), version=version))
        assert caught.value.reason == "not_newer"
    ids = prompt(13)
    assert list((await case.engine.generate(ids, GREEDY)).token_ids) == case.greedy(ids, 4)


def _corrupt(update, tmp_path, how):
    sums = dict(update.checksums)
    name = sorted(sums)[-1]
    if how == "checksum":
        sums[name] = "0" * 64
    elif how == "missing":
        sums["model.more.weight"] = "0" * 64
    elif how == "extra":
        del sums[name]
    elif how == "empty":
        sums = {}
    elif how == "no file":
        return dataclasses.replace(update, path=str(tmp_path / "absent"))
    data = bytearray(Path(update.path).read_bytes())
    if how == "cut off":
        data = data[:-8]
    elif how == "one bit":
        data[-3] ^= 1
    elif how == "shape":
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header[name]["shape"] = [*header[name]["shape"], 1]
        head = json.dumps(header).encode()
        data = bytearray(len(head).to_bytes(8, "little") + head + data[8 + size :])
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    return dataclasses.replace(update, path=str(path), checksums=sums)


@pytest.mark.parametrize("how", ["checksum", "missing", "extra", "empty", "no file", "cut off", "one bit", "shape"])
async def test_after_a_bad_update_nothing_is_served_until_a_good_one(case, tmp_path, how):
    bad = _corrupt(case.update(1 - case.model), tmp_path, how)
    with pytest.raises(WeightsDiffer):
        await case.engine.update_weights(bad)
    with pytest.raises(EngineRefused) as caught:
        await case.engine.generate([3], GREEDY)
    assert caught.value.reason == "no_weights"
    client = case.client()
    assert not (await client.health()).serving
    await client.aclose()
    await case.publish(1 - case.model)
    ids = prompt(14)
    assert list((await case.engine.generate(ids, GREEDY)).token_ids) == case.greedy(ids, 4)


async def test_w1_right_after_an_update_no_conversation_finds_anything_of_before_by_the_engine_s_own_counters(case):
    """Six conversations go on across an update: the first call of each is computed in full, the next is not."""
    told = dataclasses.replace(GREEDY, max_new_tokens=40)
    histories = [prompt(200 + seed, 70) for seed in range(6)]

    async def turns() -> tuple[list[int], int, int]:
        """A turn of each conversation: cached tokens of each answer; the counters' cached and prompt tokens."""
        before = await case.engine.stats()
        answers = await asyncio.gather(*(case.engine.generate(ids, told) for ids in histories))
        after = await case.engine.stats()
        for ids, done in zip(histories, answers, strict=True):
            assert done.version == case.version
            ids += [*done.token_ids, 5]
        cached = [done.cached_tokens for done in answers]
        return cached, after.cached_tokens - before.cached_tokens, after.prompt_tokens - before.prompt_tokens

    await turns()
    cached, counted, _ = await turns()
    assert cached == [96] * 6
    assert counted == 6 * 96
    assert (await case.engine.stats()).num_cached_blocks >= 6 * 3
    await case.publish(1 - case.model)
    assert (await case.engine.stats()).num_cached_blocks == 0
    lengths = sum(map(len, histories))
    assert await turns() == ([0] * 6, 0, lengths)
    cached, counted, _ = await turns()
    assert min(cached) >= 128
    assert counted == sum(cached)


async def test_live_numbers_are_prometheus_text_too(case, eventually):
    client = case.client()
    await client.generate(prompt(5), GREEDY)

    async def idle() -> bool:
        return (await client.snapshot()).requests == {}

    await eventually(idle)
    text = await _metrics(client)
    found = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    stats = await client.stats()
    assert int(found["tide_engine_kv_size_tokens"]) == case.info.kv_tokens
    assert int(found["tide_engine_kv_free_tokens"]) == case.info.kv_tokens - stats.kv_used_tokens
    assert int(found["tide_engine_generated_tokens_total"]) == stats.generated_tokens
    assert "# TYPE tide_engine_kv_used_tokens gauge" in text
    await client.aclose()


async def _metrics(client) -> str:
    response = await client._control.request("GET", "/metrics", None)
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.body.decode()
