"""How environment servers come to life: one protocol, several runtimes.

    launch(name) -> Server        attach(name, place) -> the same server, from another gateway or after a restart
    destroy(name)                 survey() -> names of all that exists, with or without a row

A runtime makes what a row asks for and finds again what a row names; it keeps nothing that cannot be found again.
Everything that is said to a server goes through its `Channel`, the same for all runtimes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tide_gateway.specs import EnvironmentSpec
from tide_sdk import codec
from tide_sdk.http_parse import Response
from tide_sdk.wire import HealthResponse


class LaunchFailed(Exception):
    """An environment server did not become ready; nothing of it is left. The message says why, with its last words."""


class Gone(Exception):
    """There is no such environment server any more, or another incarnation is in its place."""


class RuntimeAway(Exception):
    """Nothing of the runtime answers: no engine, no cluster, no server."""


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs; stored in its row, so that any replica finds it again.

    Attributes:
        url: how it is called: `unix:/path`, `http://host:port` or `https://...`.
        host: the machine or engine that it runs on, for people and for placing others elsewhere.
        pid: its process, 0 where it has none of this machine's.
        handle: what else the runtime needs to find it: a container's id, a process's start ticks, an actor's name.
    """

    url: str
    host: str = ""
    pid: int = 0
    handle: str = ""

    def dumps(self) -> str:
        """The place as JSON text."""
        return codec.dumps(asdict(self)).decode()

    @classmethod
    def loads(cls, text: str) -> Place:
        """The place in JSON text that `dumps` made."""
        data: dict[str, Any] = codec.loads(text.encode())
        return cls(**data)


@dataclass(slots=True, eq=False)
class Server:
    """A running environment server.

    Attributes:
        name: the instance's name, unique for ever.
        channel: how to call it.
        health: what it said when it became ready; its incarnation never changes while it lives.
        place: where it runs.
        exited: set at once when it is gone, for whatever reason; set by whoever sees it first.
        took: told of each of the five calls, its path and the seconds to its answer.
    """

    name: str
    channel: Channel
    health: HealthResponse
    place: Place
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    took: Callable[[str, float], None] = lambda _path, _seconds: None


class Runtime(Protocol):
    """Starts, finds and kills environment servers. Names are unique for ever; a runtime labels what it makes with its
    deployment's name and the instance's, so that nothing is left that cannot be traced to a row."""

    async def launch(self, name: str, slot: int, spec: EnvironmentSpec, timeout_s: float) -> Server:
        """Start a server and wait until it is healthy. Cancellation leaves nothing behind.

        Args:
            name: unique for ever; its row is committed.
            slot: its number among the environment's servers, from 0; free again once the instance is gone.
            spec: the environment.
            timeout_s: deadline of the whole launch.

        Raises:
            LaunchFailed: it did not become ready in time; nothing of it is left.
        """
        ...

    async def attach(self, name: str, spec: EnvironmentSpec, place: Place, timeout_s: float) -> Server:
        """Find a server that another gateway process launched, and make sure that it is healthy. Its life goes on
        when this process ends. Attaching to one that this process has already gives a second `Server` for it. A server
        of an environment that freezes is thawed for good: freezing it again could undo another gateway's resume.

        Raises:
            Gone: nothing of that name lives there, or it is not healthy within `timeout_s`. Nothing was destroyed.
        """
        ...

    async def destroy(self, name: str, spec: EnvironmentSpec | None, place: Place | None, grace_s: float) -> None:
        """Ask whatever exists under the name to stop, kill it with all its children after `grace_s`, and remove it.
        Safe to repeat, and for names that never came to life.

        Args:
            name: the instance.
            spec: the environment, None where it is no longer registered.
            place: where it runs, None where that is not known (a launch that was broken off).
            grace_s: seconds between asking and killing.
        """
        ...

    async def survey(self) -> set[str]:
        """The names of all that exists of this deployment, whoever launched it; [] where nothing outlives a gateway.

        Raises:
            RuntimeAway: nothing of it answers. Where a part answers, the others are logged.
        """
        ...

    async def freeze(self, server: Server, frozen: bool) -> None:
        """Stop or continue all processes of the server. Safe to repeat. Environments ask for it with `freeze = true`.

        Raises:
            Gone: it does not exist any more.
        """
        ...

    async def close(self) -> None:
        """Free what the runtime itself holds in this process; servers live on. Safe to repeat."""
        ...
