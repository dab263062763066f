"""Shared pieces: a manual clock, ASGI apps called without a network, environments, and raw socket servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tide_sdk import codec
from tide_sdk.environment import EndInfo, Environment, Start, StartInfo, Step
from tide_sdk.http_parse import Response
from tide_sdk.wire import Message


class ManualClock:
    """Seconds that move only when a test says so; its `sleep` moves them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


class AsgiClient:
    """Calls an ASGI app in this process, with the interface of `LeanClient`."""

    def __init__(self, app) -> None:
        self.app = app
        self.calls: list[tuple[str, str, bytes | None]] = []

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False) -> Response:
        self.calls.append((method, path, body))
        sent = {"content-type": "application/json", **(headers or {})}
        raw = [(name.lower().encode(), value.encode()) for name, value in sent.items()]
        route, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": route, "query_string": query.encode(), "headers": raw}
        events: list[dict] = []

        async def receive():
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(event):
            events.append(event)

        await self.app(scope, receive, send)
        answer = {name.decode(): value.decode() for name, value in events[0]["headers"]}
        return Response(events[0]["status"], answer, b"".join(event.get("body", b"") for event in events[1:]))

    async def call(self, method: str, path: str, payload=None, **options):
        """(status, parsed body)."""
        response = await self.request(method, path, None if payload is None else codec.dumps(payload), **options)
        return response.status, codec.loads(response.body)

    async def aclose(self) -> None:
        pass


class Guess(Environment):
    """Reward 1 and the end on a hit, cut off after `max_turns`."""

    name = "guess"
    blocking = False
    capacity = 4
    max_turns = 3

    def start(self, task: StartInfo) -> Start:
        self.secret = str(random.Random(task.seed).randint(1, 9))
        self.taken: list[str] = []
        return Start("Guess my number.", tools=[{"type": "function", "function": {"name": "guess"}}])

    def step(self, message: Message) -> Step:
        self.taken.append(message.text)
        hit = message.text == self.secret
        last = not hit and len(self.taken) >= self.max_turns
        info = {"taken": list(self.taken)}
        return Step("Right." if hit else "No.", reward=float(hit), terminated=hit, truncated=last, info=info)


class Gated(Environment):
    """Each step waits for the test; everything that is called is written down."""

    name = "gated"
    gate: asyncio.Event
    log: list[str]

    async def start(self, task: StartInfo) -> Start:
        self.log.append("start")
        return Start([{"role": "system", "content": "Wait."}, "Go."])

    async def step(self, message: Message) -> Step:
        self.log.append(f"step {message.text}")
        await self.gate.wait()
        return Step("Done.", reward=0.5)

    def end(self, reason: str | None) -> EndInfo:
        self.log.append(f"end {reason}")
        return EndInfo(metrics={"calls": len(self.log)})

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def asgi() -> Callable[..., AsgiClient]:
    return AsgiClient


@pytest.fixture
def guess_class() -> type[Guess]:
    return Guess


@pytest.fixture
def gated_class() -> type[Gated]:
    """A fresh class with its own gate and log."""
    return type("MyGated", (Gated,), {"gate": asyncio.Event(), "log": []})


@pytest.fixture
def socket_server():
    """`async with socket_server(handler) as url`: a server whose every byte the test decides."""

    @asynccontextmanager
    async def serve(handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]):
        async def guarded(reader, writer):
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(guarded, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    return serve


@pytest.fixture
def read_request():
    async def read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """(head, body) of one request."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return head, await reader.readexactly(length)

    return read


@pytest.fixture
def uvicorn_server():
    """`async with uvicorn_server(app) as url`: a real server on this event loop."""

    @asynccontextmanager
    async def serve(app, **options):
        import uvicorn

        class Quiet(uvicorn.Server):
            def capture_signals(self):  # the test runner keeps its own
                from contextlib import nullcontext

                return nullcontext()

        server = Quiet(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1, **options))
        running = asyncio.create_task(server.serve())
        while not server.started:
            assert not running.done()
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            await running

    return serve
