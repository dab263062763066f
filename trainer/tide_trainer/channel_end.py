"""One end of a channel: duplex messages over a unix socket, requests with replies and one-way events.

    notify/request -> [frames of this loop tick] -> one write -> peer's data_received -> handler -> reply

A frame is one line of JSON, `[kind, id, name, payload]`. Handlers of events are plain functions, called in the order
of sending, so nothing queues behind them; a request's handler may be a coroutine, at most `max_running` run at once.
Back-pressure: requests wait while the socket is full; events never wait, and `notify` fails beyond
`max_buffered_bytes`; with `max_running` requests running the channel stops reading. Every request has a deadline.
`channel.py` opens and accepts channels.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from tide_sdk import codec
from tide_trainer.channel_errors import ChannelClosed, ChannelFull, ChannelTimeout, FrameTooLarge, PeerError

_LOG = logging.getLogger(__name__)
EVENT, REQUEST, REPLY, ERROR, HELLO = range(5)

Handler = Callable[[Any], Any]
"""Takes the payload. An event's returns nothing; a request's returns the reply's payload, or an awaitable of it."""


class Channel(asyncio.Protocol):
    """One end of a channel; made by `connect_channel` and `serve_channel`.

    Attributes:
        peer: the name that the peer gave in its hello.
        num_handler_errors: events whose handler raised (each is logged).
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler] | None = None,
        *,
        max_running: int = 1024,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        max_frame_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.peer = ""
        self.num_handler_errors = 0
        self._handlers: dict[str, Handler] = dict(handlers or {})
        self._max_running = max_running
        self._max_buffered_bytes = max_buffered_bytes
        self._max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._num_part_bytes = 0
        self._out: list[bytes] = []
        self._num_out_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._running: set[asyncio.Future[Any]] = set()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._on_hello: Callable[[Channel, Any], None] | None = None

    @property
    def closed(self) -> bool:
        """True once the channel is closed."""
        return self._closed.done()

    def handle(self, name: str, handler: Handler) -> None:
        """Set the handler of a request or event; a later one replaces the earlier."""
        self._handlers[name] = handler

    def on_close(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the channel closes, soon if it is closed already."""
        self._closed.add_done_callback(lambda done: callback(done.result()))

    async def wait_closed(self) -> str:
        """Wait until the channel is closed; the reason."""
        return await asyncio.shield(self._closed)

    def notify(self, name: str, payload: Any = None) -> None:
        """Send an event; it goes out at the end of this loop tick, in order.

        Raises:
            ChannelClosed: the channel is closed.
            ChannelFull: the peer does not read; nothing was sent.
            FrameTooLarge: the payload is larger than a frame may be; nothing was sent.
            codec.CodecError: the payload is not plain JSON data.
        """
        self._send(EVENT, 0, name, payload)

    async def request(self, name: str, payload: Any = None, *, timeout_s: float) -> Any:
        """Send a request and wait for its reply. Cancelling forgets the reply; the peer still acts.

        Raises:
            PeerError: the peer's handler failed or refused.
            ChannelTimeout: no reply within `timeout_s`.
            ChannelClosed: the channel closed before the reply.
        """
        self._next_id += 1
        number = self._next_id
        reply: asyncio.Future[Any] = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._writable.wait()
                self._pending[number] = reply
                self._send(REQUEST, number, name, payload)
                return await reply
        except TimeoutError:
            raise ChannelTimeout(f"{self.peer or 'the peer'} did not answer {name!r} within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)

    def close(self, reason: str = "closed by this side") -> None:
        """Send what is buffered and close; requests in flight fail with ChannelClosed. Idempotent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
        self._set_closed(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's call when the socket is up."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's call when the socket is gone."""
        self._set_closed(f"the peer is gone ({exc})" if exc else "the peer is gone")

    def pause_writing(self) -> None:
        """asyncio's call when the socket is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """asyncio's call when the socket takes more."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """asyncio's call with the next bytes."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if self._parts and lines:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._num_part_bytes = [], 0
        for line in lines:
            if self.closed:
                return
            self._frame(line)
        if rest:
            self._parts.append(rest)
            self._num_part_bytes += len(rest)
            if self._num_part_bytes > self._max_frame_bytes:
                self._break(f"the peer sent a frame larger than {self._max_frame_bytes} bytes")

    def _frame(self, line: bytes) -> None:
        try:
            kind, number, name, payload = codec.loads(line)
        except (codec.CodecError, ValueError, TypeError) as error:
            self._break(f"the peer sent a frame that cannot be read: {error}")
            return
        if self._on_hello is not None:
            self._on_hello(self, payload if kind == HELLO else None)
        elif kind == EVENT:
            self._event(name, payload)
        elif kind == REQUEST:
            self._request(number, name, payload)
        elif kind in (REPLY, ERROR):
            reply = self._pending.pop(number, None)
            if reply is None or reply.done():
                return  # its deadline passed
            if kind == REPLY:
                reply.set_result(payload)
            else:
                reply.set_exception(PeerError(str(name), str(payload)))
        else:
            self._break(f"the peer sent a frame of unknown kind {kind!r}")

    def _event(self, name: str, payload: Any) -> None:
        handler = self._handlers.get(name)
        if handler is None:
            self.num_handler_errors += 1
            _LOG.warning(
                "no handler for event %r from %s; it is dropped, and later ones without a word", name, self.peer
            )
            self._handlers[name] = _drop
            return
        try:
            handler(payload)
        except PeerError as error:  # for example a grant that crossed with the call's end
            _LOG.info("event %r from %s refused: %s", name, self.peer, error)
        except Exception as error:  # noqa: BLE001 - the boundary: one bad event must not take down the channel of all tasks
            self.num_handler_errors += 1
            _LOG.error("the handler of event %r from %s failed", name, self.peer, exc_info=error)

    def _request(self, number: int, name: str, payload: Any) -> None:
        try:
            if name not in self._handlers:
                raise PeerError("unknown_request", f"no handler for {name!r}")
            result = self._handlers[name](payload)
        except Exception as error:  # noqa: BLE001 - the boundary: it is reported to the peer
            self._answer_error(number, name, error)
            return
        if not inspect.isawaitable(result):
            self._answer(number, name, result)
            return
        task = asyncio.ensure_future(result)
        self._running.add(task)
        task.add_done_callback(lambda done: self._finished(number, name, done))
        if len(self._running) >= self._max_running and self._transport is not None:
            self._transport.pause_reading()

    def _finished(self, number: int, name: str, done: asyncio.Future[Any]) -> None:
        self._running.discard(done)
        error = asyncio.CancelledError("cancelled") if done.cancelled() else done.exception()
        if self._transport is not None and not self.closed and len(self._running) < self._max_running:
            self._transport.resume_reading()
        if error is None:
            self._answer(number, name, done.result())
        else:
            self._answer_error(number, name, error)

    def _answer(self, number: int, name: str, result: Any) -> None:
        try:
            if not self.closed:
                self._send(REPLY, number, "", result)
        except (codec.CodecError, FrameTooLarge) as error:
            self._answer_error(number, name, error)

    def _answer_error(self, number: int, name: str, error: BaseException) -> None:
        if self.closed:
            return
        if not isinstance(error, PeerError):
            _LOG.error("request %r of %s failed", name, self.peer, exc_info=error)
            error = PeerError("internal", f"{type(error).__name__}: {error}")
        self._send(ERROR, number, error.code, error.message)

    def _send(self, kind: int, number: int, name: str, payload: Any) -> None:
        if self._closed.done():
            raise ChannelClosed(self._closed.result())
        frame = codec.dumps((kind, number, name, payload))
        if len(frame) > self._max_frame_bytes:
            raise FrameTooLarge(f"{name or 'a reply'} has {len(frame)} bytes; {self._max_frame_bytes} are allowed")
        waiting = self._num_out_bytes + (self._transport.get_write_buffer_size() if self._transport else 0)
        if waiting and waiting + len(frame) > self._max_buffered_bytes:
            raise ChannelFull(f"{waiting} bytes to {self.peer or 'the peer'} wait already")
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        self._num_out_bytes += len(frame)

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._out.append(b"")
            self._transport.write(b"\n".join(self._out))
        self._out, self._num_out_bytes = [], 0

    def _break(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._set_closed(reason)

    def _set_closed(self, reason: str) -> None:
        if self._closed.done():
            return
        self._closed.set_result(reason)
        self._writable.set()
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            if not reply.done():
                reply.set_exception(ChannelClosed(reason))
        for task in self._running:
            task.cancel()


def _drop(_: Any) -> None: ...
