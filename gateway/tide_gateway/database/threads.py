"""Threads that carry out functions in order, for one event loop at a time.

    run(fn) -> [queue] -> a free thread -> back into the loop -> the caller

`ThreadPoolExecutor` costs three times as much for a hop, through two futures with locks of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Threads:
    """A fixed number of threads, started with the first call.

    Args:
        num_threads: calls at once; more wait in order.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(num_threads)
        ]
        self._guard = threading.Lock()
        self._started = self._closed = False

    async def run(self, fn: Callable[[], T]) -> T:
        """What `fn` returns or raises. A call that is cancelled before its thread took it is not made.

        Raises:
            RuntimeError: closed already.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        with self._guard:
            if self._closed:
                raise RuntimeError("the database is closed")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._calls.put((loop, answer, fn))
        return await answer

    def close(self) -> None:
        """Wait until everything that was asked for is done. Safe to repeat."""
        with self._guard:
            self._closed = True
            if not self._started:
                return
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, answer, fn = call
            if answer.cancelled():
                continue
            value, failure = None, None
            try:
                value = fn()
            except BaseException as error:  # noqa: BLE001 (the caller's, whatever it is)
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the caller with it
                loop.call_soon_threadsafe(_settle, answer, value, failure)
            # An idle thread must not keep alive what it worked on.
            del call, loop, answer, fn, value, failure


def _settle(answer: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if answer.done():
        return  # the caller has gone
    if failure is None:
        answer.set_result(value)
    else:
        answer.set_exception(failure)
