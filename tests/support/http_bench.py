"""A test bench's service behind a real socket, called as any client calls it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import uvicorn

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http import LeanClient

CALL_LIMIT_S = 30.0


class HttpBench:
    """The five calls of one bench over HTTP.

    Args:
        bench: an opened bench of tests/gateway/conftest.py.
        path: of the unix socket.
    """

    def __init__(self, bench: Any, path: Path) -> None:
        self.bench = bench
        config = uvicorn.Config(
            GatewayApp(bench.service, Owners({}), None),
            uds=str(path),
            lifespan="off",
            log_config=None,
            http="httptools",
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._client = LeanClient(f"unix:{path}", timeout_s=CALL_LIMIT_S)

    async def open(self) -> HttpBench:
        """Listen."""
        await self._server.startup()
        return self

    async def close(self) -> None:
        """Stop to listen; calls in flight are cut off."""
        await self._client.aclose()
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def start(self, key: str, attempt: int = 0, **script: Any) -> dict:
        return await self._call("/start", {"environment": "scripted", "key": key, "attempt": attempt, "task": script})

    async def act(self, task_id: str, turn: int, text: str = "go") -> dict:
        message = {"role": "assistant", "content": text}
        return await self._call("/observation", {"task_id": task_id, "turn": turn, "message": message})

    async def pause(self, task_id: str, epoch: int) -> dict:
        return await self._call("/pause", {"task_id": task_id, "epoch": epoch})

    async def resume(self, task_id: str, epoch: int) -> dict:
        return await self._call("/resume", {"task_id": task_id, "epoch": epoch})

    async def end(self, task_id: str) -> dict:
        return await self._call("/end", {"task_id": task_id})

    async def _call(self, path: str, body: dict[str, Any]) -> dict:
        response = await self._client.request("POST", path, codec.dumps(body))
        answer = codec.loads(response.body)
        if response.status >= 400:
            raise TideError.from_problem(response.status, answer)
        return answer


async def opened(bench: Any, folder: Path, number: int) -> HttpBench:
    """The bench behind a socket of its own."""
    async with asyncio.timeout(CALL_LIMIT_S):
        return await HttpBench(bench, folder / f"{number}.sock").open()
