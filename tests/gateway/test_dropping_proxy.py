"""Each mode of the proxy, as a client behind it sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from dropping_proxy import DroppingProxy, threaded_proxy

from tide_sdk.http import DeadlineExceeded, Disconnected, LeanClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@dataclass
class Target:
    """An HTTP server that counts what reached it."""

    url: str = ""
    requests: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                writer.write(ANSWER)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Target]:
    target = Target()
    server = await asyncio.start_server(target.serve, "127.0.0.1", 0)
    target.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield target
    server.close()


@pytest.fixture(params=["tcp", "unix"])
async def behind(request, tmp_path) -> AsyncIterator[tuple[Target, DroppingProxy, LeanClient]]:
    listen = str(tmp_path / "proxy.sock") if request.param == "unix" else ""
    async with serving() as target:
        proxy = DroppingProxy(target.url, listen)
        await proxy.start()
        async with LeanClient(proxy.url, timeout_s=5.0) as client:
            assert (await client.request("GET", "/")).body == b"hello"
            yield target, proxy, client
        await proxy.aclose()


async def test_a_lost_answer_was_an_action(behind):
    target, proxy, client = behind
    proxy.switch("drop_answers", times=1)
    with pytest.raises(Disconnected):
        await client.request("GET", "/")
    assert (target.requests, proxy.dropped, proxy.mode) == (2, 1, "pass")
    assert (await client.request("GET", "/")).status == 200


async def test_a_muted_answer_leaves_the_client_waiting(behind):
    target, proxy, client = behind
    proxy.switch("mute_answers")
    with pytest.raises(DeadlineExceeded):
        await client.request("GET", "/", timeout_s=0.2)
    assert target.requests == 2
    proxy.switch("pass")
    assert (await client.request("GET", "/")).status == 200


async def test_a_black_hole_swallows_old_and_new_connections_for_good(behind):
    target, proxy, client = behind
    proxy.switch("blackhole")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await client.request("GET", "/", timeout_s=0.2)
    assert (target.requests, proxy.connections) == (1, 2)
    waiting = asyncio.create_task(client.request("GET", "/", timeout_s=0.5))
    async with asyncio.timeout(5):
        while proxy.connections < 3:  # noqa: ASYNC110 (the proxy is not told who waits)
            await asyncio.sleep(0.01)
    proxy.switch("pass")
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert (await client.request("GET", "/")).status == 200


async def test_a_stall_ends_and_nothing_is_lost(behind):
    target, proxy, client = behind
    proxy.switch("stall")
    waiting = [asyncio.create_task(client.request("GET", "/")) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.1)
    assert (target.requests, [call.done() for call in waiting]) == (1, [False] * 3)
    proxy.switch("pass")
    assert [call.body for call in await asyncio.gather(*waiting)] == [b"hello"] * 3
    assert target.requests == 4


async def test_a_reset_ends_old_and_new_connections(behind):
    target, proxy, client = behind
    proxy.switch("reset")
    for _ in range(3):
        with pytest.raises(Disconnected):
            await client.request("POST", "/", b"")
    assert target.requests == 1
    proxy.switch("pass")
    assert (await client.request("GET", "/")).status == 200


async def test_an_answer_is_cut_where_it_should_be(behind):
    target, proxy, client = behind
    proxy.switch("cut", cut_bytes=len(ANSWER) - 2, times=1)
    with pytest.raises(Disconnected):
        await client.request("GET", "/")
    assert target.requests == 2
    assert (await client.request("GET", "/")).status == 200


async def test_a_delay_is_on_both_ways(behind):
    _, proxy, client = behind
    proxy.switch("delay", delay_s=0.1)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert (await client.request("GET", "/")).status == 200
    assert loop.time() - began_s >= 0.2


async def test_a_target_that_is_down_resets_and_may_come_back():
    async with serving() as target:
        proxy = DroppingProxy("http://127.0.0.1:1")
        await proxy.start()
        async with LeanClient(proxy.url, timeout_s=5.0) as client:
            with pytest.raises(Disconnected):
                await client.request("GET", "/")
            proxy.target = target.url
            assert (await client.request("GET", "/")).status == 200
        await proxy.aclose()


async def test_the_threaded_one_serves_tests_that_block():
    async with serving() as target:

        def block() -> list[int]:
            with threaded_proxy(target.url) as proxy, httpx.Client(base_url=proxy.url, timeout=5) as client:
                codes = [client.get("/").status_code]
                proxy.switch("drop_answers", times=1)
                with pytest.raises(httpx.TransportError):
                    client.get("/")
                assert proxy.dropped == 1
                return [*codes, client.get("/").status_code]

        assert await asyncio.to_thread(block) == [200, 200]
    assert target.requests == 3
