"""The Ray runtime on the contract's bench."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ray_cluster import COMMAND, CPUS, environ, ray_spec, shared_cluster, told_by
from runtime_bench import RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.runtimes.ray_runtime import RayRuntime
from tide_gateway.specs import EnvironmentSpec


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[RuntimeBench]:
    address = (await asyncio.to_thread(shared_cluster)).address
    deployment = f"bench-{secrets.token_hex(4)}"
    made: list[RayRuntime] = []

    def again() -> RayRuntime:
        made.append(RayRuntime(deployment, folder / "logs", environ(), [address]))
        return made[-1]

    async def kill(server: Server) -> None:
        os.kill(told_by(server)["pid"], signal.SIGKILL)

    def spec(healthy: bool = True) -> EnvironmentSpec:
        silent = (sys.executable, "-c", "import time; time.sleep(300) # {port}")
        return ray_spec(address, *(COMMAND if healthy else silent))

    try:
        yield RuntimeBench(again(), spec, again, kill, freezes=False, num_servers=CPUS)
    finally:
        # The last one is open: a test that closes one goes on with another.
        names = await made[-1].survey()
        await asyncio.gather(*(made[-1].destroy(name, None, None, 0.0) for name in names))
        await asyncio.gather(*(runtime.close() for runtime in made))
