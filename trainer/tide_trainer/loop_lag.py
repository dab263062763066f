"""How late the event loop runs: a blocked loop is a number before it is a riddle."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading

INTERVAL_S = 0.25
BLOCKED_EXIT_CODE = 70
_FIRST_WARNING_S = 5.0


class LoopLag:
    """Measures the delay of a periodic wake-up.

    Attributes:
        max_s: largest delay since the start, in seconds.
    """

    def __init__(self) -> None:
        self.max_s = 0.0
        self._recent_s = 0.0

    def take_max_s(self) -> float:
        """The largest delay since the last call of this method, in seconds."""
        recent, self._recent_s = self._recent_s, 0.0
        return recent

    def note(self, late_s: float) -> None:
        """Count one delay; negative ones are 0."""
        self._recent_s = max(self._recent_s, late_s)
        self.max_s = max(self.max_s, late_s)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.note(loop.time() - due_s)


class BlockedLoop:
    """A thread that sees a loop blocked while it still is: prints where, and ends the process after a limit.

    A loop that foreign code blocks for ever can answer nothing, not even SIGTERM; the parent then sees the process's
    end and places its work elsewhere.

    Args:
        loop: the running loop.
        max_block_s: seconds after which the process ends with exit code 70; 0 never ends it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_block_s: float) -> None:
        self._loop = loop
        self._max_block_s = max_block_s
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="blocked-loop", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._stopped.set()
        self._answered.set()

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # the loop is closed
            if self._stopped.is_set() or self._answered.wait(_FIRST_WARNING_S):
                continue
            print(f"the event loop is blocked for {_FIRST_WARNING_S:g} s; the main thread is at:", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            rest_s = self._max_block_s - _FIRST_WARNING_S
            if self._max_block_s <= 0:
                self._answered.wait()
            elif not self._answered.wait(max(0.0, rest_s)):
                print(f"still blocked after {self._max_block_s:g} s: this process ends", file=sys.stderr, flush=True)
                os._exit(BLOCKED_EXIT_CODE)
