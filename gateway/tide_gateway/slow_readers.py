"""Cuts a connection whose caller does not take what is answered."""

from __future__ import annotations

import asyncio


class SlowReader:
    """Looks at what one connection could not send yet.

    Args:
        transport: of the connection.
        loop: that the connection lives on.
        pause_s: longest time in which the caller takes nothing.
        total_s: seconds for one whole answer.
    """

    __slots__ = ("_loop", "_pause_s", "_timer", "_total_s", "_transport", "_until_s")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, pause_s: float, total_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._pause_s = pause_s
        self._total_s = total_s
        self._timer: asyncio.TimerHandle | None = None
        self._until_s: float | None = None

    def waits(self) -> None:
        """More of an answer is there than the kernel takes. The next pieces of it get no time of their own."""
        if self._until_s is None:
            self._until_s = self._loop.time() + self._total_s
        self._look()

    def moves(self) -> None:
        """Nearly all that was there is taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answered(self) -> None:
        """The answer is out, and the next one has its own time, unless this one still waits."""
        if self._timer is None:
            self._until_s = None

    def _look(self, before: float = float("inf")) -> None:
        num_bytes = self._transport.get_write_buffer_size()
        if num_bytes >= before or (self._until_s is not None and self._loop.time() >= self._until_s):
            self._timer = None
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._pause_s, self._look, num_bytes)
