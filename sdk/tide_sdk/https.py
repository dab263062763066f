"""One interface for HTTP calls: `LeanClient` for http and unix sockets, httpx (imported only then) for https."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tide_sdk.http import LeanClient
from tide_sdk.http_connection import ConnectFailed, DeadlineExceeded, Disconnected, ProtocolFailed
from tide_sdk.http_parse import Response

if TYPE_CHECKING:
    import httpx


class HttpClient(Protocol):
    """What the SDK's clients need of an HTTP client."""

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
        """Make one call; see `LeanClient.request`."""
        ...

    async def aclose(self) -> None:
        """Close all connections; safe to repeat."""
        ...


class HttpsClient:
    """The same interface over httpx, for servers that want TLS; off the hot path.

    Args:
        base_url: `https://host[:port][/prefix]`.
        max_in_flight: connections at once.
        timeout_s: deadline of a call where it names none.
        max_body_bytes: a larger response body fails the call.
        headers: sent with every call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_in_flight: int = 256,
        timeout_s: float = 60.0,
        max_body_bytes: int = 64 * 1024 * 1024,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        import httpx

        self._httpx = httpx
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        limits = httpx.Limits(max_connections=max_in_flight, max_keepalive_connections=max_in_flight)
        self._client: httpx.AsyncClient = httpx.AsyncClient(
            headers=dict(headers or {}),
            limits=limits,
            timeout=None,  # noqa: S113 (each call has its own deadline)
            follow_redirects=False,
        )

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
        """Make one call; see `LeanClient.request`.

        Raises:
            TransportError: one of its subclasses.
        """
        httpx = self._httpx
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        sent = ({"content-type": "application/json"} if body is not None else {}) | dict(headers or {})
        url = self._base_url + path
        try:
            async with asyncio.timeout(limit_s), self._client.stream(method, url, content=body, headers=sent) as answer:
                pieces: list[bytes] = []
                num_bytes = 0
                async for piece in answer.aiter_bytes():
                    num_bytes += len(piece)
                    if num_bytes > self._max_body_bytes:
                        raise ProtocolFailed(f"the response body is larger than {self._max_body_bytes} bytes")
                    pieces.append(piece)
                return Response(answer.status_code, dict(answer.headers), b"".join(pieces))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {url} took longer than {limit_s} s") from error
        except httpx.ConnectError as error:
            raise ConnectFailed(f"cannot connect to {self._base_url}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Disconnected(f"{method} {url}: {error}") from error

    async def aclose(self) -> None:
        """Close all connections; safe to repeat."""
        await self._client.aclose()


def open_client(
    base_url: str,
    *,
    max_in_flight: int = 256,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> HttpClient:
    """The client that fits the URL's scheme.

    Raises:
        ValueError: a scheme other than http, https and unix.
    """
    kind = HttpsClient if base_url.startswith("https://") else LeanClient
    return kind(base_url, max_in_flight=max_in_flight, timeout_s=timeout_s, headers=headers)
