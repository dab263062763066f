"""A short way for whole small answers, beside uvicorn's own.

uvicorn writes head and body by themselves, which are two system calls here and two wake-ups at the caller, and checks
each header with regular expressions. What our servers answer has headers of our own and a body in hand.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tide_sdk.asgi import WHOLE


class AnsweringProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose applications find `answer_whole` in their scope; for `uvicorn.Config(http=...)`."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cast("dict[str, Any]", cycle.scope)[WHOLE] = partial(answer_whole, cycle)
        super()._start_asgi_task(cycle, app)


def answer_whole(cycle: RequestResponseCycle, status: int, head: bytes, body: bytes) -> bool:
    """Send a whole answer in one piece.

    Args:
        cycle: one request and its answer.
        status: HTTP status of an answer that has a body.
        head: the header lines, each with its line break, but for the length.
        body: small; it goes into the connection's buffer as it is.

    Returns:
        False, and nothing was sent, where the cycle's `send` has to be used: something was sent already or waits to
        be, the caller went away, or the connection ends with this answer.
    """
    if cycle.response_started or cycle.disconnected or not cycle.keep_alive or cycle.flow.write_paused:
        return False
    if cycle.default_headers or cycle.scope["method"] == "HEAD":
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body))
    cycle.message_event.set()
    cycle.on_response()
    return True
