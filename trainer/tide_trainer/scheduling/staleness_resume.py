"""Puts complete entries of an earlier life of the run into fresh buffers.

Source: StaleFlow section 4.2; that the bound and the capacity hold after a restart too is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from tide_trainer.scheduling.staleness import NoPlaceError, StalenessBuffers
from tide_trainer.scheduling.staleness_types import EntryRecord


def restore_complete(buffers: StalenessBuffers, records: Iterable[EntryRecord]) -> tuple[str, ...]:
    """Reserves and occupies each record in empty buffers; returns those without an admissible place.

    The trainer may begin at an older version than the records' buffers are of: batches that were trained after the last
    checkpoint are complete again. So places are given anew, the oldest version first (it has the fewest), among equals
    the earlier buffer first. Entries that had places in buffers of the same eta and batch size all find one.

    Args:
        buffers: empty, at the version that training goes on from.
        records: V_traj and former V_buf of each; `occupied` is not looked at.
    """
    left: list[str] = []
    for record in sorted(records, key=lambda one: (one.version, one.buffer)):
        try:
            if record.version > buffers.version:
                raise NoPlaceError(f"entry {record.entry!r}: version {record.version} is lost")
            buffers.reserve(record.entry, record.version)
        except NoPlaceError:
            left.append(record.entry)
        else:
            buffers.occupy(record.entry)
    return tuple(left)
