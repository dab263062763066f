"""Reads `GET /health` of a server that comes to life, the same way for all runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pydantic import ValidationError

from tide_gateway.runtimes import Channel, LaunchFailed
from tide_sdk.http import TransportError
from tide_sdk.http_parse import Response
from tide_sdk.wire import CONTRACT_VERSION, HealthResponse

PROBE_S = 2.0
"""Deadline of one call while a server comes to life; it is asked again."""
_POLL_S = 0.03
_MAX_POLL_S = 0.25


def read_health(response: Response) -> HealthResponse:
    """The contract's health in an answer with status 200.

    Raises:
        LaunchFailed: it is not the contract's; the message says in what.
    """
    try:
        health = HealthResponse.model_validate_json(response.body, strict=True)
    except ValidationError as error:
        # In one line, and without the body, which is a stranger's.
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        words = f"GET /health of the environment server is not the contract's: {field}: {fault['msg']}"
        raise LaunchFailed(words) from error
    if health.contract != CONTRACT_VERSION:
        raise LaunchFailed(f"the environment server speaks contract {health.contract}, not {CONTRACT_VERSION}")
    return health


async def ask_health(channel: Channel, timeout_s: float = PROBE_S) -> HealthResponse | None:
    """Ask once; None where nothing answers with status 200 yet.

    Raises:
        LaunchFailed: what answers is not the contract's health.
    """
    try:
        response = await channel.request("GET", "/health", timeout_s=timeout_s, idempotent=True)
    except TransportError:
        return None  # not listening yet
    return read_health(response) if response.status == 200 else None


async def until_healthy(channel: Channel, check: Callable[[], None] | None = None) -> HealthResponse:
    """Ask until it is healthy; the caller sets the deadline, with `asyncio.timeout`.

    Args:
        channel: how to call the server.
        check: called before each question; raises where the server is known to be dead.

    Raises:
        LaunchFailed: what answers is not the contract's health.
    """
    pause_s = _POLL_S
    while True:
        if check is not None:
            check()
        health = await ask_health(channel)
        if health is not None:
            return health
        await asyncio.sleep(pause_s)
        pause_s = min(_MAX_POLL_S, pause_s * 1.3)
