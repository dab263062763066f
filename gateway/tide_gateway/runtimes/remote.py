"""Environment servers that somebody else runs: found at their URLs, never started or stopped by us.

    slot -> urls[slot] -> guarded connection -> GET /health -> Server (handle: its incarnation)

Whoever runs the server may restart it at any time; another incarnation is another instance. One that refuses
connections for some seconds is gone too; one that is only silent may be behind a broken network, and is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from tide_gateway.runtimes import Gone, LaunchFailed, Place, RuntimeAway, Server
from tide_gateway.runtimes.remote_channel import MAX_BODY_BYTES, RemoteChannel, Unfit, health_of, read_token
from tide_gateway.runtimes.remote_guard import Resolve, resolve
from tide_gateway.specs import EnvironmentSpec, RemoteOptions, RemoteUrl

_POLL_S = 0.05
_MAX_POLL_S = 1.0
_SURVEY_S = 2.0
REFUSED_S = 5.0
"""Seconds of refused connections after which a server is gone: a proxy in front of it may restart in less."""

log = logging.getLogger(__name__)


class _Refusals:
    """Whether a server has refused connections for so long that it is gone."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    @property
    def pending(self) -> bool:
        """The last question was refused."""
        return self._since_s is not None

    def note(self, fault: Unfit | None) -> bool:
        """Take the result of a question; True once the limit is over."""
        now_s = asyncio.get_running_loop().time()
        if fault is None or not fault.is_refusal:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        return self._since_s is not None and now_s - self._since_s >= self._limit_s


