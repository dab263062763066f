"""The server under test, and one that somebody else runs at a URL; `launched` has one that is started here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Protocol

from pydantic import ValidationError

from tide_sdk.check.case import Failed, Skipped
from tide_sdk.http_connection import TransportError
from tide_sdk.https import HttpClient, open_client
from tide_sdk.wire import HealthResponse

_POLL_S = 0.05
_MAX_IN_FLIGHT = 512
HOW_TO_KILL = "the server cannot be killed from here: give its --pid, or let this command start it, after --"


class Unreachable(Exception):
    """There is no server to check; the message says why."""


class Subject(Protocol):
    """A server under test.

    Attributes:
        url: `http(s)://host:port[/prefix]` or `unix:/path`, as it is now.
        client: calls to it.
        token: what it asks for as a bearer token, "" for nothing.
        environment: what it says that it serves.
    """

    url: str
    client: HttpClient
    token: str
    environment: str

    async def open(self) -> None:
        """Start it where it does not run yet, and wait until it is healthy.

        Raises:
            Unreachable: it is not there.
        """
        ...

    async def kill(self) -> None:
        """Kill it as a crash does.

        Raises:
            Skipped: it cannot be killed from here.
        """
        ...

    async def restart(self) -> None:
        """Have it again after a kill.

        Raises:
            Failed: it does not come back.
        """
        ...

    async def terminate(self, limit_s: float) -> int:
        """Send SIGTERM and wait for the exit code.

        Raises:
            Failed: it does not end.
            Skipped: it is not this command's.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections, and end what was started; safe to repeat."""
        ...


class Reached:
    """A server that somebody else runs.

    Args:
        url: where it is.
        boot_s: seconds in which it must answer, at first and after a kill.
        token: bearer token, "" for none.
        pid: its process, killed once where it is given; whoever supervises it starts it again. 0 for none.
    """

    def __init__(self, url: str, boot_s: float, token: str = "", pid: int = 0) -> None:
        self.url = url
        self.token = token
        self.environment = ""
        self.client = client_of(url, token)
        self._boot_s = boot_s
        self._pid = pid

    async def open(self) -> None:
        """Wait until it is healthy; see `Subject.open`."""
        self.environment = (await until_healthy(self.client, self._boot_s, _nothing)).environment

    async def kill(self) -> None:
        """Kill the process that was named; see `Subject.kill`."""
        if not self._pid:
            raise Skipped(HOW_TO_KILL)
        pid, self._pid = self._pid, 0
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError as error:
            raise Failed(f"--pid {pid} cannot be killed: {error}") from error

    async def restart(self) -> None:
        """Wait until its supervisor has started it again; see `Subject.restart`."""
        try:
            await self.open()
        except Unreachable as error:
            raise Failed(f"after the kill nobody started the server again: {error}") from error

    async def terminate(self, limit_s: float) -> int:
        """Not ours to stop; see `Subject.terminate`."""
        raise Skipped(HOW_TO_KILL)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()


async def until_healthy(client: HttpClient, limit_s: float, check: Callable[[], None]) -> HealthResponse:
    """Wait until the server answers `GET /health` as the contract says, and give the answer.

    Args:
        client: calls to it.
        limit_s: how long to wait.
        check: raises where waiting is of no use any more.

    Raises:
        Unreachable: it does not within the limit.
    """
    words = "no answer"
    try:
        async with asyncio.timeout(limit_s):
            while True:
                check()
                try:
                    response = await client.request("GET", "/health", timeout_s=limit_s)
                    words = f"GET /health answered {response.status}: {response.body[:200].decode('utf-8', 'replace')}"
                    return HealthResponse.model_validate_json(response.body)
                except TransportError as error:
                    words = str(error)
                except ValidationError:
                    pass  # what it said is told once the time is over
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unreachable(f"the server was not healthy within {limit_s:g} s: {words}") from None


def client_of(url: str, token: str) -> HttpClient:
    """Calls to a server at a URL; nothing is connected yet.

    Raises:
        Unreachable: it is no URL that can be called.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else None
    try:
        return open_client(url, max_in_flight=_MAX_IN_FLIGHT, headers=headers)
    except ValueError as error:
        raise Unreachable(str(error)) from error


def _nothing() -> None:
    return None
