"""Work on many items, so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, concurrency: int) -> None:
    """Do `work` on every item, at most `concurrency` at once; items are taken only as there is room.

    A failure cancels what runs and is raised alone.

    Raises:
        ValueError: a concurrency below 1.
    """
    if concurrency < 1:
        raise ValueError("concurrency must be at least 1")
    waiting = iter(items)

    async def take() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(take())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
