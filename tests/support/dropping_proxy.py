"""A proxy between two of our processes that breaks what goes through it, as networks do.

client -> [accept] -> pump (requests) -> target        mode and its numbers can be changed at any time
       <------------- pump (answers) <-----------
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

CHUNK_BYTES = 65_536
START_S = 10.0
CONNECT_S = 5.0


class Mode(StrEnum):
    """What happens to the bytes, of present and of new connections.

    pass: they go through.
    blackhole: both directions are swallowed, and new connections are accepted; what was swallowed never comes.
    stall: both directions stand still, and go on where they were with the next mode: a partition that TCP survives.
    reset: every connection is reset at once.
    drop_answers: requests go through; the connection is reset in place of the answer.
    mute_answers: requests go through; answers are swallowed and the connection stays open.
    delay: each chunk waits `delay_s`, in both directions.
    cut: the connection is closed after the first `cut_bytes` of an answer, 0 resets it in their place.
    """

    PASS = "pass"
    BLACKHOLE = "blackhole"
    STALL = "stall"
    RESET = "reset"
    DROP_ANSWERS = "drop_answers"
    MUTE_ANSWERS = "mute_answers"
    DELAY = "delay"
    CUT = "cut"


class DroppingProxy:
    """Listens on a TCP port of its own, or on a unix socket, and forwards to one target.

    Args:
        target: `http://host:port` or `unix:/path`; may be down, and may come back.
        listen: "" takes a free TCP port of 127.0.0.1; otherwise the path of a unix socket.

    Attributes:
        mode: see `Mode`.
        connections: connections accepted so far.
        dropped: answers, or parts of one, that were not delivered.
    """

    def __init__(self, target: str, listen: str = "") -> None:
        self.target = target
        self.mode = Mode.PASS
        self.connections = 0
        self.dropped = 0
        self._listen = listen
        self._delay_s = 0.0
        self._cut_bytes = 0
        self._remaining: int | None = None
        self._server: asyncio.Server | None = None
        self._moving = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"unix:{self._listen}" if self._listen else f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Begin to listen."""
        if self._listen:
            self._server = await asyncio.start_unix_server(self._accept, self._listen)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self._port = self._server.sockets[0].getsockname()[1]
        self.switch(Mode.PASS)

    def switch(self, mode: Mode | str, *, delay_s: float = 0.0, cut_bytes: int = 0, times: int | None = None) -> None:
        """Change the mode at once, for all connections.

        Args:
            mode: the new one.
            delay_s: for `delay`.
            cut_bytes: for `cut`.
            times: for `drop_answers`, `mute_answers` and `cut`: after so many answers the mode is `pass` again.
        """
        self.mode, self._delay_s, self._cut_bytes, self._remaining = Mode(mode), delay_s, cut_bytes, times
        if self.mode is Mode.STALL:
            self._moving.clear()
        else:
            self._moving.set()
        if self.mode is Mode.RESET:
            for writer in list(self._open):
                _reset(writer)

    async def aclose(self) -> None:
        """Stop listening and reset what is open. Safe to repeat."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            _reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listen:
            Path(self._listen).unlink(missing_ok=True)  # noqa: ASYNC240 (one file of ours)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            if self.mode is Mode.RESET:
                return
            if self.mode is Mode.BLACKHOLE:
                while await reader.read(CHUNK_BYTES):
                    pass
                return
            await self._moving.wait()
            await self._forward(reader, writer)
        except (OSError, TimeoutError):
            pass  # the target is down, or either side broke: the client sees a reset
        finally:
            _reset(writer)
            self._open.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_S):
            upstream_reader, upstream = await self._connect()
        self._open.add(upstream)
        pumps = {
            asyncio.create_task(self._pump(reader, upstream, answers=False)),
            asyncio.create_task(self._pump(upstream_reader, writer, answers=True)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            _reset(upstream)
            self._open.discard(upstream)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.target.startswith("unix:"):
            return await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        host, _, port = self.target.removeprefix("http://").rstrip("/").rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        """Move bytes until either side ends; the end of one pump ends the connection."""
        muted = False
        while data := await reader.read(CHUNK_BYTES):
            await self._moving.wait()
            if self.mode is Mode.DELAY:
                await asyncio.sleep(self._delay_s)
            if self.mode is Mode.BLACKHOLE or muted:
                # A stream with a hole must not go on as if it were whole.
                muted = True
                continue
            if answers and self.mode in (Mode.DROP_ANSWERS, Mode.MUTE_ANSWERS, Mode.CUT):
                mode, num_bytes = self.mode, self._cut_bytes
                self._count()
                if mode is Mode.MUTE_ANSWERS:
                    muted = True
                    continue
                if mode is Mode.CUT and num_bytes:
                    writer.write(data[:num_bytes])
                    await writer.drain()
                    # An abort would also throw away what still waits to be sent.
                    writer.close()
                return
            writer.write(data)
            await writer.drain()

    def _count(self) -> None:
        self.dropped += 1
        if self._remaining is not None:
            self._remaining -= 1
            if self._remaining <= 0:
                self.switch(Mode.PASS)


class ThreadedProxy:
    """A `DroppingProxy` on an event loop of its own, for tests that block."""

    def __init__(self, proxy: DroppingProxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy = proxy
        self._loop = loop

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return self._proxy.url

    @property
    def dropped(self) -> int:
        """Answers that were not delivered."""
        return self._proxy.dropped

    @property
    def connections(self) -> int:
        """Connections accepted so far."""
        return self._proxy.connections

    def switch(self, mode: Mode | str, *, delay_s: float = 0.0, cut_bytes: int = 0, times: int | None = None) -> None:
        """As `DroppingProxy.switch`; the new mode holds when this returns."""

        async def apply() -> None:
            self._proxy.switch(mode, delay_s=delay_s, cut_bytes=cut_bytes, times=times)

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(START_S)

    def retarget(self, target: str) -> None:
        """Forward new connections to another target."""
        self._proxy.target = target


@contextlib.contextmanager
def threaded_proxy(target: str, listen: str = "") -> Iterator[ThreadedProxy]:
    """A running proxy that is switched from another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dropping-proxy", daemon=True)
    thread.start()
    try:

        async def open_proxy() -> DroppingProxy:
            proxy = DroppingProxy(target, listen)
            await proxy.start()
            return proxy

        proxy = asyncio.run_coroutine_threadsafe(open_proxy(), loop).result(START_S)
        try:
            yield ThreadedProxy(proxy, loop)
        finally:
            asyncio.run_coroutine_threadsafe(proxy.aclose(), loop).result(START_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset, where its transport can."""
    found = writer.get_extra_info("socket")
    if found is not None and found.family != socket.AF_UNIX and not writer.is_closing():
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport = writer.transport
    if not writer.is_closing():
        transport.abort()
