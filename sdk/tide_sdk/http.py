"""A lean HTTP/1.1 client for small JSON calls between our own processes.

    call -> [waiters, first come first served] -> slot -> kept-alive or new connection -> response -> next waiter

Back-pressure: `max_in_flight` connections, `max_waiting` calls in the queue, the rest fail at once.
Own code because a general client costs 1 to 2 ms of CPU a call, more than a whole turn may cost.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http_connection import (
    ConnectFailed,
    Connection,
    DeadlineExceeded,
    Disconnected,
    ProtocolFailed,
    QueueFull,
    TransportError,
)
from tide_sdk.http_parse import Response

__all__ = [
    "ConnectFailed",
    "DeadlineExceeded",
    "Disconnected",
    "LeanClient",
    "ProtocolFailed",
    "QueueFull",
    "Response",
    "TransportError",
    "read_json",
]

_METHOD = re.compile(r"GET|POST|PUT|PATCH|DELETE")
_TARGET = re.compile(r"/[!-~]*")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")


class LeanClient:
    """Keep-alive client of one base URL; belongs to the event loop that first uses it.

    Args:
        base_url: `http://host:port[/prefix]` or `unix:/path/of/socket`.
        max_in_flight: connections, and so calls, at once; further calls wait in order.
        timeout_s: deadline of a call, waiting and connecting included, where the call names none.
        max_body_bytes: a larger response body fails the call.
        headers: sent with every call.
        max_waiting: calls that may wait; one more fails with `QueueFull`.
        keep_alive_s: an idle connection older than this is not used again. Keep it below the server's own limit.
        dial: makes each connection in place of the client, whose URL may then be https; an OSError is `ConnectFailed`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_in_flight: int = 256,
        timeout_s: float = 60.0,
        max_body_bytes: int = 64 * 1024 * 1024,
        headers: Mapping[str, str] | None = None,
        max_waiting: int = 65_536,
        keep_alive_s: float = 4.0,
        dial: Callable[[], Awaitable[Connection]] | None = None,
    ) -> None:
        if max_in_flight < 1 or max_waiting < 0 or timeout_s <= 0:
            raise ValueError("max_in_flight and timeout_s must be above 0, max_waiting not below")
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._max_waiting = max_waiting
        self._keep_alive_s = keep_alive_s
        self._dial = dial
        self._uds, self._host, self._port, self._prefix = _split_url(base_url, ("http", "https") if dial else ("http",))
        authority = "localhost" if self._uds else _authority(self._host, self._port)
        self._common = f"Host: {authority}\r\n{_header_lines(headers)}"
        self._free_slots = max_in_flight
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Make one call. Cancelling it closes its connection; the peer may have acted.

        Args:
            method: GET, POST, PUT, PATCH or DELETE.
            path: absolute path with query, percent-encoded.
            body: the bytes to send, sent as application/json unless `headers` say otherwise.
            headers: further headers of this call.
            timeout_s: deadline of the whole call in seconds.
            idempotent: acting twice does no harm, so a kept-alive connection that turns out closed is replaced once.

        Raises:
            TransportError: one of its subclasses; an HTTP error status is no exception here.
        """
        data = self._encode(method, path, body, headers)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        due_s = loop.time() + limit_s
        try:
            await self._acquire(loop, due_s)
            try:
                return await self._exchange(data, idempotent, loop, due_s)
            finally:
                self._release()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {self.base_url}{path} took longer than {limit_s} s") from error

    async def json(
        self,
        method: str,
        path: str,
        payload: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Any:
        """Make one call with a JSON body (none if `payload` is None) and return the parsed answer.

        Raises:
            TideError: the peer answered with status 400 or above.
            TransportError: no usable answer.
            codec.CodecError: the payload cannot be written as JSON.
        """
        body = None if payload is None else codec.dumps(payload)
        response = await self.request(method, path, body, headers=headers, timeout_s=timeout_s, idempotent=idempotent)
        return read_json(response)

    async def aclose(self) -> None:
        """Close all connections; calls in flight fail with `Disconnected`. Safe to repeat."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ConnectFailed("the client was closed"))
        self._waiters.clear()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _encode(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> bytes:
        if _METHOD.fullmatch(method) is None or _TARGET.fullmatch(path) is None:
            raise ValueError(f"not a request that can be sent: {method!r} {path!r}")
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{_header_lines(headers)}"
        if body is None:
            return (head + ("\r\n" if method == "GET" else "Content-Length: 0\r\n\r\n")).encode("latin-1")
        if not headers or not any(name.lower() == "content-type" for name in headers):
            head += "Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def _acquire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if self._closed:
            raise ConnectFailed("the client is closed")
        if self._free_slots > 0:
            self._free_slots -= 1
            return
        if len(self._waiters) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} calls to {self.base_url} wait already")
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        async with asyncio.timeout_at(due_s):
            try:
                await waiter
            except asyncio.CancelledError:
                if self._waiters.pop(waiter, waiter) is waiter and waiter.done() and not waiter.cancelled():
                    self._release()  # the slot had just been handed over: pass it on
                raise

    def _release(self) -> None:
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free_slots += 1

    async def _exchange(self, data: bytes, idempotent: bool, loop: asyncio.AbstractEventLoop, due_s: float) -> Response:
        while True:
            connection = self._take_idle(loop.time()) or await self._connect(loop, due_s)
            reused = connection.num_requests > 0
            self._busy.add(connection)
            try:
                response = await connection.begin(data, self._max_body_bytes, loop, due_s)
            except Disconnected:
                # A server may close a kept-alive connection at the moment at which a request goes out.
                if not (idempotent and reused and connection.untouched) or self._closed:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if connection.finish() and not self._closed:
                connection.idle_since_s = loop.time()
                self._idle.append(connection)
            else:
                connection.close()
            return response

    def _take_idle(self, now_s: float) -> Connection | None:
        idle = self._idle
        while idle and now_s - idle[0].idle_since_s > self._keep_alive_s:
            idle.popleft().close()
        while idle:
            connection = idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop, due_s: float) -> Connection:
        async with asyncio.timeout_at(due_s):
            try:
                if self._dial is not None:
                    connection = await self._dial()
                elif self._uds:
                    _, connection = await loop.create_unix_connection(Connection, self._uds)
                else:
                    # proto given by the host lookup: asyncio and uvloop then set TCP_NODELAY.
                    _, connection = await loop.create_connection(Connection, self._host, self._port)
            except OSError as error:
                raise ConnectFailed(f"cannot connect to {self.base_url}: {error}") from error
        if self._closed or not connection.open:
            connection.close()
            raise ConnectFailed(f"{self.base_url} closed the connection at once")
        return connection


