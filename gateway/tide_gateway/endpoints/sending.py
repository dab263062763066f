"""Sends answers so that a slow reader holds only bytes that are counted.

uvicorn hands a whole answer to the connection, which keeps what the caller does not take; the call itself is over by
then. Here an answer that is not small is counted, goes out in pieces, and its call is over once it is nearly taken. How
long a caller may take is the connection's to say (`tide_gateway.connections`).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from tide_gateway.load import Held
from tide_sdk.asgi import MAX_WHOLE_BYTES, Send, Whole, send_json, send_problem
from tide_sdk.errors import TideError
from tide_sdk.wire import CONTRACT_VERSION

_HEAD = b"content-type: application/json\r\ntide-contract: %d\r\n" % CONTRACT_VERSION
UNCOUNTED_BYTES = MAX_WHOLE_BYTES
"""An answer up to this size goes out at once, as a part of what a connection costs."""
PIECE_BYTES = 64 * 1024


class HeldSend:
    """`send` of one call; an answer that does not fit becomes 429, and what the call did stays done.

    Args:
        send: uvicorn's.
        held: what the call holds.

    Attributes:
        status: of the answer that went out; 0 before.
    """

    __slots__ = ("_held", "_send", "_start", "status")

    def __init__(self, send: Send, held: Held) -> None:
        self._send = send
        self._held = held
        self._start: MutableMapping[str, Any] | None = None
        self.status = 0

    async def json(self, status: int, body: bytes, whole: Whole | None) -> None:
        """Send a JSON answer, in one piece through `whole` (`tide_sdk.answering`) where it is small."""
        if whole is not None and len(body) <= UNCOUNTED_BYTES and whole(status, _HEAD, body):
            self.status = status
        else:
            await send_json(self, status, body)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send one ASGI message; the head waits for the body, since it may turn out to be another."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        body = message.get("body", b"")
        if start is not None:
            if len(body) > UNCOUNTED_BYTES:
                try:
                    self._held.hold(len(body))
                except TideError as error:
                    self.status = error.status
                    await send_problem(self._send, error)
                    return
            self.status = start["status"]
            await self._send(start)
        if len(body) <= UNCOUNTED_BYTES:
            await self._send(message)
            return
        pieces = memoryview(body)
        for first in range(0, len(body), PIECE_BYTES):
            piece = pieces[first : first + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        # One more message, since each waits until the connection has little left of the one before.
        await self._send({"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)})
