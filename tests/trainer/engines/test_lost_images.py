"""An image that is lost between a call's acceptance and the vision tower's pass: that call fails, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from pictures import picture, prompt_with, vision_model

from tide_trainer import types
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.errors import EngineRefused
from tide_trainer.images import ImageStore, ImageTokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]
LONG = types.Sampling(temperature=1.0, max_new_tokens=700)
SHORT = types.Sampling(temperature=1.0, max_new_tokens=6)


async def test_an_accepted_call_whose_image_is_lost_fails_alone(tmp_path, session_processes):
    model, store = vision_model(tmp_path / "model"), ImageStore(tmp_path / "images")
    settings = VllmSettings(
        str(model), kv_tokens=4096, max_running=1, image_folder=str(store.folder), max_image_bytes=0
    )
    engine = VllmEngine(types.RankId("losing", 0), settings, session_processes, tmp_path)
    await engine.start()
    try:
        tokens = ImageTokens.read(model)
        prompts = [prompt_with(store, tokens, [picture(seed)], seed=seed) for seed in range(4)]
        # One at a time: while the first is sampled, the others are accepted and wait.
        calls = [
            asyncio.create_task(engine.generate(ids, LONG if number == 0 else SHORT, images=spans))
            for number, (ids, spans) in enumerate(prompts)
        ]
        async with asyncio.timeout(60):
            while (await engine.stats()).num_waiting < 3:  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(0.01)
        gone, other = (store.path(prompts[number][1][0].digest) for number in (1, 2))
        gone.unlink()
        other.write_bytes(picture(9))
        done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
        assert len(done[0].token_ids) == 700, done[0]
        assert isinstance(done[1], EngineRefused), done[1]
        assert (done[1].reason, "is not in" in str(done[1])) == ("invalid", True)
        assert isinstance(done[2], EngineRefused), done[2]
        assert "does not hold the bytes of its name" in str(done[2])
        assert len(done[3].token_ids) == 6, done[3]
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)
        # The image comes again, and so does the call.
        store.put(picture(1))
        ids, spans = prompts[1]
        assert len((await engine.generate(ids, SHORT, images=spans)).token_ids) == 6
    finally:
        await engine.stop()