class RemoteRuntime:
    """Connects to the servers of `[environments.NAME.remote]`.

    Args:
        specs: the environments whose servers a survey asks, while this process is connected to none.
        resolve: numeric addresses of a host name; asked at every connection.
        max_body_bytes: a server's larger answer fails the call.
        refused_s: seconds of refused connections after which a server is gone.
    """

    def __init__(
        self,
        specs: Iterable[EnvironmentSpec] = (),
        *,
        resolve: Resolve = resolve,
        max_body_bytes: int = MAX_BODY_BYTES,
        refused_s: float = REFUSED_S,
    ) -> None:
        self._known = [(url, spec.remote) for spec in specs if spec.remote is not None for url in spec.remote.urls]
        self._resolve = resolve
        self._max_body_bytes = max_body_bytes
        self._refused_s = refused_s
        self._watchers: set[asyncio.Task[None]] = set()
        self._servers: dict[str, list[Server]] = {}
        self._trusts: dict[tuple[str, int], ssl.SSLContext] = {}

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Connect to the slot's server, once it is healthy; see `Runtime.launch`."""
        options = _options(spec)
        if not 0 <= slot < len(options.urls):
            raise LaunchFailed(f"slot {slot}: remote.urls names {len(options.urls)} servers")
        try:
            return await self._connect(name, options.urls[slot], spec, None, timeout_s)
        except Unfit as error:
            raise LaunchFailed(str(error)) from error.__cause__

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Connect to the same incarnation again; see `Runtime.attach`."""
        options = _options(spec)
        if place.url not in options.urls:
            raise Gone(f"{place.url} is not in remote.urls any more")
        try:
            return await self._connect(name, place.url, spec, place.handle, timeout_s)
        except Unfit as error:
            raise Gone(str(error)) from error.__cause__

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Forget the server and close the connections; it is not ours to stop, and nothing is asked of it."""
        for server in self._servers.pop(name, ()):
            server.exited.set()
            await server.channel.aclose()

    async def survey(self) -> set[str]:
        """Nothing: a remote server bears no name of ours.

        Raises:
            RuntimeAway: this process is connected to no server, and none of the registered ones answers.
        """
        connected = any(not server.exited.is_set() for known in self._servers.values() for server in known)
        if not self._known or connected:
            return set()
        if not any(await asyncio.gather(*(self._answers(url, options) for url, options in self._known))):
            raise RuntimeAway("no remote server answers")
        return set()

    async def freeze(self, server: Server, frozen: bool) -> NoReturn:
        """Not possible; an environment that asks for it is refused when its table is read."""
        raise NotImplementedError("the remote runtime cannot stop processes that somebody else runs")

    async def close(self) -> None:
        """Close all connections; the servers live on. Safe to repeat."""
        servers = [server for known in self._servers.values() for server in known]
        self._servers.clear()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for server in servers:
            await server.channel.aclose()

    async def _answers(self, url: str, options: RemoteOptions) -> bool:
        channel = None
        try:
            async with asyncio.timeout(_SURVEY_S):
                channel = await self._open(url, options)
                await health_of(channel)
        except (Unfit, TimeoutError) as error:
            log.debug("no survey of %s: %s", url, error)
            return False
        finally:
            if channel is not None:
                await channel.aclose()
        return True

    async def _connect(
        self, name: str, url: str, spec: EnvironmentSpec, expected: str | None, timeout_s: float
    ) -> Server:
        """Wait for the server to be healthy. An expected incarnation may be behind a fault of ours or of the network,
        so only another one that answers, and a machine that refuses connections, end the waiting early."""
        channel, last, pause_s = None, "no answer yet", _POLL_S
        options, refusals = _options(spec), _Refusals(self._refused_s)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        channel = channel or await self._open(url, options)
                        health = await health_of(channel)
                        break
                    except Unfit as error:
                        if (error.final and expected is None) or (refusals.note(error) and expected is not None):
                            raise
                        last = str(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(_MAX_POLL_S, pause_s * 1.5)
            if expected not in (None, health.incarnation):
                raise Unfit(f"{url}: another incarnation is in its place: it was restarted")
        except BaseException as error:
            if channel is not None:
                await channel.aclose()
            if isinstance(error, TimeoutError):
                raise Unfit(f"not healthy within {timeout_s:g} s: {last}") from error
            raise
        place = Place(url, host=RemoteUrl.parse(url).host, handle=health.incarnation)
        server = Server(name=name, channel=channel, health=health, place=place)
        self._servers.setdefault(name, []).append(server)
        watcher = asyncio.create_task(self._watch(server, channel, spec.probe_interval_s), name=f"tide-watch-{name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return server

    async def _watch(self, server: Server, channel: RemoteChannel, interval_s: float) -> None:
        """Ends with the server, or when it is destroyed here."""
        refusals = _Refusals(self._refused_s)
        while not server.exited.is_set():
            pause_s = min(interval_s, self._refused_s / 2) if refusals.pending else interval_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.exited.wait(), pause_s)
                return
            try:
                health = await health_of(channel)
            except Unfit as error:
                gone = refusals.note(error)
            else:
                gone = refusals.note(None) or health.incarnation != server.health.incarnation
            if gone:
                log.warning("environment server %s at %s is gone", server.name, server.place.url)
                server.exited.set()

    async def _open(self, url: str, options: RemoteOptions) -> RemoteChannel:
        token = await asyncio.to_thread(read_token, options.token_file) if options.token_file else ""
        tls = await asyncio.to_thread(self._trust, options.ca_file) if url.startswith("https:") else None
        return RemoteChannel(url, options, self._resolve, tls=tls, token=token, max_body_bytes=self._max_body_bytes)

    def _trust(self, ca_file: str) -> ssl.SSLContext:
        """What a server's certificate is checked against; one context for all servers, as each holds a megabyte."""
        try:
            key = (ca_file, Path(ca_file).stat().st_mtime_ns if ca_file else 0)
            if key not in self._trusts:
                self._trusts[key] = ssl.create_default_context(cafile=ca_file or None)
        except (OSError, ValueError) as error:
            raise Unfit(f"remote.ca_file: cannot use {ca_file}: {error}", final=True) from error
        return self._trusts[key]


def _options(spec: EnvironmentSpec) -> RemoteOptions:
    if spec.remote is None:
        raise ValueError(f"environment {spec.name}: has no table [environments.{spec.name}.remote]")
    return spec.remote
