"""The hop to a database's thread and back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tide_gateway.database.threads import Threads


@pytest.fixture
def threads():
    made = Threads(1, "test")
    yield made
    made.close()


def fail():
    raise KeyError("no such row")


async def test_a_call_gives_what_its_function_returns_or_raises(threads):
    assert await threads.run(lambda: threading.current_thread().name) == "test_0"
    with pytest.raises(KeyError, match="no such row"):
        await threads.run(fail)
    assert await threads.run(lambda: 2) == 2


async def test_a_call_that_was_cancelled_while_it_waited_is_not_made(threads):
    release, made = threading.Event(), []
    first = asyncio.create_task(threads.run(release.wait))
    second = asyncio.create_task(threads.run(lambda: made.append(2)))
    third = asyncio.create_task(threads.run(lambda: made.append(3)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    release.set()
    await asyncio.gather(first, third)
    assert made == [3]


async def test_a_close_waits_for_what_was_asked_for_and_takes_no_more(threads):
    release, made = threading.Event(), []
    calls = [asyncio.create_task(threads.run(release.wait)), asyncio.create_task(threads.run(lambda: made.append(1)))]
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(threads.close))
    await asyncio.sleep(0)
    release.set()
    await closing
    assert made == [1]
    await asyncio.gather(*calls)
    with pytest.raises(RuntimeError, match="closed"):
        await threads.run(lambda: None)
