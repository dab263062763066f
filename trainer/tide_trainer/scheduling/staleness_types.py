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
    """Waiting has free places, Ready is all occupied, Stuck is full with at least one reservation."""

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
class BuffersSnapshot:
    """Everything that `StalenessBuffers.restore` needs, as plain data."""

    eta: int
    batch_size: int
    version: int
    entries: tuple[EntryRecord, ...]
