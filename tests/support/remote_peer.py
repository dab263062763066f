"""A remote environment server in the test's own loop, and what calls it."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from contextlib import asynccontextmanager

from tide_gateway.runtimes.fake import ScriptedEnvironment
from tide_gateway.specs import EnvironmentSpec

HEALTH = {"contract": 1, "environment": "scripted", "capacity": 4, "tasks": 0, "incarnation": "first"}


class Peer:
    """An HTTP server on a loopback port whose next answers the test decides; it notes each request's head."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.connections = 0
        self.status, self.extra, self.health = 200, "", dict(HEALTH)
        self.token: str | None = None
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None):
        await self.go_on(tls)
        try:
            yield self
        finally:
            self.pause()

    async def go_on(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, the second time on the same port."""
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def pause(self) -> None:
        """Refuse further connections."""
        self._server.close()

    def kill(self) -> None:
        """End as a crash does: nothing listens, and every connection breaks."""
        self.pause()
        for writer in self._writers:
            writer.transport.abort()

    async def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict]:
        """(status, body) of one request."""
        return self.status, self.health

    async def _handle(self, reader, writer) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = re.search(r"(?i)content-length: (\d+)", head)
                sent = await reader.readexactly(int(length[1])) if length else b""
                status, data = await self.answer(*head.split(" ", 2)[:2], sent)
                if self.token is not None and f"Authorization: Bearer {self.token}\r\n" not in head:
                    status = 401
                body = json.dumps(data).encode()
                writer.write(f"HTTP/1.1 {status} X\r\n{self.extra}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class ScriptedPeer(Peer):
    """The scripted environment behind it."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._environment = ScriptedEnvironment(capacity)

    async def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict]:
        """What the scripted environment answers."""
        return await self._environment.handle(method, path, body)


def spec_of(*urls: str, probe_interval_s: float = 5.0, **options) -> EnvironmentSpec:
    values = {"name": "far", "runtime": "remote", "servers": len(urls), "capacity": 8 * len(urls)}
    remote = {"urls": urls, "allow_private": True} | options
    return EnvironmentSpec.model_validate(values | {"probe_interval_s": probe_interval_s, "remote": remote})


def answers(*rounds: str):
    """A resolver that gives the next round's addresses each time it is asked, the last for ever."""
    left = list(rounds)

    async def resolve(host: str, port: int) -> list[str]:
        return (left.pop(0) if len(left) > 1 else left[0]).split()

    return resolve
