"""How work ends that a stop meets: what is in flight gets time to finish, and some is never cut off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from tide_gateway.service.live import Registry

T = TypeVar("T")
log = logging.getLogger(__name__)


async def drain(registry: Registry, drain_s: float) -> None:
    """Wait until nothing is in flight for any task, at most `drain_s`.

    Turns that come meanwhile are taken until what ran at first is over, and are waited for too: a balancer that has
    not heard of the stop yet costs nobody an answer. Then no further turn is taken.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + drain_s
    if pending := _in_flight(registry):
        await asyncio.wait(pending, timeout=drain_s)
    registry.draining = True
    while pending := _in_flight(registry):
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            log.warning("%d turns, starts and ends are cut off after %g s", len(pending), drain_s)
            return
        await asyncio.wait(pending, timeout=left_s)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do work to its end, also where the caller is cancelled meanwhile, who waits for it then. It bounds itself."""
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        raise


def _in_flight(registry: Registry) -> list[asyncio.Future[Any]]:
    found: list[asyncio.Future[Any] | None] = []
    for live in registry.lives.values():
        found += [live.running.answer if live.running is not None else None, live.starting, live.releasing]
    return [work for work in found if work is not None and not work.done()]
