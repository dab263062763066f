"""The docker runtime on the contract's bench."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from docker_engine import docker_spec, shared_engine
from runtime_bench import RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.runtimes.docker import DockerRuntime
from tide_gateway.specs import EnvironmentSpec


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[RuntimeBench]:
    engine = await asyncio.to_thread(shared_engine)
    run_dir = Path(tempfile.mkdtemp(prefix="tide-bench-"))
    deployment = f"bench-{secrets.token_hex(4)}"
    made: list[DockerRuntime] = []

    def spec(healthy: bool = True, **changes: Any) -> EnvironmentSpec:
        if not healthy:
            changes["command"] = ("python3", "-c", "import time; time.sleep(300)")
        return docker_spec(engine, **changes)

    def again() -> DockerRuntime:
        made.append(DockerRuntime(deployment, folder / "logs", run_dir, {}, [spec()]))
        return made[-1]

    async def kill(server: Server) -> None:
        await asyncio.to_thread(engine.client().kill, server.place.handle, "SIGKILL")

    try:
        yield RuntimeBench(again(), spec, again, kill, num_servers=8)
    finally:
        last = again()
        names = await last.survey()
        await asyncio.gather(*(last.destroy(name, None, None, 0.0) for name in names))
        for runtime in made:
            await runtime.close()
        shutil.rmtree(run_dir, ignore_errors=True)
