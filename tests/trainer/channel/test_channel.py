"""Channels carry requests and events in order, with deadlines, limits and typed errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tide_trainer import channel as channel_module
from tide_trainer.channel import (
    Channel,
    ChannelClosed,
    ChannelFull,
    ChannelTimeout,
    FrameTooLarge,
    PeerError,
    connect_channel,
    serve_channel,
    token_path,
)


class Pair:
    """A server with one client."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server_end: Channel
        self.client_end: Channel

    async def open(self) -> None:
        self.server = await serve_channel(self.path, self._on_connect)
        self.client_end = await connect_channel(self.path, name="client")

    def _on_connect(self, channel: Channel) -> None:
        self.server_end = channel


@pytest.fixture
async def pair(tmp_path: Path):
    pair = Pair(tmp_path / "c" / "socket")
    await pair.open()
    yield pair
    pair.client_end.close()
    await pair.server.close()


async def test_requests_go_both_ways(pair):
    pair.server_end.handle("double", lambda x: x * 2)

    async def later(x):
        await asyncio.sleep(0)
        return x + 1

    pair.client_end.handle("later", later)
    assert await pair.client_end.request("double", 21, timeout_s=5) == 42
    assert await pair.server_end.request("later", 1, timeout_s=5) == 2
    assert pair.server_end.peer == "client"


async def test_events_arrive_in_order_and_before_a_later_request(pair):
    seen: list[int] = []
    pair.server_end.handle("number", seen.append)
    pair.server_end.handle("count", lambda _: len(seen))
    for number in range(5000):
        pair.client_end.notify("number", number)
    assert await pair.client_end.request("count", timeout_s=5) == 5000
    assert seen == list(range(5000))


async def test_large_and_odd_payloads_survive(pair):
    pair.server_end.handle("echo", lambda x: x)
    payload = {"text": "line\nbreak \u2028 \0 ☃ " * 200_000, "none": None, "list": [1.5, -1, True]}
    assert await pair.client_end.request("echo", payload, timeout_s=20) == payload


async def test_a_message_larger_than_a_frame_is_refused_and_the_channel_goes_on(pair):
    large = "x" * (64 * 1024 * 1024)
    pair.server_end.handle("double", lambda x: x * 2)
    pair.server_end.handle("large", lambda _: large)
    with pytest.raises(FrameTooLarge, match="are allowed"):
        pair.client_end.notify("event", large)
    with pytest.raises(PeerError, match="FrameTooLarge"):
        await pair.client_end.request("large", timeout_s=20)
    assert await pair.client_end.request("double", 21, timeout_s=5) == 42


async def test_one_write_carries_the_events_of_a_tick(pair, monkeypatch):
    writes: list[bytes] = []
    transport = pair.client_end._transport
    monkeypatch.setattr(pair.client_end, "_transport", Recording(transport, writes))
    pair.server_end.handle("e", lambda _: None)
    for _ in range(100):
        pair.client_end.notify("e", {})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(writes) == 1


class Recording:
    def __init__(self, transport, writes: list[bytes]) -> None:
        self._inner, self._writes = transport, writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._inner.write(data)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


async def test_errors_are_typed(pair):
    def refuse(_):
        raise PeerError("busy", "come back later")

    async def fail(_):
        raise KeyError("lost")

    pair.server_end.handle("refuse", refuse)
    pair.server_end.handle("fail", fail)
    pair.server_end.handle("unwritable", lambda _: object())
    for name, code in [("refuse", "busy"), ("fail", "internal"), ("unwritable", "internal"), ("no", "unknown_request")]:
        with pytest.raises(PeerError) as caught:
            await pair.client_end.request(name, timeout_s=5)
        assert caught.value.code == code
    assert not pair.client_end.closed


async def test_a_failing_event_handler_is_counted_and_harms_nothing(pair):
    pair.server_end.handle("bad", lambda _: 1 / 0)
    pair.server_end.handle("good", lambda _: "yes")
    pair.client_end.notify("bad")
    pair.client_end.notify("unknown")
    assert await pair.client_end.request("good", timeout_s=5) == "yes"
    assert pair.server_end.num_handler_errors == 2


