"""Prompts with images: one suite for the fake engine and for vLLM, and what the trainer makes of vLLM's answers."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pictures import FIRST_WORD, VISION_START, WORDS, picture, prompt_with, vision_model

from tide_trainer import types
from tide_trainer.backends.engine_process import EngineProcess
from tide_trainer.backends.fake_core import FakeSettings
from tide_trainer.backends.fake_engine import FakeEngine
from tide_trainer.backends.fake_training import make_fake_model
from tide_trainer.backends.fsdp import FsdpBackend
from tide_trainer.backends.training_wire import FsdpSettings
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.engine_client import EngineClient
from tide_trainer.errors import EngineRefused
from tide_trainer.images import ImageStore, ImageTokens

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-3
"""`rollout.parity_tolerance` of a run."""
SAMPLED = types.Sampling(temperature=1.0, max_new_tokens=12)


@dataclass
class Seeing:
    """A started engine of a model that takes images."""

    engine: EngineProcess
    url: str
    store: ImageStore
    tokens: ImageTokens
    model: Path

    def client(self) -> EngineClient:
        return EngineClient(self.url, token=self.engine.token, timeout_s=60.0)

    def prompt(self, *seeds: int, **arguments: Any) -> tuple[list[int], tuple[types.ImageSpan, ...]]:
        return prompt_with(self.store, self.tokens, [picture(seed) for seed in seeds], **arguments)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory) -> Path:
    return vision_model(tmp_path_factory.mktemp("seeing"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fake_seeing(tmp_path_factory, session_processes, seeing_model) -> AsyncIterator[Seeing]:
    folder = tmp_path_factory.mktemp("fake-seeing")
    model = Path(shutil.copytree(seeing_model, folder / "model"))
    make_fake_model(model, FIRST_WORD + len(WORDS))
    store = ImageStore(folder / "images")
    settings = FakeSettings(str(model / "model.safetensors"), kv_tokens=4096, image_folder=str(store.folder))
    engine = FakeEngine(types.RankId("fake-seeing", 0), settings, session_processes, folder)
    info = await engine.start()
    yield Seeing(engine, info.url, store, ImageTokens.read(model), model)
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_seeing(tmp_path_factory, session_processes, seeing_model) -> AsyncIterator[Seeing]:
    folder = tmp_path_factory.mktemp("vllm-seeing")
    store = ImageStore(folder / "images")
    settings = VllmSettings(str(seeing_model), kv_tokens=4096, max_running=32, image_folder=str(store.folder))
    engine = VllmEngine(types.RankId("vllm-seeing", 0), settings, session_processes, folder)
    info = await engine.start()
    yield Seeing(engine, info.url, store, ImageTokens.read(seeing_model), seeing_model)
    await engine.stop()


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def seeing(request: pytest.FixtureRequest) -> Seeing:
    return request.getfixturevalue(f"{request.param}_seeing")


async def test_another_image_in_the_same_place_gives_another_answer(seeing):
    client = seeing.client()
    answers = []
    for seed in (1, 2, 1):
        ids, spans = seeing.prompt(seed)
        done = await client.generate(ids, SAMPLED, images=spans, request_id="the same")
        answers.append((done.token_ids, done.logprobs))
    await client.aclose()
    assert answers[0] != answers[1]
    if "fake" in str(seeing.engine.rank):
        assert answers[0] == answers[2]


async def test_the_cache_holds_images_and_never_takes_one_for_another(seeing):
    # 41 ids before the image, 12 of it, then words: blocks of 32.
    ids, spans = seeing.prompt(3, num_words=39)
    assert (spans[0].start, spans[0].num_tokens) == (41, 12)
    first = await seeing.engine.generate(ids, SAMPLED, images=spans)
    assert first.cached_tokens == 0
    # The second turn: the same prompt, the answer, and another image.
    more, later = seeing.prompt(4, num_words=2)
    turn = [*ids, *first.token_ids, *more]
    moved = dataclasses.replace(later[0], start=later[0].start + len(ids) + len(first.token_ids))
    second = await seeing.engine.generate(turn, SAMPLED, images=(*spans, moved))
    assert second.cached_tokens == 96
    assert turn[second.cached_tokens - 1] != seeing.tokens.placeholder_id
    # The same ids with another image: only the block before it.
    other, spans_of_other = seeing.prompt(5, num_words=39)
    assert other == ids
    assert (await seeing.engine.generate(other, SAMPLED, images=spans_of_other)).cached_tokens == 32


async def test_a_placeholder_is_never_sampled(seeing):
    ids, spans = seeing.prompt(6)
    done = await seeing.engine.generate(ids, types.Sampling(temperature=2.0, max_new_tokens=80), images=spans)
    assert len(done.token_ids) == 80
    assert not set(done.token_ids) & set(seeing.tokens.forbidden_ids)
    greedy = await seeing.engine.generate(ids, types.Sampling(temperature=0.0, max_new_tokens=50), images=spans)
    assert not set(greedy.token_ids) & set(seeing.tokens.forbidden_ids)


async def test_what_does_not_fit_is_refused_with_its_place_and_harms_nothing(seeing):
    ids, spans = seeing.prompt(7)
    wide = dataclasses.replace(spans[0], digest=seeing.store.put(picture(7, 200, 200)))
    torn = dataclasses.replace(spans[0], digest=seeing.store.put(picture(8)[:-40]))
    absent = dataclasses.replace(spans[0], digest="f" * 64)
    longer = dataclasses.replace(spans[0], num_tokens=13)
    for images, told in [
        ((wide,), "has 12 placeholder ids, and the model's image processor makes 49 of it"),
        ((torn,), "cannot be decoded"),
        ((absent,), "is not in"),
        ((longer,), "12 placeholder ids stand there"),
        ((), "belongs to no image"),
        ((*spans, spans[0]), "begins before"),
        ((dataclasses.replace(spans[0], digest="../../etc/passwd"),), "SHA-256"),
        ((dataclasses.replace(spans[0], start=-1),), "at -1"),
    ]:
        with pytest.raises(EngineRefused, match=told) as caught:
            await seeing.engine.generate(ids, SAMPLED, images=images)
        assert caught.value.reason == "invalid"
    assert len((await seeing.engine.generate(ids, SAMPLED, images=spans)).token_ids) == 12
    assert (await seeing.engine.stats()).num_running == 0


async def test_images_of_a_wrong_form_are_refused(seeing):
    client = seeing.client()
    for images in ("all of them", [[1, 2]], [[1, True, "a"]], [[1, 2, "a"]] * 99):
        ids, _ = seeing.prompt(9)
        body = {"request_id": "x", "prompt_ids": ids, "temperature": 1.0, "max_new_tokens": 1, "stop_token_ids": []}
        with pytest.raises(EngineRefused, match="images: must"):
            await client._call("POST", "/tide/generate", body | {"priority": 0, "images": images}, None)
    await client.aclose()


async def test_an_engine_without_images_says_so(fake_case):
    with pytest.raises(EngineRefused, match="takes no images"):
        await fake_case.engine.generate([3, 9, 9], SAMPLED, images=(types.ImageSpan(1, 2, "a" * 64),))


async def two_turns(seeing: Seeing, seed: int) -> types.Sequence:
    """An agent's two turns with an image each, as one training sequence."""
    ids, spans = seeing.prompt(seed, seed=seed)
    sampled, logprobs = [False] * len(ids), [0.0] * len(ids)
    for turn in range(2):
        if turn:
            more, later = prompt_with(seeing.store, seeing.tokens, [picture(seed + 50, 60, 150)], seed=seed + 1)
            spans += tuple(dataclasses.replace(span, start=span.start + len(ids)) for span in later)
            ids, sampled = [*ids, *more], [*sampled, *[False] * len(more)]
            logprobs = [*logprobs, *[0.0] * len(more)]
        done = await seeing.engine.generate(ids, SAMPLED, images=spans)
        ids, sampled = [*ids, *done.token_ids], [*sampled, *[True] * len(done.token_ids)]
        logprobs = [*logprobs, *done.logprobs]
    return types.Sequence(tuple(ids), tuple(sampled), tuple(logprobs), 1.0 if seed % 2 else -1.0, spans)


