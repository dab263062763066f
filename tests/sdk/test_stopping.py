from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tide_sdk.stopping import interrupt_on, until_signal


@pytest.fixture
def hang_up():
    """Sends this process a SIGHUP; whatever handled it before does so again afterwards."""
    kept = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda: os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, kept)


def test_a_signal_cancels_the_work_and_later_ones_are_only_told(hang_up):
    told, ended, again = [], [], asyncio.Event()

    def tell() -> None:
        told.append("again")
        again.set()

    async def work() -> None:
        try:
            hang_up()
            await asyncio.Event().wait()
        finally:
            hang_up()
            await asyncio.wait_for(again.wait(), 10)
            ended.append("in order")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(until_signal(work(), "SIGHUP", again=tell))
    assert (told, ended) == (["again"], ["in order"])


def test_under_nohup_a_hang_up_stops_nothing(hang_up):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def work() -> str:
        hang_up()
        for _ in range(3):  # a handler of the loop would be called in its next rounds
            await asyncio.sleep(0)
        return "done"

    interrupt_on("SIGHUP")
    hang_up()
    assert asyncio.run(until_signal(work(), "SIGTERM", "SIGHUP")) == "done"


def test_before_there_is_a_loop_a_signal_interrupts_as_ctrl_c_does(hang_up):
    interrupt_on("SIGHUP")
    with pytest.raises(KeyboardInterrupt):
        hang_up()
