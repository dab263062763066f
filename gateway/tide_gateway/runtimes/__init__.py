"""How environment servers come to life: one protocol, several runtimes.

A runtime starts and kills servers and cleans up what an earlier gateway left. Everything that is said to a server goes
through its `Channel`, the same for all runtimes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tide_gateway.settings import EnvironmentSpec
from tide_sdk.http_parse import Response
from tide_sdk.wire import HealthResponse


class LaunchFailed(Exception):
    """An environment server did not become ready; nothing of it is left. The message says why, with its last words."""


class Channel(Protocol):
    """A way to call one environment server; `LeanClient` is one."""

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Make one call.

        Raises:
            tide_sdk.http.TransportError: no usable answer.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


@dataclass(slots=True)
class Server:
    """A running environment server.

    Attributes:
        name: the instance's name, unique for ever.
        channel: how to call it.
        health: what it said when it became ready; its incarnation never changes while it lives.
        pid: its process, 0 where it has none.
        exited: set when it is gone, for whatever reason.
    """

    name: str
    channel: Channel
    health: HealthResponse
    pid: int = 0
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Runtime(Protocol):
    """Starts and kills environment servers."""

    async def launch(self, name: str, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a server and wait until it is healthy. Cancellation leaves nothing behind.

        Raises:
            LaunchFailed: it did not become ready in time; nothing of it is left.
        """
        ...

    async def destroy(self, server: Server, grace_s: float) -> None:
        """Ask the server to stop, kill it after `grace_s` with all its children. Safe to repeat."""
        ...

    async def remove_leftovers(self, names: Iterable[str]) -> int:
        """Kill whatever is left of instances of an earlier gateway; the number of processes killed."""
        ...

    async def close(self) -> None:
        """Free what the runtime itself holds; its servers are destroyed before. Safe to repeat."""
        ...
