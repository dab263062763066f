"""The remote runtime on the contract's bench: the servers are somebody else's, here the bench's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from remote_peer import ScriptedPeer, spec_of
from runtime_bench import RuntimeBench

from tide_gateway.runtimes import Server
from tide_gateway.runtimes.remote import RemoteRuntime
from tide_gateway.specs import EnvironmentSpec

CAPACITY = 8


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[RuntimeBench]:
    peers: dict[str, ScriptedPeer] = {}
    made: list[RemoteRuntime] = []
    for _ in range(RuntimeBench.num_servers):
        peer = ScriptedPeer(CAPACITY)
        await peer.go_on()
        peers[f"http://127.0.0.1:{peer.port}"] = peer

    def again() -> RemoteRuntime:
        made.append(RemoteRuntime(refused_s=0.5))
        return made[-1]

    async def kill(server: Server) -> None:
        peers[server.place.url].kill()

    def spec(healthy: bool = True) -> EnvironmentSpec:
        # Port 1 of this machine: nobody listens there.
        return spec_of(*(peers if healthy else ["http://127.0.0.1:1"]), probe_interval_s=0.2)

    try:
        yield RuntimeBench(again(), spec, again, kill, owned=False, freezes=False)
    finally:
        await asyncio.gather(*(runtime.close() for runtime in made))
        for peer in peers.values():
            peer.kill()
