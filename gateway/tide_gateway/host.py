"""Processes of this machine, as others name them for good: an id is used again, an id with its start is not."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process began, in the kernel's ticks since boot; None where there is none, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] in "ZX" else int(fields[19])
