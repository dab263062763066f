"""Calls to one remote server: its address checked at each connection, its token sent with each call."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path

from tide_gateway.runtimes.remote_guard import Refused, Resolve, dial
from tide_gateway.specs import RemoteOptions, RemoteUrl
from tide_sdk.http import LeanClient, TransportError
from tide_sdk.http_connection import Connection
from tide_sdk.http_parse import Response
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_TOKEN_BYTES = 8192
_MAX_IN_FLIGHT = 4096
_CALL_S = 30.0
_HEALTH_S = 10.0


class Unfit(Exception):
    """The server cannot be used now.

    Attributes:
        final: waiting does not help.
    """

    def __init__(self, told: str, final: bool = False) -> None:
        super().__init__(told)
        self.final = final

    @property
    def is_refusal(self) -> bool:
        """The machine answered that nothing listens there."""
        return self.__cause__ is not None and isinstance(self.__cause__.__cause__, ConnectionRefusedError)


class RemoteChannel:
    """Calls one remote server: its address is checked at each connection, its token sent with each call.

    Args:
        url: as configured.
        options: the environment's table.
        lookup: the resolver of host names.
        tls: what an https server is checked against, None for http.
        token: the bearer token; empty sends none.
        max_body_bytes: a larger answer fails the call.

    Attributes:
        base_url: as configured.
    """

    def __init__(
        self,
        url: str,
        options: RemoteOptions,
        lookup: Resolve,
        *,
        tls: ssl.SSLContext | None = None,
        token: str = "",
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.base_url = url
        parsed = RemoteUrl.parse(url)

        async def connect() -> Connection:
            return await dial(parsed, lookup, allow_private=options.allow_private, tls=tls)

        self._token_file = options.token_file
        self._token = token
        self._http = LeanClient(
            url, max_in_flight=_MAX_IN_FLIGHT, timeout_s=_CALL_S, max_body_bytes=max_body_bytes, dial=connect
        )

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Make one call; a redirect is an answer like any other and never followed.

        Where the server refuses the token, the token's file is read again, and the call repeated if that changed it.

        Raises:
            TransportError: no usable answer.
        """
        loop = asyncio.get_running_loop()
        limit_s = _CALL_S if timeout_s is None else timeout_s
        deadline_s = loop.time() + limit_s
        sent = self._headers()
        answer = await self._http.request(method, path, body, headers=sent, timeout_s=limit_s, idempotent=idempotent)
        if answer.status != 401 or not self._token_file:
            return answer
        try:
            async with asyncio.timeout_at(deadline_s):
                self._token = await asyncio.to_thread(read_token, self._token_file)
        except (TimeoutError, Unfit):
            return answer
        left_s = deadline_s - loop.time()
        if self._headers() == sent or left_s <= 0:
            return answer
        return await self._http.request(
            method, path, body, headers=self._headers(), timeout_s=left_s, idempotent=idempotent
        )

    async def aclose(self) -> None:
        """Close all connections; safe to repeat."""
        await self._http.aclose()

    def _headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


async def health_of(channel: RemoteChannel) -> HealthResponse:
    """The contract's health.

    Raises:
        Unfit: anything else.
    """
    url = channel.base_url
    try:
        answer = await channel.request("GET", "/health", timeout_s=_HEALTH_S, idempotent=True)
    except Refused as error:
        raise Unfit(f"{url}: {error}", final=True) from error
    except TransportError as error:
        raise Unfit(f"{url}: {error}") from error
    if 300 <= answer.status < 400:
        raise Unfit(f"{url}: answers with a redirect (HTTP {answer.status}); give the final URL", final=True)
    if answer.status in (401, 403):
        raise Unfit(f"{url}: refuses the token of remote.token_file (HTTP {answer.status})", final=True)
    if answer.status != 200:
        raise Unfit(f"{url}: GET /health answers HTTP {answer.status}")
    try:
        health = HealthResponse.model_validate_json(answer.body, strict=True)
    except ValueError:
        # The body is a stranger's: it is not repeated.
        raise Unfit(f"{url}: GET /health is not the contract's", final=True) from None
    if health.contract != CONTRACT_VERSION:
        raise Unfit(f"{url}: speaks contract {health.contract}, not {CONTRACT_VERSION}", final=True)
    return health


def read_token(path: str) -> str:
    """The token in a file of one line.

    Raises:
        Unfit: unreadable, or not a token; the message names the file and never its content.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise Unfit(f"remote.token_file: cannot read {path}: {error.strerror}", final=True) from error
    token = data.decode("latin-1").strip()
    if len(data) > _MAX_TOKEN_BYTES or not token or not all("!" <= sign <= "~" for sign in token):
        raise Unfit(f"remote.token_file: {path} must hold one line of printable characters, the token", final=True)
    return token
