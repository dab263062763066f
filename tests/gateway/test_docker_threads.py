"""Blocking calls in threads: the loop goes on, deadlines hold, and cancellation comes after what was begun."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tide_gateway.runtimes.docker_sdk import in_thread


async def test_a_cancelled_call_ends_after_its_thread():
    begun, release, done = threading.Event(), threading.Event(), []

    def create() -> None:
        begun.set()
        release.wait(30)
        done.append("created")

    calling = asyncio.create_task(in_thread(create, 30.0))
    await asyncio.to_thread(begun.wait, 30)
    calling.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not calling.done(), "who cleans up now would come before the container"
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert done == ["created"]


async def test_a_call_that_takes_too_long_is_given_up_and_its_late_answer_is_nobodys():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        await in_thread(lambda: release.wait(30), 0.05)
    release.set()
    assert await in_thread(lambda: "next", 30.0) == "next"


async def test_an_error_in_the_thread_is_the_callers():
    def fail() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await in_thread(fail, 30.0)


async def test_threads_end_with_their_calls(eventually):
    before = threading.active_count()
    await asyncio.gather(*(in_thread(lambda: None, 30.0) for _ in range(200)))
    await eventually(lambda: threading.active_count() <= before, "all threads have ended")
