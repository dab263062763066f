"""A small OpenAI-compatible server over real HTTP, in a thread of its own: says what it is told to, counts calls."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import uvicorn


@dataclass
class OpenAIServer:
    """What it does can be changed while it runs.

    Attributes:
        say: the assistant's words for a conversation, or a status code to fail with.
        delay_s: seconds until it answers.
        models: what it lists.
        key: the bearer token that it wants, "" for none.
    """

    say: Callable[[list[dict[str, Any]]], str | int]
    delay_s: float = 0.0
    models: tuple[str, ...] = ("small",)
    key: str = ""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while (event := await receive()).get("more_body"):
            body += event["body"]
        body += event.get("body", b"")
        status, answer = await self._answer(scope, body)
        raw = json.dumps(answer).encode()
        head = [(b"content-length", b"%d" % len(raw)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": raw})

    async def _answer(self, scope, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.key and dict(scope["headers"]).get(b"authorization") != f"Bearer {self.key}".encode():
            return 401, {"error": {"message": "no such key"}}
        if scope["path"] == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        request = json.loads(body)
        self.bodies.append(request)
        await asyncio.sleep(self.delay_s)
        said = self.say(request["messages"])
        if isinstance(said, int):
            return said, {"error": {"message": "told to fail"}}
        message = {"role": "assistant", "content": said}
        return 200, {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }


class _Quiet(uvicorn.Server):
    def capture_signals(self):  # the test runner keeps its own
        return nullcontext()


@contextmanager
def serving(say: Callable[[list[dict[str, Any]]], str | int], **options: Any) -> Iterator[OpenAIServer]:
    """Serve until the end of the block; `url` is the base URL."""
    app = OpenAIServer(say, **options)
    server = _Quiet(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    up = threading.Event()
    began = server.startup

    async def startup(sockets=None):
        await began(sockets)
        up.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert up.wait(30)
    app.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield app
    finally:
        server.should_exit = True
        thread.join(10)


def number_of_answers(messages: list[dict[str, Any]]) -> str:
    """Which answer in its conversation this is, from 1: finds every number in the end."""
    return str(1 + sum(message["role"] == "assistant" for message in messages))