async def parity(seeing: Seeing, backend: FsdpBackend, sequences: list[types.Sequence]) -> float:
    scored = await backend.score([one.token_ids for one in sequences], [one.images for one in sequences])
    return max(
        abs(theirs - ours)
        for one, found in zip(sequences, scored, strict=True)
        for theirs, ours, sampled in zip(one.logprobs, found, one.sampled, strict=True)
        if sampled
    )


@pytest.mark.vllm
async def test_w2_the_trainer_scores_what_vllm_sampled_before_and_after_an_update_in_place(
    vllm_seeing, session_processes, tmp_path, record_property
):
    settings = FsdpSettings(
        str(vllm_seeing.model),
        str(tmp_path / "published"),
        device="cpu",
        learning_rate=0.02,
        image_folder=str(vllm_seeing.store.folder),
    )
    backend = FsdpBackend(settings, session_processes, name="seeing-actor")
    await backend.start()
    sequences = [await two_turns(vllm_seeing, seed) for seed in range(100, 104)]
    before = await parity(vllm_seeing, backend, sequences)
    report = await backend.train(types.TrainBatch("policy", tuple(sequences)))
    stale = await parity(vllm_seeing, backend, sequences)
    update = await backend.publish(1)
    # Words behind the image, so that its placeholders are in whole blocks, which are cached.
    seen = [(ids + [FIRST_WORD] * 70, spans) for ids, spans in (vllm_seeing.prompt(seed, seed=seed) for seed in (1, 2))]
    for ids, spans in seen:
        await vllm_seeing.engine.generate(ids, SAMPLED, images=spans)
    cached = [(await vllm_seeing.engine.generate(ids, SAMPLED, images=spans)).cached_tokens for ids, spans in seen]
    receipt = await vllm_seeing.engine.update_weights(update)
    # W2: neither blocks of an image's placeholders nor what the vision tower made of it outlive the update.
    assert (await vllm_seeing.engine.stats()).num_cached_blocks == 0
    fresh = [(await vllm_seeing.engine.generate(ids, SAMPLED, images=spans)).cached_tokens for ids, spans in seen]
    after = await parity(vllm_seeing, backend, [await two_turns(vllm_seeing, seed) for seed in range(100, 104)])
    await backend.stop()
    record_property("parity", (before, after))
    print("parity", before, after, stale)
    assert report.num_trained_tokens == 4 * 24
    assert report.metrics["logprob_gap_max"] < TOLERANCE
    assert receipt.num_tensors == len(update.checksums)
    assert any("visual" in name for name in update.checksums)
    assert (min(cached) >= 64, fresh) == (True, [0, 0])
    assert before < TOLERANCE
    assert after < TOLERANCE
    # The update moved the model: only new weights explain the agreement after it.
    assert stale > 10 * TOLERANCE


@pytest.mark.vllm
async def test_vllm_sees_the_ids_that_were_sent(vllm_seeing):
    ids, spans = vllm_seeing.prompt(11)
    before = await vllm_seeing.engine.stats()
    await vllm_seeing.engine.generate(ids, SAMPLED, images=spans)
    assert (await vllm_seeing.engine.stats()).prompt_tokens - before.prompt_tokens == len(ids)
    assert ids.index(VISION_START) + 1 == spans[0].start