def read_json(response: Response) -> Any:
    """The parsed body of a successful answer.

    Raises:
        TideError: the status is 400 or above; unknown bodies are kept in `detail`, the status in `http_status`.
        ProtocolFailed: a successful answer that is not JSON.
    """
    try:
        data = codec.loads(response.body)
    except codec.CodecError as error:
        if response.status < 400:
            raise ProtocolFailed(f"HTTP {response.status} with a body that is not JSON: {error}") from error
        data = {"detail": response.body[:300].decode("utf-8", "replace")}
    if response.status < 400:
        return data
    problem = cast("dict[str, Any]", data) if isinstance(data, dict) else {"detail": str(data)[:300]}
    raise TideError.from_problem(response.status, problem | {"http_status": response.status})


def _header_lines(headers: Mapping[str, str] | None) -> str:
    lines: list[str] = []
    for name, value in (headers or {}).items():
        if _HEADER_NAME.fullmatch(name) is None or _HEADER_VALUE.fullmatch(value) is None:
            raise ValueError(f"header {name!r} has a name or value that cannot be sent")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_url(url: str, schemes: tuple[str, ...]) -> tuple[str, str, int, str]:
    """(socket path, host, port, prefix) of a base URL."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"{url!r}: give the socket as unix:/absolute/path")
        return path, "", 0, ""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{url!r}: expected http://host:port[/prefix] or unix:/path")
    return "", parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/")
