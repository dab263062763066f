"""What a load found: counted, and in words where something is wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_WORDS = 20
"""Findings of each kind that a report prints; all are counted."""


@dataclass(slots=True)
class Report:
    """The account of a load.

    Attributes:
        num_tasks: tasks that the load has.
        started: tasks whose start was answered.
        finished: tasks that played all turns and whose account is right.
        infrastructure: typed ends that are not the task's own, by outcome, for example `failed(environment_lost)`.
        lost: tasks that a gateway does not know any more, or that got no answer in time.
        doubled: actions whose side effect happened more than once.
        wrong: every other breach of the contract, for example a repeated turn with another answer.
        turns: turns answered for the first time.
        repeated: turns, starts and ends that were asked for again and compared.
        pauses: pauses that took effect.
        retries: repeated tries, by cause.
        latency_s: seconds that each call took with all its tries, by call.
        pause_drift_s: the most by which a clock moved between a pause and its resume, in calls that took one try.
        wall_s: seconds that the load took.
    """

    num_tasks: int = 0
    started: int = 0
    finished: int = 0
    infrastructure: Counter[str] = field(default_factory=Counter[str])
    lost: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    turns: int = 0
    repeated: int = 0
    pauses: int = 0
    retries: Counter[str] = field(default_factory=Counter[str])
    latency_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    pause_drift_s: float = 0.0
    wall_s: float = 0.0

    @property
    def ended(self) -> int:
        """Tasks that are accounted for with a typed end, their own or the infrastructure's."""
        return self.finished + sum(self.infrastructure.values())

    @property
    def faults(self) -> int:
        """Findings that may never be, whatever was killed: lost, doubled, wrong."""
        return len(self.lost) + len(self.doubled) + len(self.wrong)

    def took(self, call: str, seconds: float) -> None:
        """Note how long a call took."""
        self.latency_s.setdefault(call, []).append(seconds)

    def details(self) -> dict[str, Any]:
        """Plain data for a results file."""
        return {
            "tasks": self.num_tasks,
            "finished": self.finished,
            "infrastructure": dict(self.infrastructure),
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "wrong": len(self.wrong),
            "findings": [*self.lost[:MAX_WORDS], *self.doubled[:MAX_WORDS], *self.wrong[:MAX_WORDS]],
            "turns": self.turns,
            "repeated_and_compared": self.repeated,
            "pauses": self.pauses,
            "pause_drift_s": round(self.pause_drift_s, 4),
            "retries": dict(self.retries),
            "latency_s": {call: _percentiles(values) for call, values in self.latency_s.items()},
            "wall_s": round(self.wall_s, 1),
        }

    def __str__(self) -> str:
        found = self.details()
        return ", ".join(f"{name} {value}" for name, value in found.items() if value or name in ("lost", "doubled"))


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": round(values[0], 4), "p99": round(values[0], 4)} if values else {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4), "max": round(max(values), 4)}
