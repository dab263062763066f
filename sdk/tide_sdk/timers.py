"""Deadlines that cost nothing where nothing is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which has `limit_s` seconds from its first wait on.

    Own code because `asyncio.timeout` sets a timer, about 5 us, also where the coroutine ends without a wait.

    Raises:
        TimeoutError: the time was over; the coroutine was cancelled.
    """
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        return end.value
    async with asyncio.timeout(limit_s):
        return await _go_on(work, waits_for)


@coroutine
def _go_on(begun: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that was begun by hand, from what it waits for."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 (a cancellation, for the coroutine to see)
                waits_for = begun.throw(error)
            else:
                waits_for = begun.send(sent)
    except StopIteration as end:
        return end.value
    finally:
        begun.close()
