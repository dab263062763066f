"""How a command is stopped: signals cancel its work, so that it ends what it began and leaves whole files."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def stop_signals(*names: str) -> list[int]:
    """The numbers of those signals that shall stop this process.

    The system may lack one, and a hang-up that is ignored stays so: `nohup` asked for it.

    Args:
        names: such as SIGTERM.
    """
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    nohup = hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (nohup and number == signal.SIGHUP)]


def interrupt_on(*names: str) -> None:
    """From now on these signals raise KeyboardInterrupt in the main thread, as Ctrl-C does."""
    for number in stop_signals(*names):
        signal.signal(number, signal.default_int_handler)


async def until_signal(work: Awaitable[T], *names: str, again: Callable[[], None] | None = None) -> T:
    """Awaits the work in the current task; these signals cancel it.

    Args:
        work: what is carried out.
        names: such as SIGTERM. SIGINT that is not named is left to `asyncio.run`.
        again: called for every further signal, which then cancels nothing; None: each one cancels.

    Raises:
        asyncio.CancelledError: a signal came, and the work let that out.
    """
    this = asyncio.current_task()
    assert this is not None, "there is no task to cancel"
    loop = asyncio.get_running_loop()
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping and again is not None:
            again()
            return
        stopping = True
        this.cancel()

    with contextlib.suppress(NotImplementedError):  # no loop handlers on Windows
        for number in stop_signals(*names):
            loop.add_signal_handler(number, stop)
    return await work
