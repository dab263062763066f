"""The thread of one instance: all plain methods of an author's object run in the same one, as some libraries need."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from tide_sdk.errors import told


class InstanceThread:
    """A daemon thread that runs one instance's plain methods in order; started by the first call.

    Own code because an executor's threads are joined at exit, so that one stuck method would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def call(self, function: Callable[..., Any], *args: Any, certain: bool = False) -> Any:
        """Run the function there; the result of a cancelled call is dropped.

        Args:
            function: what to run.
            args: its arguments.
            certain: run it also if the call is cancelled before it begins.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def job() -> None:
            if future.cancelled() and not certain:
                return
            result, failure = None, None
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 (handed to the waiting call; the thread must not end of it)
                failure = RuntimeError(told(error)) if isinstance(error, StopIteration) else error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)
        return await future

    def stop(self) -> None:
        """Let the thread end after what it runs now."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except RuntimeError:
                # The loop closed between the check and the call: nobody waits for the result any more.
                return
