"""The record of a task's last turn, from which a repeated action is answered."""

from __future__ import annotations

import asyncio

from tide_sdk import codec
from tide_sdk.errors import TideError


class TurnRecord:
    """A turn that runs or was the last to run.

    Attributes:
        turn: its number.
        answer: the observation as it was sent, None until then.
        error: what the turn failed with, None otherwise.
    """

    __slots__ = ("_body", "_settled", "answer", "error", "turn")

    def __init__(self, turn: int, body: bytes) -> None:
        self.turn = turn
        self._body = body
        self.answer: bytes | None = None
        self.error: TideError | None = None
        self._settled: asyncio.Event | None = None  # made by the first that waits; most turns have nobody

    @property
    def settled(self) -> bool:
        """True once the turn has its answer or its error."""
        return self.answer is not None or self.error is not None

    def settle(self, end: bytes | TideError) -> None:
        """Take the turn's answer or its error, once, and wake all that wait for it."""
        if isinstance(end, TideError):
            self.error = end
        else:
            self.answer = end
        if self._settled is not None:
            self._settled.set()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept of it."""
        return len(self._body) + len(self.answer or b"")

    def same_as(self, body: bytes) -> bool:
        """True if `body` carries the same message, compared as parsed JSON."""
        return body == self._body or codec.same(codec.loads(body)["message"], codec.loads(self._body)["message"])

    async def result(self) -> bytes:
        """Waits until the turn has ended; the caller's deadline is the task's clocks. Raises its error."""
        if not self.settled:
            self._settled = self._settled or asyncio.Event()
            await self._settled.wait()
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer
