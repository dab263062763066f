"""The process runtime on the contract's bench."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runtime_bench import SCRIPTED_SERVER, RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.runtimes.process import MARK, ProcessRuntime
from tide_gateway.specs import EnvironmentSpec

COMMAND = (sys.executable, SCRIPTED_SERVER, "--uds", "{uds}", "--capacity", "{capacity}")


def process_spec(*command: str, **options: Any) -> EnvironmentSpec:
    values = {"name": "scripted", "command": command or COMMAND, "capacity": 8} | options
    return EnvironmentSpec.model_validate(values)


@asynccontextmanager
async def bench(folder: Path, outlive_s: float = 30.0) -> AsyncIterator[RuntimeBench]:
    run_dir = Path(tempfile.mkdtemp(prefix="tide-bench-"))
    deployment = f"bench-{secrets.token_hex(4)}"
    made: list[ProcessRuntime] = []

    def again() -> ProcessRuntime:
        made.append(ProcessRuntime(os.environ, folder / "logs", deployment, run_dir, outlive_s))
        return made[-1]

    async def kill(server: Server) -> None:
        os.kill(server.place.pid, signal.SIGKILL)

    def spec(healthy: bool = True) -> EnvironmentSpec:
        return process_spec() if healthy else process_spec(sys.executable, "-c", "import time; time.sleep(300) # {uds}")

    try:
        yield RuntimeBench(again(), spec, again, kill)
    finally:
        for name in await made[0].survey():
            await made[0].destroy(name, None, None, 0.0)
        for runtime in made:
            await runtime.close()
        shutil.rmtree(run_dir, ignore_errors=True)


def marked(mark: str) -> list[int]:
    """Processes that carry an instance's mark, `deployment/name`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in variables:
                found.append(int(entry.name))
    return found
