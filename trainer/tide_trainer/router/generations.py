"""Calls at their engines, and the aborts that the main process asks for.

    run -> engine.generate -----------------------------> the completion
    abort -> engine.abort, again until the call is over -> CallAborted: what was sampled is dropped

An abort may meet its call anywhere: on the way to the engine (it is repeated), at the engine, on the way back (then the
answer counts, and the abort came too late), or over (it does nothing).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tide_trainer import types
from tide_trainer.errors import EngineFailed, EngineRefused

_LOG = logging.getLogger(__name__)
_ABORT_TIMEOUT_S = 2.0
_REPEATED_AFTER_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Waits between tries; then the call is left to its own deadline."""


class Engine(Protocol):
    """What a rank's client must do; `EngineClient` does."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: types.Sampling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        images: Sequence[types.ImageSpan] = (),
    ) -> types.Completion:
        """Samples one completion."""
        ...

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Ends calls in flight; the number ended."""
        ...

    async def aclose(self) -> None:
        """Closes all connections."""
        ...


class CallAborted(Exception):
    """The main process took a call back; `dropped_tokens` were sampled, and nobody sees them."""

    def __init__(self, dropped_tokens: int) -> None:
        super().__init__(f"aborted by the scheduler, {dropped_tokens} sampled tokens dropped")
        self.dropped_tokens = dropped_tokens


@dataclass(eq=False, slots=True)
class _Running:
    request_id: str
    engine: Engine
    aborter: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Generations:
    """The calls that are at an engine now."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._aborters: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(
        self,
        engine: Engine,
        call: str,
        prompt_ids: list[int],
        sampling: types.Sampling,
        *,
        priority: int,
        timeout_s: float,
        images: Sequence[types.ImageSpan],
    ) -> types.Completion:
        """The completion of a call, under the request id `c<call>`.

        Raises:
            CallAborted: `abort` was asked for, and came in time.
            EngineFailed: the engine is gone, broken, late, or aborted the call by itself.
            EngineRefused: it does not take the call.
        """
        running = self._running[call] = _Running(f"c{call}", engine)
        try:
            completion = await engine.generate(
                prompt_ids,
                sampling,
                request_id=running.request_id,
                priority=priority,
                timeout_s=timeout_s,
                images=images,
            )
        finally:
            del self._running[call]
            running.over.set()
        if completion.finish_reason != "abort":
            return completion
        if running.aborter is not None:
            raise CallAborted(len(completion.token_ids))
        raise EngineFailed("the engine aborted the call")

    def abort(self, call: str) -> bool:
        """Has the engine end a call; False where it is at no engine. A second time it changes nothing."""
        running = self._running.get(call)
        if running is None:
            return False
        if running.aborter is None:
            running.aborter = asyncio.create_task(_abort(running), name=f"abort call {call}")
            self._aborters.add(running.aborter)
            running.aborter.add_done_callback(self._aborters.discard)
        return True

    async def close(self) -> None:
        """Ends the aborts under way."""
        for task in self._aborters:
            task.cancel()
        await asyncio.gather(*self._aborters, return_exceptions=True)


async def _abort(running: _Running) -> None:
    for wait_s in _REPEATED_AFTER_S:
        try:
            await running.engine.abort([running.request_id], timeout_s=_ABORT_TIMEOUT_S)
        except (EngineFailed, EngineRefused) as error:
            _LOG.warning("request %s could not be aborted: %s", running.request_id, error)
        try:
            async with asyncio.timeout(wait_s):
                await running.over.wait()
            return
        except TimeoutError:
            continue
    _LOG.error("request %s goes on although it was aborted; its own deadline ends it", running.request_id)
