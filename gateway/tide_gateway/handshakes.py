"""TLS in front of HTTP: a connection counts from its first moment on, and its handshake has an end.

    connection -> fewer than max_connections? -> handshake (seconds) -> the HTTP protocol

With a listener that speaks TLS by itself, connections would be counted once their handshake is over: any number of
them could be held for a minute each.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TlsFront(asyncio.Protocol):
    """The first protocol of a connection; gives it to the HTTP protocol once it speaks TLS.

    Args:
        inner: of the same connection.
        context: with certificate and key.
        handshake_s: seconds for the handshake; then the connection is cut.
        max_connections: open at once, those that shake hands included; one more is cut.
    """

    def __init__(
        self, inner: HttpToolsProtocol, context: ssl.SSLContext, handshake_s: float, max_connections: int
    ) -> None:
        self._inner = inner
        self._context = context
        self._handshake_s = handshake_s
        self._max_connections = max_connections
        # uvicorn's own set: it waits for these at a stop, and tells them of it.
        self._connections = cast("set[Any]", inner.connections)
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection and begin the handshake, or cut it: nothing can be answered without TLS."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        if len(self._connections) > self._max_connections:
            self._transport.abort()
            return
        loop = self._inner.loop
        self._work = loop.create_task(self._shake_hands(self._transport), name="tide-tls")
        # uvloop begins to read after this call, whatever is said here, so the first bytes may come before TLS does.
        # Two rounds from now it is there: right after what `start_tls` does in its first, and before any further byte.
        loop.call_soon(loop.call_soon, self._feed, self._transport)

    def data_received(self, data: bytes) -> None:
        """What came before TLS, or with the end of its handshake."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing was handed over."""
        self._connections.discard(self)
        self._transport = None

    def shutdown(self) -> None:
        """uvicorn stops: cut a handshake short."""
        if self._transport is not None:
            self._transport.abort()

    def _feed(self, plain: asyncio.Transport) -> None:
        """Give TLS what came before it."""
        data, self._early = b"".join(self._early), []
        tls = cast("asyncio.BufferedProtocol", plain.get_protocol())  # asyncio's as well as uvloop's
        while data and tls is not self and not plain.is_closing():
            room = memoryview(tls.get_buffer(len(data)))
            num_bytes = min(len(room), len(data))
            room[:num_bytes] = data[:num_bytes]
            tls.buffer_updated(num_bytes)
            data = data[num_bytes:]

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        plain.pause_reading()
        try:
            transport = await self._inner.loop.start_tls(
                plain, self, self._context, server_side=True, ssl_handshake_timeout=self._handshake_s
            )
        except OSError:  # of the network, of TLS, or out of time
            transport = None
        finally:
            self._connections.discard(self)
        if transport is None or self._transport is None:
            plain.abort()
            return
        transport.set_protocol(self._inner)
        self._inner.connection_made(transport)
        if self._early:
            self._inner.data_received(b"".join(self._early))


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """The context of a server, TLS 1.2 or newer; `tide_gateway.settings.check_tls` has looked at the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    return context
