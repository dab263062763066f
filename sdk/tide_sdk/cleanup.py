"""What an agent leaves behind: closed in reverse order at the end of its task, each with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

from tide_sdk.errors import told

_log = logging.getLogger("tide_sdk.cleanup")
CLEANUP_LIMIT_S = 30.0
"""Seconds that one clean-up may take; then it is left and named in the result."""
_MAX_WORDS = 300

Close: TypeAlias = Callable[["BaseException | None"], Any]
"""Called with the agent's failure, None without one; may be async."""


class Cleanups:
    """The clean-ups of one task, newest last.

    Args:
        limit_s: seconds for each, `CLEANUP_LIMIT_S` if None.

    Attributes:
        failures: what went wrong, in words, for the task's result.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.failures: list[str] = []
        self._limit_s = CLEANUP_LIMIT_S if limit_s is None else limit_s
        self._pending: list[tuple[str, Close]] = []

    @property
    def limit_s(self) -> float:
        """Seconds that those which are still to be called may take together."""
        return self._limit_s * len(self._pending)

    def push(self, name: str, close: Close) -> None:
        """Have `close` called before all that were pushed earlier."""
        self._pending.append((name, close))

    async def run(self, failure: BaseException | None) -> None:
        """Call them all, in the task that entered them; one that fails, or is late, does not keep the others.

        Cancelling skips the one that runs; the rest still runs, and the cancellation goes on afterwards.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._pending:
            name, close = self._pending.pop()
            try:
                async with asyncio.timeout(self._limit_s):
                    done = close(failure)
                    if inspect.isawaitable(done):
                        await done
            except TimeoutError as error:
                self._failed(name, f"not done within {self._limit_s:g} s: {error}".removesuffix(": "))
            except Exception as error:  # noqa: BLE001 (the boundary: it is told in the task's result)
                if error is not failure:  # a context manager may raise again what it was told
                    self._failed(name, told(error))
            except asyncio.CancelledError as error:
                self._failed(name, "cancelled")
                task = asyncio.current_task()
                cancelled = error if task is not None and task.cancelling() else cancelled
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                self._failed(name, told(error))
        if cancelled is not None:
            raise cancelled

    def _failed(self, name: str, words: str) -> None:
        told = f"{name}: {words}"[:_MAX_WORDS]
        _log.warning("clean-up of an agent's task failed: %s", told)
        self.failures.append(told)


def closing(function: Callable[[], Any], call: Callable[..., Awaitable[Any]] | None = None) -> tuple[str, Close]:
    """A clean-up's name, and the callable itself as one.

    Args:
        function: plain or async, without arguments.
        call: runs plain functions elsewhere, in the agent's thread.
    """
    if not callable(function):
        raise TypeError(f"on_end wants a callable, not a {type(function).__name__}")
    name = getattr(function, "__qualname__", None) or type(function).__name__
    if call is None or inspect.iscoroutinefunction(function):
        return name, lambda _: function()
    return name, lambda _: call(function)


async def entered(manager: Any) -> tuple[Any, str, Close]:
    """Enter an async context manager, else a plain one: (its value, its name, its exit as a clean-up).

    Raises:
        TypeError: it is neither.
    """
    kind = cast("Any", type(manager))
    if hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__"):
        value = await kind.__aenter__(manager)
        return value, kind.__qualname__, lambda failure: kind.__aexit__(manager, *_exc_info(failure))
    value, name, close = entered_plain(manager)
    return value, name, close


def entered_plain(manager: Any) -> tuple[Any, str, Close]:
    """The same for a plain context manager."""
    kind = cast("Any", type(manager))
    if not hasattr(kind, "__enter__") or not hasattr(kind, "__exit__"):
        raise TypeError(f"ctx.enter wants a context manager, not a {kind.__name__}")
    value = kind.__enter__(manager)
    return value, kind.__qualname__, lambda failure: kind.__exit__(manager, *_exc_info(failure))


def _exc_info(failure: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if failure is None else (type(failure), failure, failure.__traceback__)
