"""One pull at a time, and images that fit: against a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker_images import Images, PullFailed
from tide_gateway.runtimes.docker_sdk import EngineRefused
from tide_gateway.specs import DockerOptions


class PullingEngine:
    """An engine of amd64 whose registry has what `registry` names."""

    def __init__(self, url: str = "unix:///one", registry: dict[str, str] | None = None) -> None:
        self.url = url
        self.images: dict[str, str] = {}
        self.registry = {"maze": "amd64"} if registry is None else registry
        self.num_pulls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def platform(self) -> str:
        return "linux/amd64"

    async def call(self, method: str, image: str) -> dict[str, Any]:
        assert method == "inspect_image"
        await asyncio.sleep(0)
        if image not in self.images:
            raise EngineRefused(404, "no such image")
        return {"Os": "linux", "Architecture": self.images[image]}

    async def run_long(self, function, limit_s: float) -> Any:
        await self.gate.wait()
        return function(self)

    def pull(self, image: str, **_options: Any):
        self.num_pulls += 1
        if image not in self.registry:
            yield {"error": "manifest unknown"}
            return
        yield {"status": "Pulling"}
        self.images[image] = self.registry[image]


def options_of(**changes: Any) -> DockerOptions:
    return DockerOptions.model_validate({"image": "maze"} | changes)


@pytest.mark.parametrize("pull", ["missing", "always"])
async def test_g20_a_thousand_launches_at_once_pull_once(pull):
    engine, images = PullingEngine(), Images()
    await asyncio.gather(*(images.ensure(engine, options_of(pull=pull)) for _ in range(1000)))
    assert engine.num_pulls == 1


async def test_engines_pull_apart():
    engines, images = [PullingEngine("unix:///one"), PullingEngine("unix:///two")], Images()
    await asyncio.gather(*(images.ensure(engine, options_of()) for engine in engines for _ in range(5)))
    assert [engine.num_pulls for engine in engines] == [1, 1]


async def test_an_image_that_is_there_is_not_pulled():
    engine, images = PullingEngine(), Images()
    engine.images["maze"] = "amd64"
    await images.ensure(engine, options_of())
    assert engine.num_pulls == 0
    await images.ensure(engine, options_of(pull="always"))
    assert engine.num_pulls == 1


async def test_a_failed_pull_is_told_to_all_and_tried_again_later():
    engine, images = PullingEngine(registry={}), Images()
    waiting = [images.ensure(engine, options_of()) for _ in range(8)]
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, PullFailed) and "manifest unknown" in str(error) for error in errors)
    assert engine.num_pulls == 1
    engine.registry["maze"] = "amd64"
    await images.ensure(engine, options_of())


async def test_one_who_gives_up_waiting_takes_the_pull_from_nobody():
    engine, images = PullingEngine(), Images()
    engine.gate.clear()
    first, second = (asyncio.create_task(images.ensure(engine, options_of())) for _ in range(2))
    for _ in range(10):
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    engine.gate.set()
    await second
    assert engine.num_pulls == 1


async def test_an_image_that_may_not_be_pulled_is_named():
    with pytest.raises(LaunchFailed, match="'maze' is not on the engine unix:///one; build or pull it there"):
        await Images().ensure(PullingEngine(), options_of(pull="never"))


async def test_g29_an_image_of_another_architecture_is_refused_and_both_are_named():
    engine = PullingEngine(registry={"maze": "arm64"})
    with pytest.raises(LaunchFailed, match=r"built for linux/arm64, but the engine .* wants linux/amd64"):
        await Images().ensure(engine, options_of())


async def test_an_operator_may_ask_for_another_architecture():
    engine, images = PullingEngine(registry={"maze": "arm64"}), Images()
    engine.images["maze"] = "amd64"
    await images.ensure(engine, options_of(platform="linux/arm64/v8"))
    assert engine.num_pulls == 1, "the one that was there does not fit"
