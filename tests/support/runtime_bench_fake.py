"""The fake runtime on the contract's bench."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from runtime_bench import RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.runtimes.fake import FakeRuntime, World
from tide_gateway.specs import EnvironmentSpec


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[RuntimeBench]:
    world = World()
    world.stuck.add("stuck")

    async def kill(server: Server) -> None:
        world.kill(server.name)

    def spec(healthy: bool = True) -> EnvironmentSpec:
        return EnvironmentSpec(name="scripted" if healthy else "stuck", runtime="fake", capacity=8)

    yield RuntimeBench(FakeRuntime(world), spec, lambda: FakeRuntime(world), kill)