async def test_a_request_has_a_deadline_and_a_late_reply_is_dropped(pair):
    gate = asyncio.Event()

    async def slow(_):
        await gate.wait()

    pair.server_end.handle("slow", slow)
    pair.server_end.handle("quick", lambda _: 1)
    with pytest.raises(ChannelTimeout, match="slow"):
        await pair.client_end.request("slow", timeout_s=0.05)
    gate.set()
    assert await pair.client_end.request("quick", timeout_s=5) == 1
    assert pair.client_end._pending == {}


async def test_closing_fails_what_is_in_flight_and_calls_back_once(pair):
    reasons: list[str] = []
    pair.client_end.on_close(reasons.append)
    pair.server_end.handle("never", lambda _: asyncio.Event().wait())
    request = asyncio.create_task(pair.client_end.request("never", timeout_s=5))
    await asyncio.sleep(0.02)
    pair.server_end.close()
    pair.server_end.close()
    with pytest.raises(ChannelClosed):
        await request
    await pair.client_end.wait_closed()
    await asyncio.sleep(0)
    assert len(reasons) == 1
    with pytest.raises(ChannelClosed):
        pair.client_end.notify("x")


async def flood(channel: Channel) -> None:
    for _ in range(100):
        channel.notify("e", "x" * 100_000)
        await asyncio.sleep(0)


async def test_a_peer_that_does_not_read_is_noticed(pair):
    pair.client_end._max_buffered_bytes = 1 << 20
    pair.server_end._transport.pause_reading()
    with pytest.raises(ChannelFull):
        await flood(pair.client_end)
    with pytest.raises(ChannelTimeout):
        await pair.client_end.request("e", timeout_s=0.05)
    pair.server_end.handle("e", lambda _: None)
    pair.server_end._transport.resume_reading()
    assert await pair.client_end.request("e", timeout_s=5) is None


async def test_running_requests_are_bounded(pair):
    gate, running = asyncio.Event(), 0

    async def wait(_):
        nonlocal running
        running += 1
        await gate.wait()

    pair.server_end._max_running = 4
    pair.server_end.handle("wait", wait)
    tasks = []
    for _ in range(20):
        tasks.append(asyncio.create_task(pair.client_end.request("wait", timeout_s=10)))
        await asyncio.sleep(0.002)
    assert running == 4
    gate.set()
    await asyncio.gather(*tasks)
    assert running == 20


async def test_too_large_a_frame_closes(pair):
    pair.server_end._max_frame_bytes = 100_000
    pair.client_end.notify("e", "x" * 3_000_000)
    assert "larger than" in await asyncio.wait_for(pair.server_end.wait_closed(), 5)


async def test_a_wrong_or_missing_token_is_refused(pair):
    token_path(pair.path).write_text("guess")
    with pytest.raises(ChannelClosed):
        await connect_channel(pair.path)
    reader, writer = await asyncio.open_unix_connection(str(pair.path))
    writer.write(b'[1,1,"double",21]\n')
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert len(pair.server.channels) == 1


async def test_a_silent_peer_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(channel_module, "_HELLO_TIMEOUT_S", 0.05)
    server = await serve_channel(tmp_path / "c" / "s", lambda _: None)
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await server.close()


async def test_the_socket_is_private(tmp_path):
    server = await serve_channel(tmp_path / "new" / "s", lambda _: None)
    assert server.path.parent.stat().st_mode & 0o777 == 0o700
    assert token_path(server.path).stat().st_mode & 0o777 == 0o600
    await server.close()
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(ValueError, match="0700"):
        await serve_channel(open_folder / "s", lambda _: None)
    with pytest.raises(ValueError, match="longer"):
        await serve_channel(tmp_path / ("x" * 120), lambda _: None)
    with pytest.raises(ChannelClosed, match="cannot connect"):
        await connect_channel(tmp_path / "nothing")


async def test_a_killed_peer_closes_the_channel(tmp_path):
    connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    server = await serve_channel(tmp_path / "c" / "s", connected.set_result)
    code = (
        "import asyncio, sys\nfrom tide_trainer.channel import connect_channel\n"
        "async def main():\n    c = await connect_channel(sys.argv[1], name='x')\n    await c.wait_closed()\n"
        "asyncio.run(main())"
    )
    peer = subprocess.Popen(  # noqa: ASYNC220 - it only waits
        [sys.executable, "-c", code, str(server.path)]
    )
    channel = await asyncio.wait_for(connected, 20)
    peer.kill()
    assert "gone" in await asyncio.wait_for(channel.wait_closed(), 5)
    peer.wait()
    await server.close()
