"""Transactions in the order in which they were asked for; those that wait for a commit share the next one.

    write(a) ─┐
    write(b) ─┼──> one transaction at a time, in order ──> each caller returns once its own is committed
    write(c) ─┘

The rows then follow an object in memory exactly: whoever changes it and asks for the write in one breath gets the
database to pass through the same states. Statements of one call are never split over two transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine


class OrderedWrites:
    """Commits what it is given, in order.

    A transaction that fails is raised to each caller that shared it, and so is every later one: the rows would no
    longer follow. The run ends with it.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: list[tuple[Sequence[Any], asyncio.Future[list[int]]]] = []
        self._draining: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def write(self, *statements: Any) -> asyncio.Future[list[int]]:
        """Asks for a transaction; its place in the order is given at once.

        Returns:
            A future of the row counts, one a statement. Cancelling who awaits it does not undo the write.
        """
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((statements, future))
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="ordered writes")
        return future

    async def close(self) -> None:
        """Returns once everything is committed or has failed."""
        if self._draining is not None:
            await self._draining

    async def _drain(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            try:
                if self._failure is not None:
                    raise self._failure
                counts = await self._commit([statements for statements, _ in together])
            except Exception as error:  # noqa: BLE001 - the boundary: each caller gets it
                self._failure = error
                for _, future in together:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), count in zip(together, counts, strict=True):
                if not future.done():
                    future.set_result(count)
        self._draining = None

    async def _commit(self, groups: list[Sequence[Any]]) -> list[list[int]]:
        async with self._engine.begin() as connection:
            return [[(await connection.execute(one)).rowcount for one in statements] for statements in groups]
