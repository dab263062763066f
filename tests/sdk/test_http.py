"""The lean client against a real uvicorn and against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tide_sdk.errors import TideError
from tide_sdk.http import (
    ConnectFailed,
    DeadlineExceeded,
    Disconnected,
    LeanClient,
    ProtocolFailed,
    QueueFull,
)

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)


async def echo(scope, receive, send):
    """Echoes the body; /status/N answers with that status, /chunked without a length, /head with the headers."""
    if scope["type"] != "http":
        raise RuntimeError
    body, more = b"", True
    while more:
        event = await receive()
        body, more = body + event.get("body", b""), event.get("more_body")
    status = int(scope["path"].rpartition("/")[2]) if scope["path"].startswith("/p/status/") else 200
    if scope["path"] == "/p/headers":
        body = repr({k.decode(): v.decode() for k, v in scope["headers"]}).replace("'", '"').encode()
    length = [] if scope["path"] == "/p/chunked" else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": length})
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:]})


@pytest.mark.parametrize("parser", ["h11", "httptools"])
async def test_calls_a_real_server(uvicorn_server, parser):
    async with (
        uvicorn_server(echo, lifespan="off", http=parser) as url,
        LeanClient(f"{url}/p", headers={"X-A": "1"}) as client,
    ):
        assert await client.json("POST", "/x?y=1", {"a": "ü"}) == {"a": "ü"}
        assert await client.json("POST", "/chunked", {"b": "x" * 100_000}) == {"b": "x" * 100_000}
        headers = await client.json("POST", "/headers", {}, headers={"X-B": "2"})
        assert (headers["x-a"], headers["x-b"], headers["content-type"]) == ("1", "2", "application/json")
        assert (await client.request("GET", "/")).status == 200
        assert (await client.request("DELETE", "/status/204")).body == b""
        with pytest.raises(TideError, match="stale_attempt: no") as caught:
            await client.json("POST", "/status/409", {"code": "stale_attempt", "detail": "no", "more": 1})
        assert caught.value.extra == {"more": 1, "http_status": 409}
        with pytest.raises(TideError, match="HTTP 502") as caught:
            await client.json("POST", "/status/502", ["not a problem"])
        assert caught.value.code == "internal"


async def test_thousands_of_calls_share_the_connections_in_order(socket_server, read_request):
    connections, served = 0, []

    async def handler(reader, writer):
        nonlocal connections
        connections += 1
        while True:
            head, _ = await read_request(reader)
            served.append(int(head.split(b" ")[1][1:]))
            writer.write(ANSWER)

    async with socket_server(handler) as url, LeanClient(url, max_in_flight=4) as client:
        await asyncio.gather(*(client.request("GET", f"/{number}") for number in range(3000)))
    assert connections == 4
    assert all(abs(place - number) < 8 for place, number in enumerate(served))


async def test_the_queue_is_bounded_and_waiting_counts_to_the_deadline(socket_server, read_request):
    release = asyncio.Event()

    async def handler(reader, writer):
        while True:
            await read_request(reader)
            await release.wait()
            writer.write(ANSWER)

    async with socket_server(handler) as url, LeanClient(url, max_in_flight=1, max_waiting=1) as client:
        first = asyncio.create_task(client.request("GET", "/"))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await client.request("GET", "/", timeout_s=0.01)
        second = asyncio.create_task(client.request("GET", "/"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await client.request("GET", "/")
        release.set()
        assert [(await first).status, (await second).status] == [200, 200]


async def test_each_call_of_a_connection_has_its_own_deadline(socket_server, read_request):
    connections = []

    async def handler(reader, writer):
        connections.append(writer)
        while head := (await read_request(reader))[0]:
            await (reader.read() if b"/silent" in head else asyncio.sleep(0.1 if b"/slow" in head else 0.0))
            writer.write(ANSWER)

    async with socket_server(handler) as url, LeanClient(url, max_in_flight=1) as client:
        for path, limit_s in (("/", 0.05), ("/slow", 30.0)):  # the first one's timer goes off in the second
            assert (await client.request("GET", path, timeout_s=limit_s)).status == 200
        with pytest.raises(DeadlineExceeded):
            await client.request("GET", "/silent", timeout_s=0.05)
        assert len(connections) == 1


async def test_a_cancelled_or_late_call_gives_its_place_back(socket_server, read_request):
    arrived = asyncio.Event()

    async def handler(reader, writer):
        head, _ = await read_request(reader)
        if b"/silent" in head:
            arrived.set()
            await reader.read()
        writer.write(ANSWER.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

    async with socket_server(handler) as url, LeanClient(url, max_in_flight=1) as client:
        with pytest.raises(DeadlineExceeded):
            await client.request("GET", "/silent/late", timeout_s=0.05)
        arrived.clear()
        silent = asyncio.create_task(client.request("GET", "/silent"))
        waiting = [asyncio.create_task(client.request("GET", "/")) for _ in range(3)]
        await arrived.wait()
        silent.cancel()
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await silent
        assert (await waiting[1]).status == 200
        assert (await waiting[2]).status == 200


async def test_a_handed_over_place_is_not_lost_with_its_taker():
    client = LeanClient("http://127.0.0.1:1", max_in_flight=1)
    loop = asyncio.get_running_loop()
    due_s = loop.time() + 60
    await client._acquire(loop, due_s)
    waiters = [asyncio.create_task(client._acquire(loop, due_s)) for _ in range(2)]
    await asyncio.sleep(0)
    client._release()  # hands the place to the first, which is cancelled before it runs again
    waiters[0].cancel()
    await asyncio.wait_for(waiters[1], 1)
    client._release()
    assert client._free_slots == 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", Disconnected),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", Disconnected),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", Disconnected),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", ProtocolFailed),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, ProtocolFailed),
        (b"\x16\x03\x01garbage\r\n\r\n", ProtocolFailed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{]}", ProtocolFailed),
    ],
)
async def test_a_broken_answer_is_an_error_and_the_next_call_works(socket_server, read_request, data, expected):
    answers = [data, ANSWER]

    async def handler(reader, writer):
        await read_request(reader)
        writer.write(answers.pop(0))
        await writer.drain()

    async with socket_server(handler) as url, LeanClient(url, max_in_flight=1, max_body_bytes=1000) as client:
        with pytest.raises(expected):
            await client.json("POST", "/", {}, idempotent=True)
        assert await client.json("POST", "/", {}, idempotent=True) == {}


@pytest.mark.parametrize("data", [ANSWER, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"])
async def test_an_answer_that_drips_is_put_together(socket_server, read_request, data):
    async def handler(reader, writer):
        await read_request(reader)
        for position in range(len(data)):
            writer.write(data[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async with socket_server(handler) as url, LeanClient(url) as client:
        assert await client.json("POST", "/", {}) == {}


async def serve_one_request_per_connection(socket_server, read_request, seen, rest):
    """A server that answers, keeps the connection, and closes it as the next request arrives."""

    async def handler(reader, writer):
        await read_request(reader)
        seen.append("answered")
        writer.write(ANSWER)
        await read_request(reader)
        seen.append("closed")
        writer.write(rest)

    return socket_server(handler)


async def test_a_stale_connection_is_replaced_once_for_an_idempotent_call(socket_server, read_request):
    seen: list[str] = []
    async with (
        await serve_one_request_per_connection(socket_server, read_request, seen, b"") as url,
        LeanClient(url) as client,
    ):
        await client.request("POST", "/", b"{}")
        assert (await client.request("POST", "/", b"{}", idempotent=True)).status == 200
    assert seen == ["answered", "closed", "answered"]


@pytest.mark.parametrize(("idempotent", "rest"), [(False, b""), (True, b"HTTP/1.1 2")])
async def test_a_call_that_may_have_acted_is_not_repeated(socket_server, read_request, idempotent, rest):
    seen: list[str] = []
    async with (
        await serve_one_request_per_connection(socket_server, read_request, seen, rest) as url,
        LeanClient(url) as client,
    ):
        await client.request("POST", "/", b"{}")
        with pytest.raises(Disconnected):
            await client.request("POST", "/", b"{}", idempotent=idempotent)
    assert seen == ["answered", "closed"]


async def test_a_connection_closed_while_idle_is_noticed_before_the_request(socket_server, read_request):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(ANSWER)

    async with socket_server(handler) as url, LeanClient(url) as client:
        for _ in range(5):
            assert (await client.request("POST", "/", b"{}")).status == 200
            await until(lambda: not (client._idle and client._idle[0].open))


async def test_unasked_bytes_on_an_idle_connection_end_it(socket_server, read_request):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(ANSWER)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(ANSWER)
        await reader.read()

    async with socket_server(handler) as url, LeanClient(url) as client:
        await client.request("GET", "/")
        await until(lambda: not client._idle[0].open)
        assert (await client.request("GET", "/")).status == 200


async def test_no_server_is_connect_failed():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with LeanClient(f"http://127.0.0.1:{free.getsockname()[1]}") as client:
            with pytest.raises(ConnectFailed):
                await client.request("GET", "/")


async def test_closing_fails_what_is_under_way(socket_server, read_request):
    arrived = asyncio.Event()

    async def handler(reader, writer):
        await read_request(reader)
        arrived.set()
        await reader.read()

    async with socket_server(handler) as url:
        client = LeanClient(url, max_in_flight=1)
        calls = [asyncio.create_task(client.request("GET", "/", idempotent=True)) for _ in range(2)]
        await arrived.wait()
        await client.aclose()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Disconnected, ConnectFailed]
        with pytest.raises(ConnectFailed, match="closed"):
            await client.request("GET", "/")


async def test_a_unix_socket_is_spoken_to(tmp_path, read_request):
    async def handler(reader, writer):
        await read_request(reader)
        writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_unix_server(handler, tmp_path / "s")
    async with server, LeanClient(f"unix:{tmp_path}/s") as client:
        assert await client.json("GET", "/") == {}
