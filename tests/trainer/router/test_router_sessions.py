"""Sessions are bounded, keyed, expire, and leave nothing behind; ranks come and go."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from tide_trainer.channel import PeerError
from tide_trainer.router import control
from tide_trainer.router.state import Limits


def go(router):
    ids = [*router.renderer.encode("go left"), *router.renderer.stop_token_ids]
    return lambda _: ids


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the router sets no event for a test
            await asyncio.sleep(0)


async def test_a_thousand_sessions_leave_memory_flat(router, user):
    router.engine(go(router))

    async def play(number: int) -> None:
        name = f"s{number}"
        router.open(name)
        await router.chat([user("you see a red ball " * 20)], session=name)
        router.control.close({"session": name})

    async def many(first: int, count: int) -> int:
        for number in range(first, first + count, 50):
            await asyncio.gather(*(play(number + i) for i in range(50)))
        router.events.clear()
        for engine in router.engines.values():
            for book in (engine.sent, engine.sampled, engine.samplings):
                book.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    await many(0, 100)
    tracemalloc.start()
    try:
        before = await many(1000, 100)
        # The names of ended sessions are remembered: some 200 bytes each, bounded by MAX_ENDED.
        assert await many(2000, 1000) - before < 400_000
    finally:
        tracemalloc.stop()
    assert router.control.sessions == {}
    assert router.calls.num_held == 0


async def test_only_so_many_ended_sessions_are_remembered(router, user, monkeypatch):
    monkeypatch.setattr(control, "MAX_ENDED", 2)
    for name in ("s1", "s2", "s3"):
        router.open(name)
        router.control.close({"session": name})
    assert [(await router.chat([user("you")], session=name))[0] for name in ("s1", "s2", "s3")] == [404, 410, 410]


async def test_idle_sessions_expire_and_busy_ones_do_not(router, user):
    router.open("old")
    router.open("busy")
    router.auto_rank = None
    request = asyncio.create_task(router.chat([user("you")], session="busy"))
    await until(lambda: router.events)
    limit_s = router.limits.session_idle_s
    used_s = router.control.sessions["old"].used_s
    assert router.control.expire(used_s + limit_s - 60) == []
    assert router.control.expire(used_s + limit_s + 60) == ["old"]
    router.app.close()
    assert (await request)[0] == 503


async def test_sessions_are_bounded_and_keyed(router):
    router.control._limits = Limits(max_sessions=1)
    router.open("one")
    router.open("one")
    with pytest.raises(PeerError, match="capacity"):
        router.open("two")
    data = {"session": "one", "api_key": "another-key", "sampling": {}, "max_context_tokens": 1}
    with pytest.raises(PeerError, match="session_exists"):
        router.control.open(data)


async def test_a_dropped_rank_is_closed_and_a_moved_one_replaced(router):
    old = router.engine(go(router))
    router.engines["elsewhere"] = type(old)(go(router))
    router.control.rank({"rank": "r0", "url": "r0"})
    assert router.calls.ranks["r0"] is old
    router.control.rank({"rank": "r0", "url": "elsewhere"})
    await until(lambda: old.closed)
    router.control.drop_rank({"rank": "r0"})
    await until(lambda: router.engines["elsewhere"].closed)
    assert router.calls.ranks == {}
