r"""Footprints: how many tokens a task's context holds after each turn, reported to the router.

ctx.report -> footprint -> batch of this tick ---> POST /footprints    answered when it has arrived
                     \--> alone, if `hold` ------> POST /footprints    answered when the task may go on
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Annotated, Any, Self, cast

from pydantic import Field, model_validator

from tide_sdk import codec
from tide_sdk.http_connection import TransportError
from tide_sdk.http_parse import Response
from tide_sdk.https import HttpClient, open_client
from tide_sdk.model_errors import ContextOverflow, ModelStopped, failure_of, parse_body
from tide_sdk.retries import Backoff
from tide_sdk.wire import TaskId, Wire

_log = logging.getLogger("tide_sdk.footprints")
_RETRIED_STATUS = frozenset({429, 502, 503, 504})
_MAX_WORDS = 500
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Footprint(Wire):
    """One turn's tokens. The body of `POST /footprints` is a list of these.

    Attributes:
        task: the name by which the router knows the task: under a trainer its session.
        sequence: numbered upwards by the sender, so that a late or doubled report changes nothing. A sender that
            starts again goes on above what it sent before; ours begins at the clock's microseconds.
        turn: the turn whose model call this was.
        prompt_tokens: tokens of the prompt, cached ones included.
        completion_tokens: tokens that the model wrote.
        cached_tokens: prompt tokens that the engine's cache held.
        image_tokens: prompt tokens that stand for images.
        context_tokens: tokens that the next prompt will at least have.
        growth_tokens: tokens by which the context is expected still to grow; None if the sender does not know.
        hold: answer only when the task may go on; such a report is sent alone.
    """

    task: TaskId
    sequence: int = Field(ge=1, le=2**63 - 1)
    turn: int = Field(ge=0, le=2**31 - 1)
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens = 0
    image_tokens: Tokens = 0
    context_tokens: Tokens
    growth_tokens: Tokens | None = None
    hold: bool = False

    @model_validator(mode="after")
    def _parts_of_the_prompt(self) -> Self:
        for name, tokens in (("cached_tokens", self.cached_tokens), ("image_tokens", self.image_tokens)):
            if tokens > self.prompt_tokens:
                raise ValueError(f"{name} is {tokens}, more than prompt_tokens, which is {self.prompt_tokens}")
        return self


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
        hold_s: seconds that a report may be held, with all its tries.
        max_held: reports that may be held at once; more wait.
        token: sent as `Authorization: Bearer`.
        http: another transport, for tests; the reporter closes it.
        sleep: waits that many seconds.

    Attributes:
        num_sent: reports that arrived.
        num_lost: reports that did not, or were refused.
    """

    def __init__(
        self,
        url: str,
        *,
        max_pending: int = 16_384,
        max_batch: int = 512,
        deadline_s: float = 10.0,
        hold_s: float = 3600.0,
        max_held: int = 1024,
        token: str | None = None,
        http: HttpClient | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.num_sent = 0
        self.num_lost = 0
        self._http = http or open_client(url, max_in_flight=max_held + 1, timeout_s=deadline_s, headers=headers)
        self._max_pending, self._max_batch = max_pending, max_batch
        self._deadline_s, self._hold_s = deadline_s, hold_s
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=1.0)
        self._sequence = count(time.time_ns() // 1000)
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
        growth_tokens: int | None = None,
        hold: bool = False,
    ) -> bool:
        """Report one turn; True once it has arrived, False if it is lost or refused (counted and logged, not raised).

        Cancelling the call does not take the report back; one that is held stops waiting.

        Args:
            task: the task's name at the router.
            turn: the turn of the model call.
            prompt_tokens: see `Footprint`.
            completion_tokens: see `Footprint`.
            cached_tokens: see `Footprint`.
            image_tokens: see `Footprint`.
            context_tokens: None takes prompt and completion together.
            growth_tokens: see `Footprint`.
            hold: return only when the task may go on.

        Raises:
            ContextOverflow: held, and the context fits no rank.
            ModelStopped: held, and the task is over.
            ValueError: numbers that cannot be.
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
            growth_tokens=growth_tokens,
            hold=hold,
        )
        pending = _Pending(footprint, asyncio.get_running_loop().create_future())
        if hold:
            return await self._held(pending)
        if len(self._pending) >= self._max_pending:
            self.num_lost += 1
            return False
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
            refused: frozenset[int] | None = None
            try:
                response = await self._send(batch, self._deadline_s)
                refused = None if response is None else _refused(response, batch)
            finally:
                for item in batch:
                    arrived = refused is not None and item.footprint.sequence not in refused
                    self._count(arrived)
                    if not item.arrived.done():
                        item.arrived.set_result(arrived)

    async def _held(self, item: _Pending) -> bool:
        """Send one report alone and wait for its task's turn; the router knows a repeated one by its sequence."""
        response = await self._send([item], self._hold_s)
        failure = None if response is None or response.status < 400 else _failure(response)
        if isinstance(failure, (ContextOverflow, ModelStopped)):
            self._count(True)  # it arrived, and this is its task's answer
            raise failure
        arrived = response is not None and not _refused(response, [item])
        self._count(arrived)
        return arrived

    def _count(self, arrived: bool) -> None:
        self.num_sent += arrived
        self.num_lost += not arrived

    async def _send(self, batch: list[_Pending], limit_s: float) -> Response | None:
        """The router's answer, None if there is none in time."""
        body = codec.dumps([item.footprint.model_dump() for item in batch])
        num_failures = 0
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        response = await self._http.request(
                            "POST", "/footprints", body, timeout_s=limit_s, idempotent=True
                        )
                        if response.status not in _RETRIED_STATUS:
                            return response
                        _log.info("footprints are sent again: HTTP %d", response.status)
                    except TransportError as error:
                        _log.info("footprints are sent again: %s", error)
                    num_failures += 1
                    await self._sleep(self._backoff.wait_s(num_failures, 0.5))
        except TimeoutError:
            _log.warning("footprints lost: no answer within %s s", limit_s)
            return None


def _failure(response: Response) -> Exception:
    return failure_of(response.status, parse_body(response.body))


def _refused(response: Response, batch: list[_Pending]) -> frozenset[int]:
    """The sequences of the reports that the router did not take, each with its reason in the log."""
    if response.status >= 400:
        _log.warning("footprints refused: %s", _failure(response))
        return frozenset(item.footprint.sequence for item in batch)
    body = parse_body(response.body)
    told = cast("Mapping[str, Any]", body).get("refused") if isinstance(body, Mapping) else None
    if not isinstance(told, list) or not told:
        return frozenset()
    refusals = [cast("Mapping[str, Any]", item) for item in cast("list[Any]", told) if isinstance(item, Mapping)]
    _log.warning("footprints refused: %s", str(refusals)[:_MAX_WORDS])
    # What names no report of ours refuses none.
    named = [item.get("sequence") for item in refusals]
    return frozenset(sequence for sequence in named if isinstance(sequence, int))
