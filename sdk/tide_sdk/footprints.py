"""Footprints: how many tokens a task's context holds after each turn, reported to the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http import read_json
from tide_sdk.http_connection import TransportError
from tide_sdk.https import HttpClient, open_client
from tide_sdk.retries import Backoff, may_retry
from tide_sdk.wire import TaskId, Wire

_log = logging.getLogger("tide_sdk.footprints")
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Footprint(Wire):
    """One turn's tokens. The body of `POST /footprints` is a list of these.

    Attributes:
        task: the task's id.
        sequence: numbered upwards by the sender, so that a late or doubled report changes nothing.
        turn: the turn whose model call this was.
        prompt_tokens: tokens of the prompt, cached ones included.
        completion_tokens: tokens that the model wrote.
        cached_tokens: prompt tokens that the engine's cache held.
        image_tokens: prompt tokens that stand for images.
        context_tokens: tokens that the next prompt will at least have.
    """

    task: TaskId
    sequence: int = Field(ge=1, le=2**63 - 1)
    turn: int = Field(ge=0, le=2**31 - 1)
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens = 0
    image_tokens: Tokens = 0
    context_tokens: Tokens


@dataclass(slots=True)
class _Pending:
    footprint: Footprint
    arrived: asyncio.Future[bool]


class FootprintReporter:
    """Sends footprints in batches: all that came up in one tick of the event loop, or while a batch was under way.

    Args:
        url: the router's base URL.
        max_pending: reports that may wait; one more is lost at once.
        max_batch: reports in one call.
        deadline_s: seconds for a batch with all its tries; after that it is lost.
        token: sent as `Authorization: Bearer`.
        http: another transport, for tests; the reporter closes it.
        sleep: waits that many seconds.

    Attributes:
        num_sent: reports that arrived.
        num_lost: reports that did not.
    """

    def __init__(
        self,
        url: str,
        *,
        max_pending: int = 16_384,
        max_batch: int = 512,
        deadline_s: float = 10.0,
        token: str | None = None,
        http: HttpClient | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.num_sent = 0
        self.num_lost = 0
        self._http = http or open_client(url, max_in_flight=2, timeout_s=deadline_s, headers=headers)
        self._max_pending, self._max_batch, self._deadline_s = max_pending, max_batch, deadline_s
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=1.0)
        self._sequence = count(1)
        self._pending: list[_Pending] = []
        self._sender: asyncio.Task[None] | None = None

    async def report(
        self,
        task: str,
        turn: int,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        image_tokens: int = 0,
        context_tokens: int | None = None,
    ) -> bool:
        """Report one turn; True once it has arrived, False if it is lost (which is counted, never raised).

        Cancelling the call does not take the report back.

        Args:
            task: the task's id.
            turn: the turn of the model call.
            prompt_tokens: see `Footprint`.
            completion_tokens: see `Footprint`.
            cached_tokens: see `Footprint`.
            image_tokens: see `Footprint`.
            context_tokens: None takes prompt and completion together.
        """
        footprint = Footprint(
            task=task,
            sequence=next(self._sequence),
            turn=turn,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            image_tokens=image_tokens,
            context_tokens=prompt_tokens + completion_tokens if context_tokens is None else context_tokens,
        )
        if len(self._pending) >= self._max_pending:
            self.num_lost += 1
            return False
        pending = _Pending(footprint, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return await asyncio.shield(pending.arrived)

    async def aclose(self) -> None:
        """Send what is pending, within the deadline, then close; safe to repeat."""
        if self._sender is not None and not self._sender.done():
            await asyncio.wait((self._sender,), timeout=self._deadline_s)
            self._sender.cancel()
            await asyncio.wait((self._sender,))
        self.num_lost += len(self._pending)
        for item in self._pending:
            if not item.arrived.done():
                item.arrived.set_result(False)
        self._pending.clear()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _send_all(self) -> None:
        while self._pending:
            batch, self._pending = self._pending[: self._max_batch], self._pending[self._max_batch :]
            arrived = False
            try:
                arrived = await self._send(codec.dumps([item.footprint.model_dump() for item in batch]))
            finally:
                if arrived:
                    self.num_sent += len(batch)
                else:
                    self.num_lost += len(batch)
                for item in batch:
                    if not item.arrived.done():
                        item.arrived.set_result(arrived)

    async def _send(self, body: bytes) -> bool:
        num_failures = 0
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    try:
                        response = await self._http.request("POST", "/footprints", body, idempotent=True)
                        if response.status >= 400:
                            read_json(response)
                        return True
                    except (TransportError, TideError) as error:
                        if not may_retry(error, idempotent=True):
                            _log.warning("footprints refused: %s", error)
                            return False
                    num_failures += 1
                    await self._sleep(self._backoff.wait_s(num_failures, 0.5))
        except TimeoutError:
            _log.warning("footprints lost: no answer within %s s", self._deadline_s)
            return False
