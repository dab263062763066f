"""One keep-alive connection of `LeanClient`, and the ways in which a call gets no answer."""

from __future__ import annotations

import asyncio
from typing import cast

from tide_sdk.http_parse import Response, ResponseError, ResponseParser


class TransportError(Exception):
    """The call got no answer; whether the peer acted is not known unless the subclass says so."""


class ConnectFailed(TransportError):
    """No connection could be made: the peer did not see the request."""


class QueueFull(TransportError):
    """Too many calls wait already: the peer did not see the request."""


class Disconnected(TransportError):
    """The connection ended before the answer was complete: the peer may have acted."""


class ProtocolFailed(TransportError):
    """The answer was not HTTP or JSON within the limits: the peer may have acted."""


class DeadlineExceeded(TransportError):
    """The call's time is over: the peer may have acted."""


class Connection(asyncio.Protocol):
    """One connection that carries one request at a time.

    Attributes:
        transport: None before the connection is made and after it is lost.
        num_requests: requests written so far.
        idle_since_s: loop time of the last answer.
    """

    __slots__ = ("_answer", "_due_s", "_parser", "_timer", "_timer_s", "idle_since_s", "num_requests", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.num_requests = 0
        self.idle_since_s = 0.0
        self._parser: ResponseParser | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop once."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with the next bytes."""
        parser, answer = self._parser, self._answer
        if parser is None or answer is None or answer.done():
            self.close()  # bytes that nobody asked for: the connection cannot be trusted any more
            return
        try:
            done = parser.feed(data)
        except ResponseError as error:
            self.close()
            answer.set_exception(ProtocolFailed(str(error)))
            return
        if done and parser.response is not None:
            answer.set_result(parser.response)

    def eof_received(self) -> bool:
        """Called by the event loop when the peer closes its side; the transport then closes."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop once; fails or completes the answer that is waited for."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        parser, answer = self._parser, self._answer
        if parser is None or answer is None or answer.done():
            return
        if exc is None and parser.eof() and parser.response is not None:
            answer.set_result(parser.response)
        else:
            answer.set_exception(Disconnected(f"the peer closed the connection before its answer was complete ({exc})"))

    @property
    def open(self) -> bool:
        """True while a request can be written."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def untouched(self) -> bool:
        """True if no byte of the present answer has arrived."""
        return self._parser is None or not self._parser.started

    def begin(
        self, data: bytes, max_body_bytes: int, loop: asyncio.AbstractEventLoop, due_s: float
    ) -> asyncio.Future[Response]:
        """Write a request; the future gives its answer, or `TimeoutError` at the loop's time `due_s`."""
        assert self.transport is not None
        self.num_requests += 1
        self._parser = ResponseParser(max_body_bytes)
        self._answer = loop.create_future()
        self._due_s = due_s
        # One timer lasts for many calls: when it goes off it looks how long the present one still has.
        if self._timer is None or self._timer_s > due_s:
            self._arm(loop)
        self.transport.write(data)
        return self._answer

    def finish(self) -> bool:
        """Forget the answered request; True if the connection may carry another."""
        parser, self._parser, self._answer = self._parser, None, None
        return parser is not None and parser.response is not None and parser.reusable and self.open

    def close(self) -> None:
        """Close at once, dropping what is not yet written."""
        if self.transport is not None:
            self.transport.abort()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._due_s
        self._timer = loop.call_at(self._due_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._answer is None or self._answer.done():
            return
        if loop.time() < self._due_s:
            self._arm(loop)
        else:
            self._answer.set_exception(TimeoutError())
