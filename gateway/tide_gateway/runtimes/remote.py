"""Environment servers that somebody else runs: found at their URLs, never started or stopped by us.

    slot -> urls[slot] -> guarded connection -> GET /health -> Server (handle: its incarnation)

Whoever runs the server may restart it at any time; another incarnation is another instance. Nothing here watches a
server that nobody calls: the fleet's health probes see its death, or the other incarnation, within their interval.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from tide_gateway.runtimes import Gone, LaunchFailed, Place, Server
from tide_gateway.runtimes.remote_guard import Refused, Resolve, dial, resolve
from tide_gateway.specs import EnvironmentSpec, RemoteOptions, RemoteUrl
from tide_sdk.http import LeanClient, TransportError
from tide_sdk.http_connection import Connection
from tide_sdk.http_parse import Response
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_TOKEN_BYTES = 8192
_MAX_IN_FLIGHT = 4096
_CALL_S = 30.0
_HEALTH_S = 10.0
_POLL_S = 0.05
_MAX_POLL_S = 1.0


class _Unfit(Exception):
    """The server cannot be used now; `final` where waiting does not help."""

    def __init__(self, told: str, final: bool = False) -> None:
        super().__init__(told)
        self.final = final


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
                self._token = await asyncio.to_thread(_read_token, self._token_file)
        except (TimeoutError, _Unfit):
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


class RemoteRuntime:
    """Connects to the servers of `[environments.NAME.remote]`.

    Args:
        resolve: numeric addresses of a host name; asked at every connection.
        max_body_bytes: a server's larger answer fails the call.
    """

    def __init__(self, *, resolve: Resolve = resolve, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._resolve = resolve
        self._max_body_bytes = max_body_bytes
        self._servers: dict[str, list[Server]] = {}
        self._trusts: dict[tuple[str, int], ssl.SSLContext] = {}

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Connect to the slot's server, once it is healthy; see `Runtime.launch`."""
        options = _options(spec)
        if not 0 <= slot < len(options.urls):
            raise LaunchFailed(f"slot {slot}: remote.urls names {len(options.urls)} servers")
        try:
            return await self._connect(name, options.urls[slot], options, None, timeout_s)
        except _Unfit as error:
            raise LaunchFailed(str(error)) from error.__cause__

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Connect to the same incarnation again; see `Runtime.attach`."""
        options = _options(spec)
        if place.url not in options.urls:
            raise Gone(f"{place.url} is not in remote.urls any more")
        try:
            return await self._connect(name, place.url, options, place.handle, timeout_s)
        except _Unfit as error:
            raise Gone(str(error)) from error.__cause__

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Forget the server and close the connections; it is not ours to stop, and nothing is asked of it."""
        for server in self._servers.pop(name, ()):
            server.exited.set()
            await server.channel.aclose()

    async def survey(self) -> set[str]:
        """Nothing: a remote server bears no name of ours."""
        return set()

    async def freeze(self, server: Server, frozen: bool) -> NoReturn:
        """Not possible; an environment that asks for it is refused when its table is read."""
        raise NotImplementedError("the remote runtime cannot stop processes that somebody else runs")

    async def close(self) -> None:
        """Close all connections; the servers live on. Safe to repeat."""
        servers = [server for known in self._servers.values() for server in known]
        self._servers.clear()
        for server in servers:
            await server.channel.aclose()

    async def _connect(
        self, name: str, url: str, options: RemoteOptions, expected: str | None, timeout_s: float
    ) -> Server:
        """Wait for the server to be healthy. An expected incarnation may be behind a fault of ours or of the network,
        so only another one that answers ends the waiting early."""
        channel, last, pause_s = None, "no answer yet", _POLL_S
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        channel = channel or await self._open(url, options)
                        health = await _health_of(channel)
                        break
                    except _Unfit as error:
                        if error.final and expected is None:
                            raise
                        last = str(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(_MAX_POLL_S, pause_s * 1.5)
            if expected not in (None, health.incarnation):
                raise _Unfit(f"{url}: another incarnation is in its place: it was restarted")
        except BaseException as error:
            if channel is not None:
                await channel.aclose()
            if isinstance(error, TimeoutError):
                raise _Unfit(f"not healthy within {timeout_s:g} s: {last}") from error
            raise
        place = Place(url, host=RemoteUrl.parse(url).host, handle=health.incarnation)
        server = Server(name=name, channel=channel, health=health, place=place)
        self._servers.setdefault(name, []).append(server)
        return server

    async def _open(self, url: str, options: RemoteOptions) -> RemoteChannel:
        token = await asyncio.to_thread(_read_token, options.token_file) if options.token_file else ""
        tls = await asyncio.to_thread(self._trust, options.ca_file) if url.startswith("https:") else None
        return RemoteChannel(url, options, self._resolve, tls=tls, token=token, max_body_bytes=self._max_body_bytes)

    def _trust(self, ca_file: str) -> ssl.SSLContext:
        """What a server's certificate is checked against; one context for all servers, as each holds a megabyte."""
        try:
            key = (ca_file, Path(ca_file).stat().st_mtime_ns if ca_file else 0)
            if key not in self._trusts:
                self._trusts[key] = ssl.create_default_context(cafile=ca_file or None)
        except (OSError, ValueError) as error:
            raise _Unfit(f"remote.ca_file: cannot use {ca_file}: {error}", final=True) from error
        return self._trusts[key]


def _options(spec: EnvironmentSpec) -> RemoteOptions:
    if spec.remote is None:
        raise ValueError(f"environment {spec.name}: has no table [environments.{spec.name}.remote]")
    return spec.remote


async def _health_of(channel: RemoteChannel) -> HealthResponse:
    url = channel.base_url
    try:
        answer = await channel.request("GET", "/health", timeout_s=_HEALTH_S, idempotent=True)
    except Refused as error:
        raise _Unfit(f"{url}: {error}", final=True) from error
    except TransportError as error:
        raise _Unfit(f"{url}: {error}") from error
    if 300 <= answer.status < 400:
        raise _Unfit(f"{url}: answers with a redirect (HTTP {answer.status}); give the final URL", final=True)
    if answer.status in (401, 403):
        raise _Unfit(f"{url}: refuses the token of remote.token_file (HTTP {answer.status})", final=True)
    if answer.status != 200:
        raise _Unfit(f"{url}: GET /health answers HTTP {answer.status}")
    try:
        health = HealthResponse.model_validate_json(answer.body, strict=True)
    except ValueError:
        # The body is a stranger's: it is not repeated.
        raise _Unfit(f"{url}: GET /health is not the contract's", final=True) from None
    if health.contract != CONTRACT_VERSION:
        raise _Unfit(f"{url}: speaks contract {health.contract}, not {CONTRACT_VERSION}", final=True)
    return health


def _read_token(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise _Unfit(f"remote.token_file: cannot read {path}: {error.strerror}", final=True) from error
    token = data.decode("latin-1").strip()
    if len(data) > _MAX_TOKEN_BYTES or not token or not all("!" <= sign <= "~" for sign in token):
        raise _Unfit(f"remote.token_file: {path} must hold one line of printable characters, the token", final=True)
    return token
