"""A remote environment server in the test's own loop, and what calls it."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager

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

    @asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None):
        server = await asyncio.start_server(self._handle, "127.0.0.1", self.port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _handle(self, reader, writer) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                status = self.status
                if self.token is not None and f"Authorization: Bearer {self.token}\r\n" not in self.heads[-1]:
                    status = 401
                body = json.dumps(self.health).encode()
                writer.write(f"HTTP/1.1 {status} X\r\n{self.extra}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()


def spec_of(*urls: str, **options) -> EnvironmentSpec:
    remote = {"urls": urls, "allow_private": True} | options
    return EnvironmentSpec(name="far", runtime="remote", servers=len(urls), capacity=8, remote=remote)


def answers(*rounds: str):
    """A resolver that gives the next round's addresses each time it is asked, the last for ever."""
    left = list(rounds)

    async def resolve(host: str, port: int) -> list[str]:
        return (left.pop(0) if len(left) > 1 else left[0]).split()

    return resolve
