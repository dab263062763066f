"""What the router keeps of a session and of a call, and its limits."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tide_sdk.footprints import Footprint
from tide_trainer import types
from tide_trainer.router.openai_wire import Answer
from tide_trainer.router.sessions import Capture

MAX_ANSWERED = 8
"""Answers of a session that are kept for retries: as many as its calls may be in flight side by side."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The main process's word: run on this rank; `version` counts where the engine does not name its own.

    `final_tokens` is how long the task's context is expected to get, None where that is not known.
    """

    rank: str
    version: int = -1
    priority: int = 0
    final_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the router.

    Attributes:
        hold_timeout_s: longest wait of a call for its grant.
        engine_timeout_s: longest generation.
        max_sessions: sessions open at once.
        max_waiting_calls: calls of one session in flight or queued behind each other.
        max_session_tokens: tokens that one session may capture.
        max_body_bytes: larger bodies are refused.
        keep_alive_s: a stream whose call is held sends a comment so often.
        session_idle_s: a session without a call for this long is closed, what it captured is lost.
    """

    hold_timeout_s: float = 3600.0
    engine_timeout_s: float = 300.0
    max_sessions: int = 8192
    max_waiting_calls: int = 8
    max_session_tokens: int = 8_000_000
    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 10.0
    session_idle_s: float = 6 * 3600.0


@dataclass(slots=True)
class Session:
    """One task's session: its key, its defaults, what was captured, and the one call that may run.

    Attributes:
        training: what is captured is trained on; else the run measures, at its own temperature.
        answered: the latest answers, the newest last.
        reported: the newest footprint that a loop with its own engine told.
        passed: the sequence of the last held report that was let go.
    """

    name: str
    api_key: bytes
    sampling: types.Sampling
    max_context_tokens: int
    capture: Capture
    training: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    flights: dict[bytes, Flight] = field(default_factory=dict)
    answered: deque[Answered] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERED))
    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    used_s: float = 0.0
    reported: Footprint | None = None
    passed: int = 0


@dataclass(eq=False, slots=True)
class Answered:
    """One of the latest answers of a session, for calls that are made again.

    Attributes:
        digest: of the request's body.
        lost: its client left before it had all of it.
    """

    digest: bytes
    answer: Answer
    lost: bool = False


@dataclass(eq=False, slots=True)
class Flight:
    """A call in flight and the number of HTTP requests that wait for it."""

    task: asyncio.Task[Any]
    num_waiting: int = 0
