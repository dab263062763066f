"""The docker runtime on the contract's bench."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from docker_engine import docker_runtimes, docker_spec, shared_engine
from runtime_bench import RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.specs import EnvironmentSpec


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[RuntimeBench]:
    engine = shared_engine()

    def spec(healthy: bool = True, **changes: Any) -> EnvironmentSpec:
        if not healthy:
            changes["command"] = ("python3", "-c", "import time; time.sleep(300)")
        return docker_spec(engine, **changes)

    async def kill(server: Server) -> None:
        await asyncio.to_thread(engine.client().kill, server.place.handle, "SIGKILL")

    async with docker_runtimes(folder) as again:
        yield RuntimeBench(again(), spec, again, kill, num_servers=8)
