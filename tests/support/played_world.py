"""A gateway and a router in this process, as an agent worker sees them, whose tasks last three turns."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from tide_sdk import asgi, codec

CLOCKS = {
    name: {"limit_s": 9, "consumed_s": 0, "remaining_s": 9} for name in ("start", "idle", "turn", "active", "end")
}
LIMITS = dict.fromkeys(CLOCKS, 9)


class PlayedWorld:
    """Gateway and router behind one port: three turns to a task, reward 1."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []
        self.generated: list[tuple[str, str]] = []
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.silent: asyncio.Event | None = None

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        body = asgi.parse_json(await asgi.read_body(scope, receive, 1 << 20))
        if self.silent is not None:
            await self.silent.wait()
        if path == "/start":
            self.started.append(body)
            answer = {"task_id": f"t-{body['key']}", "turn": 0, "messages": [{"role": "user", "content": "you"}]}
            answer |= {"tools": [], "limits": LIMITS, "clocks": CLOCKS}
        elif path == "/observation":
            turn = body["turn"] + 1
            answer = {"turn": turn, "messages": [{"role": "user", "content": "yes"}], "reward": 0.0, "info": {}}
            answer |= {"terminated": turn == 3, "truncated": False, "clocks": CLOCKS}
        elif path == "/end":
            self.ended.append(body)
            answer = {"reward": 1.0, "metrics": {"steps": 3}, "turns": 3, "clocks": CLOCKS}
            answer |= {"outcome": {"kind": "completed"}}
        elif path == "/footprints":
            self.reports.append((dict(scope["headers"])[b"authorization"].decode(), body[0]))
            answer = {"accepted": 1, "refused": []}
        else:
            key = dict(scope["headers"])[b"authorization"].decode()
            self.generated.append((path, key))
            message = {"role": "assistant", "content": "go"}
            answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {}}
        await asgi.send_json(send, 201 if path == "/start" else 200, codec.dumps(answer))

    async def start(self) -> str:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.server = uvicorn.Server(uvicorn.Config(self, lifespan="off", log_level="warning", ws="none"))
        self.task = asyncio.create_task(self.server._serve([listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.task
