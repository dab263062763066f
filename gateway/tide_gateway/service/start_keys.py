"""The rules of keys and attempts: which task a start repeats, and which one it replaces."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from tide_gateway import lifecycle
from tide_gateway.service.endings import Endings
from tide_gateway.service.live import Live, Registry
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome, StartRequest


class StartKeys:
    """Finds what a start repeats.

    Args:
        registry: the open tasks.
        endings: ends the attempts that are replaced.
    """

    def __init__(self, registry: Registry, endings: Endings) -> None:
        self._registry = registry
        self._endings = endings
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def lock(self, owner: str, key: str):
        """One decision at a time per key; the lock goes with its last user."""
        lock, users = self._locks.get((owner, key), (asyncio.Lock(), 0))
        self._locks[owner, key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[owner, key]
            if users == 1:
                del self._locks[owner, key]
            else:
                self._locks[owner, key] = (lock, users - 1)

    async def known(self, owner: str, request: StartRequest) -> Live | int:
        """The task that the call repeats; for a new one the key's highest attempt, which is ended then, or -1.

        What is compared is what was asked for: an absent field equals its default.
        """
        task = await self._registry.repository.newest_attempt(owner, request.key)
        if task is None:
            return -1
        if request.attempt < task.attempt:
            words = f"attempt {request.attempt} of key {request.key!r}: attempt {task.attempt} exists"
            raise TideError("stale_attempt", words, attempt=task.attempt)
        stored = await self._registry.repository.start_of(task.task_id)
        before = None if stored is None else StartRequest.model_validate(codec.loads(stored.request))
        if before is None or not codec.same(_without_attempt(before), _without_attempt(request)):
            words = f"key {request.key!r} was already used for another start; use a new key"
            raise TideError("key_conflict", words, field="key")
        live = self._registry.adopt(task)
        if request.attempt == task.attempt:
            return live

        async def supersede() -> None:
            if lifecycle.is_open(live.task):
                replaced = Outcome(kind="aborted", reason=lifecycle.SUPERSEDED)
                await self._endings.begin(live, replaced, detail=f"attempt {request.attempt} began")

        await self._registry.decide(live, supersede)
        return task.attempt


def _without_attempt(request: StartRequest) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude={"attempt"})
