"""Channels between our processes: `serve_channel` on one side, `connect_channel` on the other.

The socket's folder is readable by its owner only, and the first frame carries a secret that lies beside the socket.
What a channel does is in `channel_end.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tide_trainer.channel_end import HELLO, Channel, Handler
from tide_trainer.channel_errors import (
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelTimeout,
    FrameTooLarge,
    PeerError,
)

__all__ = [
    "Channel",
    "ChannelClosed",
    "ChannelError",
    "ChannelFull",
    "ChannelServer",
    "ChannelTimeout",
    "FrameTooLarge",
    "Handler",
    "PeerError",
    "connect_channel",
    "serve_channel",
    "token_path",
]

_HELLO_TIMEOUT_S = 10.0
_MAX_SOCKET_PATH_BYTES = 107  # the kernel's limit of sun_path


class ChannelServer:
    """Listens for channels; made by `serve_channel`.

    Attributes:
        path: the socket.
        channels: the open channels, those that have not said hello included.
    """

    def __init__(self, path: Path, token: str, on_connect: Callable[[Channel], None]) -> None:
        self.path = path
        self.channels: dict[Channel, asyncio.TimerHandle] = {}
        self._token = token.encode()
        self._on_connect = on_connect
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """Bind the socket, readable and writable by this user only."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, str(self.path))
        self.path.chmod(0o600)

    async def close(self) -> None:
        """Close all channels and remove the socket. Idempotent."""
        if self._server is not None:
            self._server.close()
        for channel in tuple(self.channels):
            channel.close()
        self.path.unlink(missing_ok=True)
        token_path(self.path).unlink(missing_ok=True)

    def _accept(self) -> Channel:
        channel = Channel()
        channel._on_hello = self._hello
        loop = asyncio.get_running_loop()
        self.channels[channel] = loop.call_later(_HELLO_TIMEOUT_S, channel._break, "the peer sent no hello")
        channel.on_close(lambda _: self._forget(channel))
        return channel

    def _hello(self, channel: Channel, hello: Any) -> None:
        token = str(hello.get("token", "")) if isinstance(hello, dict) else ""
        if not hmac.compare_digest(token.encode(), self._token):
            channel._break("the peer's hello carried no valid token")
            return
        self.channels[channel].cancel()
        channel._on_hello = None
        channel.peer = str(hello.get("name", ""))[:128]
        self._on_connect(channel)
        channel._send(HELLO, 0, "", None)

    def _forget(self, channel: Channel) -> None:
        self.channels.pop(channel).cancel()


def token_path(path: str | Path) -> Path:
    """Where the secret of a socket lies."""
    return Path(f"{path}.token")


async def serve_channel(path: str | Path, on_connect: Callable[[Channel], None]) -> ChannelServer:
    """Listen on a unix socket; a stale socket file is replaced.

    Args:
        path: the socket; its folder is made with mode 0700 if missing, and must have no rights for others. The
            secret is written beside it.
        on_connect: called with each channel after its hello and before its first message: set its handlers there.

    Raises:
        ValueError: the path is too long for a socket, or its folder is open to other users.
    """
    path = Path(path)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"the socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes; use a shorter folder")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"the folder {path.parent} has mode {mode:o}; a channel's folder needs 0700")
    path.unlink(missing_ok=True)
    secret = token_path(path)
    secret.unlink(missing_ok=True)
    token = secrets.token_urlsafe(32)
    with open(secret, "x", opener=_private) as file:  # noqa: ASYNC230 - 43 bytes, once
        file.write(token)
    server = ChannelServer(path, token, on_connect)
    await server.listen()
    return server


async def connect_channel(
    path: str | Path, handlers: Mapping[str, Handler] | None = None, *, name: str = "", timeout_s: float = 10.0
) -> Channel:
    """Connect to a socket of `serve_channel`.

    Args:
        path: the socket; the secret is read from beside it.
        handlers: by name of request or event; more may be set with `handle`.
        name: how the other side calls this one.
        timeout_s: deadline of connecting and of the hello's answer.

    Raises:
        ChannelClosed: nothing listens there, or the hello was refused.
        ChannelTimeout: the other side did not answer the hello.
    """
    loop = asyncio.get_running_loop()
    welcome: asyncio.Future[None] = loop.create_future()

    def on_hello(channel: Channel, _: Any) -> None:
        channel._on_hello = None
        if not welcome.done():
            welcome.set_result(None)

    def on_close(reason: str) -> None:
        if not welcome.done():
            welcome.set_exception(ChannelClosed(f"{path}: {reason}"))

    channel = Channel(handlers)
    channel._on_hello = on_hello
    channel.on_close(on_close)
    try:
        async with asyncio.timeout(timeout_s):
            token = token_path(path).read_text()
            await loop.create_unix_connection(lambda: channel, str(path))
            channel._send(HELLO, 0, "", {"token": token, "name": name})
            await welcome
    except TimeoutError:
        channel._break("no answer to the hello")
        raise ChannelTimeout(f"{path} did not answer the hello within {timeout_s:g} s") from None
    except OSError as error:
        raise ChannelClosed(f"cannot connect to {path}: {error}") from error
    return channel


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
