"""What the parts of a run cost: CPU seconds and peak memory, read from the kernel."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tide_trainer.cluster import proc
from tide_trainer.cluster.local import LocalProcesses

PARTS = {"gateway": "gateway", "router": "router", "worker": "agents", "rollout": "engine", "actor": "training"}
"""First word of a child's name -> the part that it is; others count under their own name."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums since the start of the run.

    Attributes:
        cpu_s: CPU seconds by part; `main` is this process: scheduler, loop, view.
        peak_rss_bytes: highest resident memory by part.
    """

    cpu_s: dict[str, float]
    peak_rss_bytes: dict[str, int]


def usage(processes: LocalProcesses) -> Usage:
    """Reads the live children; what has ended already is left out. The gateway's children are the environments."""
    cpu_s: dict[str, float] = defaultdict(float)
    rss: dict[str, int] = defaultdict(int)
    for child in processes.children:
        part = part_of(child.name)
        own, below = [], []
        for info in child.members():
            (own if info.pid == child.pid or part != "gateway" else below).append(info)
        for name, infos in ((part, own), ("environment", below)):
            if infos:
                cpu_s[name] += _cpu_s(infos)
                rss[name] += sum(proc.peak_rss_bytes(info.pid) for info in infos)
    cpu_s["main"] = time.process_time()
    rss["main"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Usage(dict(cpu_s), dict(rss))


def part_of(child: str) -> str:
    """The part that a child of this name is."""
    return PARTS.get(child.split("-", 1)[0], child)


def _cpu_s(infos: Iterable[proc.ProcessInfo]) -> float:
    return sum(info.cpu_s for info in infos)
