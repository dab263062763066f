"""Bounds what a connection may cost before any of our code sees a request: header size and time, pace of a body.

    connection -> fewer than max_connections? -> header (bytes, fields, seconds) -> ASGI <- body (its pace)

uvicorn's own protocol waits for ever for a header of any size. A refused connection is answered and closed. A request
that comes in one piece, as nearly all do, arms no timer.
"""

from __future__ import annotations

import asyncio
import ssl
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tide_gateway.connection_limits import ConnectionLimits
from tide_gateway.handshakes import TlsFront
from tide_gateway.slow_readers import SlowReader
from tide_sdk import codec
from tide_sdk.answering import AnsweringProtocol


class _Refused(Exception):
    """Raised inside the parser's callbacks, which ends the parsing."""


class _Phase(Enum):
    SILENT = "no byte of the next request yet, and no answer under way"
    HEADER = "between a header's first byte and its last"
    BODY = "between a header's end and the body's"
    REST = "as BODY, but the request is already answered"
    WHOLE = "the request is whole; the answer is under way, or uvicorn's keep-alive timer runs"


def guarded_protocol(limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits, for `uvicorn.Config(http=...)`; with `tls` the listener itself is plain."""

    class Guarded(GuardedProtocol):
        limits_of_connection = limits

    if tls is None:
        return Guarded

    class GuardedTls(TlsFront):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(Guarded(*args, **kwargs), tls, limits.handshake_s, limits.max_connections)

    return GuardedTls


class GuardedProtocol(AnsweringProtocol):
    """uvicorn's protocol, bounded; see `ConnectionLimits`."""

    limits_of_connection = ConnectionLimits()
    _reader: SlowReader  # from `connection_made` on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.SILENT
        self._since_s = self._heard_s = self.loop.time()  # when the phase began, when the last piece came
        self._refusal: tuple[int, str, str] | None = None
        self._num_bytes = self._num_fields = 0  # of the present header
        self._num_pending_bytes = 0  # fed since the parser last reported something
        self._answering: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    # what asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        limits = self.limits_of_connection
        transport.set_write_buffer_limits(high=limits.max_unsent_bytes)
        self._reader = SlowReader(transport, self.loop, limits.answer_pause_s, limits.answer_s)
        if len(self.connections) > limits.max_connections:
            self._refuse(503, "unavailable", "too many connections are open; call again later")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the timers, and tell whoever answers: uvicorn tells only the last one of pipelined requests."""
        self._stop_timer()
        self._reader.moves()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More of an answer waits than the kernel takes."""
        super().pause_writing()
        self._reader.waits()

    def resume_writing(self) -> None:
        """The caller has taken nearly all of it."""
        self._reader.moves()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what is then unfinished has a deadline."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._heard_s = self.loop.time()
        self._num_pending_bytes += len(data)
        before = self._phase
        self._unset_keepalive_if_required()
        try:  # as uvicorn does it, but without log lines, with which each caller could fill the disk
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess] (None once the connection is lost)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade:
            pass
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._num_pending_bytes > self.limits_of_connection.max_header_bytes:
            self._refuse(*self._too_large())
        elif self._phase is before and before in (_Phase.SILENT, _Phase.WHOLE) and not self._is_answering():
            # Empty lines before a request line: the parser swallows them, and uvicorn's timer is off.
            self._enter(_Phase.HEADER)
        elif self._phase is _Phase.WHOLE and not self._is_answering():
            # It was answered before it was whole; uvicorn's keep-alive timer went off with this piece.
            self._enter(_Phase.SILENT)
        if self._phase is not _Phase.WHOLE:
            self._arm()

    # what the parser calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._num_bytes = self._num_fields = self._num_pending_bytes = 0
        if len(self.pipeline) >= self.limits_of_connection.max_pipelined:
            self._stop_parsing(429, "capacity", "too many requests wait for the answer of an earlier one")
        if self._phase is not _Phase.HEADER:
            self._enter(_Phase.HEADER)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        self._num_pending_bytes = 0
        self.url += url
        if len(self.url) > self.limits_of_connection.max_url_bytes:
            words = f"the URL may have at most {self.limits_of_connection.max_url_bytes} bytes"
            self._stop_parsing(414, "too_large", words)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the header or of the trailer."""
        limits = self.limits_of_connection
        self._num_pending_bytes = 0
        self._num_fields += 1
        self._num_bytes += len(name) + len(value) + 4
        if self._num_bytes > limits.max_header_bytes or self._num_fields > limits.max_header_fields:
            self._stop_parsing(*self._too_large())
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The header is whole."""
        self._num_pending_bytes = 0
        super().on_headers_complete()
        self._enter(_Phase.BODY)
        if self.parser is not None and self.parser.should_upgrade():
            # There is no other protocol here: answer it as it stands, and read no further.
            self.cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        """A chunk of the body begins."""
        self._num_pending_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._num_pending_bytes = 0
        self._enter(_Phase.WHOLE)
        super().on_message_complete()

    # what uvicorn calls

    def on_response_complete(self) -> None:
        """An answer is out. The rest of a body that nobody waits for may come, but not for long."""
        super().on_response_complete()
        self._reader.answered()
        if self._phase is _Phase.BODY and not self._is_answering() and not self.transport.is_closing():
            self._enter(_Phase.REST)
            self._arm()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came. What the caller has not taken by now is dropped: a close would wait for it."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed, with the reason why we stopped the parser if it was us."""
        self._refuse(*(self._refusal or (400, "invalid", "this is not an HTTP/1.1 request")))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    # inside

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since_s = self.loop.time()

    def _due_s(self) -> float:
        limits = self.limits_of_connection
        if self._phase is _Phase.BODY:
            return min(self._since_s + limits.body_s, self._heard_s + limits.body_pause_s)
        span_s = {_Phase.SILENT: limits.first_byte_s, _Phase.HEADER: limits.header_s, _Phase.REST: limits.rest_s}
        return self._since_s + span_s[self._phase]

    def _arm(self) -> None:
        """See to it that the deadline is looked at in time; a timer that goes off earlier looks again."""
        due_s = self._due_s()
        if self._timer is None or self._timer_s > due_s:
            self._stop_timer()
            self._timer_s = due_s
            self._timer = self.loop.call_at(due_s, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._phase is _Phase.WHOLE or self._refusal is not None or self.transport.is_closing():
            return
        if self.flow.read_paused:
            # It is us who do not read: the caller is not late.
            self._since_s = self._heard_s = self.loop.time()
        if self.loop.time() < self._due_s():
            self._arm()
        elif self._phase in (_Phase.SILENT, _Phase.REST):
            self.transport.close()
        else:
            what = "header" if self._phase is _Phase.HEADER else "body"
            self._refuse(408, "invalid", f"the request's {what} did not arrive in time")

    def _too_large(self) -> tuple[int, str, str]:
        limits = self.limits_of_connection
        words = f"the header may have at most {limits.max_header_bytes} bytes in {limits.max_header_fields} fields"
        return 431, "too_large", words

    def _stop_parsing(self, status: int, code: str, words: str) -> None:
        self._refusal = (status, code, words)
        raise _Refused

    def _refuse(self, status: int, code: str, words: str) -> None:
        """Answer with a problem if nothing else is being answered, and close."""
        self._refusal = (status, code, words)
        waiting = self._phase is _Phase.BODY and not self.pipeline and not self.cycle.response_started
        if waiting or not self._is_answering():
            title = STATUS_LINE[status].split(b" ", 2)[2].strip().decode()
            problem = {"type": f"urn:tide:problem:{code}", "title": title, "status": status, "code": code}
            body = codec.dumps(problem | {"detail": words})
            head = b"content-type: application/problem+json\r\ntide-contract: 1\r\nconnection: close\r\n"
            length = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + length + body)
            if status != 503 and self.transport.can_write_eof():
                # With a close, what the caller still sends would be answered by a reset, which eats the answer.
                self.transport.write_eof()
                self._stop_timer()
                self._timer = self.loop.call_later(self.limits_of_connection.rest_s, self.transport.close)
                if waiting:
                    self.cycle.disconnected = True
                    self.cycle.message_event.set()
                return
        self.transport.close()
