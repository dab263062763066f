"""Connections that do not speak TLS yet: counted, and cut in time."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace

import pytest
import uvloop
from certificates import make_certificate
from raw_http import Peer, SlowApp, serving

from tide_gateway.connection_limits import ConnectionLimits
from tide_gateway.handshakes import tls_context

LONG = ConnectionLimits(handshake_s=60.0)
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    return folder


@pytest.fixture
def tls(certificate) -> ssl.SSLContext:
    return tls_context(certificate / "cert.pem", certificate / "key.pem")


def open_app() -> SlowApp:
    app = SlowApp()
    app.gate.set()
    return app


async def speak(certificate, port: int) -> Peer:
    trust = ssl.create_default_context(cafile=certificate / "cert.pem")
    return Peer(*await asyncio.open_connection("127.0.0.1", port, ssl=trust))


async def test_requests_are_answered_one_after_the_other(certificate, tls):
    async with serving(LONG, open_app(), tls) as site:
        peer = await speak(certificate, site.port)
        for _ in range(3):
            await peer.send(GET)
            assert await peer.answer() == (200, b"0")
        assert [scope["scheme"] for scope in site.app.scopes] == ["https"] * 3
        peer.writer.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_handshake_loses_its_first_bytes(certificate, tls, make_loop):
    """uvloop reads before TLS is in front."""

    async def shake_many() -> None:
        async with serving(LONG, open_app(), tls) as site:
            for _ in range(10):
                peers = await asyncio.gather(*(speak(certificate, site.port) for _ in range(10)))
                for peer in peers:
                    await peer.send(GET)
                    assert await peer.answer() == (200, b"0")
                    peer.writer.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(shake_many())


async def test_a_connection_that_does_not_shake_hands_is_counted_and_leaves_room_when_it_goes(
    certificate, tls, eventually
):
    async with serving(replace(LONG, max_connections=3), open_app(), tls) as site:
        silent = [await site.connect() for _ in range(3)]
        await eventually(lambda: len(site.server.server_state.connections) == 3, "all three are counted")
        await (await site.connect()).closed()
        with pytest.raises(OSError):
            await speak(certificate, site.port)
        silent[0].writer.close()
        await eventually(lambda: len(site.server.server_state.connections) == 2, "one is gone")
        peer = await speak(certificate, site.port)
        await peer.send(GET)
        assert await peer.answer() == (200, b"0")
        peer.writer.close()


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01"])
async def test_a_handshake_that_does_not_end_is_cut(tls, data, eventually):
    async with serving(replace(LONG, handshake_s=0.2), open_app(), tls) as site:
        peer = await site.connect()
        await peer.send(data)
        await peer.closed()
        await eventually(lambda: not site.server.server_state.connections, "it is not counted any more")


async def test_plain_http_is_cut_and_reaches_no_app(tls):
    async with serving(LONG, open_app(), tls) as site:
        peer = await site.connect()
        await peer.send(GET)
        assert b"HTTP" not in await asyncio.wait_for(peer.reader.read(), 10)
        assert site.app.scopes == []


async def test_a_stop_does_not_wait_for_a_handshake(tls):
    async with serving(LONG, open_app(), tls) as site:
        peer = await site.connect()
        site.server.should_exit = True
        await peer.closed()
