"""Errors and frozen data of the staleness protocol."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StalenessError(Exception):
    """The staleness protocol was misused; the message names the entry and the remedy. State is unchanged."""


class UnknownEntryError(StalenessError):
    """The entry is not in any buffer: never reserved, already consumed, or deleted."""


class NoPlaceError(StalenessError):
    """No admissible place is free for the version; wait for a `consume` or use a newer version."""


class NotReadyError(StalenessError):
    """The next buffer is not Ready; ask `ready()` before `consume()`."""


class BufferState(StrEnum):
    """Ready has a whole batch of complete entries, Stuck is full and has not, Waiting is neither."""

    WAITING = "waiting"
    READY = "ready"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class BufferView:
    """One buffer as it stands: `version` is V_buf, the counts are entries (groups)."""

    version: int
    state: BufferState
    num_occupied: int
    num_reserved: int


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry as stored: its id, V_traj, V_buf, and whether it is occupied (complete) or only reserved."""

    entry: str
    version: int
    buffer: int
    occupied: bool


@dataclass(frozen=True, slots=True)
class EntryChanges:
    """What became of entries since the last time that it was asked for: for a store that follows the buffers.

    Attributes:
        put: entries that are new or stand elsewhere or otherwise now, as they are now.
        gone: entries that are in no buffer any more: consumed, deleted or surplus.
    """

    put: tuple[EntryRecord, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuffersSnapshot:
    """Everything that `StalenessBuffers.restore` needs, as plain data; `num_spare` is the redundancy of a buffer."""

    eta: int
    batch_size: int
    version: int
    entries: tuple[EntryRecord, ...]
    num_spare: int = 0
