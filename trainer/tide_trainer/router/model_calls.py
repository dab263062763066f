"""One HTTP request for a completion: read, joined with the call that it repeats, waited for, written.

request -> [last answer | call in flight | new call] -> captured -> answer, or a stream of it
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tide_sdk import asgi
from tide_trainer.router.calls import Calls
from tide_trainer.router.openai_answers import chat_events, completion_events, write_chat, write_completion
from tide_trainer.router.openai_requests import read_chat, read_completion
from tide_trainer.router.openai_wire import Answer, ApiError, ChatRequest, CompletionRequest, TokenText
from tide_trainer.router.outlet import Headers, Outlet, disconnected
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.state import Answered, Flight, Limits, Session

RETRY_HEADER = b"x-stainless-retry-count"
"""The official client's count of its retries, in lower case."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How an endpoint reads its requests and writes its answers."""

    read: Callable[[Any], ChatRequest | CompletionRequest]
    write: Callable[[Answer, Any, TokenText], bytes]
    events: Callable[[Answer, Any, TokenText], Iterator[bytes]]


ENDPOINTS = {
    "chat/completions": Endpoint(read_chat, write_chat, chat_events),
    "completions": Endpoint(read_completion, write_completion, completion_events),
}
"""By the path behind `/v1/`."""


class ModelCalls:
    """Serves the endpoints that sample."""

    def __init__(self, calls: Calls, renderer: Renderer, limits: Limits) -> None:
        self._calls = calls
        self._renderer = renderer
        self._limits = limits
        self._fresh = itertools.count()

    async def serve(
        self,
        session: Session,
        endpoint: str,
        body: bytes,
        headers: Mapping[bytes, bytes],
        receive: asgi.Receive,
        outlet: Outlet,
    ) -> None:
        """Answer one request; only what was captured goes out.

        Raises:
            ApiError: every failure, ready to be answered.
            ClientGone: the client left; what was captured by then stays, and is what the same call gets again.
        """
        form = ENDPOINTS[endpoint]
        request = form.read(asgi.parse_json(body))
        head = _head(session, request)
        digest = hashlib.blake2b(body, digest_size=16, person=endpoint[:16].encode()).digest()
        count = headers.get(RETRY_HEADER)
        retried = count != b"0"
        gone = asyncio.create_task(disconnected(receive))
        try:
            known = _known(session, digest, count)
            if known is None:
                flight = self._flight(session, digest, request, len(body), retried=retried)
                known = await self._landed(flight, gone, outlet, head if request.stream else None)
            answer, known.lost = known.answer, True
            if gone.done():
                raise asgi.ClientGone
            if request.stream:
                await outlet.stream(form.events(answer, request, self._renderer.token_text), head, gone)
            else:
                await outlet.whole(form.write(answer, request, self._renderer.token_text), head)
            known.lost = False
        finally:
            gone.cancel()

    def _flight(
        self,
        session: Session,
        digest: bytes,
        request: ChatRequest | CompletionRequest,
        num_bytes: int,
        *,
        retried: bool,
    ) -> Flight:
        """The call in flight that this one repeats, the latest such, or a new one."""
        if retried:
            for key, flight in reversed(session.flights.items()):
                if key.startswith(digest) and not flight.task.cancelling():
                    return flight
        if len(session.flights) >= self._limits.max_waiting_calls:
            message = f"{self._limits.max_waiting_calls} calls of this session are in flight; wait for one"
            raise ApiError(429, "rate_limit_exceeded", message, kind="rate_limit_error")
        key = digest + b"%d" % next(self._fresh)

        async def run() -> Answered:
            answered = Answered(digest, await self._calls.run(session, request, num_bytes))
            session.answered.append(answered)
            return answered

        flight = session.flights[key] = Flight(asyncio.create_task(run()))

        def landed(task: asyncio.Task[Answered]) -> None:
            session.flights.pop(key, None)
            if not task.cancelled():
                task.exception()  # its waiters may all be gone

        flight.task.add_done_callback(landed)
        return flight

    async def _landed(
        self, flight: Flight, gone: asyncio.Task[None], outlet: Outlet, stream_head: Headers | None
    ) -> Answered:
        """The flight's answer; it has deadlines of its own, and a stream is kept alive meanwhile.

        A client that goes away leaves the flight, and the last one to leave cancels it.
        """
        flight.num_waiting += 1
        every_s = None if stream_head is None else self._limits.keep_alive_s
        try:
            while not flight.task.done():
                await asyncio.wait((flight.task, gone), timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                if flight.task.done():
                    break
                if gone.done():
                    raise asgi.ClientGone
                if stream_head is not None:
                    await outlet.held(stream_head)
        finally:
            flight.num_waiting -= 1
            if not flight.task.done() and flight.num_waiting == 0:
                flight.task.cancel()
        if not flight.task.cancelled():
            return flight.task.result()
        if self._calls.closing:
            raise ApiError(503, "shutting_down", "the router is shutting down", kind="server_error")
        raise ApiError(410, "session_ended", "the session ended while this call waited")


def _known(session: Session, digest: bytes, count: bytes | None) -> Answered | None:
    """The answer that this call repeats, None for a new call.

    The official client counts its retries; other calls of the session may have been answered since. A client that does
    not count is taken to repeat its last call, never to want a second sample of the same messages: a doubled capture is
    worse than an answer given twice. Whoever asks, an answer that never arrived is given again.
    """
    for place, one in enumerate(reversed(session.answered)):
        repeats = place == 0 if count is None else count != b"0"
        if one.digest == digest and (repeats or one.lost):
            return one
    return None


def _head(session: Session, request: ChatRequest | CompletionRequest) -> Headers:
    ignored = list(request.ignored)
    if not session.training and request.temperature not in (None, session.sampling.temperature):
        ignored.append("temperature")  # an evaluation is at the run's temperature
    return ((b"tide-ignored", ", ".join(ignored).encode()),) if ignored else ()
