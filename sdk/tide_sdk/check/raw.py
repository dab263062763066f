"""Connections on which a check decides every byte: requests in pieces, several at once, or given up."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tide_sdk.check.case import Failed
from tide_sdk.http_parse import Response

_MAX_BYTES = 64 * 1024 * 1024


class RawConnection:
    """One connection to the server under test.

    Args:
        url: `http(s)://host:port[/prefix]` or `unix:/path`.
        token: bearer token, "" for none.
        timeout_s: deadline of each wait.
    """

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._prefix = ""
        self._host = "localhost"
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._url.startswith("unix:"):
                    path = self._url.removeprefix("unix:").removeprefix("//")
                    self._reader, self._writer = await asyncio.open_unix_connection(path, limit=_MAX_BYTES)
                    return self
                parts = urlsplit(self._url)
                secure = parts.scheme == "https"
                context = ssl.create_default_context() if secure else None
                port = parts.port or (443 if secure else 80)
                self._prefix, self._host = parts.path.rstrip("/"), parts.netloc
                opening = asyncio.open_connection(parts.hostname, port, ssl=context, limit=_MAX_BYTES)
                self._reader, self._writer = await opening
        except (OSError, TimeoutError) as error:
            raise Failed(f"no connection to {self._url}: {error or 'time is over'}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Close at once, whatever is under way; safe to repeat."""
        if self._writer is not None:
            self._writer.transport.abort()

    def head(self, method: str, path: str, *lines: str) -> bytes:
        """The head of a request, with the empty line."""
        given = [f"Authorization: Bearer {self._token}"] if self._token else []
        whole = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._host}", *given, *lines, "", ""]
        return "\r\n".join(whole).encode("latin-1")

    def post(self, path: str, body: bytes, *lines: str) -> bytes:
        """A whole `POST` of JSON."""
        length = f"Content-Length: {len(body)}"
        return self.head("POST", path, "Content-Type: application/json", length, *lines) + body

    async def write(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            ConnectionError: the server has closed the connection.
            Failed: it does not take them in time.
        """
        assert self._writer is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError as error:
            raise Failed(f"the server did not take {len(data)} bytes within {self._timeout_s:g} s") from error

    async def read(self) -> Response:
        """The next answer, byte for byte, so that another one may follow.

        Raises:
            Failed: none comes, or it is not HTTP.
        """
        assert self._reader is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _read(self._reader)
        except TimeoutError as error:
            raise Failed(f"no whole answer within {self._timeout_s:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Failed(f"the server closed the connection before its answer was complete ({error})") from error
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise Failed(f"the answer is not HTTP/1.1: {error}") from error


async def _read(reader: asyncio.StreamReader) -> Response:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if 100 <= status < 200:
        return await _read(reader)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        pieces: list[bytes] = []
        while num_bytes := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append((await reader.readexactly(num_bytes + 2))[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return Response(status, headers, b"".join(pieces))
    length = headers.get("content-length")
    body = await reader.read() if length is None else await reader.readexactly(int(length))
    return Response(status, headers, body)
