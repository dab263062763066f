"""Where a command's tasks are played: at a gateway, on a server at a URL, or on a class that is served for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from tide_sdk.check.launched import Launched
from tide_sdk.check.subject import Unreachable
from tide_sdk.client import GatewayClient
from tide_sdk.many import NotReady, reach_gateway
from tide_sdk.serve import ServeError, load_class, parse_options

BOOT_S = 60.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where tasks are played.

    Attributes:
        url: of a gateway or an environment server, None where `served` is.
        environment: its name there; None: what the server serves.
        served: `module:Class` to serve for this command alone.
        options: the class's options, `key=value`.
    """

    url: str | None
    environment: str | None
    served: str | None = None
    options: Sequence[str] = ()


def place_of(target: str | None, gateway: str | None, environment: str | None, options: Sequence[str]) -> Place:
    """What a command line means.

    Args:
        target: an environment's name with a gateway, else `module:Class` or the URL of an environment server.
        gateway: URL of a gateway.
        environment: the environment's name, where an option names it.
        options: `key=value`, for a class that is served.

    Raises:
        ServeError: it means nothing; the message says what to give.
    """
    address = target is not None and ("://" in target or target.startswith("unix:"))
    if gateway is not None:
        if address or (target and environment and target != environment):
            raise ServeError("give one place: --gateway with the environment's name, a server's URL, or module:Class")
        if options:
            raise ServeError("--set is for a class that is served here; a gateway's environments have their options")
        return Place(gateway, target or environment)
    if target is None:
        raise ServeError("which environment? Give module:Class, the URL of a server, or --gateway and a name")
    if address:
        if options:
            raise ServeError("--set is for a class that is served here; the server at a URL has its options")
        return Place(target, environment)
    if ":" not in target:
        raise ServeError(f"{target!r}: --gateway says where it is; or give module:Class, or the URL of a server")
    parse_options(list(options))
    load_class(target)
    return Place(None, environment, target, options)


@contextlib.asynccontextmanager
async def reached(
    place: Place, token: str | None, capacity: int, *, references: bool
) -> AsyncGenerator[tuple[GatewayClient, str]]:
    """A client of the place and the environment's name there; a class is served by a child on a private socket.

    Args:
        place: where.
        token: of the gateway or server.
        capacity: tasks that a served class shall hold.
        references: a gateway answers references in the place of images, as `GatewayClient` says.

    Raises:
        NotReady: nobody answers there, or there is no such environment.
    """
    async with contextlib.AsyncExitStack() as stack:
        url = place.url
        if place.served is not None:
            command = [sys.executable, "-m", "tide_sdk.cli", "serve", place.served, "--uds", "{uds}"]
            command += ["--capacity", "{capacity}", *(word for pair in place.options for word in ("--set", pair))]
            server = Launched(command, BOOT_S, capacity)
            stack.push_async_callback(_stopped, server)
            try:
                await server.open()
            except Unreachable as error:
                raise NotReady(f"{place.served} cannot be served: {error}") from error
            url, token = server.url, None
        assert url is not None
        try:
            client = await stack.enter_async_context(GatewayClient(url, token=token, references=references))
        except ValueError as error:
            raise NotReady(f"{url!r} is no URL: {error}") from error
        yield client, await reach_gateway(client, place.environment)


async def _stopped(server: Launched) -> None:
    """Ends the server in order, so that the author's code sees the end of its tasks; by force where it is late."""
    with contextlib.suppress(Exception):
        await server.terminate(_STOP_S)
    await server.aclose()
