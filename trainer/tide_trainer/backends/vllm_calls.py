"""The calls that wait for vLLM's engine thread, and how they get their answers on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tide_trainer import types
from tide_trainer.errors import EngineFailed, TrainerError


@dataclass(eq=False, slots=True)
class Call:
    """One request in the engine; owned by the engine thread once it is handed over."""

    request: Any
    future: asyncio.Future[types.Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    def completion(self, reason: str, version: int) -> types.Completion:
        """What was sampled until now, as the call's answer."""
        return types.Completion(tuple(self.token_ids), tuple(self.logprobs), self.cached_tokens, reason, version)


def resolve(done: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Give the results to who still waits."""
    for future, result in done:
        if not future.done():
            future.set_result(result)


def fail(futures: list[asyncio.Future[Any]], error: BaseException) -> None:
    """Raise the error for who still waits."""
    if not isinstance(error, TrainerError):
        error = EngineFailed(f"{type(error).__name__}: {error}")
    for future in futures:
        if not future.done():
            future.set_exception(error)
