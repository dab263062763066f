"""What a connection may cost: raw sockets against the guarded protocol, with short limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from raw_http import RawSite, SlowApp, serving

from tide_gateway.connection_limits import ConnectionLimits

LONG = ConnectionLimits()
SHORT = ConnectionLimits(first_byte_s=0.2, header_s=0.2, body_pause_s=0.2, body_s=0.4, rest_s=0.2)
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


@pytest.fixture
async def open_site() -> AsyncIterator[Callable]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(limits: ConnectionLimits, app: SlowApp | None = None) -> RawSite:
            app = app or SlowApp()
            if not app.answers_first:
                app.gate.set()
            return await stack.enter_async_context(serving(limits, app))

        yield start


async def test_usual_requests_are_answered_one_after_the_other_and_pipelined(open_site):
    site = await open_site(SHORT)
    peer = await site.connect()
    for piece in (GET, POST + b"0123456789", POST[:20], POST[20:], b"01234", b"56789"):
        await peer.send(piece)
    assert [await peer.answer() for _ in range(3)] == [(200, b"0"), (200, b"10"), (200, b"10")]
    await peer.send(GET + POST + b"0123456789" + GET + GET[:10])
    assert [await peer.answer() for _ in range(3)] == [(200, b"0"), (200, b"10"), (200, b"0")]
    await peer.send(GET[10:])
    assert await peer.answer() == (200, b"0")
    chunked = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    await peer.send(chunked + b"3;a=b\r\nabc\r\n0\r\nTrailer: x\r\n\r\n")
    assert await peer.answer() == (200, b"3")


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_header_too_large_is_431(open_site, in_pieces):
    site = await open_site(LONG)
    peer = await site.connect()
    await peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
    for _ in range(48):
        await peer.send(b"a" * 1024)
        if in_pieces:
            await asyncio.sleep(0.001)
    if not in_pieces:
        await peer.send(b"\r\n\r\n")
    assert await peer.problem() == (431, "too_large")
    assert site.app.scopes == []


async def test_two_megabytes_of_header_never_reach_the_app(open_site):
    site = await open_site(LONG)
    peer = await site.connect()
    await peer.send(b"GET / HTTP/1.1\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n" + GET)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        assert await peer.problem() == (431, "too_large")
    assert site.app.scopes == []


async def test_too_many_fields_are_431(open_site):
    site = await open_site(LONG)
    peer = await site.connect()
    await peer.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n")
    assert await peer.problem() == (431, "too_large")
    peer = await site.connect()
    await peer.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"\r\n")
    assert (await peer.answer())[0] == 200


async def test_a_url_too_long_is_414(open_site):
    site = await open_site(LONG)
    peer = await site.connect()
    await peer.send(b"GET /" + b"a" * 9000)
    assert await peer.problem() == (414, "too_large")


@pytest.mark.parametrize("tail", [b"0\r\n" + b"a: b\r\n" * 101, b"0\r\nX: " + b"a" * 40_000])
async def test_a_trailer_too_large_is_431_and_the_app_learns_that_the_caller_is_gone(open_site, tail, eventually):
    site = await open_site(replace(LONG, rest_s=600.0))
    peer = await site.connect()
    await peer.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await eventually(lambda: len(site.app.scopes) == 1, "the app waits for the body")
    for first in range(0, len(tail), 8192):
        await peer.send(tail[first : first + 8192])
        await asyncio.sleep(0.002)
    await peer.send(b"x" * 1000)
    assert await peer.problem() == (431, "too_large")
    await eventually(lambda: site.app.gone == 1, "the app is told")


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\nHost: loc", b"\r\n", GET + b"GET /"])
async def test_a_header_that_never_ends_is_408(open_site, start):
    site = await open_site(SHORT)
    peer = await site.connect()
    await peer.send(start)
    if start.startswith(GET):
        assert (await peer.answer())[0] == 200
    assert await peer.problem() == (408, "invalid")


async def test_a_header_that_trickles_is_408(open_site):
    site = await open_site(SHORT)
    peer = await site.connect()
    answer = asyncio.create_task(peer.problem())
    for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000:
        await peer.send(bytes([byte]))
        if answer.done():
            break
        await asyncio.sleep(0.01)
    assert await answer == (408, "invalid")
    assert site.app.scopes == []


async def test_a_connection_that_says_nothing_is_closed(open_site):
    site = await open_site(SHORT)
    await (await site.connect()).closed()


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_body_that_does_not_come_is_408(open_site, trickles, eventually):
    site = await open_site(SHORT)
    peer = await site.connect()
    await peer.send(POST.replace(b"10", b"1000") + b"0")
    answer = asyncio.create_task(peer.problem())
    while trickles and not answer.done():
        await peer.send(b"0")
        await asyncio.sleep(0.02)
    assert await answer == (408, "invalid")
    await eventually(lambda: site.app.gone == 1, "the app is told")


async def test_a_caller_is_not_late_while_the_app_does_not_read(open_site, eventually):
    app = SlowApp()
    site = await open_site(SHORT, app)
    app.gate.clear()
    peer = await site.connect()
    body = b"0" * 300_000  # more than is read ahead
    sending = asyncio.create_task(peer.send(POST.replace(b"10", b"300000") + body))
    await eventually(lambda: len(app.scopes) == 1, "the app has the request")
    await asyncio.sleep(2 * SHORT.body_s)
    app.gate.set()
    assert await peer.answer() == (200, b"300000")
    await sending


async def test_an_app_that_takes_its_time_is_waited_for(open_site, eventually):
    app = SlowApp()
    site = await open_site(SHORT, app)
    app.gate.clear()
    peer = await site.connect()
    await peer.send(POST + b"0123456789")
    await eventually(lambda: len(app.scopes) == 1, "the app has the request")
    await asyncio.sleep(2 * SHORT.body_s)
    app.gate.set()
    assert await peer.answer() == (200, b"10")


async def test_the_rest_of_a_body_that_is_answered_already_may_come_but_not_for_long(open_site):
    site = await open_site(SHORT, SlowApp(answers_first=True))
    site.app.gate.set()
    peer = await site.connect()
    await peer.send(POST)
    assert await peer.answer() == (200, b"0")
    await peer.send(b"0123456789" + GET)
    assert await peer.answer() == (200, b"0")
    await peer.send(POST)
    assert await peer.answer() == (200, b"0")
    await peer.closed()


async def test_one_connection_too_many_is_503_and_room_comes_back(open_site, eventually):
    site = await open_site(replace(LONG, max_connections=2))
    first, second = await site.connect(), await site.connect()
    for peer in (first, second):
        await peer.send(GET)
        assert (await peer.answer())[0] == 200
    third = await site.connect()
    assert await third.problem() == (503, "unavailable")
    first.writer.close()
    await eventually(lambda: len(site.server.server_state.connections) < 2, "the first is gone")
    fourth = await site.connect()
    await fourth.send(GET)
    assert (await fourth.answer())[0] == 200


async def test_what_is_not_http_is_400_as_a_problem(open_site):
    site = await open_site(LONG)
    for nonsense in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\n\r\n",
    ):
        peer = await site.connect()
        await peer.send(nonsense)
        assert await peer.problem() == (400, "invalid")
    assert site.app.scopes == []


async def test_what_is_not_http_leaves_no_line_in_the_log(open_site, caplog):
    site = await open_site(LONG)
    for data in (b"GARBAGE\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"):
        peer = await site.connect()
        await peer.send(data)
        assert await peer.problem() == (400, "invalid")
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_an_upgrade_is_answered_as_plain_http_and_the_connection_closed(open_site):
    site = await open_site(LONG)
    peer = await site.connect()
    await peer.send(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"junk")
    assert await peer.answer() == (200, b"0")
    await peer.closed()


class LargeAnswer(SlowApp):
    """Answers with more than any kernel keeps for a caller that does not read."""

    async def __call__(self, scope, receive, send) -> None:
        text = b"a" * 50_000_000
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


async def test_a_caller_that_does_not_take_its_answer_is_cut_off(open_site, eventually):
    site = await open_site(replace(LONG, answer_pause_s=0.2), LargeAnswer())
    peer = await site.connect()
    await peer.send(GET)
    await eventually(lambda: len(site.server.server_state.connections) == 1, "the connection is there")
    await eventually(lambda: not site.server.server_state.connections, "the connection is gone")


async def test_a_caller_that_takes_its_answer_slowly_gets_it_within_the_whole_time(open_site, eventually):
    site = await open_site(replace(LONG, answer_pause_s=0.2), LargeAnswer())
    peer = await site.connect()
    await peer.send(GET)
    num_bytes = 0
    while num_bytes < 50_000_000:
        piece = await asyncio.wait_for(peer.reader.read(1_000_000), 10)
        assert piece, "it is cut off although it reads"
        num_bytes += len(piece)
        await asyncio.sleep(0.005)
    site = await open_site(replace(LONG, answer_pause_s=0.05, answer_s=0.1), LargeAnswer())
    peer = await site.connect()
    await peer.send(GET)
    await peer.reader.read(1)
    await eventually(lambda: not site.server.server_state.connections, "the whole time is over")
