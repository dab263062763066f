"""The router's application with an engine that says what it is told, in this process or behind an HTTP server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tide_trainer import types
from tide_trainer.images import ImageStore
from tide_trainer.router.app import RouterApp
from tide_trainer.router.calls import Calls
from tide_trainer.router.control import Control
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.state import Limits
from tide_trainer.segments import read_segment


@dataclass
class ScriptedEngine:
    """Answers with what `say` gives for a prompt, and remembers what it was sent and sampled."""

    say: Callable[[list[int]], Any]
    sent: list[list[int]] = field(default_factory=list)
    images: list[tuple[types.ImageSpan, ...]] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[types.Sampling] = field(default_factory=list)
    closed: bool = False
    aborted: list[str] = field(default_factory=list)
    on_abort: Callable[[str], Any] = lambda _: None

    async def abort(self, request_ids, *, timeout_s=None) -> int:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.on_abort(request_id)
        return len(request_ids)

    async def generate(
        self, prompt_ids, sampling, *, request_id=None, priority=0, timeout_s=None, images=()
    ) -> types.Completion:
        self.sent.append(list(prompt_ids))
        self.images.append(tuple(images))
        self.samplings.append(sampling)
        said = self.say(prompt_ids)
        said = await said if asyncio.iscoroutine(said) else said
        if isinstance(said, types.Completion):
            return said
        ids = tuple(said)
        self.sampled.append(ids)
        return types.Completion(ids, tuple(-0.25 for _ in ids), 0, "stop", version=5)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Router:
    """The router's parts in one process, with a main process that grants what `grants` says."""

    renderer: Renderer
    limits: Limits = field(default_factory=lambda: Limits(hold_timeout_s=20.0))
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    auto_rank: str | None = "r0"
    images: ImageStore | None = None

    def __post_init__(self) -> None:
        self.calls = Calls(self.renderer, self.notify, self.limits, "policy", self.images)
        self.engines: dict[str, ScriptedEngine] = {}
        self.control = Control(
            self.renderer, self.calls, self.limits, lambda: 0.0, lambda url, token: self.engines[url]
        )
        self.app = RouterApp(self.control, self.calls, self.renderer, self.notify, self.limits, "policy")

    def notify(self, name: str, payload: dict[str, Any]) -> None:
        json.dumps(payload)
        self.events.append((name, payload))
        if name == "call" and self.auto_rank is not None:
            asyncio.get_running_loop().call_soon(self.grant, payload["call"])

    def grant(self, call: str, rank: str | None = None) -> None:
        self.control.grant({"call": call, "rank": rank or self.auto_rank, "version": 5})

    def engine(self, say: Callable[[list[int]], Any], rank: str = "r0") -> ScriptedEngine:
        self.engines[rank] = ScriptedEngine(say)
        self.control.rank({"rank": rank, "url": rank})
        return self.engines[rank]

    def open(
        self, session: str = "s", max_context_tokens: int = 2000, max_new_tokens: int = 16, kind: str = "train"
    ) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "kind": kind}
        data = {"session": session, "api_key": "key-of-" + session, "sampling": sampling}
        self.control.open(data | {"max_context_tokens": max_context_tokens})

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    async def call(self, method: str, path: str, body: Any = None, *, key: str = "key-of-s", gone=None, **headers: str):
        """One ASGI request; `gone` is an event that stands for the client's going away."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in pairs.items()],
        }
        requests = iter([{"type": "http.request", "body": raw, "more_body": False}])
        sent: list[Any] = []

        async def receive():
            for message in requests:
                return message
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(self.app(scope, receive, send), 30)
        if not sent:
            return None, None
        return sent[0]["status"], b"".join(message["body"] for message in sent[1:])

    async def chat(self, messages: list[dict[str, Any]], session: str = "s", gone=None, headers=None, **options: Any):
        body = {"model": "policy", "messages": messages, **options}
        path = f"/sessions/{session}/v1/chat/completions"
        status, data = await self.call("POST", path, body, key="key-of-" + session, gone=gone, **(headers or {}))
        return status, None if data is None else json.loads(data)


class ServedRouter(Router):
    """The same behind a real HTTP server on the loopback address."""

    async def start(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self.app, http="httptools", ws="none", lifespan="off", log_config=None)
        self.server = uvicorn.Server(config)
        self.serving = asyncio.create_task(self.server._serve([listener]))

    async def stop(self) -> None:
        self.app.close()
        self.server.should_exit = True
        await asyncio.wait_for(self.serving, 10)

    def base_url(self, session: str = "s") -> str:
        return f"{self.url}/sessions/{session}/v1"

    def says(self, *texts: str) -> ScriptedEngine:
        """An engine that says these, one after the other, the last one again and again."""
        left = [[*self.renderer.encode_after(text), *self.renderer.stop_token_ids] for text in texts]
        engine = self.engines.get("r0") or self.engine(lambda _: [])
        engine.say = lambda _: left.pop(0) if len(left) > 1 else left[0]
        return engine

    def grant_all(self) -> None:
        """Grant what waits, and what asks from now on."""
        self.auto_rank = "r0"
        for call in list(self.calls._held):
            self.grant(call)

    async def until(self, name: str, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.names().count(name) < count:  # noqa: ASYNC110 - the router sets no event for a test
                await asyncio.sleep(0.005)

    def captured(self, session: str = "s") -> tuple[list[types.Segment], dict[str, Any]]:
        """What a session captured, and its account."""
        account = self.control.close({"session": session})
        return [read_segment(data) for data in account["segments"]], account
