"""A server with the gateway's guarded protocol, and callers that send it any bytes at any pace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn

from tide_gateway.connection_limits import ConnectionLimits
from tide_gateway.connections import guarded_protocol


@dataclass
class SlowApp:
    """Reads each body and answers with its length; the test may hold it back, or let it answer at once."""

    answers_first: bool = False
    bodies: list[bytes] = field(default_factory=list)
    scopes: list[dict] = field(default_factory=list)
    gone: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        await self.gate.wait()
        body, more = b"", not self.answers_first
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                self.gone += 1
                return
            body += event["body"]
            more = event.get("more_body", False)
        self.bodies.append(body)
        text = str(len(body)).encode()
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@dataclass
class Peer:
    """The caller's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        (length,) = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        return int(head.split(b" ", 2)[1]), await asyncio.wait_for(self.reader.readexactly(length), 10)

    async def problem(self) -> tuple[int, str]:
        status, body = await self.answer()
        problem = json.loads(body)
        assert problem["status"] == status
        assert problem["detail"]
        await self.closed()
        return status, problem["code"]

    async def closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(self.reader.read(), 10) == b""


@dataclass
class RawSite:
    app: SlowApp
    port: int
    server: uvicorn.Server
    peers: list[Peer] = field(default_factory=list)

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        self.peers.append(peer)
        return peer


@asynccontextmanager
async def serving(limits: ConnectionLimits, app: SlowApp, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawSite]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=guarded_protocol(limits, tls), ws="none", lifespan="off", log_config=None)
    config.timeout_keep_alive = 60
    config.timeout_graceful_shutdown = 1

    class Server(uvicorn.Server):
        up = asyncio.Event()

        @contextlib.contextmanager
        def capture_signals(self):
            yield

        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            self.up.set()

    server = Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        await server.up.wait()
    site = RawSite(app, listener.getsockname()[1], server)
    try:
        yield site
    finally:
        app.gate.set()
        for peer in site.peers:
            peer.writer.close()
        server.should_exit = True
        await asyncio.wait_for(running, 10)
        listener.close()
