"""Why a channel could not carry a message."""

from __future__ import annotations


class ChannelError(Exception):
    """A channel could not carry a message; the subclass says why."""


class ChannelClosed(ChannelError):
    """The channel is closed: the peer ended, or either side closed it."""


class ChannelFull(ChannelError):
    """The peer does not read: `max_buffered_bytes` wait already."""


class FrameTooLarge(ChannelError):
    """The message is larger than the peer takes; nothing was sent, the channel goes on."""


class ChannelTimeout(ChannelError):
    """A request was not answered within its deadline; the peer may have acted."""


class PeerError(ChannelError):
    """The peer answered a request with an error.

    A request's handler raises it to refuse with a code of its own; any other exception becomes code `internal`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
