"""CPU time of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Processes:
    """Some processes whose CPU time is one figure.

    Attributes:
        pids: all their threads count.
        with_children: so do their children, and theirs, those that have ended among them.
    """

    pids: tuple[int, ...]
    with_children: bool = False


def cpu_times_s(processes: Mapping[str, Processes]) -> dict[str, float]:
    """User and system seconds that each of them has used so far.

    Raises:
        FileNotFoundError: a process has ended.
    """
    families = _families() if any(one.with_children for one in processes.values()) else {}
    return {name: _cpu_s(one, families) for name, one in processes.items()}


def machine_busy_s() -> float:
    """CPU seconds that everything on this machine has used so far, and what its host took from it."""
    words = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def _cpu_s(processes: Processes, families: Mapping[int, list[int]]) -> float:
    if not processes.with_children:
        return sum(_used_s(_stat(pid), 2) for pid in processes.pids)
    used_s, left = 0.0, list(processes.pids)
    while left:
        pid = left.pop()
        left += families.get(pid, ())
        try:
            used_s += _used_s(_stat(pid), 4)
        except (FileNotFoundError, ProcessLookupError):
            if pid in processes.pids:
                raise
    return used_s


def _used_s(stat: list[str], num_fields: int) -> float:
    # utime, stime, and of children that were waited for cutime, cstime: fields 14 to 17 of proc(5), state being 3.
    return sum(map(int, stat[11 : 11 + num_fields])) * TICK_S


def _families() -> dict[int, list[int]]:
    """Children by parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.setdefault(int(_stat(int(name))[1]), []).append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
    return found


def _stat(pid: int) -> list[str]:
    """The fields from the state on: what stands before may hold blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
