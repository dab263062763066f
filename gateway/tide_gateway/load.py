"""What all callers together may hold of this process: calls in flight, and the bytes of bodies and answers.

    call -> enter(owner) -> body: expect(its length), hold(each piece) -> answer: hold(its bytes) until taken -> leave()

Whatever does not fit is refused with 429 before it is read, and may be repeated. An owner may hold as much as it
leaves free: one flood gets half of a room, two get a third each, and there is always room for an owner that comes new.
Part of a room is kept for what is small, so that large bodies never keep turns out, nor calls that wait an `/end`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tide_sdk.errors import TideError

MIB = 1024 * 1024
SMALL_BYTES = 64 * 1024
"""A body up to this size may use all that is free."""
RETRY_AFTER_S = 1.0

Kind = Literal["waiting", "quick", "view"]


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How much all callers together may hold.

    Attributes:
        max_bytes: of bodies that are being read or worked on, and of large answers that are not taken yet.
        small_bytes: the part of it that is kept for bodies up to `SMALL_BYTES`.
        max_calls: the contract's calls in flight.
        quick_calls: the part of it that is kept for calls that do not wait for an environment.
        max_views: all other calls in flight.
    """

    max_bytes: int = 256 * MIB
    small_bytes: int = 64 * MIB
    max_calls: int = 8192
    quick_calls: int = 1024
    max_views: int = 256


class Room:
    """An amount that owners share.

    Args:
        total: all of it.
        kept: the part that only `small` takes may use.
    """

    def __init__(self, total: int, kept: int = 0) -> None:
        self._total = total
        self._kept = kept
        self._held: dict[str, int] = {}
        self.taken = 0

    def fits(self, owner: str, amount: int, *, small: bool) -> bool:
        """Whether the owner may take so much more now."""
        left = self._total - self.taken - amount - (0 if small else self._kept)
        return self._held.get(owner, 0) + amount <= left

    def take(self, owner: str, amount: int) -> None:
        """Take it; `fits` was asked."""
        self.taken += amount
        self._held[owner] = self._held.get(owner, 0) + amount

    def give_back(self, owner: str, amount: int) -> None:
        """Give back what was taken."""
        self.taken -= amount
        left = self._held[owner] - amount
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]


class Load:
    """The rooms of one process."""

    def __init__(self, limits: LoadLimits | None = None) -> None:
        limits = limits or LoadLimits()
        self.memory = Room(limits.max_bytes, limits.small_bytes)
        self.calls = Room(limits.max_calls, limits.quick_calls)
        self.views = Room(limits.max_views)


class Held:
    """What one call holds; whoever makes it calls `leave` when the call is over, however it ends."""

    __slots__ = ("_large", "_load", "_num_bytes", "_owner", "_room")

    def __init__(self, load: Load) -> None:
        self._load = load
        self._owner = ""
        self._room: Room | None = None
        self._num_bytes = 0
        self._large = False

    def enter(self, owner: str, kind: Kind) -> None:
        """Count the call, once it is known whose it is.

        Raises:
            TideError: 429, the owner or all owners together have too many in flight.
        """
        room = self._load.views if kind == "view" else self._load.calls
        if not room.fits(owner, 1, small=kind != "waiting"):
            words = "too many calls are in flight; call again"
            raise TideError("capacity", words, reason="calls", retry_after_s=RETRY_AFTER_S)
        room.take(owner, 1)
        self._owner, self._room = owner, room

    def expect(self, num_bytes: int) -> None:
        """Look whether a body or an answer of that length would fit, before any of it is there.

        Raises:
            TideError: 429, it would not.
        """
        self._large = self._num_bytes + num_bytes > SMALL_BYTES
        if not self._load.memory.fits(self._owner, num_bytes, small=not self._large):
            raise _no_memory()

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are there now.

        Raises:
            TideError: 429, they are more than fits; the caller drops them.
        """
        self._large = self._large or self._num_bytes + num_bytes > SMALL_BYTES
        if not self._load.memory.fits(self._owner, num_bytes, small=not self._large):
            raise _no_memory()
        self._load.memory.take(self._owner, num_bytes)
        self._num_bytes += num_bytes

    def leave(self) -> None:
        """Give everything back. Safe to repeat."""
        if self._num_bytes:
            self._load.memory.give_back(self._owner, self._num_bytes)
            self._num_bytes = 0
        if self._room is not None:
            self._room.give_back(self._owner, 1)
            self._room = None


def _no_memory() -> TideError:
    words = "bodies and answers of many calls are in memory; call again"
    return TideError("capacity", words, reason="memory", retry_after_s=RETRY_AFTER_S)
