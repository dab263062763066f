"""One HTTP request's way back to its client: an answer or an error at once, or a stream that is kept alive.

    waiting -> [head -> ": held" every `keep_alive_s`] -> head -> chunks, 16 KiB at a time -> end
       | failed                          | failed                            | client gone
       v                                 v                                   v
    JSON with its status            SSE event with the error            ClientGone

The head of a stream goes out with its first byte: an error before the first keep-alive still has its own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from tide_sdk import asgi
from tide_sdk.timers import within
from tide_trainer.router.openai_wire import ApiError

MAX_SEND_BYTES = 16_384
"""Events of a stream are gathered up to this size; a client that reads slowly holds back the next."""
SEND_LIMIT_S = 60.0
"""Seconds in which a client must take what was sent; one that does not is taken to be gone."""
JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # some proxies would keep the keep-alives to themselves
)
_HELD = b": held\n\n"
Headers = tuple[tuple[bytes, bytes], ...]


class Outlet:
    """Sends what belongs to one request.

    Args:
        send: the server's.
        whole: sends a small answer in one piece, where the server can.

    Attributes:
        streaming: the head of a stream is out.
    """

    def __init__(self, send: asgi.Send, whole: asgi.Whole | None = None) -> None:
        self._send_event = send
        self._whole = whole
        self.streaming = False

    async def whole(self, body: bytes, headers: Headers = (), status: int = 200) -> None:
        """A complete JSON answer."""
        sending = asgi.send_json(self._send_event, status, body, (JSON, *headers), whole=self._whole)
        try:
            await within(SEND_LIMIT_S, sending)
        except TimeoutError as error:
            raise asgi.ClientGone from error

    async def error(self, error: ApiError) -> None:
        """The error with its status, or as an event where the head is out already."""
        if not self.streaming:
            await self.whole(error.body(), status=error.status)
            return
        await self._piece(b"data: " + error.body() + b"\n\n", more=False)

    async def held(self, headers: Headers) -> None:
        """A comment that keeps clients and proxies from giving up on a stream."""
        await self._begin(headers)
        await self._piece(_HELD)

    async def stream(self, events: Iterable[bytes], headers: Headers, gone: asyncio.Future[Any]) -> None:
        """The events to their end.

        Raises:
            ClientGone: the client left before the last of them was sent.
        """
        await self._begin(headers)
        block = bytearray()
        for event in events:
            if gone.done():
                raise asgi.ClientGone
            block += event
            if len(block) >= MAX_SEND_BYTES:
                await self._piece(bytes(block))
                block.clear()
        if gone.done():
            raise asgi.ClientGone
        await self._piece(bytes(block), more=False)

    async def _begin(self, headers: Headers) -> None:
        if not self.streaming:
            await self._sent({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]})
            self.streaming = True

    async def _piece(self, body: bytes, *, more: bool = True) -> None:
        await self._sent({"type": "http.response.body", "body": body, "more_body": more})

    async def _sent(self, event: dict[str, Any]) -> None:
        try:
            await within(SEND_LIMIT_S, _send(self._send_event, event))
        except TimeoutError as error:
            raise asgi.ClientGone from error


async def _send(send: asgi.Send, event: dict[str, Any]) -> None:
    await send(event)


async def disconnected(receive: asgi.Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        continue
